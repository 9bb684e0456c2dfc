"""The benchmark of training speed, shrunk: its peers are the models they are called, and its figures follow from what
it timed.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from training import peers, step_speed, train_speed
from training.arguments import parse_arguments
from training.benchmark import main
from training.joeynmt_speed import speed_of, write_tokens
from training.launching import start_accelerator
from training.loop_speed import WARM_UP, StepsBeside, summary
from training.ranks import StopRequest
from training.run_log import RunLog
from training.train import prepare

SIZE = {"d_model": 16, "d_ff": 24, "encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 2}
VOCAB = 50


def batches(number=2):
    lengths = np.array([5, 3, 7, 4, 6]), np.array([4, 6, 2, 5, 3])
    return train_speed.random_batches(lengths, VOCAB, 21, number)


def test_useful_work_is_counted_as_stated():
    """By hand for d 2, d_ff 3, one layer a side, 5 words: 6 (16 + 12 + 32 + 12 + 10)."""
    size = {"d_model": 2, "d_ff": 3, "encoder_layers": 1, "decoder_layers": 1}
    assert train_speed.useful_flops(size, 5) == 6 * (16 + 12 + 32 + 12 + 10)


def test_useful_work_is_six_times_the_weights_that_a_token_meets():
    """Of an encoder-decoder without biases and norms, source and target being equally long."""
    model = peers.build_ours(SIZE, VOCAB, attention_bias=False)
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    assert train_speed.useful_flops(SIZE, VOCAB) == 6 * matrices


def test_batches_have_the_given_lengths_and_no_token_of_special_meaning():
    sources, targets = [], []
    for batch in batches(number=9):
        assert max(batch["input_ids"].numel(), batch["labels"].numel()) <= 21
        sources += batch["attention_mask"].sum(1).tolist()
        targets += (batch["labels"] != -100).sum(1).tolist()
        assert batch["input_ids"][batch["attention_mask"] == 1].min() >= peers.FIRST_WORD
        assert batch["input_ids"].max() < VOCAB
    assert sorted(zip(sources, targets, strict=True)) == [(3, 6), (4, 5), (5, 4), (6, 3), (7, 2)]


@pytest.mark.parametrize("name", ["ours, none", "ours, all", "MarianMT", "nn.Transformer"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_system_learns_the_batch_it_is_given(name, precision):
    """The loss begins at that of a uniform guess, or a little above it, and falls when a step is repeated."""
    torch.manual_seed(0)
    system = train_speed.systems_of(("none", "all"), precision)[name]
    model = system.build(SIZE, VOCAB)
    step = step_speed.step_of(model, system.loss, precision, learning_rate=3e-3)
    (batch,) = batches(number=1)
    losses = [float(step(batch)) for _ in range(40)]
    assert math.log(VOCAB) - 0.2 < losses[0] < math.log(VOCAB) + 2
    assert losses[-1] < losses[0] - 0.2


def test_the_peer_of_torch_is_a_translation_model():
    """It sees no padding, and no target but those before."""
    model = peers.build_torch(SIZE, VOCAB).eval()
    source, target = torch.tensor([[5, 6, 7]]), torch.tensor([[2, 8, 9, 4]])
    logits = model(source, target)
    padded = model(nn.functional.pad(source, (0, 4), value=peers.PAD), target)
    torch.testing.assert_close(padded, logits, rtol=1e-4, atol=1e-5)
    other = model(source, torch.tensor([[2, 8, 11, 12]]))
    torch.testing.assert_close(other[:, :2], logits[:, :2], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(source + 1, target), logits)


def test_a_step_without_one_dnn_is_without_it_alone():
    """Of all its operators, the gradients' included; the losses are those of the step with it."""
    (batch,) = batches(number=1)
    losses, states = {}, []
    for name, system in peers.our_systems(("none",)).items():
        torch.manual_seed(0)
        watched = peers.System(
            system.build,
            lambda model, batch: (states.append(torch.backends.mkldnn.enabled), peers.our_loss(model, batch))[1],
            system.with_one_dnn,
        )
        losses[name] = float(watched.step(SIZE, VOCAB, "fp32")(batch))
        assert torch.backends.mkldnn.enabled
    assert states == [True, False]
    assert losses["ours, none"] == pytest.approx(losses["ours, none, without oneDNN"], rel=1e-5)
    assert list(peers.our_systems(("all",), "bf16")) == ["ours, all"]


def test_steps_are_timed_in_turn_and_each_begins_as_often():
    calls = []
    steps = {name: lambda batch, name=name: calls.append((name, batch["labels"].numel())) for name in "abc"}
    given, rounds = [{"labels": torch.zeros(size)} for size in (1, 3)], []
    times = step_speed.seconds_in_turn(steps, given, 3, between=lambda: rounds.append(len(calls)))
    assert calls[:3] == [("a", 3), ("b", 3), ("c", 3)]
    turns = [calls[start : start + 3] for start in range(3, len(calls), 3)]
    assert ["".join(name for name, _ in turn) for turn in turns] == ["abc", "bca", "cab", "abc", "bca", "cab"]
    assert [turn[0][1] for turn in turns] == [1, 3, 1, 3, 1, 3]
    assert rounds == [9, 15, 21]
    assert [len(seconds) for seconds in times.values()] == [3, 3, 3]


def test_the_loops_speed_is_that_of_what_lies_between_its_requests():
    """Twenty updates of 100 target tokens: half a second in the loop, 0.4 in the bare step; the warm-up is slow."""
    beside = StepsBeside(batches=None, step=None)
    beside.targets = [100] * 25
    beside.step_seconds = [9.0] * (WARM_UP - 1) + [0.4] * (25 - WARM_UP + 1)
    beside.loop_seconds = [9.0] * WARM_UP + [0.5] * (24 - WARM_UP)
    beside.tokens, beside.positions = 95, 100
    result = summary(beside)
    assert result["loop_tokens_per_second"] == pytest.approx(200)
    assert result["step_tokens_per_second"] == pytest.approx(250)
    assert result["ratio"] == pytest.approx(0.8)
    assert result["padding"] == pytest.approx(0.05)


@pytest.mark.slow
def test_the_benchmark_measures_steps_memory_and_the_loop(tmp_path, capsys, monkeypatch):
    files = {}
    for side, letters in (("source", "abcdefgh"), ("target", "hgfedcba")):
        files[side] = tmp_path / side
        files[side].write_text("".join(f"{' '.join(letters[: 1 + row % 8])}\n" for row in range(400)))
    flags = ["--sizes=tiny", "--vocab_sizes=60", "--modes=none", "--precisions=fp32", "--batch_tokens=64"]
    flags += ["--batches=2", "--rounds=2", "--loop_updates=6", f"--output_dir={tmp_path / 'out'}"]
    flags += [f"--train_{side}={file}" for side, file in files.items()]
    assert main(["train", *flags]) == 0
    report = json.loads((tmp_path / "out" / "train.json").read_text())
    rows = {row["system"]: row for row in report["steps"]}
    assert list(rows) == ["ours, none", "ours, none, without oneDNN", "MarianMT", "MarianMT, eager", "nn.Transformer"]
    reference = max(list(rows)[2:4], key=lambda name: rows[name]["target_tokens_per_second"])
    assert rows[reference]["ratio"] == rows[reference]["peak_memory_ratio"] == 1
    assert {row["reference"] for row in rows.values()} == {reference}
    for row in rows.values():
        flops = train_speed.useful_flops(step_speed.SIZES["tiny"], 60)
        assert row["share"].keys() == row["matrix_gflops"].keys() == {"torch.mm", "oneDNN"}
        for name, share in row["share"].items():
            useful = row["target_tokens_per_second"] * flops
            assert share * row["matrix_gflops"][name] * 1e9 == pytest.approx(useful)
            assert 0 < share < 1
        assert row["lowest_ratio"] <= row["ratio"] <= row["highest_ratio"]
        assert 10**8 < row["peak_memory_bytes"] < 10**10
    (loop,) = report["loop"]
    assert 0.1 < loop["ratio"] < 1.5
    assert 0 <= loop["padding"] < 0.2
    assert (tmp_path / "out" / "train.png").read_bytes().startswith(b"\x89PNG")
    assert "| tiny | fp32 |" in capsys.readouterr().out


JOEYNMT_LOG = """
2026-01-01 - INFO - joeynmt.training - Epoch   1, Step:        5, Batch Loss:     9.1, Batch Acc: 0.0, Tokens per Sec:      400, Lr: 0.00001
2026-01-01 - INFO - joeynmt.training - Epoch   1, Step:       10, Batch Loss:     9.0, Batch Acc: 0.0, Tokens per Sec:      900, Lr: 0.00001
2026-01-01 - INFO - joeynmt.training - Epoch   1, Step:       15, Batch Loss:     9.0, Batch Acc: 0.0, Tokens per Sec:     1000, Lr: 0.00001
2026-01-01 - INFO - joeynmt.training - Epoch   1, Step:       20, Batch Loss:     9.0, Batch Acc: 0.0, Tokens per Sec:      980, Lr: 0.00001
"""  # noqa: E501


def test_joeynmts_speed_is_the_median_of_what_it_logs_once_it_is_warm():
    assert speed_of(JOEYNMT_LOG.splitlines()) == 980
    with pytest.raises(RuntimeError, match=r"did not train; its last lines:\nModuleNotFoundError: joeynmt"):
        speed_of(["ModuleNotFoundError: joeynmt"])


def test_joeynmt_gets_the_sentences_as_the_same_tokens(tmp_path):
    data = {f"train_{side}": str(tmp_path / f"own.{side}") for side in ("source", "target")}
    lines = [f"{letter}{letter} x" for letter in "abcdefghij"]
    for file in data.values():
        Path(file).write_text("".join(f"{line}\n" for line in lines))
    write_tokens(tmp_path, data)
    words = (tmp_path / "vocabulary.txt").read_text().split("\n")[:-1]
    assert len(set(words)) == len(words)
    written = (tmp_path / "train.source").read_text().splitlines()
    assert [line.replace(" ", "").replace("Ġ", " ") for line in written] == lines
    assert {token for line in written for token in line.split(" ")} <= set(words)
    assert (tmp_path / "dev.target").read_text().splitlines() == written[:8]


@pytest.mark.parametrize("given", [None, "sdpa"])
def test_on_a_cpu_training_takes_the_kernel_that_is_fast_there_unless_told(tmp_path, given):
    (tmp_path / "train.tsv").write_text("source\ttarget\n" + "a b\tb a\n" * 20)
    flags = [f"--{name}={value}" for name, value in SIZE.items()]
    flags += [f"--output_dir={tmp_path / 'run'}", f"--train_file={tmp_path / 'train.tsv'}", "--max_updates=1"]
    arguments = parse_arguments(flags + ([f"--attn_implementation={given}"] if given else []))
    AcceleratorState._reset_state(True)
    accelerator = start_accelerator(arguments[2])
    log = RunLog(tmp_path / "run", accelerator)
    try:
        run = prepare(*arguments, accelerator, log, StopRequest())
        assert run.loop.weights.model.config._attn_implementation == (given or "eager")
    finally:
        log.release()
        AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--joeynmt=nowhere/python"], r"--joeynmt \(nowhere/python\) must be there"),
        (["--joeynmt=/dev/null", "--loop_updates=0"], r"needs --loop_updates of 1 or more"),
        (["--train_source=a.txt"], r"--train_source \(a.txt\) and --train_target \(None\) go together"),
    ],
)
def test_what_could_only_fail_later_is_refused_before_anything_is_measured(tmp_path, flags, message):
    with pytest.raises(SystemExit, match=message):
        main(["train", f"--output_dir={tmp_path / 'out'}", *flags])
    assert not (tmp_path / "out").exists()
