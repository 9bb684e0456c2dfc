"""The card of a published model: `model_card.md` at the top of the clone, filled from what its run recorded."""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from babel import Locale
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import GenerationConfig

from training.lines import read_lines
from training.run_log import weights_digest
from training.scoring import LABELS, data_of, describe, markdown_table, read_result

CARD = Path(__file__).parent.parent / "model_card.md"
METRICS = {"bleu": "BLEU", "chrf": "chrF", "exact_match": "exact match"}
RECIPE = [
    "seed",
    "optim",
    "lr_scheduler_type",
    "warmup_steps",
    "cooldown_steps",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "label_smoothing",
    "label_smoothing_factor",
    "ema_decay",
    "bpe_dropout",
    "max_length_ratio",
    "max_grad_norm",
    "batch_tokens",
    "per_device_train_batch_size",
    "train_sampling_strategy",
    "gradient_accumulation_steps",
    "num_processes",
]
"""Arguments that the card shows, as far as the run has them: `training.train` and `training.finetune` differ."""
LORA = ["lora_rank", "lora_alpha", "lora_dropout"]
"""Arguments that are shown where adapters were trained."""
OPTIONS = {"language": "--language", "datasets": "--datasets", "license": "--license", "commit": "--commit"}
"""Options that fill a hole of the card when the run cannot."""
OPTIONAL = {"scored"}
"""Holes that may stay empty."""


# What the run recorded ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A finished training run.

    Attributes:
        model: The folder of the model to publish: best/, or a mean of checkpoints.
        record: run.json.
        results: results.json, with the scores of best/.
        average: average.json of a mean of checkpoints; None of best/.
        examples: Some lines of its test or validation data: source, the model's translation, reference.
    """

    model: Path
    record: dict[str, Any]
    results: dict[str, Any]
    average: dict[str, Any] | None
    examples: list[tuple[str, str, str]]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the run, by name."""
        return self.record["arguments"]

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """The run's own scores of the model by split, test before validation; a mean of checkpoints has none."""
        if self.average:
            return {}
        return {split: self.results[split] for split in ("test", "validation") if split in self.results}

    @property
    def weights(self) -> str | None:
        """The digest of the weights that the run or the averaging recorded."""
        return (self.average or self.results).get("weights")

    @property
    def began_with_weights(self) -> bool:
        """Whether it began with the weights of another model: in `training.finetune`, or by `--initial_weights`."""
        if "model" in self.arguments:
            return not self.arguments["from_scratch"]
        return self.arguments.get("initial_weights") is not None

    @property
    def decoding(self) -> GenerationConfig:
        """How the model decodes, which is how it was scored."""
        return GenerationConfig.from_pretrained(self.model)


def read_run(folder: Path) -> Run:
    """Read a run from its folder, from that of its best model, or from that of a mean of its checkpoints.

    Raises:
        FileNotFoundError: If there is no such folder, or no finished run.
        ValueError: If the results are not this model's, or it is no mean of this run's checkpoints.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"model ({folder}) is not a folder")
    folder = folder.resolve()
    run = folder if (folder / "run.json").exists() else folder.parent
    for name in ("run.json", "results.json"):
        if not (run / name).exists():
            raise FileNotFoundError(f"there is no {name} in {run}: give the folder of a finished run, or its best/")
    average = read_average(folder) if folder not in (run, run / "best") else None
    record, results = (json.loads((run / name).read_text("utf-8")) for name in ("run.json", "results.json"))
    if results["command"] != record["sessions"][-1]["command"]:
        raise ValueError(f"results.json in {run} was not written by the run that run.json describes")
    columns = []
    for name in ("source", "translation", "reference"):
        if (run / f"examples.{name}.txt").exists():
            with (run / f"examples.{name}.txt").open("rb") as file:
                columns.append(list(read_lines(file, f"examples.{name}.txt")))
    examples = list(zip(*columns, strict=True)) if len(columns) == 3 else []
    return Run(folder if average else run / "best", record, results, average, examples)


def read_average(folder: Path) -> dict[str, Any]:
    """Read average.json, which `training.average_checkpoints` writes.

    Raises:
        ValueError: If there is none, or it names checkpoints of another run than that around the folder.
    """
    run, file = folder.parent, folder / "average.json"
    if not file.exists():
        raise ValueError(
            f"the results in {run} are those of best/, not of {folder.name}/: publish {run / 'best'}, or what "
            "training.average_checkpoints has written there"
        )
    average = json.loads(file.read_text("utf-8"))
    if others := [name for name in average["checkpoints"] if not name.startswith("checkpoints/")]:
        raise ValueError(f"{folder} is no mean of checkpoints of this run: it has {others[0]} in it")
    return average


def read_scored(run: Run, files: Sequence[Path]) -> list[dict[str, Any]]:
    """Read what `training.score` wrote about the model of a run.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If it is no such file, its scores are of other weights, or two are on data of the same name.
    """
    results = [read_result(file) for file in files]
    weights = weights_digest(run.model)
    for file, result in zip(files, results, strict=True):
        if result["model"]["weights"] != weights:
            raise ValueError(f"the scores in {file} are of other weights than those in {run.model}")
    names = [data_of(result) for result in results]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"scores: two files are of data of one name, {twice[0]}, and no reader could tell which is which"
        )
    return results


# The card ----------------------------------------------------------------------------------------------------------


def render_card(run: Run, options: argparse.Namespace) -> ModelCard:
    """Fill the template.

    Raises:
        ValueError: If it has a hole that neither the run nor an option fills, or asks for a result that there is not.
    """
    try:
        values = card_values(run, options)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the run did not record all that the card needs: {error} is missing") from error
    text = CARD.read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    try:
        holes = jinja2.meta.find_undeclared_variables(environment.parse(text))
        optional = OPTIONAL | ({"results", "signatures"} if run.average else set())
        empty = [hole for hole in (*OPTIONS, *sorted(holes - optional)) if values.get(hole) in (None, "", [])]
        # What an option fills comes first: without it, other holes have nothing to be filled with.
        if named := [f"{hole} (give {OPTIONS[hole]})" for hole in empty if hole in OPTIONS] or empty:
            raise ValueError(f"{CARD.name} has holes that this run does not fill: {', '.join(dict.fromkeys(named))}")
        return ModelCard(environment.from_string(text).render(values))
    except jinja2.TemplateError as error:
        raise ValueError(f"{CARD.name}: {error}") from error


def card_values(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Return all that a card can say, by the names of the template's holes; None where nobody knows."""
    arguments, results, config = run.arguments, run.results, run.record["resolved"]["model"]
    scored = read_scored(run, options.scores)
    if run.average and not scored:
        raise ValueError(
            f"the scores in results.json are those of best/: give scores of the average itself, --scores FILE, that "
            f"`python -m training.score --model {run.model} ... --output FILE` writes"
        )
    languages = options.language or languages_of(arguments)
    datasets = options.datasets or datasets_of(arguments)
    base_model = (options.base_model or run.record["resolved"].get("base_model")) if run.began_with_weights else None
    values = {
        "repo": options.repo,
        "name": options.repo.split("/")[1],
        "architecture": architecture_of(config),
        "language": languages,
        "datasets": datasets,
        "license": options.license,
        "commit": f"commit {options.commit}" if options.commit else commits_of(run),
        "hardware": hardware_of(run),
        "versions": versions_of(run),
        "recipe": recipe_of(run),
        "choice": choice_of(run),
        "decoding": decoding_of(run),
        "base_model": base_model,
        "origin": origin_of(run, base_model),
        "scored": "\n\n".join(map(describe, scored)),
        "results": None,
        "signatures": None,
        "method": method_of(run),
        **{name: f"{results[name]:,}" for name in ("parameters", "updates", "epochs", "target_tokens", "minutes")},
        "max_source_length": arguments["max_source_length"],
        **{name: config[name] for name in ("d_model", "d_ff", "num_attention_heads", "vocab_size")},
        **{name: config[name] for name in ("encoder_layers", "decoder_layers")},
    }
    if run.scores:
        values |= {"results": results_table(run), "signatures": signatures_of(run), "scores": run.scores}
    if languages:
        names = [Locale("en").languages.get(code, code) for code in languages]
        values["source_language"], values["target_language"] = names
        values["example"], values["translation"] = example_of(run)
    if languages and datasets:
        values["training_data"] = training_data_of(arguments, datasets)
        values["metadata"] = metadata(run, values, scored).to_yaml()
    return values


def metadata(run: Run, values: dict[str, Any], scored: Sequence[dict[str, Any]]) -> ModelCardData:
    """Return the Hub's metadata; its model-index holds the scores of results.json and `scored`, with all digits."""
    arguments = run.arguments
    task = f"Translation from {values['source_language']} to {values['target_language']}"
    results = [
        EvalResult(
            task_type="translation",
            task_name=task,
            dataset_type=values["datasets"][0],
            dataset_name=dataset_name_of(arguments, values["datasets"], split),
            dataset_config=arguments["dataset_config_name"],
            dataset_split=arguments[f"{split}_split"] if arguments["dataset_name"] else split,
            metric_type=metric,
            metric_name=METRICS[metric],
            metric_value=scores[metric],
            metric_args={"signature": scores[f"{metric}_signature"]} if f"{metric}_signature" in scores else None,
        )
        for split, scores in run.scores.items()
        for metric in METRICS
    ]
    results += [
        EvalResult(
            task_type="translation",
            task_name=task,
            dataset_type=data_of(result),
            dataset_name=data_of(result),
            metric_type=metric,
            metric_name=LABELS.get(metric, metric),
            metric_value=score["score"],
            metric_args={"signature": score["signature"]} if score["signature"] else None,
        )
        for result in scored
        for metric, score in result["scores"].items()
    ]
    return ModelCardData(
        language=list(dict.fromkeys(values["language"])),
        license=values["license"],
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla_trm", "hf_vanilla_trm", "attention-is-all-you-need"],
        datasets=values["datasets"],
        metrics=list(
            dict.fromkeys(
                [*(METRICS if run.scores else ()), *(metric for result in scored for metric in result["scores"])]
            )
        ),
        model_name=values["name"],
        base_model=values["base_model"],
        eval_results=results,
    )


def languages_of(arguments: dict[str, Any]) -> list[str] | None:
    """Return the languages of source and target, where corpus, file suffixes or columns are called by their codes."""
    if arguments["embedded_corpus"]:
        return arguments["embedded_corpus"].split("-")
    if arguments["train_source"]:
        names = [Path(arguments[f"train_{side}"]).suffix for side in ("source", "target")]
    else:
        names = [arguments[f"{side}_column"] for side in ("source", "target")]
    codes = [name.rpartition(".")[2] for name in names]
    known = Locale("en").languages
    return codes if all(len(code) == 2 and code in known for code in codes) else None


def datasets_of(arguments: dict[str, Any]) -> list[str] | None:
    """Return the data set's id, where the run's data has one."""
    if arguments["embedded_corpus"]:
        return ["unicode-cldr"]
    name = arguments["dataset_name"]
    is_id = name is not None and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) and not Path(name).exists()
    return [name] if is_id else None  # a folder of this machine has no name that others know


def dataset_name_of(arguments: dict[str, Any], datasets: Sequence[str], split: str) -> str:
    """Return what a reader calls the data of a split."""
    if arguments["embedded_corpus"]:
        return f"Unicode CLDR, {arguments['embedded_corpus']}"
    files = [arguments[f"{split}_{kind}"] for kind in ("source", "target", "file")]
    names = ", ".join(Path(file).name for file in files if file)
    return f"{datasets[0]} ({names})" if names else datasets[0]


def training_data_of(arguments: dict[str, Any], datasets: Sequence[str]) -> str:
    """Return a sentence about the training data, without the paths of the machine that trained."""
    if arguments["embedded_corpus"]:
        return (
            "Dates, times, numbers and quantities, generated from Unicode CLDR: the corpus "
            f"`{arguments['embedded_corpus']}` of hf_vanilla_trm. Its held-out lines share no source with the others."
        )
    links = ", ".join(f"[{name}](https://huggingface.co/datasets/{name})" if "/" in name else name for name in datasets)
    columns = f"columns `{arguments['source_column']}` and `{arguments['target_column']}`"
    if arguments["dataset_name"]:
        config = f", configuration `{arguments['dataset_config_name']}`" if arguments["dataset_config_name"] else ""
        return f"{links}{config}, split `{arguments['train_split']}`, {columns}."
    if arguments["train_file"]:
        return f"{links}: `{Path(arguments['train_file']).name}`, {columns}."
    source, target = (Path(arguments[f"train_{side}"]).name for side in ("source", "target"))
    return f"{links}: the aligned files `{source}` and `{target}`."


def example_of(run: Run) -> tuple[str, str]:
    """Return a source and its translation as Python writes them: one that is right, where there is one.

    Raises:
        ValueError: If the run translated no example.
    """
    filled = [example for example in run.examples if example[0].strip()]
    if not filled:
        raise ValueError(
            "the run has no example to show: num_samples was 0, or it had neither validation nor test data"
        )
    right = [example for example in filled if example[1] == example[2]]
    source, translation, _ = (right or filled)[0]
    return repr(source), repr(translation)


def choice_of(run: Run) -> str:
    """Return which of the run's models this is."""
    if run.average:
        names = [name.removeprefix("checkpoints/") for name in run.average["checkpoints"]]
        return f"whose weights are the mean of {len(names)} checkpoints ({', '.join(names)})"
    best = run.results["best"]["update"]
    decay = run.arguments.get("ema_decay")
    average = f", as a moving average of the weights (decay {decay})" if decay else ""
    if "validation" not in run.results or best is None:
        return f"of its last update{average}"
    metric, arguments = run.arguments["metric_for_best_model"], run.arguments
    lines = min(arguments.get("eval_max_rows") or sys.maxsize, run.results["validation"]["lines"])
    beams = arguments.get("eval_beams") or arguments.get("generation_num_beams") or run.decoding.num_beams or 1
    how = "" if metric == "loss" else f" ({lines} lines, {'greedy' if beams == 1 else f'{beams} beams'})"
    return f"of update {best}, which had the best validation {metric} during training{how}{average}"


def decoding_of(run: Run) -> str:
    """Return how the results were decoded."""
    beams, penalty = run.decoding.num_beams or 1, run.decoding.length_penalty
    if beams == 1:
        return "greedily"
    return f"with {beams} beams and the paper's length penalty of alpha {0.6 if penalty is None else penalty}"


def architecture_of(config: dict[str, Any]) -> str:
    """Return what the model is, and where it differs from the paper's."""
    parts = ["an encoder-decoder with LayerNorm after every residual sum and sinusoidal positions"]
    shared, tied = config["share_encoder_decoder_embeddings"], config["tie_word_embeddings"]
    matrices = {
        (True, True): "one embedding matrix for source, target and output",
        (True, False): "one embedding matrix for source and target, and another for the output",
        (False, True): "one embedding matrix for the source, and another for target and output",
        (False, False): "embedding matrices of their own for source, target and output",
    }
    parts.append(matrices[shared, tied])
    if config["embedding_size"] not in (None, config["d_model"]):
        parts.append(f"embeddings of width {config['embedding_size']}")
    if config["parameter_sharing"] != "none":
        what = {
            "all": "all parameters",
            "attention": "the attention's parameters",
            "ffn": "the feed-forward's parameters",
        }
        unique = config["num_unique_layers"]
        order = f", order {config['sharing_order']}" if unique > 1 else ""
        shared_parameters = what[config["parameter_sharing"]]
        parts.append(f"{shared_parameters} shared across layers ({unique} distinct in each stack{order})")
    biases = {"attention_bias": "the attention's projections", "output_bias": "the output"}
    if names := [words for name, words in biases.items() if config[name]]:
        parts.append(f"biases on {' and '.join(names)}")
    if config["activation_function"] != "relu":
        parts.append(f"{config['activation_function']} in place of ReLU")
    if not config["scale_embedding"]:
        parts.append("embeddings that are not scaled")
    return "; ".join(parts)


def origin_of(run: Run, base_model: str | None) -> str:
    """Return what the weights were before the training, without the paths of the machine that trained."""
    if not run.began_with_weights:
        return "trained from scratch with hf_vanilla_trm"
    how = "fine-tuned" if "model" in run.arguments else "trained further"
    base = f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "a local model"
    return f"{how} with hf_vanilla_trm from {base}"


def method_of(run: Run) -> str:
    """Return what was trained, and by which program."""
    if "model" not in run.arguments:
        cooldown = ", then a linear cooldown" if run.arguments["cooldown_steps"] else ""
        return f"Adam with linear warm-up and inverse square root decay{cooldown}, on batches of tokens."
    if rank := run.arguments["lora_rank"]:
        trained = f"{run.results['trained_parameters']:,}"
        return (
            f"Hugging Face's Trainer. Only adapters (LoRA of rank {rank} on the query and value projections, {trained} "
            "parameters) were trained, then merged into the weights."
        )
    return "Hugging Face's Trainer, on all weights."


def recipe_of(run: Run) -> str:
    """Return the recipe as a table."""
    config, session = run.record["resolved"]["model"], run.record["sessions"][-1]
    rows = {"peak learning rate": f"{run.record['resolved']['peak_learning_rate']:.3g}"}
    names = RECIPE + (LORA if run.arguments.get("lora_rank") else [])
    rows |= {name: run.arguments[name] for name in names if name in run.arguments}
    rows |= {name: config[name] for name in ("dropout", "attention_dropout", "activation_dropout", "parameter_sharing")}
    rows |= {"mixed_precision": session["mixed_precision"], "stopped": run.results["stopped"]}
    return markdown_table(("argument", "value"), rows.items())


def results_table(run: Run) -> str:
    """Return the scores as a table.

    Raises:
        ValueError: If a score is not a finite number.
    """
    columns = METRICS | {"loss": "loss", "perplexity": "perplexity"}
    for split, scores in run.scores.items():
        for name in columns:
            if not isinstance(scores[name], int | float) or not math.isfinite(scores[name]):
                raise ValueError(f"the run has no result for {name} on {split}: results.json says {scores[name]}")
    rows = [
        (split, f"{scores['lines']:,}", *(f"{scores[name]:.2f}" for name in columns))
        for split, scores in run.scores.items()
    ]
    return markdown_table(("split", "lines", *columns.values()), rows)


def signatures_of(run: Run) -> str:
    """Return sacreBLEU's signatures."""
    scores = next(iter(run.scores.values()))
    return f"BLEU is `{scores['bleu_signature']}`, chrF is `{scores['chrf_signature']}`."


def hardware_of(run: Run) -> str:
    """Return a line about the machine, or several where the run was continued elsewhere."""
    lines = []
    for session in run.record["sessions"]:
        hardware, processes = session["hardware"], session["num_processes"]
        device = f"{hardware['device_name']}, " if hardware["device_name"] else ""
        cpu = f"{hardware['cpu']}, {hardware['torch_threads']} of {hardware['cpu_count']} threads"
        lines.append(f"{device}{cpu}, {processes} process{'es' if processes > 1 else ''}.")
    return "\n\n".join(dict.fromkeys(lines))


def versions_of(run: Run) -> str:
    """Return the libraries that the last session used."""
    versions = run.record["sessions"][-1]["versions"]
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def commits_of(run: Run) -> str | None:
    """Return the commits of the training code, or None if a session did not know its own."""
    commits = [session["git"] for session in run.record["sessions"]]
    if not all(commits):
        return None
    lines = (f"commit {git['commit']}{' with uncommitted changes' if git['dirty'] else ''}" for git in commits)
    return ", then ".join(dict.fromkeys(lines))
