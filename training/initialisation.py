"""Which initialisation learns sooner: a model that reverses lines of random letters, trained once for each.

The configuration is `configs/reverse.yaml`, and everything but the initial weights is equal; what is compared is how
soon held-out lines are reversed without an error. The same command started again continues where it stopped.
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
from torch import nn
from transformers import PreTrainedModel

from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration
from training import train
from training.arguments import ModelArguments, parse_arguments, positive_integer
from training.run_log import write_json

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.epilog = "Flags of training.train may follow; they beat the configuration."
    parser.add_argument("--config", type=Path, default=REVERSE, help="YAML file of training arguments.")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/benchmark/initialisation"))
    parser.add_argument("--initialisations", nargs="+", choices=INITIALISATIONS, default=list(INITIALISATIONS))
    parser.add_argument("--train_lines", type=positive_integer, default=50_000, help="Lines to train on.")
    parser.add_argument(
        "--held_out_lines", type=positive_integer, default=1000, help="Lines to be reversed after training."
    )


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Train once for each initialisation, write and print what came out; return the exit code.

    Args:
        options: The benchmark's own options.
        flags: Further arguments of `training.train`, without data and output folder.
    """
    folder: Path = options.output_dir
    train_flags = ["--config", str(options.config), *flags]
    run_flags = {name: [*train_flags, f"--output_dir={folder / name}"] for name in options.initialisations}
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
    origin, results = (json.loads((run / f"{name}.json").read_text("utf-8")) for name in ("run", "results"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
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
    write_json(folder / "initialisation.json", report)
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
