"""Cross entropy with label smoothing (section 5.4), from hidden states and the output projection, without ever holding
all logits.

With a vocabulary of 37,000 the logits of one training batch are larger than everything else together, and reading them
back from memory takes longer than computing them. So the sum over positions is taken in chunks small enough to stay in
cache, and each chunk leaves its share of the gradient behind at once: three matrix products a chunk, as many as the
plain computation needs, and nothing is computed twice.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Elements of the logits in one chunk. On a CPU a chunk should stay in the second- or third-level cache, on a GPU it
# should fill the device.
CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}


def cross_entropy_sum(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Sum over real targets of -(1 - eps) log p(y) - eps mean_v log p(v): smoothing spread over all V classes, as in
    PyTorch.

    Args:
        logits: `(..., vocab_size)`.
        labels: `(...)`; -100 marks positions without a target.
        label_smoothing: eps; the paper's is 0.1.

    Returns:
        A scalar in float32 or better; 0 where there is no target at all.
    """
    logits = logits.flatten(0, -2)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return nn.functional.cross_entropy(
        logits, labels.flatten(), reduction="sum", ignore_index=-100, label_smoothing=label_smoothing
    )


def projected_cross_entropy_sum(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, label_smoothing: float = 0.0
) -> Tensor:
    """`cross_entropy_sum` of `hidden_states @ weight.T + bias`, in chunks and over real targets only.

    Args:
        hidden_states: `(batch, target_length, d_model)`.
        weight: `(vocab_size, d_model)`.
        bias: `(vocab_size,)` or None.
        labels: `(batch, target_length)`; -100 marks positions without a target, which cost nothing here.
        label_smoothing: eps.

    Returns:
        The same scalar and the same gradients as the plain computation, up to the order of the sums.
    """
    has_target = labels != -100
    targets, hidden_states = labels[has_target], hidden_states[has_target]  # (num_targets,), (num_targets, d_model)
    if torch.is_autocast_enabled(hidden_states.device.type):
        dtype = torch.get_autocast_dtype(hidden_states.device.type)
    else:
        dtype = hidden_states.dtype
    loss: Tensor = _ProjectedCrossEntropySum.apply(
        hidden_states, weight, bias, targets, label_smoothing, dtype, torch.is_grad_enabled()
    )
    return loss


class _ProjectedCrossEntropySum(torch.autograd.Function):
    """The chunked sum; its forward also computes the gradients, which its backward only scales.

    The matrix products run in `dtype`; the softmax and the sums over chunks in float32 or better.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        label_smoothing: float,
        dtype: torch.dtype,
        with_gradients: bool,
    ) -> Tensor:
        """Loss of `hidden_states` `(num_targets, d_model)` and `targets` `(num_targets,)`.

        `with_gradients` says whether there will be a backward: in here autograd is always off, and
        `ctx.needs_input_grad` goes by the tensors alone.
        """
        device, sum_dtype = hidden_states.device.type, torch.promote_types(dtype, torch.float32)
        needs_hidden, needs_weight, needs_bias = (with_gradients and needed for needed in ctx.needs_input_grad[:3])
        grad_hidden = torch.empty_like(hidden_states) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and needs_bias else None
        loss = hidden_states.new_zeros((), dtype=sum_dtype)
        rows = max(1, CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // weight.size(0))
        with torch.autocast(device, enabled=False):
            projection = weight.to(dtype)
            for start in range(0, targets.size(0), rows):
                chunk = slice(start, start + rows)
                hidden = hidden_states[chunk].to(dtype)
                logits = (hidden @ projection.t()).to(sum_dtype)  # (rows, vocab_size)
                if bias is not None:
                    logits += bias
                chunk_loss, gradient = _loss_and_gradient(logits, targets[chunk], label_smoothing)
                loss += chunk_loss
                if grad_bias is not None:
                    grad_bias += gradient.sum(dim=0)
                gradient = gradient.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[chunk] = gradient @ projection
                if grad_weight is not None:
                    grad_weight += gradient.t() @ hidden
        # Autograd wants each gradient in its tensor's own precision.
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None and bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that forward left behind."""
        # `grad_loss` is a scalar and does not promote; cast to a gradient's float16, a loss scale would be infinite.
        gradients = (None if g is None else g * grad_loss for g in ctx.saved_tensors)
        return (*gradients, None, None, None, None)


def _loss_and_gradient(logits: Tensor, targets: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """The summed loss of one chunk and its gradient by the logits, softmax - (1 - eps) onehot(y) - eps / V."""
    log_probs, targets = logits.log_softmax(dim=-1), targets.unsqueeze(1)
    loss = (label_smoothing - 1) * log_probs.gather(1, targets).sum()
    if label_smoothing:
        loss -= label_smoothing * log_probs.mean(dim=-1).sum()
    gradient = log_probs.exp_()
    if label_smoothing:
        gradient -= label_smoothing / logits.size(-1)
    gradient.scatter_add_(1, targets, gradient.new_full((1, 1), label_smoothing - 1).expand_as(targets))
    return loss, gradient
