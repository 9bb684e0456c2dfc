"""Linear maps: equal to PyTorch's own whichever product computes them; and when a map's matrix may be used in its
module's place: not where someone has changed the module.
"""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, vmap
from torch.utils.flop_counter import FlopCounterMode

from hf_vanilla_trm import projections
from hf_vanilla_trm.projections import Linear, PackedLinear, is_plain, linear, sum_of_outer_products

BATCH, LENGTH, WIDTH, NEW_WIDTH = 3, 7, 10, 4


class Calls:
    """oneDNN's product, counted."""

    def __init__(self):
        self.number = 0

    def __call__(self, *args):
        self.number += 1
        return torch.ops.mkldnn._linear_pointwise(*args)


@pytest.fixture
def one_dnn(monkeypatch):
    """The product of oneDNN wherever it can be used: on this CPU, and for sizes of any kind."""
    calls = Calls()
    monkeypatch.setattr(projections, "ONE_DNN", calls)
    monkeypatch.setattr(projections, "HAS_WIDE_REGISTERS", True)
    monkeypatch.setattr(projections, "LEAST_WORK", {"by rows": 0, "by columns": 0})
    return calls


def factors(inputs_shape=(BATCH, LENGTH, WIDTH), **options):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, **options).requires_grad_()

    return draw(*inputs_shape), draw(NEW_WIDTH, WIDTH), draw(NEW_WIDTH)


@pytest.mark.parametrize("shape", [(BATCH, LENGTH, WIDTH), (LENGTH, WIDTH), (1, WIDTH), (2, 3, 5, WIDTH)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("new_width", [4, 13])
def test_outputs_and_gradients_are_those_of_the_plain_product(one_dnn, shape, with_bias, new_width):
    """In float64, where the other is computed: of inputs, weight and bias, for more and fewer outputs than inputs."""
    torch.manual_seed(0)
    inputs, weight, bias = torch.randn(shape), torch.randn(new_width, WIDTH), torch.randn(new_width)
    leaves = [tensor.requires_grad_() for tensor in (inputs, weight, *([bias] if with_bias else []))]
    direction = torch.randn(*shape[:-1], new_width)
    outputs = linear(*leaves)
    gradients = torch.autograd.grad(outputs, leaves, direction)
    assert one_dnn.number == 3  # forward, by the inputs, by the weight
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = exact[0] @ exact[1].T + (exact[2] if with_bias else 0)
    torch.testing.assert_close(outputs, expected.float(), rtol=1e-5, atol=1e-5)
    for own, theirs in zip(gradients, torch.autograd.grad(expected, exact, direction.double()), strict=True):
        torch.testing.assert_close(own, theirs.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("new_width", [4, 13])
def test_the_gradient_of_a_sum_is_right(one_dnn, new_width):
    """It is one number, seen as a matrix."""
    torch.manual_seed(0)
    inputs, weight = torch.randn(LENGTH, WIDTH, requires_grad=True), torch.randn(new_width, WIDTH, requires_grad=True)
    linear(inputs, weight).sum().backward()
    torch.testing.assert_close(weight.grad, inputs.detach().sum(0).expand(new_width, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.grad, weight.detach().sum(0).expand(LENGTH, -1), rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_keeps_no_inputs(one_dnn):
    inputs, weight, _ = factors()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda packed: packed):
        linear(inputs, weight.detach())
    assert kept == [weight.shape]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_forward_mode_gradients_are_pytorchs_own(one_dnn):
    inputs, weight, _ = (tensor.detach() for tensor in factors())
    with forward_ad.dual_level():
        outputs = linear(forward_ad.make_dual(inputs, torch.ones_like(inputs)), weight)
        tangent = forward_ad.unpack_dual(outputs).tangent
    torch.testing.assert_close(tangent, weight.sum(1).expand_as(tangent))
    assert one_dnn.number == 0


def test_only_the_gradients_that_are_needed_are_computed(one_dnn):
    inputs, weight, bias = factors()
    linear(inputs.detach(), weight, bias).sum().backward()
    assert one_dnn.number == 2
    linear(inputs, weight.detach(), bias.detach()).sum().backward()
    assert one_dnn.number == 4
    with torch.no_grad():
        assert not linear(inputs, weight, bias).requires_grad
    assert not linear(inputs.detach(), weight.detach()).requires_grad


def test_it_can_be_differentiated_twice(one_dnn):
    """The penalty of a gradient's norm has the gradient that PyTorch's own product gives it."""

    def of_penalty(function):
        inputs, weight, bias = factors()
        loss = function(inputs, weight, bias).pow(3).sum()
        gradients = torch.autograd.grad(loss, (inputs, weight), create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), (inputs, weight, bias))

    for own, theirs in zip(of_penalty(linear), of_penalty(nn.functional.linear), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-3)
    assert one_dnn.number > 3


@pytest.mark.parametrize(("rows", "left", "right"), [(7, 5, 11), (7, 11, 5), (1, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outer_products_are_summed_over_rows(one_dnn, rows, left, right, dtype):
    torch.manual_seed(0)
    first, second = torch.randn(rows, left, dtype=dtype), torch.randn(rows, right, dtype=dtype)
    expected = torch.stack([torch.outer(one, other) for one, other in zip(first, second, strict=True)]).sum(0)
    torch.testing.assert_close(sum_of_outer_products(first, second), expected)
    assert one_dnn.number == (dtype == torch.float32)


def test_weights_and_inputs_may_be_stored_in_any_order(one_dnn):
    inputs, weight, bias = (tensor.detach() for tensor in factors())
    by_columns, expected = weight.t().contiguous().t(), inputs @ weight.T + bias
    torch.testing.assert_close(linear(inputs, by_columns, bias), expected)
    spread = torch.stack((inputs, inputs), dim=-1)[..., 0]
    torch.testing.assert_close(linear(spread.transpose(0, 1), weight, bias), expected.transpose(0, 1))
    assert one_dnn.number == 2


class Doubled(torch.Tensor):
    """A weight that is not what it seems, as a quantised one."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_subclass(cls, weight)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return 2 * nn.functional.linear(args[0], args[1].as_subclass(torch.Tensor), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})


def autocast(inputs, weight):
    with torch.autocast("cpu", torch.bfloat16):
        outputs = linear(inputs, weight)
    assert outputs.dtype == torch.bfloat16
    return outputs.float()


def counted(inputs, weight):
    with FlopCounterMode(display=False) as counter:
        outputs = linear(inputs, weight)
    assert counter.get_total_flops() == 2 * BATCH * LENGTH * WIDTH * NEW_WIDTH
    return outputs


def without_one_dnn(inputs, weight):
    torch.backends.mkldnn.enabled = False
    try:
        return linear(inputs, weight)
    finally:
        torch.backends.mkldnn.enabled = True


WATCHED = {
    "autocast": autocast,
    "a compiled function": torch.compile(linear, backend="eager"),
    "a trace": lambda *factors: torch.jit.trace(linear, factors, check_trace=False)(*factors),
    "a counter of operations": counted,
    "vmap": vmap(linear, in_dims=(0, None)),
    "disabled oneDNN": without_one_dnn,
    "a subclass": lambda inputs, weight: linear(inputs, Doubled(weight)) / 2,
    "float64": lambda inputs, weight: linear(inputs.double(), weight.double()).float(),
    "bfloat16": lambda inputs, weight: linear(inputs.bfloat16(), weight.bfloat16()).float(),
    "a vector": lambda inputs, weight: torch.stack([linear(row, weight) for row in inputs[0]]).expand(BATCH, -1, -1),
}


@pytest.mark.parametrize("how", WATCHED)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_where_operators_are_watched_or_replaced_they_are_pytorchs_own(one_dnn, how):
    inputs, weight, _ = (tensor.detach() for tensor in factors())
    outputs = WATCHED[how](inputs, weight)
    assert one_dnn.number == 0
    torch.testing.assert_close(outputs[0], inputs[0] @ weight.T, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_a_packed_map_is_the_map(dtype, with_bias, relu):
    if not projections.HAS_BFLOAT16:
        pytest.skip("this CPU has not the registers, or this build of PyTorch not oneDNN")
    inputs, weight, bias = (tensor.detach().to(dtype) for tensor in factors())
    bias = bias if with_bias else None
    with torch.no_grad():
        assert PackedLinear.suits(weight, bias)
    packed = PackedLinear(weight, bias, relu=relu)
    expected = inputs.double() @ weight.double().T + (0 if bias is None else bias.double())
    expected = expected.relu() if relu else expected
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for rows in (inputs, inputs[:1, :1], inputs.repeat(40, 1, 1)):
        of_rows = expected[: len(rows), : rows.size(1)].repeat(len(rows) // len(expected) or 1, 1, 1)
        torch.testing.assert_close(packed(rows).double(), of_rows, rtol=tolerance, atol=tolerance)


def test_nothing_is_packed_where_operators_are_watched_or_gradients_wanted():
    _, weight, bias = (tensor.detach() for tensor in factors())
    assert not PackedLinear.suits(weight, bias)
    with torch.no_grad():
        assert not PackedLinear.suits(weight.double(), bias.double())
        assert not PackedLinear.suits(Doubled(weight), bias)
        with torch.autocast("cpu", torch.bfloat16):
            assert not PackedLinear.suits(weight, bias)
        with FlopCounterMode(display=False):
            assert not PackedLinear.suits(weight, bias)


def test_small_products_are_left_to_pytorch(one_dnn, monkeypatch):
    inputs, weight, _ = (tensor.detach() for tensor in factors())
    work = BATCH * LENGTH * WIDTH * NEW_WIDTH
    monkeypatch.setattr(projections, "LEAST_WORK", {"by rows": work + 1, "by columns": work})
    linear(inputs, weight)
    assert one_dnn.number == 0
    linear(inputs, weight.t().contiguous().t())
    assert one_dnn.number == 1


def test_a_module_computes_as_torchs_own_and_has_its_state(one_dnn):
    own, theirs = Linear(WIDTH, NEW_WIDTH), nn.Linear(WIDTH, NEW_WIDTH)
    own.load_state_dict(theirs.state_dict())
    inputs = torch.randn(BATCH, LENGTH, WIDTH)
    torch.testing.assert_close(own(inputs), theirs(inputs))
    assert one_dnn.number == 1
    other = {name: 2 * tensor for name, tensor in own.state_dict().items()}
    torch.testing.assert_close(functional_call(own, other, (inputs,)), 2 * theirs(inputs))


CHANGES = {
    "a hook": lambda module: module.register_forward_hook(lambda module, args, output: output + 1),
    "a hook before": lambda module: module.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "a call of its own": lambda module: setattr(module, "forward", lambda inputs: inputs[..., :4] * 3),
    "a parametrised weight": nn.utils.parametrizations.weight_norm,
    "a part of a weight": lambda module: setattr(module, "weight", nn.Parameter(module.weight[:3].detach())),
    "a weight without storage": lambda module: module.to("meta"),
}


@pytest.mark.parametrize("kind", [nn.Linear, Linear])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_is_not_plain(change, kind):
    module = kind(6, 4)
    assert is_plain(module)
    CHANGES[change](module)
    assert not is_plain(module)
