"""Pairs of source and target text by split, from files or the Hub.

What is read goes into the Arrow cache of `datasets`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from datasets import Dataset, DatasetDict, Features, IterableDataset, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import HfApi

from training.arguments import PairArguments
from training.digest import digest_of_file
from training.embedded_corpus import generate_pairs
from training.pair_files import Pair, count_aligned, read_aligned, read_table, text_of

SPLITS = ("train", "validation", "test")
PAIR_FEATURES = Features({"source": Value("string"), "target": Value("string")})


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
                self.num_rows = count_aligned(source, target)
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
            yield {"source": text_of(row, source_column, place), "target": text_of(row, target_column, place)}


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
