"""Comparing ways of sharing: what is run, that it goes on where it was, and that the table says what the runs did."""

import csv
import json
import subprocess
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForSeq2SeqLM

import training.train
from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration
from tests.conftest import tiny_config
from tests.pairs import write_reversed_pairs
from training import compare_sharing
from training.compare_sharing import CompareArguments, changed, main, variants_of
from training.evaluation import TranslationMetric
from training.memory import peak_memory, reset_peak_memory

WORDS = ["der", "hund", "katze", "haus", "baum", "sieht"]
SIZES = [(128, 256, 4, 9712), (256, 1024, 4, 9712), (128, 512, 2, 800), (512, 2048, 6, 37000)]


def arguments_of(**options):
    return CompareArguments(**{"base": "base.yaml", "output_dir": "out"} | options)


def parameters(config):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in VanillaTrmForConditionalGeneration(config).parameters())


# What is compared --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
def test_models_at_equal_parameters_have_them_within_two_percent(sizes):
    d_model, d_ff, layers, vocab_size = sizes
    depths = {"encoder_layers": layers, "decoder_layers": layers, "num_attention_heads": 4}
    unshared = VanillaTrmConfig(vocab_size=vocab_size, d_model=d_model, d_ff=d_ff, **depths)
    wanted, variants = parameters(unshared), variants_of(unshared, arguments_of())
    assert [variant.name for variant in variants] == [
        *("attention", "ffn", "all", "attention wider", "ffn wider", "all wider", "all deeper x2", "all deeper x3")
    ]
    for variant in variants:
        config = changed(unshared, **variant.changes)
        assert config.parameter_sharing == variant.name.split()[0]
        if variant.name.endswith("wider"):
            assert parameters(config) == pytest.approx(wanted, rel=0.02)
            assert (config.encoder_layers, config.decoder_layers) == (layers, layers)
            assert config.d_model > d_model
            assert config.d_ff / config.d_model == pytest.approx(d_ff / d_model, rel=0.25)
        elif "deeper" in variant.name:
            times = int(variant.name[-1])
            assert parameters(config) == wanted
            assert config.encoder_layers == config.decoder_layers == times * layers
            assert (config.num_unique_layers, config.d_model) == (layers, d_model)
        else:
            assert parameters(config) < wanted
            assert (config.d_model, config.d_ff, config.encoder_layers) == (d_model, d_ff, layers)


def test_fewer_ways_may_be_asked_for():
    options = arguments_of(modes="all", wider=False, deeper=False)
    assert [variant.name for variant in variants_of(tiny_config(), options)] == ["all"]
    with pytest.raises(ValueError, match=r"encoder_layers \(4\) and decoder_layers \(2\) differ"):
        variants_of(tiny_config(encoder_layers=4), arguments_of())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": "all some"}, "'some' is none of attention, ffn, all"),
        ({"seeds": ""}, "must be numbers"),
        ({"seeds": "1 x"}, "must be numbers"),
        ({"num_bootstrap": 1}, r"num_bootstrap \(1\)"),
        ({"arguments": "--seed 7"}, "arguments: --seed is given to each run by this command"),
        ({"arguments": "--output_dir=x"}, "arguments: --output_dir is given"),
        ({"min_exact_match": 101.0}, r"min_exact_match \(101.0\)"),
    ],
)
def test_a_bad_argument_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        arguments_of(**options)


def test_what_is_named_twice_is_run_once():
    options = arguments_of(seeds="042 42 7", modes="all all")
    assert (options.seeds, options.modes) == ("42 7", "all")


def test_a_number_that_the_unshared_model_ignores_does_not_reach_the_sharing_ones():
    unshared = tiny_config(num_unique_layers=2, sharing_order="cycle")
    variants = {variant.name: changed(unshared, **variant.changes) for variant in variants_of(unshared, arguments_of())}
    assert parameters(variants["all"]) < parameters(unshared)
    assert variants["all"].num_unique_layers == variants["all wider"].num_unique_layers == 1


def test_one_layer_of_the_smallest_width_has_a_wider_one():
    unshared = tiny_config(d_model=2, d_ff=3, encoder_layers=1, decoder_layers=1)
    assert len(variants_of(unshared, arguments_of(deeper=False))) == 6


@pytest.mark.parametrize("right", [0, 1, 5, 200])
def test_intervals_hold_the_score_however_weak_the_model(right):
    """Independent: the standard deviation of the mean of right lines, by the binomial formula."""
    references = [f"the number {number} is written here" for number in range(200)]
    translations = [*references[:right], *["q"] * (200 - right)]
    metric = TranslationMetric()
    ends = compare_sharing.intervals(metric, translations, references, 400)
    scores = metric.compute(predictions=translations, references=references)
    for name in ("bleu", "chrf"):
        low, high = ends[f"{name}_low"], ends[f"{name}_high"]
        assert low - 1e-9 <= scores[name] <= high + 1e-9
        assert json.dumps(ends)
        if right in (0, 200):
            assert low == high
    if right == 5:  # chrF of such lines is close to the share of right ones
        share = right / 200
        spread = 2 * 1.96 * 100 * (share * (1 - share) / 200) ** 0.5
        assert ends["chrf_high"] - ends["chrf_low"] == pytest.approx(spread, rel=0.6)


def test_the_peak_of_memory_begins_anew():
    device = torch.device("cpu")
    large = torch.ones(50_000_000)
    assert peak_memory(device) > 200_000_000
    del large
    reset_peak_memory(device)
    before = peak_memory(device)
    large = torch.ones(25_000_000)
    assert 90_000_000 < peak_memory(device) - before < 130_000_000
    del large


# Whole comparisons -------------------------------------------------------------------------------------------------


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Returns a function that compares on tiny data; the runs of training are in this process."""
    files = write_reversed_pairs(tmp_path, WORDS, {"train": 30, "validation": 5, "test": 9}, lengths=3)
    sizes = {"vocab_size": 270, "d_model": 16, "d_ff": 24, "encoder_layers": 1, "decoder_layers": 1}
    recipe = {"num_attention_heads": 2, "warmup_steps": 2, "batch_tokens": 150, "max_updates": 3, "eval_every": 2}
    other = {"max_length_b": 2, "num_beams": 2, "report_to": "none", "cpu_threads": 1, "output_dir": "unused"}
    lines = [f"{name}: {value}" for name, value in (files | sizes | recipe | other).items()]
    (tmp_path / "base.yaml").write_text("\n".join(lines) + "\n")

    def run(command, *, check):
        assert check
        run.commands.append(command)
        AcceleratorState._reset_state(True)
        code = training.train.main(command[3:])
        AcceleratorState._reset_state(True)
        if code:
            raise subprocess.CalledProcessError(code, command)

    run.commands = []
    ours = SimpleNamespace(run=run, CalledProcessError=subprocess.CalledProcessError)
    monkeypatch.setattr(compare_sharing, "subprocess", ours)

    def compare(*flags):
        run.commands.clear()
        flags = [f"--base={tmp_path / 'base.yaml'}", f"--output_dir={tmp_path / 'out'}", "--num_bootstrap=20", *flags]
        return main([str(flag) for flag in flags])

    compare.folder, compare.commands, compare.base = tmp_path / "out", run.commands, tmp_path / "base.yaml"
    return compare


def rows_of(compare):
    return json.loads((compare.folder / "results.json").read_text())["rows"]


def test_a_comparison_writes_what_its_runs_did(compare, capsys):
    assert compare() == 0
    rows = rows_of(compare)
    assert len(rows) == len(compare.commands) == 9
    for row in rows:
        run = compare.folder / "runs" / f"{row['variant'].replace(' ', '_')}-42"
        results = json.loads((run / "results.json").read_text())
        model = AutoModelForSeq2SeqLM.from_pretrained(run / "best")
        assert row["parameters"] == sum(parameter.numel() for parameter in model.parameters())
        assert row["file_bytes"] == (run / "best" / "model.safetensors").stat().st_size
        for name in ("bleu", "chrf", "exact_match", "loss"):
            assert row[name] == pytest.approx(results["test"][name])
        for name in ("bleu", "chrf"):
            assert row[f"{name}_low"] <= row[f"{name}_high"]
        assert row["peak_memory_bytes"] == results["peak_memory_bytes"] > 0
        assert row["target_tokens_per_second"] > 0
        assert row["sentences_per_second"] > 0
        assert row["updates"] == 3
    with (compare.folder / "table.csv").open() as file:
        for line, row in zip(csv.DictReader(file), rows, strict=True):
            assert line == {name: "" if value is None else str(value) for name, value in row.items()}
    table = (compare.folder / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert f"| all | 16 / 24 | 1+1 (1+1) | {rows[3]['parameters']:,} |" in table
    assert f"{rows[0]['chrf']:.1f} [{rows[0]['chrf_low']:.1f}, {rows[0]['chrf_high']:.1f}]" in table
    for name in ("quality_parameters", "quality_time", "learning_curves"):
        assert (compare.folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_all_runs_have_the_same_recipe_and_differ_in_their_layers_and_seeds_alone(compare):
    compare("--seeds=1 2", "--modes=all ffn", "--no_wider", "--no_deeper", "--arguments=--learning_rate 0.01")
    arguments = [json.loads(file.read_text())["arguments"] for file in compare.folder.glob("runs/*/run.json")]
    differing = {name for name in arguments[0] if len({str(run[name]) for run in arguments}) > 1}
    assert differing == {"parameter_sharing", "num_unique_layers", "sharing_order", "seed", "output_dir"}
    assert {run["learning_rate"] for run in arguments} == {0.01}
    pairs = {(run["parameter_sharing"], run["seed"]) for run in arguments}
    assert pairs == {(mode, seed) for mode in (None, "all", "ffn") for seed in (1, 2)}
    table = (compare.folder / "table.md").read_text()
    assert "mean ± deviation of 2 seeds" in table
    chrf = [row["chrf"] for row in rows_of(compare) if row["variant"] == "all"]
    mean, spread = sum(chrf) / 2, abs(chrf[0] - chrf[1]) / 2**0.5
    assert f"| {mean:.1f} ± {spread:.1f} |" in table


def test_an_interrupted_comparison_goes_on_where_it_was(compare, monkeypatch):
    original = compare_sharing.train

    def interrupted(arguments, variant, seed):
        if variant.name == "ffn":
            raise KeyboardInterrupt
        return original(arguments, variant, seed)

    flags = ["--no_wider", "--no_deeper"]
    with monkeypatch.context() as patch:
        patch.setattr(compare_sharing, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compare(*flags)
    assert len(compare.commands) == 2
    done = {path: path.stat().st_mtime_ns for path in compare.folder.rglob("*") if path.is_file()}
    assert compare(*flags) == 0
    assert [command[-3:][0] for command in compare.commands] == ["--parameter_sharing=ffn", "--parameter_sharing=all"]
    kept = {path: path.stat().st_mtime_ns for path in done if path.name != "comparison.json"}
    assert kept == {path: time for path, time in done.items() if path in kept}

    rows = rows_of(compare)
    assert compare(*flags) == 0
    assert compare.commands == []
    assert rows_of(compare) == rows
    assert compare(*flags, "--seeds=42 7") == 0, "more of the same may be asked for"
    assert len(compare.commands) == 4


def test_another_recipe_in_the_same_folder_is_refused(compare, capsys):
    flags = ["--no_wider", "--no_deeper", "--modes=all"]
    compare(*flags)
    assert compare(*flags, "--arguments=--learning_rate 1") == 1
    assert "holds a comparison with another base or other arguments" in capsys.readouterr().err
    compare.base.write_text(compare.base.read_text() + "learning_rate: 1\n")
    assert compare(*flags) == 1


def test_a_failed_run_is_named_and_tried_again(compare, capsys):
    flags = ["--no_wider", "--no_deeper", "--modes=all", "--arguments=--tokenizer missing"]
    assert compare(*flags) == 1
    error = capsys.readouterr().err
    assert "a run failed, and the same command tries it again: " in error
    assert "training.train" in error


def test_a_base_that_cannot_be_compared_is_refused_before_any_training(compare, capsys):
    assert compare("--arguments=--encoder_layers 2") == 1
    assert "deeper: encoder_layers (2) and decoder_layers (1) differ" in capsys.readouterr().err
    assert compare.commands == []


def test_scores_are_measured_again_where_they_were_measured_otherwise_or_not_to_the_end(compare):
    flags = ["--no_wider", "--no_deeper", "--modes=all"]
    compare(*flags)
    file = compare.folder / "runs" / "all-42" / "decoding.json"
    file.write_text(file.read_text()[:40])
    assert compare(*flags, "--num_bootstrap=30") == 0
    assert compare.commands == []
    assert {json.loads(path.read_text())["inputs"]["num_bootstrap"] for path in file.parent.parent.glob("*/dec*")} == {
        30
    }


def test_without_a_test_split_the_table_says_that_the_scores_are_of_validation(compare):
    compare.base.write_text("".join(line for line in compare.base.open() if not line.startswith("test_")))
    assert compare("--no_wider", "--no_deeper", "--modes=all") == 0
    assert "intervals over the validation lines" in (compare.folder / "table.md").read_text()


def test_a_comparison_with_a_weak_unshared_model_does_not_count(compare, capsys):
    assert compare("--no_wider", "--no_deeper", "--modes=all", "--min_exact_match=90") == 1
    assert "exact match, and not 90.0 %: this compares nothing" in capsys.readouterr().err
    assert (compare.folder / "table.md").read_text().startswith("The unshared model is too weak")


def test_a_base_that_shares_already_is_refused(compare, capsys):
    assert compare("--arguments=--parameter_sharing all") == 1
    assert "base: parameter_sharing (all) must be none" in capsys.readouterr().err


def test_shipped_comparisons_are_read():
    for file in (compare_sharing.Path(training.__file__).parent / "configs").glob("compare_*.yaml"):
        (options,) = compare_sharing.parse_dataclasses((CompareArguments,), ["--config", str(file)], description="")
        assert compare_sharing.Path(options.base).exists()
