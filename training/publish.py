"""Publish a trained model on the Hub: `python -m training.publish --model DIR --repo USER/NAME`.

The model's folder goes up in one commit, with a card (`model_card.md` at the top of the clone) that is filled from what
the run recorded; then it is loaded back and compared. An interrupted upload is repeated by the same command: nothing
is visible before the commit, and what has been uploaded already is not sent again. The token is that of the environment
(HF_TOKEN) or of `hf auth login`.
"""

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import torch
import transformers
from babel import Locale
from huggingface_hub import (
    CommitOperationAdd,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
    constants,
    get_token,
)
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import httpx, validate_repo_id
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from training.lines import read_lines
from training.translate import decoding_config, load, translate_all

CARD = Path(__file__).parent.parent / "model_card.md"
METRICS = {"bleu": "BLEU", "chrf": "chrF", "exact_match": "exact match"}
RECIPE = (
    *("seed", "warmup_steps", "cooldown_steps", "adam_beta1", "adam_beta2", "adam_epsilon", "label_smoothing"),
    *("max_grad_norm", "batch_tokens", "gradient_accumulation_steps", "num_processes"),
)
"""Arguments that the card shows, besides those that the model's config or the sessions resolve."""
OPTIONS = {"language": "--language", "datasets": "--datasets", "license": "--license", "commit": "--commit"}
"""Options that fill a hole of the card when the run cannot."""


# What the run recorded ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A finished training run.

    Attributes:
        model: The folder of its best model, which the results are of.
        record: run.json.
        results: results.json.
        examples: Some source lines of its test or validation data.
    """

    model: Path
    record: dict[str, Any]
    results: dict[str, Any]
    examples: list[str]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the run, by name."""
        return self.record["arguments"]

    @property
    def scores(self) -> dict[str, dict[str, Any]]:
        """The scores by split, test before validation."""
        return {split: self.results[split] for split in ("test", "validation") if split in self.results}


def read_run(folder: Path) -> Run:
    """Read a run from its folder or from that of its best model.

    Raises:
        FileNotFoundError: If there is no such folder, or no finished run.
        ValueError: If the results are not this model's, or the folder is not one that strangers can load.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"model ({folder}) is not a folder")
    folder = folder.resolve()
    run = folder if (folder / "run.json").exists() else folder.parent
    for name in ("run.json", "results.json"):
        if not (run / name).exists():
            raise FileNotFoundError(f"there is no {name} in {run}: give the folder of a finished run, or its best/")
    if folder not in (run, run / "best"):
        raise ValueError(f"the results in {run} are those of best/, not of {folder.name}/: publish {run / 'best'}")
    record, results = (json.loads((run / name).read_text("utf-8")) for name in ("run.json", "results.json"))
    if results["command"] != record["sessions"][-1]["command"]:
        raise ValueError(f"results.json in {run} was not written by the run that run.json describes")
    examples = []
    if (run / "examples.source.txt").exists():
        with (run / "examples.source.txt").open("rb") as file:
            examples = list(read_lines(file, "examples.source.txt"))
    check_code(run / "best")
    return Run(run / "best", record, results, examples)


def check_code(model: Path) -> None:
    """Make sure that the folder holds the code that its config names.

    Raises:
        ValueError: If it does not: nobody could load it with `trust_remote_code`.
    """
    auto_map = json.loads((model / "config.json").read_text("utf-8")).get("auto_map")
    files = {f"{reference.partition('.')[0]}.py" for reference in (auto_map or {}).values()}
    missing = sorted(name for name in files if not (model / name).exists())
    if missing or not auto_map:
        raise ValueError(
            f"{model} lacks {', '.join(missing) or 'auto_map in its config.json'}, so it could not be loaded with "
            "trust_remote_code: load it and save it again with this version of hf_vanilla_trm"
        )


def read_model(run: Run) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model that will be published.

    Raises:
        OSError: If it cannot be loaded.
        ValueError: If it has another number of parameters than the results say.
    """
    model, tokenizer = load(str(run.model), "cpu")
    if model.num_parameters() != run.results["parameters"]:
        raise ValueError(
            f"{run.model} has {model.num_parameters()} parameters, but the results are those of a model of "
            f"{run.results['parameters']}"
        )
    return model, tokenizer


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
        empty = [hole for hole in (*OPTIONS, *sorted(holes)) if values.get(hole) in (None, "", [])]
        # What an option fills comes first: without it, other holes have nothing to be filled with.
        if named := [f"{hole} (give {OPTIONS[hole]})" for hole in empty if hole in OPTIONS] or empty:
            raise ValueError(f"{CARD.name} has holes that this run does not fill: {', '.join(dict.fromkeys(named))}")
        return ModelCard(environment.from_string(text).render(values))
    except jinja2.TemplateError as error:
        raise ValueError(f"{CARD.name}: {error}") from error


def card_values(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Return all that a card can say, by the names of the template's holes; None where nobody knows."""
    arguments, results, config = run.arguments, run.results, run.record["resolved"]["model"]
    languages = options.language or languages_of(arguments)
    datasets = options.datasets or datasets_of(arguments)
    values = {
        "repo": options.repo,
        "name": options.repo.split("/")[1],
        "language": languages,
        "datasets": datasets,
        "license": options.license,
        "commit": f"commit {options.commit}" if options.commit else commits_of(run),
        "hardware": hardware_of(run),
        "versions": versions_of(run),
        "recipe": recipe_of(run),
        "choice": choice_of(run),
        "decoding": decoding_of(arguments),
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
        filled = [line for line in run.examples if line.strip()]
        values["example"] = repr(filled[0] if filled else f"A sentence in {names[0]}.")
    if languages and datasets:
        values["training_data"] = training_data_of(arguments, datasets)
        values["metadata"] = metadata(run, values).to_yaml()
    return values


def metadata(run: Run, values: dict[str, Any]) -> ModelCardData:
    """Return the Hub's metadata; its model-index holds the scores of results.json, with all their digits."""
    arguments = run.arguments
    results = [
        EvalResult(
            task_type="translation",
            task_name=f"Translation from {values['source_language']} to {values['target_language']}",
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
    return ModelCardData(
        language=list(dict.fromkeys(values["language"])),
        license=values["license"],
        library_name="transformers",
        pipeline_tag="translation",
        tags=["vanilla_trm", "hf_vanilla_trm", "attention-is-all-you-need"],
        datasets=values["datasets"],
        metrics=list(METRICS),
        model_name=values["name"],
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
    return [arguments["dataset_name"]] if arguments["dataset_name"] else None


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


def choice_of(run: Run) -> str:
    """Return which of the run's models this is."""
    if "validation" not in run.results:
        return "of its last update"
    best = run.results["best"]["update"]
    return f"of update {best}, which had the best validation {run.arguments['metric_for_best_model']}"


def decoding_of(arguments: dict[str, Any]) -> str:
    """Return how the results were decoded."""
    if arguments["num_beams"] == 1:
        return "greedily"
    return f"with {arguments['num_beams']} beams and length penalty {arguments['length_penalty']} (Hugging Face's form)"


def recipe_of(run: Run) -> str:
    """Return the recipe as a table."""
    config, session = run.record["resolved"]["model"], run.record["sessions"][-1]
    rows = {"peak learning rate": f"{run.record['resolved']['peak_learning_rate']:.3g}"}
    rows |= {name: run.arguments[name] for name in RECIPE}
    rows |= {name: config[name] for name in ("dropout", "attention_dropout", "activation_dropout", "parameter_sharing")}
    rows |= {"mixed_precision": session["mixed_precision"], "stopped": run.results["stopped"]}
    return _table(("argument", "value"), rows.items())


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
    rows = [(split, *(f"{scores[name]:.2f}" for name in columns)) for split, scores in run.scores.items()]
    return _table(("split", *columns.values()), rows)


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


def _table(header: Sequence[str], rows: Any) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


# The upload --------------------------------------------------------------------------------------------------------


def files_of(model: Path) -> dict[str, Path]:
    """Return the files to upload by their path in the repository; the card comes on top."""
    paths = {path.relative_to(model).as_posix(): path for path in sorted(model.rglob("*")) if path.is_file()}
    left_out = re.compile(r"README\.md|(.*/)?(\.|__pycache__/).*")
    return {name: path for name, path in paths.items() if not left_out.fullmatch(name)}


def upload(files: dict[str, Path], card: ModelCard, options: argparse.Namespace) -> str:
    """Upload everything in one commit; return its id.

    Raises:
        OSError: If the Hub refuses; the message says what to do.
        ValueError: If the repository is public and was to be private.
    """
    if (token := get_token()) is None:
        raise OSError("there is no token: set HF_TOKEN, or run `hf auth login`")
    if not re.fullmatch("[!-~]+", token):  # the HTTP client would quote it in its own message
        raise OSError("the token has characters that no token has: look at HF_TOKEN, or run `hf auth login` again")
    api = HfApi()
    try:
        api.whoami()
        if options.revision not in (None, "main"):
            api.model_info(options.repo, revision=options.revision)  # it must exist, and so must the repository
        else:
            api.create_repo(options.repo, private=options.private or None, exist_ok=True)
        if options.private and not api.model_info(options.repo).private:
            raise ValueError(f"{options.repo} is there already, and public: --private cannot hide it")
        additions = [CommitOperationAdd(name, path) for name, path in files.items()]
        additions.append(CommitOperationAdd("README.md", str(card).encode()))
        commit = api.create_commit(
            options.repo,
            additions,
            commit_message="Publish a model trained with hf_vanilla_trm",
            revision=options.revision,
        )
    except (HfHubHTTPError, httpx.HTTPError, OfflineModeIsEnabled, RuntimeError) as error:
        raise OSError(explain(error, options)) from error
    return commit.oid


def explain(error: Exception, options: argparse.Namespace) -> str:
    """Return what an error of the client means, and what helps."""
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{options.repo} has no revision {options.revision}: give a branch or the ref of a pull request, or make a "
            f"branch with `hf repos branch create {options.repo} {options.revision}`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no repository {options.repo} that this token may see"
    if isinstance(error, RuntimeError):  # what uploading a large file makes of any error
        return f"{error} {error.__cause__ or ''}. The same command can be repeated"
    if not isinstance(error, HfHubHTTPError):
        return f"the Hub at {constants.ENDPOINT} cannot be reached: {error}. The same command can be repeated"
    reasons = {
        401: "the Hub does not know this token: look at HF_TOKEN, or run `hf auth login` again",
        403: f"this token has no permission to write to {options.repo}: {error.server_message or error}",
    }
    return reasons.get(error.response.status_code, f"the Hub refused: {error}. The same command can be repeated")


def verify(
    run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace, commit: str
) -> None:
    """Load the commit back, from the Hub and not from a cache, and compare it with the model that was published.

    Raises:
        OSError: If it cannot be loaded.
        ValueError: If a weight or a translation differs.
    """
    with tempfile.TemporaryDirectory() as cache:
        source = {"revision": commit, "cache_dir": cache}
        published = AutoModelForSeq2SeqLM.from_pretrained(options.repo, **source).eval()
        published_tokenizer = AutoTokenizer.from_pretrained(options.repo, **source)
        tensors, others = model.state_dict(), published.state_dict()
        different = sorted(tensors.keys() ^ others.keys())
        different += [name for name in tensors if name in others and not torch.equal(tensors[name], others[name])]
        if different:
            raise ValueError(f"{different[0]} is not that of {run.model}")
    lines = run.examples[:3]
    translations = translate_all(model, tokenizer, lines, decoding_config(model))
    if translate_all(published, published_tokenizer, lines, decoding_config(published)) != translations:
        raise ValueError(f"it does not translate like {run.model}")


def show(files: dict[str, Path], card: ModelCard, options: argparse.Namespace) -> None:
    """Print what goes where."""
    sizes = {name: path.stat().st_size for name, path in files.items()} | {"README.md": len(str(card).encode())}
    visibility = "private" if options.private else "public"
    print(f"{options.repo} ({visibility} if it is new), revision {options.revision or 'main'}, one commit of")
    for name, size in sorted(sizes.items()):
        print(f"{size:>12,} bytes  {name}")


# The command -------------------------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Publish a trained model on the Hub.", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="folder of a finished run, or its best/")
    parser.add_argument("--repo", type=_repo, required=True, help="USER/NAME on the Hub; made if it is not there")
    parser.add_argument("--private", action="store_true", help="make the repository private if it is new")
    parser.add_argument("--revision", help="branch, or ref of a pull request, to commit to (default: main)")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="show files and card; upload nothing")
    parser.add_argument("--license", help="licence of the weights, as the Hub names it: apache-2.0, cc-by-4.0, ...")
    parser.add_argument(
        "--language", nargs=2, metavar=("SOURCE", "TARGET"), help="codes of the languages, such as en de"
    )
    parser.add_argument("--datasets", nargs="+", metavar="ID", help="Hub ids or names of the training data")
    parser.add_argument("--commit", help="commit of the training code, where the run did not know it")
    return parser.parse_args(arguments)


def _repo(text: str) -> str:
    try:
        validate_repo_id(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if "/" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} must have the form USER/NAME")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish; return the exit code."""
    options = parse_arguments(arguments)
    transformers.utils.logging.disable_progress_bar()
    commit = None
    try:
        run = read_run(options.model)
        card, files = render_card(run, options), files_of(run.model)
        model, tokenizer = read_model(run)
        show(files, card, options)
        if options.dry_run:
            print(f"\n{card}")
            return 0
        commit = upload(files, card, options)
        verify(run, model, tokenizer, options, commit)
    except (OSError, ValueError, httpx.HTTPError, OfflineModeIsEnabled) as error:
        place = f"{options.repo} was published as {commit}, but not verified: " if commit else ""
        print(f"error: {place}{error}", file=sys.stderr)
        return 1
    print(f"published and loaded back, every weight the same: {constants.ENDPOINT}/{options.repo}/tree/{commit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
