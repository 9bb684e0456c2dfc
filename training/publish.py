"""Publish a trained model on the Hub: `python -m training.publish --model DIR --repo USER/NAME`.

The model's folder goes up in one commit, with a card (`model_card.md` at the top of the clone) that is filled from what
the run recorded; then it is loaded back and compared. An interrupted upload is repeated by the same command: nothing
is visible before the commit, and what has been uploaded already is not sent again. The token is that of the environment
(HF_TOKEN) or of `hf auth login`.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import httpx, validate_repo_id
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from training.card import Run, read_run, render_card
from training.loading import load
from training.run_log import weights_digest
from training.translator import translate_all

# The model -----------------------------------------------------------------------------------------------------------


def check_code(model: Path) -> None:
    """Make sure that the folder holds the tokenizer, the code that its config names, and all that this code imports.

    Raises:
        ValueError: If it does not: nobody could load it with `trust_remote_code`.
    """
    auto_map = json.loads((model / "config.json").read_text("utf-8")).get("auto_map")
    wanted = [f"{reference.partition('.')[0]}.py" for reference in (auto_map or {}).values()]
    missing = set() if auto_map else {"auto_map in its config.json"}
    seen: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        if (model / name).exists():
            imported = re.findall(r"^from \.(\w+) import", (model / name).read_text("utf-8"), re.MULTILINE)
            wanted += [f"{module}.py" for module in imported]
        else:
            missing.add(name)
    if not (model / "tokenizer.json").exists():
        missing.add("tokenizer.json")
    if missing:
        raise ValueError(
            f"{model} lacks {', '.join(sorted(missing))}, so it could not be loaded with trust_remote_code: load it "
            "and save it again with this version of hf_vanilla_trm"
        )


def read_model(run: Run) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model that will be published.

    Raises:
        OSError: If it cannot be loaded.
        ValueError: If its weights are others than those that the results are of, or that were averaged.
    """
    if run.weights != weights_digest(run.model):
        raise ValueError(f"the weights in {run.model} are not those that the results are of")
    return load(str(run.model), "cpu")


def translate_examples(run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Run:
    """Return the run with the model's own translations of the examples, where the run's are those of best/."""
    if not run.average:
        return run
    translations = translate_all(model, tokenizer, [source for source, *_ in run.examples], model.search_options())
    examples = [
        (source, translation, reference)
        for (source, _, reference), translation in zip(run.examples, translations, strict=True)
    ]
    return dataclasses.replace(run, examples=examples)


# The upload --------------------------------------------------------------------------------------------------------


def files_of(model: Path) -> dict[str, Path]:
    """Return the files to upload by their path in the repository; the card comes on top."""
    paths = {path.relative_to(model).as_posix(): path for path in sorted(model.rglob("*")) if path.is_file()}
    left_out = re.compile(r"README\.md|(.*/)?(\.|__pycache__/).*")
    return {name: path for name, path in paths.items() if not left_out.fullmatch(name)}


def check_access(options: argparse.Namespace) -> None:
    """Make sure, as far as it can be seen without writing, that the Hub can be reached and will take the model.

    Raises:
        OSError: If there is no token, the Hub does not know it or cannot be reached, or there is no such revision.
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
    except (HfHubHTTPError, httpx.HTTPError, OfflineModeIsEnabled) as error:
        raise OSError(explain(error, options)) from error


def upload(files: dict[str, Path], card: ModelCard, options: argparse.Namespace) -> str:
    """Upload everything in one commit; return its id.

    Raises:
        OSError: If the Hub refuses; the message says what to do.
        ValueError: If the repository is public and was to be private.
    """
    check_access(options)
    api = HfApi()
    try:
        if options.revision in (None, "main"):
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
        return f"{_first_line(error)} {_first_line(error.__cause__)}. The same command can be repeated"
    if not isinstance(error, HfHubHTTPError):
        return (
            f"the Hub at {constants.ENDPOINT} cannot be reached: {_first_line(error)}. The same command can be repeated"
        )
    reasons = {
        401: "the Hub does not know this token: look at HF_TOKEN, or run `hf auth login` again",
        403: f"this token has no permission to write to {options.repo}, or the Hub has no room for it: "
        f"{error.server_message or _first_line(error)}",
    }
    refusal = f"the Hub refused: {_first_line(error)}. The same command can be repeated"
    return reasons.get(error.response.status_code, refusal)


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".") if error else ""


STRANGER = """
import hashlib, sys
sys.modules["hf_vanilla_trm"] = None  # importing it fails
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

source = {"revision": sys.argv[2], "trust_remote_code": True}
AutoTokenizer.from_pretrained(sys.argv[1], **source)
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], **source)
digest = hashlib.sha256()
for name, tensor in sorted(model.state_dict().items()):
    digest.update(name.encode() + tensor.float().numpy().tobytes())
print(digest.hexdigest())
"""
"""A program that loads a model by the code of its repository; what transformers offers to whom has no package."""


def verify_as_a_stranger(tensors: dict[str, torch.Tensor], repo: str, commit: str, cache: str) -> None:
    """Load a commit in a process that has nothing of this project, and compare its tensors.

    Raises:
        OSError: If it cannot be loaded.
        ValueError: If a tensor differs.
    """
    environment = os.environ | {
        "HF_HOME": cache,
        "HF_ENDPOINT": constants.ENDPOINT,
        "HF_TOKEN": get_token() or "",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, "-c", STRANGER, repo, commit]
    process = subprocess.run(command, cwd=cache, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or [""])[-1]
        raise OSError(f"without the package, by trust_remote_code, it cannot be loaded: {reason}")
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.float().numpy().tobytes())
    if process.stdout.split()[-1] != digest.hexdigest():
        raise ValueError("loaded without the package, by trust_remote_code, its weights are others")


def verify(
    run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace, commit: str
) -> None:
    """Load the commit back, from the Hub and not from a cache, and compare it with the model that was published.

    Once with the package, and once as a stranger would, by the code in the repository.

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
        verify_as_a_stranger(tensors, options.repo, commit, cache)
    lines = [source for source, _, _ in run.examples[:3]]
    translations = translate_all(model, tokenizer, lines, model.search_options())
    if translate_all(published, published_tokenizer, lines, published.search_options()) != translations:
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
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of a finished run, its best/, or a mean of its checkpoints"
    )
    parser.add_argument("--repo", type=_repo, required=True, help="USER/NAME on the Hub; made if it is not there")
    parser.add_argument("--private", action="store_true", help="make the repository private if it is new")
    parser.add_argument("--revision", help="branch, or ref of a pull request, to commit to (default: main)")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="show files and card; upload nothing")
    parser.add_argument("--license", help="licence of the weights, as the Hub names it: apache-2.0, cc-by-4.0, ...")
    parser.add_argument(
        "--language", nargs=2, metavar=("SOURCE", "TARGET"), help="codes of the languages, such as en de"
    )
    parser.add_argument("--datasets", nargs="+", metavar="ID", help="Hub ids or names of the training data")
    parser.add_argument(
        "--base-model", "--base_model", type=_repo, metavar="ID", help="Hub id of the model that was fine-tuned"
    )
    parser.add_argument(
        "--scores",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="what training.score wrote of this model, for the card",
    )
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
        check_code(run.model)
        render_card(run, options)  # what it refuses, it refuses before the model is loaded
        model, tokenizer = read_model(run)
        run = translate_examples(run, model, tokenizer)
        card, files = render_card(run, options), files_of(run.model)
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
