"""Sentences that are longer than a model was trained for: refused, or translated in parts."""

import re
from collections.abc import Callable, Sequence

from hf_vanilla_trm import Translation

SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'»”’)]*\s+|(?<=[。！？])")
"""Between two sentences."""
GAP = re.compile(r"\s+")


def split_text(text: str, longest: int, count: Callable[[str], int]) -> list[str]:
    """Return the text in parts that are short enough; nothing of it but white space is lost.

    Parts end at the ends of sentences where that is possible, else between words, else anywhere, and are as long as
    may be.

    Args:
        text: Of any length.
        longest: Most tokens of a part.
        count: The tokens of a text.

    Raises:
        ValueError: If a single character has more tokens.
    """
    parts, rest = [], text.strip()
    while count(rest) > longest:
        end = _end_of_part(rest, longest, count)
        parts.append(rest[:end].strip())
        rest = rest[end:].strip()
    return [*parts, rest]


def _end_of_part(text: str, longest: int, count: Callable[[str], int]) -> int:
    """Return where the first part ends; see `split_text`."""
    for boundary in (SENTENCE_END, GAP, None):
        places = range(1, len(text)) if boundary is None else [match.end() for match in boundary.finditer(text)]
        fitting = _last_that_fits(text, [place for place in places if 0 < place < len(text)], longest, count)
        if fitting:
            return fitting
    raise ValueError(f"no part of {text[:20]!r} has at most {longest} tokens")


def _last_that_fits(text: str, places: Sequence[int], longest: int, count: Callable[[str], int]) -> int:
    """Return the last place before which the text is short enough, or 0; what is looked at grows from the beginning."""

    def fits(number: int) -> bool:
        return count(text[: places[number - 1]].strip()) <= longest

    high = 1
    while high <= len(places) and fits(high):
        high *= 2
    low, high = high // 2, min(high, len(places) + 1)  # the first `low` places fit, `high` of them do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return places[low - 1] if low else 0


def join_translations(parts: Sequence[Sequence[Translation]]) -> list[Translation]:
    """Return the translations of a text from those of its parts: the best of all, then the second of all, and so on.

    Scores are summed; tokens follow each other, an EOS at the end of each part.
    """
    if len(parts) == 1:
        return list(parts[0])
    return [
        Translation(
            " ".join(one.text for one in together),
            sum(one.score for one in together),
            [token for one in together for token in one.tokens],
            [value for one in together for value in one.token_log_probs],
        )
        for together in zip(*parts, strict=False)  # as many as every part has
    ]
