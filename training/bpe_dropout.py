"""BPE-dropout (Provilkov et al., 2020): a sentence is segmented otherwise each time it is trained on.

Byte-pair encoding gives each word one segmentation, and a small corpus shows a model no other. Here every merge is left
out with some probability while a word is put together, so that rare words also come as the parts they have in common
with others. Translation itself uses the tokenizer as it is.
"""

import functools
import itertools
import json
import random
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

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
    """The rows of one epoch, each segmented when it is asked for.

    Args:
        rows: With the texts "source" and "target".
        bpe_dropout: Segments them.
        epoch: What is drawn for a row depends on it and on the row's number.
    """

    def __init__(self, rows: Dataset, bpe_dropout: BpeDropout, epoch: int) -> None:
        self.rows, self.bpe_dropout, self.epoch = rows, bpe_dropout, epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        rng = np.random.default_rng((self.bpe_dropout.seed, self.epoch, number))
        row = self.rows[number]
        return {
            "input_ids": self.bpe_dropout.segment(row["source"], rng),
            "labels": self.bpe_dropout.segment(row["target"], rng),
        }


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
