r"""Pairs of source and target text from files, row by row, so that an error can name the file, the line and the rule.

A line is what the file says it is: "\n" or "\r\n" ends it, and nothing else.
"""

import csv
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from training.lines import read_lines

Pair = dict[str, str]
Row = tuple[str, dict[str, Any]]  # the place of a row, for messages; its columns


def read_aligned(source_path: str, target_path: str) -> Iterator[Pair]:
    """Yield each line of one text file with the same line of the other.

    Raises:
        ValueError: If a file is empty or not UTF-8, or the files have unequal line counts (the message has both).
    """
    for source, target in itertools.zip_longest(_read_lines(source_path), _read_lines(target_path)):
        if source is None or target is None:
            count_aligned(source_path, target_path)  # says what both have
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
        yield {"source": text_of(row, source_column, place), "target": text_of(row, target_column, place)}
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


def count_aligned(source_path: str, target_path: str) -> int:
    """Return how many lines two aligned files have.

    Raises:
        ValueError: If they have not as many (the message has both counts).
    """
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


def text_of(row: dict[str, Any], column: str, place: str) -> str:
    """Return the text in a column; a null is an empty text, and is counted with the empty pairs later.

    Args:
        row: Columns by name, or nested in others.
        column: A name; dots reach into nested columns.
        place: Of the row, for messages.

    Raises:
        ValueError: If there is no such column, or it holds no text.
    """
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
