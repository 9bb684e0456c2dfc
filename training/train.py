"""Train a model from scratch: `accelerate launch -m training.train --config FILE.yaml [--flag value ...]`.

The same command started again continues from the newest checkpoint; a finished run is left alone.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from accelerate import Accelerator, DistributedType
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset, DatasetDict
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration
from training.arguments import DataArguments, ModelArguments, PairArguments, RecipeArguments, parse_arguments
from training.checkpoint import find_checkpoints
from training.data import load_pairs, tokenize_pairs
from training.evaluation import Evaluator, spaced_rows
from training.lines import as_line
from training.loop import TrainingLoop
from training.memory import peak_memory, reset_peak_memory
from training.run_log import RunLog
from training.tokenizer import load_tokenizer, train_tokenizer
from training.translate import decoding_config, load, translate_all

logger = logging.getLogger("training")

SCORED = ("test", "validation")
"""Splits that are scored; what shows one of them shows the first that there is."""
LAUNCHERS = ("accelerate", "accelerate_cli.py", "accelerate.commands.accelerate_cli")
"""What a command line of `accelerate launch` begins with, Python and its flags aside."""


def main(arguments: Sequence[str] | None = None, *, initialise: Callable[[PreTrainedModel], None] | None = None) -> int:
    """Train as the arguments say; return the exit code.

    Args:
        arguments: The command line without the program's name; `sys.argv[1:]` when None.
        initialise: Overwrites the weights of the new model, to compare initialisations; None keeps the package's own.
    """
    model_arguments, data_arguments, recipe = parse_arguments(arguments)
    accelerator = start_accelerator(recipe)
    start_logging(accelerator)
    log = RunLog(Path(recipe.output_dir), accelerator)
    all_arguments = {**vars(model_arguments), **vars(data_arguments), **vars(recipe)}
    with logging_redirect_tqdm():
        try:
            if find_checkpoints(log.run):
                log.check(all_arguments, allow_changes=recipe.allow_changes)
            loop, evaluators = prepare(model_arguments, data_arguments, recipe, accelerator, log, initialise)
        except (OSError, ValueError) as error:  # what the user gave; nothing has been trained yet
            if accelerator.is_main_process:
                print(f"error: {error}", file=sys.stderr)
            return 1
        if log.results_file.exists() and loop.stop_reason() is not None:
            logger.info("%s is finished (%s): nothing to do", log.run, loop.stop_reason())
            return 0
        log.begin(all_arguments, update=loop.progress.update, resolved=loop.resolved())
        reset_peak_memory(accelerator.device)
        reason = loop.train()
        report(loop, reason, evaluators, log, peak_memory(accelerator.device))
    accelerator.end_training()
    return 0


def prepare(
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    recipe: RecipeArguments,
    accelerator: Accelerator,
    log: RunLog,
    initialise: Callable[[PreTrainedModel], None] | None = None,
) -> tuple[TrainingLoop, dict[str, Evaluator]]:
    """Read the data, and build all that training needs: the loop, and an evaluator for each split but train.

    Raises:
        OSError: If a file cannot be read or the run's folder cannot be written.
        ValueError: If the data, a tokenizer, or the combination of arguments breaks a rule.
    """
    log.run.mkdir(parents=True, exist_ok=True)
    splits = load_pairs(data_arguments)
    tokenizer = prepare_tokenizer(splits, data_arguments, log.run, accelerator)
    tokenized = tokenize_splits(splits, tokenizer, data_arguments, accelerator)
    evaluators = {
        split: Evaluator(splits[split], tokenized[split], tokenizer, recipe=recipe, accelerator=accelerator)
        for split in ("validation", "test")
        if split in splits
    }
    if "validation" not in evaluators:
        if recipe.early_stopping_patience:
            raise ValueError(
                f"early_stopping_patience ({recipe.early_stopping_patience}) needs a validation split: there is none"
            )
        logger.warning("there is no validation split: the best model will be the last")
    model = build_model(model_arguments, data_arguments, recipe, tokenizer)
    if initialise is not None:
        initialise(model)  # before the loop, which loads the newest checkpoint over it
    loop = TrainingLoop(
        model,
        tokenizer,
        tokenized["train"],
        recipe=recipe,
        accelerator=accelerator,
        log=log,
        evaluator=evaluators.get("validation"),
    )
    return loop, evaluators


def start_accelerator(recipe: RecipeArguments) -> Accelerator:
    """Start Accelerate, and make sure that as many processes train together as the launcher was asked for.

    Raises:
        RuntimeError: If they do not; they would train as many separate models, or fewer would train than asked for.
        ValueError: If FSDP was asked for in vain.
    """
    accelerator = Accelerator(
        cpu=recipe.use_cpu or not torch.accelerator.is_available(),  # without it, ranks on a CPU ignore each other
        mixed_precision=recipe.mixed_precision,
        log_with=None if recipe.report_to == "none" else recipe.report_to,
        project_dir=recipe.output_dir,
    )
    asked = processes_asked_for()
    if accelerator.num_processes != asked:
        raise RuntimeError(
            f"the launcher was asked for {asked} processes, but {accelerator.num_processes} would train together; on a "
            "CPU, where `accelerate launch` starts only one, use `torchrun --standalone --nproc_per_node N`"
        )
    check_fsdp(accelerator)
    if accelerator.device.type == "cpu":
        # `accelerate launch` leaves a CPU one thread unless it is told otherwise.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(recipe.cpu_threads or max(1, cores // ranks_here))
    return accelerator


def check_fsdp(accelerator: Accelerator) -> None:
    """Refuse to train whole copies of a model whose parameters were to be divided over the processes.

    Raises:
        ValueError: If the launcher was asked for FSDP, and accelerate, as it does on a CPU, has taken no notice.
    """
    wanted = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes")
    if wanted and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            f"the launcher was asked for FSDP, but accelerate runs {accelerator.distributed_type.value}: on a CPU, and "
            "with one process, there is no FSDP. Launch without it"
        )


def processes_asked_for() -> int:
    """Return the number of processes that the launcher was asked for, as far as it can be seen.

    torchrun tells its processes. `accelerate launch --cpu --num_processes 2` starts a single one and tells it nothing,
    so the launcher's own command line, and the configuration file that it reads, are read again.
    """
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    try:
        launcher = psutil.Process().parent()
        words = launcher.cmdline() if launcher is not None else []
    except psutil.Error:
        return 1
    if "launch" not in words[:4] or not any(Path(word).name in LAUNCHERS for word in words[:3]):
        return 1
    options = launch_command_parser().parse_args(words[words.index("launch") + 1 :])
    if options.num_processes is not None:
        return max(1, options.num_processes)
    file = options.config_file or default_config_file
    return max(1, load_config_from_file(file).num_processes) if Path(file).is_file() else 1


def start_logging(accelerator: Accelerator) -> None:
    """Log to stderr, on the main process only."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("training").setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    transformers.utils.logging.disable_progress_bar()


def prepare_tokenizer(
    splits: DatasetDict, arguments: DataArguments, run: Path, accelerator: Accelerator
) -> PreTrainedTokenizerBase:
    """Load the tokenizer asked for, or train one on the training split, once for all ranks and sessions."""
    if arguments.tokenizer is not None:
        return load_tokenizer(arguments.tokenizer)
    folder = run / "tokenizer"
    if accelerator.is_main_process and not (folder.exists() and find_checkpoints(run)):
        logger.info("training a tokenizer of %d entries", arguments.vocab_size)
        train_tokenizer(_texts(splits["train"]), arguments.vocab_size).save_pretrained(folder)
    accelerator.wait_for_everyone()
    return load_tokenizer(str(folder))


def tokenize_splits(
    splits: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    arguments: PairArguments,
    accelerator: Accelerator,
    *,
    cut_evaluation: bool = True,
) -> dict[str, Dataset]:
    """Tokenise every split; rows unfit for training are dropped from it and reported, evaluation keeps all.

    Args:
        splits: Texts.
        tokenizer: The model's.
        arguments: The limits.
        accelerator: Lets the main process fill the cache of the others.
        cut_evaluation: Whether the limits cut rows of the evaluation: fit for a loss, not for translating them.
    """
    tokenized = {}
    with accelerator.main_process_first():
        for name, split in splits.items():
            limited = name == "train" or cut_evaluation
            tokenized[name], counts = tokenize_pairs(
                split,
                tokenizer,
                max_source_length=arguments.max_source_length if limited else sys.maxsize,
                max_target_length=arguments.max_target_length if limited else sys.maxsize,
                drop=name == "train",
            )
            logger.info("%s: %s", name, counts)
    return tokenized


def build_model(
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    recipe: RecipeArguments,
    tokenizer: PreTrainedTokenizerBase,
) -> VanillaTrmForConditionalGeneration:
    """Return a new model with weights drawn from the seed, and its generation config."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.pad_token_id
    tokens = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": start,
    }
    vocab_size = max(tokenizer.get_vocab().values()) + 1  # a tokenizer's ids may have gaps
    torch.manual_seed(recipe.seed)
    model = VanillaTrmForConditionalGeneration(
        VanillaTrmConfig(vocab_size=vocab_size, **tokens, **model_arguments.given())
    )
    model.generation_config = GenerationConfig(
        **tokens,
        num_beams=recipe.num_beams,
        length_penalty=recipe.length_penalty if recipe.num_beams > 1 else None,
        max_new_tokens=data_arguments.max_target_length,
        max_length_a=recipe.max_length_a,
        max_length_b=recipe.max_length_b,
    )
    logger.info("%d parameters, vocabulary %d", model.num_parameters(), vocab_size)
    return model


def report(loop: TrainingLoop, reason: str, evaluators: dict[str, Evaluator], log: RunLog, peak: int) -> None:
    """Evaluate the best model on whole splits, as a user would load it, and write the results and some examples."""
    recipe, progress, accelerator = loop.recipe, loop.progress, loop.accelerator
    model, tokenizer = load(str(loop.run / "best"), str(accelerator.device))
    results: dict[str, Any] = {
        "stopped": reason,
        "parameters": model.num_parameters(),
        "updates": progress.update,
        "epochs": progress.epoch,
        "minutes": round(progress.seconds / 60, 2),
        "target_tokens": progress.target_tokens,
        "target_tokens_per_second": round(progress.target_tokens / progress.update_seconds, 1),
        "peak_memory_bytes": peak,
        "best": {"update": progress.best_update, recipe.metric_for_best_model: progress.best_metric},
    }
    results |= score_splits(loop.run, evaluators, model, tokenizer, recipe)
    log.results(results)
    logger.info("training stopped: %s. The results are in %s", reason, log.results_file)


def score_splits(
    run: Path,
    evaluators: dict[str, Evaluator],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: RecipeArguments,
) -> dict[str, dict[str, Any]]:
    """Score whole splits with the best model, write some examples of one of them, and return the scores by split."""
    results = {}
    for split, evaluator in evaluators.items():
        results[split] = evaluator.final(model)
        named = results[split].items()
        shown = [f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in named]
        beams = model.generation_config.num_beams or 1
        logger.info("%s, best model, num_beams %d: %s", split, beams, ", ".join(shown))
    shown_split = next((split for split in SCORED if split in evaluators), None)
    if shown_split is not None and evaluators[shown_split].accelerator.is_main_process:
        write_examples(run, evaluators[shown_split], model, tokenizer, recipe)
    return results


def write_examples(
    run: Path, evaluator: Evaluator, model: Any, tokenizer: PreTrainedTokenizerBase, recipe: RecipeArguments
) -> None:
    """Write some sources, references and translations; `python -m training.translate` gives these, byte for byte."""
    rows = spaced_rows(len(evaluator.sources), recipe.num_samples)
    chosen = [as_line(evaluator.sources[row]) for row in rows]
    references = [as_line(evaluator.references[row]) for row in rows]
    translations = translate_all(
        model, tokenizer, chosen, decoding_config(model), batch_tokens=recipe.eval_batch_tokens
    )
    for name, lines in (("source", chosen), ("reference", references), ("translation", translations)):
        (run / f"examples.{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for source, translation in zip(chosen, translations, strict=True):
        logger.info("example\n  source      %s\n  translation %s", source, translation)


def _texts(split: Dataset) -> Iterator[str]:
    for rows in split.iter(batch_size=1000):
        yield from rows["source"]
        yield from rows["target"]


if __name__ == "__main__":
    sys.exit(main())
