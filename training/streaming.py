"""Batches of a corpus that is read on the way, in memory that does not grow with it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from training.batching import Batch, Collator, Position, TokenBatchSampler, load_ahead
from training.pair_files import Pair
from training.tokenized import DroppedRows, TokenizedPair

logger = logging.getLogger(__name__)

PREFETCHED_BATCHES = 16
"""Batches that the loading process keeps ready, in shared memory: it makes them a window at a time."""


class StreamedBatches(IterableDataset):
    """The batches of rows that are read one after another, of one rank.

    The rows come in windows of `window_rows`, in the order of the data. Within a window they are dealt and shuffled as
    `TokenBatchSampler` does it with all rows, by (seed, first row, epoch): each row comes once in an epoch over all
    ranks, which have equally many batches. Every rank reads and tokenises all rows. A window with less than half of
    its rows, as the last one often is, is joined to its neighbour.

    Args:
        read: Yields the pairs of the data from a row on, in their order.
        tokenize: Turns pairs into token ids, without those that are unfit for training, and counts these.
        num_rows: Rows of the data, if that is known.
        window_rows: Rows that are held and shuffled at a time.
        batch_tokens: Highest cost of a batch; no row may cost more than half of it, so that every window can be dealt.
        seed: Seed of the order.
        num_ranks: Processes that share an epoch.
        rank: The one of them that this is.
        collate: Makes a batch of rows.
        num_workers: 0, or more for one process that reads ahead; a stream gains nothing by several.
        pin_memory: Whether batches lie where an accelerator copies them fast.
    """

    def __init__(
        self,
        read: Callable[[int], Iterator[Pair]],
        tokenize: Callable[[Sequence[Pair]], tuple[list[TokenizedPair], DroppedRows]],
        *,
        num_rows: int | None,
        window_rows: int,
        batch_tokens: int,
        seed: int,
        num_ranks: int,
        rank: int,
        collate: Collator,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self.read = read
        self.tokenize = tokenize
        self.num_rows = num_rows
        self.window_rows = window_rows
        self.dealing = {"batch_tokens": batch_tokens, "num_ranks": num_ranks, "rank": rank}
        self.seed = seed
        self.collate = collate
        self.num_workers = num_workers
        self.pin_memory = pin_memory

    def iterate(self, epoch: int, position: Position) -> Iterator[tuple[Batch, Position]]:
        """Yield the batches of an epoch from a position on, each with the position after it.

        Raises:
            ValueError: If a row cannot be read, or no row of the epoch is fit for training.
        """
        self.epoch, self.position = epoch, position
        ahead: dict[str, Any] = {"prefetch_factor": PREFETCHED_BATCHES} if self.num_workers else {}
        items = load_ahead(
            self,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=min(1, self.num_workers),
            pin_memory=self.pin_memory,
            **ahead,
        )
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item

    def __iter__(self) -> Iterator[tuple[Batch, Position] | Exception]:
        """Yield what `iterate` does; an error as an item, since a loading process would bury it in a traceback."""
        try:
            yield from self._dealt()
        except (OSError, ValueError) as error:
            yield error

    def _dealt(self) -> Iterator[tuple[Batch, Position]]:
        self.dropped = DroppedRows()
        yielded = False
        for first_row, pairs in self._joined_windows(self.position.row):
            sources, targets = ([len(pair[side]) for pair in pairs] for side in ("input_ids", "labels"))
            sampler = TokenBatchSampler(sources, targets, seed=(self.seed, first_row), **self.dealing)
            sampler.set_epoch(self.epoch)
            done = self.position.batch if first_row == self.position.row else 0
            for number, rows in enumerate(islice(sampler, done, None), start=done + 1):
                yield self.collate([pairs[row] for row in rows]), Position(first_row, number)
                yielded = True
        if not yielded and self.position == Position():
            raise ValueError(f"no row is left to train on: {self.dropped}")
        logger.info("epoch %d: %s", self.epoch + 1, self.dropped)

    def fraction(self, position: Position) -> float:
        """Return how much of the epoch lies before the position's window, from 0 to 1; 0 if that is not known."""
        return position.row / self.num_rows if self.num_rows else 0.0

    def updates_per_epoch(self, batches_per_update: int) -> int | None:
        """Return None: only reading them all would tell."""
        del batches_per_update
        return None

    def _joined_windows(self, first_row: int) -> Iterator[tuple[int, list[TokenizedPair]]]:
        """Yield windows of fit rows and the row each begins at, without such as are too short to be dealt well."""
        held: tuple[int, list[TokenizedPair]] | None = None
        for row, pairs in self._windows(first_row):
            if held is not None:
                together, shorter = len(held[1]) + len(pairs), min(len(held[1]), len(pairs))
                is_short = 2 * shorter < self.window_rows and together <= 2 * self.window_rows
                if is_short or shorter < self.dealing["num_ranks"]:
                    held[1].extend(pairs)
                    continue
                yield held
            held = row, pairs
        if held is not None and held[1]:
            yield held

    def _windows(self, first_row: int) -> Iterator[tuple[int, list[TokenizedPair]]]:
        rows = self.read(first_row)
        while window := list(islice(rows, self.window_rows)):
            pairs, dropped = self.tokenize(window)
            self.dropped += dropped
            yield first_row, pairs
            first_row += len(window)


def _as_it_is(item: Any) -> Any:
    return item
