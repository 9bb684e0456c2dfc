"""What a trained MarianMT translates, and what the same weights translate as ours, in CTranslate2 and back again.

MarianMT and ours decode by transformers' `generate`, with the same options, so that their translations must be the same
but for ties; CTranslate2 has a search of its own. It writes conversion.json, and the converted models beside it.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import AutoTokenizer, MarianMTModel

from hf_vanilla_trm import export_ctranslate2, from_marian, to_marian, vocabularies_of
from training.arguments import positive_integer
from training.convert import largest_difference
from training.decode_speed import Task, bleu, read_sentences
from training.decoders import LENGTH_PENALTY, Tokens, load_ctranslate2, load_generate, load_search
from training.run_log import write_json

ORIGINAL = "MarianMT"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--model", required=True, help="Folder of a trained MarianMT with its tokenizer.")
    parser.add_argument("--source", type=Path, required=True, help="Sentences, one a line.")
    parser.add_argument("--reference", type=Path, required=True, help="Their translations.")
    parser.add_argument("--beams", type=positive_integer, default=4, help="(default: 4)")
    parser.add_argument("--batch_size", type=positive_integer, default=32, help="Sentences of generate (default: 32).")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/benchmark/conversion"))


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Convert, translate, write conversion.json and print a table; return the exit code. There are no further flags.

    Returns:
        1 if the weights that came back are others, else 0.
    """
    del flags
    transformers.utils.logging.disable_progress_bar()
    try:
        sentences, references = read_sentences(options.source, options.reference, None)
        marian = MarianMTModel.from_pretrained(options.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        report = {"command": shlex.join(sys.orig_argv), **convert(marian, tokenizer, options.output_dir)}
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    task = Task(tokenizer(sentences, verbose=False)["input_ids"], references, options.beams)
    found = translations(options, task.sources, tokenizer, marian.config)
    report["rows"], ours = compare(found, task, tokenizer), from_marian(marian)
    for row in report["rows"]:
        row["largest_score_difference"] = score_difference(ours, task.sources, found[ORIGINAL], found[row["form"]])
    write_json(options.output_dir / "conversion.json", report)
    print(f"largest difference of logits, ours from MarianMT's: {report['largest_difference']:.1e}")
    print(f"parameters that came back as they were: {report['equal_parameters']} of {report['parameters']}\n")
    print(table(report["rows"]))
    return 0 if report["equal_parameters"] == report["parameters"] else 1


def convert(marian: MarianMTModel, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Write ours, CTranslate2's and what came back below a folder; return how exact that was.

    Raises:
        ImportError: If CTranslate2 is not installed.
        ValueError: As `from_marian`.
    """
    ours = from_marian(marian)
    back = to_marian(ours)
    ours.save_pretrained(folder / "ours")
    back.save_pretrained(folder / "back")
    export_ctranslate2(ours, tokenizer, folder / "ctranslate2")
    returned, state = back.state_dict(), marian.state_dict()
    return {
        "largest_difference": largest_difference(marian, ours),
        "parameters": len(state),
        "equal_parameters": sum(name not in returned or torch.equal(returned[name], state[name]) for name in state),
    }


def translations(
    options: argparse.Namespace, sources: Sequence[Tokens], tokenizer: Any, config: Any
) -> dict[str, list[Tokens]]:
    """Return what each form of the model translates the sources to, by name."""
    folder, beams = options.output_dir, options.beams
    loaders = {
        ORIGINAL: (lambda: load_generate(options.model, "fp32", beams), options.batch_size),
        "ours, by generate": (lambda: load_generate(str(folder / "ours"), "fp32", beams), options.batch_size),
        "ours, by search": (lambda: load_search(str(folder / "ours"), "fp32", beams), 2048),
        "ours, as CTranslate2": (
            lambda: load_ctranslate2(folder / "ctranslate2", "float32", beams, vocabularies_of(tokenizer, config)[0]),
            2048,
        ),
        "back to MarianMT": (lambda: load_generate(str(folder / "back"), "fp32", beams), options.batch_size),
    }
    found = {}
    for name, (load, size) in tqdm(loaders.items(), desc="Translating", unit="form", leave=False):
        found[name] = load()(sources, size)
    return found


def compare(found: dict[str, list[Tokens]], task: Task, tokenizer: Any) -> list[dict[str, Any]]:
    """Return a row for each form: BLEU, and how many translations are MarianMT's."""
    rows = []
    for name, outputs in found.items():
        same = sum(own == other for own, other in zip(outputs, found[ORIGINAL], strict=True))
        rows.append({"form": name, "identical": same, "of": len(outputs), **bleu(outputs, task, tokenizer)})
    return rows


def score_difference(model: Any, sources: Sequence[Tokens], some: Sequence[Tokens], others: Sequence[Tokens]) -> float:
    """Return how much the scores of translations that differ from their counterparts differ from theirs, at most.

    A score is the log-probability of the translation over its length to the power of `LENGTH_PENALTY`, as `generate`
    has it; translations with the same score are ties.
    """
    largest = 0.0
    for source, *pair in zip(sources, some, others, strict=True):
        if pair[0] != pair[1]:
            log_probs = [model.token_log_probs(torch.tensor([source]), torch.tensor([tokens])) for tokens in pair]
            scores = [float(one.sum()) / one.size(1) ** LENGTH_PENALTY for one in log_probs]
            largest = max(largest, abs(scores[0] - scores[1]))
    return largest


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = ["| form | BLEU | translations identical to MarianMT's | largest difference of the others' scores |"]
    lines.append("|---|---|---|---|")
    for row in rows:
        identical = f"{row['identical']:,} of {row['of']:,}"
        lines.append(f"| {row['form']} | {row['bleu']:.2f} | {identical} | {row['largest_score_difference']:.1e} |")
    return "\n".join(lines)
