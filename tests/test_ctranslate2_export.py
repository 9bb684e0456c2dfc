"""Export to CTranslate2: its own Translator computes what our model computes, in code that is not ours."""

import sys

import pytest
import torch
from transformers import AutoTokenizer

from hf_vanilla_trm import export_ctranslate2, from_marian, to_marian
from tests.conftest import tiny_model
from tests.test_conversion import CASES, logits_of, tiny_marian
from training.tokenizer import train_tokenizer

LINES = ["Buch", "Zwei Kinder spielen im Park .", "Eine Frau liest", "die Wiese", "Hund und Kinder im Buch ; Park"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES * 3, vocab_size=300)


@pytest.fixture
def model_of(tokenizer):
    """A model with two tokens more than its tokenizer, that begins a translation with its fifth token."""
    return lambda **changes: tiny_model(seed=7, vocab_size=len(tokenizer) + 2, decoder_start_token_id=5, **changes)


def translator_of(folder, kind="float32"):
    ctranslate2 = pytest.importorskip("ctranslate2")
    return ctranslate2.Translator(str(folder), compute_type=kind, inter_threads=1, intra_threads=1)


def batch_of(rows, pad):
    width = max(map(len, rows))
    padded = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": padded, "attention_mask": mask}


SUPPORTED = [case for case in CASES if "decoder_vocab_size" not in case.values[0]]


@pytest.mark.parametrize("changes", SUPPORTED)
def test_log_probabilities_and_greedy_translations_are_the_same(model_of, tokenizer, changes, tmp_path):
    model = model_of(**changes)
    export_ctranslate2(model, tokenizer, tmp_path / "new")
    translator, loaded = translator_of(tmp_path / "new"), AutoTokenizer.from_pretrained(tmp_path / "new")
    rows = loaded(LINES)["input_ids"]
    assert rows == tokenizer(LINES)["input_ids"]
    words = [loaded.convert_ids_to_tokens(row) for row in rows]
    batch = batch_of(rows, tokenizer.pad_token_id)
    inputs = torch.tensor([[5, *row[:-1]] for row in (rows[1],)])
    log_probs = logits_of(model, {name: tensor[:1] for name, tensor in batch.items()}, inputs).log_softmax(-1)[0]
    (scored,) = translator.score_batch(words[:1], [words[1][:-1]])  # it adds EOS itself
    expected = [float(log_probs[place, token]) for place, token in enumerate(rows[1])]
    assert scored.log_probs == pytest.approx(expected, abs=1e-4)

    found = translator.translate_batch(
        words, beam_size=1, max_decoding_length=12, min_decoding_length=0, return_end_token=True
    )
    generated = model.generate(**batch, num_beams=1, max_new_tokens=12, do_sample=False).tolist()
    for row, result in zip(generated, found, strict=True):
        tokens = result.hypotheses[0]
        if not any(token.startswith("<unused") for token in tokens):
            assert loaded.convert_tokens_to_ids(tokens) == row[1 : len(tokens) + 1]
        assert len(tokens) == 12 or tokens[-1] == "</s>"


def test_a_beam_finds_the_same_hypotheses_with_the_same_scores(model_of, tokenizer, tmp_path):
    """Without a length penalty, and up to a length at which no search has ended yet."""
    model = model_of()
    export_ctranslate2(model, tokenizer, tmp_path)
    rows = tokenizer(LINES)["input_ids"]
    found = translator_of(tmp_path).translate_batch(
        [tokenizer.convert_ids_to_tokens(row) for row in rows],
        beam_size=4,
        num_hypotheses=4,
        length_penalty=0,
        max_decoding_length=5,
        min_decoding_length=0,
        return_scores=True,
        return_end_token=True,
    )
    batch = batch_of(rows, tokenizer.pad_token_id)
    ours = model.search(**batch, num_beams=4, num_hypotheses=4, alpha=0, max_length_a=0, max_length_b=5)
    names = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), f"<unused {len(tokenizer)}>"]
    names.append(f"<unused {len(tokenizer) + 1}>")
    for theirs, own in zip(found, ours, strict=True):
        assert theirs.hypotheses == [[names[token] for token in one.tokens] for one in own]
        assert theirs.scores == pytest.approx([one.score for one in own], abs=1e-4)


@pytest.mark.parametrize("begin", ["ours", "marian"])
def test_a_marian_never_generates_its_pad_token(begin, tmp_path):
    """Its logit is the highest everywhere, and the published models say in their generation config to forbid it."""
    marian = tiny_marian(seed=5)
    marian.final_logits_bias[0, 19] = 9.0
    words = [f"w{number}" for number in range(19)] + ["<pad>"]

    class Words:
        """As much of a tokenizer as an export needs."""

        def get_vocab(self):
            return {word: number for number, word in enumerate(words)}

        def save_pretrained(self, folder):
            pass

    export_ctranslate2(from_marian(marian) if begin == "ours" else marian, Words(), tmp_path)
    source = [[3, 4, 5, 0], [7, 8, 0]]
    found = translator_of(tmp_path).translate_batch(
        [[words[token] for token in row] for row in source],
        beam_size=1,
        max_decoding_length=9,
        min_decoding_length=0,
        return_end_token=True,
    )
    settings = {"num_beams": 1, "do_sample": False, "forced_eos_token_id": None, "max_new_tokens": 9}
    expected = marian.generate(**batch_of(source, 19), **settings).tolist()
    for row, result in zip(expected, found, strict=True):
        tokens = [words.index(word) for word in result.hypotheses[0]]
        assert tokens == row[1 : len(tokens) + 1]
        assert 19 not in tokens


def test_int8_is_smaller_and_leaves_the_model_as_it_is(model_of, tokenizer, tmp_path):
    model = model_of()
    marian = to_marian(model)
    before = {name: tensor.clone() for name, tensor in marian.state_dict().items()}
    export_ctranslate2(marian, tokenizer, tmp_path, quantization="int8")
    for name, tensor in marian.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert translator_of(tmp_path, "int8").compute_type.startswith("int8")
    small = (tmp_path / "model.bin").stat().st_size
    export_ctranslate2(marian, tokenizer, tmp_path, quantization="float32")
    assert small < (tmp_path / "model.bin").stat().st_size / 2


@pytest.mark.parametrize(
    ("changes", "quantization", "message"),
    [
        ({}, "int4", r"quantization \('int4'\) must be one of int8, "),
        ({"activation_function": "mish"}, "int8", r"activation_function \('mish'\) is none that CTranslate2 has"),
        ({"embedding_size": 8}, "int8", r"embedding_size \(8\) must be d_model \(16\)"),
    ],
)
def test_what_ctranslate2_has_not_is_refused(model_of, tokenizer, tmp_path, changes, quantization, message):
    pytest.importorskip("ctranslate2")
    with pytest.raises(ValueError, match=message):
        export_ctranslate2(model_of(**changes), tokenizer, tmp_path / "new", quantization=quantization)
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tokenizer, tmp_path):
    pytest.importorskip("ctranslate2")
    with pytest.raises(ValueError, match=rf"ids up to {len(tokenizer) - 1}, and the model a vocabulary of 20"):
        export_ctranslate2(tiny_model(), tokenizer, tmp_path / "new")


def test_without_ctranslate2_the_message_says_what_to_install(model_of, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2.converters.transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'hf_vanilla_trm\[export\]'"):
        export_ctranslate2(model_of(), tokenizer, tmp_path / "new")
    assert not (tmp_path / "new").exists()
