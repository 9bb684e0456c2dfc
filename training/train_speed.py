"""How fast and in how much memory training runs, beside transformers' MarianMT and torch's nn.Transformer.

All make their steps (forward, loss, backward, Adam) in turn, in one process, on the same batches; so do the steps of
the training loop beside the bare ones. The useful work of a target token is counted as 6 (L (4 d^2 + 2 d d_ff) +
L (8 d^2 + 2 d d_ff) + V d) floating-point operations, and compared with the rates at which torch.mm and oneDNN multiply
matrices here in the same precision, measured between the rounds. Peak memory is measured in a process for each system.

The sentences have the lengths of the given files, or of the embedded corpus, in subword tokens. It writes train.json
and train.png.
"""

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import matplotlib.figure
import numpy as np
import torch
import transformers
from torch import nn

from hf_vanilla_trm import PARAMETER_SHARING_MODES
from training.arguments import DataArguments, positive_integer
from training.batching import PairCollator, TokenBatchSampler
from training.data import load_pairs
from training.joeynmt_speed import joeynmt_speed
from training.loop_speed import compare_loop
from training.memory import LARGE, peak_memory, return_large_blocks
from training.objective import Batch
from training.peers import FIRST_WORD, MARIAN, PAD, PEERS, System, our_systems
from training.run_log import write_json
from training.step_speed import PRECISIONS, SIZES, seconds_in_turn
from training.tokenized import Limits, sequence_lengths, tokenize_pairs
from training.tokenizer import train_tokenizer

MATRIX = 2048
"""Rows and columns of the matrices that are multiplied to know the machine's rate."""
Row = dict[str, Any]
Result = TypeVar("Result")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="Sizes (default: all).")
    parser.add_argument(
        "--vocab_sizes", nargs="+", type=positive_integer, default=[8000, 37000], help="(default: 8000 37000)"
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=PARAMETER_SHARING_MODES,
        default=list(PARAMETER_SHARING_MODES),
        help="Sharing modes of ours.",
    )
    parser.add_argument("--train_source", help="Sentences, one a line (default: the embedded corpus).")
    parser.add_argument("--train_target", help="Their translations.")
    parser.add_argument(
        "--batch_tokens", type=positive_integer, default=4096, help="Padded tokens a batch (default: 4096)."
    )
    parser.add_argument("--batches", type=positive_integer, default=6, help="Batches of a round (default: 6).")
    parser.add_argument("--rounds", type=positive_integer, default=3, help="Rounds that are timed (default: 3).")
    parser.add_argument(
        "--loop_updates", type=int, default=60, help="Updates of the training loop, 0 for none (default: 60)."
    )
    parser.add_argument("--joeynmt", type=Path, help="Python of an environment with JoeyNMT, to train with it too.")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/benchmark/train"))


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Measure, write train.json and train.png and print tables; return the exit code. There are no further flags."""
    del flags
    check_options(options)
    transformers.utils.logging.disable_progress_bar()
    files = {"train_source": options.train_source, "train_target": options.train_target}
    data = {"embedded_corpus": "en-de"} if options.train_source is None else files
    lengths = sentence_lengths(data)
    report: dict[str, Any] = {
        "command": shlex.join(sys.orig_argv),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "steps": [],
        "loop": [],
        "joeynmt": {},
    }
    for size in options.sizes:
        for vocab_size in options.vocab_sizes:
            batches = random_batches(lengths, vocab_size, options.batch_tokens, options.batches)
            for precision in options.precisions:
                rows = compare_steps(size, vocab_size, precision, tuple(options.modes), batches, options.rounds)
                print(step_table(rows), end="\n\n", flush=True)
                report["steps"] += rows
                write_report(options.output_dir, report)
    for size in options.sizes if options.loop_updates else ():
        for precision in options.precisions:
            arguments = (SIZES[size], precision, options.output_dir, data)
            row = in_own_process(
                compare_loop, *arguments, updates=options.loop_updates, batch_tokens=options.batch_tokens
            )
            report["loop"].append({"size": size, "precision": precision, **row})
            write_report(options.output_dir, report)
        if options.joeynmt is not None:
            speed = joeynmt_speed(
                options.joeynmt,
                SIZES[size],
                data,
                options.output_dir / "joeynmt",
                updates=options.loop_updates,
                batch_tokens=options.batch_tokens,
            )
            report["joeynmt"][size] = speed
            write_report(options.output_dir, report)
    print(loop_table(report["loop"], report["joeynmt"]))
    return 0


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that do not go together, before anything is measured.

    Raises:
        SystemExit: If they do not.
    """
    if options.joeynmt is not None and not (options.loop_updates and options.joeynmt.exists()):
        raise SystemExit(f"--joeynmt ({options.joeynmt}) must be there, and needs --loop_updates of 1 or more")
    if (options.train_source is None) != (options.train_target is None):
        raise SystemExit(
            f"--train_source ({options.train_source}) and --train_target ({options.train_target}) go together"
        )


def in_own_process(function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Return what a function returns in a new process, which has done nothing else before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments, **options).result()


def sentence_lengths(data: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the sources and of the targets, of a vocabulary of 8,000 trained on them.

    Args:
        data: Arguments of training.train that name the training data.
    """
    arguments = DataArguments(**data)
    pairs = load_pairs(arguments, ("train",))["train"]
    tokenizer = train_tokenizer((text for pair in pairs for text in (pair["source"], pair["target"])), 8000)
    tokenized, _ = tokenize_pairs(pairs, tokenizer, Limits(256, 256), drop=True)
    return sequence_lengths(tokenized)


def random_batches(
    lengths: tuple[np.ndarray, np.ndarray], vocab_size: int, batch_tokens: int, number: int
) -> list[Batch]:
    """Return batches of random tokens for rows of these lengths, which are grouped by length as in training."""
    generator, collate = np.random.default_rng(0), PairCollator(PAD)

    def tokens(length: int) -> list[int]:
        return generator.integers(FIRST_WORD, vocab_size, length).tolist()

    return [
        collate([{"input_ids": tokens(lengths[0][row]), "labels": tokens(lengths[1][row])} for row in rows])
        for rows in islice(TokenBatchSampler(*lengths, batch_tokens=batch_tokens, seed=0), number)
    ]


def useful_flops(size: dict[str, int], vocab_size: int) -> int:
    """Return the useful floating-point operations of a target token: forward, and twice as many backward."""
    d, d_ff = size["d_model"], size["d_ff"]
    encoder = size["encoder_layers"] * (4 * d**2 + 2 * d * d_ff)
    decoder = size["decoder_layers"] * (8 * d**2 + 2 * d * d_ff)
    return 6 * (encoder + decoder + vocab_size * d)


def matrix_rates(precision: str, products: int = 3) -> dict[str, float]:
    """Return the floating-point operations a second of a product of large matrices, the best of several: by torch.mm,
    and by oneDNN, which torch.mm does not use in float32.
    """
    left, right = (torch.randn(MATRIX, MATRIX).to(PRECISIONS[precision]) for _ in range(2))
    opaque = left.to_mkldnn()
    multiply = {"torch.mm": lambda: torch.mm(left, right), "oneDNN": lambda: nn.functional.linear(opaque, right)}
    rates = dict.fromkeys(multiply, 0.0)
    for name, product in multiply.items():
        for _ in range(products):
            started = time.perf_counter()
            product()
            rates[name] = max(rates[name], 2 * MATRIX**3 / (time.perf_counter() - started))
    return rates


def systems_of(modes: tuple[str, ...], precision: str) -> dict[str, System]:
    """Return what is compared, by name: ours with each sharing mode, then the others."""
    return our_systems(modes, precision) | PEERS


def compare_steps(
    size: str, vocab_size: int, precision: str, modes: tuple[str, ...], batches: Sequence[Batch], rounds: int
) -> list[Row]:
    """Return a row for each system: speed, its ratio to the faster of MarianMT's two, the share of the matrix rate, and
    peak memory.
    """
    systems, steps = systems_of(modes, precision), {}
    for name, system in systems.items():
        torch.manual_seed(0)
        steps[name] = system.step(SIZES[size], vocab_size, precision)
    measured = [matrix_rates(precision)]
    times = seconds_in_turn(steps, batches, rounds, between=lambda: measured.append(matrix_rates(precision)))
    rates = {name: max(rate[name] for rate in measured) for name in measured[0]}
    targets = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    flops = useful_flops(SIZES[size], vocab_size)
    reference = min(MARIAN, key=lambda name: sum(times[name]))
    rows = []
    for name in systems:
        speed = rounds * targets / sum(times[name])
        ratios = [marian / own for marian, own in zip(times[reference], times[name], strict=True)]
        rows.append(
            {
                "size": size,
                "vocab_size": vocab_size,
                "precision": precision,
                "system": name,
                "reference": reference,
                "target_tokens_per_second": speed,
                "ratio": statistics.median(ratios),
                "lowest_ratio": min(ratios),
                "highest_ratio": max(ratios),
                "useful_gflops": speed * flops / 1e9,
                "matrix_gflops": {name: rate / 1e9 for name, rate in rates.items()},
                "share": {name: speed * flops / rate for name, rate in rates.items()},
            }
        )
    del steps
    largest = max(batches, key=lambda batch: batch["labels"].numel())
    rest = (modes, size, vocab_size, precision, largest)
    matters = 4 * largest["labels"].numel() * SIZES[size]["d_model"] >= LARGE
    for field, returning in (("peak_memory", False), ("peak_memory_returning", True)):
        if matters or not returning:
            peaks = {name: in_own_process(peak_of_step, name, *rest, returning=returning) for name in systems}
        for row in rows:
            row[f"{field}_bytes"] = peaks[row["system"]]
            row[f"{field}_ratio"] = peaks[row["system"]] / peaks[reference]
    return rows


def peak_of_step(
    name: str,
    modes: tuple[str, ...],
    size: str,
    vocab_size: int,
    precision: str,
    batch: Batch,
    *,
    returning: bool = False,
) -> int:
    """Return the peak of resident memory, in bytes, of this process after three steps of one system.

    With `returning`, the process gives large blocks back where training.train would; see `return_large_blocks`.
    """
    if returning:
        return_large_blocks(4 * batch["labels"].numel() * SIZES[size]["d_model"])
    step = systems_of(modes, precision)[name].step(SIZES[size], vocab_size, precision)
    for _ in range(3):
        step(batch)
    return peak_memory(torch.device("cpu"))


def step_table(rows: Sequence[Row]) -> str:
    """Return the steps' rows of one size, vocabulary and precision in Markdown."""
    first = rows[0]
    reference = first["reference"]
    lines = [
        f"{first['size']}, {first['vocab_size']:,} words, {first['precision']}; matrix products: "
        + ", ".join(f"{rate:.0f} GFLOP/s by {name}" for name, rate in first["matrix_gflops"].items()),
        "",
        f"| system | target tokens/s | times {reference} (lowest, highest) | useful GFLOP/s | of torch.mm's rate | of "
        f"oneDNN's | peak memory, MB | times {reference} | returning large blocks, MB | times {reference} |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['system']} | {row['target_tokens_per_second']:,.0f} | {row['ratio']:.2f} "
            f"({row['lowest_ratio']:.2f}, {row['highest_ratio']:.2f}) | {row['useful_gflops']:.0f} | "
            f"{row['share']['torch.mm']:.0%} | {row['share']['oneDNN']:.0%} | "
            f"{row['peak_memory_bytes'] / 1e6:,.0f} | {row['peak_memory_ratio']:.2f} | "
            f"{row['peak_memory_returning_bytes'] / 1e6:,.0f} | {row['peak_memory_returning_ratio']:.2f} |"
        )
    return "\n".join(lines)


def loop_table(rows: Sequence[Row], joeynmt: dict[str, float]) -> str:
    """Return the rows of the training loop in Markdown, in fp32 with the speed of JoeyNMT's where it was measured."""
    lines = [
        "| size | precision | loop, target tokens/s | bare step, target tokens/s | loop / step | padding | JoeyNMT's "
        "loop, target tokens/s | loop / JoeyNMT |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own = row["loop_tokens_per_second"]
        other = joeynmt.get(row["size"])
        compared = f"{other:,.0f} | {own / other:.1f}" if other is not None and row["precision"] == "fp32" else "- | -"
        lines.append(
            f"| {row['size']} | {row['precision']} | {own:,.0f} | "
            f"{row['step_tokens_per_second']:,.0f} | {row['ratio']:.3f} | {row['padding']:.1%} | {compared} |"
        )
    return "\n".join(lines)


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write train.json, and train.png with the steps' share of the matrix rate and times the faster MarianMT."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "train.json", report)
    rows = report["steps"]
    groups = list(dict.fromkeys((row["size"], row["vocab_size"], row["precision"]) for row in rows))
    names = list(dict.fromkeys(row["system"] for row in rows))
    figure = matplotlib.figure.Figure(figsize=(max(7, 2 + 1.8 * len(groups)), 5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        own = [row for row in rows if row["system"] == name]
        places = [groups.index((row["size"], row["vocab_size"], row["precision"])) for row in own]
        places = [place + (number - (len(names) - 1) / 2) * width for place in places]
        bars = axes.bar(places, [100 * row["share"]["oneDNN"] for row in own], width, label=name)
        axes.bar_label(bars, [f"{row['ratio']:.2f}" for row in own], fontsize=6, rotation=90, padding=2)
    axes.set_xticks(range(len(groups)), [f"{size}, {words:,}\n{precision}" for size, words, precision in groups])
    axes.set(
        ylabel="useful work, % of oneDNN's matrix-product rate",
        title="a training step (figures: times the faster MarianMT)",
    )
    axes.margins(y=0.15)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(folder / "train.png", dpi=110)
