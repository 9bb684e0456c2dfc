"""The chunked loss against PyTorch's own cross entropy on full logits, in value and gradient."""

import math

import pytest
import torch

from hf_vanilla_trm import loss as loss_module
from hf_vanilla_trm.loss import cross_entropy_sum, projected_cross_entropy_sum
from tests.conftest import tiny_model


def inputs(bias, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(3, 5, 6, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(11, 6, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(11, generator=generator, dtype=dtype).requires_grad_() if bias else None
    labels = torch.randint(0, 11, (3, 5), generator=generator)
    labels[1, 2:] = -100
    return hidden_states, weight, bias, labels


@pytest.mark.parametrize("chunk_elements", [1, 30, 10_000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_chunks_give_the_loss_and_gradients_of_full_logits(monkeypatch, chunk_elements, bias, label_smoothing):
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", chunk_elements)
    monkeypatch.setattr(loss_module, "LEAST_ROWS", 1)
    hidden_states, weight, bias, labels = inputs(bias)
    leaves = [tensor for tensor in (hidden_states, weight, bias) if tensor is not None]
    ours = projected_cross_entropy_sum(hidden_states, weight, bias, labels, label_smoothing=label_smoothing)
    logits = torch.nn.functional.linear(hidden_states, weight, bias)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum", label_smoothing=label_smoothing
    )
    torch.testing.assert_close(ours, expected)
    for actual, wanted in zip(
        torch.autograd.grad(3 * ours, leaves), torch.autograd.grad(3 * expected, leaves), strict=True
    ):
        torch.testing.assert_close(actual, wanted)


def test_smoothing_spreads_epsilon_over_all_classes():
    logits, label, epsilon = torch.tensor([[1.0, 2.0, 4.0]]), 1, 0.3
    log_total = math.log(sum(math.exp(value) for value in (1, 2, 4)))
    log_probs = [value - log_total for value in (1, 2, 4)]
    expected = -(1 - epsilon) * log_probs[label] - epsilon * sum(log_probs) / 3
    assert cross_entropy_sum(logits, torch.tensor([label]), label_smoothing=epsilon).item() == pytest.approx(expected)


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_only_the_gradients_that_are_needed_are_computed(needed):
    hidden_states, weight, _, labels = inputs(bias=False)
    hidden_states.requires_grad_(needed[0])
    weight.requires_grad_(needed[1])
    projected_cross_entropy_sum(hidden_states, weight, None, labels).backward()
    assert (hidden_states.grad is not None, weight.grad is not None) == needed


def test_under_autocast_the_loss_stays_close_to_full_precision_and_gradients_keep_their_dtype():
    hidden_states, weight, bias, labels = inputs(bias=True, dtype=torch.float32)
    expected = projected_cross_entropy_sum(hidden_states, weight, bias, labels, label_smoothing=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        ours = projected_cross_entropy_sum(hidden_states, weight, bias, labels, label_smoothing=0.1)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(expected.item(), rel=0.02)
    ours.backward()
    assert {tensor.grad.dtype for tensor in (hidden_states, weight, bias)} == {torch.float32}


def test_the_training_loss_of_the_model_equals_the_loss_of_its_logits(batch):
    model = tiny_model(output_bias=True)
    logits = model(**batch).logits
    model.train()
    outputs = model(**batch, label_smoothing=0.1)
    assert outputs.logits is None
    real = batch["labels"] != -100
    expected = torch.nn.functional.cross_entropy(logits[real], batch["labels"][real], label_smoothing=0.1)
    torch.testing.assert_close(outputs.loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model(**batch, return_logits=True).logits, logits)
    total = model(**batch, label_smoothing=0.1, num_items_in_batch=1).loss
    torch.testing.assert_close(total, expected * real.sum(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padding_changes_neither_loss_nor_gradients(batch, training, label_smoothing, dtype):
    model = tiny_model(output_bias=True).to(dtype).train(training)
    results = []
    for width in (8, 64):
        padded = {
            name: torch.nn.functional.pad(tensor, (0, width - tensor.size(1)), value=fill)
            for (name, tensor), fill in zip(batch.items(), (1, 0, -100), strict=True)
        }
        loss = model(**padded, label_smoothing=label_smoothing).loss
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    (short_loss, *short_gradients), (long_loss, *long_gradients) = results
    torch.testing.assert_close(short_loss, long_loss, rtol=0, atol=1e-6)
    for short, long in zip(short_gradients, long_gradients, strict=True):
        torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_batchs_loss_is_the_mean_over_all_its_tokens_and_not_over_its_sentences(batch, label_smoothing):
    model, sums = tiny_model(), []
    for row, target_length in enumerate((5, 2, 4)):
        alone = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        sums.append(model(**alone, label_smoothing=label_smoothing).loss.item() * target_length)
    for training in (False, True):
        loss = model.train(training)(**batch, label_smoothing=label_smoothing).loss.item()
        assert loss == pytest.approx(sum(sums) / (5 + 2 + 4), rel=1e-6)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("num_items", [None, 0, torch.tensor(0), 7], ids=["no count", "0", "tensor of 0", "7"])
def test_a_batch_without_targets_has_loss_zero_and_zero_gradients(batch, training, label_smoothing, num_items):
    """The Trainer counts 0 items in such a batch, and passes the count."""
    model = tiny_model(output_bias=True).train(training)
    batch["labels"] = torch.full((3, 5), -100)
    loss = model(**batch, label_smoothing=label_smoothing, num_items_in_batch=num_items).loss
    assert loss.item() == 0
    loss.backward()
    assert all(parameter.grad.count_nonzero() == 0 for parameter in model.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_the_end_of_a_sentence_is_a_target_like_any_other(batch, training):
    """Padding beside it, and the padding id itself among the labels, take nothing away: -100 alone is left out."""
    model = tiny_model().train(training)
    labels, source = torch.tensor([[5, 2, 1, -100]]), batch["input_ids"][:1]
    log_probs = model(source, decoder_input_ids=torch.tensor([[0, 5, 2, 1]])).logits[0].log_softmax(-1)
    expected = -(log_probs[0, 5] + log_probs[1, 2] + log_probs[2, 1]) / 3
    torch.testing.assert_close(model(source, labels=labels).loss, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("label_smoothing", [-0.1, 1.0])
def test_a_label_smoothing_out_of_range_is_refused(batch, label_smoothing):
    with pytest.raises(ValueError, match=rf"label_smoothing \({label_smoothing}\) must be at least 0 and below 1"):
        tiny_model()(**batch, label_smoothing=label_smoothing)


def test_without_autograd_no_gradient_is_computed(monkeypatch):
    hidden_states, weight, bias, labels = inputs(bias=True)
    products = []
    original = torch.Tensor.t
    monkeypatch.setattr(torch.Tensor, "t", lambda tensor: products.append(tensor.shape) or original(tensor))
    with torch.no_grad():
        projected_cross_entropy_sum(hidden_states, weight, bias, labels)
    assert products == [weight.shape]  # the logits' product alone


def test_a_loss_scale_beyond_the_range_of_float16_leaves_its_gradients_finite():
    hidden_states, weight, _, labels = inputs(bias=False)
    hidden_states, weight = (hidden_states.detach() * 1e-4).half().requires_grad_(), weight.detach().half()
    (projected_cross_entropy_sum(hidden_states, weight * 1e-4, None, labels) * 2.0**17).backward()
    assert hidden_states.grad.isfinite().all()


def test_the_models_training_loss_and_all_its_gradients_are_those_of_the_plain_computation(monkeypatch):
    """In float32, with several chunks, smoothing, a bias, padding and a vocabulary of some size."""
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 3 * 700)
    monkeypatch.setattr(loss_module, "LEAST_ROWS", 1)
    model = tiny_model(vocab_size=700, output_bias=True).train()
    generator = torch.Generator().manual_seed(0)
    source, labels = (torch.randint(3, 700, (3, length), generator=generator) for length in (7, 5))
    labels[1, 3:] = -100
    (chunked := model(source, labels=labels, label_smoothing=0.1).loss).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = model(source, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels)).logits
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    plain.backward()
    torch.testing.assert_close(chunked, plain, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_gradients_stay_close_to_those_of_full_precision(dtype):
    """At 5,000 words, where the probabilities of a fresh model are below float16's smallest normal number."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 40, 16, generator=generator)
    weight = 0.02 * torch.randn(5000, 16, generator=generator)
    labels = torch.randint(0, 5000, (1, 40), generator=generator)

    def results(dtype):
        leaves = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        loss = projected_cross_entropy_sum(*leaves, None, labels, label_smoothing=0.1)
        return loss, *(gradient.float() for gradient in torch.autograd.grad(loss, leaves))

    for half, full in zip(results(dtype), results(torch.float32), strict=True):
        assert float((half.float() - full).norm() / full.norm()) < 0.01


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_loss_of_sure_and_right_predictions_is_small_and_so_are_its_gradients(
    dtype, label_smoothing
):
    """Targets with a probability of 0.999 and more: what is subtracted from each other are almost equal numbers.

    The other side is double precision with the same, rounded numbers.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 16, generator=generator).to(dtype)
    labels = torch.arange(40)[None]
    hidden = (weight[labels] + 0.1 * torch.randn(1, 40, 16, generator=generator)).to(dtype)

    def results(dtype):
        leaves = [hidden.detach().to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_()]
        if dtype == torch.float64:
            logits = torch.nn.functional.linear(*leaves)[0]
            loss = torch.nn.functional.cross_entropy(
                logits, labels[0], reduction="sum", label_smoothing=label_smoothing
            )
        else:
            loss = projected_cross_entropy_sum(*leaves, None, labels, label_smoothing=label_smoothing)
        return loss, *(gradient.double() for gradient in torch.autograd.grad(loss, leaves))

    for half, full in zip(results(dtype), results(torch.float64), strict=True):
        assert float((half.double() - full).norm()) < 0.05 * float(full.norm()) + 0.02
    assert results(dtype)[0] >= 0


def test_a_label_outside_of_the_vocabulary_is_no_target():
    hidden_states, weight, _, labels = inputs(bias=False)
    labels[0, 0] = -1
    with pytest.raises((IndexError, RuntimeError)):
        projected_cross_entropy_sum(hidden_states.detach(), weight.detach(), None, labels)
