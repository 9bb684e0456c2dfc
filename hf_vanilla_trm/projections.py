"""Linear maps by the fastest product of matrices at hand, and the places where their matrices are used directly.

PyTorch multiplies float32 matrices on a CPU with MKL, which uses half the width of the registers of a CPU that is not
Intel's. oneDNN, which PyTorch brings along for lower precisions and convolutions, uses all of it: on a CPU with AVX-512
it is twice as fast there, and as fast elsewhere.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

ONE_DNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
"""The operator that compiled models call; None in a build of PyTorch without it."""
HAS_WIDE_REGISTERS = torch.backends.cpu.get_cpu_capability() == "AVX512"
HAS_BFLOAT16 = HAS_WIDE_REGISTERS and ONE_DNN is not None and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
TYPICAL_ROWS = 256
"""For how many rows at once the best place of a packed weight's numbers is chosen."""
LEAST_WORK = {"by rows": 2**21, "by columns": 2**19}
"""Multiplications from which on oneDNN's longer way to its kernel pays. It copies a weight that is stored by rows."""
_PLAIN_TYPES = (Tensor, nn.Parameter)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`inputs @ weight.T + bias`, as `torch.nn.functional.linear`, and like that differentiable any number of times.

    Args:
        inputs: `(..., d_in)`.
        weight: `(d_out, d_in)`.
        bias: `(d_out,)` or None.

    Returns:
        `(..., d_out)`.
    """
    if not suits_one_dnn(inputs, weight, bias):
        return nn.functional.linear(inputs, weight, bias)
    if torch.is_grad_enabled() and any(factor.requires_grad for factor in (inputs, weight, bias) if factor is not None):
        outputs: Tensor = _Linear.apply(inputs, weight, bias)
        return outputs
    return _multiply(inputs, weight, bias)


def suits_one_dnn(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `linear` will use oneDNN: where it can, and in sizes where that pays."""
    if torch.compiler.is_compiling():
        return False  # before sizes are compared, which would bind the graph to one side of the bound
    least = LEAST_WORK["by columns" if weight.stride(0) == 1 else "by rows"]
    return inputs.numel() * weight.size(0) >= least and _one_dnn_can(inputs, weight, bias)


def _one_dnn_can(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether these are float32 tensors on a CPU with AVX-512, and nobody watches, replaces or records PyTorch's
    operators, or has disabled `torch.backends.mkldnn`.

    In bfloat16 PyTorch uses oneDNN by itself; the direct way is a little faster where no gradient is wanted.
    """
    factors = (inputs, weight) if bias is None else (inputs, weight, bias)
    return (
        HAS_WIDE_REGISTERS
        and ONE_DNN is not None
        and (inputs.dtype == torch.float32 or (inputs.dtype == torch.bfloat16 and _bfloat16_pays()))
        and all(
            factor.dtype == inputs.dtype and factor.device.type == "cpu" and type(factor) in _PLAIN_TYPES
            for factor in factors
        )
        and weight.dim() == 2
        and inputs.dim() > 1
        and inputs.size(-1) == weight.size(1)
        and 0 not in weight.stride()  # an expanded one, as the gradient of a sum is
        and bool(torch.backends.mkldnn.enabled)
        and not is_watched()
    )


def is_watched() -> bool:
    """Whether someone watches, replaces or records PyTorch's operators in this thread."""
    return (
        torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or bool(torch._C._len_torch_dispatch_stack())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def _bfloat16_pays() -> bool:
    return HAS_BFLOAT16 and not torch.is_grad_enabled()


def _multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`inputs @ weight.T + bias` by oneDNN."""
    assert ONE_DNN is not None
    outputs: Tensor = ONE_DNN(inputs, weight, bias, "none", [], "")
    return outputs


class _Linear(torch.autograd.Function):
    """oneDNN's product and its gradients."""

    @staticmethod
    def forward(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Shapes as in `linear`."""
        return _multiply(inputs, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep of the two factors what a gradient needs."""
        of_inputs, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(inputs[0] if of_weight else None, inputs[1] if of_inputs else None)

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients are linear maps of the same kind, so that they have gradients of their own."""
        inputs, weight = ctx.saved_tensors
        grad_inputs = linear(grad_outputs, weight.t()) if weight is not None else None
        by_rows = grad_outputs.flatten(0, -2)
        grad_weight = sum_of_outer_products(by_rows, inputs.flatten(0, -2)) if inputs is not None else None
        grad_bias = by_rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        return grad_inputs, grad_weight, grad_bias


def sum_of_outer_products(left: Tensor, right: Tensor) -> Tensor:
    """`left.T @ right` for `(rows, m)` and `(rows, n)`: `(m, n)`.

    oneDNN wants the rows of its first factor one behind the other, which is a copy here; the smaller one is copied.
    """
    if not suits_one_dnn(left.t(), right.t()):
        return left.t() @ right
    if left.size(1) <= right.size(1):
        return linear(left.t(), right.t())
    return linear(right.t(), left.t()).t()


class Linear(nn.Linear):
    """`nn.Linear` by way of `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Map `(..., in_features)` to `(..., out_features)`."""
        return linear(input, self.weight, self.bias)


class PackedLinear:
    """A linear map for inference, its weight copied to where oneDNN's kernel would move it at every call.

    Args:
        weight: `(d_out, d_in)`, read now.
        bias: `(d_out,)` or None.
        relu: Whether ReLU follows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        self.bias, self.attribute = bias, "relu" if relu else "none"

    def __call__(self, inputs: Tensor) -> Tensor:
        """Map `(..., d_in)` to `(..., d_out)`."""
        assert ONE_DNN is not None
        outputs: Tensor = ONE_DNN(inputs, self.weight, self.bias, self.attribute, [], "")
        return outputs

    @staticmethod
    def suits(weight: Tensor, bias: Tensor | None) -> bool:
        """Whether oneDNN can compute the map here and now."""
        return not torch.is_grad_enabled() and _one_dnn_can(weight.detach(), weight, bias)


def has_plain_call(module: nn.Module) -> bool:
    """Whether a call of the module is one of its class's forward and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" not in vars(module) and not any(hooks) and not hasattr(module, "_hf_hook")


def is_plain(module: nn.Module) -> bool:
    """Whether `x @ module.weight.T + module.bias` is what a call of the module computes, with nothing around it.

    It is not where a library has put something of its own in the place of the module, its weight or its call: an
    adapter, a quantised or divided weight, a hook.
    """
    if type(module) not in (nn.Linear, Linear) or not has_plain_call(module):
        return False
    weight = module.weight
    is_whole = weight.shape == (module.out_features, module.in_features)
    return is_whole and type(weight) is nn.Parameter and weight.device.type != "meta"
