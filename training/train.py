"""Train a model from scratch: `accelerate launch -m training.train --config FILE.yaml [--flag value ...]`.

The same command started again continues from the newest checkpoint; a finished run is left alone.
"""

import functools
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_vanilla_trm import VanillaTrmConfig, VanillaTrmForConditionalGeneration
from training.architecture import check_architecture
from training.arguments import (
    DataArguments,
    ModelArguments,
    PairArguments,
    RecipeArguments,
    defaults_of,
    parse_arguments,
)
from training.batching import CachedBatches, PairCollator, TokenBatchSampler
from training.bpe_dropout import BpeDropout, SegmentedBatches
from training.checkpoint import find_checkpoints, repair, write_folder
from training.cost import Hardware, describe_cost
from training.data import SPLITS, PairStream, digest_stream, fingerprint, load_further_pairs, load_pairs
from training.evaluation import Evaluator, TranslationMetric, never, spaced_rows
from training.launching import start_accelerator, start_logging
from training.lines import as_line
from training.loading import load
from training.loop import TrainingLoop
from training.memory import peak_memory, reset_peak_memory, return_large_blocks
from training.objective import TrainingDivergedError
from training.pair_files import Pair
from training.ranks import OtherRankFailedError, Ranks, StopRequest
from training.run_log import RunLog
from training.streaming import StreamedBatches
from training.tokenized import Limits, sequence_lengths, tokenize_pairs, tokenize_rows
from training.tokenizer import check_vocabulary, load_tokenizer, tokenizer_digest, train_tokenizer
from training.translator import translate_all

logger = logging.getLogger("training")

SCORED = ("test", "validation")
"""Splits that are scored; what shows one of them shows the first that there is."""


def main(arguments: Sequence[str] | None = None, *, initialise: Callable[[PreTrainedModel], None] | None = None) -> int:
    """Train as the arguments say; return the exit code.

    SIGTERM ends a run after the update it is at: all is saved, and the code is 0. So does Ctrl-C, with code 130. Before
    the first update there is nothing to save, and a signal ends the process as it does any other.

    Args:
        arguments: The command line without the program's name; `sys.argv[1:]` when None.
        initialise: Overwrites the weights of the new model, to compare initialisations; None keeps the package's own.
    """
    model_arguments, data_arguments, recipe = parse_arguments(arguments)
    if recipe.dry_run:
        return dry_run(model_arguments, data_arguments, recipe)
    try:
        accelerator = start_accelerator(recipe)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    start_logging(accelerator)
    log = RunLog(Path(recipe.output_dir), accelerator)
    who = "error" if accelerator.is_main_process else f"error of rank {accelerator.process_index}"
    with logging_redirect_tqdm():
        try:
            return session(model_arguments, data_arguments, recipe, accelerator, log, initialise)
        except (OSError, ValueError, TrainingDivergedError) as error:  # what the user gave, the disk, the numbers
            print(f"{who}: {error}", file=sys.stderr)
        except OtherRankFailedError:  # which prints what it is
            pass
        except RuntimeError as error:
            if accelerator.is_main_process:
                raise
            print(f"{who}: {str(error).splitlines()[0]}", file=sys.stderr)  # the connection to one that has failed
        except KeyboardInterrupt:  # before the first update, when there is nothing to save, or a second time
            return 128 + signal.SIGINT
        finally:
            log.release()
    return 1


def dry_run(model_arguments: ModelArguments, data_arguments: DataArguments, recipe: RecipeArguments) -> int:
    """Print what the run would cost, without reading or writing anything; return the exit code."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    try:
        print(describe_cost(model_arguments, data_arguments, recipe, Hardware()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def session(
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    recipe: RecipeArguments,
    accelerator: Accelerator,
    log: RunLog,
    initialise: Callable[[PreTrainedModel], None] | None,
) -> int:
    """Begin or continue a run; return the exit code. For the errors, see `prepare` and `TrainingLoop.train`."""
    stop = StopRequest()
    run = prepare(model_arguments, data_arguments, recipe, accelerator, log, stop, initialise)
    loop = run.loop
    if log.results_file.exists() and loop.stop_reason() is not None:
        logger.info("%s is finished (%s): nothing to do", log.run, loop.stop_reason())
        return 0
    resolved = {**loop.resolved(), "inputs": run.inputs}
    done = {"update": loop.progress.update, "evaluated_update": loop.progress.evaluated_update}
    loop.ranks.together(lambda: log.begin(run.arguments, resolved=resolved, **done))
    reset_peak_memory(accelerator.device)
    with stop:
        reason = loop.train()
        finished = reason is not None and report(run, reason, log, peak_memory(accelerator.device))
    accelerator.end_training()
    return 0 if finished else stop.exit_code


@dataclass
class Run:
    """A run that is ready to train.

    Attributes:
        arguments: All arguments by name.
        inputs: What the run reads, by name, each with a digest of its content.
        loop: Trains.
        evaluators: By split; those of validation are the loop's.
    """

    arguments: dict[str, Any]
    inputs: dict[str, str]
    loop: TrainingLoop
    evaluators: dict[str, Evaluator]


def prepare(
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    recipe: RecipeArguments,
    accelerator: Accelerator,
    log: RunLog,
    stop: StopRequest,
    initialise: Callable[[PreTrainedModel], None] | None = None,
) -> Run:
    """Read the data, and build all that training needs.

    Raises:
        OSError: If a file cannot be read or the run's folder cannot be written.
        ValueError: If the data, a tokenizer, a metric, or the combination of arguments breaks a rule, if the run was
            begun otherwise, or if none of its checkpoints is whole.
    """
    all_arguments = {**vars(model_arguments), **vars(data_arguments), **vars(recipe)}
    ranks = Ranks(accelerator)
    log.run.mkdir(parents=True, exist_ok=True)
    ranks.together(log.claim)
    ranks.together(lambda: repair(log.run) if accelerator.is_main_process else None)
    checkpoints = find_checkpoints(log.run)
    if checkpoints:
        kinds = (type(model_arguments), type(data_arguments), type(recipe))
        log.check(all_arguments, defaults=defaults_of(*kinds), allow_changes=recipe.allow_changes)
    metric = make_metric(recipe)  # may be unknown: before the data, which takes long
    splits, stream, tokenizer = read_data(data_arguments, recipe, checkpoints, accelerator, log.run)
    inputs = {f"{name} data": digest for name, digest in fingerprint(splits).items()}
    inputs |= (digest_stream(data_arguments) if stream is not None else {}) | {"tokenizer": tokenizer_digest(tokenizer)}
    if checkpoints and not recipe.allow_changes:
        log.check_inputs(inputs)
    keep_texts = data_arguments.bpe_dropout > 0
    tokenized = tokenize_splits(splits, tokenizer, data_arguments, accelerator, keep_training_texts=keep_texts)
    evaluators = {
        split: make_evaluator(pairs, tokenized[split], tokenizer, metric, recipe, accelerator)
        for split, pairs in splits.items()
        if split != "train"
    }
    check_validation(evaluators, recipe)
    initial_weights = None if checkpoints else recipe.initial_weights
    model = build_model(model_arguments, data_arguments, recipe, tokenizer, initial_weights)
    if accelerator.device.type == "cpu":
        if model_arguments.attn_implementation is None:
            model.set_attn_implementation("eager")  # faster than sdpa for sentences, in bfloat16 several times
        return_large_blocks(4 * recipe.batch_tokens * model.config.d_model)
    if initialise is not None:
        initialise(model)  # before the loop, which loads the newest checkpoint over it
    loop = TrainingLoop(
        model,
        tokenizer,
        make_batches(tokenized.get("train"), stream, tokenizer, data_arguments, recipe, accelerator),
        recipe=recipe,
        accelerator=accelerator,
        log=log,
        evaluators={split: evaluator for split, evaluator in evaluators.items() if split.startswith("validation")},
        ranks=ranks,
        stop=stop,
    )
    return Run(all_arguments, inputs, loop, evaluators)


def make_evaluator(
    pairs: Dataset,
    tokenized: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    metric: TranslationMetric,
    recipe: RecipeArguments,
    accelerator: Accelerator,
) -> Evaluator:
    """Return what evaluates models on the pairs of a split, as the recipe says."""
    return Evaluator(
        pairs,
        tokenized,
        tokenizer,
        metric=metric,
        accelerator=accelerator,
        batch_tokens=recipe.batch_tokens,
        eval_batch_tokens=recipe.eval_batch_tokens,
        num_samples=recipe.num_samples,
    )


class TrainingData(NamedTuple):
    """What a run reads.

    Attributes:
        splits: Pairs by split, without `train` where that is streamed.
        stream: The pairs to train on, where they are streamed.
        tokenizer: Of the run.
    """

    splits: DatasetDict
    stream: PairStream | None
    tokenizer: PreTrainedTokenizerBase


def read_data(
    data_arguments: DataArguments,
    recipe: RecipeArguments,
    checkpoints: Sequence[Path],
    accelerator: Accelerator,
    run: Path,
) -> TrainingData:
    """Read the pairs, and the tokenizer, which is trained on them where none is given.

    Args:
        data_arguments: Where all comes from.
        recipe: May name initial weights, whose tokenizer is taken.
        checkpoints: Of the run, the newest last.
        accelerator: Knows the ranks.
        run: The run's folder.

    Raises:
        OSError, ValueError: As for `prepare`.
    """
    stream = PairStream(data_arguments) if data_arguments.streaming else None
    splits = load_pairs(data_arguments) if stream is None else load_pairs(data_arguments, SPLITS[1:], streaming=True)
    splits.update(load_further_pairs(data_arguments.further_validation, data_arguments))
    if data_arguments.tokenizer is not None:
        tokenizer = load_tokenizer(data_arguments.tokenizer)
    elif recipe.initial_weights is not None:  # needed once: they may be gone when the run is continued
        tokenizer = load_tokenizer(str(checkpoints[-1]) if checkpoints else recipe.initial_weights)
    else:
        pairs = pairs_for_tokenizer(splits.get("train"), stream, data_arguments.tokenizer_rows)
        tokenizer = prepare_tokenizer(pairs, data_arguments.vocab_size, run, accelerator)
    return TrainingData(splits, stream, tokenizer)


def make_metric(recipe: RecipeArguments) -> TranslationMetric:
    """Return the metrics of evaluation.

    Raises:
        ValueError: If one cannot be used, or none of them is the one that is to choose the best model.
    """
    metric = TranslationMetric(recipe.bleu_tokenize, recipe.metrics)
    names = ["loss", "perplexity", *metric.names()]
    if recipe.metric_for_best_model not in names:
        raise ValueError(f"metric_for_best_model ({recipe.metric_for_best_model}) must be one of {', '.join(names)}")
    return metric


def check_validation(evaluators: dict[str, Evaluator], recipe: RecipeArguments) -> None:
    """Refuse what cannot be done without a first validation split, and warn of what follows from having none.

    Raises:
        ValueError: If training is to end early, or others are to be scored, and there is none.
    """
    if "validation" in evaluators:
        return
    if recipe.early_stopping_patience:
        raise ValueError(
            f"early_stopping_patience ({recipe.early_stopping_patience}) needs a validation split: there is none"
        )
    if further := [name for name in evaluators if name.startswith("validation")]:
        raise ValueError(f"further_validation ({', '.join(further)}) needs a first validation split: there is none")
    logger.warning("there is no validation split: the best model will be the last")


def make_batches(
    train: Dataset | None,
    stream: PairStream | None,
    tokenizer: PreTrainedTokenizerBase,
    data_arguments: DataArguments,
    recipe: RecipeArguments,
    accelerator: Accelerator,
) -> CachedBatches | SegmentedBatches | StreamedBatches:
    """Return the training data as this rank's batches: of the tokenised split `train`, or of a stream.

    Raises:
        ValueError: If the rows of a stream might not be dealt evenly.
    """
    on_accelerator = accelerator.device.type == "cuda"
    on_tensor_cores = on_accelerator and accelerator.mixed_precision != "no"
    collate = PairCollator(tokenizer.pad_token_id, 8 if on_tensor_cores else None)
    loading = {"collate": collate, "num_workers": recipe.num_workers, "pin_memory": on_accelerator}
    dealing = {
        "batch_tokens": recipe.batch_tokens,
        "seed": recipe.seed,
        "num_ranks": accelerator.num_processes,
        "rank": accelerator.process_index,
    }
    if train is not None:
        if data_arguments.bpe_dropout:
            bpe_dropout = BpeDropout(tokenizer, data_arguments.bpe_dropout, recipe.seed)
            return SegmentedBatches(train, bpe_dropout, dealing=dealing, loading=loading)
        return CachedBatches(train, TokenBatchSampler(*sequence_lengths(train), **dealing), **loading)
    assert stream is not None
    limits = limits_of(data_arguments)
    longest = max(limits.max_source_length, limits.max_target_length)
    if 2 * longest > recipe.batch_tokens:  # with single rows as batches, some windows could not be dealt
        raise ValueError(
            f"batch_tokens ({recipe.batch_tokens}) must hold two of the longest rows that may come in a stream: lower "
            f"max_source_length and max_target_length ({longest}), or raise it"
        )
    if data_arguments.shuffle_buffer < accelerator.num_processes:
        raise ValueError(
            f"shuffle_buffer ({data_arguments.shuffle_buffer}) must have a row for each of the "
            f"{accelerator.num_processes} processes"
        )
    return StreamedBatches(
        stream.read,
        functools.partial(tokenize_rows, tokenizer=tokenizer, limits=limits),
        num_rows=stream.num_rows,
        window_rows=data_arguments.shuffle_buffer,
        **dealing,
        **loading,
    )


def pairs_for_tokenizer(train: Dataset | None, stream: PairStream | None, rows: int) -> Iterator[Pair]:
    """Yield at most `rows` pairs: spread over the split `train`, or the first ones of a stream."""
    if train is None:
        assert stream is not None
        yield from itertools.islice(stream.read(0), rows)
        return
    chosen = train if len(train) <= rows else train.select(spaced_rows(len(train), rows))
    for batch in chosen.iter(batch_size=1000):
        for source, target in zip(batch["source"], batch["target"], strict=True):
            yield {"source": source, "target": target}


def limits_of(arguments: PairArguments) -> Limits:
    """Return what the arguments let be trained on."""
    return Limits(arguments.max_source_length, arguments.max_target_length, arguments.max_length_ratio)


def prepare_tokenizer(
    pairs: Iterable[Pair], vocab_size: int, run: Path, accelerator: Accelerator
) -> PreTrainedTokenizerBase:
    """Train a tokenizer on pairs, once for all ranks and sessions, and return it."""
    folder = run / "tokenizer"
    if accelerator.is_main_process and not (folder.exists() and find_checkpoints(run)):
        logger.info("training a tokenizer of %d entries", vocab_size)
        texts = (pair[side] for pair in pairs for side in ("source", "target"))
        trained = train_tokenizer(texts, vocab_size)
        write_folder(folder, trained.save_pretrained)
    accelerator.wait_for_everyone()
    return load_tokenizer(str(folder))


def tokenize_splits(
    splits: DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    arguments: PairArguments,
    accelerator: Accelerator,
    *,
    cut_evaluation: bool = True,
    keep_training_texts: bool = False,
) -> dict[str, Dataset]:
    """Tokenise every split; rows unfit for training are dropped from it and reported, evaluation keeps all.

    Args:
        splits: Texts.
        tokenizer: The model's.
        arguments: The limits.
        accelerator: Lets the main process fill the cache of the others.
        cut_evaluation: Whether the limits cut rows of the evaluation: fit for a loss, not for translating them.
        keep_training_texts: Whether the rows of the training split keep their texts.
    """
    tokenized = {}
    with accelerator.main_process_first():
        for name, split in splits.items():
            limited = name == "train" or cut_evaluation
            tokenized[name], counts = tokenize_pairs(
                split,
                tokenizer,
                limits_of(arguments) if limited else Limits(sys.maxsize, sys.maxsize),
                drop=name == "train",
                keep_texts=keep_training_texts and name == "train",
                num_proc=arguments.preprocessing_workers,
            )
            logger.info("%s: %s", name, counts)
    return tokenized


def build_model(
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    recipe: RecipeArguments,
    tokenizer: PreTrainedTokenizerBase,
    initial_weights: str | None,
) -> VanillaTrmForConditionalGeneration:
    """Return a new model and its generation config; its weights are drawn from the seed, or initial ones.

    Raises:
        ValueError: If the initial weights are not of this architecture, or the tokenizer does not fit them.
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.pad_token_id
    tokens = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": start,
    }
    vocab_size = max(tokenizer.get_vocab().values()) + 1  # a tokenizer's ids may have gaps
    initial = None if initial_weights is None else load(initial_weights, "cpu")[0]
    if initial is not None:
        check_vocabulary(initial, tokenizer)
        vocab_size = initial.config.vocab_size
    torch.manual_seed(recipe.seed)
    model = VanillaTrmForConditionalGeneration(
        VanillaTrmConfig(vocab_size=vocab_size, **tokens, **model_arguments.given())
    )
    if initial is not None:
        copy_weights(initial, model, initial_weights)
    model.generation_config = GenerationConfig(
        **tokens,
        num_beams=recipe.num_beams,
        length_penalty=recipe.alpha if recipe.num_beams > 1 else None,
        max_new_tokens=data_arguments.max_target_length,
        max_length_a=recipe.max_length_a,
        max_length_b=recipe.max_length_b,
    )
    logger.info("%d parameters, vocabulary %d", model.num_parameters(), vocab_size)
    return model


def copy_weights(initial: PreTrainedModel, model: PreTrainedModel, name: str) -> None:
    """Copy the weights of one model to another of the same architecture.

    Args:
        initial: Has the weights.
        model: Gets them.
        name: What a message calls `initial`.

    Raises:
        ValueError: If the models are of different architectures.
    """
    check_architecture(initial.config, model.config, f"initial_weights ({name})", "the model to train")
    model.load_state_dict(initial.state_dict())


def report(run: Run, reason: str, log: RunLog, peak: int) -> bool:
    """Evaluate the best model on whole splits, as a user would load it, and write the results and some examples.

    Returns False if a signal has interrupted it; the same command does it again.
    """
    loop, evaluators = run.loop, run.evaluators
    recipe, progress, accelerator = loop.recipe, loop.progress, loop.accelerator
    try:
        model, tokenizer = load(str(loop.run / "best"), str(accelerator.device))
    except Exception as error:  # each library has a class of its own for a damaged file
        kept = loop.run / "checkpoints" / f"update-{progress.best_update}"
        raise ValueError(
            f"{loop.run / 'best'} cannot be loaded ({error}); that update's checkpoint is {kept}"
        ) from error
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
    scores = score_splits(loop.run, evaluators, model, tokenizer, loop.stop)
    if scores is None:
        return False
    log.results(results | scores)
    logger.info("training stopped: %s. The results are in %s", reason, log.results_file)
    return True


def score_splits(
    run: Path,
    evaluators: dict[str, Evaluator],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stop: Callable[[], bool] = never,
) -> dict[str, dict[str, Any]] | None:
    """Score whole splits with the best model, write some examples of one of them, and return the scores by split.

    Returns None if `stop` said so before all was done.
    """
    results = {}
    for split, evaluator in evaluators.items():
        scores = evaluator.final(model, stop)
        if scores is None:
            return None
        results[split] = scores
        named = results[split].items()
        shown = [f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in named]
        beams = model.generation_config.num_beams or 1
        logger.info("%s, best model, num_beams %d: %s", split, beams, ", ".join(shown))
    shown_split = next((split for split in SCORED if split in evaluators), None)
    if shown_split is not None and evaluators[shown_split].accelerator.is_main_process:
        write_examples(run, evaluators[shown_split], model, tokenizer)
    return results


def write_examples(run: Path, evaluator: Evaluator, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write some sources, references and translations; `python -m training.translate` gives these, byte for byte."""
    rows = spaced_rows(len(evaluator.sources), evaluator.num_samples)
    chosen = [as_line(evaluator.sources[row]) for row in rows]
    references = [as_line(evaluator.references[row]) for row in rows]
    translations = translate_all(
        model, tokenizer, chosen, model.search_options(), batch_tokens=evaluator.eval_batch_tokens
    )
    for name, lines in (("source", chosen), ("reference", references), ("translation", translations)):
        (run / f"examples.{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for source, translation in zip(chosen, translations, strict=True):
        logger.info("example\n  source      %s\n  translation %s", source, translation)


if __name__ == "__main__":
    sys.exit(main())
