"""What a run writes about itself: its origin (run.json), its metrics (metrics.jsonl, curves.png) and its results."""

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import matplotlib.figure
import torch
from accelerate import Accelerator

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LIBRARIES = ("hf_vanilla_trm", "torch", "transformers", "accelerate", "datasets", "tokenizers", "sacrebleu")
MAY_CHANGE = (
    *("output_dir", "allow_changes", "report_to", "num_samples", "keep_checkpoints", "num_workers"),
    *("preprocessing_workers", "max_skipped_updates", "dry_run"),
)
"""Arguments that may differ when a run is continued: they do not touch what is trained."""


class RunLog:
    """The files of one run. Only the main process writes.

    Args:
        run: The run's folder.
        accelerator: Knows the main process and the trackers.
    """

    def __init__(self, run: Path, accelerator: Accelerator) -> None:
        self.run = run
        self.accelerator = accelerator
        self.run_file = run / "run.json"
        self.metrics_file = run / "metrics.jsonl"
        self.results_file = run / "results.json"
        self._lock: TextIO | None = None

    def claim(self) -> None:
        """Keep other sessions out of the run's folder until `release`, or until this process has ended.

        Raises:
            ValueError: If another session trains there.
        """
        if not self.accelerator.is_main_process or fcntl is None:
            return
        self._lock = (self.run / ".lock").open("a")
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(
                    f"another session trains in {self.run}: wait for its end, or use another output_dir"
                ) from None
            # a file system without locks: nothing is kept out

    def release(self) -> None:
        """Let other sessions into the run's folder."""
        if self._lock is not None:
            self._lock.close()

    def check(self, arguments: dict[str, Any], *, defaults: dict[str, Any], allow_changes: bool | None) -> None:
        """Refuse to continue a run with other arguments than it was begun with.

        Args:
            arguments: All arguments by name.
            defaults: What an argument was while there was none of its name.
            allow_changes: Continue all the same; None where the command has no such argument.

        Raises:
            ValueError: If arguments differ and may not; the message names them with both values.
        """
        recorded = self._read_run_file()
        if recorded is None or allow_changes:
            return
        new = self._settings(arguments)
        old = {name: value for name, value in defaults.items() if name in new} | recorded["arguments"]
        changed = [
            f"{name} was {old.get(name)}, is {new.get(name)}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name) and name not in MAY_CHANGE
        ]
        if changed:
            way_out = "" if allow_changes is None else ", or continue with --allow_changes"
            raise ValueError(
                f"{self.run} was begun with other arguments: {'; '.join(changed)}. Use another output_dir{way_out}"
            )

    def check_inputs(self, inputs: dict[str, str]) -> None:
        """Refuse to continue a run on other data or another model than it was begun with, whatever their names.

        Args:
            inputs: What the run reads, by name, each with a digest of its content.

        Raises:
            ValueError: If something has another content than the run recorded.
        """
        recorded = (self._read_run_file() or {}).get("resolved", {}).get("inputs", inputs)
        changed = [name for name in sorted(inputs.keys() | recorded.keys()) if recorded.get(name) != inputs.get(name)]
        if changed:
            raise ValueError(
                f"since {self.run} was begun, what it reads has changed: {', '.join(changed)}. Use another output_dir"
            )

    def begin(
        self,
        arguments: dict[str, Any],
        *,
        update: int,
        resolved: dict[str, Any],
        evaluated_update: int | None = None,
    ) -> None:
        """Record the resolved arguments and the session's origin, before its first step.

        Args:
            arguments: All arguments by name.
            update: Updates done before this session; 0 starts the records anew.
            resolved: What follows from the arguments: defaults of the architecture and the schedule.
            evaluated_update: The last update that was evaluated; None for the last one done.
        """
        settings = self._settings(arguments)
        if self.accelerator.is_main_process:
            recorded = self._read_run_file() if update > 0 else None
            sessions = [*(recorded["sessions"] if recorded else []), _session(update, self.accelerator)]
            write_json(self.run_file, {"arguments": settings, "resolved": resolved, "sessions": sessions})
            self._keep_metrics_until(update, update if evaluated_update is None else evaluated_update)
        scalars = {name: value for name, value in settings.items() if isinstance(value, int | float | str)}
        # The project's name is the run's; TensorBoard makes it a folder, of which one in the run is enough.
        project = "tensorboard" if settings["report_to"] == "tensorboard" else self.run.name
        options = {"tensorboard": {"purge_step": update + 1}}
        self.accelerator.init_trackers(project, config=scalars, init_kwargs=options)

    def metrics(self, update: int, values: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl and send the numbers to the trackers."""
        if self.accelerator.is_main_process:
            with _named_errors(self.metrics_file), self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"update": update, **values}) + "\n")
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self.accelerator.log(numbers, step=update)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, without a last one that was not written to its end."""
        if not self.metrics_file.exists():
            return []
        rows = []
        for number, line in enumerate(self.metrics_file.read_text("utf-8").split("\n")[:-1], start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{self.metrics_file}, line {number}, is torn ({error}): delete the line") from error
        return rows

    def plot(self) -> None:
        """Draw curves.png: both losses, and the validation's BLEU, chrF and exact match, over updates."""
        if not self.accelerator.is_main_process:
            return
        rows = self.read_metrics()
        figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
        losses, scores = figure.subplots(1, 2)
        lines = [
            (losses, "train_loss", "training (with label smoothing)"),
            (losses, "validation_loss", "validation"),
            (scores, "validation_bleu", "BLEU"),
            (scores, "validation_chrf", "chrF"),
            (scores, "validation_exact_match", "exact match"),
        ]
        for axes, name, label in lines:
            points = [(row["update"], row[name]) for row in rows if name in row]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker="." if name != "train_loss" else None)
        for axes, title in (
            (losses, "loss per target token (nats)"),
            (scores, "validation during training (0-100)"),
        ):
            axes.set(xlabel="update", title=title)
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)  # below: it hides no curve
        temporary = self.run / ".curves.png"
        figure.savefig(temporary, dpi=110, format="png")
        os.replace(temporary, self.run / "curves.png")

    def results(self, values: dict[str, Any]) -> None:
        """Write results.json, which says that the run is finished, and of which weights the results are."""
        if self.accelerator.is_main_process:
            origin = {"weights": weights_digest(self.run / "best"), "command": shlex.join(sys.orig_argv)}
            write_json(self.results_file, {**values, **origin})

    def _settings(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {**arguments, "num_processes": self.accelerator.num_processes}

    def _read_run_file(self) -> dict[str, Any] | None:
        try:
            return json.loads(self.run_file.read_text("utf-8")) if self.run_file.exists() else None
        except ValueError as error:
            raise ValueError(f"{self.run_file} is torn ({error}): to begin anew, use another output_dir") from error

    def _keep_metrics_until(self, update: int, evaluated_update: int) -> None:
        """Drop what an interrupted session logged after its last checkpoint: it will be logged again."""

        def is_kept(row: dict[str, Any]) -> bool:
            is_evaluation = any(name.startswith("validation") for name in row)
            return row["update"] <= (evaluated_update if is_evaluation else update)

        kept = [row for row in self.read_metrics() if is_kept(row)] if update > 0 else []
        _write(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept))
        self.results_file.unlink(missing_ok=True)


def _session(update: int, accelerator: Accelerator) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_update": update,
        "command": shlex.join(sys.orig_argv),
        "git": _git_state(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}},
        "hardware": {
            "cpu": _cpu_name(),
            "cpu_count": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "device": str(accelerator.device),
            "device_name": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else None,
        },
        "num_processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
    }


def _git_state() -> dict[str, Any] | None:
    """Return the commit of this code and whether it had changes, or None outside a clone."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:  # ours, run from a clone
        return None


def _cpu_name() -> str:
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        return names[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return platform.processor()


def weights_digest(folder: Path) -> str:
    """Return a digest of a folder's safetensors files."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def write_json(file: Path, value: object) -> None:
    """Write a file as a whole or not at all."""
    _write(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}")
    with _named_errors(file):
        temporary.write_text(text, "utf-8")
        os.replace(temporary, file)


@contextlib.contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    """Name the file in what the system says of writing it: of a full disk, it names none."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{file} cannot be written: {error.strerror}") from error
