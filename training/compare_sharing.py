"""Compare ways of sharing parameters: `python -m training.compare_sharing --config FILE.yaml`.

Every way is a run of `training.train` on the same data, with the same seeds and updates, and differs from the unshared
model in its sizes and sharing alone (give `learning_rate`: without it the paper's formula gives wider models another):

- at equal depth, where it has fewer parameters;
- wider, until it has as many as the unshared model has, within 2 %;
- deeper: the unshared model's M layers, used at depth 2M and 3M (Takase and Kiyono, 2021), with as many parameters.

Interrupted, the same command goes on where it was. A table (table.md, table.csv, results.json) and three pictures come
at the end.
"""

import dataclasses
import hashlib
import json
import logging
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from hf_vanilla_trm import PARAMETER_SHARING_MODES, VanillaTrmConfig
from training.arguments import DataArguments, ModelArguments, RecipeArguments, parse_dataclasses
from training.comparison_report import write_report
from training.cost import count_parameters
from training.data import SPLITS, load_pairs
from training.evaluation import TranslationMetric
from training.loading import load
from training.run_log import write_json
from training.translator import translate_all

logger = logging.getLogger("training")

MODES = tuple(mode for mode in PARAMETER_SHARING_MODES if mode != "none")
DEEPER = (2, 3)
TOLERANCE = 0.02
DECODING_PASSES = 3


# What is compared --------------------------------------------------------------------------------------------------


@dataclass
class CompareArguments:
    """What is compared, and on what.

    Raises:
        ValueError: If a value breaks a rule.
    """

    base: str = field(metadata={"help": "YAML file of training.train: the unshared model, the data and the recipe."})
    output_dir: str = field(metadata={"help": "Folder of all runs, the table and the pictures."})
    arguments: str = field(
        default="", metadata={"help": "Further arguments of training.train, as on its command line, for every run."}
    )
    modes: str = field(default=" ".join(MODES), metadata={"help": "Modes beside none, a space between."})
    wider: bool = field(default=True, metadata={"help": "Also each mode with as many parameters as none."})
    deeper: bool = field(default=True, metadata={"help": "Also M distinct layers at depth 2M and 3M."})
    seeds: str = field(default="42", metadata={"help": "Seeds, a space between; all is run with each."})
    num_bootstrap: int = field(default=1000, metadata={"help": "Samples of the test set, for intervals."})
    min_exact_match: float = field(
        default=0.0, metadata={"help": "Exact match that the unshared model must reach, or nothing was compared."}
    )

    def __post_init__(self) -> None:
        unknown = sorted(set(self.modes.split()) - set(MODES))
        if unknown:
            raise ValueError(f"modes ({self.modes!r}): {unknown[0]!r} is none of {', '.join(MODES)}")
        if not self.seeds.split() or not all(seed.isdecimal() for seed in self.seeds.split()):
            raise ValueError(f"seeds ({self.seeds!r}) must be numbers, a space between")
        self.seeds = " ".join(dict.fromkeys(str(int(seed)) for seed in self.seeds.split()))
        self.modes = " ".join(dict.fromkeys(self.modes.split()))
        overridden = [flag for flag in ("--seed", "--output_dir") if flag in self.arguments.replace("=", " ").split()]
        if overridden:
            raise ValueError(f"arguments: {overridden[0]} is given to each run by this command")
        if self.num_bootstrap < 2:
            raise ValueError(f"num_bootstrap ({self.num_bootstrap}) must be at least 2")
        if not 0 <= self.min_exact_match <= 100:
            raise ValueError(f"min_exact_match ({self.min_exact_match}) must be from 0 to 100")


@dataclass(frozen=True)
class Variant:
    """One way of sharing.

    Attributes:
        name: What tables and folders call it.
        changes: The arguments of training.train that make it, over those of the unshared model.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)


UNSHARED = Variant("none")
ALBERT: dict[str, Any] = {"num_unique_layers": 1, "sharing_order": "sequence"}
"""One distinct layer a stack, whatever the base says of a number that it ignores."""


def variants_of(unshared: VanillaTrmConfig, arguments: CompareArguments) -> list[Variant]:
    """Return all that is compared with the unshared model.

    Args:
        unshared: Its config, which knows the size of the vocabulary.
        arguments: Which ways are wanted.

    Raises:
        ValueError: If no width has the unshared model's number of parameters, or its stacks differ in depth.
    """
    modes = arguments.modes.split()
    variants = [Variant(mode, ALBERT | {"parameter_sharing": mode}) for mode in modes]
    if arguments.wider:
        for mode in modes:
            changes = ALBERT | {"parameter_sharing": mode}
            variants.append(Variant(f"{mode} wider", changes | widen(unshared, changes)))
    if arguments.deeper:
        layers = unshared.encoder_layers
        if unshared.decoder_layers != layers:
            raise ValueError(
                f"deeper: encoder_layers ({layers}) and decoder_layers ({unshared.decoder_layers}) differ, and M is "
                "one number: give deeper no"
            )
        sharing = {"parameter_sharing": "all", "num_unique_layers": layers, "sharing_order": "cycle_reverse"}
        for times in DEEPER:
            depths = {"encoder_layers": times * layers, "decoder_layers": times * layers}
            variants.append(Variant(f"all deeper x{times}", sharing | depths))
    return variants


def widen(unshared: VanillaTrmConfig, sharing: dict[str, Any]) -> dict[str, int]:
    """Return the sizes with which a sharing model has the unshared model's number of parameters.

    The d_model that comes nearest, a multiple of the heads, with d_ff in proportion; if that is not near enough, d_ff
    makes up for it.

    Raises:
        ValueError: If no sizes come within `TOLERANCE`.
    """
    wanted, ratio = count_parameters(unshared), unshared.d_ff / unshared.d_model
    step = math.lcm(2, unshared.num_attention_heads)

    def surplus(d_model: int, d_ff: int) -> int:
        return count_parameters(changed(unshared, **sharing, d_model=d_model, d_ff=d_ff)) - wanted

    d_model = unshared.d_model
    while surplus(d_model, round(ratio * d_model)) < 0:
        d_model += step
    d_model = min((max(step, d_model - step), d_model), key=lambda width: abs(surplus(width, round(ratio * width))))
    d_ff = round(ratio * d_model)
    if abs(error := surplus(d_model, d_ff)) > TOLERANCE * wanted:
        d_ff -= round(error / (surplus(d_model, d_ff + 1) - error))
    if abs(surplus(d_model, d_ff)) > TOLERANCE * wanted:
        raise ValueError(
            f"{sharing['parameter_sharing']} wider: no width comes within {TOLERANCE:.0%} of {wanted:,} parameters"
        )
    return {"d_model": d_model, "d_ff": d_ff}


def changed(config: VanillaTrmConfig, **changes: Any) -> VanillaTrmConfig:
    """Return a config with other values."""
    return config_of(config.to_dict() | changes)


def config_of(fields: dict[str, Any]) -> VanillaTrmConfig:
    """Return the config that `to_dict` turned into fields."""
    return VanillaTrmConfig(**{name: value for name, value in fields.items() if name != "model_type"})


# The runs ----------------------------------------------------------------------------------------------------------


def run_folder(arguments: CompareArguments, variant: Variant, seed: str) -> Path:
    """Return the folder of one run."""
    return Path(arguments.output_dir) / "runs" / f"{variant.name.replace(' ', '_')}-{seed}"


def train_command(arguments: CompareArguments, variant: Variant, seed: str) -> list[str]:
    """Return the command of one run."""
    command = [sys.executable, "-m", "training.train", "--config", arguments.base, *shlex.split(arguments.arguments)]
    changes = {**variant.changes, "seed": seed, "output_dir": run_folder(arguments, variant, seed)}
    return [*command, *(f"--{name}={value}" for name, value in changes.items())]


def train(arguments: CompareArguments, variant: Variant, seed: str) -> dict[str, Any]:
    """Train one variant unless it is done, and return its results.

    Raises:
        subprocess.CalledProcessError: If the run fails; it has said why.
        ValueError: If a signal has ended it.
    """
    results = run_folder(arguments, variant, seed) / "results.json"
    if not results.exists():
        subprocess.run(train_command(arguments, variant, seed), check=True)
    if not results.exists():
        raise ValueError(f"{results.parent} was stopped before it was finished; the same command continues")
    return json.loads(results.read_text("utf-8"))


def train_all(arguments: CompareArguments) -> list[tuple[Variant, str]]:
    """Train everything, the unshared models first, and return what was trained.

    Raises:
        subprocess.CalledProcessError: If a run fails.
        ValueError: See `variants_of`.
    """
    seeds = arguments.seeds.split()
    first = [(UNSHARED, seed) for seed in seeds]
    for variant, seed in announced(first, "unshared"):
        train(arguments, variant, seed)
    record = json.loads((run_folder(arguments, UNSHARED, seeds[0]) / "run.json").read_text("utf-8"))
    unshared = config_of(record["resolved"]["model"])
    others = [(variant, seed) for seed in seeds for variant in variants_of(unshared, arguments)]
    for variant, seed in announced(others, "sharing"):
        train(arguments, variant, seed)
    return first + others


def announced(runs: list[tuple[Variant, str]], kind: str) -> Iterator[tuple[Variant, str]]:
    """Yield the runs, saying before each which it is and about how long all will take."""
    started = time.perf_counter()
    for number, (variant, seed) in enumerate(runs):
        elapsed = (time.perf_counter() - started) / 60
        left = f", about {elapsed / number * (len(runs) - number):.0f} minutes left" if number else ""
        logger.info("%s run %d of %d: %s, seed %s%s", kind, number + 1, len(runs), variant.name, seed, left)
        yield variant, seed


# Measurements ------------------------------------------------------------------------------------------------------


def measure(
    arguments: CompareArguments, variant: Variant, seed: str, pairs: tuple[list[str], list[str]], bleu_tokenize: str
) -> dict[str, Any]:
    """Return one line of the comparison: sizes, speeds, memory, and scores with intervals.

    Args:
        arguments: Where the runs are.
        variant: What was trained.
        seed: With which seed.
        pairs: Sources and references of the test.
        bleu_tokenize: sacreBLEU's tokenizer.
    """
    run = run_folder(arguments, variant, seed)
    results, record = (json.loads((run / name).read_text("utf-8")) for name in ("results.json", "run.json"))
    config = record["resolved"]["model"]
    decoded = decode(run, pairs, bleu_tokenize, arguments.num_bootstrap)
    sizes = {name: config[name] for name in ("d_model", "d_ff", "encoder_layers", "decoder_layers")}
    return {
        "variant": variant.name,
        "seed": int(seed),
        **sizes,
        "parameter_sharing": config["parameter_sharing"],
        "num_unique_layers": config["num_unique_layers"] if config["parameter_sharing"] != "none" else None,
        "sharing_order": config["sharing_order"] if config["parameter_sharing"] != "none" else None,
        "parameters": results["parameters"],
        "file_bytes": (run / "best" / "model.safetensors").stat().st_size,
        "peak_memory_bytes": results["peak_memory_bytes"],
        "updates": results["updates"],
        "minutes": results["minutes"],
        "target_tokens_per_second": results["target_tokens_per_second"],
        **decoded,
    }


def decode(run: Path, pairs: tuple[list[str], list[str]], bleu_tokenize: str, num_bootstrap: int) -> dict[str, Any]:
    """Translate the test with the best model of a run; return speed and scores, with 95 % intervals.

    It is translated `DECODING_PASSES` times; the speed is that of the median.
    """
    file, sources, references = run / "decoding.json", *pairs
    inputs = {"num_bootstrap": num_bootstrap, "bleu_tokenize": bleu_tokenize, "pairs": len(sources)}
    inputs["digest"] = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    try:
        known = json.loads(file.read_text("utf-8"))
        if known["inputs"] == inputs:
            return known["measured"]
    except (FileNotFoundError, KeyError, ValueError):
        pass  # not measured yet, or otherwise
    model, tokenizer = load(str(run / "best"))
    search = model.search_options()
    translate_all(model, tokenizer, sources[:64], search)  # the first batch of a process is slower
    seconds = []
    for _ in range(DECODING_PASSES):
        started = time.perf_counter()
        translations = translate_all(model, tokenizer, sources, search, progress="Decoding")
        seconds.append(time.perf_counter() - started)
    metric = TranslationMetric(bleu_tokenize)
    scores = metric.compute(predictions=translations, references=references)
    measured = {
        "sentences_per_second": len(sources) / statistics.median(seconds),
        "loss": _final_scores(run)["loss"],
        **{name: scores[name] for name in ("bleu", "chrf", "exact_match", "bleu_signature", "chrf_signature")},
        **intervals(metric, translations, references, num_bootstrap),
    }
    write_json(file, {"inputs": inputs, "measured": measured})
    return measured


def _final_scores(run: Path) -> dict[str, Any]:
    results = json.loads((run / "results.json").read_text("utf-8"))
    return results["test"] if "test" in results else results["validation"]


def intervals(
    metric: TranslationMetric, translations: Sequence[str], references: Sequence[str], num_bootstrap: int
) -> dict[str, float]:
    """Return the ends of 95 % bootstrap intervals of BLEU and chrF over the lines of the test.

    Lines are drawn with replacement; what a score needs to know of a line is counted once (sacreBLEU's statistics).
    """
    generator = np.random.default_rng(0)
    draws = generator.integers(len(references), size=(num_bootstrap, len(references)))
    ends = {}
    for name, scorer in (("bleu", metric.bleu), ("chrf", metric.chrf)):
        lines = np.array(scorer._extract_corpus_statistics(list(translations), [list(references)]))
        scores = [min(100.0, float(scorer._aggregate_and_compute(lines[rows]).score)) for rows in draws]
        ends[f"{name}_low"], ends[f"{name}_high"] = (float(end) for end in np.percentile(scores, (2.5, 97.5)))
    return ends


# The command -------------------------------------------------------------------------------------------------------


def claim_folder(arguments: CompareArguments) -> None:
    """Refuse to mix runs of different recipes in one folder.

    Raises:
        ValueError: If the folder holds a comparison on another base or with other arguments.
    """
    file = Path(arguments.output_dir) / "comparison.json"
    recipe = {"base": Path(arguments.base).read_text(encoding="utf-8"), "arguments": arguments.arguments}
    if file.exists() and json.loads(file.read_text("utf-8")) != recipe:
        raise ValueError(
            f"{arguments.output_dir} holds a comparison with another base or other arguments: use another output_dir"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, recipe)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; return the exit code: 1 if something failed or the unshared model was too weak for a comparison."""
    (options,) = parse_dataclasses((CompareArguments,), arguments, description="Compare ways of sharing parameters.")
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logger.setLevel(logging.INFO)
    transformers.utils.logging.disable_progress_bar()
    try:
        kinds = (ModelArguments, DataArguments, RecipeArguments)
        flags = ["--config", options.base, *shlex.split(options.arguments)]
        model, data, recipe = parse_dataclasses(kinds, flags, description="")
        if model.parameter_sharing not in (None, "none"):
            raise ValueError(f"base: parameter_sharing ({model.parameter_sharing}) must be none, it is compared with")
        splits = load_pairs(data, SPLITS[1:], streaming=data.streaming)
        if "test" not in splits and "validation" not in splits:
            raise ValueError("base: there is neither test nor validation data to compare on")
        split = "test" if "test" in splits else "validation"
        # Everything but the size of the vocabulary is known already, and so is what cannot be compared.
        variants_of(VanillaTrmConfig(vocab_size=data.vocab_size, **model.given()), options)
        claim_folder(options)
        trained = train_all(options)
        pairs = list(splits[split]["source"]), list(splits[split]["target"])
        rows = [measure(options, variant, seed, pairs, recipe.bleu_tokenize) for variant, seed in trained]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: a run failed, and the same command tries it again: {shlex.join(error.cmd)}", file=sys.stderr)
        return 1
    reached = [row["exact_match"] for row in rows if row["variant"] == UNSHARED.name]
    is_fair = sum(reached) / len(reached) >= options.min_exact_match
    folder = Path(options.output_dir)
    curves = {(variant.name, int(seed)): run_folder(options, variant, seed) for variant, seed in trained}
    print(write_report(folder, rows, curves, dataclasses.asdict(options), split=split, is_fair=is_fair))
    if not is_fair:
        print(
            f"error: the unshared model reached {sum(reached) / len(reached):.1f} % exact match, and not "
            f"{options.min_exact_match} %: this compares nothing",
            file=sys.stderr,
        )
    return 0 if is_fair else 1


if __name__ == "__main__":
    sys.exit(main())
