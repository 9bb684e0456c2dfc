"""Conversion to MarianMT and to CTranslate2: both compute what our model computes, in code that is not ours."""

from pathlib import Path

import pytest
import torch
from transformers import MarianMTModel

from hf_vanilla_trm import VanillaTrmEncoderModel
from tests.conftest import tiny_config, tiny_model
from training.marian import to_ctranslate2, to_marian

VOCABULARY = [f"word{number}" for number in range(20)]
CASES = [
    pytest.param({}, id="as in the paper"),
    pytest.param({"attention_bias": True, "decoder_layers": 3}, id="attention bias, unequal depths"),
    pytest.param({"output_bias": True, "scale_embedding": False}, id="output bias, embeddings as they are"),
    pytest.param({"activation_function": "gelu"}, id="another activation"),
    pytest.param({"parameter_sharing": "all"}, id="all shared"),
    pytest.param(
        {"parameter_sharing": "attention", "encoder_layers": 4, "num_unique_layers": 2, "sharing_order": "cycle"},
        id="attention shared",
    ),
    pytest.param({"parameter_sharing": "ffn"}, id="feed-forward networks shared"),
]


def logits_of(model, batch, decoder_input_ids):
    sources = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return model(**sources, decoder_input_ids=decoder_input_ids).logits


@pytest.mark.parametrize("changes", CASES)
def test_marian_gives_the_same_logits(batch, changes):
    model = tiny_model(**changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    random_state = torch.get_rng_state()
    marian = to_marian(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.testing.assert_close(logits_of(marian, batch, inputs), logits_of(model, batch, inputs), rtol=1e-5, atol=1e-5)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_saved_marian_gives_the_same_logits_also_beyond_the_positions_of_the_model(tmp_path):
    model = tiny_model(max_position_embeddings=10, parameter_sharing="all")
    to_marian(model, max_position_embeddings=33).save_pretrained(tmp_path)
    tokens = torch.randint(3, 20, (2, 33), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    loaded = MarianMTModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits_of(loaded, batch, tokens), logits_of(model, batch, tokens), rtol=1e-5, atol=1e-5)


def test_precision_is_kept(batch):
    """In float64 the positions of both, computed in float32, are the only rounding."""
    model = tiny_model().double()
    inputs = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    logits = logits_of(to_marian(model), batch, inputs)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, logits_of(model, batch, inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_marian_generates_the_same_tokens_behind_our_start_token(batch, num_beams):
    model = tiny_model(seed=7, decoder_start_token_id=5)
    del batch["labels"]
    settings = {"num_beams": num_beams, "max_new_tokens": 9, "do_sample": False}
    ours = model.generate(**batch, **settings).tolist()
    assert to_marian(model).generate(**batch, **settings).tolist() == ours
    assert {row[0] for row in ours} == {5}
    assert len(set(map(tuple, ours))) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_size": 8}, r"embedding_size \(8\) must be d_model \(16\)"),
        ({"tie_word_embeddings": False}, r"tie_word_embeddings \(False\) must be True"),
        (
            {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 30},
            r"share_encoder_decoder_embeddings \(False\) must be True",
        ),
        ({"layer_norm_eps": 1e-6}, r"layer_norm_eps \(1e-06\) must be 1e-05"),
        ({"eos_token_id": [2, 3]}, r"eos_token_id \(\[2, 3\]\) must be one token"),
        ({"decoder_start_token_id": None}, r"decoder_start_token_id \(None\) must be one token"),
    ],
)
def test_what_marian_cannot_be_is_refused_by_field_and_value(changes, message):
    with pytest.raises(ValueError, match=message):
        to_marian(tiny_model(**changes))


def test_a_model_of_another_type_is_refused():
    with pytest.raises(ValueError, match="a MarianMTModel of type marian cannot become a MarianMT"):
        to_marian(to_marian(tiny_model()))
    with pytest.raises(ValueError, match="a VanillaTrmEncoderModel of type vanilla_trm cannot"):
        to_marian(VanillaTrmEncoderModel(tiny_config()))


def translator_of(marian, folder, quantization="float32"):
    ctranslate2 = pytest.importorskip("ctranslate2")
    to_ctranslate2(marian, VOCABULARY, folder, quantization)
    return ctranslate2.Translator(str(folder), compute_type=quantization, inter_threads=1, intra_threads=1)


def words(rows):
    return [[VOCABULARY[token] for token in row] for row in rows]


def sources_of(batch):
    return [row[mask == 1].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


@pytest.mark.parametrize("changes", [CASES[0], CASES[1], CASES[2], CASES[4]])
def test_ctranslate2_gives_the_same_log_probabilities_and_greedy_translations(batch, changes, tmp_path):
    model = tiny_model(seed=7, decoder_start_token_id=5, **changes)
    translator = translator_of(to_marian(model), tmp_path / "new")
    sources, targets = sources_of(batch), [row[row != -100].tolist() for row in batch["labels"]]
    inputs = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    log_probs = logits_of(model, batch, inputs).log_softmax(-1)
    scored = translator.score_batch(words(sources), words(target[:-1] for target in targets))  # it adds EOS itself
    for row, (target, result) in enumerate(zip(targets, scored, strict=True)):
        expected = [float(log_probs[row, place, token]) for place, token in enumerate(target)]
        assert result.log_probs == pytest.approx(expected, abs=1e-4)

    settings = {"num_beams": 1, "max_new_tokens": 12, "do_sample": False}
    generated = to_marian(model).generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **settings
    )
    found = translator.translate_batch(
        words(sources), beam_size=1, max_decoding_length=12, min_decoding_length=0, return_end_token=True
    )
    for row, result in zip(generated.tolist(), found, strict=True):
        (tokens,) = result.hypotheses
        assert tokens == words([row[1 : len(tokens) + 1]])[0]
        assert len(tokens) == 12 or tokens[-1] == VOCABULARY[2]


def test_converting_to_int8_leaves_the_model_as_it_is(batch, tmp_path):
    model = tiny_model()
    marian = to_marian(model)
    before = {name: tensor.clone() for name, tensor in marian.state_dict().items()}
    translator = translator_of(marian, tmp_path, "int8")
    for name, tensor in marian.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert translator.compute_type.startswith("int8")
    sizes = [(tmp_path / "model.bin").stat().st_size]
    translator_of(marian, tmp_path, "float32")
    assert sizes[0] < (tmp_path / "model.bin").stat().st_size


@pytest.mark.parametrize(
    ("changes", "vocabulary", "message"),
    [
        ({}, VOCABULARY[:19], r"the vocabulary \(19 tokens, 19 of them distinct\) must have 20 distinct tokens"),
        ({}, [*VOCABULARY[:19], "word3"], r"the vocabulary \(20 tokens, 19 of them distinct\)"),
        ({"activation_function": "gelu"}, VOCABULARY, r"activation_function \('gelu'\) must be 'relu'"),
    ],
)
def test_what_ctranslate2_would_get_wrong_is_refused(changes, vocabulary, message):
    pytest.importorskip("ctranslate2")
    folder = Path("nowhere")
    with pytest.raises(ValueError, match=message):
        to_ctranslate2(to_marian(tiny_model(**changes)), vocabulary, folder, "float32")
    assert not folder.exists()
