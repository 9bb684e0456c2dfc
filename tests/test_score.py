"""Scoring: the numbers beside sacreBLEU's own and arithmetic, paired tests, and what is refused before any decoding."""

import hashlib
import itertools
import json
import math
import random
import statistics

import pytest
import sacrebleu
import torch
from transformers import AutoTokenizer

import training.loading
from tests.conftest import tiny_model
from training import score
from training.digest import digest_of_file
from training.run_log import weights_digest
from training.scoring import check_seed, corpus_metric, corpus_score, paired_test
from training.tokenizer import train_tokenizer
from training.translator import translate_all

SOURCES = ["the dog is big .", "two children play in the park .", "a woman reads .", "the park", "we see a house ."]
REFERENCES = [
    "Der Hund ist groß .",
    "Zwei Kinder spielen im Park .",
    "Eine Frau liest .",
    "der Park",
    "Wir sehen ein Haus .",
]
GOOD = [
    "Der Hund ist groß .",
    "Zwei Kinder spielen im park .",
    "Eine Frau liest ein Buch .",
    "der Park",
    "Wir sehen das Haus .",
]
BAD = ["Ein Hund groß", "Kinder im Park spielen", "eine Frau", "Park", "Haus wir sehen ."]


def write(folder, **files):
    """Write each list of lines to a file of its name; return the paths."""
    paths = []
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        paths.append(folder / name)
    return paths


@pytest.fixture
def files(tmp_path):
    """The flags of a scoring without a model."""
    source, reference, good, bad = write(tmp_path, source=SOURCES, reference=REFERENCES, good=GOOD, bad=BAD)
    return {"source": source, "reference": reference, "hypotheses": good, "baseline_hypotheses": bad}


def flags(options):
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


def result_of(tmp_path, *arguments):
    """Score, which must succeed; return what the JSON file holds."""
    output = tmp_path / "result.json"
    assert score.main([*map(str, arguments), "--output", str(output), "--bootstrap", "50"]) == 0
    return json.loads(output.read_text())


def refusal(capsys, *arguments):
    """Score, which must fail; return what it says."""
    assert score.main([*map(str, arguments)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "Traceback" not in message
    return message


def replaced(errors, words=5):
    """Return a line for each number, of which so many words are none of the reference's, whose line is the first."""
    reference = [[f"w{line}_{word}" for word in range(words)] for line in range(len(errors))]
    hypotheses = [
        [*(f"x{word}" for word in range(wrong)), *line[wrong:]] for line, wrong in zip(reference, errors, strict=True)
    ]
    return [" ".join(line) for line in reference], [" ".join(line) for line in hypotheses]


# Numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "metrics"),
    [
        ([], {"bleu": sacrebleu.BLEU(), "chrf": sacrebleu.CHRF(), "ter": sacrebleu.TER()}),
        (
            ["--lowercase", "--tokenize", "intl"],
            {"bleu": sacrebleu.BLEU(lowercase=True, tokenize="intl"), "chrf": sacrebleu.CHRF(lowercase=True)},
        ),
    ],
)
def test_scores_intervals_and_signatures_are_sacrebleus(tmp_path, files, options, metrics):
    arguments = ["--hypotheses", files["hypotheses"], "--reference", files["reference"]]
    result = result_of(tmp_path, *arguments, *options, "--metrics", *metrics)
    assert list(result["scores"]) == list(metrics)
    for name, metric in metrics.items():
        expected = metric.corpus_score(GOOD, [REFERENCES], n_bootstrap=50)
        signature = str(metric.get_signature())
        printed = json.loads(expected.format(width=9, is_json=True, signature=signature))
        found = result["scores"][name]
        assert found["signature"] == signature
        assert "bs:50|seed:12345" in signature
        assert found["score"] == pytest.approx(printed["score"], abs=1e-8)
        assert found["mean"] == pytest.approx(printed["confidence_mean"], abs=1e-4)
        low, high = found["interval"]
        half = printed["confidence_var"]
        assert high == pytest.approx(min(printed["confidence_mean"] + half, 100), abs=1e-4)
        assert low == pytest.approx(max(printed["confidence_mean"] - half, 0), abs=1e-4)


def test_ter_and_its_interval_follow_from_the_errors_of_each_line():
    errors = random.Random(3).choices(range(5), k=400)
    references, hypotheses = replaced(errors)
    found = corpus_score(corpus_metric("ter"), hypotheses, [references], 1000)
    assert found["score"] == pytest.approx(100 * sum(errors) / (5 * 400))
    # All lines are of one length, so the score is the mean over lines, whose standard error is known.
    half = 1.96 * 100 * statistics.pstdev(errors) / 5 / math.sqrt(400)
    low, high = found["interval"]
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)
    assert found["mean"] == pytest.approx(found["score"], abs=half / 10)


def test_a_sample_of_nothing_but_wrong_lines_has_score_0():
    hypotheses, references = ["ab", "zz"], ["ab", "cd"]
    found = corpus_score(corpus_metric("chrf"), hypotheses, [references], 1000)
    both = sacrebleu.corpus_chrf(hypotheses, [references]).score
    # Two lines are drawn: the right one twice, the wrong one twice, or one of each, which happens in half of all cases.
    assert found["mean"] == pytest.approx(100 / 4 + 0 / 4 + both / 2, abs=4)
    assert found["interval"] == [max(found["mean"] - 50, 0), min(found["mean"] + 50, 100)]


def test_the_same_translations_have_perfect_scores(tmp_path, files, capsys):
    result = result_of(tmp_path, "--hypotheses", files["reference"], "--reference", files["reference"])
    for name, best in {"bleu": 100, "chrf": 100, "ter": 0}.items():
        found = result["scores"][name]
        assert (found["score"], found["interval"]) == (pytest.approx(best), pytest.approx([best, best]))
        assert found["score"] <= 100
    assert "| BLEU | 100.00 | [100.00, 100.00] |" in capsys.readouterr().out.splitlines()


def test_several_references_count_together_and_a_blank_one_does_not(tmp_path, files):
    others = ["Dieser Hund ist groß .", "", "Eine Frau liest ein Buch .", " ", "Wir sehen das Haus ."]
    (second,) = write(tmp_path, second=others)
    arguments = ["--hypotheses", files["hypotheses"], "--reference", files["reference"]]
    result = result_of(tmp_path, *arguments, second)
    columns = [REFERENCES, [line if line.strip() else None for line in others]]
    assert result["scores"]["bleu"]["score"] == sacrebleu.BLEU().corpus_score(GOOD, columns).score
    assert result["scores"]["bleu"]["score"] > sacrebleu.BLEU().corpus_score(GOOD, [REFERENCES]).score
    assert "nrefs:var" in result["scores"]["bleu"]["signature"]
    assert [file["file"] for file in result["files"]["references"]] == [str(files["reference"]), str(second)]


def test_ter_takes_single_characters_for_words_where_a_language_has_no_spaces(tmp_path):
    reference, hypotheses = write(tmp_path, reference=["我们今天去公园"], hypotheses=["我们明天去公园"])
    arguments = ["--hypotheses", hypotheses, "--reference", reference]
    assert result_of(tmp_path, *arguments, "--tokenize", "zh")["scores"]["ter"]["score"] == pytest.approx(100 / 7)
    assert result_of(tmp_path, *arguments)["scores"]["ter"]["score"] == 100


# Two systems -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("test", ["bs", "ar"])
def test_a_system_is_not_better_than_itself(test):
    for name in ("bleu", "chrf", "ter"):
        found = paired_test(corpus_metric(name), GOOD, GOOD, [REFERENCES], test=test, samples=20)
        assert (found["difference"], found["p_value"]) == (0, 1)


@pytest.mark.parametrize("test", ["bs", "ar"])
def test_exchanging_the_systems_changes_the_sign_of_the_difference_and_not_p(test):
    for name in ("bleu", "chrf", "ter"):
        one, other = (
            paired_test(corpus_metric(name), *systems, [REFERENCES], test=test, samples=200)
            for systems in ((BAD, GOOD), (GOOD, BAD))
        )
        assert one["difference"] == -other["difference"] != 0
        assert one["p_value"] == pytest.approx(other["p_value"], abs=0.01)
        assert f"{test}:{200 if test == 'bs' else 10000}" in one["signature"]


def test_approximate_randomisation_comes_near_the_exact_probability():
    baseline, system = [3, 0, 2, 1, 1, 2], [0, 1, 0, 3, 0, 1]
    references, hypotheses = replaced(system)
    _, before = replaced(baseline)
    found = paired_test(corpus_metric("ter"), before, hypotheses, [references], test="ar", samples=0)
    gains = [one - other for one, other in zip(baseline, system, strict=True)]
    assert found["difference"] == pytest.approx(-100 * sum(gains) / 30)
    sums = [sum(map(math.prod, zip(gains, signs, strict=True))) for signs in itertools.product((1, -1), repeat=6)]
    exact = sum(abs(total) > sum(gains) for total in sums) / len(sums)
    assert 0.1 < exact < 0.9
    assert found["p_value"] == pytest.approx(exact, abs=0.02)


def test_paired_bootstrap_finds_a_difference_that_every_line_has_and_none_in_noise():
    generator = random.Random(5)
    errors = generator.choices(range(1, 5), k=100)
    shuffled = generator.sample(errors, k=100)
    references, before = replaced(errors)
    _, better = replaced([wrong - 1 for wrong in errors])
    _, as_good = replaced([*shuffled[:-1], 5])
    options = {"test": "bs", "samples": 500}
    assert paired_test(corpus_metric("ter"), before, better, [references], **options)["p_value"] == pytest.approx(
        1 / 501
    )
    assert paired_test(corpus_metric("ter"), before, as_good, [references], **options)["p_value"] > 0.05


def test_a_baseline_is_scored_beside_the_system_and_p_is_printed(tmp_path, files, capsys):
    result = result_of(tmp_path, *flags(files))
    out = capsys.readouterr().out
    bleu, before = (sacrebleu.corpus_bleu(lines, [REFERENCES]).score for lines in (GOOD, BAD))
    assert result["scores"]["bleu"]["score"] == bleu
    assert result["baseline"]["scores"]["bleu"]["score"] == before
    assert result["paired"]["test"] == "bs"
    paired = result["paired"]["metrics"]
    assert paired["bleu"]["difference"] == pytest.approx(bleu - before)
    assert set(paired) == {"bleu", "chrf", "ter"}
    (row,) = [line for line in out.splitlines() if line.startswith("| BLEU")]
    cells = row.strip("| ").split(" | ")
    assert (cells[1], cells[3], cells[5]) == (f"{bleu:.2f}", f"{before:.2f}", f"{bleu - before:+.2f}")
    assert cells[6] == f"{paired['bleu']['p_value']:.4f}"
    assert "paired bootstrap resampling" in out
    assert f"BLEU is `{result['scores']['bleu']['signature']}`" in out
    other = result_of(tmp_path, *flags(files), "--paired", "ar")
    assert other["scores"] == result["scores"], "the test does not touch the scores"
    assert "ar:10000" in other["paired"]["metrics"]["chrf"]["signature"]
    assert "paired approximate randomisation" in capsys.readouterr().out


# Metrics of the evaluate library -------------------------------------------------------------------------------------

LONGER_THAN_THE_SOURCE = """
import datasets
import evaluate

class Longer(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"sources": text, "predictions": text, "references": text})
        return evaluate.MetricInfo(description="Texts with more words than others.", citation="", features=features)

    def _compute(self, sources, predictions, references):
        def share(others):
            pairs = list(zip(predictions, others))
            return sum(len(text.split()) > len(other.split()) for text, other in pairs) / len(pairs)
        return {"source": share(sources), "reference": share(references), "each": [1]}
"""


@pytest.fixture
def longer(tmp_path):
    script = tmp_path / "longer.py"
    script.write_text(LONGER_THAN_THE_SOURCE)
    return script


def test_a_metric_of_the_evaluate_library_gets_sources_and_one_reference(tmp_path, files, longer, capsys):
    (second,) = write(tmp_path, second=["a b c d e f g h i"] * 5)
    arguments = [*flags(files), "--metrics", longer, "ter", "--reference", files["reference"], second]
    result = result_of(tmp_path, *arguments)
    # Only the third good translation has more words than its source (four) or its reference (four).
    for name in ("longer_source", "longer_reference"):
        assert result["scores"][name] == {"score": 0.2, "mean": None, "interval": None, "signature": None}
        assert result["baseline"]["scores"][name]["score"] == 0
    assert list(result["paired"]["metrics"]) == ["ter"]
    assert "| longer_source | 0.2000 |  | 0.0000 |  | +0.2000 |  |" in capsys.readouterr().out.splitlines()


# Models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models with one tokenizer."""
    tokenizer = train_tokenizer(SOURCES * 3, vocab_size=300)
    paths = []
    for seed in (0, 1):
        paths.append(tmp_path_factory.mktemp(f"model{seed}"))
        tiny_model(seed, vocab_size=len(tokenizer)).save_pretrained(paths[-1])
        tokenizer.save_pretrained(paths[-1])
    return paths


def translations_of(seed, folder, **options):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = tiny_model(seed, vocab_size=len(tokenizer))
    return translate_all(model, tokenizer, SOURCES, model.search_options(**options))


def test_a_model_translates_the_source_and_the_result_says_with_what(tmp_path, files, folders, capsys):
    options = {"num_beams": 2, "alpha": 0.3, "max_length_a": 0.5, "max_length_b": 3}
    arguments = flags({"model": folders[0], "source": files["source"], "reference": files["reference"], **options})
    saved = tmp_path / "saved.txt"
    result = result_of(tmp_path, *arguments, "--device", "cpu", "--save_translations", saved)
    captured = capsys.readouterr()
    expected = translations_of(0, folders[0], **options)
    assert saved.read_bytes() == "".join(f"{line}\n" for line in expected).encode()
    assert result["scores"]["chrf"]["score"] == sacrebleu.corpus_chrf(expected, [REFERENCES]).score
    assert result["decoding"].items() >= options.items()
    assert result["lines"] == 5
    assert result["model"] == {"name": str(folders[0]), "weights": weights_digest(folders[0])}
    source, reference = (
        {"file": str(files[name]), "sha256": digest_of_file(files[name])} for name in ("source", "reference")
    )
    assert result["files"] == {
        "references": [reference],
        "source": source,
        "hypotheses": None,
        "baseline_hypotheses": None,
    }
    assert "Translating" in captured.err
    assert "Translating" not in captured.out
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "a temporary file was left"
    # What was saved can be scored again.
    again = result_of(tmp_path, "--hypotheses", saved, "--reference", files["reference"])
    assert again["scores"] == result["scores"]
    assert again["model"] is again["decoding"] is None
    assert again["files"]["hypotheses"]["sha256"] == hashlib.sha256(saved.read_bytes()).hexdigest()


def test_two_models_are_compared(tmp_path, files, folders):
    options = {"num_beams": 1, "max_length_b": 2}
    arguments = {"model": folders[1], "baseline_model": folders[0], **options}
    arguments |= {name: files[name] for name in ("source", "reference")}
    result = result_of(tmp_path, *flags(arguments), "--device", "cpu", "--metrics", "chrf")
    system, baseline = (translations_of(seed, folders[seed], **options) for seed in (1, 0))
    assert system != baseline
    chrf, before = (sacrebleu.corpus_chrf(lines, [REFERENCES]).score for lines in (system, baseline))
    assert result["paired"]["metrics"]["chrf"]["difference"] == pytest.approx(chrf - before)
    assert result["baseline"]["model"] == {"name": str(folders[0]), "weights": weights_digest(folders[0])}


def test_lines_that_are_blank_on_both_sides_are_scored_as_they_are(tmp_path, folders):
    source, reference = write(tmp_path, source=["", *SOURCES, " "], reference=[" ", *REFERENCES, ""])
    arguments = {"model": folders[0], "source": source, "reference": reference, "num_beams": 1, "max_length_b": 2}
    result = result_of(tmp_path, *flags(arguments), "--device", "cpu")
    expected = ["", *translations_of(0, folders[0], num_beams=1, max_length_b=2), ""]
    assert result["scores"]["bleu"]["score"] == sacrebleu.corpus_bleu(expected, [["", *REFERENCES, ""]]).score
    assert result["lines"] == 7


# What is refused before a model is loaded ----------------------------------------------------------------------------


@pytest.fixture
def no_model(monkeypatch):
    def refuse(*_):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(score, "load_for_search", refuse)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": None}, "--model needs --source"),
        ({"reference": "four"}, "four has 4 lines and {folder}/source has 5"),
        ({"source": "four"}, "reference has 5 lines and {folder}/four has 4"),
        ({"reference": "gap"}, "{folder}/gap, line 2: the reference is blank, and that line of {folder}/source is not"),
        ({"reference": "blank", "source": "blank"}, "blank: there is no line that is not blank"),
        ({"reference": "empty", "source": "empty"}, "empty: there is no line that is not blank"),
        ({"reference": "latin1"}, "latin1, line 1: text must be UTF-8, but byte 4 of the line is 0xdf"),
        ({"reference": "missing"}, "{folder}/missing"),
        ({"metrics": "no_such_metric"}, "the metric 'no_such_metric' cannot be loaded"),
        ({"tokenize": "nonsense"}, "tokenize ('nonsense'): sacreBLEU has no such tokenizer here"),
        ({"bootstrap": 1}, "--bootstrap (1) must be at least 2"),
        ({"paired": "ar"}, "--paired (ar) needs --baseline_model or --baseline_hypotheses"),
        ({"output": "missing/out.json"}, "missing/out.json cannot be written: No such file or directory"),
        ({"output": ""}, "cannot be written: it is a folder"),
        ({"output": "source"}, "source is both read and written"),
        ({"save_translations": "new", "output": "new"}, "are the same file"),
        ({"baseline_hypotheses": "four"}, "reference has 5 lines and {folder}/four has 4"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_a_model_is_loaded(tmp_path, files, no_model, capsys, changes, message):
    write(tmp_path, four=REFERENCES[:4], gap=["a", " ", "c", "d", "e"], blank=["", " "], empty=[])
    (tmp_path / "latin1").write_bytes("groß\n".encode("latin-1") * 5)
    options = {"model": "any", "source": "source", "reference": "reference", **changes}
    words = {"metrics", "tokenize", "bootstrap", "paired", "model"}
    found = {name: value if name in words else tmp_path / value for name, value in options.items() if value is not None}
    assert message.format(folder=tmp_path) in refusal(capsys, *flags(found))
    assert {path.name for path in tmp_path.iterdir()}.isdisjoint({"out.json", "new"})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--num_beams", "4"], "--num_beams (4) needs a model"),
        (["--alpha", "0"], "--alpha (0.0) needs a model"),
        (["--save_translations", "any"], "--save_translations (any) needs --model"),
        (["--metrics", "bleu", "bleu"], "metrics: two of them have one name: bleu, bleu"),
    ],
)
def test_options_without_effect_are_refused(files, capsys, extra, message):
    arguments = {name: files[name] for name in ("hypotheses", "reference")}
    assert message in refusal(capsys, *flags(arguments), *extra)


def test_a_metric_that_needs_sources_is_refused_without_them(files, longer, capsys):
    arguments = {name: files[name] for name in ("hypotheses", "reference")}
    assert "the metric 'longer' looks at the sources: give --source" in refusal(
        capsys, *flags(arguments), "--metrics", longer
    )


def test_a_script_with_the_name_of_one_of_sacrebleus_metrics_is_refused(files, longer, capsys):
    script = longer.rename(longer.with_name("ter.py"))
    assert f"the metric '{script}' has the name of one of" in refusal(capsys, *flags(files), "--metrics", script)


def test_a_metric_without_a_number_is_refused(tmp_path, files, longer, capsys):
    longer.write_text(longer.read_text().replace('"source": share(sources), "reference": share(references), ', ""))
    assert "the metric 'longer' gives no number" in refusal(capsys, *flags(files), "--metrics", longer)


def test_a_blank_reference_of_a_translation_is_refused_without_a_source_too(tmp_path, files, capsys):
    (gap,) = write(tmp_path, gap=["a", "", "c", "d", "e"])
    message = refusal(capsys, "--hypotheses", files["hypotheses"], "--reference", gap)
    assert f"gap, line 2: the reference is blank, and that line of {files['hypotheses']} is not" in message


@pytest.mark.parametrize(
    ("extra", "message"), [(["--alpha=-1"], "alpha (-1"), (["--baseline_model=missing"], "missing")]
)
def test_a_model_that_cannot_decode_so_is_refused_before_anything_is_decoded(
    files, folders, monkeypatch, capsys, extra, message
):
    def refuse(*_, **__):
        raise AssertionError("something was decoded")

    monkeypatch.setattr(score, "translate_all", refuse)
    arguments = {"model": folders[0], "source": files["source"], "reference": files["reference"]}
    assert message in refusal(capsys, *flags(arguments), *extra)


def test_a_model_of_another_package_is_refused(files, monkeypatch, capsys):
    monkeypatch.setattr(training.loading, "load", lambda *_: (torch.nn.Linear(1, 1), None))
    arguments = {"model": "other", "source": files["source"], "reference": files["reference"]}
    assert "other is a Linear: only models of this package are decoded here" in refusal(capsys, *flags(arguments))


@pytest.mark.parametrize("seed", ["0", "-1", "x", ""])
def test_a_seed_that_sacrebleu_could_not_use_is_refused(monkeypatch, seed):
    monkeypatch.setenv("SACREBLEU_SEED", seed)
    with pytest.raises(ValueError, match=rf"SACREBLEU_SEED \('{seed}'\) must be a number from 1, or none"):
        check_seed()


def test_another_seed_draws_other_samples_and_says_so(tmp_path, files, monkeypatch):
    arguments = flags({name: files[name] for name in ("hypotheses", "reference")})
    usual = result_of(tmp_path, *arguments)
    assert result_of(tmp_path, *arguments)["scores"] == usual["scores"]
    monkeypatch.setenv("SACREBLEU_SEED", "7")
    other = result_of(tmp_path, *arguments)["scores"]["bleu"]
    assert other["score"] == usual["scores"]["bleu"]["score"]
    assert other["mean"] != usual["scores"]["bleu"]["mean"]
    assert "seed:7|" in other["signature"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "a", "--hypotheses", "b"],
        [],
        ["--hypotheses", "b", "--baseline_model", "a", "--baseline_hypotheses", "c"],
    ],
)
def test_a_system_is_a_model_or_translations(capsys, arguments):
    with pytest.raises(SystemExit):
        score.main([*arguments, "--reference", "any"])
    assert "--hypotheses" in capsys.readouterr().err
