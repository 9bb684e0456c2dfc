"""How fast a trained model translates, beside transformers' `generate`, MarianMT and CTranslate2 with the same weights.

All translate the same sentences, tokenised beforehand, longest first, with the same number of beams and at most 50
tokens more than the source (of others than `search`: than the longest source of the batch). They do it in turn, each in
a process of its own; what is compared is the ratio of each round. All but ours take the batch size that is their best
in one trial each; CTranslate2 is measured with all threads on one batch and, as our search has it, with
batches on several threads. Their length penalty of 0.6 is of their own kind, and so is the time at which they give up a
search; whether the translations are as good, BLEU tells. ONNX Runtime has the exported graphs, and decodes greedily.
Latency is measured with one sentence at a time, and peak memory in a further process for each.

It also counts how many translations of `search` depend on the batch that they were made in, in float32 and in float64.

It writes decode.json and decode.png, and the files of the other libraries beside them.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import random
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure
import psutil
import sacrebleu
import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hf_vanilla_trm import BATCH_TOKENS, export_ctranslate2, export_onnx, to_marian, vocabularies_of
from training.arguments import DataArguments, positive_integer
from training.data import load_pairs
from training.decoders import (
    MAX_LENGTH_B,
    Decode,
    OwnProcess,
    System,
    Tokens,
    batches_of_tokens,
    best_of_search,
    file_bytes,
    load_ctranslate2,
    load_generate,
    load_model,
    load_onnx,
    load_search,
    weights_bytes,
)
from training.evaluation import spaced_rows
from training.lines import as_line, read_lines
from training.loading import QUANTIZED, load
from training.memory import peak_memory, reset_peak_memory
from training.run_log import write_json
from training.train_speed import in_own_process

ONNX = ("onnx", "onnxruntime", "onnxscript")
CTRANSLATE2_TYPES = ("float32", "int8")
CTRANSLATE2_BATCH_TOKENS = (512, 1024, 2048, 4096)
"""Source tokens, padding included, of the batches that are tried."""
WARM_UP = 32
"""Sentences that are translated before a trial."""
LATENCY_TURN = 10
"""Sentences that a system translates in a row: the first finds the weights of another in the processor's cache."""
PAUSE = 0.5
"""Seconds between two systems: threads of the one before look for work a while before they sleep."""
OURS = "ours, fp32"
REFERENCES = ("MarianMT, fp32", "CTranslate2, float32", "CTranslate2, float32, a thread a batch")
"""What the table compares with; decode.json has the ratios to all."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What is translated.

    Attributes:
        sources: Tokens of each sentence, EOS included.
        references: Their translations, where there are some.
        beams: Of every search.
    """

    sources: list[Tokens]
    references: list[str] | None
    beams: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--model", required=True, help="Folder of a trained model with its tokenizer.")
    parser.add_argument("--source", type=Path, help="Sentences, one a line (default: the embedded corpus' test split).")
    parser.add_argument("--reference", type=Path, help="Their translations, to compute BLEU.")
    parser.add_argument("--sentences", type=positive_integer, help="Sentences, spread over them (default: all).")
    parser.add_argument("--beams", type=positive_integer, default=4, help="(default: 4)")
    parser.add_argument("--rounds", type=positive_integer, default=3, help="Rounds that are timed (default: 3).")
    parser.add_argument(
        "--marian_batch_sizes",
        nargs="+",
        type=positive_integer,
        default=[16, 32, 64, 128],
        help="Sentences a batch of generate, the best of which is measured (default: 16 32 64 128).",
    )
    parser.add_argument(
        "--batch_tokens",
        type=positive_integer,
        default=BATCH_TOKENS,
        help=f"Source tokens times beams in a batch of ours (default: {BATCH_TOKENS}).",
    )
    parser.add_argument(
        "--latency_sentences", type=positive_integer, default=50, help="Sentences one at a time (default: 50)."
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Count translations that depend on their batch (default: yes).",
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/benchmark/decode"))


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Measure, write decode.json and decode.png and print tables; return the exit code. There are no further flags.

    Returns:
        1 if a translation in float64 depends on its batch, else 0.
    """
    del flags
    transformers.utils.logging.disable_progress_bar()
    try:
        sentences, references = read_sentences(options.source, options.reference, options.sentences)
        model, tokenizer = load(options.model, "cpu")
        vocabulary = vocabularies_of(tokenizer, model.config)[0]
        task = Task(tokenizer(sentences, verbose=False)["input_ids"], references, options.beams)
        convert(model, tokenizer, task, options.output_dir)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    del model
    systems = systems_of(options, vocabulary)
    report: dict[str, Any] = {
        "command": shlex.join(sys.orig_argv),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "sentences": len(task.sources),
        "source_tokens": sum(map(len, task.sources)),
        "beams": task.beams,
        "systems": measure(systems, task, tokenizer, rounds=options.rounds, one_by_one=options.latency_sentences),
        "check": [],
    }
    for name, packages in (("CTranslate2", ("ctranslate2",)), ("torchao", ("torchao",)), ("ONNX Runtime", ONNX)):
        if not is_installed(*packages):
            print(f"{name} is not installed, and is left out.\n")
    print(speed_table(report["systems"]), flush=True)
    write_report(options.output_dir, report)
    if not options.check:
        return 0
    for precision in ("fp32", "fp64"):
        report["check"] += dependence_on_batches(options.model, precision, task, options.batch_tokens)
    print("\n" + check_table(report["check"]))
    write_report(options.output_dir, report)
    depends = [row for row in report["check"] if row["precision"] == "fp64" and row["identical"] < row["of"]]
    if depends:
        print("error: a translation depends on its batch in float64, where rounding is no reason", file=sys.stderr)
    return 1 if depends else 0


def is_installed(*packages: str) -> bool:
    """Whether all of some packages can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in packages)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are compared."""
    names = [name for name in ("torch", "transformers", "ctranslate2", "torchao", "onnxruntime") if is_installed(name)]
    return {name: importlib.metadata.version(name) for name in names}


def read_sentences(
    source: Path | None, reference: Path | None, number: int | None
) -> tuple[list[str], list[str] | None]:
    """Return sentences and, where they are known, their translations.

    Args:
        source: One a line; None takes the test split of the embedded corpus, with its translations.
        reference: Translations, one a line.
        number: How many are wanted, spread over all; None takes all.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If there is no line, one is blank, there are fewer than are wanted, or translations are not as many
            or without sources.
    """
    if source is None:
        if reference is not None:
            raise ValueError(
                f"--reference ({reference}) needs --source: the embedded corpus has translations of its own"
            )
        test = load_pairs(DataArguments(embedded_corpus="en-de"), ("test",))["test"]
        sentences, references = list(test["source"]), list(test["target"])
    else:
        sentences = read_file(source)
        references = None if reference is None else read_file(reference)
    if references is not None and len(references) != len(sentences):
        raise ValueError(f"--reference has {len(references)} lines, and --source {len(sentences)}")
    for place, sentence in enumerate(sentences, start=1):
        if not sentence.strip():
            raise ValueError(f"{source}, line {place}: is blank, and nothing to translate")
    if not sentences or (number is not None and number > len(sentences)):
        raise ValueError(
            f"--sentences ({number or 'all'}) must be at least 1, and at most the {len(sentences)} there are"
        )
    rows = spaced_rows(len(sentences), number or len(sentences))
    return [sentences[row] for row in rows], None if references is None else [references[row] for row in rows]


def read_file(path: Path) -> list[str]:
    """Return the lines of a file; see `read_lines`."""
    with path.open("rb") as file:
        return list(read_lines(file, str(path)))


def convert(model: Any, tokenizer: PreTrainedTokenizerBase, task: Task, folder: Path) -> None:
    """Write MarianMT's files, and below a folder those for the libraries that are installed; their positions suffice.

    Raises:
        ValueError: As `to_marian`.
    """
    longest = 2 * max(map(len, task.sources)) + MAX_LENGTH_B
    positions = max(model.config.max_position_embeddings, longest)
    marian = to_marian(model, max_position_embeddings=positions)
    marian.save_pretrained(folder / "marian")
    if is_installed(*ONNX):
        export_onnx(model, folder / "onnx")
    if is_installed("ctranslate2"):
        for kind in CTRANSLATE2_TYPES:
            export_ctranslate2(marian, tokenizer, folder / f"ctranslate2_{kind}", quantization=kind)


def systems_of(options: argparse.Namespace, vocabulary: Sequence[str]) -> dict[str, System]:
    """Return what is compared, by name."""
    beams, folder = options.beams, options.output_dir
    systems, rows = {}, tuple(options.marian_batch_sizes)
    own_sizes = (max(1, options.batch_tokens // beams),)
    for precision in ("fp32", "bf16", *(QUANTIZED if is_installed("torchao") else ())):
        search = functools.partial(load_search, options.model, precision, beams)
        weights = functools.partial(weights_bytes, options.model, precision)
        systems[f"ours, {precision}"] = System(search, own_sizes, "source tokens", weights)
    for name, model, precision in (
        ("MarianMT, fp32", str(folder / "marian"), "fp32"),
        ("MarianMT, bf16", str(folder / "marian"), "bf16"),
        ("ours by generate, fp32", options.model, "fp32"),
    ):
        generate = functools.partial(load_generate, model, precision, beams)
        systems[name] = System(generate, rows, "sentences", functools.partial(weights_bytes, model, precision))
    if is_installed(*ONNX):
        weights = functools.partial(file_bytes, folder / "onnx", "*.onnx*")
        load_session = functools.partial(load_onnx, folder / "onnx")
        systems["ONNX Runtime, fp32, greedy"] = System(load_session, rows, "sentences", weights)
    for kind in CTRANSLATE2_TYPES if is_installed("ctranslate2") else ():
        converted = folder / f"ctranslate2_{kind}"
        weights = functools.partial(file_bytes, converted, "model.bin")
        for suffix, thread_a_batch in (("", False), (", a thread a batch", True)):
            translate = functools.partial(
                load_ctranslate2, converted, kind, beams, vocabulary, thread_a_batch=thread_a_batch
            )
            name = f"CTranslate2, {kind}{suffix}"
            systems[name] = System(translate, CTRANSLATE2_BATCH_TOKENS, "source tokens", weights)
    return systems


def measure(
    systems: dict[str, System], task: Task, tokenizer: PreTrainedTokenizerBase, *, rounds: int, one_by_one: int
) -> list[Row]:
    """Return a row for each system: batch size, speed, its ratios to all, latency, peak memory and translations' worth.

    Args:
        systems: By name; `OURS` is one of them.
        task: What they translate.
        tokenizer: The model's own.
        rounds: That are timed.
        one_by_one: Sentences for latency, spread over all.
    """
    decoders: dict[str, Decode] = {name: OwnProcess(system.load) for name, system in systems.items()}
    trials, outputs = try_sizes(systems, decoders, task)
    sizes = {name: min(seconds, key=seconds.__getitem__) for name, seconds in trials.items()}
    seconds = seconds_of_rounds(decoders, task, sizes, rounds)
    latencies = milliseconds_one_by_one(decoders, task, sizes, one_by_one)
    del decoders
    rows = []
    for name, system in tqdm(systems.items(), desc="Peak memory", unit="system", leave=False):
        memory = in_own_process(memory_of_decoding, system, task.sources, sizes[name])
        same = sum(own == other for own, other in zip(outputs[name], outputs[OURS], strict=True))
        rows.append(
            {
                "system": name,
                "batch": {"size": sizes[name], "unit": system.unit},
                "trial_seconds": trials[name],
                "seconds": seconds[name],
                "sentences_per_second": len(task.sources) / statistics.median(seconds[name]),
                "ratios": {other: ratio(seconds[name], seconds[other]) for other in systems},
                "latency_ms": statistics.median(latencies[name]),
                "weights_bytes": system.weights(),
                "peak_memory_bytes": memory[0],
                "memory_before_bytes": memory[1],
                "identical_to_ours": same / len(task.sources),
                **bleu(outputs[name], task, tokenizer),
            }
        )
    return rows


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Return how many times as fast as a reference something was: the median of the rounds, the lowest, the highest."""
    ratios = [other / own for own, other in zip(seconds, reference, strict=True)]
    return {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def try_sizes(
    systems: dict[str, System], decoders: dict[str, Decode], task: Task
) -> tuple[dict[str, dict[int, float]], dict[str, list[Tokens]]]:
    """Translate everything once with every batch size of every system.

    Returns:
        The seconds of each size by system, and each system's translations with its fastest.
    """
    trials: dict[str, dict[int, float]] = {name: {} for name in systems}
    outputs: dict[str, list[Tokens]] = {}
    passes = [(name, size) for name, system in systems.items() for size in system.sizes]
    with tqdm(total=len(passes) * len(task.sources), desc="Trying batch sizes", unit="sentence", leave=False) as bar:
        for name, size in passes:
            bar.set_postfix_str(f"{name}: {size}")
            time.sleep(PAUSE)
            decoders[name](task.sources[:WARM_UP], size)  # what is done once is not the trial's
            started = time.perf_counter()
            found = decoders[name](task.sources, size)
            took = time.perf_counter() - started
            bar.update(len(found))
            if took <= min(trials[name].values(), default=took):
                outputs[name] = found
            trials[name][size] = took
    return trials, outputs


def seconds_of_rounds(
    decoders: dict[str, Decode], task: Task, sizes: dict[str, int], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each system for all sentences, by round; which of them is first changes every time."""
    names = list(decoders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tqdm(total=rounds * len(names) * len(task.sources), desc="Measuring", unit="sentence", leave=False) as bar:
        for turn in range(rounds):
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                bar.set_postfix_str(name)
                time.sleep(PAUSE)
                started = time.perf_counter()
                decoders[name](task.sources, sizes[name])
                seconds[name].append(time.perf_counter() - started)
                bar.update(len(task.sources))
    return seconds


def milliseconds_one_by_one(
    decoders: dict[str, Decode], task: Task, sizes: dict[str, int], number: int
) -> dict[str, list[float]]:
    """Return the milliseconds of each system for each of some sentences by itself, in turn."""
    names, rows = list(decoders), spaced_rows(len(task.sources), min(number, len(task.sources)))
    for name, decode in decoders.items():
        decode([task.sources[rows[0]]], sizes[name])
    milliseconds: dict[str, list[float]] = {name: [] for name in names}
    with tqdm(total=len(names) * len(rows), desc="One by one", unit="sentence", leave=False) as bar:
        for turn, start in enumerate(range(0, len(rows), LATENCY_TURN)):
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                time.sleep(PAUSE)
                for row in rows[start : start + LATENCY_TURN]:
                    started = time.perf_counter()
                    decoders[name]([task.sources[row]], sizes[name])
                    milliseconds[name].append(1000 * (time.perf_counter() - started))
                    bar.update()
    return milliseconds


def memory_of_decoding(system: System, sources: Sequence[Tokens], size: int) -> tuple[int, int]:
    """Return the peak of resident memory of this process while a system translates, and what it had before, in bytes.

    Before, all libraries have been loaded that the process of any system loads, PyTorch among them.
    """
    before = psutil.Process().memory_info().rss
    decode = system.load()
    reset_peak_memory(torch.device("cpu"))
    decode(sources, size)
    return peak_memory(torch.device("cpu")), before


def bleu(outputs: Sequence[Tokens], task: Task, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return sacreBLEU's score and signature of translations, where there are references."""
    if task.references is None:
        return {}
    metric = sacrebleu.BLEU()
    texts = [as_line(text) for text in tokenizer.batch_decode(list(outputs), skip_special_tokens=True)]
    score = metric.corpus_score(texts, [task.references]).score
    return {"bleu": score, "bleu_signature": str(metric.get_signature())}


# Whether translations depend on their batch ------------------------------------------------------------------------


def dependence_on_batches(folder: str, precision: str, task: Task, batch_tokens: int) -> list[Row]:
    """Compare translations of `search` in batches of similar length with those one by one, and in shuffled order.

    Args:
        folder: Of our model.
        precision: A key of `PRECISIONS`.
        task: What is translated.
        batch_tokens: Rows times longest source times beams.

    Returns:
        A row for each comparison: how many of the translations are identical, of how many, and the largest difference
        of the scores of the others.
    """
    model, tokens = load_model(folder, precision), max(1, batch_tokens // task.beams)
    numbers = list(range(len(task.sources)))
    by_length = sorted(numbers, key=lambda number: (-len(task.sources[number]), number))
    shuffled = random.Random(0).sample(numbers, len(numbers))
    found = {}
    for name, batches in (
        ("by length", batches_of_tokens(task.sources, by_length, tokens)),
        ("one by one", [[number] for number in numbers]),
        ("shuffled", batches_of_tokens(task.sources, shuffled, tokens)),
    ):
        results = {}
        for batch in tqdm(batches, desc=f"Checking, {precision}, {name}", unit="batch", leave=False):
            best = best_of_search(model, [task.sources[number] for number in batch], task.beams)
            results |= dict(zip(batch, best, strict=True))
        found[name] = [results[number] for number in numbers]
    return [
        {"precision": precision, "batches": name, **agreement(found[name], found["by length"])}
        for name in ("one by one", "shuffled")
    ]


def agreement(some: Sequence[Any], others: Sequence[Any]) -> dict[str, Any]:
    """Return how many hypotheses have the tokens of their counterparts, and how far the scores of the rest differ."""
    differences = [
        abs(one.score - other.score) for one, other in zip(some, others, strict=True) if one.tokens != other.tokens
    ]
    return {
        "identical": len(some) - len(differences),
        "of": len(some),
        "largest_score_difference": max(differences, default=0.0),
    }


# Reporting ---------------------------------------------------------------------------------------------------------


def speed_table(rows: Sequence[Row]) -> str:
    """Return the rows in Markdown, with their ratios to those of `REFERENCES` that were measured."""
    references = [name for name in REFERENCES if any(row["system"] == name for row in rows)]
    columns = ["system", "batch", "sentences/s", *(f"times {name} (lowest, highest)" for name in references)]
    columns += ["latency, ms", "weights, MB", "peak memory, MB", "of it before the model", "BLEU", "as ours, fp32"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [row["system"], f"{row['batch']['size']} {row['batch']['unit']}", f"{row['sentences_per_second']:,.1f}"]
        for name in references:
            against = row["ratios"][name]
            cells.append(f"{against['median']:.2f} ({against['lowest']:.2f}, {against['highest']:.2f})")
        cells.append(f"{row['latency_ms']:.1f}")
        cells += [f"{row[f'{field}_bytes'] / 1e6:,.0f}" for field in ("weights", "peak_memory", "memory_before")]
        cells += [f"{row['bleu']:.2f}" if "bleu" in row else "-", f"{row['identical_to_ours']:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def check_table(rows: Sequence[Row]) -> str:
    """Return in Markdown how many translations are those of batches of similar length."""
    lines = ["| precision | batches | identical translations | largest difference of the others' scores |"]
    lines.append("|---|---|---|---|")
    for row in rows:
        identical = f"{row['identical']:,} of {row['of']:,}"
        lines.append(f"| {row['precision']} | {row['batches']} | {identical} | {row['largest_score_difference']:.1e} |")
    return "\n".join(lines)


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write decode.json, and decode.png with bars of speed and of latency."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "decode.json", report)
    rows = report["systems"][::-1]  # the first on top
    reference = REFERENCES[0]
    figure = matplotlib.figure.Figure(figsize=(11, 1.5 + 0.45 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row["system"] for row in rows]
    colours = ["C0" if name.startswith("ours, ") else "C7" for name in names]
    bars = left.barh(names, [row["sentences_per_second"] for row in rows], color=colours)
    left.bar_label(bars, [f"{row['ratios'][reference]['median']:.2f}" for row in rows], padding=3)
    left.set(title=f"sentences per second (figures: times {reference})", xlabel="sentences per second")
    bars = right.barh(names, [row["latency_ms"] for row in rows], color=colours)
    right.bar_label(bars, [f"{row['latency_ms']:.0f}" for row in rows], padding=3)
    right.set(title="latency of one sentence", xlabel="milliseconds, median")
    for axes in (left, right):
        axes.margins(x=0.12)
    figure.savefig(folder / "decode.png", dpi=110)
