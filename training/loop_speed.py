"""What the training loop adds to its steps: the real loop of `training.train`, and beside each update a bare step."""

import copy
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.arguments import parse_arguments
from training.batching import Batch, CachedBatches, Position
from training.launching import start_accelerator
from training.objective import IGNORED
from training.peers import our_loss
from training.ranks import StopRequest
from training.run_log import RunLog
from training.step_speed import Step, step_of
from training.train import prepare

WARM_UP = 5
"""Updates before the clock starts."""
MIXED_PRECISION = {"fp32": "no", "bf16": "bf16"}


class StepsBeside:
    """The batches of a training loop; a bare step is made of each before the loop gets it.

    Args:
        batches: Those of the loop.
        step: Its time does not count as the loop's.

    Attributes:
        step_seconds: The bare step of every batch.
        loop_seconds: From handing a batch to the loop until it asks for the next and that is loaded.
        targets: Target tokens of every batch.
        tokens: Source and target tokens of all batches.
        positions: Source and target positions of all batches, padding included.
    """

    def __init__(self, batches: CachedBatches, step: Step) -> None:
        self.batches = batches
        self.step = step
        self.step_seconds: list[float] = []
        self.loop_seconds: list[float] = []
        self.targets: list[int] = []
        self.tokens = self.positions = 0
        self._handed_out: float | None = None

    def iterate(self, epoch: int, position: Position) -> Iterator[tuple[Batch, Position]]:
        """Yield the loop's batches."""
        for batch, following in self.batches.iterate(epoch, position):
            started = time.perf_counter()
            if self._handed_out is not None:
                self.loop_seconds.append(started - self._handed_out)
            self.step(batch)
            self.step_seconds.append(time.perf_counter() - started)
            self.targets.append(int((batch["labels"] != IGNORED).sum()))
            self.tokens += self.targets[-1] + int(batch["attention_mask"].sum())
            self.positions += batch["labels"].numel() + batch["input_ids"].numel()
            self._handed_out = time.perf_counter()
            yield batch, following

    def fraction(self, position: Position) -> float:
        """Return how much of the epoch lies before the position, from 0 to 1."""
        return self.batches.fraction(position)

    def updates_per_epoch(self, batches_per_update: int) -> int | None:
        """Return the updates of one epoch."""
        return self.batches.updates_per_epoch(batches_per_update)


def compare_loop(
    size: dict[str, int], precision: str, folder: Path, data: dict[str, str], *, updates: int, batch_tokens: int
) -> dict[str, float]:
    """Train in this process, which should be one of its own; return both speeds, their ratio, and the padding.

    Args:
        size: A value of `SIZES`.
        precision: A key of `MIXED_PRECISION`.
        folder: For the run's files.
        data: Arguments of training.train that say what to train on.
        updates: Updates that are timed.
        batch_tokens: Padded tokens of a batch.
    """
    run = folder / "loop"
    shutil.rmtree(run, ignore_errors=True)
    options = data | {name: str(value) for name, value in size.items()}
    options |= {"output_dir": str(run), "vocab_size": "8000", "report_to": "none", "use_cpu": "true"}
    options |= {"mixed_precision": MIXED_PRECISION[precision], "batch_tokens": str(batch_tokens)}
    options |= {"max_updates": str(updates + WARM_UP), "warmup_steps": "100"}
    model_arguments, data_arguments, recipe = parse_arguments([f"--{key}={value}" for key, value in options.items()])
    accelerator = start_accelerator(recipe)
    log = RunLog(run, accelerator)
    try:
        prepared = prepare(model_arguments, data_arguments, recipe, accelerator, log, StopRequest())
        loop: Any = prepared.loop
        model = copy.deepcopy(loop.weights.model).train()
        loop.batches = beside = StepsBeside(loop.batches, step_of(model, our_loss, precision))
        log.begin(prepared.arguments, resolved=loop.resolved() | {"inputs": prepared.inputs}, update=0)
        loop.train()
    finally:
        log.release()
    return summary(beside)


def summary(beside: StepsBeside) -> dict[str, float]:
    """Return both speeds in target tokens a second, the loop's as a ratio to the bare step's, and the padding.

    The loop asks for a batch while the one before waits for its update, so that what it does between two requests is
    the update of the batch before.
    """
    timed = range(WARM_UP, len(beside.loop_seconds))
    targets = sum(beside.targets[number - 1] for number in timed)
    loop = targets / sum(beside.loop_seconds[number] for number in timed)
    step = targets / sum(beside.step_seconds[number - 1] for number in timed)
    return {
        "loop_tokens_per_second": loop,
        "step_tokens_per_second": step,
        "ratio": loop / step,
        "padding": 1 - beside.tokens / beside.positions,
    }
