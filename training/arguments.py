"""The arguments of training: dataclasses, their defaults, and a YAML file below the command line.

Every default stands once, here (or, for the architecture, in `VanillaTrmConfig`). `--config FILE.yaml` replaces
defaults and a flag beats both. A key of the file that is not an argument stops the run.
"""

import argparse
import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import HfArgumentParser

from hf_vanilla_trm import BeamSearchOptions


@dataclass
class ModelArguments:
    """The architecture. A field left at None takes the default of `VanillaTrmConfig`."""

    d_model: int | None = field(default=None, metadata={"help": "Width of every layer's input and output."})
    d_ff: int | None = field(default=None, metadata={"help": "Width of the feed-forward networks' inner layer."})
    encoder_layers: int | None = field(default=None, metadata={"help": "Depth of the encoder."})
    decoder_layers: int | None = field(default=None, metadata={"help": "Depth of the decoder."})
    num_attention_heads: int | None = field(default=None, metadata={"help": "Heads; must divide d_model."})
    dropout: float | None = field(default=None, metadata={"help": "Dropout of sub-layer outputs and embeddings."})
    attention_dropout: float | None = field(default=None, metadata={"help": "Dropout of attention probabilities."})
    activation_dropout: float | None = field(default=None, metadata={"help": "Dropout after the ReLU."})
    parameter_sharing: str | None = field(default=None, metadata={"help": "none, attention, ffn or all."})
    num_unique_layers: int | None = field(default=None, metadata={"help": "Layers stored per stack when sharing."})
    sharing_order: str | None = field(default=None, metadata={"help": "sequence, cycle or cycle_reverse."})
    embedding_size: int | None = field(default=None, metadata={"help": "Width of factorised embeddings."})
    attn_implementation: str | None = field(
        default=None,
        metadata={"help": "transformers' name of an attention kernel: eager, sdpa, flash_attention_2, ..."},
    )

    def given(self) -> dict[str, Any]:
        """Return the fields that were set, as keyword arguments for `VanillaTrmConfig`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass
class PairArguments:
    """Where the sentence pairs come from: exactly one of four kinds of data.

    Raises:
        ValueError: If no kind of data or more than one is given, or only one side of two aligned files.
    """

    embedded_corpus: str | None = field(
        default=None, metadata={"help": "Corpus generated from CLDR, without download: en-de or en-zh."}
    )
    train_source: str | None = field(default=None, metadata={"help": "Text file, a source sentence a line."})
    train_target: str | None = field(default=None, metadata={"help": "Text file aligned with train_source."})
    validation_source: str | None = field(default=None, metadata={"help": "As train_source, for validation."})
    validation_target: str | None = field(default=None, metadata={"help": "As train_target, for validation."})
    test_source: str | None = field(default=None, metadata={"help": "As train_source, for the test."})
    test_target: str | None = field(default=None, metadata={"help": "As train_target, for the test."})
    train_file: str | None = field(default=None, metadata={"help": "TSV, CSV, JSON lines or parquet file of pairs."})
    validation_file: str | None = field(default=None, metadata={"help": "As train_file, for validation."})
    test_file: str | None = field(default=None, metadata={"help": "As train_file, for the test."})
    dataset_name: str | None = field(default=None, metadata={"help": "Id of a data set on the Hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of that data set."})
    train_split: str = field(default="train", metadata={"help": "Split of the Hub data set to train on."})
    validation_split: str = field(default="validation", metadata={"help": "Split to validate on."})
    test_split: str = field(default="test", metadata={"help": "Split to test on."})
    source_column: str = field(default="source", metadata={"help": "Column of sources; dots reach into structs."})
    target_column: str = field(default="target", metadata={"help": "Column of targets; dots reach into structs."})
    max_source_length: int = field(default=256, metadata={"help": "Tokens, EOS included; longer rows are dropped."})
    max_target_length: int = field(default=256, metadata={"help": "Tokens, EOS included; longer rows are dropped."})
    max_length_ratio: float | None = field(
        default=None, metadata={"help": "Tokens of the longer side for each of the shorter; else rows are dropped."}
    )
    preprocessing_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenise; else one, with as many threads as there are cores."}
    )

    def __post_init__(self) -> None:
        kinds = {
            "embedded_corpus": self.embedded_corpus,
            "train_source": self.train_source or self.train_target,
            "train_file": self.train_file,
            "dataset_name": self.dataset_name,
        }
        given = [kind for kind, value in kinds.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(kinds)}; got {', '.join(given) or 'none of them'}")
        for name in ("max_source_length", "max_target_length", "max_length_ratio", "preprocessing_workers"):
            if (value := getattr(self, name)) is not None and not value >= 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        for split in ("train", "validation", "test"):
            self._check_files(split, given[0])

    def _check_files(self, split: str, kind: str) -> None:
        """Refuse files that nothing would read, and one side of two aligned files alone."""
        source, target, table = (getattr(self, f"{split}_{name}") for name in ("source", "target", "file"))
        if (source is None) != (target is None):
            raise ValueError(
                f"{split}_source and {split}_target go together; got {split}_source={source}, {split}_target={target}"
            )
        if table is not None and source is not None:
            raise ValueError(f"{split}_file ({table}) and {split}_source ({source}) are two answers to one question")
        if kind in ("embedded_corpus", "dataset_name") and (unread := table or source) is not None:
            raise ValueError(f"{kind} has its own splits: the {split} data in {unread} would not be read")


@dataclass
class DataArguments(PairArguments):
    """The sentence pairs, how they are read, and the tokenizer of a model that has none yet.

    Raises:
        ValueError: If a value is out of range, or the data cannot be streamed.
    """

    bpe_dropout: float = field(
        default=0.0,
        metadata={"help": "Probability of leaving out a merge of the tokenizer, anew in each epoch; 0 is off."},
    )
    further_validation: list[str] = field(
        default_factory=list,
        metadata={"help": "More validation sets, scored and logged: tables, or aligned files as SOURCE:TARGET."},
    )
    streaming: bool = field(
        default=False, metadata={"help": "Read the training split on the way, in memory that does not grow with it."}
    )
    shuffle_buffer: int = field(
        default=20_000, metadata={"help": "Rows that are shuffled and batched together when streaming."}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of a tokenizer; without it one is trained."}
    )
    vocab_size: int = field(default=8000, metadata={"help": "Vocabulary of a tokenizer trained here."})
    tokenizer_rows: int = field(
        default=1_000_000,
        metadata={"help": "Pairs that a tokenizer is trained on, at most: spread over the data, or a stream's first."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shuffle_buffer", "tokenizer_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if not 0 <= self.bpe_dropout < 1:
            raise ValueError(f"bpe_dropout ({self.bpe_dropout}) must be at least 0 and below 1")
        if self.streaming and self.bpe_dropout:
            raise ValueError(f"bpe_dropout ({self.bpe_dropout}) needs rows at hand, which streaming does not hold")
        if self.streaming and self.embedded_corpus is not None:
            raise ValueError(f"streaming reads files or the Hub; the embedded corpus ({self.embedded_corpus}) is made")


@dataclass
class RecipeArguments:
    """The recipe: section 5 of the paper (optimizer, schedule, regularisation), limits, evaluation and output.

    Lengths of training count updates, that is, steps of the optimizer.

    Raises:
        ValueError: If a value is out of range, or if nothing ever stops the run.
    """

    output_dir: str = field(metadata={"help": "Folder of everything that the run writes."})
    seed: int = field(default=42, metadata={"help": "Seed of weights, data order and dropout."})
    initial_weights: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of a model of the same architecture to begin with."}
    )

    learning_rate: float | None = field(
        default=None, metadata={"help": "Peak of the schedule; without it the paper's formula decides."}
    )
    warmup_steps: int = field(default=4000, metadata={"help": "Updates of linear warm-up."})
    cooldown_steps: int = field(default=0, metadata={"help": "Last updates, in which the rate falls to zero."})
    adam_beta1: float = field(default=0.9, metadata={"help": "Decay of Adam's first moment."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Decay of Adam's second moment."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "Adam's epsilon."})
    label_smoothing: float = field(default=0.1, metadata={"help": "Mass spread over the whole vocabulary."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Clip the gradient's global norm; 0 is off."})
    max_skipped_updates: int = field(
        default=5, metadata={"help": "Updates in a row left out because their gradient is not finite, at most."}
    )
    ema_decay: float = field(
        default=0.0, metadata={"help": "Evaluate and publish a moving average of the weights, of this decay; 0 is off."}
    )
    batch_tokens: int = field(
        default=4096, metadata={"help": "Rows times longest side, at most, of one batch of one process."}
    )
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Batches per update."})

    max_updates: int | None = field(default=None, metadata={"help": "Stop after so many updates."})
    max_epochs: int | None = field(default=None, metadata={"help": "Stop after so many passes over the data."})
    max_minutes: float | None = field(
        default=None, metadata={"help": "Stop after so many minutes of training, its evaluations included."}
    )
    early_stopping_patience: int = field(
        default=0, metadata={"help": "Stop after so many evaluations without a better metric; 0 is off."}
    )

    eval_every: int | None = field(default=None, metadata={"help": "Updates between evaluations; else each epoch."})
    eval_max_rows: int = field(default=500, metadata={"help": "Validation rows decoded during training; 0 is all."})
    eval_beams: int = field(default=1, metadata={"help": "Beams of decoding during training."})
    eval_batch_tokens: int = field(
        default=8192, metadata={"help": "Source tokens times beams in a batch of decoding, at most."}
    )
    metric_for_best_model: str = field(
        default="bleu", metadata={"help": "Validation metric that chooses the best model, and ends training early."}
    )
    metrics: list[str] = field(
        default_factory=list, metadata={"help": "More metrics, of the `evaluate` library: names or paths of scripts."}
    )
    bleu_tokenize: str = field(default="13a", metadata={"help": "sacreBLEU's tokenizer: 13a, zh, ja-mecab, ..."})
    num_samples: int = field(default=3, metadata={"help": "Sample translations printed at each evaluation."})

    num_beams: int = field(default=4, metadata={"help": "Beams of the final evaluation, saved with the model."})
    alpha: float = field(
        default=0.6,
        metadata={"help": "A score is divided by ((5 + length) / 6) ** alpha; saved where num_beams is above 1."},
    )
    max_length_a: float = field(default=1.0, metadata={"help": "A target has at most a * source_length + b tokens."})
    max_length_b: int = field(default=50, metadata={"help": "The b of max_length_a."})

    save_every: int | None = field(default=None, metadata={"help": "Updates between checkpoints; else as eval_every."})
    keep_checkpoints: int = field(default=3, metadata={"help": "Newest checkpoints kept, besides the best; 0 is all."})
    dry_run: bool = field(
        default=False, metadata={"help": "Print parameters, operations, memory and hours of the run, and stop."}
    )
    allow_changes: bool = field(
        default=False, metadata={"help": "Continue a run although its arguments differ from those it began with."}
    )
    logging_every: int = field(default=50, metadata={"help": "Updates between lines of the log."})
    report_to: Literal["tensorboard", "wandb", "trackio", "none"] = field(
        default="tensorboard", metadata={"help": "Where Accelerate sends the metrics."}
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = field(
        default=None, metadata={"help": "Autocast; without it what the launcher says."}
    )
    use_cpu: bool = field(default=False, metadata={"help": "Train on the CPU although there is an accelerator."})
    cpu_threads: int | None = field(
        default=None,
        metadata={"help": "PyTorch's threads on a CPU; else a machine's ranks share its cores."},
    )
    num_workers: int = field(default=0, metadata={"help": "Processes that load data, for each rank."})

    def __post_init__(self) -> None:
        if self.max_updates is None and self.max_epochs is None and self.max_minutes is None:
            raise ValueError("nothing stops this run: give max_updates, max_epochs or max_minutes")
        may_be_zero = {"seed", "warmup_steps", "cooldown_steps", "label_smoothing", "max_grad_norm", "num_workers"}
        may_be_zero |= {"early_stopping_patience", "eval_max_rows", "num_samples", "keep_checkpoints"}
        may_be_zero |= {"max_length_a", "max_length_b", "adam_beta1", "adam_beta2", "max_skipped_updates", "ema_decay"}
        for name, value in vars(self).items():
            if not isinstance(value, int | float) or name == "alpha":
                continue
            if not value < math.inf:
                raise ValueError(f"{name} ({value}) must be a finite number")
            if name in may_be_zero and not value >= 0:
                raise ValueError(f"{name} ({value}) must not be negative")
            if name not in may_be_zero and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{name} ({value}) must be greater than 0")
        BeamSearchOptions(
            num_beams=self.num_beams,
            alpha=self.alpha,
            max_length_a=self.max_length_a,
            max_length_b=self.max_length_b,
        )  # now, and not at the first evaluation
        for name in ("label_smoothing", "adam_beta1", "adam_beta2", "ema_decay"):
            if not getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be below 1")
        if self.cooldown_steps and self.max_updates is None:
            raise ValueError(f"cooldown_steps ({self.cooldown_steps}) counts back from max_updates: give it")


def defaults_of(*kinds: type) -> dict[str, Any]:
    """Return the default of each argument of some dataclasses that has one."""
    fields = [field for kind in kinds for field in dataclasses.fields(kind)]
    values = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    made = {field.name: field.default_factory for field in fields if field.default_factory is not dataclasses.MISSING}
    return values | {name: make() for name, make in made.items()}


def positive_integer(text: str) -> int:
    """Return the number in an argument, for argparse.

    Raises:
        argparse.ArgumentTypeError: If it is below 1.
        ValueError: If it is no integer.
    """
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def positive_number(text: str) -> float:
    """Return the number in an argument, for argparse.

    Raises:
        argparse.ArgumentTypeError: If it is not above 0, or infinite.
        ValueError: If it is no number.
    """
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{value} must be above 0, and finite")
    return value


Arguments = tuple[ModelArguments, DataArguments, RecipeArguments]


def parse_arguments(arguments: Sequence[str] | None = None) -> Arguments:
    """Parse the arguments of training from scratch; see `parse_dataclasses`."""
    kinds = (ModelArguments, DataArguments, RecipeArguments)
    model, data, recipe = parse_dataclasses(kinds, arguments, description="Train a Transformer from scratch.")
    return model, data, recipe


def parse_dataclasses(kinds: Sequence[type], arguments: Sequence[str] | None, *, description: str) -> tuple[Any, ...]:
    """Parse flags over the YAML file that `--config` names.

    Args:
        kinds: Dataclasses, whose fields are the arguments.
        arguments: The command line without the program's name; `sys.argv[1:]` when None.
        description: What `--help` begins with.

    Returns:
        An instance of each dataclass.

    Raises:
        SystemExit: With code 2 and the reason on stderr, if an argument is unknown or its value breaks a rule.
    """
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    usage = "%(prog)s [--config FILE.yaml] [--argument value ...]; all arguments: --help"
    parser = HfArgumentParser(kinds, allow_abbrev=False, description=description, usage=usage)
    parser.add_argument("--config", help="YAML file of arguments; flags win over it.")
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument("--config", type=Path)
    config, flags = config_parser.parse_known_args(command_line)
    try:
        if config.config is not None:
            fields = [field for kind in kinds for field in dataclasses.fields(kind) if field.init]
            lists = {field.name for field in fields if field.default_factory is list}
            flags = _flags_of_yaml(config.config, [field.name for field in fields], lists) + flags
        return parser.parse_args_into_dataclasses(flags, look_for_args_file=False)[: len(kinds)]
    except (OSError, ValueError) as error:
        parser.error(re.sub(r"hf_\w+", "hf_...", str(error)))  # a token behind a flag that there is not


def _flags_of_yaml(path: Path, names: Sequence[str], lists: Set[str]) -> list[str]:
    """Return a YAML file as flags, so that argparse reads both alike; YAML takes `1e-4` for text and `no` for False."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path} must hold lines of the form `argument: value`")
    flags: list[str] = []
    seen = set()
    for key, value in root.value if root is not None else ():
        place = f"{path}, line {key.start_mark.line + 1}"
        if key.value not in names:
            nearest = difflib.get_close_matches(str(key.value), names, n=1, cutoff=0)[0]
            raise ValueError(f"{place}: unknown argument {key.value!r}; did you mean {nearest!r}?")
        if key.value in seen:
            raise ValueError(f"{place}: {key.value} stands twice")
        seen.add(key.value)
        if isinstance(value, yaml.SequenceNode) and key.value in lists:
            items = [item.value if isinstance(item, yaml.ScalarNode) else None for item in value.value]
            if wrong := [item for item in items if not item or item.startswith("-")]:
                raise ValueError(f"{place}: {key.value} takes a list of texts, got {wrong[0]!r} among them")
            flags += [f"--{key.value}", *items] if items else []
        elif not isinstance(value, yaml.ScalarNode):
            raise ValueError(f"{place}: {key.value} takes one value")
        elif value.style is not None or value.value not in ("", "null", "~"):  # an empty text in quotes is a value
            flags.append(f"--{key.value}={value.value}")
    return flags
