"""The translate command, and the one decoding function behind it and behind evaluation."""

import io
import json
import subprocess

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tests.conftest import tiny_model
from tests.launch import CLONE, PYTHON, run
from training.lines import as_line, read_lines
from training.tokenizer import train_tokenizer
from training.translate import StopAtOwnLength, decoding_config, main, translate, translate_all

LINES = ["Buch", "Zwei Kinder spielen im Park .", "Eine Frau liest", "die Wiese", "Hund und Kinder im Buch ; Park"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES * 3, vocab_size=300)


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


class Spy:
    """Wraps `generate` and records the batches that reach it."""

    def __init__(self, model, monkeypatch):
        self.batches, self.generate = [], model.generate
        monkeypatch.setattr(model, "generate", self)

    def __call__(self, input_ids, **options):
        output = self.generate(input_ids=input_ids, **options)
        self.batches.append((input_ids, output))
        return output


@pytest.mark.parametrize("num_beams", [1, 3])
def test_every_line_is_translated_as_if_alone_and_order_is_kept(model, tokenizer, num_beams):
    config = decoding_config(model, num_beams=num_beams, max_length_a=1.5, max_length_b=2)
    together = translate_all(model, tokenizer, LINES, config)
    assert together == [translate_all(model, tokenizer, [line], config)[0] for line in LINES]
    assert together == translate_all(model, tokenizer, LINES[::-1], config)[::-1]
    assert len(set(together)) == len(LINES)


def test_blank_lines_stay_blank_and_never_reach_the_model(model, tokenizer, monkeypatch):
    spy = Spy(model, monkeypatch)
    lines = ["Buch", "", "Eine Frau liest", "   \t", "\u3000"]
    output = translate_all(model, tokenizer, lines, decoding_config(model, max_length_b=3))
    assert [bool(line) for line in output] == [True, False, True, False, False]
    assert sum(len(input_ids) for input_ids, _ in spy.batches) == 2


def test_nothing_but_blank_lines_calls_no_model(tokenizer):
    class NoModel:
        generation_config = tiny_model().generation_config

    assert translate_all(NoModel(), tokenizer, ["", " "], decoding_config(NoModel())) == ["", ""]
    assert translate_all(NoModel(), tokenizer, [], decoding_config(NoModel())) == []


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(("a", "b"), [(1.0, 2), (0.5, 3), (2.0, 0), (0.0, 1)])
def test_the_cap_is_a_times_the_own_source_length_plus_b(model, tokenizer, monkeypatch, num_beams, a, b):
    spy = Spy(model, monkeypatch)
    config = decoding_config(model, num_beams=num_beams, max_length_a=a, max_length_b=b)
    config.suppress_tokens = [tokenizer.pad_token_id, tokenizer.eos_token_id]  # so that every sentence reaches its cap
    translate_all(model, tokenizer, LINES, config)
    ((input_ids, output),) = spy.batches
    source_lengths = (input_ids != tokenizer.pad_token_id).sum(1)
    generated = (output[:, 1:] != tokenizer.pad_token_id).sum(1)
    assert len(set(source_lengths.tolist())) == len(LINES)
    assert generated.tolist() == [max(1, int(a * length + b)) for length in source_lengths.tolist()]


def test_the_cap_counts_each_hypothesis_of_a_sentence():
    stop = StopAtOwnLength(torch.tensor([3, 5]))
    four_tokens = torch.zeros(4, 1 + 3, dtype=torch.long)  # start token and three, two hypotheses a sentence
    assert stop(four_tokens, None).tolist() == [True, True, False, False]


@pytest.mark.parametrize("num_beams", [1, 2])
def test_batches_hold_similar_lengths_within_the_budget(model, tokenizer, monkeypatch, num_beams):
    spy = Spy(model, monkeypatch)
    lines = [" ".join(["Buch"] * count) for count in (9, 1, 5, 2, 8, 1, 3)]
    config = decoding_config(model, num_beams=num_beams, max_length_a=0, max_length_b=1)
    order = [index for index, _ in translate(model, tokenizer, lines, config, batch_tokens=24)]
    lengths = [len(tokenizer(line)["input_ids"]) for line in lines]
    assert [lengths[index] for index in order] == sorted(lengths, reverse=True)
    shapes = [tuple(input_ids.shape) for input_ids, _ in spy.batches]
    assert sum(rows for rows, _ in shapes) == len(lines)
    assert all(rows == 1 or rows * width * num_beams <= 24 for rows, width in shapes)
    assert any(rows > 1 for rows, _ in shapes)


def test_a_source_of_unknown_tokens_only_gets_a_translation():
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **{f"w{number}": number for number in range(4, 20)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    specials = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **specials)
    assert tokenizer("☃ ☃")["input_ids"] == [3, 3, 2]
    for seed in range(5):
        config = decoding_config(tiny_model(seed), max_length_b=4)
        config.suppress_tokens = [0, 1, 3]
        assert translate_all(tiny_model(seed), tokenizer, ["☃ ☃"], config)[0].strip()


def test_even_a_model_that_ends_at_once_translates_a_line_that_is_not_blank(model, tokenizer, monkeypatch):
    spy = Spy(model, monkeypatch)
    config = decoding_config(model)
    config.sequence_bias = [[[tokenizer.eos_token_id], 1e4]]
    translate_all(model, tokenizer, ["Buch"], config)
    ((_, output),) = spy.batches
    assert output[0, 1] != tokenizer.eos_token_id
    assert output[0, 2] == tokenizer.eos_token_id


def test_line_ends_in_a_translation_become_spaces_and_other_separators_stay():
    assert as_line("a\nb\r\nc\u2028d\x0ce") == "a b  c\u2028d\x0ce"


def test_only_a_newline_ends_a_line():
    text = "one\u2028still\x0bone\x0cone\x85\r\n\ntwo\rtwo\nthree"
    assert list(read_lines(io.BytesIO(text.encode()), "file")) == [
        "one\u2028still\x0bone\x0cone\x85",
        "",
        "two\rtwo",
        "three",
    ]
    assert list(read_lines(io.BytesIO(b""), "file")) == []
    assert list(read_lines(io.BytesIO(b"\xef\xbb\xbfone\n"), "file")) == ["one"]


def test_undecodable_bytes_are_refused_with_file_line_and_byte():
    with pytest.raises(ValueError, match="file, line 2: text must be UTF-8, but byte 2 of the line is 0xff"):
        list(read_lines(io.BytesIO(b"good\nb\xffd\n"), "file"))


def test_the_saved_generation_config_holds_unless_overridden(model, tokenizer, tmp_path):
    saved = tiny_model(vocab_size=len(tokenizer))
    saved.generation_config = GenerationConfig(num_beams=3, length_penalty=0.6, max_length_a=1.5, max_length_b=7)
    saved.save_pretrained(tmp_path)
    loaded = type(saved).from_pretrained(tmp_path)
    kept, changed = decoding_config(loaded), decoding_config(loaded, num_beams=2, max_length_b=9)
    names = ("num_beams", "length_penalty", "max_length_a", "max_length_b")
    assert [getattr(kept, name) for name in names] == [3, 0.6, 1.5, 7]
    assert [getattr(changed, name) for name in names] == [2, 0.6, 1.5, 9]
    assert loaded.generation_config.num_beams == 3


def test_a_model_without_caps_gets_the_papers(model):
    config = decoding_config(model)
    assert (config.max_length_a, config.max_length_b) == (1.0, 50)


def test_one_beam_has_no_length_penalty_and_can_be_saved(model, tmp_path):
    config = decoding_config(model, num_beams=1, length_penalty=0.6)
    config.save_pretrained(tmp_path)
    assert "length_penalty" not in json.loads((tmp_path / "generation_config.json").read_text())


def test_files_in_and_out(folder, model, tokenizer, tmp_path):
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_text("\n".join(["Buch", "", "Eine Frau liest", "  ", "die Wiese"]))  # no newline at the end
    options = ["--max_length_b", "3", "--device", "cpu"]
    assert main(["--model", str(folder), "--input", str(source), "--output", str(target), *options]) == 0
    config = decoding_config(model, max_length_b=3)
    expected = translate_all(model, tokenizer, ["Buch", "", "Eine Frau liest", "", "die Wiese"], config)
    assert target.read_bytes() == "".join(line + "\n" for line in expected).encode()


def test_an_unreadable_input_is_an_error_without_a_trace(folder, tmp_path, capsys):
    assert main(["--model", str(folder), "--input", str(tmp_path / "none.txt")]) == 1
    (tmp_path / "bad.txt").write_bytes(b"a\n\xff\n")
    assert main(["--model", str(folder), "--input", str(tmp_path / "bad.txt")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert "none.txt" in errors[0]
    assert "bad.txt, line 2: text must be UTF-8" in errors[1]


def test_a_missing_model_is_an_error_without_a_trace(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("Buch\n")
    assert main(["--model", str(tmp_path / "missing"), "--input", str(tmp_path / "in.txt")]) == 1
    assert f"error: there is no model in '{tmp_path / 'missing'}'" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_an_error_before_the_model_is_loaded(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("Buch\n")
    options = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "missing" / "out.txt")]
    assert main(["--model", "missing", *options]) == 1
    assert str(tmp_path / "missing" / "out.txt") in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_an_error_without_a_trace(folder, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("Buch\n")
    assert main(["--model", str(folder), "--input", str(tmp_path / "in.txt"), "--device", "cuda"]) == 1
    assert "error: device (cuda) cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--num_beams", "--batch_tokens"])
def test_a_number_below_one_is_refused(capsys, option):
    with pytest.raises(SystemExit):
        main(["--model", "any", option, "0"])
    assert "0 must be at least 1" in capsys.readouterr().err


def test_a_tokenizer_that_pads_on_the_left_changes_nothing(folder, model):
    lines, config = ["Buch", "Eine Frau liest ein Buch"], decoding_config(model, max_length_b=3)
    left, right = (AutoTokenizer.from_pretrained(folder, padding_side=side) for side in ("left", "right"))
    assert translate_all(model, left, lines, config) == translate_all(model, right, lines, config)


@pytest.mark.slow
def test_standard_input_to_standard_output_in_a_fresh_process(folder, model, tokenizer):
    command = [*PYTHON, "training.translate", "--model", folder, "--max_length_b", "3", "--device", "cpu"]
    output = run(command, stdin="\n".join(LINES).encode()).stdout
    expected = translate_all(model, tokenizer, LINES, decoding_config(model, max_length_b=3))
    assert output == "".join(line + "\n" for line in expected).encode()


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_early_is_no_error(folder):
    command = [*PYTHON, "training.translate", "--model", folder, "--max_length_b", "3", "--device", "cpu"]
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=CLONE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()  # gone before the first line is written
    process.stdin.write(("Eine Frau liest\n" * 20).encode())
    process.stdin.close()
    errors = process.stderr.read().decode()
    assert process.wait() == 0, errors
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors
