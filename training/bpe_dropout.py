"""BPE-dropout (Provilkov et al., 2020): a sentence is segmented otherwise each time it is trained on.

Byte-pair encoding gives each word one segmentation, and a small corpus shows a model no other. Here every merge is left
out with some probability while a word is put together, so that rare words also come as the parts they have in common
with others. Translation itself uses the tokenizer as it is.
"""

import functools
import itertools
import json
import random
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from datasets import Dataset
from tokenizers.pre_tokenizers import ByteLevel
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from training.batching import Batch, CachedBatches, Position, TokenBatchSampler
from training.tokenized import sequence_lengths

SAMPLES = 32
"""Segmentations of a word: drawn once, one of them is taken whenever the word occurs."""
WORDS_KEPT = 50_000
"""Words whose segmentations stay in memory; those of others are drawn again, to the same effect."""


class BpeDropout:
    """Segments texts at random, from a seed.

    Args:
        tokenizer: A byte-level BPE tokenizer, as `train_tokenizer` gives.
        rate: Probability of leaving out a merge; 0 gives the tokenizer's own segmentation.
        seed: What is drawn depends on it, and on what is asked for, alone.

    Raises:
        ValueError: If the tokenizer is of another kind.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, rate: float, seed: int) -> None:
        _check(tokenizer)
        self.tokenizer, self.rate, self.seed = tokenizer, rate, seed
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        self.ids: dict[str, int] = model["vocab"]
        self.rank = {(left, right): rank for rank, (left, right) in enumerate(model["merges"])}
        self.samples = functools.lru_cache(maxsize=WORDS_KEPT)(self._samples)

    def segment(self, text: str, rng: np.random.Generator) -> list[int]:
        """Return the ids of a segmentation of a text, and EOS."""
        words = self.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        ids: list[int] = []
        for (word, _), sample in zip(words, rng.integers(SAMPLES, size=len(words)), strict=True):
            ids += self.samples(word)[sample]
        return [*ids, self.tokenizer.eos_token_id]

    def draw(self, word: str, generator: random.Random) -> list[str]:
        """Return the pieces of a word: algorithm 1 of the paper.

        In each step every merge that is possible is left out with probability `rate`; of the others the one that the
        tokenizer learned first is made, and where there is none the word is done.
        """
        pieces = list(word)
        while True:
            possible = [
                (rank, place)
                for place, pair in enumerate(itertools.pairwise(pieces))
                if (rank := self.rank.get(pair)) is not None and generator.random() >= self.rate
            ]
            if not possible:
                return pieces
            _, place = min(possible)
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]

    def _samples(self, word: str) -> list[tuple[int, ...]]:
        generator = random.Random(f"{self.seed} {word}")
        drawn = [tuple(self.ids[piece] for piece in self.draw(word, generator)) for _ in range(SAMPLES)]
        distinct = {sample: sample for sample in drawn}
        return [distinct[sample] for sample in drawn]  # equal ones are one tuple in memory


class SegmentedRows:
    """The rows of an epoch, segmented for it.

    Args:
        rows: With the texts "source" and "target", and the tokenizer's own segmentation "input_ids" and "labels".
        bpe_dropout: Segments them. What is drawn for a row depends on its number and the epoch.
        epoch: Which it is.
        longest: Most tokens of a side; a row that would have more keeps the tokenizer's own segmentation.
        quiet: Whether to show no progress.
    """

    def __init__(self, rows: Dataset, bpe_dropout: BpeDropout, epoch: int, longest: int, *, quiet: bool) -> None:
        # All rows one behind another: a list for each would take several times the memory.
        self.ids, self.ends = array("i"), [0]
        bar = tqdm(rows, desc="Segmenting", unit="row", leave=False, disable=quiet, delay=5)
        for number, row in enumerate(bar):
            rng = np.random.default_rng((bpe_dropout.seed, epoch, number))
            sides = [bpe_dropout.segment(row["source"], rng), bpe_dropout.segment(row["target"], rng)]
            if max(map(len, sides)) > longest:
                sides = [row["input_ids"], row["labels"]]
            for side in sides:
                self.ids.extend(side)
                self.ends.append(len(self.ids))

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of each source and of each target."""
        lengths = np.diff(self.ends)
        return lengths[::2], lengths[1::2]

    def __len__(self) -> int:
        return len(self.ends) // 2

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        start, middle, end = self.ends[2 * number : 2 * number + 3]
        return {"input_ids": self.ids[start:middle].tolist(), "labels": self.ids[middle:end].tolist()}


class SegmentedBatches:
    """The batches of rows that are at hand and are segmented anew in each epoch, of one rank.

    Args:
        rows: As for `SegmentedRows`.
        bpe_dropout: Segments them.
        dealing: Further arguments of `TokenBatchSampler`.
        loading: Further arguments of `CachedBatches`.

    Raises:
        ValueError: As for `TokenBatchSampler`.
    """

    def __init__(
        self, rows: Dataset, bpe_dropout: BpeDropout, *, dealing: dict[str, Any], loading: dict[str, Any]
    ) -> None:
        self.rows, self.bpe_dropout, self.dealing, self.loading = rows, bpe_dropout, dealing, loading
        self.sampler = TokenBatchSampler(*sequence_lengths(rows), **dealing)

    def iterate(self, epoch: int, position: Position) -> Iterator[tuple[Batch, Position]]:
        """Yield the batches of an epoch from a position on, each with the position after it."""
        longest, quiet = self.dealing["batch_tokens"], self.dealing["rank"] != 0
        rows = SegmentedRows(self.rows, self.bpe_dropout, epoch, longest, quiet=quiet)
        self.sampler = TokenBatchSampler(*rows.lengths(), **self.dealing)
        yield from CachedBatches(rows, self.sampler, **self.loading).iterate(epoch, position)

    def fraction(self, position: Position) -> float:
        """Return how much of the epoch lies before the position, from 0 to 1."""
        return position.batch / len(self.sampler)

    def updates_per_epoch(self, batches_per_update: int) -> int | None:
        """Return None: each epoch has as many as its segmentations make."""
        del batches_per_update
        return None


def _check(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose segmentation is more than merges of the bytes of words."""
    rule = "bpe_dropout needs a byte-level BPE tokenizer, such as is trained without --tokenizer"
    if not tokenizer.is_fast:
        raise ValueError(f"{rule}: this one is a {type(tokenizer).__name__}")
    state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    model, bytes_ = state["model"], "ByteLevel" in json.dumps(state["pre_tokenizer"])
    if model["type"] != "BPE" or not bytes_:
        raise ValueError(f"{rule}: the model of this one is {model['type']}{'' if bytes_ else ' of characters'}")
    further = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "ignore_merges")
    if used := [name for name in further if model.get(name)]:
        raise ValueError(f"{rule}: this one has {used[0]} ({model[used[0]]})")
    if state["normalizer"] is not None:
        raise ValueError(f"{rule}: this one changes a text before (normalizer {state['normalizer']['type']})")
    if not tokenizer.split_special_tokens:
        raise ValueError(f"{rule}: this one finds special tokens in a text (split_special_tokens is False)")
    if missing := set(ByteLevel.alphabet()).difference(model["vocab"]):
        raise ValueError(f"{rule}: the vocabulary of this one lacks {len(missing)} of the 256 bytes")
