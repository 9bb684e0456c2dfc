"""The translate command, and the functions behind it and behind evaluation."""

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from hf_vanilla_trm import (
    BeamSearchOptions,
    SamplingOptions,
    Translation,
    quantize,
    search_by_length,
    translate_by_length,
    translate_stream,
    translation,
)
from hf_vanilla_trm.translation import batches_by_length
from tests.conftest import tiny_model
from tests.launch import CLONE, PYTHON, TWO_RANKS, run
from training import translate as command
from training.lines import as_line, read_lines
from training.loading import load
from training.long_sentences import join_translations, split_text
from training.tokenizer import train_tokenizer
from training.translate import main
from training.translation_output import OutputFile
from training.translator import translate_all

LINES = ["Buch", "Zwei Kinder spielen im Park .", "Eine Frau liest", "die Wiese", "Hund und Kinder im Buch ; Park"]
SHORT = ["--max_length_b", "3", "--device", "cpu"]


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


@pytest.fixture
def batches(monkeypatch):
    """The batches that reach a search: `input_ids` and what was found."""
    recorded, search = [], translation.search

    def spy(models, input_ids, *arguments, **options):
        found = search(models, input_ids, *arguments, **options)
        recorded.append((input_ids, found))
        return found

    monkeypatch.setattr(translation, "search", spy)
    return recorded


def options(**changes):
    return BeamSearchOptions(**{"num_beams": 1, "max_length_b": 3, "min_length": 1} | changes)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_every_line_is_translated_as_if_alone_and_order_is_kept(model, tokenizer, num_beams):
    chosen = model.search_options(num_beams=num_beams, max_length_a=1.5, max_length_b=2)
    together = translate_all(model, tokenizer, LINES, chosen)
    assert together == [translate_all(model, tokenizer, [line], chosen)[0] for line in LINES]
    assert together == translate_all(model, tokenizer, LINES[::-1], chosen)[::-1]
    assert len(set(together)) == len(LINES)


def test_blank_lines_stay_blank_and_never_reach_the_model(model, tokenizer, batches):
    lines = ["Buch", "", "Eine Frau liest", "   \t", "\u3000"]
    output = translate_all(model, tokenizer, lines, options())
    assert [bool(line) for line in output] == [True, False, True, False, False]
    assert sum(len(input_ids) for input_ids, _ in batches) == 2


def test_nothing_but_blank_lines_calls_no_model(tokenizer):
    assert translate_all(None, tokenizer, ["", " "], options()) == ["", ""]
    assert translate_all(None, tokenizer, [], options()) == []


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(("a", "b"), [(1.0, 2), (0.5, 3), (2.0, 0), (0.0, 1)])
def test_the_cap_is_a_times_the_own_source_length_plus_b(model, tokenizer, batches, num_beams, a, b):
    """EOS is not allowed before the cap, so that every sentence reaches it."""
    chosen = options(num_beams=num_beams, max_length_a=a, max_length_b=b, min_length=99)
    translate_all(model, tokenizer, LINES, chosen)
    ((input_ids, found),) = batches
    source_lengths = (input_ids != tokenizer.pad_token_id).sum(1)
    assert len(set(source_lengths.tolist())) == len(LINES)
    generated = [len(hypotheses[0].tokens) for hypotheses in found]
    assert generated == [max(1, int(a * length + b)) for length in source_lengths.tolist()]


@pytest.mark.parametrize("num_beams", [1, 2])
def test_batches_hold_similar_lengths_within_the_budget(model, tokenizer, batches, num_beams):
    lines = [" ".join(["Buch"] * count) for count in (9, 1, 5, 2, 8, 1, 3)]
    chosen = options(num_beams=num_beams, max_length_a=0, max_length_b=2)
    order = [place for place, _ in translate_by_length([model], tokenizer, lines, chosen, batch_tokens=24)]
    lengths = [len(tokenizer(line)["input_ids"]) for line in lines]
    assert [lengths[place] for place in order] == sorted(lengths, reverse=True)
    shapes = [tuple(input_ids.shape) for input_ids, _ in batches]
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
        (found,) = translate_stream([tiny_model(seed)], tokenizer, ["☃ ☃"], options(max_length_b=4))
        assert set(found[0].tokens) - {2}


def test_even_a_model_that_ends_at_once_translates_a_line_that_is_not_blank(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), output_bias=True)
    with torch.no_grad():
        model.lm_head.bias[tokenizer.eos_token_id] = 1e4
    (found,) = translate_stream([model], tokenizer, ["Buch"], model.search_options())
    assert [token == tokenizer.eos_token_id for token in found[0].tokens] == [False, True]


def test_a_stream_is_read_a_window_at_a_time_and_kept_in_order(model, tokenizer):
    read = []

    def texts():
        for line in LINES * 3:
            read.append(line)
            yield line

    stream = translate_stream([model], tokenizer, texts(), options(), window=4)
    expected = translate_all(model, tokenizer, LINES, options())
    assert next(stream)[0].text == expected[0]
    assert len(read) == 4
    assert [found[0].text for found in stream] == [*expected[1:], *expected * 2]


def test_a_model_translates_strings(model, tokenizer):
    expected = translate_all(model, tokenizer, LINES, model.search_options(max_length_b=3))
    assert model.translate(LINES[1], tokenizer, max_length_b=3) == expected[1]
    assert model.translate(LINES, tokenizer, max_length_b=3) == expected
    assert model.translate(tuple(LINES), tokenizer, max_length_b=3) == expected
    stream = model.translate(iter([*LINES, ""]), tokenizer, max_length_b=3)
    assert next(stream) == expected[0]
    assert list(stream) == [*expected[1:], ""]
    assert model.translate("  ", tokenizer) == ""
    begun = model.translate(LINES[:2], tokenizer, prefixes=["Park", ""], max_length_b=5)
    assert begun[0].startswith("Park")
    assert begun[1] == model.translate(LINES[1], tokenizer, max_length_b=5)
    assert model.translate(LINES[0], tokenizer, prefixes="Park", max_length_b=5) == begun[0]
    with pytest.raises(ValueError, match="there are 1 prefixes for 2 texts"):
        model.translate(LINES[:2], tokenizer, prefixes="Park")
    with pytest.raises(ValueError, match=r"num_hypotheses \(2\) must be 1"):
        model.translate("Buch", tokenizer, num_beams=2, num_hypotheses=2)


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


def test_the_saved_generation_config_holds_unless_overridden(tokenizer, tmp_path):
    saved = tiny_model(vocab_size=len(tokenizer))
    saved.generation_config = GenerationConfig(num_beams=3, length_penalty=0.7, max_length_a=1.5, max_length_b=7)
    saved.save_pretrained(tmp_path)
    loaded = type(saved).from_pretrained(tmp_path)
    kept, changed = loaded.search_options(), loaded.search_options(num_beams=2, max_length_b=9, alpha=0.0)
    names = ("num_beams", "alpha", "max_length_a", "max_length_b", "min_length")
    assert [getattr(kept, name) for name in names] == [3, 0.7, 1.5, 7, 1]
    assert [getattr(changed, name) for name in names] == [2, 0.0, 1.5, 9, 1]


def test_a_model_without_settings_searches_greedily_with_the_papers_cap(model):
    chosen = model.search_options()
    assert (chosen.num_beams, chosen.alpha, chosen.max_length_a, chosen.max_length_b) == (1, 0.6, 1.0, 50)


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_files_in_and_out(folder, model, tokenizer, tmp_path):
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_text("\n".join(["Buch", "", "Eine Frau liest", "  ", "die Wiese"]))  # no newline at the end
    assert main(["--model", str(folder), "--input", str(source), "--output", str(target), *SHORT]) == 0
    expected = translate_all(
        model, tokenizer, ["Buch", "", "Eine Frau liest", "", "die Wiese"], model.search_options(max_length_b=3)
    )
    assert target.read_bytes() == "".join(line + "\n" for line in expected).encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.txt", "target.txt"]


def translated(folder, tmp_path, *flags, lines=LINES):
    output = tmp_path / "out"
    files = ["--input", write(tmp_path / "in.txt", *lines), "--output", str(output)]
    assert main(["--model", str(folder), *files, *SHORT, *flags]) == 0
    return output.read_text().split("\n")[:-1]


def test_texts_pieces_scores_and_n_best_lists_are_written_each_by_itself(folder, model, tokenizer, tmp_path):
    """Against the search itself; the score is recomputed from the log-probabilities of the tokens."""
    lines, flags = ["Buch", "", "die Wiese"], ("--num_beams", "3")
    chosen = model.search_options(num_beams=3, max_length_b=3, num_hypotheses=3)
    found = list(translate_stream([model], tokenizer, lines, chosen))
    best = [translations[0] for translations in found]
    assert translated(folder, tmp_path, *flags, lines=lines) == [as_line(one.text) for one in best]
    pieces = translated(folder, tmp_path, *flags, "--format", "pieces", lines=lines)
    assert pieces[1] == ""
    for line, one in zip(pieces, best, strict=True):
        ids = tokenizer.convert_tokens_to_ids(line.split())
        assert ids == [token for token in one.tokens if token != tokenizer.eos_token_id]
    scores = translated(folder, tmp_path, *flags, "--format", "scores", lines=lines)
    assert scores[1] == ""
    for line, one in zip(scores[::2], best[::2], strict=True):
        penalty = ((5 + len(one.tokens)) / 6) ** 0.6
        assert float(line) == pytest.approx(sum(one.token_log_probs) / penalty, abs=2e-6)
    n_best = translated(folder, tmp_path, *flags, "--format", "nbest", "--n_best", "3", lines=lines)
    assert [line.split(" ||| ")[0] for line in n_best] == ["0"] * 3 + ["1"] + ["2"] * 3
    assert n_best[0] == f"0 ||| {as_line(best[0].text)} ||| {best[0].score:.6f}"


def test_json_lines_have_tokens_log_probabilities_and_alignments(folder, model, tokenizer, tmp_path):
    """A token is aligned to where the attention of all heads and layers looked most while it was chosen."""
    lines = ["Zwei Kinder", " ", "die Wiese"]
    written = translated(folder, tmp_path, "--num_beams", "2", "--format", "json", "--n_best", "2", lines=lines)
    records = [json.loads(line) for line in written]
    assert [record["line"] for record in records] == [0, 1, 2]
    assert [record["source"] for record in records] == lines
    assert records[1]["translations"][0]["alignment"] == []
    eager = type(model).from_pretrained(folder, attn_implementation="eager").eval()
    for record in (records[0], records[2]):
        source = torch.tensor([tokenizer(record["source"])["input_ids"]])
        assert record["source_tokens"] == tokenizer.convert_ids_to_tokens(source[0].tolist())
        for one in record["translations"]:
            labels = torch.tensor([tokenizer.convert_tokens_to_ids(one["tokens"])])
            log_probs = eager.token_log_probs(source, labels)[0]
            torch.testing.assert_close(torch.tensor(one["token_log_probs"]), log_probs, rtol=1e-4, atol=1e-4)
            output = eager(input_ids=source, labels=labels, output_attentions=True)
            attention = sum(layer.mean(dim=1) for layer in output.cross_attentions)[0]
            assert one["alignment"] == attention.argmax(dim=-1).tolist()


def test_prefixes_are_read_from_a_file(folder, tmp_path):
    prefixes = write(tmp_path / "prefixes", "Park", "", "Hund")
    lines = translated(folder, tmp_path, "--prefix", prefixes, lines=LINES[:3])
    assert lines[0].startswith("Park")
    assert lines[2].startswith("Hund")
    assert lines[1] == translated(folder, tmp_path, lines=LINES[:3])[1]


def test_several_models_are_an_ensemble(folder, model, tokenizer, tmp_path):
    other = tiny_model(seed=7, vocab_size=len(tokenizer))
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    lines = translated(folder, tmp_path, "--model", str(folder), str(tmp_path / "other"))
    expected = model.translate(LINES, tokenizer, ensemble=[other], max_length_b=3)
    assert lines == [as_line(line) for line in expected]
    assert lines != translated(folder, tmp_path)


def test_samples_are_drawn_with_a_seed(folder, tmp_path):
    draws = [translated(folder, tmp_path, "--sample", "--seed", seed) for seed in ("1", "1", "2")]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--n_best", "2"], "--n_best 2 needs --format nbest or json"),
        (["--interactive", "--output", "x"], "--interactive reads what is typed"),
        (["--resume", "--output", "x"], "--resume needs --input and --output"),
        (["--resume", "--output", "x", "--input", "y", "--sample"], "--resume does not go with --sample"),
        (["--top_k", "3"], "need --sample"),
        (["--temperature", "0"], "need --sample"),
        (["--sample", "--num_beams", "3"], "do not go with --sample"),
        (["--format", "json", "--n_best", "3", "--num_beams", "2"], "--n_best 3 needs as many beams"),
        (["--format", "json", "--long", "split"], "aligns whole lines"),
        (["--num_beams", "0"], "0 must be at least 1"),
        (["--batch_tokens", "0"], "0 must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, flags, message):
    with pytest.raises(SystemExit):
        main(["--model", "any", *flags])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--alpha", "-1"], r"alpha \(-1.0\) must be at least 0"),
        (["--max_source_length", "3"], r"in.txt, line 2 has \d+ tokens, more than max_source_length \(3\)"),
        (["--prefix", "/dev/null"], "--prefix ends after 0 lines, the other goes on"),
        (["--prefix", "PREFIXES"], "--prefix has 1 lines and --input 2"),
        (["--prefix", "LONG"], r"in.txt, line 2: no translation of at most \d+ tokens can begin with 'Hund"),
        (["--output", "in.txt"], r"--output \(.*in.txt\) is what is read: it would be lost"),
        (["--output", "."], "is no file"),
    ],
)
def test_what_cannot_be_done_is_an_error_without_a_trace(folder, tmp_path, capsys, flags, message):
    files = ["--input", write(tmp_path / "in.txt", "Buch", "a b c d"), "--output", str(tmp_path / "out")]
    names = {"PREFIXES": write(tmp_path / "short", "Park"), "LONG": write(tmp_path / "long", "", "Hund " * 40)}
    names |= {"in.txt": str(tmp_path / "in.txt"), ".": str(tmp_path)}
    flags = [names.get(flag, flag) for flag in flags]
    assert main(["--model", str(folder), *files, *SHORT, *flags]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "long", "short"]  # nothing is left to resume
    assert (tmp_path / "in.txt").read_text() == "Buch\na b c d\n"


def test_a_pipe_is_read_once(folder, tmp_path):
    expected = translated(folder, tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"cat {tmp_path / 'in.txt'} > {pipe}"]):
        assert main(["--model", str(folder), "--input", str(pipe), "--output", str(tmp_path / "out"), *SHORT]) == 0
    assert (tmp_path / "out").read_text().split("\n")[:-1] == expected


def test_a_blank_line_is_never_too_long(folder, tmp_path):
    assert translated(folder, tmp_path, "--max_source_length", "20", lines=[" \t" * 500, "Buch"])[0] == ""


def test_long_lines_are_translated_in_parts_on_request(folder, tokenizer, tmp_path):
    parts = ["Buch .", "die Wiese !"]
    line = " ".join(parts)
    longest = max(len(ids) for ids in tokenizer(parts)["input_ids"])
    assert len(tokenizer(line)["input_ids"]) > longest
    flags = ["--max_source_length", str(longest), "--long", "split"]
    assert translated(folder, tmp_path, *flags, lines=[line, "Buch"])[0] == " ".join(
        translated(folder, tmp_path, lines=parts)
    )


def words(text):
    return len(text.split())


def test_texts_are_split_between_sentences_else_words_else_anywhere():
    assert split_text("a b. c d! e f", 4, words) == ["a b. c d!", "e f"]
    assert split_text('a "b c." d e f', 4, words) == ['a "b c."', "d e f"]
    assert split_text("a b c d e", 2, words) == ["a b", "c d", "e"]
    assert split_text("abcdefg", 3, len) == ["abc", "def", "g"]
    assert split_text("一二。三四。五", 3, len) == ["一二。", "三四。", "五"]
    assert split_text("  a b  ", 2, words) == ["a b"]
    assert split_text("a " * 3000, 2, words) == ["a a"] * 1500
    with pytest.raises(ValueError, match="no part of 'abc' has at most 0 tokens"):
        split_text("abc", 0, len)


def test_parts_are_joined_rank_by_rank():
    one, two = Translation("a", -1.0, [5, 2], [-0.5, -0.5]), Translation("b", -2.0, [6, 2], [-1.5, -0.5])
    assert join_translations([[one, two], [two]]) == [Translation("a b", -3.0, [5, 2, 6, 2], [-0.5, -0.5, -1.5, -0.5])]
    assert join_translations([[one, two]]) == [one, two]


@pytest.fixture
def interrupted(folder, tmp_path, monkeypatch):
    """A run of windows of two lines that was stopped in its third."""
    monkeypatch.setattr(command, "WINDOW", 2)
    expected = translated(folder, tmp_path, lines=LINES * 2)
    (tmp_path / "out").unlink()
    calls, translate = [], command.Translator.translate

    def stop(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return translate(self, *arguments)

    monkeypatch.setattr(command.Translator, "translate", stop)
    files = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out")]
    arguments = ["--model", str(folder), *files, *SHORT]
    assert main(arguments) == 130
    monkeypatch.setattr(command.Translator, "translate", translate)
    return arguments, expected, calls


def test_an_interrupted_run_is_continued_where_it_was(interrupted, tmp_path, monkeypatch):
    arguments, expected, _ = interrupted
    partial = tmp_path / "out.partial"
    assert partial.read_text().split("\n")[:-1] == expected[:4]
    with partial.open("a") as file:
        file.write("half a li")  # what the system had written of the next window
    seen, translate = [], command.Translator.translate
    monkeypatch.setattr(
        command.Translator,
        "translate",
        lambda self, parts, *rest: (seen.append(parts), translate(self, parts, *rest))[1],
    )
    assert main([*arguments, "--resume"]) == 0
    assert (tmp_path / "out").read_text().split("\n")[:-1] == expected
    assert sum(map(len, seen)) == len(expected) - 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]


def test_a_crash_while_the_file_gets_its_name_loses_nothing(tmp_path, monkeypatch):
    with OutputFile(tmp_path / "out", {"model": "one"}, resume=False) as output:
        output.write("eins\n", [("one", "")])
        monkeypatch.setattr(os, "replace", mock.Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            output.finish()
    monkeypatch.undo()
    with OutputFile(tmp_path / "out", {"model": "one"}, resume=True) as output:
        assert output.lines_done == 1
        output.finish()
    assert (tmp_path / "out").read_text() == "eins\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_what_was_interrupted_is_not_lost_or_mixed_with_something_else(interrupted, tmp_path, capsys):
    arguments, expected, _ = interrupted
    assert main(arguments) == 1
    assert "was interrupted: continue it with --resume" in capsys.readouterr().err
    assert main([*arguments, "--resume", "--num_beams", "2"]) == 1
    assert "was begun with num_beams 'None', not '2'" in capsys.readouterr().err
    source = (tmp_path / "in.txt").read_text()
    write(tmp_path / "in.txt", "Hund", *LINES[1:], *LINES)
    assert main([*arguments, "--resume"]) == 1
    assert "the first 4 lines are not those" in capsys.readouterr().err
    (tmp_path / "in.txt").write_text(source)
    assert main([*arguments, "--resume"]) == 0
    assert (tmp_path / "out").read_text().split("\n")[:-1] == expected


def test_nothing_to_resume_begins_at_the_beginning(folder, tmp_path):
    assert translated(folder, tmp_path, "--resume") == translated(folder, tmp_path)


def test_what_is_typed_is_translated_line_by_line(folder, model, tokenizer, monkeypatch, capsys):
    typed = iter(["Buch", "", "x " * 300, "die Wiese"])

    def read(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert main(["--model", str(folder), "--interactive", "--max_source_length", "200", *SHORT]) == 0
    output = capsys.readouterr()
    assert output.out.split("\n")[:-1] == [
        as_line(text) for text in model.translate(["Buch", "", "die Wiese"], tokenizer, max_length_b=3)
    ]
    assert "the line has" in output.err


def test_an_unreadable_input_is_an_error_without_a_trace(folder, tmp_path, capsys):
    assert main(["--model", str(folder), "--input", str(tmp_path / "none.txt")]) == 1
    (tmp_path / "bad.txt").write_bytes(b"a\n\xff\n")
    assert main(["--model", str(folder), "--input", str(tmp_path / "bad.txt"), *SHORT]) == 1
    errors = capsys.readouterr().err
    assert "none.txt" in errors
    assert "bad.txt, line 2: text must be UTF-8" in errors
    assert "Traceback" not in errors


def test_a_missing_model_is_an_error_without_a_trace(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("Buch\n")
    assert main(["--model", str(tmp_path / "missing"), "--input", str(tmp_path / "in.txt")]) == 1
    assert f"error: there is no model in '{tmp_path / 'missing'}'" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["translate", "convert", "convert_sharing", "average_checkpoints"])
def test_damaged_weights_are_an_error_without_a_trace(folder, tmp_path, capsys, module):
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])
    output = ["--output", str(tmp_path / "out")]
    arguments = {
        "translate": ["--model", str(model), "--input", __file__],
        "convert": ["--model", str(model), "--to", "marian"],
        "convert_sharing": ["--model", str(model), "--parameter_sharing", "all"],
        "average_checkpoints": ["--checkpoints", str(model)],
    }
    with contextlib.suppress(SystemExit):
        assert importlib.import_module(f"training.{module}").main([*arguments[module], *output]) == 1
    error = capsys.readouterr().err
    assert f"error: the weights of the model in '{model}' are damaged" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_written_is_an_error_before_the_model_is_loaded(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("Buch\n")
    files = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "missing" / "out.txt")]
    assert main(["--model", "missing", *files]) == 1
    assert str(tmp_path / "missing" / "out.txt") in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_an_error_without_a_trace(folder, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("Buch\n")
    assert main(["--model", str(folder), "--input", str(tmp_path / "in.txt"), "--device", "cuda"]) == 1
    assert "error: device (cuda) cannot be used" in capsys.readouterr().err


def test_a_tokenizer_that_pads_on_the_left_changes_nothing(folder, model):
    lines = ["Buch", "Eine Frau liest ein Buch"]
    left, right = (AutoTokenizer.from_pretrained(folder, padding_side=side) for side in ("left", "right"))
    assert translate_all(model, left, lines, options()) == translate_all(model, right, lines, options())


@pytest.mark.slow
def test_standard_input_to_standard_output_in_a_fresh_process(folder, model, tokenizer):
    output = run([*PYTHON, "training.translate", "--model", folder, *SHORT], stdin="\n".join(LINES).encode()).stdout
    expected = translate_all(model, tokenizer, LINES, model.search_options(max_length_b=3))
    assert output == "".join(line + "\n" for line in expected).encode()


@pytest.mark.slow
def test_ranks_share_a_file(folder, tmp_path):
    source = write(tmp_path / "many", *LINES, "", *LINES[::-1])
    output = tmp_path / "shared"
    files = ["--input", source, "--output", str(output), "--format", "nbest", "--n_best", "2", "--num_beams", "3"]
    run([*TWO_RANKS, "training.translate", "--model", folder, *files, *SHORT])
    alone = translated(
        folder, tmp_path, "--format", "nbest", "--n_best", "2", "--num_beams", "3", lines=[*LINES, "", *LINES[::-1]]
    )
    together = [line.split(" ||| ") for line in output.read_text().split("\n")[:-1]]
    assert [line[:2] for line in together] == [line.split(" ||| ")[:2] for line in alone]
    for line, expected in zip(together, alone, strict=True):  # the batches differ, and with them the rounding
        assert float(line[2]) == pytest.approx(float(expected.split(" ||| ")[2]), abs=1e-5)


@pytest.mark.slow
def test_a_killed_process_leaves_what_can_be_continued(folder, tmp_path):
    source = write(tmp_path / "many", *LINES * 3000)
    output = tmp_path / "out"
    words = [*PYTHON, "training.translate", "--model", folder, "--input", source, "--output", output, *SHORT]
    process = subprocess.Popen([str(word) for word in words], cwd=CLONE, stderr=subprocess.DEVNULL)
    state = tmp_path / "out.partial.json"
    while not (state.exists() and json.loads(state.read_text())["lines"]):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not output.exists()
    run([*words, "--resume"])
    lines = output.read_text().split("\n")[:-1]
    assert len(lines) == 15000
    assert lines == lines[:5] * 3000


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_early_is_no_error(folder):
    process = subprocess.Popen(
        [str(word) for word in [*PYTHON, "training.translate", "--model", folder, *SHORT]],
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


@pytest.mark.parametrize(("flag", "dtype"), [("int8_weights", torch.bfloat16), ("int8_dynamic", torch.float32)])
def test_a_model_in_int8_translates_as_the_one_that_the_package_quantises(folder, tmp_path, flag, dtype):
    model, tokenizer = load(str(folder), "cpu", dtype)
    expected = quantize(model, flag).translate(LINES, tokenizer, max_length_b=3)
    assert translated(folder, tmp_path, "--dtype", flag) == [as_line(line) for line in expected]


def threads_of(monkeypatch):
    """The threads in which a search was made."""
    idents, search = [], translation.search

    def spy(*arguments, **options):
        idents.append(threading.get_ident())
        return search(*arguments, **options)

    monkeypatch.setattr(translation, "search", spy)
    return idents


def test_no_source_has_no_translation():
    assert list(search_by_length([tiny_model()], {}, BeamSearchOptions())) == []


def test_batches_on_several_threads_give_what_one_gives(model, tokenizer, four_threads, monkeypatch):
    torch.set_num_threads(2)
    idents, waiting = threads_of(monkeypatch), threading.Barrier(2, timeout=60)
    sources = dict(enumerate(tokenizer([" ".join(["Buch", "Frau"] * count) for count in range(1, 9)])["input_ids"]))
    alone = {place: model.double().search(torch.tensor([source]))[0] for place, source in sources.items()}
    with monkeypatch.context() as patch:
        own = translation.search
        patch.setattr(translation, "search", lambda *given, **options: (waiting.wait(), own(*given, **options))[1])
        together = dict(search_by_length([model], sources, BeamSearchOptions(), batch_tokens=200))
    assert len(set(idents)) == 2
    assert threading.get_ident() not in idents
    assert list(together) == sorted(sources, key=lambda place: -len(sources[place]))
    for place, found in alone.items():
        assert [one.tokens for one in together[place]] == [one.tokens for one in found]
        assert together[place][0].score == pytest.approx(found[0].score, abs=1e-12)
    model.float()


@pytest.mark.parametrize("why", ["one batch", "samples", "autocast", "one thread"])
def test_one_thread_searches_where_others_would_know_or_do_less(model, tokenizer, four_threads, monkeypatch, why):
    """A generator draws in one order, and contexts like autocast are of the thread that has entered them."""
    idents = threads_of(monkeypatch)
    sources = dict(enumerate(tokenizer(LINES)["input_ids"]))
    chosen = SamplingOptions() if why == "samples" else BeamSearchOptions()
    if why == "one thread":
        torch.set_num_threads(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
        found = dict(search_by_length([model], sources, chosen, batch_tokens=10**6 if why == "one batch" else 1))
    assert sorted(found) == sorted(sources)
    assert idents == [threading.get_ident()] * (1 if why == "one batch" else len(sources))


def test_every_worker_has_as_many_batches():
    """By hand: seven sources of 5 tokens, 15 a batch, are 3 + 3 + 1; for two workers 2 + 2 + 2 + 1."""
    sources = {place: [3, 4, 5, 6, 2] for place in range(7)}
    assert batches_by_length(sources, 15) == [[0, 1, 2], [3, 4, 5], [6]]
    assert batches_by_length(sources, 15 * 3 // 4) == [[0, 1], [2, 3], [4, 5], [6]]
    assert batches_by_length({4: [3, 2], 1: [2], 7: [3, 4, 2], 0: [5, 2]}, 4) == [[7], [0, 4], [1]]


def test_loading_knows_the_model_in_a_process_that_has_imported_nothing_else(tmp_path, tokenizer):
    model = tiny_model(vocab_size=len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    program = f"from training.loading import load; print(type(load({str(tmp_path / 'model')!r}, 'cpu')[0]).__module__)"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert found.stdout.strip() == "hf_vanilla_trm.modeling_vanilla_trm", found.stderr
