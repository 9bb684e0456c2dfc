"""The command that converts: a MarianMT with its own tokenizer in, and out again, by nothing but folders."""

import json
import re

import pytest
import sentencepiece
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianMTModel, MarianTokenizer

from hf_vanilla_trm import OnnxTranslator, saved_options
from tests.conftest import tiny_model
from tests.test_conversion import tiny_marian
from training.convert import main
from training.loading import load
from training.tokenizer import train_tokenizer
from training.translator import translate_all

ENGLISH = ["two children play in the park .", "a woman reads a book", "the dog runs over the meadow", "a park"]
GERMAN = ["zwei Kinder spielen im Park .", "eine Frau liest ein Buch", "der Hund läuft über die Wiese", "ein Park"]


def trained_pieces(lines, prefix):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 10),
        model_prefix=str(prefix),
        vocab_size=60,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def numbered(*processors):
    """Pieces by number as the published models have them: EOS first, then <unk>, and <pad> last."""
    pieces = dict.fromkeys(p.id_to_piece(number) for p in processors for number in range(3, p.get_piece_size()))
    return {piece: number for number, piece in enumerate(["</s>", "<unk>", *pieces, "<pad>"])}


@pytest.fixture(scope="module", params=["one vocabulary", "two vocabularies"])
def marian(request, tmp_path_factory):
    """A folder as those of OPUS-MT: random weights, and trained SentencePiece models of both languages."""
    folder = tmp_path_factory.mktemp("marian")
    source, target = trained_pieces(ENGLISH, folder / "source"), trained_pieces(GERMAN, folder / "target")
    separate = request.param == "two vocabularies"
    vocabularies = [numbered(source), numbered(target)] if separate else [numbered(source, target)]
    files = []
    for name, vocabulary in zip(("vocab.json", "target_vocab.json"), vocabularies, strict=False):
        files.append(folder / name)
        files[-1].write_text(json.dumps(vocabulary))
    tokenizer = MarianTokenizer(
        str(folder / "source.model"),
        str(folder / "target.model"),
        str(files[0]),
        target_vocab_file=str(files[-1]) if separate else None,
        source_lang="en",
        target_lang="de",
        separate_vocabs=separate,
    )
    sizes = [len(vocabulary) for vocabulary in vocabularies]
    changes = {"decoder_vocab_size": sizes[-1], "share_encoder_decoder_embeddings": not separate}
    pad = sizes[-1] - 1
    if separate:  # both languages have one number for pad
        pad = max(sizes) - 1
        changes["decoder_vocab_size"] = max(sizes)
        sizes[0] = max(sizes)
    model = tiny_marian(seed=4, vocab_size=sizes[0], pad_token_id=pad, decoder_start_token_id=pad, **changes)
    model.generation_config.bad_words_ids = [[pad]]
    model.generation_config.num_beams = 3
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def test_a_marian_comes_in_with_its_tokenizer_and_goes_out_again(marian, tmp_path, capsys):
    assert main(["--model", str(marian), "--to", "vanilla_trm", "--output", str(tmp_path / "ours")]) == 0
    assert "a VanillaTrmForConditionalGeneration, whose logits differ by at most " in capsys.readouterr().out
    theirs = MarianMTModel.from_pretrained(marian).eval()
    ours = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours").eval()
    tokenizer, loaded = MarianTokenizer.from_pretrained(marian), AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert ours.config.model_type == "vanilla_trm"
    batch = loaded(ENGLISH, return_tensors="pt", padding=True)
    assert batch["input_ids"].tolist() == tokenizer(ENGLISH, padding=True)["input_ids"]
    assert loaded(text_target=GERMAN)["input_ids"] == tokenizer(text_target=GERMAN)["input_ids"]
    expected = theirs.generate(**batch)
    found = ours.generate(**batch)
    assert found.tolist() == expected.tolist()
    texts = loaded.batch_decode(found, skip_special_tokens=True)
    assert texts == tokenizer.batch_decode(expected, skip_special_tokens=True)
    assert any(texts)

    assert main(["--model", str(tmp_path / "ours"), "--to", "marian", "--output", str(tmp_path / "back")]) == 0
    back = MarianMTModel.from_pretrained(tmp_path / "back").state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back[name], tensor), name
    again = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert again(ENGLISH)["input_ids"] == tokenizer(ENGLISH)["input_ids"]


def test_what_came_in_translates_with_our_own_search(marian, tmp_path):
    assert main(["--model", str(marian), "--to", "vanilla_trm", "--output", str(tmp_path / "ours")]) == 0
    model, tokenizer = load(str(tmp_path / "ours"), "cpu")
    lines = translate_all(model, tokenizer, ENGLISH, saved_options(model.generation_config, max_length_b=5))
    assert lines == model.translate(ENGLISH, tokenizer, max_length_b=5)
    assert all("<pad>" not in line for line in lines)


def test_it_goes_on_to_ctranslate2_with_its_tokenizer(marian, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    assert main(["--model", str(marian), "--to", "ctranslate2", "--output", str(tmp_path / "theirs")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    translator = ctranslate2.Translator(str(tmp_path / "theirs"), inter_threads=1, intra_threads=1)
    words = [[*tokenizer.tokenize(line), "</s>"] for line in ENGLISH]
    found = translator.translate_batch(words, beam_size=1, max_decoding_length=9, return_end_token=True)
    model = MarianMTModel.from_pretrained(marian).eval()
    batch = tokenizer(ENGLISH, return_tensors="pt", padding=True)
    rows = model.generate(**batch, num_beams=1, forced_eos_token_id=None, max_new_tokens=9, min_new_tokens=1).tolist()
    for row, result in zip(rows, found, strict=True):
        vocabulary = tokenizer.target_encoder if tokenizer.separate_vocabs else tokenizer.encoder
        tokens = [vocabulary[word] for word in result.hypotheses[0]]
        assert tokens == row[1 : len(tokens) + 1]


def test_our_own_goes_out_with_a_fast_tokenizer(tmp_path, capsys):
    tokenizer = train_tokenizer(GERMAN * 3, vocab_size=300)
    tiny_model(vocab_size=len(tokenizer), parameter_sharing="all").save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    assert main(["--model", str(tmp_path / "ours"), "--to", "marian", "--output", str(tmp_path / "marian")]) == 0
    loaded = AutoTokenizer.from_pretrained(tmp_path / "marian")
    assert loaded(GERMAN)["input_ids"] == tokenizer(GERMAN)["input_ids"]
    assert float(capsys.readouterr().out.split()[-1]) < 1e-5
    batch = loaded(GERMAN, return_tensors="pt", padding=True)
    models = [AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).eval() for name in ("ours", "marian")]
    rows = [model.generate(**batch, num_beams=2, max_new_tokens=7).tolist() for model in models]
    assert rows[0] == rows[1]


def test_our_own_goes_out_to_onnx_and_torch_export_and_a_marian_only_by_way_of_ours(tmp_path, capsys):
    tokenizer = train_tokenizer(GERMAN * 3, vocab_size=300)
    model = tiny_model(vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    for name, suffix in (("onnx", "onnx"), ("torch_export", "pt2")):
        assert main(["--model", str(tmp_path / "ours"), "--to", name, "--output", str(tmp_path / name)]) == 0
        assert {f"encoder.{suffix}", f"decoder.{suffix}"} <= {path.name for path in (tmp_path / name).iterdir()}
        assert AutoTokenizer.from_pretrained(tmp_path / name)(GERMAN)["input_ids"] == tokenizer(GERMAN)["input_ids"]
    batch = tokenizer(GERMAN, return_tensors="pt", padding=True)
    generated = model.generate(**batch, num_beams=1, do_sample=False, max_new_tokens=7).tolist()
    found = OnnxTranslator(tmp_path / "onnx").greedy(**batch, max_length=7)
    assert found == [row[1 : len(tokens) + 1] for row, tokens in zip(generated, found, strict=True)]

    assert main(["--model", str(tmp_path / "ours"), "--to", "marian", "--output", str(tmp_path / "marian")]) == 0
    capsys.readouterr()
    assert main(["--model", str(tmp_path / "marian"), "--to", "onnx", "--output", str(tmp_path / "new")]) == 1
    assert "a MarianMT goes to onnx by way of ours" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to=vanilla_trm"], "is a vanilla_trm already"),
        (["--to=marian", "--output={ours}"], "is there already"),
        (["--to=marian", "--model=nowhere"], "there is no model in 'nowhere'"),
        (["--to=ctranslate2", "--quantization=int4"], r"error: quantization \('int4'\) must be one of"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, capsys, flags, message):
    ours = tmp_path / "ours"
    tokenizer = train_tokenizer(GERMAN * 3, vocab_size=300)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(ours)
    tokenizer.save_pretrained(ours)
    given = {"--model": str(ours), "--output": str(tmp_path / "new")}
    given |= dict(flag.format(ours=ours).split("=") for flag in flags)
    assert main([f"{name}={value}" for name, value in given.items()]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def test_a_quantization_without_its_format_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--model=m", "--to=marian", "--output=o", "--quantization=int8"])
    assert "--quantization (int8) is for --to ctranslate2, not marian" in capsys.readouterr().err
