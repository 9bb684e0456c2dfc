"""Dropout by what it is defined to be: the share of zeros, the scale of the rest, the same elements in the gradient."""

import pytest
import torch

from hf_vanilla_trm.dropout import Dropout, dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.75])
def test_elements_are_dropped_at_the_rate_and_the_others_make_up_for_it(dtype, rate):
    torch.manual_seed(0)
    inputs = torch.ones(401, 1003, dtype=dtype).requires_grad_()  # a number that four does not divide
    outputs = dropout(inputs, rate)
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs)
    assert torch.equal(gradient, outputs)
    kept = outputs[outputs != 0].detach()
    assert kept.unique().numel() == 1
    assert float(kept[0]) == pytest.approx(1 / (1 - rate), rel=1e-4 if dtype != torch.bfloat16 else 4e-3)
    deviation = (rate * (1 - rate) / outputs.numel()) ** 0.5
    assert 1 - kept.numel() / outputs.numel() == pytest.approx(rate, abs=5 * deviation)
    for dim in (0, 1):  # no row or column is favoured
        shares = (outputs == 0).double().mean(dim)
        assert float(shares.std()) == pytest.approx((rate * (1 - rate) / outputs.size(dim)) ** 0.5, rel=0.1)


def test_neighbours_are_dropped_independently():
    """Lanes of one random number: how often both of two neighbours at any distance up to 8 are dropped."""
    torch.manual_seed(0)
    dropped = (dropout(torch.ones(2_000_000), 0.3) == 0).double()
    for distance in range(1, 9):
        both = float((dropped[distance:] * dropped[:-distance]).mean())
        assert both == pytest.approx(0.09, abs=5 * (0.09 * 0.91 / 2e6) ** 0.5)


def test_the_mask_follows_from_pytorchs_generator_alone():
    inputs = torch.randn(3, 7)
    torch.manual_seed(1)
    first, second = dropout(inputs, 0.5), dropout(inputs, 0.5)
    torch.manual_seed(1)
    assert torch.equal(dropout(inputs, 0.5), first)
    assert not torch.equal(second, first)


def test_without_training_or_rate_nothing_is_dropped_and_nothing_drawn():
    inputs, state = torch.randn(3, 7), torch.get_rng_state()
    assert dropout(inputs, 0.0) is inputs
    assert dropout(inputs, 0.5, training=False) is inputs
    assert Dropout(0.5).eval()(inputs) is inputs
    assert torch.equal(torch.get_rng_state(), state)
    assert Dropout(0.5)(torch.ones(100)).count_nonzero() < 100


def test_a_rate_close_to_one_keeps_almost_nothing():
    torch.manual_seed(0)
    outputs = dropout(torch.ones(1_000_000), 1 - 1e-7)
    assert outputs.isfinite().all()
    assert outputs.count_nonzero() < 100


def test_gradients_of_functions_can_be_taken_through_it():
    inputs = torch.randn(5)
    torch.manual_seed(0)
    expected = dropout(torch.ones(5), 0.5)
    torch.manual_seed(0)
    assert torch.equal(torch.func.grad(lambda values: dropout(values, 0.5).sum())(inputs), expected)
