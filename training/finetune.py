"""Fine-tune a model with Hugging Face's Trainer: `python -m training.finetune --model DIR --config FILE.yaml`.

The checkpoint's tokenizer and generation settings stay its own. The same command started again continues from the
newest checkpoint; a finished run is left alone. To train it on, give its `best/` as `--model` with another output_dir.
"""

import copy
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from datasets import DatasetDict
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    EarlyStoppingCallback,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainingArguments,
    TrainerState,
)
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_vanilla_trm import BATCH_TOKENS
from training import publish
from training.arguments import PairArguments, defaults_of, parse_dataclasses
from training.batching import PairCollator
from training.card import datasets_of, languages_of
from training.checkpoint import save_model_folder
from training.data import fingerprint, load_pairs
from training.evaluation import Evaluator, TranslationMetric
from training.launching import check_fsdp, check_processes, cores_of_a_rank, start_logging
from training.loading import load, named_errors
from training.objective import TrainingDivergedError
from training.run_log import RunLog
from training.tokenizer import check_vocabulary, load_tokenizer
from training.train import SCORED, score_splits, tokenize_splits
from training.trainer import FineTuningTrainer, RunRecorder, make_compute_metrics

logger = logging.getLogger("training")

LORA_TARGETS = ["q_proj", "v_proj"]


# Arguments ---------------------------------------------------------------------------------------------------------


@dataclass
class FineTuningArguments:
    """What is fine-tuned, and how it is scored.

    Raises:
        ValueError: If a value is out of range.
    """

    model: str = field(metadata={"help": "Folder or Hub id of a model with tokenizer."})
    dropout: float | None = field(default=None, metadata={"help": "In place of the model's own."})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "transformers' name of an attention kernel: eager, sdpa, ..."}
    )
    from_scratch: bool = field(
        default=False,
        metadata={"help": "Draw new weights, and take no more than sizes and tokenizer from the model: to compare."},
    )
    lora_rank: int = field(
        default=0, metadata={"help": "Rank of LoRA adapters on the q and v projections; 0 trains all weights."}
    )
    lora_alpha: float | None = field(default=None, metadata={"help": "LoRA's scale; else twice its rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})
    early_stopping_patience: int = field(
        default=0, metadata={"help": "Stop after so many evaluations without a better metric; 0 is off."}
    )
    bleu_tokenize: str = field(default="13a", metadata={"help": "sacreBLEU's tokenizer: 13a, zh, ja-mecab, ..."})
    eval_batch_tokens: int = field(
        default=BATCH_TOKENS,
        metadata={"help": "Tokens, times beams, in a batch of an evaluation's loss and of the last decoding."},
    )
    num_samples: int = field(default=3, metadata={"help": "Sample translations printed at the end."})

    def __post_init__(self) -> None:
        for name in ("lora_rank", "early_stopping_patience", "num_samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must not be negative")
        if self.eval_batch_tokens < 1:
            raise ValueError(f"eval_batch_tokens ({self.eval_batch_tokens}) must be at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout ({self.lora_dropout}) must be at least 0 and below 1")
        if self.lora_rank and self.from_scratch:
            raise ValueError(f"lora_rank ({self.lora_rank}) and from_scratch: adapters of random weights learn nothing")
        if self.lora_rank and self.lora_alpha is None:
            self.lora_alpha = 2.0 * self.lora_rank


@dataclass
class CardArguments:
    """What the card of a pushed model says and a run cannot know, as flags of `training.publish` too.

    Raises:
        ValueError: If the languages are not two.
    """

    license: str | None = field(default=None, metadata={"help": "Licence of the weights, as the Hub names it."})
    language: str | None = field(
        default=None, metadata={"help": "Codes of source and target, 'en de', where the data does not tell them."}
    )
    datasets: str | None = field(
        default=None, metadata={"help": "Hub ids or names of the data, a space between, where it does not tell them."}
    )

    def __post_init__(self) -> None:
        if self.language is not None and len(self.language.split()) != 2:
            raise ValueError(f"language ({self.language!r}) must be two codes, source and target, a space between")

    def check(self, arguments: dict[str, Any]) -> None:
        """Refuse before training what would keep the card from being filled after it.

        (Outside of a clone, the commit is missing too: publish such a run with `training.publish --commit`.)

        Args:
            arguments: Those of the run, by name.

        Raises:
            ValueError: If something is neither given nor told by the data's arguments.
        """
        kinds = (
            "embedded_corpus",
            "dataset_name",
            *(f"{split}_{kind}" for split in SCORED for kind in ("file", "source")),
        )
        if not any(arguments[kind] for kind in kinds):
            raise ValueError("push_to_hub needs validation or test data: the card shows scores")
        if not arguments["num_samples"]:
            raise ValueError("push_to_hub needs num_samples above 0: the card shows an example")
        told = {
            "license": self.license,
            "language": self.language or languages_of(arguments),
            "datasets": self.datasets or datasets_of(arguments),
        }
        missing = [name for name, value in told.items() if not value]
        if missing:
            raise ValueError(f"push_to_hub needs {', '.join(missing)} for the model's card")

    def flags(self) -> list[str]:
        """Return the flags of `training.publish`."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        many = ("language", "datasets")
        words = {name: value.split() if name in many else [value] for name, value in given.items()}
        return [word for name in words for word in (f"--{name}", *words[name])]


@dataclass
class TrainerArguments(Seq2SeqTrainingArguments):
    """transformers' own arguments, with other defaults where sequence-to-sequence models want them.

    Raises:
        ValueError: If an argument would undo what this program promises.
    """

    learning_rate: float = field(default=2e-4, metadata={"help": "Peak of the schedule."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Updates of warm-up; below 1, a share of all updates."})
    adam_beta2: float = field(default=0.98, metadata={"help": "The paper's."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "The paper's."})
    label_smoothing_factor: float = field(default=0.1, metadata={"help": "Mass spread over the whole vocabulary."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Pairs of a process and micro-batch."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Pairs of a process decoded at once."})
    train_sampling_strategy: str = field(
        default="group_by_length",
        metadata={
            "help": "Order of the pairs; either is the same again when a run is continued.",
            "choices": ["group_by_length", "random"],
        },
    )
    predict_with_generate: bool = field(default=True, metadata={"help": "Score translations, not the loss alone."})
    eval_strategy: str = field(default="epoch", metadata={"help": "Evaluate each epoch, or every eval_steps (steps)."})
    save_strategy: str = field(default="epoch", metadata={"help": "As eval_strategy, for checkpoints."})
    load_best_model_at_end: bool = field(default=True, metadata={"help": "Keep the checkpoint of the best model."})
    metric_for_best_model: str | None = field(
        default="bleu", metadata={"help": "bleu, chrf, exact_match or loss: what chooses the best model."}
    )
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept: the best and the newest."})
    restore_callback_states_from_checkpoint: bool = field(
        default=True, metadata={"help": "A continued run knows how long early stopping has waited."}
    )
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Must stay so: a NaN is an error."})
    logging_steps: float = field(default=50, metadata={"help": "Updates between lines of the log."})
    use_cache: bool = field(default=True, metadata={"help": "Saved with the model, which decodes faster with it."})
    hub_model_id: str | None = field(default=None, metadata={"help": "USER/NAME; push_to_hub needs it."})
    hub_strategy: str = field(
        default="end", metadata={"help": "push_to_hub publishes the best model at the end.", "choices": ["end"]}
    )

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise ValueError("output_dir is needed: the folder of everything that the run writes")
        if not torch.accelerator.is_available():
            self.use_cpu = True  # or the ranks of a launcher would ignore each other
        for name in ("fsdp", "deepspeed", "parallelism_config"):
            if getattr(self, name):
                raise ValueError(f"{name} cannot be given: here every process has the whole model")
        if self.greater_is_better is not None:
            raise ValueError("greater_is_better cannot be given: it follows from metric_for_best_model")
        if self.eval_strategy == "no":
            self.load_best_model_at_end, self.metric_for_best_model = False, None
        super().__post_init__()
        self._check_values()
        self._check_schedule_of_evaluations()
        for name, (value, reason) in REFUSED.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name} cannot be given: {reason}")

    def _check_values(self) -> None:
        metrics = ["bleu", "chrf", "exact_match", "loss"] if self.predict_with_generate else ["loss"]
        if self.metric_for_best_model not in (None, *metrics):
            raise ValueError(
                f"metric_for_best_model ({self.metric_for_best_model}) must be one of {', '.join(metrics)}"
                f"{'' if self.predict_with_generate else ', for nothing is decoded'}"
            )
        if not 0 <= self.label_smoothing_factor < 1:
            raise ValueError(f"label_smoothing_factor ({self.label_smoothing_factor}) must be at least 0 and below 1")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate ({self.learning_rate}) must be positive")
        if self.max_steps <= 0 and self.num_train_epochs <= 0:
            raise ValueError(f"num_train_epochs ({self.num_train_epochs}) must be positive, or max_steps given")
        if self.push_to_hub and "/" not in (self.hub_model_id or ""):
            raise ValueError(f"push_to_hub needs hub_model_id in the form USER/NAME; it is {self.hub_model_id}")

    def _check_schedule_of_evaluations(self) -> None:
        """The best model is a checkpoint: there must be one of every evaluation that may turn out the best."""
        if self.save_strategy == SaveStrategy.NO:
            raise ValueError("save_strategy (no): neither could the run be continued nor would its model be kept")
        if self.eval_strategy == IntervalStrategy.NO or self.save_strategy == SaveStrategy.BEST:
            return
        if not self.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end (False): the best model is kept; to keep the last, eval_strategy no"
            )
        evaluated, saved = (str(self.eval_strategy.value), self.eval_steps), (self.save_strategy.value, self.save_steps)
        if evaluated[0] != saved[0] or (saved[0] == "steps" and evaluated != saved):
            raise ValueError(
                f"save_strategy ({saved[0]}) and save_steps ({saved[1]}) must equal eval_strategy ({evaluated[0]}) and "
                f"eval_steps ({evaluated[1]}), or save_strategy be best: the best model is a checkpoint"
            )


REFUSED: dict[str, tuple[Any, str]] = {
    "hub_token": (None, "set HF_TOKEN or use `hf auth login`: commands are recorded"),
    "generation_config": (None, "edit the model's own generation_config.json"),
    "generation_max_length": (None, "max_length_a and max_length_b in generation_config.json cap translations"),
    "resume_from_checkpoint": (None, "the same command continues by itself, from the newest checkpoint"),
    "save_only_model": (False, "the run could not be continued exactly"),
    "ignore_data_skip": (False, "the run could not be continued exactly"),
    "restore_callback_states_from_checkpoint": (True, "the run could not be continued exactly"),
    "auto_find_batch_size": (False, "the run would not be the one that its arguments describe"),
    "average_tokens_across_devices": (True, "a token would count more on one process than on another"),
    "dataloader_drop_last": (False, "rows would be left out of training, and out of the evaluations"),
    "prediction_loss_only": (False, "give predict_with_generate no"),
    "eval_do_concat_batches": (True, "scores are of the whole split"),
    "logging_nan_inf_filter": (False, "a loss that is not a number would be logged as one"),
}
"""Arguments of transformers that would undo what this program promises: the value that each must keep, and why."""


# The run -----------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Fine-tune as the arguments say; return the exit code."""
    kinds = (FineTuningArguments, PairArguments, CardArguments, TrainerArguments)
    options, data_arguments, card, training = parse_dataclasses(
        kinds, arguments, description="Fine-tune a model with Hugging Face's Trainer."
    )
    state = PartialState()
    start_logging(state)
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(Path(training.output_dir) / "tensorboard")  # where `train` has it
    log = RunLog(Path(training.output_dir), state)
    all_arguments = recorded_arguments(options, data_arguments, training)
    try:
        check_processes(training.world_size)
        check_devices(training)
        if training.device.type == "cpu":
            torch.set_num_threads(cores_of_a_rank())
        if not log.run_file.exists() and (others := checkpoints_of(log.run)):
            raise ValueError(
                f"{others[0]} is not of a run of this program, for there is no run.json: use another output_dir"
            )
        log.run.mkdir(parents=True, exist_ok=True)
        log.claim()  # until the process ends
        checkpoint = newest_checkpoint(log.run)
        if checkpoint is not None or log.results_file.exists() or (log.run / "checkpoints").exists():
            log.check(all_arguments, defaults=defaults_of(*kinds), allow_changes=None)
        if training.push_to_hub:
            card.check(all_arguments)
            publish.check_access(publish.parse_arguments(publish_flags(training, card, log.run)))
        if log.results_file.exists():
            logger.info("%s is finished: nothing to train", log.run)
            return push(training, card, log.run)
        trainer, evaluators, inputs = prepare(options, data_arguments, training)
        check_fsdp(trainer.accelerator)
        log.accelerator = trainer.accelerator
        if checkpoint is not None:
            log.check_inputs(inputs)
    except (OSError, ValueError) as error:  # what the user gave; nothing has been trained yet
        if state.is_main_process:
            print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        minutes = train(trainer, log, all_arguments, checkpoint, {**resolved_of(trainer, options), "inputs": inputs})
    except TrainingDivergedError as error:
        print(f"error: the loss is no longer a number ({error}): try a lower learning_rate", file=sys.stderr)
        return 1
    results = score_best(trainer, log.run, evaluators, options)
    log.results({**results, "minutes": round(minutes, 2)})
    logger.info("fine-tuning stopped: %s. The results are in %s", results["stopped"], log.results_file)
    return push(training, card, log.run)


def recorded_arguments(options: FineTuningArguments, data: PairArguments, training: TrainerArguments) -> dict[str, Any]:
    """Return all arguments as they stand in run.json; where the model is pushed, and how it is shown, may change."""
    shown = ("hub_", "push_to_hub", "disable_tqdm", "log_level", "run_name")
    everything = {**vars(options), **vars(data), **training.to_dict()}
    kept = {name: value for name, value in everything.items() if not name.startswith(shown)}
    return json.loads(json.dumps(kept, default=str))


def check_devices(training: TrainerArguments) -> None:
    """Make sure that each process trains on one device.

    Raises:
        ValueError: If one would train on several.
    """
    if training.n_gpu > 1:
        raise ValueError(
            f"one process sees {training.n_gpu} GPUs: start one for each, `accelerate launch --num_processes "
            f"{training.n_gpu} -m training.finetune`, or show it one by CUDA_VISIBLE_DEVICES"
        )


def push(training: TrainerArguments, card: CardArguments, run: Path) -> int:
    """Publish a finished run if that is asked for; return the exit code. The same command tries again."""
    if not training.push_to_hub or not PartialState().is_main_process:
        return 0
    return publish.main(publish_flags(training, card, run))


def publish_flags(training: TrainerArguments, card: CardArguments, run: Path) -> list[str]:
    """Return the flags with which `training.publish` publishes this run."""
    flags = ["--model", str(run), "--repo", str(training.hub_model_id), *card.flags()]
    flags += ["--private"] if training.hub_private_repo else []
    return [*flags, *(["--revision", training.hub_revision] if training.hub_revision else [])]


def prepare(
    options: FineTuningArguments, data_arguments: PairArguments, training: TrainerArguments
) -> tuple[FineTuningTrainer, dict[str, Evaluator], dict[str, str]]:
    """Read the data and the model, and build all that fine-tuning needs; also return digests of both.

    Raises:
        OSError: If a file cannot be read or the run's folder cannot be written.
        ValueError: If the data, the model, or the combination of arguments breaks a rule.
    """
    Path(training.output_dir).mkdir(parents=True, exist_ok=True)
    metric = TranslationMetric(options.bleu_tokenize)
    splits = load_pairs(data_arguments)
    check_validation(splits, options, training)
    tokenizer = load_tokenizer(options.model)
    model = load_model(options, training.seed)
    check_vocabulary(model, tokenizer)
    inputs = {f"{name} data": digest for name, digest in fingerprint(splits).items()}
    inputs["model"] = parameters_digest(model)
    tokenized = tokenize_splits(splits, tokenizer, data_arguments, PartialState(), cut_evaluation=False)
    if options.lora_rank:
        model = add_lora(model, options)
    patience = options.early_stopping_patience
    arguments = copy.copy(training)
    arguments.push_to_hub = False  # the Trainer would make the repository now, and write a card of its own
    trainer = FineTuningTrainer(
        model=model,
        args=arguments,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized.get("validation"),
        data_collator=PairCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
        compute_metrics=make_compute_metrics(tokenizer, metric) if training.predict_with_generate else None,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=patience)] if patience else None,
        eval_batch_tokens=options.eval_batch_tokens,
    )
    evaluators = {
        split: Evaluator(
            splits[split],
            tokenized[split],
            tokenizer,
            metric=metric,
            accelerator=trainer.accelerator,
            batch_tokens=options.eval_batch_tokens,
            eval_batch_tokens=options.eval_batch_tokens,
            num_samples=options.num_samples,
        )
        for split in SCORED
        if split in splits
    }
    return trainer, evaluators, inputs


def parameters_digest(model: PreTrainedModel) -> str:
    """Return a digest of a model's parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


def check_validation(splits: DatasetDict, options: FineTuningArguments, training: TrainerArguments) -> None:
    """Without a validation split, choose no best model; refuse a patience that would never end; warn of no warm-up."""
    if options.early_stopping_patience and ("validation" not in splits or training.eval_strategy == "no"):
        raise ValueError(f"early_stopping_patience ({options.early_stopping_patience}) needs validation: there is none")
    if "validation" not in splits and training.eval_strategy != IntervalStrategy.NO:
        logger.warning("there is no validation split: the best model will be the last")
        training.eval_strategy = IntervalStrategy.NO
        training.load_best_model_at_end, training.metric_for_best_model = False, None
    if training.warmup_steps == 0:
        logger.warning("warmup_steps is 0: a post-LN Transformer rarely trains without warm-up")


def load_model(options: FineTuningArguments, seed: int) -> PreTrainedModel:
    """Load the model in fp32, or draw new weights for its sizes.

    Raises:
        OSError: If there is no such model.
        ValueError: If it is another kind of model.
    """
    changes = {name: getattr(options, name) for name in ("dropout", "attn_implementation")}
    changes = {name: value for name, value in changes.items() if value is not None}
    with named_errors(options.model):
        if (Path(options.model) / "adapter_config.json").exists():
            raise ValueError(f"{options.model} holds adapters, not a model: give the merged one, best/ of its run")
        config = AutoConfig.from_pretrained(options.model)
        if config.model_type != "vanilla_trm" or not config.is_encoder_decoder:
            raise ValueError(
                f"the model in {options.model!r} is a {config.model_type}; only translation models of type vanilla_trm "
                "can be fine-tuned here"
            )
        transformers.set_seed(seed)  # adapters and new weights are drawn
        if not options.from_scratch:
            return AutoModelForSeq2SeqLM.from_pretrained(options.model, dtype=torch.float32, **changes)
        config = AutoConfig.from_pretrained(options.model, **changes)
        generation_config = GenerationConfig.from_pretrained(options.model)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    model.generation_config = generation_config
    return model


def add_lora(model: PreTrainedModel, options: FineTuningArguments) -> Any:
    """Return the model with adapters on its query and value projections, and everything else frozen."""
    try:
        from peft import LoraConfig, TaskType, get_peft_model
    except ImportError as error:
        raise ValueError(f"lora_rank ({options.lora_rank}) needs the package peft: pip install peft") from error
    config = LoraConfig(
        task_type=TaskType.SEQ_2_SEQ_LM,
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=LORA_TARGETS,
    )
    return get_peft_model(model, config)


def newest_checkpoint(run: Path) -> Path | None:
    """Return the newest complete checkpoint of a run; the Trainer writes its state last."""
    for folder in reversed(checkpoints_of(run)):
        try:
            json.loads((folder / "trainer_state.json").read_text("utf-8"))
            return folder
        except (FileNotFoundError, ValueError):
            logger.warning("%s is not complete: looking for one before it", folder)
    return None


def checkpoints_of(run: Path) -> list[Path]:
    """Return the folders of all checkpoints, complete or not, the oldest first."""
    folders = [path for path in run.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(folders, key=update_of)


def update_of(checkpoint: Path) -> int:
    """Return the update after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def resolved_of(trainer: FineTuningTrainer, options: FineTuningArguments) -> dict[str, Any]:
    """Return what the arguments came to."""
    return {
        "model": trainer.model.config.to_dict(),
        "peak_learning_rate": trainer.args.learning_rate,
        "base_model": None if Path(options.model).is_dir() else options.model,
    }


def train(
    trainer: FineTuningTrainer,
    log: RunLog,
    arguments: dict[str, Any],
    checkpoint: Path | None,
    resolved: dict[str, Any],
) -> float:
    """Train, from the checkpoint if there is one, and return the minutes it took over all sessions.

    Raises:
        TrainingDivergedError: If a loss is no longer a finite number.
    """
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")) if checkpoint else None
    if trainer.accelerator.is_main_process:
        for folder in checkpoints_of(log.run):  # half-written ones would be taken for the run's
            if checkpoint is None or update_of(folder) > update_of(checkpoint):
                shutil.rmtree(folder)
    trainer.accelerator.wait_for_everyone()
    log.begin(arguments, update=state.global_step if state else 0, resolved=resolved)
    recorder = RunRecorder(log, trainer)
    if state is not None and state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"]:
        trainer.state = state  # it was written at the very end: the Trainer would make one more update from there
        return recorder.minutes
    trainer.args.eval_on_start = trainer.args.eval_on_start and checkpoint is None
    trainer.add_callback(recorder)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return recorder.minutes


def score_best(
    trainer: FineTuningTrainer, run: Path, evaluators: dict[str, Evaluator], options: FineTuningArguments
) -> dict[str, Any]:
    """Save the best model, evaluate it on whole splits as a user would load it, and return the results."""
    state, accelerator = trainer.state, trainer.accelerator
    trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    if accelerator.is_main_process:
        write_best(run, options, state.best_model_checkpoint, trainer.processing_class, trainer.args.seed)
    accelerator.wait_for_everyone()
    model, tokenizer = load(str(run / "best"), str(accelerator.device))
    results: dict[str, Any] = {
        "stopped": stop_reason(trainer, options),
        "parameters": model.num_parameters(),
        "trained_parameters": trained,
        "updates": state.global_step,
        "epochs": int(state.epoch),
        "target_tokens": int(trainer.target_tokens),
        "best": {"update": state.best_global_step, trainer.args.metric_for_best_model or "loss": state.best_metric},
    }
    return results | score_splits(run, evaluators, model, tokenizer)


def write_best(
    run: Path,
    options: FineTuningArguments,
    checkpoint: str | None,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> None:
    """Write `best/`, and `adapter/` where one was trained, from a checkpoint; without one, from the newest."""
    # By its name: the run's folder may have been moved since.
    folder = run / Path(checkpoint).name if checkpoint else newest_checkpoint(run)
    if options.lora_rank:
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(load_model(options, seed), folder)
        save_model_folder(run / "adapter", adapted, tokenizer)
        (run / "adapter" / "README.md").unlink(missing_ok=True)  # PEFT's card, without a word about this model
        model = adapted.merge_and_unload()
    else:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    save_model_folder(run / "best", model, tokenizer)


def stop_reason(trainer: FineTuningTrainer, options: FineTuningArguments) -> str:
    """Return why training is over, in the words of `training.train`."""
    args, state = trainer.args, trainer.state
    if state.global_step < state.max_steps:
        return f"{options.early_stopping_patience} evaluations without a better {args.metric_for_best_model}"
    name = "max_steps" if args.max_steps > 0 else "num_train_epochs"
    return f"{name} ({getattr(args, name)}) reached"


if __name__ == "__main__":
    sys.exit(main())
