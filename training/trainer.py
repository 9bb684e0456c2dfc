"""Hugging Face's Trainer, with this project's loss, order of data, decoding and log."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import Sampler, SequentialSampler
from transformers import (
    EvalPrediction,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    TrainerCallback,
)
from transformers.trainer_pt_utils import get_length_grouped_indices

from hf_vanilla_trm import BATCH_TOKENS
from training.evaluation import TranslationMetric, evaluate_loss, loss_batches
from training.lines import as_line
from training.objective import IGNORED, TrainingDivergedError
from training.run_log import RunLog
from training.tokenized import sequence_lengths


class FineTuningTrainer(Seq2SeqTrainer):
    """Hugging Face's Trainer with this project's loss, order of data and decoding.

    - The model smooths the labels inside its forward, which never holds all logits; `num_items_in_batch` makes
      accumulated micro-batches exactly one update of the big batch.
    - The order of an epoch follows from (seed, epoch) alone, so that a continued run sees the same batches.
    - Evaluation decodes as `training.translate` does, keeps the rows in order, counts none twice, and its loss is per
      target token.

    Of several processes, accelerate has each make equally many batches: the last update of an epoch repeats some rows
    from its beginning where they do not come out even.

    Args:
        *arguments: Those of `Seq2SeqTrainer`.
        eval_batch_tokens: Tokens in a batch of the evaluation's loss.
        **options: Those of `Seq2SeqTrainer`.
    """

    def __init__(self, *arguments: Any, eval_batch_tokens: int = BATCH_TOKENS, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.label_smoother = None  # it would need all logits, outside of the model
        self.eval_batch_tokens = eval_batch_tokens
        self.target_tokens = 0

    def get_batch_samples(self, *arguments: Any, **options: Any) -> tuple[list[Any], torch.Tensor | int | None]:
        """Return the micro-batches of an update and its target tokens, over all ranks; count these."""
        batches, targets = super().get_batch_samples(*arguments, **options)
        self.target_tokens += 0 if targets is None else targets
        return batches, targets

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], *arguments: Any, **options: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return the loss of a micro-batch as its share of the update's; labels are smoothed in training alone."""
        if model.training:
            inputs = {**inputs, "label_smoothing": self.args.label_smoothing_factor}
        return super().compute_loss(model, inputs, *arguments, **options)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[int]:
        args = self.args
        rows = self.train_dataset if train_dataset is None else train_dataset
        return SeededSampler(
            sum(sequence_lengths(rows)),
            group_size=args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            by_length=args.train_sampling_strategy == "group_by_length",
            seed=args.seed if args.data_seed is None else args.data_seed,
            epoch=lambda: int(self.state.epoch or 0),
        )

    def _get_eval_sampler(self, eval_dataset: Dataset) -> Sampler[int]:
        return SequentialSampler(eval_dataset)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Leave out tied weights, which every checkpoint holds under one name alone."""
        tied = getattr(self.accelerator.unwrap_model(self.model), "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Decode a batch as the model's generation config says, each sentence under a cap of its own.

        Seq2SeqTrainer's own step has one cap for all, and leaves its defaults in the model's generation config.

        Args:
            model: In evaluation mode.
            inputs: A batch.
            prediction_loss_only: As Seq2SeqTrainer's.
            ignore_keys: Likewise.
            **options: `num_beams` and `max_length`, which `predict` and `evaluate` take.

        Raises:
            ValueError: Another option is given.

        Returns:
            No loss (see `evaluation_loop`), token ids `(batch, longest)`, and the labels `(batch, target_length)`.
        """
        if not self.args.predict_with_generate or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        chosen = {"num_beams": self.args.generation_num_beams, **getattr(self, "_gen_kwargs", {}), **options}
        # Hugging Face's max_length counts the start token.
        length = chosen.pop("max_length", None)
        if unknown := chosen.keys() - {"num_beams"}:
            raise ValueError(f"{', '.join(sorted(unknown))}: evaluation takes num_beams and max_length alone")
        cap = None if length is None else max(1, length - 1)
        search = asdict(self.model.search_options(max_length=cap, **chosen))
        found = self.model.search(inputs["input_ids"], inputs["attention_mask"], **search)
        texts = self.processing_class.batch_decode(inputs["input_ids"], skip_special_tokens=True)
        # A blank line stays blank.
        rows = [one[0].tokens if text.strip() else [] for one, text in zip(found, texts, strict=True)]
        width, pad = max(1, *map(len, rows)), self.processing_class.pad_token_id
        padded = [[*row, *[pad] * (width - len(row))] for row in rows]
        return None, torch.tensor(padded, dtype=torch.int64, device=inputs["labels"].device), inputs["labels"]

    def evaluation_loop(self, dataloader: Any, *arguments: Any, metric_key_prefix: str = "eval", **options: Any) -> Any:
        """Evaluate; the loss is the sum over all target tokens divided once, not a mean of means of batches."""
        self.gather_function = self.accelerator.gather_for_metrics  # Seq2SeqTrainer's keeps what fills the last batch
        output = super().evaluation_loop(dataloader, *arguments, metric_key_prefix=metric_key_prefix, **options)
        batches = loss_batches(
            dataloader.dataset,
            self.processing_class.pad_token_id,
            batch_tokens=self.eval_batch_tokens,
            accelerator=self.accelerator,
        )
        output.metrics[f"{metric_key_prefix}_loss"] = evaluate_loss(self.model, batches, self.accelerator)["loss"]
        return output


class SeededSampler(Sampler[int]):
    """All rows in an order that follows from (seed, epoch), whatever was drawn before.

    Args:
        lengths: Tokens of each row.
        group_size: Rows of one update, over micro-batches and ranks: these are alike in length.
        by_length: Whether to group by length.
        seed: Seed of the order.
        epoch: Returns the current epoch. It is asked, not told: accelerate's wrappers do not pass `set_epoch` on to
            every sampler of a continued run.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        *,
        group_size: int,
        by_length: bool,
        seed: int,
        epoch: Callable[[], int],
    ) -> None:
        self.lengths = [int(length) for length in lengths]
        self.group_size = group_size
        self.by_length = by_length
        self.seed = seed
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Any:
        state = np.random.SeedSequence((self.seed, self.epoch())).generate_state(1)
        generator = torch.Generator().manual_seed(int(state[0]))
        if self.by_length:
            return iter(get_length_grouped_indices(self.lengths, self.group_size, generator=generator))
        return iter(torch.randperm(len(self.lengths), generator=generator).tolist())


def make_compute_metrics(
    tokenizer: PreTrainedTokenizerBase, metric: TranslationMetric
) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a Trainer's `compute_metrics`: BLEU, chrF and exact match of decoded predictions and labels.

    Both come filled up with -100, where rows of different lengths meet; no tokenizer decodes it.
    """

    def decode(ids: np.ndarray) -> list[str]:
        ids = np.where(ids == IGNORED, tokenizer.pad_token_id, ids)
        return [as_line(text) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        translations, references = decode(prediction.predictions), decode(prediction.label_ids)
        scores = metric.compute(predictions=translations, references=references)
        return {name: value for name, value in scores.items() if isinstance(value, float)}

    return compute_metrics


class RunRecorder(TrainerCallback):
    """Writes what the Trainer logs to metrics.jsonl and curves.png, under the names that `training.train` uses.

    Args:
        log: The run's files, without what was logged after the checkpoint that the run continues from.
        trainer: Counts target tokens.
    """

    def __init__(self, log: RunLog, trainer: FineTuningTrainer) -> None:
        self.log = log
        self.trainer = trainer
        earlier = log.read_metrics()[-1:]
        self.earlier_minutes = earlier[0]["minutes"] if earlier else 0.0
        trainer.target_tokens = earlier[0]["target_tokens"] if earlier else 0
        self.started = time.perf_counter()

    @property
    def minutes(self) -> float:
        """Minutes of training, evaluations included, over all sessions."""
        return self.earlier_minutes + (time.perf_counter() - self.started) / 60

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Begin a new line of the log at every checkpoint, so that a continued run logs the same lines."""
        control.should_log |= control.should_evaluate or control.should_save

    def on_epoch_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """As `on_step_end`."""
        control.should_log |= control.should_evaluate or control.should_save

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **options: Any) -> None:
        """Write one line.

        Raises:
            TrainingDivergedError: If a value is not a finite number.
        """
        names = {"loss": "train_loss", "learning_rate": "learning_rate"}
        names |= {f"eval_{name}": f"validation_{name}" for name in ("loss", "bleu", "chrf", "exact_match")}
        values = {name: logs[key] for key, name in names.items() if key in logs}
        if not all(math.isfinite(value) for value in values.values()):
            raise TrainingDivergedError(f"update {state.global_step}: {values}")
        if values:  # the Trainer's last line, of times, has none of them
            so_far = {"target_tokens": int(self.trainer.target_tokens), "minutes": round(self.minutes, 2)}
            self.log.metrics(state.global_step, {"epoch": state.epoch, **values, **so_far})
        if "eval_loss" in logs:
            self.log.plot()
