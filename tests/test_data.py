"""Reading pairs with errors that name the place, tokenising without silent losses, and batches within a budget."""

import csv
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from training.arguments import DataArguments, PairArguments
from training.batching import PairCollator, TokenBatchSampler
from training.data import load_pairs
from training.tokenized import DroppedRows, Limits, sequence_lengths, tokenize_pairs
from training.tokenizer import train_tokenizer

PAIRS = [
    ("A dog runs.", "Ein Hund läuft."),
    ('a lone " quotation mark, and a comma', "ein einzelnes „Zeichen"),
    ("None", "NA"),
    ("2024-05-09", "1e5"),
    (" two  spaces ", "null"),
    ("page\u000cfeed, next\u0085line, \u2028 and \u2029, \u000b, \u001c", "你好 👋"),
    ("lone\rcarriage return", "nan"),
]


def arguments_for(**values):
    return DataArguments(**values)


def pairs_in(dataset):
    return list(zip(dataset["source"], dataset["target"], strict=True))


def write(path, *lines, end="\n"):
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + end.encode() for line in lines))
    return str(path)


def load_aligned(source, target):
    return load_pairs(arguments_for(train_source=source, train_target=target))["train"]


def load_table(path, **columns):
    return load_pairs(arguments_for(train_file=str(path), **columns))["train"]


# Two aligned files


def write_aligned(folder, pairs, end="\n"):
    source = write(folder / "train.en", *(source for source, _ in pairs), end=end)
    return source, write(folder / "train.de", *(target for _, target in pairs), end=end)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_aligned_files_stay_aligned_whatever_is_within_a_line(tmp_path, end):
    dataset = load_aligned(*write_aligned(tmp_path, PAIRS, end=end))
    assert pairs_in(dataset) == PAIRS
    assert dataset.column_names == ["source", "target"]


def test_a_last_line_without_an_end_is_a_line_and_a_byte_order_mark_is_none_of_the_text(tmp_path):
    source = write(tmp_path / "a", b"\xef\xbb\xbfone", "two")
    (tmp_path / "b").write_bytes(b"eins\nzwei")
    assert pairs_in(load_aligned(source, str(tmp_path / "b"))) == [("one", "eins"), ("two", "zwei")]


def test_a_blank_line_is_a_row(tmp_path):
    source, target = write(tmp_path / "a", "one", "", "three"), write(tmp_path / "b", "eins", "", "drei")
    assert pairs_in(load_aligned(source, target)) == [("one", "eins"), ("", ""), ("three", "drei")]


@pytest.mark.parametrize(("source_lines", "target_lines"), [(5, 3), (3, 5), (4, 3), (3, 4), (3, 1)])
def test_unequal_line_counts_are_refused_with_both_counts(tmp_path, source_lines, target_lines):
    source, target = write(tmp_path / "a", *["x"] * source_lines), write(tmp_path / "b", *["y"] * target_lines)
    with pytest.raises(ValueError, match=f"{source} has {source_lines} lines and {target} has {target_lines}:"):
        load_aligned(source, target)


@pytest.mark.parametrize("empty", ["a", "b"])
def test_an_empty_file_is_refused(tmp_path, empty):
    for name in "ab":
        write(tmp_path / name, *([] if name == empty else ["x"]))
    with pytest.raises(ValueError, match=f"{tmp_path / empty}: the file is empty"):
        load_aligned(str(tmp_path / "a"), str(tmp_path / "b"))


@pytest.mark.parametrize(
    ("line", "byte", "value"),
    [
        (b"caf\xe9 noir", 4, "0xe9"),  # Latin-1
        (b"\xff\xfea\x00", 1, "0xff"),  # UTF-16
        (b"\xed\xa0\x80", 1, "0xed"),  # a surrogate
        (b"cut \xe4\xbd", 5, "0xe4"),  # the last character is not whole
    ],
)
def test_undecodable_bytes_are_refused_with_file_line_and_place(tmp_path, line, byte, value):
    source, target = write(tmp_path / "a", "one", "two", "three"), write(tmp_path / "b", "eins", line, "drei")
    with pytest.raises(
        ValueError, match=f"{target}, line 2: text must be UTF-8, but byte {byte} of the line is {value}"
    ):
        load_aligned(source, target)


def test_a_file_that_does_not_exist_is_named(tmp_path):
    source = write(tmp_path / "a", "one")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'b'}: there is no such file"):
        load_aligned(source, str(tmp_path / "b"))


def test_all_splits_that_are_given_are_loaded_and_no_other(tmp_path):
    files = {}
    for split in ("train", "test"):
        files[f"{split}_source"] = write(tmp_path / f"{split}.en", split)
        files[f"{split}_target"] = write(tmp_path / f"{split}.de", split.upper())
    splits = load_pairs(arguments_for(**files))
    assert {name: pairs_in(split) for name, split in splits.items()} == {
        "train": [("train", "TRAIN")],
        "test": [("test", "TEST")],
    }


def test_a_file_that_changed_is_read_again_and_one_that_did_not_is_not(tmp_path, monkeypatch):
    source, target = write(tmp_path / "a", "one"), write(tmp_path / "b", "eins")
    assert pairs_in(load_aligned(source, target)) == [("one", "eins")]
    write(tmp_path / "b", "uno!")  # as many bytes as before
    os.utime(target, ns=(1, 1))
    assert pairs_in(load_aligned(source, target)) == [("one", "uno!")]

    def fail(*arguments):
        raise AssertionError("read again")

    monkeypatch.setattr("training.pair_files._read_lines", fail)
    assert pairs_in(load_aligned(source, target)) == [("one", "uno!")]


# Tables


def write_table(path, pairs, source_column="source", target_column="target"):
    """Write pairs in the format of the suffix, beside a third column, with the standard writers."""
    rows = [
        {"id": str(place), source_column: source, target_column: target} for place, (source, target) in enumerate(pairs)
    ]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
        return path
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        elif path.suffix == ".tsv":
            file.writelines("\t".join(values) + "\n" for values in [list(rows[0]), *(row.values() for row in rows)])
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


def test_files_of_one_name_size_and_age_are_told_apart(tmp_path, monkeypatch):
    for folder, word in (("one", "eins"), ("two", "zwei")):
        (tmp_path / folder).mkdir()
        for side in ("en", "de"):
            (tmp_path / folder / side).write_text(f"{word}\n")
            os.utime(tmp_path / folder / side, (1, 1))
        monkeypatch.chdir(tmp_path / folder)
        rows = load_pairs(PairArguments(train_source="en", train_target="de"))["train"]
        assert rows["target"][0] == word


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".json", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_text(tmp_path, suffix):
    path = write_table(tmp_path / f"train{suffix}", PAIRS, "en", "de")
    assert pairs_in(load_table(path, source_column="en", target_column="de")) == PAIRS


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".json", ".jsonl", ".parquet"])
def test_a_missing_column_is_refused_with_the_columns_that_exist(tmp_path, suffix):
    path = write_table(tmp_path / f"train{suffix}", PAIRS, "en", "de")
    with pytest.raises(ValueError, match="there is no column 'fr'; there are 'id', 'en', 'de'") as error:
        load_table(path, source_column="en", target_column="fr")
    assert str(path) in str(error.value)


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".json", ".jsonl"])
def test_an_empty_table_is_refused(tmp_path, suffix):
    path = tmp_path / f"train{suffix}"
    path.touch()
    with pytest.raises(ValueError, match=f"{path}: the file is empty"):
        load_table(path)


@pytest.mark.parametrize("suffix", [".tsv", ".csv"])
def test_a_table_with_a_header_only_is_refused(tmp_path, suffix):
    path = write(tmp_path / f"train{suffix}", {".tsv": "source\ttarget", ".csv": "source,target"}[suffix])
    with pytest.raises(ValueError, match=f"{path}: the file has no rows"):
        load_table(path)


def test_parquet_without_rows_or_damaged_is_refused(tmp_path):
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pa.table({"source": pa.array([], pa.string())}), path)
    with pytest.raises(ValueError, match=f"{path}: the file has no rows"):
        load_table(path)
    write_table(path, PAIRS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=f"{path}: not a whole parquet file"):
        load_table(path)


def test_an_unknown_suffix_is_refused(tmp_path):
    path = write(tmp_path / "train.xlsx", "a")
    with pytest.raises(ValueError, match=r"the suffix must be one of \.tsv, \.csv, .*, got '\.xlsx'"):
        load_table(path)


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
def test_undecodable_bytes_in_a_table_are_refused(tmp_path, suffix):
    header, row = {
        ".tsv": ("source\ttarget", b"caf\xe9\tx"),
        ".csv": ("source,target", b"caf\xe9,x"),
        ".jsonl": ('{"source": "a", "target": "b"}', b'{"source": "caf\xe9", "target": "x"}'),
    }[suffix]
    path = write(tmp_path / f"train{suffix}", header, row)
    with pytest.raises(ValueError, match=f"{path}, line 2: text must be UTF-8"):
        load_table(path)


def test_quotation_marks_swallow_no_lines_of_a_tsv(tmp_path):
    rows = [('"open', "a"), ("b", 'closed"'), ('""', '"c"')]
    path = write(tmp_path / "train.tsv", "source\ttarget", *("\t".join(row) for row in rows))
    assert pairs_in(load_table(path)) == rows


def test_csv_fields_hold_commas_line_ends_and_quotation_marks(tmp_path):
    path = write(tmp_path / "train.csv", "source,target", '"a, b","c', 'd"', '"say ""e""",f')
    assert pairs_in(load_table(path)) == [("a, b", "c\nd"), ('say "e"', "f")]


def test_a_csv_quotation_mark_that_is_never_closed_is_refused_where_it_opens(tmp_path):
    path = write(tmp_path / "train.csv", "source,target", '"a', 'b",c', '"c,d', "e,f", "g,h")
    with pytest.raises(ValueError, match=f"{path}, line 4: not CSV"):
        load_table(path)


def test_lines_within_csv_fields_are_counted(tmp_path):
    path = write(tmp_path / "train.csv", "source,target", '"a', "b", 'c",d', "e,f", "g")
    with pytest.raises(ValueError, match=f"{path}, line 6: 1 fields, but the header has 2"):
        load_table(path)


@pytest.mark.parametrize(("suffix", "separator"), [(".tsv", "\t"), (".csv", ",")])
@pytest.mark.parametrize("fields", [1, 3])
def test_a_row_with_another_number_of_fields_is_refused(tmp_path, suffix, separator, fields):
    path = write(
        tmp_path / f"train{suffix}", f"source{separator}target", separator.join("ab"), separator.join("c" * fields)
    )
    with pytest.raises(
        ValueError, match=rf"{path}, line 3: {fields} fields, but the header has 2 \('source', 'target'\)"
    ):
        load_table(path)


def test_a_column_name_that_occurs_twice_is_refused(tmp_path):
    path = write(tmp_path / "train.tsv", "source\ttarget\tsource", "a\tb\tc")
    with pytest.raises(ValueError, match="line 1: a column name occurs twice"):
        load_table(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('["a", "b"]', "each line must be one JSON object, got a list"),
        ('{"source": "a", "target": ', "each line must be one JSON object"),
        ("", "each line must be one JSON object"),
        ('{"source": "a"}', "there is no column 'target'; there are 'source'"),
        ('{"source": "a", "target": 5}', "column 'target' must hold text, got 5"),
        ('{"source": "a", "target": ["b"]}', r"column 'target' must hold text, got \['b'\]"),
        (r'{"source": "\ud83d", "target": "b"}', "column 'source' holds half of a surrogate pair"),
    ],
)
def test_a_malformed_json_line_is_refused_with_its_number(tmp_path, line, message):
    path = write(tmp_path / "train.jsonl", '{"source": "a", "target": "b"}', line)
    with pytest.raises(ValueError, match=f"{path}, line 2: {message}"):
        load_table(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_dotted_column_reaches_into_a_nested_one(tmp_path, suffix):
    path = tmp_path / f"train{suffix}"
    rows = [{"translation": {"en": source, "de": target}} for source, target in PAIRS]
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        write(path, *map(json.dumps, rows))
    columns = {"source_column": "translation.en", "target_column": "translation.de"}
    assert pairs_in(load_table(path, **columns)) == PAIRS
    with pytest.raises(ValueError, match=r"there is no column 'translation\.fr'; there are 'translation'"):
        load_table(path, **columns | {"target_column": "translation.fr"})


def test_a_column_whose_own_name_has_a_dot_is_found(tmp_path):
    path = write(tmp_path / "train.tsv", "text.en\ttext.de", "a\tb")
    assert pairs_in(load_table(path, source_column="text.en", target_column="text.de")) == [("a", "b")]


def test_a_null_is_an_empty_text(tmp_path):
    path = write(tmp_path / "train.jsonl", '{"source": "a", "target": null}', '{"source": "b", "target": "c"}')
    assert pairs_in(load_table(path)) == [("a", ""), ("b", "c")]


def test_the_embedded_corpus_is_loaded_by_name():
    splits = load_pairs(arguments_for(embedded_corpus="en-de"))
    assert list(splits) == ["train", "validation", "test"]
    assert all(split.column_names == ["source", "target"] for split in splits.values())


# Data sets of the Hub. An id and a folder of files go the same way through `datasets`; the folder needs no server.


def data_set(folder, columns=("en", "de"), splits=("train", "validation", "test")):
    folder.mkdir()
    for place, split in enumerate(splits):
        rows = [{"translation": dict(zip(columns, pair, strict=True))} for pair in PAIRS[place:]]
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return str(folder)


COLUMNS = {"source_column": "translation.en", "target_column": "translation.de"}


def test_a_data_set_gives_its_three_splits(tmp_path):
    splits = load_pairs(arguments_for(dataset_name=data_set(tmp_path / "pairs"), **COLUMNS))
    assert {name: pairs_in(split) for name, split in splits.items()} == {
        "train": PAIRS,
        "validation": PAIRS[1:],
        "test": PAIRS[2:],
    }
    assert splits["train"].column_names == ["source", "target"]


def test_splits_of_a_data_set_can_be_renamed_sliced_and_left_out(tmp_path):
    name = data_set(tmp_path / "pairs", splits=("train", "test"))
    chosen = {"train_split": "train[:4]", "validation_split": "test", "test_split": ""}
    splits = load_pairs(arguments_for(dataset_name=name, **chosen, **COLUMNS))
    assert {name: pairs_in(split) for name, split in splits.items()} == {"train": PAIRS[:4], "validation": PAIRS[1:]}


def test_a_split_that_a_data_set_lacks_is_refused_with_those_it_has(tmp_path):
    name = data_set(tmp_path / "pairs", splits=("train", "test"))
    with pytest.raises(
        ValueError, match=r"split 'validation': .*'train', 'test'.*an empty validation_split does without"
    ):
        load_pairs(arguments_for(dataset_name=name, **COLUMNS))


def test_a_column_that_a_data_set_lacks_is_refused_with_those_it_has(tmp_path):
    name = data_set(tmp_path / "pairs")
    message = r"split 'train': there is no column 'target'; there are 'translation\.en', 'translation\.de'"
    with pytest.raises(ValueError, match=message):
        load_pairs(arguments_for(dataset_name=name, source_column="translation.en"))


def test_a_data_set_column_that_is_not_text_is_refused_and_a_null_is_empty(tmp_path):
    name = data_set(tmp_path / "pairs", splits=())
    table = pa.table({"source": ["a", "b"], "target": ["c", None], "number": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "pairs" / "train.parquet")
    only_train = {"validation_split": "", "test_split": ""}
    splits = load_pairs(arguments_for(dataset_name=name, **only_train))
    assert pairs_in(splits["train"]) == [("a", "c"), ("b", "")]
    with pytest.raises(ValueError, match="column 'number' must hold text, got"):
        load_pairs(arguments_for(dataset_name=name, target_column="number", **only_train))


class HubWithOneDataSet(BaseHTTPRequestHandler):
    """The part of the Hub's interface that reading a data set needs."""

    commit = "0" * 40
    files: dict[str, bytes] = {}  # noqa: RUF012

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/datasets/someone/pairs"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "someone/pairs", "sha": self.commit, "private": False, "gated": False, "siblings": siblings}
            self.answer(json.dumps(self.entries() if "/tree/" in path else info).encode())
        elif path.startswith("/datasets/someone/pairs/resolve/") and path.split("/", 6)[-1] in self.files:
            self.answer(self.files[path.split("/", 6)[-1]])
        else:
            self.answer(b"", status=404, headers={"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def entries(self):
        return [
            {"type": "file", "path": name, "size": len(text), "oid": f"{len(text):040}"}
            for name, text in self.files.items()
        ]

    def answer(self, body, status=200, headers=None):
        self.send_response(status)
        headers = headers or {"ETag": f'"{len(body):040}"'}
        for name, value in (headers | {"Content-Length": str(len(body)), "X-Repo-Commit": self.commit}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


LOAD_FROM_HUB = """
import json
from training.arguments import DataArguments
from training.data import load_pairs
splits = load_pairs(DataArguments(
    dataset_name="someone/pairs", source_column="translation.en", target_column="translation.de", test_split=""))
print(json.dumps({name: list(zip(split["source"], split["target"])) for name, split in splits.items()}))
"""


@pytest.mark.slow
def test_a_data_set_id_is_loaded_from_the_hub(tmp_path):
    data_set(tmp_path / "pairs", splits=("train", "validation"))
    HubWithOneDataSet.files = {path.name: path.read_bytes() for path in (tmp_path / "pairs").iterdir()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubWithOneDataSet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    try:
        result = subprocess.run(
            [sys.executable, "-c", LOAD_FROM_HUB], env=environment, capture_output=True, text=True, check=False
        )
    finally:
        server.shutdown()
        server.server_close()
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "train": [list(pair) for pair in PAIRS],
        "validation": [list(pair) for pair in PAIRS[1:]],
    }


# Tokenising


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([text for pair in PAIRS for text in pair], vocab_size=260)  # a token a byte


def dataset_of(*pairs):
    return Dataset.from_dict({"source": [pair[0] for pair in pairs], "target": [pair[1] for pair in pairs]})


UNFIT = [
    ("abc", "de"),  # 4 and 3 tokens
    ("", "de"),
    ("abc", " \t\u3000"),
    ("abcdef", "de"),  # 7
    ("abc", "defgh"),  # 6
    ("", "defghijkl"),  # empty, and too long besides
    ("abcd", "efg"),  # 5 and 4: just within the limits
]


def test_a_row_becomes_the_ids_of_both_sides_with_eos(tokenizer):
    tokenized, dropped = tokenize_pairs(dataset_of(*PAIRS), tokenizer, Limits(99, 99))
    assert tokenized.column_names == ["input_ids", "labels"]
    for row, (source, target) in zip(tokenized, PAIRS, strict=True):
        assert row["input_ids"][-1] == row["labels"][-1] == 2
        assert tokenizer.decode(row["input_ids"], skip_special_tokens=True) == source
        assert tokenizer.decode(row["labels"], skip_special_tokens=True) == target
    assert dropped == DroppedRows(empty=0, too_long=0, rows=7)


def test_empty_and_over_long_rows_are_dropped_counted_and_reported(tokenizer):
    tokenized, dropped = tokenize_pairs(dataset_of(*UNFIT), tokenizer, Limits(5, 4))
    kept = [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in tokenized]
    assert kept == ["abc", "abcd"]
    assert dropped == DroppedRows(empty=3, too_long=2, rows=7)
    assert str(dropped) == "dropped 5 of 7 rows: 3 with an empty side, 2 over a length limit"


def test_evaluation_keeps_every_row_in_its_place_and_cuts_the_over_long(tokenizer):
    tokenized, counts = tokenize_pairs(dataset_of(*UNFIT), tokenizer, Limits(5, 4), drop=False)
    texts = [
        tuple(tokenizer.decode(row[side], skip_special_tokens=True) for side in ("input_ids", "labels"))
        for row in tokenized
    ]
    assert texts == [
        ("abc", "de"),
        ("", "de"),
        ("abc", " \t\ufffd"),  # cut within a character
        ("abcd", "de"),
        ("abc", "def"),
        ("", "def"),
        ("abcd", "efg"),
    ]
    assert all(row[side][-1] == 2 for row in tokenized for side in ("input_ids", "labels"))
    assert (counts.empty, counts.too_long, counts.rows, counts.kept) == (3, 2, 7, True)
    assert "kept all of 7 rows: 3 with an empty side, 2 over a length limit and cut to it" in str(counts)


def test_dropping_every_row_is_refused_with_the_counts_and_limits(tokenizer):
    with pytest.raises(
        ValueError, match=r"no row is left to train on: dropped 2 of 2 rows: 1 with .*, 1 over .*max_source_length 3"
    ):
        tokenize_pairs(dataset_of(("", ""), ("abc", "d")), tokenizer, Limits(3, 9))


@pytest.mark.parametrize("num_proc", [None, 2])
def test_tokenisation_is_done_once_whatever_the_tokenizer_did_meanwhile(tokenizer, tmp_path, num_proc):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "pairs.tsv").write_text("source\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS[:3] * 4))
    seen = []
    for _ in range(2):
        rows = load_pairs(PairArguments(train_file=str(tmp_path / "pairs.tsv")))["train"]
        loaded = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        loaded("a text", padding="max_length", max_length=40, truncation=True)
        tokenized, _ = tokenize_pairs(rows, loaded, Limits(99, 99), num_proc=num_proc)
        seen.append([(file["filename"], os.stat(file["filename"]).st_mtime_ns) for file in tokenized.cache_files])
    assert seen[0] == seen[1] != []


def test_special_tokens_in_the_text_are_text(tokenizer):
    tokenized, _ = tokenize_pairs(dataset_of(("</s>", "<pad>")), tokenizer, Limits(9, 9))
    assert [len(tokenized[0][side]) for side in ("input_ids", "labels")] == [4 + 1, 5 + 1]


def test_sequence_lengths_follow_the_rows_that_are_kept(tokenizer):
    tokenized, _ = tokenize_pairs(dataset_of(*UNFIT), tokenizer, Limits(5, 4))
    source_lengths, target_lengths = sequence_lengths(tokenized)
    assert source_lengths.tolist() == [4, 5]
    assert target_lengths.tolist() == [3, 4]


# Batches


def lengths(rows, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    return rng.integers(1, longest + 1, rows), rng.integers(1, longest + 1, rows)


def samplers(rows, ranks, batch_tokens=128, **options):
    source_lengths, target_lengths = lengths(rows)
    return [
        TokenBatchSampler(
            source_lengths, target_lengths, batch_tokens=batch_tokens, seed=5, num_ranks=ranks, rank=rank, **options
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [11, 64, 1000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_comes_once_an_epoch_over_all_ranks_in_equally_many_batches(rows, ranks, shuffle):
    parts = samplers(rows, ranks, shuffle=shuffle)
    for epoch in range(3):
        for part in parts:
            part.set_epoch(epoch)
        batches = [list(part) for part in parts]
        assert {len(part) for part in batches} == {len(part) for part in parts} == {len(parts[0])}
        assert all(batch for part in batches for batch in part)
        assert sorted(row for part in batches for batch in part for row in batch) == list(range(rows))


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_padded_size_of_a_batch_stays_within_the_budget(ranks):
    source_lengths, target_lengths = lengths(1000)
    longest = np.maximum(source_lengths, target_lengths)
    costs = [len(batch) * longest[batch].max() for part in samplers(1000, ranks) for batch in part]
    assert max(costs) <= 128
    assert np.mean(costs) > 0.75 * 128  # and most of it is used


def test_batches_group_equal_lengths():
    """Padding: 1,000 rows up to 40 long in batches of 128 tokens; unsorted batches of 4 would be about 40 % padding."""
    rows = np.random.default_rng(0).integers(1, 41, 1000)
    (sampler,) = [TokenBatchSampler(rows, rows, batch_tokens=128, seed=0)]
    padded = sum(len(batch) * rows[batch].max() for batch in sampler)
    assert 1 - rows.sum() / padded < 0.03


def test_among_rows_of_one_cost_the_shorter_sides_are_grouped_too():
    source_lengths = np.random.default_rng(0).integers(1, 21, 1000)
    sampler = TokenBatchSampler(source_lengths, [20] * 1000, batch_tokens=80, seed=0)
    padded = sum(len(batch) * source_lengths[batch].max() for batch in sampler)
    assert 1 - source_lengths.sum() / padded < 0.03


def test_the_order_is_drawn_from_seed_and_epoch_only():
    source_lengths, target_lengths = lengths(300)

    def order(seed, epoch):
        np.random.seed(epoch)
        torch.manual_seed(epoch)
        sampler = TokenBatchSampler(source_lengths, target_lengths, batch_tokens=128, seed=seed)
        list(sampler)  # an earlier pass changes nothing
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 4) == order(1, 4)
    assert order(1, 4) != order(1, 5)
    assert order(1, 4) != order(2, 4)
    assert order(1, 4) != order(4, 1)
    assert {frozenset(batch) for batch in order(1, 4)} != {frozenset(batch) for batch in order(1, 5)}


def test_batches_of_an_epoch_do_not_come_in_order_of_length():
    source_lengths, target_lengths = lengths(1000)
    longest = np.maximum(source_lengths, target_lengths)
    widths = [longest[batch].max() for batch in samplers(1000, 1)[0]]
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.2


def test_without_shuffling_batches_come_from_short_to_long_in_every_epoch():
    (sampler,) = samplers(200, 1, shuffle=False)
    longest = np.maximum(*lengths(200))
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) == first
    assert np.all(np.diff(longest[[row for batch in first for row in batch]]) >= 0)


def test_rows_over_the_budget_are_refused_with_the_longest_and_the_budget():
    with pytest.raises(
        ValueError, match=r"2 of 4 rows are longer than batch_tokens \(16\), the longest, row 2, has 30 tokens"
    ):
        TokenBatchSampler([5, 16, 3, 17], [5, 16, 30, 2], batch_tokens=16, seed=0)


def test_a_row_that_fills_the_budget_is_a_batch():
    assert sorted(TokenBatchSampler([16, 3], [2, 16], batch_tokens=16, seed=0)) == [[0], [1]]


def test_eleven_rows_of_different_widths_go_evenly_to_two_ranks():
    widths = [3, 9, 4, 30, 8, 12, 5, 7, 20, 6, 11]
    parts = [
        list(TokenBatchSampler(widths, widths, batch_tokens=32, seed=0, num_ranks=2, rank=rank)) for rank in range(2)
    ]
    assert len(parts[0]) == len(parts[1])
    assert all(batch for part in parts for batch in part)
    assert sorted(row for part in parts for batch in part for row in batch) == list(range(11))


def test_one_batch_is_split_among_three_ranks():
    parts = [
        list(TokenBatchSampler([2] * 5, [2] * 5, batch_tokens=99, seed=0, num_ranks=3, rank=rank)) for rank in range(3)
    ]
    assert [len(part) for part in parts] == [1, 1, 1]
    assert sorted(len(part[0]) for part in parts) == [1, 2, 2]


@pytest.mark.parametrize(
    ("rows", "ranks", "message"),
    [
        (0, 1, "0 rows cannot make a batch for each of 1 ranks"),
        (2, 3, "2 rows cannot make a batch for each of 3 ranks"),
        (4, 3, r"4 rows, one a batch, cannot be dealt evenly to 3 ranks: raise batch_tokens \(9\)"),
    ],
)
def test_rows_that_cannot_be_dealt_evenly_are_refused(rows, ranks, message):
    with pytest.raises(ValueError, match=message):
        TokenBatchSampler([9] * rows, [9] * rows, batch_tokens=9, seed=0, num_ranks=ranks)


def test_lengths_and_ranks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 sources and 2 targets"):
        TokenBatchSampler([1, 2, 3], [1, 2], batch_tokens=9, seed=0)
    with pytest.raises(ValueError, match=r"rank \(2\) must be at least 0 and less than num_ranks \(2\)"):
        TokenBatchSampler([1, 2], [1, 2], batch_tokens=9, seed=0, num_ranks=2, rank=2)


def test_the_collator_pads_on_the_right_and_hides_padding_from_mask_and_loss():
    rows = [{"input_ids": [5, 6, 2], "labels": [7, 2]}, {"input_ids": [8, 2], "labels": [9, 10, 11, 2]}]
    batch = PairCollator(pad_token_id=1)(rows)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 2], [8, 2, 1]],
        "attention_mask": [[1, 1, 1], [1, 1, 0]],
        "labels": [[7, 2, -100, -100], [9, 10, 11, 2]],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


@pytest.mark.parametrize(("multiple", "source_width", "target_width"), [(None, 3, 4), (2, 4, 4), (3, 3, 6), (8, 8, 8)])
def test_the_collator_rounds_widths_up(multiple, source_width, target_width):
    rows = [{"input_ids": [5, 6, 2], "labels": [7, 2]}, {"input_ids": [8, 2], "labels": [9, 10, 11, 2]}]
    batch = PairCollator(pad_token_id=1, pad_to_multiple_of=multiple)(rows)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, source_width)
    assert batch["labels"].shape == (2, target_width)
    assert batch["attention_mask"].sum() == 5
    assert (batch["labels"] != -100).sum() == 6


def test_a_loader_gives_every_token_once(tokenizer):
    tokenized, _ = tokenize_pairs(dataset_of(*PAIRS), tokenizer, Limits(99, 99))
    sampler = TokenBatchSampler(*sequence_lengths(tokenized), batch_tokens=100, seed=0)
    loader = DataLoader(tokenized, batch_sampler=sampler, collate_fn=PairCollator(tokenizer.pad_token_id))
    tokens = [(batch["attention_mask"].sum().item(), (batch["labels"] != -100).sum().item()) for batch in loader]
    expected = [sum(len(text.encode()) + 1 for text in side) for side in zip(*PAIRS, strict=True)]
    assert [sum(side) for side in zip(*tokens, strict=True)] == expected
