"""Scores of translations: sacreBLEU's metrics with intervals, paired tests of two systems, the table and the file.

What is drawn is drawn with sacreBLEU's seed, the variable SACREBLEU_SEED or 12345, and is the same each time.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sacrebleu
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest, Result

LABELS = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER"}
"""sacreBLEU's metrics, and what tables call them."""
PAIRED_TESTS = {"bs": "bootstrap resampling", "ar": "approximate randomisation"}
"""sacreBLEU's paired tests."""
WITHOUT_SPACES = ("zh", "ja-mecab")
"""Tokenizers of BLEU for languages that put no spaces between words."""

Scores = dict[str, dict[str, Any]]
"""By metric: score, mean and interval of the bootstrap, signature; the last three are None for an `evaluate` metric."""
References = Sequence[Sequence[str | None]]
"""A list for each file of references; None where a line has no reference in that file."""


# Metrics -----------------------------------------------------------------------------------------------------------


def check_seed() -> None:
    """Refuse a seed that sacreBLEU would stumble over only after decoding.

    Raises:
        ValueError: If SACREBLEU_SEED is neither a number from 1 nor "none". (0 seeds one of its tests, but not all.)
    """
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    if seed.lower() != "none" and not (seed.isdecimal() and int(seed) > 0):
        raise ValueError(f"SACREBLEU_SEED ({seed!r}) must be a number from 1, or none")


def bleu_metric(tokenize: str = "13a", *, lowercase: bool = False, argument: str = "tokenize") -> sacrebleu.BLEU:
    """Return corpus BLEU.

    Args:
        tokenize: sacreBLEU's tokenizer: "13a", or "zh", "ja-mecab", "ko-mecab" for those languages, and others.
        lowercase: Whether case does not count.
        argument: What an error calls `tokenize`.

    Raises:
        ValueError: If sacreBLEU has no such tokenizer, or lacks what it needs.
    """
    try:
        return sacrebleu.BLEU(tokenize=tokenize, lowercase=lowercase)
    except (KeyError, ImportError, OSError, RuntimeError) as error:  # unknown, or without its own dependencies
        raise ValueError(f"{argument} ({tokenize!r}): sacreBLEU has no such tokenizer here") from error


def corpus_metric(name: str, *, tokenize: str = "13a", lowercase: bool = False) -> Metric:
    """Return one of sacreBLEU's metrics with sacreBLEU's own settings.

    TER never counts case. Where the tokenizer says that the language has no spaces, TER's words are single characters.

    Args:
        name: "bleu", "chrf" or "ter".
        tokenize: The tokenizer of BLEU.
        lowercase: Whether case does not count for BLEU and chrF.

    Raises:
        ValueError: See `bleu_metric`.
    """
    if name == "bleu":
        return bleu_metric(tokenize, lowercase=lowercase)
    if name == "chrf":
        return sacrebleu.CHRF(lowercase=lowercase)
    characters = tokenize in WITHOUT_SPACES
    return sacrebleu.TER(normalized=characters, asian_support=characters)


def corpus_score(metric: Metric, hypotheses: Sequence[str], references: References, samples: int) -> dict[str, Any]:
    """Return a score with its 95 % interval over the lines.

    The interval is sacreBLEU's: the mean of the scores of `samples` resampled corpora, and on both sides of it half of
    the distance between their 2.5th and 97.5th percentile; it is cut off where scores end.

    Args:
        metric: From `corpus_metric`.
        hypotheses: Translations.
        references: Their references.
        samples: Corpora to be drawn from the lines with replacement, at least 2.
    """
    # A test without a second system. `Metric.corpus_score`, which could be asked too, fails where a sample has score 0.
    signature, (result,) = _run_test(metric, [hypotheses], references, test="bs", samples=samples)
    highest = math.inf if isinstance(metric, sacrebleu.TER) else 100.0  # rounding takes a perfect score a little above
    return {
        "score": min(highest, float(result.score)),
        "mean": min(highest, float(result.mean)),
        "interval": [max(0.0, float(result.mean - result.ci)), min(highest, float(result.mean + result.ci))],
        "signature": signature,
    }


def paired_test(
    metric: Metric,
    baseline: Sequence[str],
    hypotheses: Sequence[str],
    references: References,
    *,
    test: str,
    samples: int,
) -> dict[str, Any]:
    """Return how much better than a baseline a system scores, and how likely chance alone makes such a difference.

    The p-value is sacreBLEU's, two-sided: among n draws, the part in which the difference was larger than the one
    found, (number + 1) / (n + 1). Where none was found it is 1; sacreBLEU, for which no draw exceeds a difference of 0
    that is 0 in all of them, would call a system significantly different from itself.

    Args:
        metric: From `corpus_metric`.
        baseline: The translations of the system that is compared with.
        hypotheses: The translations of the system.
        references: The references of both.
        test: "bs" (paired bootstrap resampling) or "ar" (approximate randomisation, with 10,000 trials).
        samples: Of "bs".

    Returns:
        `difference` (the system's score less the baseline's), `p_value` and `signature`.
    """
    signature, (before, after) = _run_test(metric, [baseline, hypotheses], references, test=test, samples=samples)
    difference = float(after.score - before.score)
    return {
        "difference": difference,
        "p_value": float(after.p_value) if difference else 1.0,
        "signature": signature,
    }


def _run_test(
    metric: Metric, systems: Sequence[Sequence[str]], references: References, *, test: str, samples: int
) -> tuple[str, list[Result]]:
    """Return the signature, and what sacreBLEU's test finds of each system; the first is the baseline."""
    named = [(f"system {number}", system) for number, system in enumerate(systems)]
    number = samples if test == "bs" else 0  # of trials, 0 is sacreBLEU's own number
    signatures, results = PairedTest(named, {"metric": metric}, references, test_type=test, n_samples=number)()
    ((label, signature),) = signatures.items()
    return str(signature), results[label]


# Tables ------------------------------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as Markdown writes it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def score_table(scores: Scores, baseline: Scores | None = None, paired: dict[str, Any] | None = None) -> str:
    """Return a table with a line for each metric.

    Args:
        scores: Those of the system.
        baseline: Those of the system that it is compared with, if there is one.
        paired: What `paired_test` returned, by metric.
    """
    header = ["metric", "score", "95 % interval"]
    if baseline is not None:
        header += ["baseline", "95 % interval", "difference", "p"]
    rows = []
    for name, score in scores.items():
        # Metrics of the `evaluate` library go from 0 to 1 as often as to 100.
        decimals = 2 if name in LABELS else 4
        row = [LABELS.get(name, name), *_score_cells(score, decimals)]
        if baseline is not None:
            difference = score["score"] - baseline[name]["score"]
            row += [*_score_cells(baseline[name], decimals), f"{difference:+.{decimals}f}"]
            row.append(f"{paired[name]['p_value']:.4f}" if paired and name in paired else "")
        rows.append(row)
    return markdown_table(header, rows)


def _score_cells(score: dict[str, Any], decimals: int) -> list[str]:
    interval = score["interval"]
    ends = "" if interval is None else f"[{', '.join(f'{end:.{decimals}f}' for end in interval)}]"
    return [f"{score['score']:.{decimals}f}", ends]


def signature_line(scores: Scores) -> str:
    """Return a sentence with sacreBLEU's signatures; "" if none of its metrics is among them."""
    parts = [f"{LABELS[name]} is `{score['signature']}`" for name, score in scores.items() if name in LABELS]
    return f"{', '.join(parts)}." if parts else ""


# Files -------------------------------------------------------------------------------------------------------------


def read_result(file: Path) -> dict[str, Any]:
    """Read what `training.score --output` wrote about a model.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is no such file, tells of no model, or a score is not a finite number.
    """
    try:
        result = json.loads(file.read_text("utf-8"))
        weights = result["model"] and result["model"]["weights"]
        numbers = {name: score["score"] for name, score in result["scores"].items()}
        if weights:
            describe(result)  # what is missing is missed here, and not by whoever shows it
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is no result of training.score: {error!r}") from error
    if not weights:
        raise ValueError(f"{file} does not say of which weights its scores are: give --model FOLDER to training.score")
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"{file}: the score {name} is {number}, which is no finite number")
    return result


def data_of(result: dict[str, Any]) -> str:
    """Return what a reader calls the lines that were scored: the names of their files, without folders."""
    files = [result["files"]["source"], *result["files"]["references"]]
    return ", ".join(Path(file["file"]).name for file in files if file)


def describe(result: dict[str, Any]) -> str:
    """Return a model's scores as Markdown, with the data and how it was decoded."""
    beams, alpha = result["decoding"]["num_beams"], result["decoding"]["alpha"]
    how = "greedily" if beams == 1 else f"with {beams} beams and the paper's length penalty of alpha {alpha}"
    parts = [f"On {data_of(result)} ({result['lines']:,} lines), decoded {how}:", score_table(result["scores"])]
    return "\n\n".join([*parts, signature_line(result["scores"])]).rstrip()
