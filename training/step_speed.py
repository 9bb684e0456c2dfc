"""How long a training step takes: several models in turn, on the same batch, in one process.

A machine's speed drifts; what is compared is therefore measured alternately, and reported as a ratio.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import trange
from transformers import PreTrainedModel

from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration
from training.objective import Batch

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 128, "d_ff": 256, "encoder_layers": 4, "decoder_layers": 4, "num_attention_heads": 4},
    "small": {"d_model": 256, "d_ff": 1024, "encoder_layers": 3, "decoder_layers": 3, "num_attention_heads": 8},
    "base": {"d_model": 512, "d_ff": 2048, "encoder_layers": 6, "decoder_layers": 6, "num_attention_heads": 8},
}
MODES = ("none", "attention", "ffn", "all")


def random_batch(vocab_size: int, sentences: int, length: int) -> Batch:
    """Return sentences of random tokens, all of one length: no padding, every position a target."""
    generator = torch.Generator().manual_seed(0)
    source, target = (
        torch.randint(3, vocab_size, (sentences, length), generator=generator) for _ in ("source", "target")
    )
    return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target}


def step_of(model: PreTrainedModel, batch: Batch) -> Callable[[], None]:
    """Return a function that makes one update: forward with loss, backward, Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, betas=(0.9, 0.98), eps=1e-9)

    def step() -> None:
        model(**batch, label_smoothing=0.1).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds_in_turn(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the times of each step, one a round; each is made once before, untimed."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in trange(rounds, desc="Measuring", leave=False):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - started)
    return times


def compare_modes(size: str, vocab_size: int, sentences: int, length: int, rounds: int) -> list[dict[str, Any]]:
    """Return for each sharing mode its step's speed, and the size of its file, in relation to the unshared model.

    Args:
        size: A key of `SIZES`.
        vocab_size: Tokens.
        sentences: Sentences of the batch.
        length: Tokens of each, source and target.
        rounds: Steps that are timed.
    """
    batch = random_batch(vocab_size, sentences, length)
    steps, files = {}, {}
    for mode in MODES:
        torch.manual_seed(0)
        config = VanillaTrmConfig(vocab_size=vocab_size, parameter_sharing=mode, **SIZES[size])
        model = VanillaTrmForConditionalGeneration(config).train()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            files[mode] = (Path(folder) / "model.safetensors").stat().st_size
        steps[mode] = step_of(model, batch)
    times = seconds_in_turn(steps, rounds)
    rows = []
    for mode in MODES:
        ratios = [unshared / shared for unshared, shared in zip(times["none"], times[mode], strict=True)]
        rows.append(
            {
                "mode": mode,
                "seconds": statistics.median(times[mode]),
                "speed_ratio": statistics.median(ratios),
                "lowest_ratio": min(ratios),
                "highest_ratio": max(ratios),
                "file_bytes": files[mode],
                "file_ratio": files[mode] / files["none"],
            }
        )
    return rows
