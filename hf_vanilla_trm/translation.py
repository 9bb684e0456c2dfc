"""Text in, text out: what `VanillaTrmForConditionalGeneration.translate` does, for a few texts or for an endless stream
of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .decoding import DecodingOptions, Hypothesis, SamplingOptions
from .generation import search
from .projections import is_watched
from .threads import MOST_WORKERS, in_threads

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
    begin = None
    if prefixes is not None:
        begin = dict(zip(filled, _tokens_of(tokenizer, [prefixes[place] for place in filled]), strict=True))
    found = search_by_length(models, sources, options, prefixes=begin, batch_tokens=batch_tokens, generator=generator)
    for place, hypotheses in found:
        decoded = tokenizer.batch_decode([one.tokens for one in hypotheses], skip_special_tokens=True)
        yield (
            place,
            [
                Translation(text, one.score, one.tokens, one.token_log_probs)
                for text, one in zip(decoded, hypotheses, strict=True)
            ],
        )


def search_by_length(
    models: Sequence[Any],
    sources: Mapping[int, Sequence[int]],
    options: DecodingOptions,
    *,
    prefixes: Mapping[int, Sequence[int]] | None = None,
    batch_tokens: int = BATCH_TOKENS,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Search, or sample, for sources in batches of similar length, the longest first; on a CPU several at once.

    Args:
        models: One, or an ensemble; in evaluation mode.
        sources: Their tokens, EOS included, by place.
        options: How to decode.
        prefixes: Tokens with which each translation must begin, by place.
        batch_tokens: Sources times longest source times beams, at most, unless one source alone is longer.
        generator: Draws samples.

    Yields:
        The place of a source, and its hypotheses as `search` orders them.

    Raises:
        ValueError: As `VanillaTrmForConditionalGeneration.search`.
    """
    if not sources:
        return
    batches = batches_by_length(sources, max(1, batch_tokens // options.num_beams))
    workers = 1
    if models[0].device.type == "cpu" and not isinstance(options, SamplingOptions) and not is_watched():
        workers = max(1, min(torch.get_num_threads(), MOST_WORKERS, len(batches)))
        rounds = -(-len(batches) // workers)  # as many batches for each worker
        batches = batches_by_length(
            sources, max(1, batch_tokens // options.num_beams * len(batches) // (rounds * workers))
        )

    def hypotheses_of(batch: Sequence[int]) -> list[list[Hypothesis]]:
        begin = None if prefixes is None else [prefixes[place] for place in batch]
        padded = _padded([sources[place] for place in batch], models[0].config.pad_token_id or 0)
        input_ids, mask = (tensor.to(models[0].device) for tensor in padded)
        return search(models, input_ids, mask, options, prefixes=begin, generator=generator)

    for batch, found in zip(batches, in_threads(hypotheses_of, batches, workers), strict=True):
        yield from zip(batch, found, strict=True)


def batches_by_length(sources: Mapping[int, Sequence[int]], tokens: int) -> list[list[int]]:
    """The places of sources in batches, the longest first: rows times longest source is at most `tokens`, but for a row
    alone.
    """
    order = sorted(sources, key=lambda place: (-len(sources[place]), place))
    batches = []
    while order:
        rows = max(1, tokens // len(sources[order[0]]))
        batches.append(order[:rows])
        order = order[rows:]
    return batches


def _padded(sources: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Sources as `input_ids` and `attention_mask`, both `(batch, source_length)`."""
    lengths = torch.tensor([len(source) for source in sources])
    rows = [torch.tensor(source) for source in sources]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    return input_ids, (torch.arange(input_ids.size(1)) < lengths.unsqueeze(1)).long()


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
