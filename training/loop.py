"""The training loop: updates, and between them logging, evaluation and checkpoints.

What happens at an update is a function of the arguments, the seed and `Progress` alone. The order of the data follows
from (seed, epoch), and PyTorch's generators (dropout) are seeded anew from (seed, update, rank) at every update. So a
run that continues from a checkpoint, wherever it was interrupted, is the run that was not.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedType
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.arguments import RecipeArguments
from training.batching import Batch, CachedBatches, Position
from training.bpe_dropout import SegmentedBatches
from training.checkpoint import (
    Checkpoint,
    Progress,
    find_checkpoints,
    load_checkpoint,
    rotate_checkpoints,
    save_checkpoint,
    save_model_folder,
)
from training.evaluation import Evaluator, lower_is_better
from training.objective import TrainingDivergedError, accumulate_gradient, clip_gradient, count_targets
from training.ranks import Ranks, StopRequest
from training.run_log import RunLog, write_json
from training.schedule import InverseSquareRootSchedule
from training.streaming import StreamedBatches
from training.weights import TrainedWeights, divide, load_optimizer_state, whole_optimizer_state

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateData:
    """What one update trains on.

    Attributes:
        batches: This rank's micro-batches.
        position: The place in the epoch after them.
        ends_epoch: Whether they are the epoch's last.
    """

    batches: list[Batch]
    position: Position
    ends_epoch: bool


class TrainingLoop:
    """Trains a model by the recipe.

    Args:
        model: The model on the host, not yet prepared.
        tokenizer: Saved with every model; gives the padding.
        batches: The training data.
        recipe: The recipe's arguments.
        accelerator: Places the model and joins the ranks.
        log: The run's files.
        evaluators: Score the model on validation sets by name; the first chooses the best model. None of them trains
            without validation.
        ranks: Agreement of the ranks.
        stop: Asks for an early end.

    Raises:
        ValueError: If the ranks do not find the same checkpoint.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batches: CachedBatches | SegmentedBatches | StreamedBatches,
        *,
        recipe: RecipeArguments,
        accelerator: Accelerator,
        log: RunLog,
        evaluators: dict[str, Evaluator],
        ranks: Ranks,
        stop: StopRequest,
    ) -> None:
        self.recipe = recipe
        self.accelerator = accelerator
        self.log = log
        self.evaluators = evaluators
        self.tokenizer = tokenizer
        self.batches = batches
        self.stop = stop
        self.run = Path(recipe.output_dir)
        self.ranks = ranks
        self.schedule = make_schedule(recipe, model.config.d_model)
        checkpoints = find_checkpoints(self.run)
        checkpoint = load_checkpoint(checkpoints[-1], model) if checkpoints else None
        self.progress = checkpoint.progress if checkpoint is not None else Progress()
        if not self.ranks.agree_on(self.progress.update):
            raise ValueError(f"output_dir ({self.run}) is not one folder for all ranks: they find other checkpoints")
        if checkpoint is not None:
            logger.info("continuing from %s", checkpoints[-1])
        self._prepare(model, checkpoint)
        own_window = self.progress.loss_windows[self.ranks.number :][:1] or [0.0]
        self.loss_window = torch.tensor(own_window[0], device=accelerator.device)
        self.target_window = torch.zeros((), dtype=torch.int64, device=accelerator.device)
        self.time_is_up = self.ranks.any(self._is_time_up())[0]

    def _prepare(self, model: PreTrainedModel, checkpoint: Checkpoint | None) -> None:
        """Make the optimizer, and hand it and the model to Accelerate."""
        recipe, accelerator = self.recipe, self.accelerator
        divides = accelerator.distributed_type == DistributedType.FSDP
        second = copy.deepcopy(model).to(accelerator.device) if divides or recipe.ema_decay else None
        if divides:
            divide(model.to(accelerator.device))
        optimizer = torch.optim.Adam(
            model.parameters(),
            lr=self.schedule(1),
            betas=(recipe.adam_beta1, recipe.adam_beta2),
            eps=recipe.adam_epsilon,
            fused=True,
        )
        # What is divided has no wrapper, and Accelerate's own division knows neither ties nor shared sub-modules.
        self.model, self.optimizer = (model, optimizer) if divides else accelerator.prepare(model, optimizer)
        if checkpoint is not None:
            load_optimizer_state(self.optimizer, checkpoint.optimizer_state)
        if self.progress.scaler is not None and accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(self.progress.scaler)
        self._settle_buckets(model.config.eos_token_id)
        self.weights = TrainedWeights(
            accelerator.unwrap_model(self.model),
            whole=second,
            ema_decay=recipe.ema_decay,
            average=checkpoint.average if checkpoint is not None else None,
        )

    def _settle_buckets(self, token: int) -> None:
        """Let DDP see a backward pass, which decides how it groups the gradients from then on.

        Three ranks or more add up in an order that depends on the grouping: the first update of a session that
        continues would else be rounded otherwise than the same update of a run that was not interrupted.
        """
        if not isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            return
        ids = torch.tensor([[token]], device=self.accelerator.device)
        self.model.train()
        for _ in range(2):  # the second begins with the new grouping
            with self.accelerator.autocast():
                loss = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
            loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def resolved(self) -> dict[str, Any]:
        """Return what the arguments came to: the whole architecture, and the peak of the schedule."""
        return {"model": self.weights.model.config.to_dict(), "peak_learning_rate": self.schedule.peak}

    def stop_reason(self) -> str | None:
        """Return why training is over, or None while it is not."""
        recipe, progress = self.recipe, self.progress
        if recipe.max_updates is not None and progress.update >= recipe.max_updates:
            return f"max_updates ({recipe.max_updates}) reached"
        if recipe.max_epochs is not None and progress.epoch >= recipe.max_epochs:
            return f"max_epochs ({recipe.max_epochs}) reached"
        patience, waited = recipe.early_stopping_patience, progress.evaluations_without_improvement
        if patience and waited >= patience:
            return f"{waited} evaluations without a better {recipe.metric_for_best_model}"
        if self.time_is_up:
            return f"max_minutes ({recipe.max_minutes}) reached"
        return None

    def train(self) -> str | None:
        """Train until `stop_reason` gives one, and return it; the last update is evaluated and saved.

        Returns None if a signal has ended training before, after all was saved that continuing needs.

        Raises:
            OSError: If something cannot be written.
            TrainingDivergedError: If the gradient is not finite in too many updates one after another.
            ValueError: If the data cannot be read to its end.
        """
        self._start = time.perf_counter() - self.progress.seconds
        updates = self._updates()
        with self._progress_bar() as bar:
            # An evaluation that was interrupted comes first.
            interrupted = self.progress.update > 0 and self._evaluate_and_save(continued=True)
            while not interrupted and self.stop_reason() is None:
                started = time.perf_counter()
                self._update(next(updates))
                self.progress.update_seconds += time.perf_counter() - started
                bar.update()
                interrupted = self._after_update(bar)
        if interrupted:
            logger.info("stopped after update %d; the same command continues", self.progress.update)
            return None
        if self.progress.update > 0:
            model = self.weights.as_published()
            for name in ("last",) if self.evaluators else ("last", "best"):
                self._on_main(lambda name=name: save_model_folder(self.run / name, model, self.tokenizer))
        return self.stop_reason()

    def _updates(self) -> Iterator[UpdateData]:
        """Yield the data of one update after another, from where the progress stands, for ever."""
        while True:
            batches = self.batches.iterate(self.progress.epoch, self.progress.position)
            following = list(islice(batches, self.recipe.gradient_accumulation_steps))
            while following:
                chosen, following = following, list(islice(batches, self.recipe.gradient_accumulation_steps))
                yield UpdateData([batch for batch, _ in chosen], chosen[-1][1], ends_epoch=not following)
            if self.progress.position != Position():  # arguments that were changed have left nothing of the epoch
                self.progress.epoch, self.progress.position = self.progress.epoch + 1, Position()

    def _update(self, data: UpdateData) -> None:
        """Make one step of the optimizer."""
        progress, recipe = self.progress, self.recipe
        update = progress.update + 1
        torch.manual_seed(_seed_of_update(recipe.seed, update, self.ranks.number))
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(update)
        num_targets = count_targets(data.batches, self.accelerator)
        self.model.train()
        loss = accumulate_gradient(
            self.model,
            data.batches,
            num_targets,
            accelerator=self.accelerator,
            label_smoothing=recipe.label_smoothing,
        )
        self.accelerator.unscale_gradients(self.optimizer)  # only fp16 scales them
        norm = clip_gradient(list(self.weights.parameters.values()), recipe.max_grad_norm)
        finite = math.isfinite(norm)  # on every rank or on none: the gradient is everyone's
        if finite or self.accelerator.scaler is not None:
            # In fp16 gradients overflow every now and then: the scaler makes no step, and scales less from then on.
            self.optimizer.step()
        if finite:
            self.weights.update_average(update)
            self.loss_window += loss
            self.target_window += num_targets
            progress.window_updates += 1
            progress.skipped_in_a_row = 0
        elif self.accelerator.scaler is None or self.accelerator.scaler.get_scale() <= 1:
            self._skip(update, data.batches, loss, norm)
        self.optimizer.zero_grad(set_to_none=True)
        progress.update, progress.position = update, data.position
        if data.ends_epoch:
            progress.epoch, progress.position = progress.epoch + 1, Position()

    def _skip(self, update: int, batches: list[Batch], loss: torch.Tensor, norm: float) -> None:
        """Report an update that is not made, and end training if there were too many."""
        progress, limit = self.progress, self.recipe.max_skipped_updates
        progress.skipped_in_a_row += 1
        what = f"the loss of rank {self.ranks.number} is {float(loss)}, the gradient's norm {norm}"
        if progress.skipped_in_a_row <= limit:
            logger.warning("update %d is skipped (%d of %d): %s", update, progress.skipped_in_a_row, limit, what)
            return
        file = self.run / f"not-finite-update-{update}-rank-{self.ranks.number}.json"
        rows = [
            {
                "source": self.tokenizer.decode(source[source != self.tokenizer.pad_token_id]),
                "target": self.tokenizer.decode(target[target >= 0]),
                "input_ids": source.tolist(),
                "labels": target.tolist(),
            }
            for batch in batches
            for source, target in zip(batch["input_ids"], batch["labels"], strict=True)
        ]
        write_json(file, {"update": update, "loss": str(float(loss)), "gradient_norm": str(norm), "rows": rows})
        raise TrainingDivergedError(
            f"{limit + 1} updates in a row are not finite, the last is {update}: {what}. Its batch is in {file}; what "
            "was trained before is in the last checkpoint. A lower learning rate or a longer warm-up may help"
        )

    def _after_update(self, bar: tqdm) -> bool:
        """Log, evaluate and save what is due; return whether the run was asked to end early."""
        recipe, progress = self.recipe, self.progress
        progress.seconds = time.perf_counter() - self._start
        stopping, self.time_is_up = self.ranks.any(self.stop(), self._is_time_up())
        if progress.update % recipe.logging_every == 0 or self._is_evaluation_due() or self.stop_reason() is not None:
            self._log_training(bar)
        return self._evaluate_and_save(stopping=stopping)

    def _is_time_up(self) -> bool:
        limit = self.recipe.max_minutes
        return limit is not None and self.accelerator.is_main_process and self.progress.seconds >= 60 * limit

    def _is_evaluation_due(self) -> bool:
        """Return whether the update that was made is one to evaluate, and has not been."""
        recipe, progress = self.recipe, self.progress
        if progress.evaluated_update == progress.update:
            return False
        at_end_of_epoch = progress.position == Position()
        return self.stop_reason() is not None or (
            progress.update % recipe.eval_every == 0 if recipe.eval_every else at_end_of_epoch
        )

    def _evaluate_and_save(self, *, stopping: bool = False, continued: bool = False) -> bool:
        """Evaluate and save what is due after an update; return whether the run was asked to end early.

        Args:
            stopping: Whether it was asked to before the evaluation.
            continued: Whether the update was made, and saved, in an earlier session.
        """
        recipe, update = self.recipe, self.progress.update
        evaluation_due = self._is_evaluation_due()
        if evaluation_due and not stopping:
            stopping = not self._evaluate()
        saving_due = evaluation_due if recipe.save_every is None else update % recipe.save_every == 0
        saving_due |= self.stop_reason() is not None or stopping
        if continued:
            saving_due = evaluation_due
        if saving_due:
            self._save()
        return stopping

    def _log_training(self, bar: tqdm) -> None:
        progress = self.progress
        if not progress.window_updates:
            return
        started = time.perf_counter()
        loss = float(self.accelerator.reduce(self.loss_window, "sum")) / progress.window_updates  # waits for the device
        self._count_targets()
        progress.update_seconds += time.perf_counter() - started
        self.loss_window.zero_()
        progress.window_updates = 0
        tokens_per_second = progress.target_tokens / progress.update_seconds
        values = {
            "epoch": progress.epoch + self.batches.fraction(progress.position),
            "train_loss": loss,
            "learning_rate": self.schedule(progress.update),
            "target_tokens": progress.target_tokens,
            "target_tokens_per_second": round(tokens_per_second, 1),
            "minutes": round(progress.seconds / 60, 2),
        }
        self.ranks.together(lambda: self.log.metrics(progress.update, values))
        minutes = f"{values['minutes']:.1f}" + (f"/{self.recipe.max_minutes:g}" if self.recipe.max_minutes else "")
        bar.set_postfix(loss=f"{loss:.3f}", minutes=minutes, target_tokens_s=f"{tokens_per_second:,.0f}", refresh=False)

    def _count_targets(self) -> None:
        self.progress.target_tokens += int(self.target_window)
        self.target_window.zero_()

    def _evaluate(self) -> bool:
        """Evaluate, and save the model as the best if it is; return False if a signal interrupted it."""
        progress, recipe, metric = self.progress, self.recipe, self.recipe.metric_for_best_model
        model = self.weights.as_published()
        of_sets = {}
        for name, evaluator in self.evaluators.items():
            scores = evaluator.during_training(model, recipe.eval_max_rows, recipe.eval_beams, self.stop)
            if scores is None:
                return False
            of_sets[name] = scores
        progress.evaluated_update = progress.update
        progress.seconds = time.perf_counter() - self._start
        self.time_is_up = self.ranks.any(self._is_time_up())[0]
        if not of_sets:
            return True
        values = {f"{name}_{key}": value for name, scores in of_sets.items() for key, value in scores.items()}
        self.ranks.together(lambda: self.log.metrics(progress.update, values))
        self.ranks.together(self.log.plot)
        scores = next(iter(of_sets.values()))
        sign = -1 if lower_is_better(metric) else 1
        better = math.isfinite(scores[metric]) and (
            progress.best_metric is None or sign * scores[metric] > sign * progress.best_metric
        )
        logger.info(
            "update %d, epoch %d: validation loss %.4f, perplexity %.2f, BLEU %.2f, chrF %.2f, exact match %.2f%s",
            *(progress.update, progress.epoch, scores["loss"], scores["perplexity"]),
            *(scores["bleu"], scores["chrf"], scores["exact_match"], " (best)" if better else ""),
        )
        if not better:
            progress.evaluations_without_improvement += 1
            return True
        progress.best_metric, progress.best_update = scores[metric], progress.update
        progress.evaluations_without_improvement = 0
        self._on_main(lambda: save_model_folder(self.run / "best", model, self.tokenizer))
        return True

    def _save(self) -> None:
        progress = self.progress
        self._count_targets()
        progress.loss_windows = self.ranks.gather(float(self.loss_window))
        progress.scaler = self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None
        model = self.weights.as_trained()
        checkpoint = Checkpoint(progress, whole_optimizer_state(self.optimizer), self.weights.whole_average())

        def write() -> None:
            save_checkpoint(self.run, model, self.tokenizer, checkpoint)
            rotate_checkpoints(self.run, keep=self.recipe.keep_checkpoints, best_update=progress.best_update)

        self._on_main(write)

    def _on_main(self, write: Callable[[], None]) -> None:
        """Write something on the main process, while the others wait; if that fails, fail on all."""
        self.ranks.together(write if self.accelerator.is_main_process else lambda: None)

    def _progress_bar(self) -> tqdm:
        limits = [self.recipe.max_updates]
        of_epoch = self.batches.updates_per_epoch(self.recipe.gradient_accumulation_steps)
        if self.recipe.max_epochs is not None and of_epoch is not None:
            limits.append(self.recipe.max_epochs * of_epoch)
        return tqdm(
            total=min((limit for limit in limits if limit is not None), default=None),
            initial=self.progress.update,
            desc="Training",
            unit="update",
            disable=not self.accelerator.is_main_process,
            dynamic_ncols=True,
        )


def make_schedule(recipe: RecipeArguments, d_model: int) -> InverseSquareRootSchedule:
    """Return the schedule that the recipe asks for: by its peak, or by the paper's formula."""
    if recipe.warmup_steps == 0:
        logger.warning("warmup_steps is 0: a post-LN Transformer rarely trains without warm-up")
    ending = {"cooldown_steps": recipe.cooldown_steps, "max_updates": recipe.max_updates}
    if recipe.learning_rate is None:
        return InverseSquareRootSchedule.from_d_model(d_model, recipe.warmup_steps, **ending)
    return InverseSquareRootSchedule(recipe.learning_rate, recipe.warmup_steps, **ending)


def _seed_of_update(seed: int, update: int, rank: int) -> int:
    return int(np.random.SeedSequence((seed, update, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))
