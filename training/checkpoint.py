"""Checkpoints: folders that `from_pretrained` loads, with what continuing needs beside it, in tensors and JSON only.

A folder is written under a hidden name and renamed when it is complete, and a checkpoint holds a digest of each of its
files: what a crash or a disk has spoilt is noticed, and the checkpoint before it is used.
"""

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, load_model, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_vanilla_trm import VanillaTrmConfig
from training.architecture import check_architecture
from training.batching import Position
from training.digest import digest_of_file

logger = logging.getLogger(__name__)

STATE_FILE = "training_state.json"
OPTIMIZER_FILE = "optimizer.pt"
AVERAGE_FILE = "average.safetensors"
DIGESTS_FILE = "sha256.json"


@dataclass
class Progress:
    """How far training has come: with the arguments and the seed, all that decides what comes next.

    Attributes:
        update: Updates done.
        epoch: Epochs completed.
        position: Place in the current epoch, the same on each rank.
        target_tokens: Target tokens trained on, over all ranks.
        update_seconds: Wall time spent in updates.
        seconds: Wall time of training, evaluations and saving included.
        window_updates: Updates since the last line of the log, without those that were skipped.
        loss_windows: Sum of their losses, each rank's share.
        skipped_in_a_row: Last updates whose gradient was not finite.
        evaluated_update: The update of the last evaluation.
        best_metric: Best value so far of the metric that chooses the model.
        best_update: The update it was reached at.
        evaluations_without_improvement: Evaluations since then.
        scaler: State of the gradient scaler of fp16.
    """

    update: int = 0
    epoch: int = 0
    position: Position = field(default_factory=Position)
    target_tokens: int = 0
    update_seconds: float = 0.0
    seconds: float = 0.0
    window_updates: int = 0
    loss_windows: list[float] = field(default_factory=list)
    skipped_in_a_row: int = 0
    evaluated_update: int = 0
    best_metric: float | None = None
    best_update: int | None = None
    evaluations_without_improvement: int = 0
    scaler: dict[str, float] | None = None


@dataclass
class Checkpoint:
    """What a checkpoint holds besides the weights.

    Attributes:
        progress: How far training had come.
        optimizer_state: The optimizer's `state_dict`, on the host.
        average: The moving average of the weights by name, if one was kept.
    """

    progress: Progress
    optimizer_state: dict[str, Any]
    average: dict[str, torch.Tensor] | None


def save_model_folder(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a folder that the Auto classes load: model, generation config and tokenizer; all of it or nothing.

    Raises:
        OSError: If it cannot be written.
    """

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)

    write_folder(folder, write)


def save_checkpoint(
    run: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint
) -> Path:
    """Write `checkpoints/update-N`: a model folder and what continuing needs; all of it or nothing.

    Raises:
        OSError: If it cannot be written.
    """
    folder = run / "checkpoints" / f"update-{checkpoint.progress.update}"

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        torch.save(checkpoint.optimizer_state, temporary / OPTIMIZER_FILE)
        if checkpoint.average is not None:
            save_file(checkpoint.average, temporary / AVERAGE_FILE)
        (temporary / STATE_FILE).write_text(json.dumps(dataclasses.asdict(checkpoint.progress), indent=2) + "\n")
        digests = {file.name: digest_of_file(file) for file in sorted(temporary.iterdir())}
        (temporary / DIGESTS_FILE).write_text(json.dumps(digests, indent=2) + "\n")

    write_folder(folder, write)
    return folder


def load_checkpoint(folder: Path, model: PreTrainedModel) -> Checkpoint:
    """Load a checkpoint's weights into `model`, and return the rest.

    Raises:
        ValueError: If they are of another architecture.
    """
    check_architecture(VanillaTrmConfig.from_pretrained(folder), model.config, str(folder), "the model to train")
    load_model(model, folder / "model.safetensors")
    state = json.loads((folder / STATE_FILE).read_text("utf-8"))
    average = folder / AVERAGE_FILE
    return Checkpoint(
        progress=Progress(**{**state, "position": Position(**state["position"])}),
        optimizer_state=torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True),
        average=load_file(average) if average.exists() else None,
    )


def find_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    found = [path for path in (run / "checkpoints").glob("update-*") if re.fullmatch(r"update-\d+", path.name)]
    return sorted(found, key=_update_of)


def fault_of(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, or None if they are what was written."""
    try:
        digests = json.loads((checkpoint / DIGESTS_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return f"{DIGESTS_FILE} is missing or torn"
    for name, digest in digests.items():
        try:
            if digest_of_file(checkpoint / name) != digest:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def repair(run: Path) -> None:
    """Undo what a crash left half done, and set damaged checkpoints aside that are newer than the newest whole one.

    For the main process, before anything of the run is read.

    Raises:
        ValueError: If there are checkpoints, but none is whole.
    """
    for parent in (run, run / "checkpoints"):
        for leftover in parent.glob(".*.old"):
            folder = parent / leftover.name[1:].removesuffix(".old")
            if folder.exists():
                shutil.rmtree(leftover)
            else:  # a crash between the two renames of `write_folder`
                os.replace(leftover, folder)
        for leftover in parent.glob(".*.tmp"):
            shutil.rmtree(leftover)
    faults: dict[Path, str] = {}
    for checkpoint in reversed(find_checkpoints(run)):
        if (fault := fault_of(checkpoint)) is None:
            break
        faults[checkpoint] = fault
    else:
        if faults:
            found = "; ".join(f"{path.name}: {fault}" for path, fault in faults.items())
            raise ValueError(f"no checkpoint of {run} is whole ({found}). To begin anew, use another output_dir")
    for checkpoint, fault in faults.items():
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(checkpoint, aside)
        logger.warning("%s is damaged (%s): it is set aside as %s", checkpoint, fault, aside.name)


def rotate_checkpoints(run: Path, *, keep: int, best_update: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the one of the best model; `keep` 0 deletes none."""
    for path in find_checkpoints(run)[:-keep] if keep else []:
        if _update_of(path) != best_update:
            hidden = path.with_name(f".{path.name}.tmp")  # half deleted it must not look like a checkpoint
            os.replace(path, hidden)
            shutil.rmtree(hidden)


def _update_of(path: Path) -> int:
    return int(path.name.removeprefix("update-"))


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder under a temporary name and rename it: a folder that has its name is complete, on the disk too."""
    temporary, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("tmp", "old"))
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
    except Exception as error:  # each library has a class of its own for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, ImportError | ValueError):  # what was to be written was at fault, not the disk
            raise
        raise OSError(f"{folder} cannot be written: {error}") from error
    if folder.exists():
        os.replace(folder, old)
    os.replace(temporary, folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
