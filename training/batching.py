"""Batches of similar length within a budget of tokens (section 5.1 of the paper), and their place in an epoch."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from training.ranks import leave_stopping_to_parent, loading_errors_named, stop_signals_held

Batch = dict[str, torch.Tensor]
Collator = Callable[[Sequence[dict[str, list[int]]]], Batch]


@dataclass(frozen=True)
class Position:
    """Where an epoch continues: after some batches of the window of rows that begins at a row.

    Attributes:
        row: The window's first row. Data read as a whole is one window, which begins at row 0.
        batch: Batches of the window done, on each rank.
    """

    row: int = 0
    batch: int = 0


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of row numbers, grouped by length, whose padded size stays within a budget of tokens.

    "Sentence pairs were batched together by approximate sequence length" (section 5.1). In every epoch the rows are
    sorted by the length of their longer side, and those alike in it by the difference of their sides, upwards and
    downwards in turn, so that neighbours are alike in both sides; rows alike in both come in random order. Then they
    are cut into batches, and the batches are shuffled. The cost of a batch is its number of rows times its longest
    sequence, source or target.

    Each row comes once in an epoch, over all ranks. Every rank has the same number of batches, none of them empty:
    where the batches cannot be dealt evenly, the largest are halved. The order depends on (seed, epoch) only.

    Args:
        source_lengths: Tokens of each row's source.
        target_lengths: Tokens of each row's target.
        batch_tokens: Highest cost of a batch.
        seed: Seed of the order; several numbers are one seed.
        num_ranks: Processes that share an epoch.
        rank: The one of them that this is.
        shuffle: Whether to draw an order; otherwise batches come from short to long, the same in every epoch.
        budget: What the user calls `batch_tokens`.

    Raises:
        ValueError: If a row alone is over the budget, or the rows cannot be dealt to the ranks in equally many batches.
    """

    def __init__(
        self,
        source_lengths: Sequence[int] | np.ndarray,
        target_lengths: Sequence[int] | np.ndarray,
        *,
        batch_tokens: int,
        seed: int | Sequence[int],
        num_ranks: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        budget: str = "batch_tokens",
    ) -> None:
        if len(source_lengths) != len(target_lengths):
            raise ValueError(f"there are {len(source_lengths)} sources and {len(target_lengths)} targets")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank ({rank}) must be at least 0 and less than num_ranks ({num_ranks})")
        sources, targets = (np.asarray(lengths, dtype=np.int64) for lengths in (source_lengths, target_lengths))
        self.longest = np.maximum(sources, targets)
        self.difference = np.where(self.longest % 2, sources - targets, targets - sources)
        self.batch_tokens, self.budget = batch_tokens, budget
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
        rng = np.random.default_rng((*np.atleast_1d(self.seed), self.epoch))
        rows, batches = np.arange(len(self.longest)), np.arange(len(self.batch_sizes))
        if self.shuffle:
            rng.shuffle(rows)
            rng.shuffle(batches)
        rows = rows[np.lexsort((self.difference[rows], self.longest[rows]))]  # a stable sort
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
                f"{over} of {rows} rows are longer than {self.budget} ({self.batch_tokens}), the longest, row {row}, "
                f"has {self.longest[row]} tokens: raise {self.budget}, or leave long rows out"
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


def load_ahead(dataset: Any, **options: Any) -> Iterator[Any]:
    """Yield what a `DataLoader` with these options yields, in a way that an interruption cannot change.

    The loader draws from no generator that dropout uses, and its processes leave stopping to this one.

    Raises:
        ChildProcessError: If one of its processes was killed.
    """
    loader = DataLoader(dataset, generator=torch.Generator(), worker_init_fn=leave_stopping_to_parent, **options)
    with stop_signals_held():
        items = iter(loader)
    with loading_errors_named():
        yield from items


class CachedBatches:
    """The batches of rows that are at hand, of one rank.

    Args:
        dataset: Tokenised pairs: a row by its number.
        sampler: Deals them.
        collate: Makes a batch of rows.
        num_workers: Processes that load ahead.
        pin_memory: Whether batches lie where an accelerator copies them fast.
    """

    def __init__(
        self, dataset: Any, sampler: TokenBatchSampler, collate: Collator, *, num_workers: int, pin_memory: bool
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.collate = collate
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    def iterate(self, epoch: int, position: Position) -> Iterator[tuple[Batch, Position]]:
        """Yield the batches of an epoch from a position on, each with the position after it."""
        self.sampler.set_epoch(epoch)
        batches = load_ahead(
            self.dataset,
            batch_sampler=islice(self.sampler, position.batch, None),
            collate_fn=self.collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )
        for number, batch in enumerate(batches, start=position.batch + 1):
            yield batch, Position(0, number)

    def fraction(self, position: Position) -> float:
        """Return how much of the epoch lies before the position, from 0 to 1."""
        return position.batch / len(self.sampler)

    def updates_per_epoch(self, batches_per_update: int) -> int | None:
        """Return the updates of one epoch; the last may have fewer batches than the others."""
        return -(-len(self.sampler) // batches_per_update)
