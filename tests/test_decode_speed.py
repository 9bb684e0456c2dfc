"""The benchmark of decoding, shrunk: all of its systems translate alike, and its figures follow from what it timed."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from hf_vanilla_trm import export_onnx, to_marian, vocabularies_of
from tests.conftest import tiny_model
from training import decode_speed, decoders
from training.benchmark import main
from training.decoders import System, batches_of_tokens, load_generate, load_search, padded, without_padding
from training.tokenizer import train_tokenizer

LINES = ["Buch", "Zwei Kinder spielen im Park .", "Eine Frau liest", "die Wiese", "Hund und Kinder im Buch ; Park"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(LINES * 3, vocab_size=300)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A model with more tokens than its tokenizer, and layers that share their parameters."""
    path = tmp_path_factory.mktemp("model")
    tiny_model(vocab_size=len(tokenizer) + 2, parameter_sharing="all").save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "source.txt"
    file.write_text("".join(f"{line}\n" for line in LINES))
    return file


def sources_of_lengths(*lengths):
    return [[*range(3, 2 + length), 2] for length in lengths]


def test_batches_hold_rows_times_longest_source_within_the_budget():
    """By hand, with a budget of 12: 2 x 6, then 3 x 4 at most, of which one is too long for the row before."""
    sources = sources_of_lengths(4, 6, 3, 20, 5, 1, 4)
    by_length = [3, 1, 4, 0, 6, 2, 5]
    assert batches_of_tokens(sources, by_length, 12) == [[3], [1, 4], [0, 6, 2], [5]]
    assert batches_of_tokens(sources, [2, 5, 0, 1, 6, 4, 3], 12) == [[2, 5, 0], [1, 6], [4], [3]]


def test_a_batch_is_padded_at_its_end():
    batch = padded([[7, 2], [5, 6, 2], [2]], pad=1)
    assert batch["input_ids"].tolist() == [[7, 2, 1], [5, 6, 2], [2, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([5, 1, 2, 1, 1], [5, 1, 2]), ([5, 2], [5, 2]), ([5, 1, 6, 1, 1], [5, 1, 6]), ([1, 1], []), ([2, 2], [2])],
)
def test_padding_is_what_follows_eos_or_the_last_token(tokens, expected):
    assert without_padding(tokens, eos=2, pad=1) == expected


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_with_one_beam_all_translate_alike(folder, tokenizer, tmp_path, precision):
    """Greedy search knows no length penalty; Marian's tokens are those of transformers."""
    model = decoders.load_model(str(folder), precision)
    to_marian(model.float(), max_position_embeddings=99).save_pretrained(tmp_path)
    sources = tokenizer(LINES)["input_ids"]
    theirs = load_generate(str(tmp_path), precision, 1)(sources, 5)
    assert load_generate(str(folder), precision, 1)(sources, 5) == theirs
    if precision == "fp32":
        export_onnx(model, tmp_path / "onnx")
        assert decoders.load_onnx(tmp_path / "onnx")(sources, 5) == theirs
    ours = load_search(str(folder), precision, 1)(sources, 12)
    caps = [len(source) + 50 for source in sources]
    assert ours == [row[:cap] for row, cap in zip(theirs, caps, strict=True)]
    assert len(set(map(tuple, ours))) > 1


@pytest.mark.parametrize("thread_a_batch", [False, True])
def test_ctranslate2_translates_alike_with_one_beam(folder, tokenizer, tmp_path, thread_a_batch):
    pytest.importorskip("ctranslate2")
    model = decoders.load_model(str(folder), "fp32")
    sources = tokenizer(LINES)["input_ids"]
    vocabulary = vocabularies_of(tokenizer, model.config)[0]
    decode_speed.convert(model, tokenizer, decode_speed.Task(sources, None, 1), tmp_path)
    translator = decoders.load_ctranslate2(
        tmp_path / "ctranslate2_float32", "float32", 1, vocabulary, thread_a_batch=thread_a_batch
    )
    assert translator(sources, 32) == load_generate(str(tmp_path / "marian"), "fp32", 1)(sources, 5)


def test_every_id_of_the_model_has_a_token(tokenizer):
    vocabulary, target = vocabularies_of(tokenizer, tiny_model(vocab_size=len(tokenizer) + 2).config)
    assert target == vocabulary
    assert vocabulary[:-2] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert len(set(vocabulary)) == len(tokenizer) + 2


def scripted(monkeypatch):
    """A clock that moves only when a scripted decoder says so."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(decode_speed.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(decode_speed, "PAUSE", 0)

    def decoder(name, seconds, calls):
        def decode(sources, size):
            calls.append((name, len(sources)))
            clock.now += seconds[size] * -(-len(sources) // size)
            return [[len(source), size] for source in sources]

        return decode

    return decoder


def test_each_system_is_measured_at_its_fastest_batch_size(monkeypatch):
    """Six sentences: 6 x 1 s, 3 x 1.5 s or 5 s for "a"; "b" has one size. What warms up is not counted."""
    calls = []
    decoder = scripted(monkeypatch)
    loaded = {"a": decoder("a", {1: 1.0, 2: 1.5, 6: 5.0}, calls), "b": decoder("b", {3: 4.0}, calls)}
    systems = {"a": System(None, (1, 2, 6), "sentences", None), "b": System(None, (3,), "sentences", None)}
    task = decode_speed.Task(sources_of_lengths(3, 1, 4, 6, 2, 5), None, 4)
    trials, outputs = decode_speed.try_sizes(systems, loaded, task)
    assert trials == {"a": {1: 6.0, 2: 4.5, 6: 5.0}, "b": {3: 8.0}}
    assert outputs["a"] == [[length, 2] for length in (3, 1, 4, 6, 2, 5)]
    assert outputs["b"] == [[length, 3] for length in (3, 1, 4, 6, 2, 5)]


def test_rounds_are_made_in_turn_and_each_system_begins_one(monkeypatch):
    calls = []
    decoder = scripted(monkeypatch)
    seconds = {"a": 1.0, "b": 2.0, "c": 3.0}
    loaded = {name: decoder(name, {2: value}, calls) for name, value in seconds.items()}
    task = decode_speed.Task(sources_of_lengths(3, 1, 4, 6), None, 4)
    sizes = dict.fromkeys(loaded, 2)
    times = decode_speed.seconds_of_rounds(loaded, task, sizes, 4)
    assert times == {"a": [2.0] * 4, "b": [4.0] * 4, "c": [6.0] * 4}
    assert calls == [(name, 4) for name in "abcbcacababc"]

    calls.clear()
    monkeypatch.setattr(decode_speed, "LATENCY_TURN", 2)
    latencies = {name: decoder(name, {2: value / 1000}, calls) for name, value in seconds.items()}
    times = decode_speed.milliseconds_one_by_one(latencies, task, sizes, 3)
    for name, value in seconds.items():
        assert times[name] == pytest.approx([value] * 3)
    assert "".join(name for name, _ in calls) == "abc" + "aabbcc" + "bca"


def test_ratios_are_those_of_the_rounds():
    """By hand: 4/2, 9/3 and 4/4 times as fast."""
    assert decode_speed.ratio([2.0, 3.0, 4.0], [4.0, 9.0, 4.0]) == {"median": 2.0, "lowest": 1.0, "highest": 3.0}


def test_agreement_counts_identical_tokens_and_finds_the_largest_difference():
    def hypotheses(*pairs):
        return [SimpleNamespace(tokens=tokens, score=score) for tokens, score in pairs]

    some = hypotheses(([3, 2], -1.0), ([4, 2], -2.0), ([5, 2], -3.0))
    others = hypotheses(([3, 2], -9.0), ([4, 4, 2], -2.25), ([5, 6], -2.5))
    assert decode_speed.agreement(some, others) == {"identical": 1, "of": 3, "largest_score_difference": 0.5}
    assert decode_speed.agreement(some, some) == {"identical": 3, "of": 3, "largest_score_difference": 0.0}


def test_bleu_is_that_of_the_texts(tokenizer):
    """Equal texts have 100; the special tokens are not among them."""
    task = decode_speed.Task(tokenizer(LINES)["input_ids"], LINES, 4)
    found = decode_speed.bleu(task.sources, task, tokenizer)
    assert found["bleu"] == pytest.approx(100)
    assert "tok:13a" in found["bleu_signature"]
    assert decode_speed.bleu(task.sources, decode_speed.Task(task.sources, None, 4), tokenizer) == {}


def test_sentences_are_spread_over_the_file_with_their_translations(tmp_path):
    files = [tmp_path / name for name in ("source", "reference")]
    for file, letter in zip(files, "st", strict=True):
        file.write_text("".join(f"{letter}{row}\n" for row in range(6)))
    assert decode_speed.read_sentences(*files, 3) == (["s0", "s2", "s4"], ["t0", "t2", "t4"])
    assert decode_speed.read_sentences(files[0], None, None) == ([f"s{row}" for row in range(6)], None)


def test_without_a_file_it_is_the_test_split_of_the_embedded_corpus():
    sentences, references = decode_speed.read_sentences(None, None, 10)
    assert len(sentences) == len(references) == 10
    assert not set(sentences) & set(references)


def test_the_check_compares_one_by_one_and_shuffled_with_batches_of_similar_length(folder, tokenizer):
    sources = tokenizer([*LINES, *(f"{first} {second}" for first, second in pairwise(LINES))])["input_ids"]
    task = decode_speed.Task(sources, None, 3)
    rows = decode_speed.dependence_on_batches(str(folder), "fp64", task, 120)
    assert [(row["precision"], row["batches"]) for row in rows] == [("fp64", "one by one"), ("fp64", "shuffled")]
    for row in rows:
        assert row["identical"] == row["of"] == 9
        assert row["largest_score_difference"] == 0


@pytest.mark.parametrize(("identical", "code"), [(4, 1), (5, 0)])
def test_dependence_in_float64_is_an_error(folder, source, tmp_path, monkeypatch, capsys, identical, code):
    def found(folder, precision, task, batch_tokens):
        row = {"precision": precision, "batches": "shuffled", "of": 5, "largest_score_difference": 1e-9}
        return [row | {"identical": identical if precision == "fp64" else 3}]

    monkeypatch.setattr(decode_speed, "dependence_on_batches", found)
    monkeypatch.setattr(decode_speed, "measure", lambda *arguments, **options: [])
    flags = [f"--model={folder}", f"--source={source}", f"--output_dir={tmp_path / 'out'}"]
    assert main(["decode", *flags]) == code
    printed = capsys.readouterr()
    assert f"| fp64 | shuffled | {identical} of 5 | 1.0e-09 |" in printed.out
    assert ("depends on its batch in float64" in printed.err) == bool(code)
    assert len(json.loads((tmp_path / "out" / "decode.json").read_text())["check"]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=nowhere"], "there is no model in 'nowhere'"),
        (["--source=nowhere.txt"], "nowhere.txt"),
        (["--sentences=6"], r"--sentences \(6\) must be at least 1, and at most the 5 there are"),
        (["--reference={short}"], "--reference has 1 lines, and --source 5"),
        (["--source={blank}"], "line 2: is blank"),
        (["--source={empty}"], r"--sentences \(all\) must be at least 1, and at most the 0 there are"),
    ],
)
def test_what_could_only_fail_later_is_refused_before_anything_is_measured(folder, source, tmp_path, flags, message):
    texts = {"short": "one\n", "blank": "one\n \n", "empty": ""}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    given = [flag.format(**{name: tmp_path / name for name in texts}) for flag in flags]
    with pytest.raises(SystemExit, match=message):
        main(["decode", f"--model={folder}", f"--source={source}", f"--output_dir={tmp_path / 'out'}", *given])
    assert not (tmp_path / "out").exists()


def test_a_model_that_marian_cannot_be_is_refused(tokenizer, source, tmp_path):
    tiny_model(vocab_size=len(tokenizer), layer_norm_eps=1e-6).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    flags = [f"--model={tmp_path / 'model'}", f"--source={source}", f"--output_dir={tmp_path / 'out'}"]
    with pytest.raises(SystemExit, match=r"error: layer_norm_eps \(1e-06\) must be 1e-05"):
        main(["decode", *flags])
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match=r"error: --reference \(r\) needs --source"):
        main(["decode", "--model=nowhere", "--reference=r", f"--output_dir={tmp_path / 'out'}"])


@pytest.mark.slow
def test_the_benchmark_measures_speed_latency_memory_and_translations(folder, source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decode_speed, "is_installed", lambda *packages: packages == ("torchao",))
    flags = [f"--model={folder}", f"--source={source}", f"--reference={source}", f"--output_dir={tmp_path / 'out'}"]
    flags += ["--rounds=2", "--marian_batch_sizes", "2", "5", "--latency_sentences=2", "--batch_tokens=64"]
    assert main(["decode", *flags]) == 0
    report = json.loads((tmp_path / "out" / "decode.json").read_text())
    rows = {row["system"]: row for row in report["systems"]}
    marian = ["MarianMT, fp32", "MarianMT, bf16", "ours by generate, fp32"]
    int8 = ["ours, int8_weights", "ours, int8_dynamic"]
    assert list(rows) == ["ours, fp32", "ours, bf16", *int8, *marian]
    sizes = [rows[name]["weights_bytes"] for name in ("ours, fp32", "ours, bf16", "MarianMT, fp32")]
    assert sizes[1] < sizes[0] < sizes[2]  # MarianMT's layers share nothing
    for name, row in rows.items():
        assert row["sentences_per_second"] == pytest.approx(5 / (sum(row["seconds"]) / 2))
        own = row["ratios"][name]
        assert own == {"median": 1, "lowest": 1, "highest": 1}
        for other, ratios in row["ratios"].items():
            assert ratios["lowest"] <= ratios["median"] <= ratios["highest"]
            assert ratios["lowest"] * rows[other]["ratios"][name]["highest"] == pytest.approx(1)
        assert list(row["trial_seconds"]) == (["2", "5"] if name in marian else ["16"])
        assert 10**8 < row["memory_before_bytes"] <= row["peak_memory_bytes"] < 10**10
        assert 0 <= row["bleu"] <= 100
    assert rows["ours, fp32"]["identical_to_ours"] == 1
    assert rows["ours by generate, fp32"]["bleu"] == pytest.approx(rows["MarianMT, fp32"]["bleu"])
    assert report["threads"] == torch.get_num_threads()
    assert [row["identical"] for row in report["check"] if row["precision"] == "fp64"] == [5, 5]
    assert (tmp_path / "out" / "decode.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "CTranslate2 is not installed" in printed
    assert "| MarianMT, bf16 | " in printed
    assert "| fp64 | one by one | 5 of 5 | 0.0e+00 |" in printed
