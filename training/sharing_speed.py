"""How long a training step of every sharing mode takes, and how large its file is: in turn, on one batch."""

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_vanilla_trm import PARAMETER_SHARING_MODES
from training.arguments import positive_integer
from training.objective import Batch
from training.peers import build_ours, our_loss
from training.run_log import write_json
from training.step_speed import SIZES, seconds_in_turn, step_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--size", choices=SIZES, default="base", help="Sizes of the model (default: base).")
    parser.add_argument("--vocab_size", type=positive_integer, default=37000, help="Tokens (default: 37000).")
    parser.add_argument("--sentences", type=positive_integer, default=32, help="Sentences of the batch (default: 32).")
    parser.add_argument("--length", type=positive_integer, default=32, help="Tokens of each (default: 32).")
    parser.add_argument("--rounds", type=positive_integer, default=9, help="Steps that are timed (default: 9).")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/benchmark/sharing"))


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Measure, write sharing.json and print a table; return the exit code. There are no further flags."""
    del flags
    transformers.utils.logging.disable_progress_bar()
    rows = compare_modes(options.size, options.vocab_size, options.sentences, options.length, options.rounds)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    report = {"command": shlex.join(sys.orig_argv), "threads": torch.get_num_threads(), "rows": rows}
    write_json(options.output_dir / "sharing.json", report)
    print(f"{options.size}, {options.vocab_size:,} words, {options.sentences} x {options.length} tokens, fp32")
    print("| parameter_sharing | seconds a step | speed against none (lowest, highest) | file | against none |")
    print("|---|---|---|---|---|")
    for row in rows:
        ratios = f"{row['speed_ratio']:.3f} ({row['lowest_ratio']:.3f}, {row['highest_ratio']:.3f})"
        file = f"{row['file_bytes'] / 1e6:.1f} MB | {row['file_ratio']:.1%}"
        print(f"| {row['mode']} | {row['seconds']:.3f} | {ratios} | {file} |")
    return 0


def random_batch(vocab_size: int, sentences: int, length: int) -> Batch:
    """Return sentences of random tokens, all of one length: no padding, every position a target."""
    generator = torch.Generator().manual_seed(0)
    source, target = (
        torch.randint(3, vocab_size, (sentences, length), generator=generator) for _ in ("source", "target")
    )
    return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target}


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
    for mode in PARAMETER_SHARING_MODES:
        torch.manual_seed(0)
        model = build_ours(SIZES[size], vocab_size, parameter_sharing=mode)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            files[mode] = (Path(folder) / "model.safetensors").stat().st_size
        steps[mode] = step_of(model, our_loss)
    times = seconds_in_turn(steps, [batch], rounds)
    rows = []
    for mode in PARAMETER_SHARING_MODES:
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
