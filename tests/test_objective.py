"""An update is the mean over all target tokens of the effective batch, whatever it is split into."""

import copy

import pytest
import torch
from accelerate import Accelerator

from tests.conftest import tiny_model
from tests.launch import TWO_RANKS, run
from tests.updates import LENGTHS, make_rows, update
from training.objective import accumulate_gradient, count_targets

SPLITS = {
    "one batch": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "eight batches": [[row] for row in range(8)],
    "uneven batches": [[0, 1, 2, 3, 4], [5], [6, 7]],
}


def weights(split, *, label_smoothing, max_grad_norm=0.0):
    model = tiny_model()
    update(model, Accelerator(cpu=True), split, label_smoothing=label_smoothing, max_grad_norm=max_grad_norm)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("split", ["eight batches", "uneven batches"])
def test_accumulated_batches_give_the_weights_of_one_batch(split, label_smoothing, max_grad_norm):
    options = {"label_smoothing": label_smoothing, "max_grad_norm": max_grad_norm}
    start = torch.cat([parameter.detach().flatten() for parameter in tiny_model().parameters()])
    expected = weights(SPLITS["one batch"], **options)
    assert (expected - start).abs().max() > 1e-3, "the update must be large beside the tolerance"
    torch.testing.assert_close(weights(SPLITS[split], **options), expected, rtol=0, atol=1e-6)


def test_the_gradient_is_that_of_the_mean_over_tokens_computed_with_torch_alone():
    model, reference = tiny_model(), tiny_model()
    batches = make_rows([[0, 1, 2], [3, 4, 5, 6, 7]])
    accelerator = Accelerator(cpu=True)
    count = count_targets(batches, accelerator)
    assert int(count) == sum(target for _, target in LENGTHS)
    loss = accumulate_gradient(model.train(), batches, count, accelerator=accelerator, label_smoothing=0.1)

    losses = []
    for batch in batches:
        logits = reference(**batch).logits
        flat = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1, reduction="none"
        )
        losses.append(flat[batch["labels"].flatten() != -100])
    mean = torch.cat(losses).mean()
    mean.backward()
    torch.testing.assert_close(loss, mean.detach())
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_the_mean_of_the_batches_means_is_another_update():
    """Otherwise the sentences could not tell a right normalisation from a wrong one."""
    batches, model = make_rows(SPLITS["uneven batches"]), tiny_model()
    token_mean = torch.zeros(())
    for batch in batches:
        token_mean += model(**batch, num_items_in_batch=count_targets(batches, Accelerator(cpu=True))).loss.detach()
    mean_of_means = torch.stack([model(**batch).loss.detach() for batch in batches]).mean()
    assert (token_mean - mean_of_means).abs() > 0.01


def test_a_gradient_already_there_is_added_to():
    model = tiny_model().train()
    batches, accelerator = make_rows([[0, 1]]), Accelerator(cpu=True)
    count = count_targets(batches, accelerator)
    options = {"accelerator": accelerator, "label_smoothing": 0.0}
    accumulate_gradient(model, batches, count, **options)
    once = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    accumulate_gradient(model, batches, count, **options)
    for gradient, parameter in zip(once, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.0, 0.05], ids=["unclipped", "clipped"])
def test_two_ranks_with_uneven_token_counts_give_the_weights_of_one_batch(tmp_path, clip):
    run([*TWO_RANKS, "tests.updates", tmp_path, clip])
    got = torch.load(tmp_path / "update.pt", weights_only=True)
    assert got["num_processes"] == 2
    assert got["all_reduces"] == 1, "one all-reduce of the gradient per update, whatever the number of batches"
    expected = weights(SPLITS["one batch"], label_smoothing=0.1, max_grad_norm=clip)
    torch.testing.assert_close(got["weights"], expected, rtol=0, atol=1e-6)
