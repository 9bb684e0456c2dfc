"""Evaluation: loss and perplexity per target token, and BLEU, chrF and exact match of real decoding."""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import datasets
import evaluate
import sacrebleu
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from training.arguments import RecipeArguments
from training.data import PairCollator, TokenBatchSampler, sequence_lengths
from training.objective import IGNORED, Batch
from training.translate import decoding_config, translate_all

logger = logging.getLogger(__name__)


class TranslationMetric(evaluate.Metric):
    """BLEU, chrF (sacreBLEU's, with their signatures) and exact match, each from 0 to 100. Needs no network.

    Args:
        bleu_tokenize: sacreBLEU's tokenizer for BLEU: "13a", or "zh", "ja-mecab", "ko-mecab" for those languages.
    """

    def __init__(self, bleu_tokenize: str = "13a") -> None:
        try:
            self.bleu, self.chrf = sacrebleu.BLEU(tokenize=bleu_tokenize), sacrebleu.CHRF()
        except (KeyError, ImportError, RuntimeError) as error:  # unknown, or without its own dependencies
            raise ValueError(f"bleu_tokenize ({bleu_tokenize!r}): sacreBLEU has no such tokenizer here") from error
        super().__init__(keep_in_memory=True)

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Corpus BLEU, corpus chrF and exact match of translations with one reference each.",
            citation="Post (2018), A Call for Clarity in Reporting BLEU Scores",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float | str]:
        equal = sum(prediction == reference for prediction, reference in zip(predictions, references, strict=True))
        return {
            # Rounding takes a perfect score a little above 100.
            "bleu": min(100.0, self.bleu.corpus_score(predictions, [references]).score),
            "chrf": min(100.0, self.chrf.corpus_score(predictions, [references]).score),
            "exact_match": 100 * equal / len(references),
            "bleu_signature": str(self.bleu.get_signature()),
            "chrf_signature": str(self.chrf.get_signature()),
        }


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
    )
    return DataLoader(tokenized, batch_sampler=sampler, collate_fn=PairCollator(pad_token_id))


@torch.inference_mode()
def evaluate_loss(model: torch.nn.Module, batches: Iterable[Batch], accelerator: Accelerator) -> dict[str, float]:
    """Return `loss` and `perplexity` per target token, without label smoothing, over the batches of all ranks.

    Args:
        model: In evaluation mode.
        batches: This rank's share of the data; a target is in the share of one rank.
        accelerator: Sums over the ranks.
    """
    total = torch.zeros(2, dtype=torch.float64)  # summed loss, targets
    for batch in batches:
        targets = int((batch["labels"] != IGNORED).sum())
        on_device = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
        loss_sum = model(**on_device, num_items_in_batch=1, return_logits=False).loss
        total += torch.tensor([float(loss_sum), targets], dtype=torch.float64)
    loss_sum, targets = accelerator.reduce(total.to(accelerator.device), "sum").tolist()
    loss = loss_sum / targets
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def translate_on_all_ranks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    config: GenerationConfig,
    *,
    accelerator: Accelerator,
    batch_tokens: int,
) -> list[str]:
    """Translate texts, each on one rank, and return all translations in order on every rank."""
    by_length = sorted(range(len(texts)), key=lambda index: (len(texts[index]), index))
    share = by_length[accelerator.process_index :: accelerator.num_processes]  # even in number and in length
    progress = "Decoding" if accelerator.is_main_process else None
    translations = translate_all(
        model, tokenizer, [texts[index] for index in share], config, batch_tokens=batch_tokens, progress=progress
    )
    gathered = gather_object(list(zip(share, translations, strict=True)))
    return [translation for _, translation in sorted(gathered)]


class Evaluator:
    """Scores a model on one split.

    Args:
        split: Raw pairs, columns "source" and "target".
        tokenized: The same rows as token ids, for the loss.
        tokenizer: The model's own.
        recipe: How to evaluate.
        accelerator: Joins the ranks; each works on its share.
    """

    def __init__(
        self,
        split: datasets.Dataset,
        tokenized: datasets.Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        recipe: RecipeArguments,
        accelerator: Accelerator,
    ) -> None:
        self.sources, self.references = list(split["source"]), list(split["target"])
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.accelerator = accelerator
        self.metric = TranslationMetric(recipe.bleu_tokenize)
        self.batches = loss_batches(
            tokenized, tokenizer.pad_token_id, batch_tokens=recipe.batch_tokens, accelerator=accelerator
        )

    def during_training(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the scores that choose the best model: the loss of all rows, the rest of `eval_max_rows` of them."""
        rows = spaced_rows(len(self.sources), self.recipe.eval_max_rows or len(self.sources))
        return self._evaluate(model, rows, num_beams=self.recipe.eval_beams)

    def final(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the scores of all rows, decoded as the model's generation config says, and how many they are."""
        rows = list(range(len(self.sources)))
        return {"lines": len(rows), **self._evaluate(model, rows, num_beams=None)}

    def _evaluate(self, model: PreTrainedModel, rows: list[int], *, num_beams: int | None) -> dict[str, Any]:
        model.eval()
        scores = evaluate_loss(model, self.batches, self.accelerator)
        translations = translate_on_all_ranks(
            model,
            self.tokenizer,
            [self.sources[row] for row in rows],
            decoding_config(model, num_beams=num_beams),
            accelerator=self.accelerator,
            batch_tokens=self.recipe.eval_batch_tokens,
        )
        scores |= self.metric.compute(predictions=translations, references=[self.references[row] for row in rows])
        for index in spaced_rows(len(rows), self.recipe.num_samples):
            row = rows[index]
            logger.info(
                "sample\n  source      %s\n  reference   %s\n  translation %s",
                *(self.sources[row], self.references[row], translations[index]),
            )
        return scores


def spaced_rows(rows: int, wanted: int) -> list[int]:
    """Return `wanted` row numbers spread evenly over `rows`, or all of them if there are fewer."""
    return sorted({index * rows // wanted for index in range(wanted)}) if wanted else []
