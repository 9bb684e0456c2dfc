"""int8: what a quantised model computes is what the model computes, within the steps of its weights."""

import sys

import pytest
import torch

from hf_vanilla_trm import quantize
from tests.conftest import tiny_model

pytest.importorskip("torchao")
SHARINGS = ["none", "attention", "ffn", "all"]


def logits_of(model, batch):
    inputs = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    with torch.no_grad():
        return model(batch["input_ids"], batch["attention_mask"], decoder_input_ids=inputs).logits


@pytest.mark.parametrize("sharing", SHARINGS)
def test_weights_in_int8_are_within_half_a_step_and_compute_what_they_say(batch, sharing):
    """A step is a 127th of the largest magnitude of a row, as int8 has 127 numbers on each side of zero."""
    model = tiny_model(seed=3, parameter_sharing=sharing, tie_word_embeddings=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    quantized = quantize(model, "int8_weights")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    plain, linears = logits_of(model, batch), 0
    with torch.no_grad():
        for module, own in zip(model.modules(), quantized.modules(), strict=True):
            if isinstance(module, torch.nn.Linear):
                weight, linears = own.weight.dequantize(), linears + 1
                step = module.weight.abs().amax(dim=1, keepdim=True) / 127
                assert bool(((weight - module.weight).abs() <= 0.51 * step).all())
                module.weight.copy_(weight)
    found = logits_of(quantized, batch)
    torch.testing.assert_close(found, logits_of(model, batch), rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, plain)
    assert linears > 4


@pytest.mark.parametrize("kind", ["int8_weights", "int8_dynamic"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_both_kinds_are_near_the_model_and_decode(batch, kind, sharing):
    """An error of half a step in 127, summed over a row, is some hundredths of the size of the logits."""
    model = tiny_model(seed=3, parameter_sharing=sharing)
    quantized = quantize(model, kind)
    expected, found = logits_of(model, batch), logits_of(quantized, batch)
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert quantized.get_input_embeddings().weight.dtype == torch.float32
    hypotheses = quantized.search(batch["input_ids"], batch["attention_mask"], max_length_b=3)
    for row, (best,) in enumerate(hypotheses):
        source = batch["input_ids"][row : row + 1, : int(batch["attention_mask"][row].sum())]
        scored = quantized.token_log_probs(source, torch.tensor([best.tokens]))[0].tolist()
        assert best.token_log_probs == pytest.approx(scored, abs=0.05)


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(ValueError, match=r"kind \('int4'\) must be one of int8_weights, int8_dynamic"):
        quantize(tiny_model(), "int4")
    with pytest.raises(ValueError, match="in training mode"):
        quantize(tiny_model().train(), "int8_weights")


def test_without_torchao_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_vanilla_trm\[export\]'"):
        quantize(tiny_model(), "int8_weights")
