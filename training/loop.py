"""The training loop: updates, and between them logging, evaluation and checkpoints.

What happens at an update is a function of the arguments, the seed and `Progress` alone. The order of the data follows
from (seed, epoch), and PyTorch's generators (dropout) are seeded anew from (seed, update, rank) at every update; so a
run that continues from a checkpoint continues exactly.
"""

import logging
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.arguments import RecipeArguments
from training.checkpoint import (
    Progress,
    find_checkpoints,
    load_checkpoint,
    rotate_checkpoints,
    save_checkpoint,
    save_model_folder,
)
from training.data import PairCollator, TokenBatchSampler, sequence_lengths
from training.evaluation import Evaluator
from training.objective import Batch, accumulate_gradient, count_targets
from training.run_log import RunLog
from training.schedule import InverseSquareRootSchedule

logger = logging.getLogger(__name__)


class TrainingLoop:
    """Trains a model by the recipe.

    Args:
        model: The model on the host, not yet prepared.
        tokenizer: Saved with every model; gives the padding.
        dataset: Tokenised training pairs.
        recipe: The recipe's arguments.
        accelerator: Places the model and joins the ranks.
        log: The run's files.
        evaluator: Scores the model on the validation split; None trains without validation.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        dataset: Dataset,
        *,
        recipe: RecipeArguments,
        accelerator: Accelerator,
        log: RunLog,
        evaluator: Evaluator | None,
    ) -> None:
        self.recipe = recipe
        self.accelerator = accelerator
        self.log = log
        self.evaluator = evaluator
        self.tokenizer = tokenizer
        self.dataset = dataset
        self.run = Path(recipe.output_dir)
        self.progress = Progress()
        optimizer_state = None
        checkpoints = find_checkpoints(self.run)
        if checkpoints:
            self.progress, optimizer_state = load_checkpoint(checkpoints[-1], model)
            logger.info("continuing from %s", checkpoints[-1])
        self.schedule = make_schedule(recipe, model.config.d_model)
        self.sampler = TokenBatchSampler(
            *sequence_lengths(dataset),
            batch_tokens=recipe.batch_tokens,
            seed=recipe.seed,
            num_ranks=accelerator.num_processes,
            rank=accelerator.process_index,
        )
        optimizer = torch.optim.Adam(
            model.parameters(),
            lr=self.schedule(1),
            betas=(recipe.adam_beta1, recipe.adam_beta2),
            eps=recipe.adam_epsilon,
            fused=True,
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        if optimizer_state is not None:
            self.optimizer.load_state_dict(optimizer_state)
        self.plain_model = accelerator.unwrap_model(self.model)
        # Of the updates since the last line of the log: losses (this rank's shares) and target tokens (all ranks').
        self.logged_update = self.progress.update
        self.loss_window = torch.zeros((), device=accelerator.device)
        self.target_window = torch.zeros((), dtype=torch.int64, device=accelerator.device)
        self.time_is_up = recipe.max_minutes is not None and self.progress.seconds >= 60 * recipe.max_minutes

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one epoch; the last may have fewer micro-batches than the others."""
        return -(-len(self.sampler) // self.recipe.gradient_accumulation_steps)

    def resolved(self) -> dict[str, Any]:
        """Return what the arguments came to: the whole architecture, and the peak of the schedule."""
        return {"model": self.plain_model.config.to_dict(), "peak_learning_rate": self.schedule.peak}

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

    def train(self) -> str:
        """Train until `stop_reason` gives one, and return it. The last update is evaluated and saved."""
        self._start = time.perf_counter() - self.progress.seconds
        updates = self._updates()
        with self._progress_bar() as bar:
            while (reason := self.stop_reason()) is None:
                started = time.perf_counter()
                self._update(next(updates))
                self.progress.update_seconds += time.perf_counter() - started
                bar.update()
                self._after_update(bar)
        if self.accelerator.is_main_process and self.progress.update > 0:
            save_model_folder(self.run / "last", self.plain_model, self.tokenizer)
            if self.evaluator is None:
                save_model_folder(self.run / "best", self.plain_model, self.tokenizer)
        self.accelerator.wait_for_everyone()
        return reason

    def _updates(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of one update after another, from where the progress stands, for ever."""
        on_tensor_cores = self.accelerator.device.type == "cuda" and self.accelerator.mixed_precision != "no"
        while True:
            self.sampler.set_epoch(self.progress.epoch)
            loader = DataLoader(
                self.dataset,
                batch_sampler=islice(self.sampler, self.progress.batches_in_epoch, None),
                collate_fn=PairCollator(self.tokenizer.pad_token_id, 8 if on_tensor_cores else None),
                num_workers=self.recipe.num_workers,
                pin_memory=self.accelerator.device.type == "cuda",
                generator=torch.Generator(),  # or it would draw from the global one, which dropout uses
            )
            batches = iter(loader)
            while micro_batches := list(islice(batches, self.recipe.gradient_accumulation_steps)):
                yield micro_batches

    def _update(self, batches: list[Batch]) -> None:
        """Make one step of the optimizer."""
        progress, recipe = self.progress, self.recipe
        update = progress.update + 1
        torch.manual_seed(_seed_of_update(recipe.seed, update, self.accelerator.process_index))
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(update)
        num_targets = count_targets(batches, self.accelerator)
        self.model.train()
        self.loss_window += accumulate_gradient(
            self.model,
            batches,
            num_targets,
            accelerator=self.accelerator,
            label_smoothing=recipe.label_smoothing,
        )
        if recipe.max_grad_norm:
            self.accelerator.clip_grad_norm_(self.model.parameters(), recipe.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        progress.update = update
        progress.batches_in_epoch += len(batches)
        if progress.batches_in_epoch == len(self.sampler):
            progress.epoch, progress.batches_in_epoch = progress.epoch + 1, 0
        self.target_window += num_targets

    def _after_update(self, bar: tqdm) -> None:
        """Log, evaluate and save what is due."""
        recipe, update = self.recipe, self.progress.update
        at_logging = update % recipe.logging_every == 0
        if at_logging or self.accelerator.num_processes == 1:
            self._check_time()
        last = self.stop_reason() is not None
        epoch_ended = self.progress.batches_in_epoch == 0
        evaluation_due = last or (update % recipe.eval_every == 0 if recipe.eval_every else epoch_ended)
        saving_due = evaluation_due if recipe.save_every is None else last or update % recipe.save_every == 0
        if at_logging or evaluation_due or saving_due:
            # A checkpoint always begins a new line of the log, so that a continued run logs the same lines.
            self._log_training(bar)
        if evaluation_due and self.evaluator is not None:
            self._evaluate()
            saving_due |= self.stop_reason() is not None
        if saving_due:
            self._save()

    def _check_time(self) -> None:
        """Take the time; the main process decides for all whether it is up."""
        self.progress.seconds = time.perf_counter() - self._start
        if self.recipe.max_minutes is not None:
            up = self.progress.seconds >= 60 * self.recipe.max_minutes
            self.time_is_up = broadcast_object_list([up])[0]

    def _log_training(self, bar: tqdm) -> None:
        updates = self.progress.update - self.logged_update
        if not updates:
            return
        started = time.perf_counter()
        loss = float(self.accelerator.reduce(self.loss_window, "sum")) / updates  # waits for the device
        self.progress.target_tokens += int(self.target_window)
        self.progress.update_seconds += time.perf_counter() - started
        self.loss_window.zero_()
        self.target_window.zero_()
        self.logged_update = self.progress.update
        tokens_per_second = self.progress.target_tokens / self.progress.update_seconds
        values = {
            "epoch": self.progress.epoch + self.progress.batches_in_epoch / len(self.sampler),
            "train_loss": loss,
            "learning_rate": self.schedule(self.progress.update),
            "target_tokens": self.progress.target_tokens,
            "target_tokens_per_second": round(tokens_per_second, 1),
            "minutes": round(self.progress.seconds / 60, 2),
        }
        self.log.metrics(self.progress.update, values)
        minutes = f"{values['minutes']:.1f}" + (f"/{self.recipe.max_minutes:g}" if self.recipe.max_minutes else "")
        bar.set_postfix(loss=f"{loss:.3f}", minutes=minutes, target_tokens_s=f"{tokens_per_second:,.0f}", refresh=False)

    def _evaluate(self) -> None:
        """Evaluate, and save the model as the best if it is."""
        progress, metric = self.progress, self.recipe.metric_for_best_model
        scores = broadcast_object_list([self.evaluator.during_training(self.plain_model)])[0]
        self._check_time()
        self.log.metrics(progress.update, {f"validation_{name}": value for name, value in scores.items()})
        self.log.plot()
        better = progress.best_metric is None or (
            scores[metric] < progress.best_metric if metric == "loss" else scores[metric] > progress.best_metric
        )
        logger.info(
            "update %d, epoch %d: validation loss %.4f, perplexity %.2f, BLEU %.2f, chrF %.2f, exact match %.2f%s",
            *(progress.update, progress.epoch, scores["loss"], scores["perplexity"]),
            *(scores["bleu"], scores["chrf"], scores["exact_match"], " (best)" if better else ""),
        )
        if not better:
            progress.evaluations_without_improvement += 1
            return
        progress.best_metric, progress.best_update = scores[metric], progress.update
        progress.evaluations_without_improvement = 0
        if self.accelerator.is_main_process:
            save_model_folder(self.run / "best", self.plain_model, self.tokenizer)

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            save_checkpoint(
                self.run,
                self.plain_model,
                self.tokenizer,
                optimizer_state=self.optimizer.state_dict(),
                progress=self.progress,
            )
            rotate_checkpoints(self.run, keep=self.recipe.keep_checkpoints, best_update=self.progress.best_update)
        self.accelerator.wait_for_everyone()

    def _progress_bar(self) -> tqdm:
        limits = [self.recipe.max_updates]
        if self.recipe.max_epochs is not None:
            limits.append(self.recipe.max_epochs * self.updates_per_epoch)
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
