"""Evaluation: loss and perplexity per target token, and BLEU, chrF and exact match of real decoding."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import datasets
import evaluate
import sacrebleu
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_vanilla_trm import DecodingOptions, translate_by_length
from training.batching import Batch, PairCollator, TokenBatchSampler
from training.lines import as_line
from training.objective import IGNORED
from training.scoring import bleu_metric
from training.tokenized import sequence_lengths

logger = logging.getLogger(__name__)

ERRORS = ("loss", "perplexity", "ter", "wer", "cer", "character", "charcut")
"""Metrics of which less is better; of all others more is."""


def lower_is_better(name: str) -> bool:
    """Return whether less of a number is better; one of several of a metric is called `metric_key`."""
    return name.split("_", maxsplit=1)[0] in ERRORS


def never() -> bool:
    """Say that nobody asks to stop."""
    return False


class TranslationMetric(evaluate.Metric):
    """BLEU, chrF (sacreBLEU's, with their signatures) and exact match, each from 0 to 100. Needs no network.

    Args:
        bleu_tokenize: sacreBLEU's tokenizer for BLEU: "13a", or "zh", "ja-mecab", "ko-mecab" for those languages.
        others: Metrics of the `evaluate` library, by name or by the path of their script, that score texts. Each
            number that one returns is called like it; where it returns several, `name_key`.

    Raises:
        ValueError: If sacreBLEU has no such tokenizer, or another metric cannot be loaded or does not score texts.
    """

    def __init__(self, bleu_tokenize: str = "13a", others: Sequence[str] = ()) -> None:
        self.bleu = bleu_metric(bleu_tokenize, argument="bleu_tokenize")
        self.chrf = sacrebleu.CHRF()
        super().__init__(keep_in_memory=True)
        self.others = {Path(name).stem: load_metric(name) for name in others}
        if len(self.others) < len(others):
            raise ValueError(f"two of the metrics have one name: {', '.join(others)}")

    def names(self) -> list[str]:
        """Return the names of all numbers, found out on one pair of texts."""
        scores = self.compute(predictions=["two words"], references=["two words"])
        return [name for name, value in scores.items() if not isinstance(value, str)]

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Corpus BLEU, corpus chrF and exact match of translations with one reference each.",
            citation="Post (2018), A Call for Clarity in Reporting BLEU Scores",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float | str]:
        equal = sum(prediction == reference for prediction, reference in zip(predictions, references, strict=True))
        scores: dict[str, float | str] = {}
        for name, metric in self.others.items():
            scores |= numbers_of(name, metric, predictions, references)
        return scores | {
            # Rounding takes a perfect score a little above 100.
            "bleu": min(100.0, self.bleu.corpus_score(predictions, [references]).score),
            "chrf": min(100.0, self.chrf.corpus_score(predictions, [references]).score),
            "exact_match": 100 * equal / len(references),
            "bleu_signature": str(self.bleu.get_signature()),
            "chrf_signature": str(self.chrf.get_signature()),
        }


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Return a metric of the `evaluate` library, by its name or by the path of its script.

    Raises:
        ValueError: If it cannot be loaded.
    """
    try:
        return evaluate.load(name)
    except (ConnectionError, ImportError, OSError, ValueError) as error:
        raise ValueError(f"the metric {name!r} cannot be loaded: {error}") from error


def takes_sources(metric: evaluate.EvaluationModule) -> bool:
    """Return whether a metric looks at the sources too, as learnt ones do."""
    features = metric.features
    return "sources" in (features[0] if isinstance(features, list) else features)


def numbers_of(
    name: str,
    metric: evaluate.EvaluationModule,
    predictions: Sequence[str],
    references: Sequence[str],
    sources: Sequence[str] | None = None,
) -> dict[str, float]:
    """Return the numbers that a metric of the `evaluate` library gives for texts.

    Args:
        name: What its number is called; where there are several, they are called `name_key`.
        metric: From `load_metric`.
        predictions: The texts that are scored.
        references: One for each.
        sources: Passed on to a metric that takes them.

    Raises:
        ValueError: If it cannot score these texts.
    """
    further = {"sources": sources} if sources is not None and takes_sources(metric) else {}
    try:
        result = metric.compute(predictions=predictions, references=references, **further)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"the metric {name!r} cannot score these texts, a reference each: {error}") from error
    of_metric = result if isinstance(result, dict) else {name: result}
    numbers = {key: float(value) for key, value in of_metric.items() if isinstance(value, Real)}
    return {name if len(numbers) == 1 else f"{name}_{key}": value for key, value in numbers.items()}


def loss_batches(
    tokenized: datasets.Dataset, pad_token_id: int, *, batch_tokens: int, accelerator: Accelerator
) -> DataLoader:
    """Return this rank's share of the rows as batches of similar length; each row is in one batch of one rank."""
    sampler = TokenBatchSampler(
        *sequence_lengths(tokenized),
        batch_tokens=batch_tokens,
        seed=0,
        num_ranks=accelerator.num_processes,
        rank=accelerator.process_index,
        shuffle=False,
        budget="eval_batch_tokens",
    )
    return DataLoader(tokenized, batch_sampler=sampler, collate_fn=PairCollator(pad_token_id))


@torch.inference_mode()
def evaluate_loss(
    model: torch.nn.Module, batches: Iterable[Batch], accelerator: Accelerator, stop: Callable[[], bool] = never
) -> dict[str, float] | None:
    """Return `loss` and `perplexity` per target token, without label smoothing, over the batches of all ranks.

    Returns None on every rank if one of them was asked to stop.

    Args:
        model: In evaluation mode.
        batches: This rank's share of the data; a target is in the share of one rank.
        accelerator: Sums over the ranks.
        stop: Asked before each batch.
    """
    total = torch.zeros(3, dtype=torch.float64)  # summed loss, targets, ranks that were asked to stop
    for batch in batches:
        if stop():
            total[2] = 1
            break
        targets = int((batch["labels"] != IGNORED).sum())
        on_device = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
        loss_sum = model(**on_device, num_items_in_batch=1, return_logits=False).loss
        total += torch.tensor([float(loss_sum), targets, 0], dtype=torch.float64)
    loss_sum, targets, stopped = accelerator.reduce(total.to(accelerator.device), "sum").tolist()
    if stopped:
        return None
    loss = loss_sum / targets
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def translate_on_all_ranks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    options: DecodingOptions,
    *,
    accelerator: Accelerator,
    batch_tokens: int,
    stop: Callable[[], bool] = never,
) -> list[str] | None:
    """Translate texts, each on one rank, and return all translations in order on every rank.

    Returns None on every rank if one of them was asked to stop, as `stop` is after each text.
    """
    by_length = sorted(range(len(texts)), key=lambda index: (len(texts[index]), index))
    share = by_length[accelerator.process_index :: accelerator.num_processes]  # even in number and in length
    own = translate_by_length([model], tokenizer, [texts[index] for index in share], options, batch_tokens=batch_tokens)
    bar = tqdm(
        own, total=len(share), desc="Decoding", unit="line", disable=not accelerator.is_main_process, leave=False
    )
    done = []
    for index, translations in bar:
        done.append((share[index], as_line(translations[0].text)))
        if stop():
            break
    gathered = dict(gather_object(done))
    return [gathered[index] for index in range(len(texts))] if len(gathered) == len(texts) else None


class Evaluator:
    """Scores a model on one split.

    Args:
        split: Raw pairs, columns "source" and "target".
        tokenized: The same rows as token ids, for the loss.
        tokenizer: The model's own.
        metric: Scores translations.
        accelerator: Joins the ranks; each works on its share.
        batch_tokens: Tokens in a batch of the loss, padding included.
        eval_batch_tokens: Source tokens times beams in a batch that is decoded.
        num_samples: Translations that are logged at each evaluation.
    """

    def __init__(
        self,
        split: datasets.Dataset,
        tokenized: datasets.Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        metric: TranslationMetric,
        accelerator: Accelerator,
        batch_tokens: int,
        eval_batch_tokens: int,
        num_samples: int,
    ) -> None:
        self.sources, self.references = list(split["source"]), list(split["target"])
        self.tokenizer = tokenizer
        self.accelerator = accelerator
        self.metric = metric
        self.eval_batch_tokens, self.num_samples = eval_batch_tokens, num_samples
        self.batches = loss_batches(
            tokenized, tokenizer.pad_token_id, batch_tokens=batch_tokens, accelerator=accelerator
        )

    def during_training(
        self, model: PreTrainedModel, max_rows: int, num_beams: int, stop: Callable[[], bool] = never
    ) -> dict[str, Any] | None:
        """Return the scores that choose the best model: the loss of all rows, the rest of at most `max_rows` of them.

        With 0 as `max_rows`, of all. Returns None on every rank if `stop` said so on one before all was done.
        """
        rows = spaced_rows(len(self.sources), max_rows or len(self.sources))
        with self.accelerator.autocast():
            return self._evaluate(model, rows, num_beams=num_beams, stop=stop)

    def final(self, model: PreTrainedModel, stop: Callable[[], bool] = never) -> dict[str, Any] | None:
        """Return the scores of all rows, decoded as the model's generation config says, and how many they are.

        Returns None on every rank if `stop` said so on one before all was done.
        """
        rows = list(range(len(self.sources)))
        scores = self._evaluate(model, rows, num_beams=None, stop=stop)
        return None if scores is None else {"lines": len(rows), **scores}

    def _evaluate(
        self, model: PreTrainedModel, rows: list[int], *, num_beams: int | None, stop: Callable[[], bool]
    ) -> dict[str, Any] | None:
        model.eval()
        scores = evaluate_loss(model, self.batches, self.accelerator, stop)
        if scores is None:
            return None
        translations = translate_on_all_ranks(
            model,
            self.tokenizer,
            [self.sources[row] for row in rows],
            model.search_options(num_beams=num_beams),
            accelerator=self.accelerator,
            batch_tokens=self.eval_batch_tokens,
            stop=stop,
        )
        if translations is None:
            return None
        scores |= self.metric.compute(predictions=translations, references=[self.references[row] for row in rows])
        for index in spaced_rows(len(rows), self.num_samples):
            row = rows[index]
            logger.info(
                "sample\n  source      %s\n  reference   %s\n  translation %s",
                *(self.sources[row], self.references[row], translations[index]),
            )
        return scores


def spaced_rows(rows: int, wanted: int) -> list[int]:
    """Return `wanted` row numbers spread evenly over `rows`, or all of them if there are fewer."""
    return sorted({index * rows // wanted for index in range(wanted)}) if wanted else []
