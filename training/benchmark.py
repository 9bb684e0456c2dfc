"""Benchmarks: `python -m training.benchmark initialisation [--output_dir DIR] [--flag value ...]`, or another command.

`sharing` times a training step of every sharing mode in turn, on one batch, and compares the sizes of their files.

`streaming` trains a tiny model for an epoch of a generated corpus and of a longer one, and compares the peak memory.

`initialisation` trains the model of `configs/reverse.yaml` to reverse lines of random letters, once for each
initialisation, with everything else equal, and compares how soon held-out lines are reversed without an error. Flags
of `training.train` are passed on and beat the configuration. The same command started again continues where it stopped.
"""

import argparse
import json
import logging
import math
import random
import shlex
import string
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration
from training import train
from training.arguments import ModelArguments, parse_arguments
from training.step_speed import SIZES, compare_modes
from training.stream_memory import compare_stream_memory

REVERSE = Path(__file__).parent / "configs" / "reverse.yaml"
THRESHOLD = 99.0
"""Exact match, from 0 to 100, at which the task counts as learnt."""
FRESH_VOCABULARY = 8000
SHORTEST, LONGEST = 3, 12  # letters a line


@torch.no_grad()
def xavier(model: PreTrainedModel) -> None:
    """Draw matrices from Xavier's uniform distribution and embeddings from N(0, 1 / d_model).

    What most implementations of the paper do: tensor2tensor's embeddings, and Glorot and Bengio's (2010) variance of
    2 / (fan_in + fan_out) for the rest.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    for module in model.modules():  # after the matrices, of which a tied output projection is one
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


INITIALISATIONS: dict[str, Callable[[PreTrainedModel], None] | None] = {"normal": None, "xavier": xavier}
"""By name: what overwrites the weights of a new model, or None for those that the package draws."""
DESCRIPTIONS = {"normal": "N(0, 0.02²)", "xavier": "Xavier uniform, embeddings N(0, 1/d_model)"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.benchmark", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "initialisation",
        help="Learn to reverse lines from each initialisation.",
        epilog="Flags of training.train may follow; they beat the configuration.",
        allow_abbrev=False,
    )
    command.add_argument("--config", type=Path, default=REVERSE, help="YAML file of training arguments.")
    command.add_argument("--output_dir", type=Path, default=Path("runs/benchmark/initialisation"))
    command.add_argument("--initialisations", nargs="+", choices=INITIALISATIONS, default=list(INITIALISATIONS))
    command.add_argument("--train_lines", type=int, default=50_000, help="Lines to train on.")
    command.add_argument("--held_out_lines", type=int, default=1000, help="Lines to be reversed after training.")
    sharing = commands.add_parser("sharing", help="Time a step of every sharing mode.", allow_abbrev=False)
    sharing.add_argument("--size", choices=SIZES, default="base", help="Sizes of the model (default: base).")
    sharing.add_argument("--vocab_size", type=int, default=37000, help="Tokens (default: 37000).")
    sharing.add_argument("--sentences", type=int, default=32, help="Sentences of the batch (default: 32).")
    sharing.add_argument("--length", type=int, default=32, help="Tokens of each (default: 32).")
    sharing.add_argument("--rounds", type=int, default=9, help="Steps that are timed (default: 9).")
    sharing.add_argument("--output_dir", type=Path, default=Path("runs/benchmark/sharing"))
    streaming = commands.add_parser("streaming", help="Memory of training on a longer corpus.", allow_abbrev=False)
    streaming.add_argument("--lines", type=int, default=100_000, help="Pairs of the shorter corpus (default: 100000).")
    streaming.add_argument("--times", type=int, default=20, help="How much longer the other is (default: 20).")
    streaming.add_argument("--output_dir", type=Path, default=Path("runs/benchmark/streaming"))
    options, flags = parser.parse_known_args(arguments)
    if options.command != "initialisation" and flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if options.command == "sharing":
        return compare_sharing_modes(options)
    if options.command == "streaming":
        result = compare_stream_memory(options.output_dir, options.lines, options.times)
        print(f"peak memory with {options.times} times the lines: {result['ratio']:.3f} times")
        return 0
    return compare_initialisations(options, ["--config", str(options.config), *flags])


def compare_sharing_modes(options: argparse.Namespace) -> int:
    """Measure, write sharing.json and print a table; return the exit code."""
    transformers.utils.logging.disable_progress_bar()
    rows = compare_modes(options.size, options.vocab_size, options.sentences, options.length, options.rounds)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    report = {"command": shlex.join(sys.orig_argv), "threads": torch.get_num_threads(), "rows": rows}
    (options.output_dir / "sharing.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"{options.size}, {options.vocab_size:,} words, {options.sentences} x {options.length} tokens, fp32")
    print("| parameter_sharing | seconds a step | speed against none (lowest, highest) | file | against none |")
    print("|---|---|---|---|---|")
    for row in rows:
        ratios = f"{row['speed_ratio']:.3f} ({row['lowest_ratio']:.3f}, {row['highest_ratio']:.3f})"
        file = f"{row['file_bytes'] / 1e6:.1f} MB | {row['file_ratio']:.1%}"
        print(f"| {row['mode']} | {row['seconds']:.3f} | {ratios} | {file} |")
    return 0


def compare_initialisations(options: argparse.Namespace, flags: list[str]) -> int:
    """Train once for each initialisation, write and print what came out; return the exit code.

    Args:
        options: The benchmark's own options.
        flags: Arguments of `training.train` without data and output folder.
    """
    folder: Path = options.output_dir
    run_flags = {name: [*flags, f"--output_dir={folder / name}"] for name in options.initialisations}
    # Any file would do as data: this tells of a mistake before anything is written.
    model_arguments, _, recipe = parse_arguments([*run_flags[options.initialisations[0]], "--train_file=pairs.tsv"])
    data_flags = write_reverse_task(folder, options.train_lines, options.held_out_lines, seed=recipe.seed)
    report: dict[str, Any] = {
        "command": shlex.join(sys.orig_argv),
        "train_lines": options.train_lines,
        "held_out_lines": options.held_out_lines,
        "threshold": THRESHOLD,
        "fresh_vocabulary": FRESH_VOCABULARY,
        "initialisations": {},
    }
    for name in options.initialisations:
        initialise = INITIALISATIONS[name]
        logging.getLogger("training").info("initialisation %s", name)
        if code := train.main([*run_flags[name], *data_flags], initialise=initialise):
            return code
        if not (folder / name / "results.json").exists():  # a signal has ended it
            return 0
        report["initialisations"][name] = {
            "weights": DESCRIPTIONS[name],
            "fresh_loss": fresh_loss(model_arguments, initialise, seed=recipe.seed),
            **summarise(folder / name),
        }
        write_report(folder, report)
    print(table(report))
    return 0


def write_reverse_task(folder: Path, train_lines: int, held_out_lines: int, *, seed: int) -> list[str]:
    """Write lines of random letters and the same lines reversed; no held-out line is a training line.

    Args:
        folder: Where a folder is made whose name tells the arguments, so that a run begun with others is noticed.
        train_lines: Lines of the training split, some of them more than once.
        held_out_lines: Lines of the validation split, all different.
        seed: The same seed writes the same lines.

    Returns:
        The flags that give the files to `training.train`.
    """
    generator = random.Random(seed)

    def line() -> str:
        return "".join(generator.choices(string.ascii_lowercase, k=generator.randint(SHORTEST, LONGEST)))

    held_out: dict[str, None] = {}  # keeps the order
    while len(held_out) < held_out_lines:
        held_out[line()] = None
    training: list[str] = []
    while len(training) < train_lines:
        if (new := line()) not in held_out:
            training.append(new)
    data = folder / f"data-{train_lines}-{held_out_lines}-{seed}"
    data.mkdir(parents=True, exist_ok=True)
    flags = []
    for split, lines in (("train", training), ("validation", list(held_out))):
        for side, step in (("source", 1), ("target", -1)):
            file = data / f"{split}.{side}"
            file.write_text("".join(f"{text[::step]}\n" for text in lines))
            flags.append(f"--{split}_{side}={file}")
    return flags


def fresh_loss(arguments: ModelArguments, initialise: Callable[[PreTrainedModel], None] | None, *, seed: int) -> float:
    """Return the loss of an untrained model on random lines; one that prefers no token has ln(FRESH_VOCABULARY)."""
    torch.manual_seed(seed)
    config = VanillaTrmConfig(vocab_size=FRESH_VOCABULARY, **arguments.given())
    model = VanillaTrmForConditionalGeneration(config).eval()
    if initialise is not None:
        initialise(model)
    source, target = torch.randint(config.vocab_size, (2, 16, 19))
    with torch.inference_mode():
        return float(model(input_ids=source, attention_mask=torch.ones_like(source), labels=target).loss)


def summarise(run: Path) -> dict[str, Any]:
    """Return what a finished run's own files say: its curve, when it reached the threshold, and its origin."""
    origin, results = (json.loads((run / f"{name}.json").read_text()) for name in ("run", "results"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    minutes = {row["update"]: row["minutes"] for row in rows if "minutes" in row}
    curve = [
        {
            "update": row["update"],
            "minutes": minutes[row["update"]],
            "exact_match": row["validation_exact_match"],
            "loss": row["validation_loss"],
        }
        for row in rows
        if "validation_exact_match" in row
    ]
    return {
        "parameters": results["parameters"],
        "updates": results["updates"],
        "minutes": results["minutes"],
        "final_exact_match": curve[-1]["exact_match"],
        "reached": next((point for point in curve if point["exact_match"] >= THRESHOLD), None),
        "curve": curve,
        "run": origin,
    }


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write initialisation.json, and initialisation.png with a curve for each initialisation."""
    (folder / "initialisation.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for result in report["initialisations"].values():
        for panel, value in zip(axes, ("exact_match", "loss"), strict=True):
            points = [(point["update"], point[value]) for point in result["curve"]]
            panel.plot(*zip(*points, strict=True), marker=".", label=result["weights"])
    axes[0].axhline(THRESHOLD, color="grey", linestyle=":", label=f"{THRESHOLD:g} %")
    for panel, title in zip(axes, ("held-out lines reversed (%)", "held-out loss per token (nats)"), strict=True):
        panel.set(xlabel="update", title=title)
        panel.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)  # hides no curve
    figure.savefig(folder / "initialisation.png", dpi=110)


def table(report: dict[str, Any]) -> str:
    """Return the results as a table in Markdown."""
    uniform = math.log(report["fresh_vocabulary"])
    reach, fresh = f"to {report['threshold']:g} %", f"fresh loss (ln V: {uniform:.2f})"
    lines = [
        f"| initialisation | reversed at the end | updates {reach} | minutes {reach} | {fresh} |",
        "|---|---|---|---|---|",
    ]
    for name, result in report["initialisations"].items():
        reached = result["reached"] or {"update": "never", "minutes": "never"}
        cells = (
            f"`{name}`: {result['weights']}",
            f"{result['final_exact_match']:.1f} % after {result['updates']} updates",
            reached["update"],
            reached["minutes"],
            f"{result['fresh_loss']:.2f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
