r"""Pairs of source and target text, from files or the Hub, as batches of token ids (section 5.1 of the paper).

Files are read row by row, so that an error can name the file, the line and the rule, and so that a line is what the
file says it is: "\n" or "\r\n" ends it, and nothing else. What is read goes into the Arrow cache of `datasets`.
"""

import csv
import hashlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import torch
from datasets import Dataset, DatasetDict, Features, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

from training.arguments import PairArguments
from training.embedded_corpus import generate_pairs
from training.lines import read_lines

SPLITS = ("train", "validation", "test")
PAIR_FEATURES = Features({"source": Value("string"), "target": Value("string")})

Pair = dict[str, str]
Row = tuple[str, dict[str, Any]]  # the place of a row, for messages; its columns


# Reading pairs -----------------------------------------------------------------------------------------------------


def load_pairs(arguments: PairArguments) -> DatasetDict:
    """Load the splits that the arguments name, each with the text columns "source" and "target".

    Raises:
        ValueError: For unequal line counts, a missing column or split, an empty file, bytes that are not UTF-8, an
            unknown suffix or a malformed row. The message names the file, the line where there is one, and the rule.
        FileNotFoundError: If there is no such file.
    """
    if arguments.embedded_corpus is not None:
        return generate_pairs(arguments.embedded_corpus)
    if arguments.dataset_name is not None:
        return _load_hub_pairs(arguments)
    splits = DatasetDict()
    for split in SPLITS:
        source, target, table = (getattr(arguments, f"{split}_{kind}") for kind in ("source", "target", "file"))
        if table is not None:
            splits[split] = _load_files(read_table, [table], arguments.source_column, arguments.target_column)
        elif source is not None:
            splits[split] = _load_files(read_aligned, [source, target])
    return splits


def read_aligned(source_path: str, target_path: str) -> Iterator[Pair]:
    """Yield each line of one text file with the same line of the other.

    Raises:
        ValueError: If a file is empty or not UTF-8, or the files have unequal line counts (the message has both).
    """
    for source, target in itertools.zip_longest(_read_lines(source_path), _read_lines(target_path)):
        if source is None or target is None:
            raise ValueError(
                f"{source_path} has {_count_lines(source_path)} lines and {target_path} has "
                f"{_count_lines(target_path)}: line n of one must be the translation of line n of the other"
            )
        yield {"source": source[1], "target": target[1]}


def read_table(path: str, source_column: str, target_column: str) -> Iterator[Pair]:
    """Yield two columns of a TSV, CSV, JSON lines or parquet file; a dot reaches into a nested column.

    Raises:
        ValueError: If the suffix is unknown, the file is empty or malformed, a column is missing or holds no text.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in TABLE_READERS:
        raise ValueError(f"{path}: the suffix must be one of {', '.join(TABLE_READERS)}, got {suffix!r}")
    place = None
    for place, row in TABLE_READERS[suffix](path):
        yield {"source": _text(row, source_column, place), "target": _text(row, target_column, place)}
    if place is None:
        raise ValueError(f"{path}: the file has no rows")


def _read_tsv(path: str) -> Iterator[Row]:
    """Read tab-separated fields. Quotation marks are text: only tabs and line ends mean something."""
    return _with_header(path, ((number, line.split("\t")) for number, line in _read_lines(path)))


def _read_csv(path: str) -> Iterator[Row]:
    """Read RFC 4180: a field in quotation marks may hold commas, line ends, and quotation marks written twice."""

    def records() -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader((line + "\n" for _, line in _read_lines(path)), strict=True)
        number = 1
        try:
            for fields in reader:
                yield number, fields
                number = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{path}, line {number}: not CSV ({error})") from None

    return _with_header(path, records())


def _with_header(path: str, records: Iterator[tuple[int, list[str]]]) -> Iterator[Row]:
    _, header = next(records)
    if len(set(header)) < len(header):
        raise ValueError(f"{path}, line 1: a column name occurs twice in {header}")
    for number, fields in records:
        if len(fields) != len(header):
            raise ValueError(
                f"{path}, line {number}: {len(fields)} fields, but the header has {len(header)} "
                f"({', '.join(map(repr, header))})"
            )
        yield f"{path}, line {number}", dict(zip(header, fields, strict=True))


def _read_json_lines(path: str) -> Iterator[Row]:
    for number, line in _read_lines(path):
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: each line must be one JSON object ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{place}: each line must be one JSON object, got a {type(row).__name__}")
        yield place, row


def _read_parquet(path: str) -> Iterator[Row]:
    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1000)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows, start=1):
            yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole parquet file ({error})") from None


TABLE_READERS: dict[str, Callable[[str], Iterator[Row]]] = {
    ".tsv": _read_tsv,
    ".csv": _read_csv,
    ".json": _read_json_lines,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}


def _read_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each line of a file."""
    number = 0
    with open(path, "rb") as file:
        for number, text in enumerate(read_lines(file, path), start=1):
            yield number, text
    if number == 0:
        raise ValueError(f"{path}: the file is empty")


def _count_lines(path: str) -> int:
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def _text(row: dict[str, Any], column: str, place: str) -> str:
    """Return the text in a column; a null is an empty text, and is counted with the empty pairs later."""
    value: Any = row
    for name in [column] if column in row else column.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"{place}: there is no column {column!r}; there are {', '.join(map(repr, row))}")
        value = value[name]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{place}: column {column!r} must hold text, got {value!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell one: "\ud83d"
        raise ValueError(f"{place}: column {column!r} holds half of a surrogate pair, which is no text") from None
    return value


def _load_files(reader: Callable[..., Iterator[Pair]], files: Sequence[str], *columns: str) -> Dataset:
    """Read files once, into the cache; they are read again when their size or time of change differs."""
    for file in files:
        if not Path(file).exists():
            raise FileNotFoundError(f"{file}: there is no such file")
    stamps = [(Path(file).stat().st_size, Path(file).stat().st_mtime_ns) for file in files]
    try:
        return Dataset.from_generator(
            _run_reader,
            features=PAIR_FEATURES,
            # the cache goes by these; as tuples, for `datasets` deals the items of a list to several processes
            gen_kwargs={"reader": reader, "arguments": (*files, *columns), "stamps": tuple(stamps)},
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError | OSError):
            raise error.__cause__ from None
        raise


def _run_reader(
    reader: Callable[..., Iterator[Pair]], arguments: tuple[str, ...], stamps: tuple[tuple[int, int], ...]
) -> Iterator[Pair]:
    del stamps
    return reader(*arguments)


def _load_hub_pairs(arguments: PairArguments) -> DatasetDict:
    splits = DatasetDict()
    for split in SPLITS:
        wanted = getattr(arguments, f"{split}_split")
        if not wanted:
            continue
        place = f"dataset {arguments.dataset_name!r}, split {wanted!r}"
        try:
            dataset = load_dataset(arguments.dataset_name, arguments.dataset_config_name, split=wanted)
        except ValueError as error:
            raise ValueError(f"{place}: {error}; an empty {split}_split does without") from error
        splits[split] = _select_pairs(dataset, arguments.source_column, arguments.target_column, place)
    return splits


def _select_pairs(dataset: Dataset, source_column: str, target_column: str, place: str) -> Dataset:
    if len(dataset) == 0:
        raise ValueError(f"{place}: there are no rows")
    dataset = dataset.flatten()
    for column in (source_column, target_column):
        if column not in dataset.column_names:
            raise ValueError(
                f"{place}: there is no column {column!r}; there are {', '.join(map(repr, dataset.column_names))}"
            )
        if getattr(dataset.features[column], "dtype", None) not in ("string", "large_string"):
            raise ValueError(f"{place}: column {column!r} must hold text, got {dataset.features[column]}")
    return dataset.map(
        lambda sources, targets: {
            "source": [text or "" for text in sources],
            "target": [text or "" for text in targets],
        },
        batched=True,
        input_columns=[source_column, target_column],
        remove_columns=dataset.column_names,
        features=PAIR_FEATURES,
    )


# Tokenising --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DroppedRows:
    """Rows that `tokenize_pairs` found unfit for training; as a string, a line for the log.

    Attributes:
        empty: Rows with nothing but white space on one side or both.
        too_long: Other rows over a length limit.
        rows: All rows.
        kept: Whether all were kept (evaluation), those over a limit cut to it.
    """

    empty: int
    too_long: int
    rows: int
    kept: bool = False

    def __str__(self) -> str:
        if self.kept:
            return (
                f"kept all of {self.rows:,} rows: {self.empty:,} with an empty side, "
                f"{self.too_long:,} over a length limit and cut to it"
            )
        return (
            f"dropped {self.empty + self.too_long:,} of {self.rows:,} rows: {self.empty:,} with an empty side, "
            f"{self.too_long:,} over a length limit"
        )


def tokenize_pairs(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_length: int,
    max_target_length: int,
    drop: bool = True,
) -> tuple[Dataset, DroppedRows]:
    """Turn text into token ids.

    Args:
        dataset: Rows with "source" and "target".
        tokenizer: A tokenizer that turns a text into pieces and EOS.
        max_source_length: Most tokens of a source, EOS included.
        max_target_length: Most tokens of a target, EOS included.
        drop: Whether to drop empty and over-long rows (training). Otherwise (evaluation) every row stays in its place,
            and an over-long side is cut to the limit, EOS its last token.

    Returns:
        Rows with `input_ids` and `labels`, and the counts of rows that are unfit.

    Raises:
        ValueError: If every row would be dropped.
    """
    tokenized = dataset.map(
        _tokenize,
        batched=True,
        remove_columns=dataset.column_names,
        fn_kwargs={"tokenizer": tokenizer},
        desc="Tokenising",
    )
    source_lengths, target_lengths = sequence_lengths(tokenized)
    empty = np.asarray(tokenized["empty"], dtype=bool)
    too_long = ~empty & ((source_lengths > max_source_length) | (target_lengths > max_target_length))
    counts = DroppedRows(empty=int(empty.sum()), too_long=int(too_long.sum()), rows=len(dataset), kept=not drop)
    tokenized = tokenized.remove_columns("empty")
    if drop:
        fit = np.flatnonzero(~empty & ~too_long)
        if len(fit) == 0:
            raise ValueError(
                f"no row is left to train on: {counts} "
                f"(max_source_length {max_source_length}, max_target_length {max_target_length})"
            )
        return tokenized.select(fit), counts
    if too_long.any():
        limits = {"input_ids": max_source_length, "labels": max_target_length}
        tokenized = tokenized.map(_cut, batched=True, fn_kwargs={"limits": limits}, desc="Cutting over-long rows")
    return tokenized, counts


def fingerprint(splits: DatasetDict) -> dict[str, str]:
    """Return a digest of the texts of each split: a run that is continued must see the same ones."""
    digests = {}
    for name, split in splits.items():
        digest = hashlib.sha256()
        for rows in split.select_columns(["source", "target"]).iter(batch_size=1000):
            digest.update(json.dumps([rows["source"], rows["target"]]).encode())
        digests[name] = digest.hexdigest()
    return digests


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


# Batching ----------------------------------------------------------------------------------------------------------


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of row numbers, grouped by length, whose padded size stays within a budget of tokens.

    "Sentence pairs were batched together by approximate sequence length" (section 5.1). In every epoch the rows are
    sorted by length, equal lengths in random order, and cut into batches; then the batches are shuffled. The cost of a
    batch is its number of rows times its longest sequence, source or target.

    Each row comes once in an epoch, over all ranks. Every rank has the same number of batches, none of them empty:
    where the batches cannot be dealt evenly, the largest are halved. The order depends on (seed, epoch) only.

    Args:
        source_lengths: Tokens of each row's source.
        target_lengths: Tokens of each row's target.
        batch_tokens: Highest cost of a batch.
        seed: Seed of the order.
        num_ranks: Processes that share an epoch.
        rank: The one of them that this is.
        shuffle: Whether to draw an order; otherwise batches come from short to long, the same in every epoch.

    Raises:
        ValueError: If a row alone is over the budget, or the rows cannot be dealt to the ranks in equally many batches.
    """

    def __init__(
        self,
        source_lengths: Sequence[int] | np.ndarray,
        target_lengths: Sequence[int] | np.ndarray,
        *,
        batch_tokens: int,
        seed: int,
        num_ranks: int = 1,
        rank: int = 0,
        shuffle: bool = True,
    ) -> None:
        if len(source_lengths) != len(target_lengths):
            raise ValueError(f"there are {len(source_lengths)} sources and {len(target_lengths)} targets")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank ({rank}) must be at least 0 and less than num_ranks ({num_ranks})")
        sources, targets = (np.asarray(lengths, dtype=np.int64) for lengths in (source_lengths, target_lengths))
        self.longest = np.maximum(sources, targets)
        self.total = sources + targets
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.num_ranks = num_ranks
        self.rank = rank
        self.shuffle = shuffle
        self.epoch = 0
        self._check_rows()
        # rows of equal length are interchangeable, so that the sorted rows are cut at the same places in every epoch
        self.batch_sizes = self._share_evenly(self._cut_to_budget(np.sort(self.longest)))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches of this rank; it is the same in every epoch."""
        return len(self.batch_sizes) // self.num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        rng = np.random.default_rng((self.seed, self.epoch))
        rows, batches = np.arange(len(self.longest)), np.arange(len(self.batch_sizes))
        if self.shuffle:
            rng.shuffle(rows)
            rng.shuffle(batches)
        # within one cost by total length, so that the shorter sides are alike too; the sort is stable
        rows = rows[np.lexsort((self.total[rows], self.longest[rows]))]
        starts = np.cumsum([0, *self.batch_sizes])
        for batch in batches[self.rank :: self.num_ranks]:
            yield rows[starts[batch] : starts[batch + 1]].tolist()

    def _check_rows(self) -> None:
        rows = len(self.longest)
        if rows < self.num_ranks:
            raise ValueError(f"{rows} rows cannot make a batch for each of {self.num_ranks} ranks")
        over = int((self.longest > self.batch_tokens).sum())
        if over:
            row = int(self.longest.argmax())
            raise ValueError(
                f"{over} of {rows} rows are longer than batch_tokens ({self.batch_tokens}), the longest, row {row}, "
                f"has {self.longest[row]} tokens: raise batch_tokens, or lower max_source_length and max_target_length"
            )

    def _cut_to_budget(self, costs: np.ndarray) -> list[int]:
        """Cut ascending costs into the largest batches within the budget, and return the sizes of these."""
        sizes, start = [], 0
        while start < len(costs):
            sizes_left = range(1, len(costs) - start + 1)
            sizes.append(
                bisect_right(sizes_left, self.batch_tokens, key=lambda size, left=costs[start:]: size * left[size - 1])
            )
            start += sizes[-1]
        return sizes

    def _share_evenly(self, sizes: list[int]) -> list[int]:
        """Halve the largest batches until their number is a multiple of the number of ranks."""
        for _ in range(-len(sizes) % self.num_ranks):
            largest = int(np.argmax(sizes))
            if sizes[largest] == 1:
                raise ValueError(
                    f"{len(self.longest)} rows, one a batch, cannot be dealt evenly to {self.num_ranks} ranks: "
                    f"raise batch_tokens ({self.batch_tokens})"
                )
            half = sizes[largest] // 2
            sizes[largest : largest + 1] = [half, sizes[largest] - half]
        return sizes


class PairCollator:
    """Pads tokenised rows on the right.

    Args:
        pad_token_id: Fills `input_ids`; `labels` are filled with -100, which the loss leaves out.
        pad_to_multiple_of: If given, both widths are rounded up to a multiple of it.
    """

    def __init__(self, pad_token_id: int, pad_to_multiple_of: int | None = None) -> None:
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `attention_mask` (batch, source_length) and `labels` (batch, target_length), int64."""
        sources = [row["input_ids"] for row in rows]
        return {
            "input_ids": self._pad(sources, self.pad_token_id),
            "attention_mask": self._pad([[1] * len(ids) for ids in sources], 0),
            "labels": self._pad([row["labels"] for row in rows], -100),
        }

    def _pad(self, sequences: list[list[int]], value: int) -> torch.Tensor:
        width = max(len(ids) for ids in sequences)
        if self.pad_to_multiple_of is not None:
            width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        return torch.tensor([ids + [value] * (width - len(ids)) for ids in sequences], dtype=torch.int64)
