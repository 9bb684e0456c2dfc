"""Checkpoints: folders that `from_pretrained` loads, with what continuing needs beside it, in tensors and JSON only."""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

STATE_FILE = "training_state.json"
OPTIMIZER_FILE = "optimizer.pt"


@dataclass
class Progress:
    """How far training has come: with the arguments and the seed, all that decides what comes next.

    Attributes:
        update: Updates done.
        epoch: Epochs completed.
        batches_in_epoch: Micro-batches done in the current epoch, on each rank.
        target_tokens: Target tokens trained on, over all ranks.
        update_seconds: Wall time spent in updates.
        seconds: Wall time of training, evaluations and saving included.
        best_metric: Best value so far of the metric that chooses the model.
        best_update: The update it was reached at.
        evaluations_without_improvement: Evaluations since then.
    """

    update: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    target_tokens: int = 0
    update_seconds: float = 0.0
    seconds: float = 0.0
    best_metric: float | None = None
    best_update: int | None = None
    evaluations_without_improvement: int = 0


def save_model_folder(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a folder that the Auto classes load: model, generation config and tokenizer; all of it or nothing."""

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)

    _write_folder(folder, write)


def save_checkpoint(
    run: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    optimizer_state: dict[str, Any],
    progress: Progress,
) -> Path:
    """Write `checkpoints/update-N`: a model folder, the optimizer's state and the progress; all of it or nothing."""
    folder = run / "checkpoints" / f"update-{progress.update}"

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        torch.save(optimizer_state, temporary / OPTIMIZER_FILE)
        (temporary / STATE_FILE).write_text(json.dumps(dataclasses.asdict(progress), indent=2) + "\n")

    _write_folder(folder, write)
    return folder


def load_checkpoint(folder: Path, model: PreTrainedModel) -> tuple[Progress, dict[str, Any]]:
    """Load a checkpoint's weights into `model`; return its progress and its optimizer's state."""
    load_model(model, folder / "model.safetensors")
    optimizer_state = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    return Progress(**json.loads((folder / STATE_FILE).read_text())), optimizer_state


def find_checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [path for path in (run / "checkpoints").glob("update-*") if re.fullmatch(r"update-\d+", path.name)]
    return sorted(found, key=_update_of)


def rotate_checkpoints(run: Path, *, keep: int, best_update: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the one of the best model; `keep` 0 deletes none."""
    for path in find_checkpoints(run)[:-keep] if keep else []:
        if _update_of(path) != best_update:
            shutil.rmtree(path)


def _update_of(path: Path) -> int:
    return int(path.name.removeprefix("update-"))


def _write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder under a temporary name and rename it: a folder that has its name is complete."""
    temporary, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("tmp", "old"))
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    if folder.exists():
        os.replace(folder, old)
    os.replace(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)
