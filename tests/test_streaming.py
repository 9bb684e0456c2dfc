"""Streamed batches: every row once, in an order of the seed's, from any place on."""

import itertools
import json

import pyarrow
import pyarrow.parquet
import pytest

from training.arguments import PairArguments
from training.batching import PairCollator, Position
from training.data import PairStream
from training.streaming import StreamedBatches
from training.tokenized import Limits, tokenize_rows
from training.tokenizer import train_tokenizer

BUDGET = 60


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three"] * 3, vocab_size=270)


def tokenize_numbers(pairs):
    """Row n has the one source token n, and as many target tokens as its target says."""
    kept = [pair for pair in pairs if pair["target"]]
    rows = [{"input_ids": [int(pair["source"])], "labels": [7] * len(pair["target"])} for pair in kept]
    _, counts = tokenize_rows([], None, Limits(9, 9))
    return rows, counts


def stream_of(lengths, *, window_rows=32, ranks=1, rank=0, workers=0, seed=3):
    """Batches of rows whose target has as many tokens as `lengths` says; a row of none is dropped."""

    def read(first_row):
        for row in range(first_row, len(lengths)):
            yield {"source": str(row), "target": "x" * lengths[row]}

    return StreamedBatches(
        read,
        tokenize_numbers,
        num_rows=len(lengths),
        window_rows=window_rows,
        batch_tokens=BUDGET,
        seed=seed,
        num_ranks=ranks,
        rank=rank,
        collate=PairCollator(pad_token_id=1000),
        num_workers=workers,
        pin_memory=False,
    )


def rows_of(batches):
    return [[int(row) for row in batch["input_ids"][:, 0]] for batch, _ in batches]


LENGTHS = [1 + (37 * row) % 11 for row in range(200)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_comes_once_an_epoch_over_all_ranks_in_equally_many_batches(ranks):
    of_ranks = [rows_of(stream_of(LENGTHS, ranks=ranks, rank=rank).iterate(0, Position())) for rank in range(ranks)]
    assert len({len(batches) for batches in of_ranks}) == 1
    assert sorted(row for batches in of_ranks for batch in batches for row in batch) == list(range(200))
    for batch in itertools.chain(*of_ranks):
        assert len(batch) * max(LENGTHS[row] for row in batch) <= BUDGET


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_continued_from_any_batch_has_the_same_batches_after_it(epoch):
    batches = list(stream_of(LENGTHS).iterate(epoch, Position()))
    for number, (_, position) in enumerate(batches, start=1):
        following = stream_of(LENGTHS).iterate(epoch, position)
        assert rows_of(following) == rows_of(batches[number:])


def test_stopped_after_57_rows_and_continued_each_row_comes_once():
    seen, batches = [], stream_of(LENGTHS).iterate(0, Position())
    while len(seen) < 57:
        batch, position = next(batches)
        seen += batch["input_ids"][:, 0].tolist()
    seen += [row for batch in rows_of(stream_of(LENGTHS).iterate(0, position)) for row in batch]
    assert sorted(seen) == list(range(200))


def test_continuing_reads_no_row_before_the_window():
    stream = stream_of(LENGTHS)
    *_, (_, position) = itertools.islice(stream.iterate(0, Position()), 12)
    asked, read = [], stream.read
    stream.read = lambda first_row: asked.append(first_row) or read(first_row)
    next(iter(stream.iterate(0, position)))
    assert asked == [position.row]
    assert position.row >= 32


def test_the_order_is_drawn_from_seed_and_epoch_only():
    first = rows_of(stream_of(LENGTHS).iterate(0, Position()))
    assert first == rows_of(stream_of(LENGTHS).iterate(0, Position()))
    assert first != rows_of(stream_of(LENGTHS).iterate(1, Position()))
    assert first != rows_of(stream_of(LENGTHS, seed=4).iterate(0, Position()))


def test_windows_of_one_epoch_are_shuffled_each_in_its_own_way():
    equal = [5] * 128
    batches = rows_of(stream_of(equal, window_rows=64).iterate(0, Position()))
    halves = [[row for batch in batches for row in batch if row // 64 == half] for half in (0, 1)]
    assert [row - 64 for row in halves[1]] != halves[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loading_process_gives_the_same_batches(workers):
    alone = list(stream_of(LENGTHS).iterate(0, Position()))
    ahead = list(stream_of(LENGTHS, workers=workers).iterate(0, Position()))
    assert rows_of(ahead) == rows_of(alone)
    assert [position for _, position in ahead] == [position for _, position in alone]


@pytest.mark.parametrize(
    ("rows", "windows"),
    [(64, [0, 32]), (70, [0, 32]), (79, [0, 32]), (81, [0, 32, 64]), (10, [0])],
)
def test_a_short_rest_joins_the_window_before(rows, windows):
    positions = {position.row for _, position in stream_of(LENGTHS[:rows]).iterate(0, Position())}
    assert sorted(positions) == windows


def test_one_row_that_is_left_is_dealt_to_two_ranks_with_the_window_before():
    of_ranks = [rows_of(stream_of(LENGTHS[:33], ranks=2, rank=rank).iterate(0, Position())) for rank in range(2)]
    assert len(of_ranks[0]) == len(of_ranks[1])
    assert sorted(row for batches in of_ranks for batch in batches for row in batch) == list(range(33))


def test_a_first_window_without_enough_fit_rows_joins_the_next():
    lengths = [0, *[3] * 9]
    of_ranks = [
        rows_of(stream_of(lengths, window_rows=2, ranks=2, rank=rank).iterate(0, Position())) for rank in (0, 1)
    ]
    assert len(of_ranks[0]) == len(of_ranks[1])
    assert sorted(row for batches in of_ranks for batch in batches for row in batch) == list(range(1, 10))


def test_long_stretches_of_unfit_rows_are_passed_over():
    lengths = [3] * 40 + [0] * 300 + [4] * 40
    rows = [row for batch in rows_of(stream_of(lengths).iterate(0, Position())) for row in batch]
    assert sorted(rows) == [row for row, length in enumerate(lengths) if length]


def test_an_epoch_without_a_fit_row_is_refused():
    with pytest.raises(ValueError, match="no row is left to train on"):
        list(stream_of([0] * 50).iterate(0, Position()))


def test_unfit_rows_are_counted_each_for_its_first_fault(tokenizer):
    texts = [("one", "two"), ("", "two"), ("one", " "), ("o" * 30, "two"), ("o", "t" * 6), ("o" * 9, "t" * 9)]
    pairs = [{"source": source, "target": target} for source, target in texts]
    rows, counts = tokenize_rows(pairs, tokenizer, Limits(20, 20, 3.0))
    assert (counts.empty, counts.too_long, counts.uneven, counts.rows) == (2, 1, 1, 6)
    assert [len(row["labels"]) for row in rows] == [len(tokenizer("two").input_ids), 10]
    assert str(counts) == "dropped 4 of 6 rows: 2 with an empty side, 1 over a length limit, 1 too uneven"


PAIRS = [{"source": f"s{row}", "target": f"t{row}"} for row in range(7)]


def write_table(folder, suffix):
    file = folder / f"train{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), file)
    elif suffix == ".jsonl":
        file.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    else:
        rows = [("source", "target"), *((pair["source"], pair["target"]) for pair in PAIRS)]
        file.write_text("".join(",".join(row) + "\n" for row in rows))
    return PairArguments(train_file=str(file))


def aligned(folder, pairs=PAIRS):
    for side in ("source", "target"):
        (folder / f"train.{side}").write_text("".join(pair[side] + "\n" for pair in pairs))
    return PairArguments(train_source=str(folder / "train.source"), train_target=str(folder / "train.target"))


def from_a_data_set(folder):
    (folder / "set").mkdir()
    rows = [{"pair": pair} for pair in PAIRS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "set" / "train.parquet")
    columns = {"source_column": "pair.source", "target_column": "pair.target"}
    return PairArguments(dataset_name=str(folder / "set"), **columns)


SOURCES = {
    "aligned": aligned,
    **{suffix: lambda folder, suffix=suffix: write_table(folder, suffix) for suffix in (".csv", ".jsonl", ".parquet")},
    "data set": from_a_data_set,
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_data_is_read_from_any_row_on(tmp_path, source):
    stream = PairStream(SOURCES[source](tmp_path))
    for first_row in (0, 3, 6, 7):
        assert list(stream.read(first_row)) == PAIRS[first_row:]
    assert stream.num_rows == (7 if source == "aligned" else None)


def test_what_is_wrong_with_files_is_said_before_training(tmp_path):
    arguments = aligned(tmp_path)
    (tmp_path / "train.target").write_text("t\n" * 5)
    with pytest.raises(ValueError, match=r"train.source has 7 lines and .*train.target has 5"):
        PairStream(arguments)
    (tmp_path / "train.source").unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.source: there is no such file"):
        PairStream(arguments)
    table = write_table(tmp_path, ".csv")
    table.target_column = "missing"
    with pytest.raises(ValueError, match="there is no column 'missing'"):
        PairStream(table)
