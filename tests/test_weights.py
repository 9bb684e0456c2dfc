"""The moving average of weights, and optimizer states made whole."""

import copy

import pytest
import torch

from tests.conftest import tiny_model
from training.weights import TrainedWeights, load_optimizer_state, whole_optimizer_state


def changed(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


@pytest.mark.parametrize("mode", ["none", "all"])
def test_the_average_is_the_closed_formula(mode):
    model = tiny_model(parameter_sharing=mode)
    changed(model, 1.0)
    weights = TrainedWeights(model, whole=copy.deepcopy(model), ema_decay=0.6, average=None)
    expected = 1.0
    for update, value in enumerate((3.0, -2.0, 5.0, 8.0, 1.0), start=1):
        changed(model, value)
        weights.update_average(update)
        decay = min(0.6, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * value
    published = weights.as_published()
    assert published is not model
    for parameter in published.parameters():
        torch.testing.assert_close(parameter, torch.full_like(parameter, expected))
    for parameter in weights.as_trained().parameters():
        torch.testing.assert_close(parameter, torch.ones_like(parameter))
    assert weights.whole_average().keys() == dict(model.named_parameters()).keys()


def test_without_an_average_the_model_itself_is_published():
    model = tiny_model()
    weights = TrainedWeights(model, whole=None, ema_decay=0, average=None)
    weights.update_average(1)
    assert weights.as_published() is weights.as_trained() is model
    assert weights.whole_average() is None


def test_an_average_continues_where_it_was():
    model = tiny_model()
    first = TrainedWeights(model, whole=copy.deepcopy(model), ema_decay=0.5, average=None)
    changed(model, 2.0)
    first.update_average(1)
    second = TrainedWeights(model, whole=copy.deepcopy(model), ema_decay=0.5, average=first.whole_average())
    for weights in (first, second):
        weights.update_average(2)
    for name, tensor in first.whole_average().items():
        assert torch.equal(tensor, second.whole_average()[name])


def test_the_state_of_an_optimizer_survives():
    def optimizer_of(model):
        return torch.optim.Adam(model.parameters(), lr=0.1, fused=True)

    model = tiny_model()
    optimizer = optimizer_of(model)
    model(input_ids=torch.tensor([[5, 6, 2]]), labels=torch.tensor([[7, 2]])).loss.backward()
    optimizer.step()
    twin = copy.deepcopy(model)
    other = optimizer_of(twin)
    load_optimizer_state(other, copy.deepcopy(whole_optimizer_state(optimizer)))
    for of in (model, twin):
        of.zero_grad()
        of(input_ids=torch.tensor([[9, 6, 2]]), labels=torch.tensor([[8, 2]])).loss.backward()
    optimizer.step()
    other.step()
    for parameter, expected in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_an_optimizer_keeps_its_own_settings_beside_another_state():
    """Those of a continued run may have been changed."""
    model = tiny_model()
    other = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.999), eps=1e-6)
    load_optimizer_state(other, whole_optimizer_state(torch.optim.Adam(model.parameters(), lr=0.2)))
    (group,) = other.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.1, (0.8, 0.999), 1e-6)
