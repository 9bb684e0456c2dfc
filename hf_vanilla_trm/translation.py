"""Text in, text out: what `VanillaTrmForConditionalGeneration.translate` does, for a few texts or for an endless stream
of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch

from .decoding import DecodingOptions
from .generation import search

BATCH_TOKENS = 8192
"""Source tokens times beams in a batch, padding included."""
WINDOW = 4096
"""Texts of a stream that are read before any of them is translated, so that batches hold similar lengths."""


class Translation(NamedTuple):
    """A translation of a text.

    Attributes:
        text: Without special tokens.
        score: Of the search; see `Hypothesis`.
        tokens: Behind the start token, EOS included.
        token_log_probs: Of each token, given those before it.
    """

    text: str
    score: float
    tokens: list[int]
    token_log_probs: list[float]


def translate_by_length(
    models: Sequence[Any],
    tokenizer: Any,
    texts: Sequence[str],
    options: DecodingOptions,
    *,
    prefixes: Sequence[str] | None = None,
    batch_tokens: int = BATCH_TOKENS,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[int, list[Translation]]]:
    """Translate texts in batches of similar length, the longest first.

    Args:
        models: One, or an ensemble; in evaluation mode.
        tokenizer: The models' own.
        texts: One of nothing but white space is translated to "", with a score of 0, without the models.
        options: How to decode.
        prefixes: With what each translation must begin.
        batch_tokens: Sources times longest source times beams, at most, unless one source alone is longer.
        generator: Draws samples.

    Yields:
        The place of a text, and its translations as `search` orders them.

    Raises:
        ValueError: As `VanillaTrmForConditionalGeneration.search`.
    """
    blank = [place for place, text in enumerate(texts) if not text.strip()]
    yield from ((place, [Translation("", 0.0, [], [])]) for place in blank)
    filled = sorted(set(range(len(texts))).difference(blank))
    if not filled:
        return
    encoded = tokenizer([texts[place] for place in filled], verbose=False)["input_ids"]
    sources = dict(zip(filled, encoded, strict=True))
    filled.sort(key=lambda place: (-len(sources[place]), place))
    while filled:
        rows = max(1, batch_tokens // (options.num_beams * len(sources[filled[0]])))
        batch, filled = filled[:rows], filled[rows:]
        padded = tokenizer.pad(
            {"input_ids": [sources[place] for place in batch]}, padding_side="right", return_tensors="pt"
        ).to(models[0].device)
        begin = None if prefixes is None else _tokens_of(tokenizer, [prefixes[place] for place in batch])
        found = search(
            models, padded["input_ids"], padded["attention_mask"], options, prefixes=begin, generator=generator
        )
        for place, hypotheses in zip(batch, found, strict=True):
            decoded = tokenizer.batch_decode([one.tokens for one in hypotheses], skip_special_tokens=True)
            yield (
                place,
                [
                    Translation(text, one.score, one.tokens, one.token_log_probs)
                    for text, one in zip(decoded, hypotheses, strict=True)
                ],
            )


def _tokens_of(tokenizer: Any, prefixes: Sequence[str]) -> list[list[int]]:
    """The tokens of prefixes, without EOS."""
    if not any(prefixes):
        return [[] for _ in prefixes]
    tokens: list[list[int]] = tokenizer(text_target=list(prefixes), add_special_tokens=False)["input_ids"]
    return tokens


def translate_stream(
    models: Sequence[Any],
    tokenizer: Any,
    texts: Iterable[str],
    options: DecodingOptions,
    *,
    prefixes: Iterable[str] | None = None,
    batch_tokens: int = BATCH_TOKENS,
    window: int = WINDOW,
    generator: torch.Generator | None = None,
) -> Iterator[list[Translation]]:
    """Translate texts one after the other, whatever their number, in their order.

    Args:
        models: As for `translate_by_length`, like all that is not named here.
        tokenizer: See there.
        texts: No more than `window` of them are held at a time.
        options: See there.
        prefixes: As many as there are texts.
        batch_tokens: See there.
        window: Texts that are read ahead.
        generator: See there.

    Yields:
        The translations of each text.
    """
    pairs = zip(texts, repeat("")) if prefixes is None else zip(texts, prefixes, strict=True)
    while ahead := list(islice(pairs, window)):
        read, begin = zip(*ahead, strict=True)
        done = dict(
            translate_by_length(
                models, tokenizer, read, options, prefixes=begin, batch_tokens=batch_tokens, generator=generator
            )
        )
        yield from (done[place] for place in range(len(read)))
