"""Runs that are interrupted at a chosen point, started again, and compared with the run that was not.

`python -m tests.interruptions --output DIR` tries every point and signal with one rank and two, without loading
processes and with two, with data at hand and streamed, and writes the table to DIR/interruptions.md.
"""

import argparse
import contextlib
import faulthandler
import gc
import itertools
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from tqdm import tqdm

import training.checkpoint
import training.evaluation
import training.loop
import training.train
from tests.pairs import write_reversed_pairs

WORDS = ["der", "die", "das", "hund", "katze", "haus", "baum", "liest", "sieht", "findet", "einen", "kleinen", "roten"]
CLOCK = ("minutes", "target_tokens_per_second")
SECONDS_TO_LIVE, SECONDS_OF_GRACE = 120, 10
UPDATES = 14
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "kill -9": signal.SIGKILL}
EXIT_CODES = {"SIGTERM": 0, "SIGINT": 130, "kill -9": -9}


@dataclass(frozen=True)
class Setting:
    """How a run trains."""

    ranks: int = 1
    workers: int = 0
    streamed: bool = False


def arguments_of(setting, data, run):
    """A tiny model with dropout; of its 14 updates of two micro-batches, some end an epoch."""
    sizes = {"vocab_size": 280, "d_model": 16, "d_ff": 24, "encoder_layers": 2, "decoder_layers": 2}
    recipe = {"dropout": 0.1, "warmup_steps": 4, "batch_tokens": 100, "max_updates": UPDATES, "logging_every": 3}
    recipe |= {
        "learning_rate": 0.003,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "ema_decay": 0.9,
        "num_attention_heads": 2,
    }
    evaluation = {"eval_every": 4, "eval_batch_tokens": 60, "max_length_b": 2, "num_beams": 2, "report_to": "none"}
    evaluation |= {"metric_for_best_model": "loss", "num_samples": 0}  # which falls, so that there is a new best
    options = (
        sizes
        | recipe
        | evaluation
        | {"cpu_threads": 1, "use_cpu": True, "output_dir": run, "num_workers": setting.workers}
    )
    if setting.streamed:
        options |= {"streaming": True, "shuffle_buffer": 25, "max_source_length": 50, "max_target_length": 50}
    return [f"--{name}={value}" for name, value in (data | options).items()]


def make_data(folder):
    return write_reversed_pairs(folder, WORDS, {"train": 60, "validation": 11}, lengths=5)


class Killed(BaseException):
    """What a test raises where a process would be killed: nothing catches it."""


# Training in processes of its own ---------------------------------------------------------------------------------


def train(arguments, ranks=1, inject=None, log=None):
    """Train in forked processes, which need not import anything; return the exit code of each rank.

    Args:
        arguments: Of `training.train`.
        ranks: Processes that train together.
        inject: Gives a context to train in, for the number of a rank.
        log: File that what they print is added to.

    What they printed is printed here too where one of them fails or crashes, for pytest to show with a failed test.
    A process that a signal has ended has minus the signal's number for a code. Where one fails, the others are ended,
    as a launcher does.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(log) if log is not None else Path(tempfile.mkdtemp(prefix="ranks_")) / "log.txt"
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_be_a_rank, args=(arguments, rank, ranks, port, inject, log)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + SECONDS_TO_LIVE
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0, 130) for process in processes):
            deadline = min(deadline, time.monotonic() + SECONDS_OF_GRACE)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.01)
    codes = [process.exitcode for process in processes]
    if not set(codes) <= {0, 130, -signal.SIGKILL}:
        print(f"exit codes {codes}; the log of the ranks:", log.read_text(), sep="\n")
    if all(code == -signal.SIGKILL for code in codes) and inject is None:
        raise TimeoutError(f"still running after {SECONDS_TO_LIVE} s; exit codes {codes}; see {log}")
    return codes


def _be_a_rank(arguments, rank, ranks, port, inject, log):
    # What lies about for the collector is the parent's: a library's threads that it would end do not exist here, and
    # waiting for them never ends (CTranslate2), or worse.
    gc.freeze()
    with open(log, "a") as file:
        faulthandler.enable(file)
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
        logging.getLogger().handlers.clear()
        if ranks > 1:
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({name: str(value) for name, value in (rendezvous | numbers).items()})
        AcceleratorState._reset_state(True)  # of the process that was forked
        torch.set_num_threads(1)
        with inject(rank) if inject is not None else contextlib.nullcontext():
            code = training.train.main([str(word) for word in arguments])
        sys.stderr.flush()
        os._exit(code)


# Points of interruption -------------------------------------------------------------------------------------------


def once(number):
    """A function that sends this process a signal, the first time it is called."""
    calls = itertools.count()
    return lambda: next(calls) == 0 and os.kill(os.getpid(), number)


@contextlib.contextmanager
def before_an_update(number, is_the_one=lambda loop, data: loop.progress.update == 5):
    interrupt, original = once(number), training.loop.TrainingLoop._update

    def wrapped(loop, data):
        if is_the_one(loop, data):
            interrupt()
        original(loop, data)

    with mock.patch.object(training.loop.TrainingLoop, "_update", wrapped):
        yield


@contextlib.contextmanager
def between_micro_batches(number, update=6):
    interrupt, original = once(number), training.loop.accumulate_gradient
    calls = itertools.count(1)

    class Interrupted(list):
        def __iter__(self):
            for index, batch in enumerate(super().__iter__()):
                if index == 1:
                    interrupt()
                yield batch

    def wrapped(model, batches, *arguments, **options):
        batches = Interrupted(batches) if next(calls) >= update else batches  # the last of an epoch may be one alone
        return original(model, batches, *arguments, **options)

    with mock.patch.object(training.loop, "accumulate_gradient", wrapped):
        yield


def at_an_epochs_end(number):
    return before_an_update(number, lambda loop, data: data.ends_epoch and loop.progress.update > 4)


@contextlib.contextmanager
def during_an_evaluation(number, evaluation=2):
    interrupt, original = once(number), training.evaluation.translate_by_length
    calls = itertools.count(1)

    def wrapped(*arguments, **options):
        call = next(calls)
        for item in original(*arguments, **options):
            if call == evaluation:
                interrupt()
            yield item

    with mock.patch.object(training.evaluation, "translate_by_length", wrapped):
        yield


@contextlib.contextmanager
def while_saving(number, update=8):
    """After the files of a checkpoint are written, before it has its name."""
    interrupt, original = once(number), training.checkpoint._sync

    def wrapped(path):
        if path.name == f".update-{update}.tmp":
            interrupt()
        original(path)

    with mock.patch.object(training.checkpoint, "_sync", wrapped):
        yield


@contextlib.contextmanager
def while_replacing(number):
    """When best/ has lost its old folder and has not got its new one."""
    interrupt, original = once(number), os.replace

    def wrapped(source, target):
        original(source, target)
        if Path(target).name == ".best.old":
            interrupt()

    with mock.patch.object(training.checkpoint.os, "replace", wrapped):
        yield


POINTS = {
    "in the middle of an epoch": before_an_update,
    "between micro-batches": between_micro_batches,
    "at the end of an epoch": at_an_epochs_end,
    "during an evaluation": during_an_evaluation,
    "while a checkpoint is saved": while_saving,
    "while best/ is replaced": while_replacing,
}
ON_MAIN = (while_saving, while_replacing)


@dataclass(frozen=True)
class Interruption:
    """Sends a signal at a point: to the main process where only that gets there, else to the last rank."""

    point: str
    signal: str
    ranks: int

    def __call__(self, rank):
        chosen = POINTS[self.point]
        hit = rank == (0 if chosen in ON_MAIN else self.ranks - 1)
        return chosen(SIGNALS[self.signal]) if hit else contextlib.nullcontext()


# Comparing --------------------------------------------------------------------------------------------------------


def metrics(run):
    """The lines of the log without what depends on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


def tensors(run):
    """All that was trained: weights, their average, the optimizer's moments."""
    last = run / "checkpoints" / f"update-{UPDATES}"
    files = [
        run / "best" / "model.safetensors",
        run / "last" / "model.safetensors",
        *sorted(last.glob("*.safetensors")),
    ]
    found = {
        f"{file.parent.name}/{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()
    }
    state = torch.load(last / "optimizer.pt", weights_only=True)["state"]
    return found | {f"{number}/{name}": tensor for number, of in state.items() for name, tensor in of.items()}


def equal_weights(run, other):
    ours, others = tensors(run), tensors(other)
    return ours.keys() == others.keys() and all(torch.equal(tensor, others[name]) for name, tensor in ours.items())


def interrupt_and_continue(setting, point, name, data, run):
    """Interrupt a run and start it again; return the exit codes of the first start, and how far that had come."""
    arguments = arguments_of(setting, data, run)
    log = run.with_suffix(".log")
    codes = train(arguments, setting.ranks, Interruption(point, name, setting.ranks), log)
    assert not (run / "results.json").exists(), "the run was not interrupted"
    reached = [path.name for path in training.checkpoint.find_checkpoints(run)]
    again = train(arguments, setting.ranks, None, log)
    assert again == [0] * setting.ranks, f"{again}, see {log}"
    return codes, reached


def main():
    parser = argparse.ArgumentParser(description="Interrupt runs at every point and compare.", allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs and the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True)
    data = make_data(options.output)
    settings = [Setting(*values) for values in itertools.product((1, 2), (0, 2), (False, True))]
    lines = ["| point | signal | ranks | loading processes | data | exit codes | losses equal | weights equal |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    bar = tqdm(total=len(settings) * len(POINTS) * len(SIGNALS), unit="interruption")
    different = 0
    for number, setting in enumerate(settings):
        whole = options.output / f"whole-{number}"
        assert (
            train(arguments_of(setting, data, whole), setting.ranks, None, whole.with_suffix(".log"))
            == [0] * setting.ranks
        )
        for row, (point, name) in enumerate(itertools.product(POINTS, SIGNALS)):
            run = options.output / f"run-{number}-{row}"
            codes, _ = interrupt_and_continue(setting, point, name, data, run)
            equal = metrics(run) == metrics(whole), equal_weights(run, whole)
            different += not all(equal)
            words = [point, name, setting.ranks, setting.workers, "streamed" if setting.streamed else "cached"]
            words += [", ".join(map(str, codes)), *("yes" if value else "**no**" for value in equal)]
            lines.append("| " + " | ".join(map(str, words)) + " |")
            (options.output / "interruptions.md").write_text("\n".join(lines) + "\n")
            bar.update()
    print(f"{bar.n} interruptions, {different} of them changed a run: {options.output / 'interruptions.md'}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
