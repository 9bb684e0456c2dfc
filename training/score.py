"""Score translations: `python -m training.score --model DIR --source FILE --reference FILE`.

sacreBLEU's BLEU, chrF and TER with their signatures and 95 % bootstrap intervals, and any metric of the `evaluate`
library that scores texts. Lines are translated by a model, or read (`--hypotheses`); a second system, a baseline, is
compared by a paired test. All that can be refused is refused before anything is translated.
"""

import argparse
import dataclasses
import hashlib
import io
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_vanilla_trm import BATCH_TOKENS
from training.arguments import positive_integer
from training.evaluation import load_metric, numbers_of, takes_sources
from training.lines import read_lines
from training.loading import load_for_search
from training.run_log import weights_digest, write_json
from training.scoring import (
    LABELS,
    PAIRED_TESTS,
    Scores,
    bleu_metric,
    check_seed,
    corpus_metric,
    corpus_score,
    paired_test,
    score_table,
    signature_line,
)
from training.translator import translate_all

DECODING = ("num_beams", "alpha", "max_length_a", "max_length_b")


# What is scored ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LineFile:
    """A file of lines, read once.

    Attributes:
        file: Its name.
        lines: Its lines.
        sha256: The digest of its bytes, in hexadecimal.
    """

    file: str
    lines: list[str]
    sha256: str

    @classmethod
    def read(cls, path: Path | None) -> "LineFile | None":
        """Read a file, or return None if there is none.

        Raises:
            OSError: If it cannot be read.
            ValueError: If a line is not UTF-8.
        """
        if path is None:
            return None
        content = path.read_bytes()
        return cls(str(path), list(read_lines(io.BytesIO(content), str(path))), hashlib.sha256(content).hexdigest())

    def record(self) -> dict[str, str]:
        """Return what results say of it."""
        return {"file": self.file, "sha256": self.sha256}


@dataclass(frozen=True)
class Texts:
    """The files of one scoring; each line of one belongs to that line of the others.

    Attributes:
        references: One or more.
        source: Source lines, which a model needs and some metrics do.
        hypotheses: Translations of the system, if they are made already.
        baseline: Translations of the baseline, if they are made already.

    Raises:
        ValueError: If the files differ in their number of lines, or lines that are to be scored have no reference.
    """

    references: list[LineFile]
    source: LineFile | None
    hypotheses: LineFile | None
    baseline: LineFile | None

    def __post_init__(self) -> None:
        first = self.references[0]
        for other in (*self.references[1:], self.source, self.hypotheses, self.baseline):
            if other is not None and len(other.lines) != len(first.lines):
                raise ValueError(
                    f"{first.file} has {len(first.lines):,} lines and {other.file} has {len(other.lines):,}: each line "
                    "of one must belong to that line of the other"
                )
        names = " and ".join(reference.file for reference in self.references)
        if not any(self.reference_lines()):
            raise ValueError(f"{names}: there is no line that is not blank, and so nothing to score")
        translated = [self.source] if self.source else [file for file in (self.hypotheses, self.baseline) if file]
        for number, line in enumerate(self.reference_lines(), start=1):
            filled = [file.file for file in translated if file.lines[number - 1].strip()]
            if not line and filled:
                raise ValueError(f"{names}, line {number}: the reference is blank, and that line of {filled[0]} is not")

    def reference_lines(self) -> list[str]:
        """Return one reference of each line, the first that is not blank; "" if all are."""
        lines = zip(*(reference.lines for reference in self.references), strict=True)
        return [next((text for text in texts if text.strip()), "") for texts in lines]

    def reference_columns(self) -> list[list[str | None]]:
        """Return the references of each file; None for a blank line if another file has a reference there."""
        filled = self.reference_lines()
        return [
            [None if line and not text.strip() else text for text, line in zip(reference.lines, filled, strict=True)]
            for reference in self.references
        ]

    def record(self) -> dict[str, Any]:
        """Return the names of the files with their digests."""
        one = {"source": self.source, "hypotheses": self.hypotheses, "baseline_hypotheses": self.baseline}
        return {
            "references": [reference.record() for reference in self.references],
            **{name: file and file.record() for name, file in one.items()},
        }


class ScoredModel:
    """A model and how it decodes.

    Args:
        name: Folder or Hub id.
        options: The command's.

    Raises:
        OSError: If it cannot be loaded.
        ValueError: If it cannot decode as the options say.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        # A model of the Hub is some commit of it, whose files this command does not see.
        self.weights = weights_digest(Path(name)) if any(Path(name).glob("*.safetensors")) else None
        self.name = name
        self.model, self.tokenizer = load_for_search(name, options.device)
        self.search = self.model.search_options(**{option: getattr(options, option) for option in DECODING})
        self.batch_tokens = options.batch_tokens

    def translate(self, lines: Sequence[str], progress: str) -> list[str]:
        """Translate lines under a progress bar of that name."""
        return translate_all(
            self.model, self.tokenizer, lines, self.search, batch_tokens=self.batch_tokens, progress=progress
        )

    def record(self) -> dict[str, Any]:
        """Return what results say of it."""
        return {"name": self.name, "weights": self.weights}


# Metrics -----------------------------------------------------------------------------------------------------------


class Metrics:
    """The metrics that are asked for.

    Args:
        names: Of sacreBLEU's ("bleu", "chrf", "ter") and of the `evaluate` library's, those by name or by the path of
            their script.
        tokenize: sacreBLEU's tokenizer for BLEU.
        lowercase: Whether case does not count for BLEU and chrF; other metrics are given the texts as they are.
        samples: Of the bootstrap.
        has_sources: Whether there are source lines.

    Raises:
        ValueError: If a metric or the tokenizer is not there, a metric does not score texts, or it needs sources that
            there are not.
    """

    def __init__(
        self, names: Sequence[str], *, tokenize: str, lowercase: bool, samples: int, has_sources: bool
    ) -> None:
        check_seed()
        bleu_metric(tokenize)  # a misspelt tokenizer is refused where BLEU is not asked for, too
        self.samples = samples
        self.names = [name if name in LABELS else Path(name).stem for name in names]
        if len(set(self.names)) < len(names):
            raise ValueError(f"metrics: two of them have one name: {', '.join(names)}")
        if scripts := [name for name in names if name not in LABELS and Path(name).stem in LABELS]:
            raise ValueError(f"the metric {scripts[0]!r} has the name of one of sacreBLEU's: give its script another")
        self.corpus = {
            name: corpus_metric(name, tokenize=tokenize, lowercase=lowercase) for name in self.names if name in LABELS
        }
        self.others = {Path(name).stem: load_metric(name) for name in names if name not in LABELS}
        for name, metric in self.others.items():
            if takes_sources(metric) and not has_sources:
                raise ValueError(f"the metric {name!r} looks at the sources: give --source")
            if not numbers_of(name, metric, ["two words"], ["two words"], ["two words"]):
                raise ValueError(f"the metric {name!r} gives no number for all lines together")

    def compute(self, hypotheses: Sequence[str], texts: Texts) -> Scores:
        """Return all scores of a system; metrics of `evaluate` see one reference of each line.

        Raises:
            ValueError: If a metric cannot score these texts.
        """
        scores: Scores = {}
        for name in self.names:
            if name in self.corpus:
                scores[name] = corpus_score(self.corpus[name], hypotheses, texts.reference_columns(), self.samples)
                continue
            sources = texts.source and texts.source.lines
            numbers = numbers_of(name, self.others[name], hypotheses, texts.reference_lines(), sources)
            scores |= {
                key: {"score": number, "mean": None, "interval": None, "signature": None}
                for key, number in numbers.items()
            }
        return scores

    def compare(
        self, baseline: Sequence[str], hypotheses: Sequence[str], texts: Texts, *, test: str
    ) -> dict[str, dict[str, Any]]:
        """Return the result of a paired test, "bs" or "ar", for each of sacreBLEU's metrics."""
        references = texts.reference_columns()
        return {
            name: paired_test(metric, baseline, hypotheses, references, test=test, samples=self.samples)
            for name, metric in self.corpus.items()
        }


# The command -------------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Score translations.", allow_abbrev=False)
    system = parser.add_mutually_exclusive_group(required=True)
    system.add_argument("--model", help="folder or Hub id of a model, which translates the source")
    system.add_argument("--hypotheses", type=Path, metavar="FILE", help="translations that are made already")
    baseline = parser.add_mutually_exclusive_group()
    baseline.add_argument("--baseline_model", metavar="MODEL", help="compare with this model")
    baseline.add_argument("--baseline_hypotheses", type=Path, metavar="FILE", help="compare with these translations")
    parser.add_argument("--source", type=Path, metavar="FILE", help="source lines")
    parser.add_argument("--reference", type=Path, nargs="+", required=True, metavar="FILE", help="one file or several")
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=list(LABELS),
        metavar="NAME",
        help=f"{', '.join(LABELS)} (default: these, sacreBLEU's), or any of the evaluate library, by name or script",
    )
    parser.add_argument("--tokenize", default="13a", help="sacreBLEU's tokenizer for BLEU: 13a (default), zh, ...")
    parser.add_argument("--lowercase", action="store_true", help="case does not count for BLEU and chrF")
    parser.add_argument("--bootstrap", type=int, default=1000, metavar="N", help="samples of intervals (1000)")
    parser.add_argument("--paired", choices=list(PAIRED_TESTS), help="test against the baseline (default: bs)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file for the results")
    parser.add_argument("--save_translations", type=Path, metavar="FILE", help="file for the model's translations")
    parser.add_argument("--num_beams", type=positive_integer, help="default: the model's own")
    parser.add_argument("--alpha", type=float, help="the paper's length penalty; default: the model's own")
    parser.add_argument("--max_length_a", type=float, help="cap a * source_length + b; default: the model's own")
    parser.add_argument("--max_length_b", type=int, help="default: the model's own")
    parser.add_argument(
        "--batch_tokens", type=positive_integer, default=BATCH_TOKENS, help="source tokens times beams in a batch"
    )
    parser.add_argument("--device", type=torch.device, help="default: an accelerator if there is one")
    return parser.parse_args(arguments)


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, and outputs that cannot be written.

    Raises:
        OSError: If an output cannot be written.
        ValueError: If options do not go together.
    """
    models = [name for name in ("model", "baseline_model") if getattr(options, name) is not None]
    if models and options.source is None:
        raise ValueError(f"--{models[0]} needs --source, the lines to translate")
    if not models and (given := [name for name in DECODING if getattr(options, name) is not None]):
        raise ValueError(f"--{given[0]} ({getattr(options, given[0])}) needs a model: nothing is decoded")
    if options.save_translations is not None and options.model is None:
        raise ValueError(f"--save_translations ({options.save_translations}) needs --model: nothing is translated")
    if options.paired and options.baseline_model is None and options.baseline_hypotheses is None:
        raise ValueError(f"--paired ({options.paired}) needs --baseline_model or --baseline_hypotheses")
    if options.bootstrap < 2:
        raise ValueError(f"--bootstrap ({options.bootstrap}) must be at least 2: one sample has no interval")
    outputs = [file for file in (options.output, options.save_translations) if file is not None]
    inputs = [options.source, options.hypotheses, options.baseline_hypotheses, *options.reference]
    read = {file.resolve() for file in inputs if file is not None}
    for file in outputs:
        if file.resolve() in read:
            raise ValueError(f"{file} is both read and written")
        check_writable(file)
    if len({file.resolve() for file in outputs}) < len(outputs):
        raise ValueError(f"--output and --save_translations are the same file, {options.output}")


def check_writable(file: Path) -> None:
    """Make sure that a file can be made or replaced.

    Raises:
        OSError: If it cannot.
    """
    if file.is_dir():
        raise IsADirectoryError(f"{file} cannot be written: it is a folder")
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error.strerror}") from error


def read_texts(options: argparse.Namespace) -> Texts:
    """Read all files.

    Raises:
        OSError: If one cannot be read.
        ValueError: If they do not belong together; see `Texts`.
    """
    return Texts(
        references=[LineFile.read(path) for path in options.reference],
        source=LineFile.read(options.source),
        hypotheses=LineFile.read(options.hypotheses),
        baseline=LineFile.read(options.baseline_hypotheses),
    )


def translations_of(
    model: ScoredModel | None, source: LineFile | None, made: LineFile | None, progress: str
) -> list[str] | None:
    """Return the translations of a system, which a model makes or a file holds; None if there is no such system."""
    if model is not None:
        return model.translate(source.lines, progress)
    return None if made is None else made.lines


def result_of(scores: Scores, model: ScoredModel | None) -> dict[str, Any]:
    """Return what a result says of a system."""
    decoding = None if model is None else dataclasses.asdict(model.search)
    return {"scores": scores, "model": None if model is None else model.record(), "decoding": decoding}


def score(options: argparse.Namespace) -> dict[str, Any]:
    """Translate what is to be translated, score it, and return the result, which is what `--output` holds.

    Raises:
        OSError: If something cannot be read or written.
        ValueError: If options, files or metrics do not go together.
    """
    check_options(options)
    texts = read_texts(options)
    settings = {"tokenize": options.tokenize, "lowercase": options.lowercase, "samples": options.bootstrap}
    metrics = Metrics(options.metrics, **settings, has_sources=texts.source is not None)
    # Both are loaded before either decodes: that the second is not there must not be learnt after hours.
    model, baseline_model = (
        None if name is None else ScoredModel(name, options) for name in (options.model, options.baseline_model)
    )
    hypotheses = translations_of(model, texts.source, texts.hypotheses, "Translating")
    if options.save_translations is not None:
        options.save_translations.write_bytes("".join(f"{line}\n" for line in hypotheses).encode("utf-8"))
    baseline = translations_of(baseline_model, texts.source, texts.baseline, "Translating (baseline)")
    result = result_of(metrics.compute(hypotheses, texts), model)
    result |= {"lines": len(hypotheses), "files": texts.record(), "command": shlex.join(sys.orig_argv)}
    if baseline is not None:
        test = options.paired or "bs"
        result["baseline"] = result_of(metrics.compute(baseline, texts), baseline_model)
        result["paired"] = {"test": test, "metrics": metrics.compare(baseline, hypotheses, texts, test=test)}
    return result


def report(result: dict[str, Any]) -> str:
    """Return a result as Markdown: a table, sacreBLEU's signatures, and which test the p-values are of."""
    signatures = signature_line(result["scores"])
    if "paired" not in result:
        parts = [score_table(result["scores"]), signatures]
    else:
        paired = result["paired"]
        parts = [score_table(result["scores"], result["baseline"]["scores"], paired["metrics"]), signatures]
        if paired["metrics"]:
            parts.append(f"p: paired {PAIRED_TESTS[paired['test']]}, two-sided.")
    return "\n\n".join(part for part in parts if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Score; return the exit code."""
    options = parse_arguments(arguments)
    transformers.utils.logging.disable_progress_bar()
    try:
        result = score(options)
        print(report(result))
        if options.output is not None:
            write_json(options.output, result)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
