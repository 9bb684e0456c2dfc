"""The benchmark command, shrunk: it trains through the real path, and its report says what the runs' own files say."""

import collections
import json
import math
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration
from tests.conftest import tiny_config
from tests.interruptions import Killed
from training import sharing_speed, step_speed
from training.arguments import ModelArguments
from training.benchmark import main
from training.initialisation import fresh_loss, summarise, table, write_reverse_task, xavier
from training.loop import TrainingLoop

SIZES = {"d_model": 16, "d_ff": 24, "encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 2}
RECIPE = {"max_updates": 4, "eval_every": 2, "warmup_steps": 2, "cooldown_steps": 1, "batch_tokens": 200}


@pytest.fixture
def benchmark(tmp_path):
    """Returns a function that runs the tiny benchmark in this process; flags come last and win."""

    def run_main(*flags):
        AcceleratorState._reset_state(True)
        options = ["--output_dir", tmp_path, "--train_lines", 300, "--held_out_lines", 7]
        given = [f"--{name}={value}" for name, value in (SIZES | RECIPE).items()]
        return main(["initialisation", *map(str, options), *given, *map(str, flags)])

    run_main.folder = tmp_path
    yield run_main
    AcceleratorState._reset_state(True)


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_benchmark_trains_each_initialisation_and_reports_what_the_runs_say(benchmark, capsys):
    assert benchmark("--seed", 5) == 0
    report = json.loads((benchmark.folder / "initialisation.json").read_text())
    assert list(report["initialisations"]) == ["normal", "xavier"]
    for name, result in report["initialisations"].items():
        own = json.loads((benchmark.folder / name / "run.json").read_text())
        assert result["run"] == own
        assert own["arguments"]["seed"] == 5
        assert own["arguments"]["label_smoothing"] == 0.1
        assert own["sessions"][0]["versions"]["torch"] == torch.__version__
        rows = [json.loads(line) for line in (benchmark.folder / name / "metrics.jsonl").read_text().splitlines()]
        losses = {row["update"]: row["validation_loss"] for row in rows if "validation_loss" in row}
        assert {point["update"]: point["loss"] for point in result["curve"]} == losses
        assert list(losses) == [2, 4]
    first, second = (result["curve"][0]["loss"] for result in report["initialisations"].values())
    assert first != second
    assert (benchmark.folder / "initialisation.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("`")[1] for line in printed if line.startswith("| `")] == ["normal", "xavier"]


@pytest.mark.slow
def test_an_interrupted_benchmark_started_again_repeats_nothing_and_ends_alike(benchmark, monkeypatch):
    assert benchmark() == 0
    whole = json.loads((benchmark.folder / "initialisation.json").read_text())["initialisations"]
    before = files_of(benchmark.folder / "normal")
    (benchmark.folder / "xavier").rename(benchmark.folder / "whole")
    original = TrainingLoop._update

    def dying(self, batches):
        if self.progress.update + 1 == 4:
            raise Killed
        original(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_update", dying)
        with pytest.raises(Killed):
            benchmark()
    assert benchmark() == 0
    again = json.loads((benchmark.folder / "initialisation.json").read_text())["initialisations"]
    assert len(again["xavier"]["run"]["sessions"]) == 2
    for name in ("normal", "xavier"):
        without_clock = ([point | {"minutes": None} for point in report[name]["curve"]] for report in (whole, again))
        assert next(without_clock) == next(without_clock)
    assert files_of(benchmark.folder / "normal") == before


@pytest.mark.slow
def test_a_benchmark_of_other_data_does_not_continue_a_run(benchmark, capsys):
    assert benchmark("--initialisations", "normal") == 0
    assert benchmark("--initialisations", "normal", "--train_lines", 301) == 1
    assert "train_source was" in capsys.readouterr().err


def test_a_mistyped_flag_stops_before_anything_is_written(benchmark):
    with pytest.raises(SystemExit):
        benchmark("--max_updatse", 3)
    assert not list(benchmark.folder.iterdir())


def test_targets_are_the_sources_reversed_and_no_held_out_line_is_trained_on(tmp_path):
    flags = write_reverse_task(tmp_path, 40_000, 900, seed=3)
    files = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    lines = {name: Path(file).read_text().splitlines() for name, file in files.items()}
    for split, rows in (("train", 40_000), ("validation", 900)):
        assert len(lines[f"{split}_source"]) == rows
        assert [text[::-1] for text in lines[f"{split}_source"]] == lines[f"{split}_target"]
        lengths = collections.Counter(map(len, lines[f"{split}_source"]))
        assert sorted(lengths) == list(range(3, 13))
    held_out = set(lines["validation_source"])
    assert len(held_out) == 900
    assert not held_out & set(lines["train_source"])


def test_the_same_seed_writes_the_same_lines_and_another_seed_others(tmp_path):
    texts = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        flags = write_reverse_task(tmp_path / folder, 50, 5, seed=seed)
        texts.append([Path(flag.split("=", 1)[1]).read_text() for flag in flags])
    assert texts[0] == texts[1] != texts[2]


def test_xaviers_weights_have_the_spread_that_its_name_promises():
    model = VanillaTrmForConditionalGeneration(tiny_config(vocab_size=3000, d_model=64, d_ff=192))
    torch.manual_seed(0)
    xavier(model)
    layer = model.model.decoder.layers[1]
    for matrix, fan_in, fan_out in ((layer.cross_attn.k_proj, 64, 64), (layer.feed_forward.fc1, 64, 192)):
        bound = math.sqrt(6 / (fan_in + fan_out))
        assert matrix.weight.abs().max().item() == pytest.approx(bound, rel=0.01)
        assert matrix.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert model.model.shared.weight.std().item() == pytest.approx(1 / 8, rel=0.03)
    assert model.lm_head.weight is model.model.shared.weight


def test_the_loss_of_a_fresh_model_is_the_uniform_guess_for_small_weights_only():
    """With embeddings of zero every logit is 0; large embeddings favour some tokens, and the mean loss grows."""

    def scaled(factor):
        def initialise(model):
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(factor)

        return initialise

    sizes = ModelArguments(**SIZES)
    assert fresh_loss(sizes, scaled(0), seed=1) == pytest.approx(math.log(8000), rel=1e-5)
    assert fresh_loss(sizes, scaled(100), seed=1) > 1.5 * math.log(8000)


def test_the_threshold_counts_as_reached_at_the_first_evaluation_not_below_it(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "results.json").write_text('{"parameters": 8, "updates": 40, "minutes": 4.5}')
    rows = []
    for update, exact_match in ((10, 98.9), (20, 99.0), (30, 100.0), (40, 97.0)):
        rows.append({"update": update, "minutes": update / 10, "train_loss": 2.0})
        rows.append({"update": update, "validation_exact_match": exact_match, "validation_loss": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarise(tmp_path)
    assert summary["reached"] == {"update": 20, "minutes": 2.0, "exact_match": 99.0, "loss": 0.5}
    assert summary["final_exact_match"] == 97.0

    result = {"weights": "W", "fresh_loss": 9.0, **summary}
    never = result | {"reached": None}
    report = {"fresh_vocabulary": 8000, "threshold": 99.0, "initialisations": {"a": result, "b": never}}
    a, b = (line.strip("| ").split(" | ") for line in table(report).splitlines()[2:])
    assert a == ["`a`: W", "97.0 % after 40 updates", "20", "2.0", "9.00"]
    assert b == ["`b`: W", "97.0 % after 40 updates", "never", "never", "9.00"]


def test_the_benchmark_of_sharing_modes_reports_ratios_of_what_it_timed(tmp_path, capsys, monkeypatch):
    clock = iter(range(10_000))
    slowness = {"none": 2.0, "attention": 1.0, "ffn": 4.0, "all": 2.0}

    def scripted(steps, batches, rounds):
        for step in steps.values():
            step(batches[0])
        return {name: [slowness[name] * (1 + next(clock) % 2) for _ in range(rounds)] for name in steps}

    monkeypatch.setattr(sharing_speed, "seconds_in_turn", scripted)
    flags = ["--size=tiny", "--vocab_size=50", "--sentences=2", "--length=3", "--rounds=4"]
    assert main(["sharing", *flags, f"--output_dir={tmp_path}"]) == 0
    rows = json.loads((tmp_path / "sharing.json").read_text())["rows"]
    assert {row["mode"]: row["speed_ratio"] for row in rows} == {"none": 1, "attention": 2, "ffn": 0.5, "all": 1}
    for row in rows:
        config = VanillaTrmConfig(vocab_size=50, parameter_sharing=row["mode"], **step_speed.SIZES["tiny"])
        numbers = sum(parameter.numel() for parameter in VanillaTrmForConditionalGeneration(config).parameters())
        assert 4 * numbers < row["file_bytes"] < 4 * numbers + 40_000
    assert "| all | 3.000 | 1.000 (1.000, 1.000) |" in capsys.readouterr().out


@pytest.mark.slow
def test_streaming_is_measured_on_a_corpus_and_on_a_longer_one(tmp_path, capsys):
    assert main(["streaming", "--lines", "300", "--times", "3", "--output_dir", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "streaming.json").read_text())
    assert [corpus["lines"] for corpus in result["corpora"]] == [300, 900]
    assert all(10**8 < corpus["peak_bytes"] < 10**10 for corpus in result["corpora"])
    assert 0.5 < result["ratio"] < 2
    for lines in (300, 900):
        run = json.loads((tmp_path / str(lines) / "results.json").read_text())
        assert run["epochs"] == 1
    assert "peak memory with 3 times the lines" in capsys.readouterr().out
