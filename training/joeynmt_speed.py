"""How fast JoeyNMT trains the same model on the same sentences: its own loop, in an environment of its own.

    python -m venv joeynmt && joeynmt/bin/pip install joeynmt importlib_metadata sentencepiece==0.2.0
    python -m training.benchmark train --joeynmt joeynmt/bin/python ...

It gets the sentences as subword tokens with spaces between them, and so the same sequences.
"""

import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from training.arguments import DataArguments
from training.data import load_pairs
from training.tokenizer import train_tokenizer

LOGGING_EVERY = 5
SPEED = re.compile(r"Tokens per Sec:\s*([\d.]+)")


def joeynmt_speed(
    python: Path, size: dict[str, int], data: dict[str, str], folder: Path, *, updates: int, batch_tokens: int
) -> float:
    """Return the target tokens a second of JoeyNMT's training, the median of what it logs but for the first time.

    Args:
        python: Of the environment that has JoeyNMT.
        size: A value of `SIZES`.
        data: Arguments of training.train that name the training data.
        folder: For its files.
        updates: Updates to train.
        batch_tokens: Budget of a batch: its sentences times its longest, source or target. JoeyNMT fills it in the
            order of the shuffled data, whatever the lengths.

    Raises:
        RuntimeError: If it did not train to the end; the message says what it printed last.
    """
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_tokens(folder, data)
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration(size, folder, updates, batch_tokens)))
    process = subprocess.run(
        [python.absolute(), "-m", "joeynmt", "train", "config.yaml", "--skip-test"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    (folder / "output.txt").write_text(process.stdout)
    return speed_of(process.stdout.splitlines(), process.returncode)


def speed_of(output: Sequence[str], exit_code: int = 0) -> float:
    """Return the median of the speeds that JoeyNMT printed, without the first, which is that of a cold start.

    Raises:
        RuntimeError: If it failed, or printed fewer than two.
    """
    speeds = [float(match[1]) for line in output if (match := SPEED.search(line))]
    if exit_code or len(speeds) < 2:
        raise RuntimeError("JoeyNMT did not train; its last lines:\n" + "\n".join(output[-15:]))
    return statistics.median(speeds[1:])


def write_tokens(folder: Path, data: dict[str, str]) -> None:
    """Write train and dev files of subword tokens, and the vocabulary."""
    pairs = load_pairs(DataArguments(**data), ("train",))["train"]
    tokenizer = train_tokenizer((text for pair in pairs for text in (pair["source"], pair["target"])), 8000)
    for side in ("source", "target"):
        texts = [text for text in pairs[side] if text.strip()]
        if len(texts) < len(pairs):
            raise ValueError(f"{len(pairs) - len(texts)} sentences are blank, which JoeyNMT does not take")
        lines = [f"{' '.join(tokenizer.tokenize(text))}\n" for text in texts]
        (folder / f"train.{side}").write_text("".join(lines), encoding="utf-8")
        (folder / f"dev.{side}").write_text("".join(lines[:8]), encoding="utf-8")
    special = set(tokenizer.all_special_tokens)
    words = [token for token in tokenizer.get_vocab() if token not in special]
    (folder / "vocabulary.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")


def configuration(size: dict[str, int], folder: Path, updates: int, batch_tokens: int) -> dict[str, Any]:
    """Return JoeyNMT's configuration of the paper's model: post-LN, dropout 0.1, smoothing 0.1, one embedding."""

    def stack(layers: int) -> dict[str, Any]:
        return {
            "type": "transformer",
            "num_layers": layers,
            "num_heads": size["num_attention_heads"],
            "hidden_size": size["d_model"],
            "ff_size": size["d_ff"],
            "embeddings": {"embedding_dim": size["d_model"], "scale": True, "dropout": 0.1},
            "dropout": 0.1,
            "layer_norm": "post",
            "activation": "relu",
        }

    return {
        "name": "speed",
        "model_dir": str(folder / "model"),
        "use_cuda": False,
        "num_workers": 0,
        "data": _data(folder),
        "testing": {"beam_size": 1, "batch_size": 8, "batch_type": "sentence"},
        "training": _recipe(updates, batch_tokens),
        "model": {
            "tied_embeddings": True,
            "tied_softmax": True,
            "encoder": stack(size["encoder_layers"]),
            "decoder": stack(size["decoder_layers"]),
        },
    }


def _data(folder: Path) -> dict[str, Any]:
    def side(language: str) -> dict[str, Any]:
        vocabulary = str(folder / "vocabulary.txt")
        return {"lang": language, "level": "word", "max_length": 256, "voc_file": vocabulary, "voc_limit": 8000}

    files = {"train": str(folder / "train"), "dev": str(folder / "dev"), "dataset_type": "plain"}
    return {**files, "src": side("source"), "trg": side("target")}


def _recipe(updates: int, batch_tokens: int) -> dict[str, Any]:
    return {
        "batch_size": batch_tokens,
        "batch_type": "token",
        "normalization": "tokens",
        "optimizer": "adam",
        "learning_rate": 1e-5,
        "scheduling": "warmupinversesquareroot",
        "learning_rate_warmup": 100,
        "label_smoothing": 0.1,
        "updates": updates,
        "epochs": 100,
        "logging_freq": LOGGING_EVERY,
        "validation_freq": 1000 * LOGGING_EVERY,
    }
