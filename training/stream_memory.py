"""Whether streaming takes more memory for more lines: one epoch of training on a corpus and on a longer one."""

import argparse
import contextlib
import json
import random
import shutil
import string
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from training.arguments import positive_integer
from training.run_log import write_json
from training.tokenizer import train_tokenizer

MODEL = {"d_model": 8, "d_ff": 16, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 1}
RECIPE = {
    "streaming": True,
    "max_epochs": 1,
    "batch_tokens": 8192,
    "warmup_steps": 100,
    "report_to": "none",
    "use_cpu": True,
}
VOCAB_SIZE = 600
LIMITS = {"max_source_length": 64, "max_target_length": 64}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument(
        "--lines", type=positive_integer, default=100_000, help="Pairs of the shorter corpus (default: 100000)."
    )
    parser.add_argument(
        "--times", type=positive_integer, default=20, help="How much longer the other is (default: 20)."
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/benchmark/streaming"))


def run(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Measure, write streaming.json and print the ratio; return the exit code. There are no further flags."""
    del flags
    result = compare_stream_memory(options.output_dir, options.lines, options.times)
    print(f"peak memory with {options.times} times the lines: {result['ratio']:.3f} times")
    return 0


def compare_stream_memory(folder: Path, lines: int, times: int) -> dict[str, Any]:
    """Train on `lines` generated pairs and on `times` as many, each in a process of its own.

    Args:
        folder: For the corpora, the runs and `streaming.json`.
        lines: Pairs of the shorter corpus.
        times: How much longer the other is.

    Returns:
        For each corpus its lines, the peak of resident memory in bytes, and pairs a second; and the peaks' ratio.
    """
    folder.mkdir(parents=True, exist_ok=True)
    measured = []
    for number in (lines, times * lines):
        files = write_corpus(folder, number)
        if not measured:
            with files["train_source"].open() as source:
                train_tokenizer((next(source) for _ in range(min(lines, 20_000))), VOCAB_SIZE).save_pretrained(
                    folder / "tokenizer"
                )
        options = (
            MODEL | RECIPE | LIMITS | files | {"tokenizer": folder / "tokenizer", "output_dir": folder / f"{number}"}
        )
        command = [sys.executable, "-m", "training.train", *(f"--{name}={value}" for name, value in options.items())]
        shutil.rmtree(folder / f"{number}", ignore_errors=True)  # a finished run would do nothing
        started = time.perf_counter()
        peak = _peak_of(command)
        seconds = time.perf_counter() - started
        if not (folder / f"{number}" / "results.json").exists():
            raise RuntimeError(f"training on {number} lines did not end")
        measured.append({"lines": number, "peak_bytes": peak, "pairs_per_second": round(number / seconds)})
        print(json.dumps(measured[-1]), flush=True)
        for file in files.values():
            file.unlink()
    result = {"corpora": measured, "ratio": measured[1]["peak_bytes"] / measured[0]["peak_bytes"]}
    write_json(folder / "streaming.json", result)
    return result


def _peak_of(command: list[str]) -> int:
    """Run a command, and return the most resident memory that was seen of it, in bytes.

    What the system counts of a child includes the memory of the process that started it; so the child is looked at.
    """
    process = psutil.Popen(command)
    peak = 0
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            peak = max(peak, process.memory_info().rss)
        time.sleep(0.05)
    return peak


def write_corpus(folder: Path, lines: int) -> dict[str, Path]:
    """Write aligned files of `lines` sentences of one to four invented words, the target backwards."""
    rng = random.Random(lines)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 3))) for _ in range(500)]
    files = {f"train_{side}": folder / f"{lines}.{side}" for side in ("source", "target")}
    with files["train_source"].open("w") as source, files["train_target"].open("w") as target:
        for _ in range(lines):
            sentence = rng.choices(words, k=rng.randint(1, 4))
            source.write(" ".join(sentence) + "\n")
            target.write(" ".join(reversed(sentence)) + "\n")
    return files
