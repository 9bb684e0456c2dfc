r"""Pairs of source and target text, from files or the Hub, as token ids.

Files are read row by row, so that an error can name the file, the line and the rule, and so that a line is what the
file says it is: "\n" or "\r\n" ends it, and nothing else. What is read goes into the Arrow cache of `datasets`.
"""

import csv
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from datasets import Dataset, DatasetDict, Features, IterableDataset, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import HfApi
from transformers import PreTrainedTokenizerBase

from training.arguments import PairArguments
from training.digest import digest_of_file
from training.embedded_corpus import generate_pairs
from training.lines import read_lines

SPLITS = ("train", "validation", "test")
PAIR_FEATURES = Features({"source": Value("string"), "target": Value("string")})

Pair = dict[str, str]
Row = tuple[str, dict[str, Any]]  # the place of a row, for messages; its columns


# Reading pairs -----------------------------------------------------------------------------------------------------


def load_pairs(arguments: PairArguments, names: Sequence[str] = SPLITS, *, streaming: bool = False) -> DatasetDict:
    """Load the splits that the arguments name, each with the text columns "source" and "target".

    Args:
        arguments: Where the pairs come from.
        names: The splits that are wanted, of those that the arguments name.
        streaming: Take from a data set on the Hub these splits alone, where otherwise all of it is downloaded.

    Raises:
        ValueError: For unequal line counts, a missing column or split, an empty file, bytes that are not UTF-8, an
            unknown suffix or a malformed row. The message names the file, the line where there is one, and the rule.
        FileNotFoundError: If there is no such file.
    """
    if arguments.embedded_corpus is not None:
        return DatasetDict(
            {name: split for name, split in generate_pairs(arguments.embedded_corpus).items() if name in names}
        )
    if arguments.dataset_name is not None:
        return _load_hub_pairs(arguments, names, streaming)
    splits = DatasetDict()
    for split in names:
        source, target, table = (getattr(arguments, f"{split}_{kind}") for kind in ("source", "target", "file"))
        if table is not None:
            splits[split] = _load_files(read_table, [table], arguments.source_column, arguments.target_column)
        elif source is not None:
            splits[split] = _load_files(read_aligned, [source, target])
    return splits


def load_further_pairs(places: Sequence[str], arguments: PairArguments) -> DatasetDict:
    """Load validation sets besides the first, each under the name of its file without the suffix.

    Args:
        places: For each set a table, or two aligned files as SOURCE:TARGET.
        arguments: The columns of tables.

    Raises:
        ValueError: If two sets have one name, or as for `load_pairs`.
        FileNotFoundError: If there is no such file.
    """
    splits = DatasetDict()
    for place in places:
        source, colon, target = place.partition(":")
        name = f"validation_{Path(source).stem}"
        if name in splits:
            raise ValueError(f"two validation sets would be called {name}: rename a file, {source} for one")
        if colon:
            splits[name] = _load_files(read_aligned, [source, target])
        else:
            splits[name] = _load_files(read_table, [source], arguments.source_column, arguments.target_column)
    return splits


class PairStream:
    """A split that is read row by row, from any row on.

    Args:
        arguments: Where the pairs come from: files, or a data set on the Hub.
        split: One of `SPLITS`.

    Attributes:
        num_rows: How many there are, where that can be known without reading the split as pairs.

    Raises:
        ValueError: If two aligned files have unequal line counts, there is no row, or the first cannot be read.
        FileNotFoundError: If there is no such file.
    """

    def __init__(self, arguments: PairArguments, split: str = "train") -> None:
        self.num_rows: int | None = None
        source, target, table = (getattr(arguments, f"{split}_{kind}") for kind in ("source", "target", "file"))
        for file in (source, target, table):
            if file is not None and not Path(file).exists():
                raise FileNotFoundError(f"{file}: there is no such file")
        if arguments.dataset_name is not None:
            wanted = getattr(arguments, f"{split}_split")
            self.place = f"dataset {arguments.dataset_name!r}, split {wanted!r}"
            self.columns = (arguments.source_column, arguments.target_column)
            try:
                self.rows = load_dataset(
                    arguments.dataset_name, arguments.dataset_config_name, split=wanted, streaming=True
                )
            except ValueError as error:
                raise ValueError(f"{self.place}: {error}") from error
        else:
            self.place = f"{table or source}"
            self.columns = ("source", "target")
            reader, words = (
                (read_table, (table, arguments.source_column, arguments.target_column))
                if table is not None
                else (read_aligned, (source, target))
            )
            if source is not None and target is not None:
                self.num_rows = _count_aligned(source, target)
            self.rows = IterableDataset.from_generator(
                _run_reader, features=PAIR_FEATURES, gen_kwargs={"reader": reader, "arguments": words, "digests": ()}
            )
        if next(self.read(0), None) is None:
            raise ValueError(f"{self.place}: there are no rows")

    def read(self, first_row: int) -> Iterator[Pair]:
        """Yield the rows from one of them on, counted from 0; those before it are read and left out."""
        source_column, target_column = self.columns
        for number, row in enumerate(self.rows.skip(first_row), start=first_row):
            place = f"{self.place}, row {number + 1}"
            yield {"source": _text(row, source_column, place), "target": _text(row, target_column, place)}


def read_aligned(source_path: str, target_path: str) -> Iterator[Pair]:
    """Yield each line of one text file with the same line of the other.

    Raises:
        ValueError: If a file is empty or not UTF-8, or the files have unequal line counts (the message has both).
    """
    for source, target in itertools.zip_longest(_read_lines(source_path), _read_lines(target_path)):
        if source is None or target is None:
            _count_aligned(source_path, target_path)  # says what both have
            raise ValueError(f"{source_path} or {target_path} has changed while it was read")
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


def _count_aligned(source_path: str, target_path: str) -> int:
    """Return how many lines two aligned files have; refuse unequal counts."""
    counts = []
    for path in (source_path, target_path):
        with open(path, "rb") as file:
            counts.append(sum(1 for _ in file))
    if counts[0] != counts[1]:
        raise ValueError(
            f"{source_path} has {counts[0]} lines and {target_path} has {counts[1]}: line n of one must be the "
            "translation of line n of the other"
        )
    return counts[0]


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
    """Read files once, into the cache; they are read again when their content differs."""
    for file in files:
        if not Path(file).exists():
            raise FileNotFoundError(f"{file}: there is no such file")
    try:
        return Dataset.from_generator(
            _run_reader,
            features=PAIR_FEATURES,
            # the cache goes by these; as tuples, for `datasets` deals the items of a list to several processes
            gen_kwargs={
                "reader": reader,
                "arguments": (*files, *columns),
                "digests": tuple(digest_of_file(file) for file in files),
            },
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError | OSError):
            raise error.__cause__ from None
        raise


def _run_reader(
    reader: Callable[..., Iterator[Pair]], arguments: tuple[str, ...], digests: tuple[str, ...]
) -> Iterator[Pair]:
    del digests
    return reader(*arguments)


def _load_hub_pairs(arguments: PairArguments, names: Sequence[str], streaming: bool) -> DatasetDict:
    splits = DatasetDict()
    for split in names:
        wanted = getattr(arguments, f"{split}_split")
        if not wanted:
            continue
        if streaming:
            splits[split] = Dataset.from_list(list(PairStream(arguments, split).read(0)), features=PAIR_FEATURES)
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


def digest_stream(arguments: PairArguments) -> dict[str, str]:
    """Return a digest of each training file by the name of its argument; for a data set on the Hub, its commit."""
    if arguments.dataset_name is None:
        named = {name: getattr(arguments, name) for name in ("train_source", "train_target", "train_file")}
        return {name: digest_of_file(path) for name, path in named.items() if path is not None}
    folder = Path(arguments.dataset_name)
    if not folder.is_dir():
        return {"dataset_name": str(HfApi().dataset_info(arguments.dataset_name).sha)}
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): digest_of_file(path) for path in files}


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
