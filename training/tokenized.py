"""Pairs as token ids, and which of them are fit for training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow.compute
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from training.pair_files import Pair

TokenizedPair = dict[str, list[int]]


@dataclass(frozen=True)
class Limits:
    """What a pair must keep to, to be trained on.

    Attributes:
        max_source_length: Most tokens of a source, EOS included.
        max_target_length: Most tokens of a target, EOS included.
        max_length_ratio: Most tokens of the longer side for each of the shorter; None for any.
    """

    max_source_length: int
    max_target_length: int
    max_length_ratio: float | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value is not None)

    def sort_out(
        self, empty: np.ndarray, source_lengths: np.ndarray, target_lengths: np.ndarray
    ) -> tuple[np.ndarray, "DroppedRows"]:
        """Return which rows are fit, shape (rows,), and how many are not, each counted for its first fault."""
        too_long = ~empty & ((source_lengths > self.max_source_length) | (target_lengths > self.max_target_length))
        uneven = np.zeros_like(empty)
        if self.max_length_ratio is not None:
            shorter, longer = np.minimum(source_lengths, target_lengths), np.maximum(source_lengths, target_lengths)
            uneven = ~empty & ~too_long & (longer > self.max_length_ratio * shorter)
        counts = DroppedRows(int(empty.sum()), int(too_long.sum()), int(uneven.sum()), rows=len(empty))
        return ~empty & ~too_long & ~uneven, counts


@dataclass(frozen=True)
class DroppedRows:
    """Rows that are unfit for training; as a string, a line for the log.

    Attributes:
        empty: Rows with nothing but white space on one side or both.
        too_long: Other rows over a length limit.
        uneven: Other rows whose sides differ too much in length.
        rows: All rows.
        kept: Whether all were kept (evaluation), those over a limit cut to it.
    """

    empty: int = 0
    too_long: int = 0
    uneven: int = 0
    rows: int = 0
    kept: bool = False

    def __add__(self, other: "DroppedRows") -> "DroppedRows":
        """Return the counts of both, of rows that are dropped."""
        names = ("empty", "too_long", "uneven", "rows")
        return DroppedRows(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __str__(self) -> str:
        empty = f"{self.empty:,} with an empty side"
        if self.kept:
            return f"kept all of {self.rows:,} rows: {empty}, {self.too_long:,} over a length limit and cut to it"
        return (
            f"dropped {self.empty + self.too_long + self.uneven:,} of {self.rows:,} rows: {empty}, "
            f"{self.too_long:,} over a length limit" + (f", {self.uneven:,} too uneven" if self.uneven else "")
        )


def tokenize_pairs(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    *,
    drop: bool = True,
    keep_texts: bool = False,
    num_proc: int | None = None,
) -> tuple[Dataset, DroppedRows]:
    """Turn text into token ids, once: the cache of `datasets` knows the rows and the tokenizer again.

    Args:
        dataset: Rows with "source" and "target".
        tokenizer: A tokenizer that turns a text into pieces and EOS.
        limits: What is fit for training.
        drop: Whether to drop what is not (training). Otherwise (evaluation) every row stays in its place, and an
            over-long side is cut to the limit, EOS its last token.
        keep_texts: Whether the rows keep their texts.
        num_proc: Processes; a fast tokenizer uses several threads of one.

    Returns:
        Rows with `input_ids` and `labels`, and the counts of rows that are unfit.

    Raises:
        ValueError: If every row would be dropped.
    """
    tokenized = dataset.map(
        _tokenize,
        batched=True,
        remove_columns=[] if keep_texts else dataset.column_names,
        fn_kwargs={"tokenizer": tokenizer},
        num_proc=num_proc,
        desc="Tokenising",
    )
    empty = np.asarray(tokenized["empty"], dtype=bool)
    fit, counts = limits.sort_out(empty, *sequence_lengths(tokenized))
    tokenized = tokenized.remove_columns("empty")
    if drop:
        if not fit.any():
            raise ValueError(f"no row is left to train on: {counts} ({limits})")
        return tokenized.select(np.flatnonzero(fit)), counts
    if counts.too_long:
        longest = {"input_ids": limits.max_source_length, "labels": limits.max_target_length}
        tokenized = tokenized.map(_cut, batched=True, fn_kwargs={"limits": longest}, desc="Cutting over-long rows")
    return tokenized, replace(counts, uneven=0, kept=True)


def tokenize_rows(
    rows: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, limits: Limits
) -> tuple[list[TokenizedPair], DroppedRows]:
    """Turn rows that are in memory into token ids, without those that are unfit for training, and count these."""
    tokenized: list[TokenizedPair] = []
    counts = DroppedRows()
    for start in range(0, len(rows), 1000):
        batch = rows[start : start + 1000]
        columns = _tokenize({side: [row[side] for row in batch] for side in ("source", "target")}, tokenizer)
        lengths = (np.fromiter(map(len, columns[name]), np.int64) for name in ("input_ids", "labels"))
        fit, dropped = limits.sort_out(np.asarray(columns["empty"], dtype=bool), *lengths)
        counts += dropped
        tokenized += [
            {"input_ids": columns["input_ids"][row], "labels": columns["labels"][row]} for row in np.flatnonzero(fit)
        ]
    return tokenized, counts


def sequence_lengths(tokenized: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of all `input_ids` and of all `labels`, in tokens; read in bounded memory."""
    source_lengths, target_lengths = [], []
    for table in tokenized.select_columns(["input_ids", "labels"]).with_format("arrow").iter(batch_size=10_000):
        source_lengths.append(pyarrow.compute.list_value_length(table["input_ids"]).to_numpy())
        target_lengths.append(pyarrow.compute.list_value_length(table["labels"]).to_numpy())
    return np.concatenate(source_lengths), np.concatenate(target_lengths)


def _tokenize(batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Any]]:
    pairs = zip(batch["source"], batch["target"], strict=True)
    return {
        "input_ids": tokenizer(batch["source"], verbose=False).input_ids,
        "labels": tokenizer(text_target=batch["target"], verbose=False).input_ids,
        "empty": [not (source.strip() and target.strip()) for source, target in pairs],
    }


def _cut(batch: dict[str, list[list[int]]], limits: dict[str, int]) -> dict[str, list[list[int]]]:
    return {
        column: [ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]] for ids in batch[column]]
        for column, limit in limits.items()
    }
