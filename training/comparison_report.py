"""The table and the pictures of a comparison of sharing modes."""

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure

Row = dict[str, Any]

COLUMNS: dict[str, Callable[[list[Row]], str]] = {
    "model": lambda rows: rows[0]["variant"],
    "d_model / d_ff": lambda rows: f"{rows[0]['d_model']} / {rows[0]['d_ff']}",
    "layers (distinct)": lambda rows: layers_of(rows[0]),
    "parameters": lambda rows: f"{rows[0]['parameters']:,}",
    "file, MB": lambda rows: f"{rows[0]['file_bytes'] / 1e6:.2f}",
    "peak memory of the process, MB": lambda rows: f"{max(row['peak_memory_bytes'] for row in rows) / 1e6:.0f}",
    "training, tokens/s": lambda rows: f"{mean(rows, 'target_tokens_per_second'):,.0f}",
    "minutes": lambda rows: f"{mean(rows, 'minutes'):.1f}",
    "decoding, sentences/s": lambda rows: f"{mean(rows, 'sentences_per_second'):.0f}",
    "loss": lambda rows: f"{mean(rows, 'loss'):.3f}",
    "BLEU": lambda rows: score(rows, "bleu"),
    "chrF": lambda rows: score(rows, "chrf"),
    "exact match, %": lambda rows: f"{mean(rows, 'exact_match'):.1f}",
}


def mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean over seeds."""
    return statistics.mean(row[name] for row in rows)


def score(rows: Sequence[Row], name: str) -> str:
    """Return a score with its interval: over the lines of the test for one seed, over seeds for several."""
    if len(rows) == 1:
        return f"{rows[0][name]:.1f} [{rows[0][f'{name}_low']:.1f}, {rows[0][f'{name}_high']:.1f}]"
    return f"{mean(rows, name):.1f} ± {statistics.stdev(row[name] for row in rows):.1f}"


def layers_of(row: Row) -> str:
    """Return both depths, and how many layers of each are distinct."""
    depths = f"{row['encoder_layers']}+{row['decoder_layers']}"
    unique = row["num_unique_layers"]
    if unique is None:
        return depths
    part = "" if row["parameter_sharing"] == "all" else f" {row['parameter_sharing']}"
    return f"{depths} ({unique}+{unique}{part})"


def by_variant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each variant, in the order of their first ones."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["variant"], []).append(row)
    return groups


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the table, a line for each variant."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    lines += [[column(group) for column in COLUMNS.values()] for group in by_variant(rows).values()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(
    folder: Path,
    rows: list[Row],
    runs: dict[tuple[str, int], Path],
    arguments: dict[str, Any],
    *,
    split: str,
    is_fair: bool,
) -> str:
    """Write table.md, table.csv, results.json and the pictures; return the table.

    Args:
        folder: Where to.
        rows: A row for each variant and seed.
        runs: The folder of each variant's and seed's run.
        arguments: Those of the comparison.
        split: What the scores are of: "test" or "validation".
        is_fair: Whether the unshared model was good enough.
    """
    seeds = sorted({row["seed"] for row in rows})
    kind = (
        f"95 % bootstrap intervals over the {split} lines"
        if len(seeds) == 1
        else f"mean ± deviation of {len(seeds)} seeds"
    )
    notes = f"Scores: {kind}. BLEU is `{rows[0]['bleu_signature']}`, chrF is `{rows[0]['chrf_signature']}`."
    warning = "" if is_fair else "The unshared model is too weak: this compares nothing.\n\n"
    table = f"{warning}{markdown_table(rows)}\n\n{notes}\n"
    (folder / "table.md").write_text(table, encoding="utf-8")
    with (folder / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    content = {"arguments": arguments, "split": split, "is_fair": is_fair, "rows": rows}
    (folder / "results.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    plot_quality(folder / "quality_parameters.png", rows, "parameters", "unique parameters", split)
    plot_quality(folder / "quality_time.png", rows, "minutes", "minutes of training", split)
    plot_curves(folder / "learning_curves.png", runs)
    return table


def plot_quality(file: Path, rows: Sequence[Row], x: str, label: str, split: str) -> None:
    """Draw BLEU and chrF of every run, with its interval, over another of its numbers."""
    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    for axes, name, title in zip(figure.subplots(1, 2), ("bleu", "chrf"), ("BLEU", "chrF"), strict=True):
        for number, (variant, group) in enumerate(by_variant(rows).items()):
            below = [row[name] - row[f"{name}_low"] for row in group]
            above = [row[f"{name}_high"] - row[name] for row in group]
            points = [row[x] for row in group], [row[name] for row in group]
            marker = "o^sDvP*Xh<>"[number % 11]
            ends = [[max(0, end) for end in side] for side in (below, above)]
            axes.errorbar(*points, yerr=ends, fmt=marker, capsize=3, label=variant)
        axes.set(xlabel=label, title=f"{title} ({split})")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    figure.savefig(file, dpi=110)


def plot_curves(file: Path, runs: dict[tuple[str, int], Path]) -> None:
    """Draw loss and BLEU on validation over updates, a line for each run, a colour for each variant."""
    figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout="constrained")
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(variant for variant, _ in runs))}
    panels = (("validation_loss", "loss per target token (nats)"), ("validation_bleu", "BLEU (validation, greedy)"))
    for axes, (name, title) in zip(figure.subplots(1, 2), panels, strict=True):
        labelled = set()
        for (variant, _), run in runs.items():
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
            points = [(line["update"], line[name]) for line in lines if name in line]
            if points:
                label = None if variant in labelled else variant
                labelled.add(variant)
                axes.plot(*zip(*points, strict=True), color=colours[variant], marker=".", label=label)
        axes.set(xlabel="update", title=title)
        axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center")
    figure.savefig(file, dpi=110)
