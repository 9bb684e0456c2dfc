"""Timing training steps of several models: in turn, in one process, on the same batches.

A machine's speed drifts; what is compared is therefore measured alternately, and reported as a ratio.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from tqdm import tqdm

from training.objective import Batch

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "d_ff": 256, "encoder_layers": 4, "decoder_layers": 4, "num_attention_heads": 4},
    "small": {"d_model": 256, "d_ff": 1024, "encoder_layers": 3, "decoder_layers": 3, "num_attention_heads": 8},
    "base": {"d_model": 512, "d_ff": 2048, "encoder_layers": 6, "decoder_layers": 6, "num_attention_heads": 8},
}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

Loss = Callable[[nn.Module, Batch], torch.Tensor]
Step = Callable[[Batch], torch.Tensor]


def step_of(model: nn.Module, loss: Loss, precision: str = "fp32", learning_rate: float = 1e-5) -> Step:
    """Return a function that makes one update of a batch: forward with loss, backward, Adam; it returns the loss.

    Args:
        model: In training mode.
        loss: The loss per target token of a model and a batch.
        precision: A key of `PRECISIONS`; "bf16" is autocast, as training has it.
        learning_rate: Adam's; small, so that what is timed stays what it is.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=True)

    def autocast() -> AbstractContextManager:
        return nullcontext() if precision == "fp32" else torch.autocast("cpu", PRECISIONS[precision])

    def step(batch: Batch) -> torch.Tensor:
        with autocast():
            value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return step


def seconds_in_turn(
    steps: dict[str, Step], batches: Sequence[Batch], rounds: int, between: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Return for each step the seconds of every round, a round being a step of each batch; the first one is not timed.

    Args:
        steps: By name. They are made in turn with every batch; which of them is first changes every time.
        batches: Of one round.
        rounds: Rounds that are timed.
        between: Called after every round.
    """
    names = list(steps)
    for step in steps.values():
        step(max(batches, key=lambda batch: batch["labels"].numel()))
    times: dict[str, list[float]] = {name: [] for name in steps}
    with tqdm(total=rounds * len(batches) * len(steps), desc="Measuring", unit="step", leave=False) as bar:
        for turn in range(rounds):
            seconds = dict.fromkeys(steps, 0.0)
            for number, batch in enumerate(batches):
                first = (turn * len(batches) + number) % len(names)
                for name in (*names[first:], *names[:first]):
                    started = time.perf_counter()
                    steps[name](batch)
                    seconds[name] += time.perf_counter() - started
                    bar.update()
            for name, value in seconds.items():
                times[name].append(value)
            between()
    return times
