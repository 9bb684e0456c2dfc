"""Where translations go: standard output, or a file that is complete or not there, and can be continued.

While a file is being written it is called `NAME.partial`, and `NAME.partial.json` says how much of it is certain.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_vanilla_trm import Translation
from training.lines import as_line
from training.run_log import write_json
from training.translator import alignments

FORMATS = ("text", "pieces", "scores", "nbest", "json")

Format = Callable[[int, str, Sequence[Translation]], str]
"""Takes the number of a line, from 0 on, the line and its translations, the best first, to what is written."""


def as_text(number: int, source: str, translations: Sequence[Translation]) -> str:
    """Return the best translation, on a line."""
    del number, source
    return f"{as_line(translations[0].text)}\n"


def as_score(number: int, source: str, translations: Sequence[Translation]) -> str:
    """Return the score of the best translation; a blank line for a blank one."""
    del number, source
    return f"{translations[0].score:.6f}\n" if translations[0].tokens else "\n"


def as_n_best(number: int, source: str, translations: Sequence[Translation]) -> str:
    """Return all translations in the form of Moses: number of the line, text and score, between bars."""
    del source
    return "".join(f"{number} ||| {as_line(one.text)} ||| {one.score:.6f}\n" for one in translations)


def format_of(name: str, model: Any, tokenizer: PreTrainedTokenizerBase) -> Format:
    """Return how translations are written.

    Args:
        name: One of `FORMATS`.
        model: Aligns the tokens, for "json"; see `alignments`.
        tokenizer: The model's own.
    """
    special = set(tokenizer.all_special_ids)

    def pieces_of(tokens: Sequence[int]) -> list[str]:
        return tokenizer.convert_ids_to_tokens([token for token in tokens if token not in special])

    def as_pieces(number: int, source: str, translations: Sequence[Translation]) -> str:
        del number, source
        return " ".join(pieces_of(translations[0].tokens)) + "\n"

    def as_json(number: int, source: str, translations: Sequence[Translation]) -> str:
        source_ids = tokenizer(source, verbose=False)["input_ids"] if source.strip() else []
        aligned = alignments(model, source_ids, [one.tokens for one in translations])
        rows = [
            {
                "text": as_line(one.text),
                "score": one.score,
                "tokens": tokenizer.convert_ids_to_tokens(one.tokens),
                "token_log_probs": one.token_log_probs,
                "alignment": alignment,
            }
            for one, alignment in zip(translations, aligned, strict=True)
        ]
        tokens = tokenizer.convert_ids_to_tokens(source_ids)
        record = {"line": number, "source": source, "source_tokens": tokens, "translations": rows}
        return json.dumps(record, ensure_ascii=False) + "\n"

    return {"text": as_text, "pieces": as_pieces, "scores": as_score, "nbest": as_n_best, "json": as_json}[name]


Pair = tuple[str, str]
"""A line of the source, and the prefix of its translation."""


class StandardOutput(contextlib.AbstractContextManager):
    """Writes to standard output. There is nothing to continue."""

    lines_done = 0

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def skip_done(self, pairs: Iterator[Pair]) -> Iterator[Pair]:
        """Return all pairs."""
        return pairs

    def write(self, text: str, pairs: Iterable[Pair]) -> None:
        """Write what some pairs came to.

        Raises:
            BrokenPipeError: If the reader has seen enough.
        """
        del pairs
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()

    def finish(self) -> None:
        """Do nothing: all is written."""


class OutputFile(contextlib.AbstractContextManager):
    """Writes a file. Left before anything is written, as a context, it leaves nothing behind.

    Args:
        path: The file; one that is there is replaced when the new one is complete.
        settings: What must be the same if the file is continued; None if it cannot be.
        resume: Continue what an interrupted run has left.

    Attributes:
        lines_done: Lines of the source whose translations are written.

    Raises:
        OSError: If nothing can be written there.
        ValueError: If there is something else than a file; or if there is an incomplete file and `resume` was not asked
            for, or it began with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any] | None, *, resume: bool) -> None:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file: it cannot be replaced by one")
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self.state_file = path.with_name(f"{path.name}.partial.json")
        self.settings = settings
        self.lines_done = self.bytes_done = 0
        self.digest = hashlib.sha256()
        self.expected_digest: str | None = None
        if self.state_file.exists() and self.partial.exists():
            if not resume:
                raise ValueError(
                    f"{self.partial} was interrupted: continue it with --resume, or delete it and its .json"
                )
            self._continue(json.loads(self.state_file.read_text("utf-8")))
        self.file = self.partial.open("r+b" if self.lines_done else "wb")
        self.file.truncate(self.bytes_done)
        self.file.seek(self.bytes_done)

    def _continue(self, state: dict[str, Any]) -> None:
        for name, value in (self.settings or {}).items():
            if state["settings"].get(name) != value:
                raise ValueError(f"{self.partial} was begun with {name} {state['settings'].get(name)!r}, not {value!r}")
        if self.partial.stat().st_size < state["bytes"]:
            raise ValueError(f"{self.partial} has lost some of its {state['bytes']} bytes: delete it and its .json")
        self.lines_done, self.bytes_done = state["lines"], state["bytes"]
        self.expected_digest = state["digest"]

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self.file.close()
        if not self.lines_done:
            self.partial.unlink(missing_ok=True)

    def skip_done(self, pairs: Iterator[Pair]) -> Iterator[Pair]:
        """Return those of the pairs that are not translated yet.

        Raises:
            ValueError: If those before are not what was translated.
        """
        for pair in islice(pairs, self.lines_done):
            self.digest.update(_as_bytes(pair))
        if self.expected_digest not in (None, self.digest.hexdigest()):
            raise ValueError(
                f"the first {self.lines_done} lines are not those of which {self.partial} has translations"
            )
        return pairs

    def write(self, text: str, pairs: Iterable[Pair]) -> None:
        """Write what some pairs came to, so that it survives an interruption."""
        data = text.encode("utf-8")
        self.file.write(data)
        self.file.flush()
        os.fsync(self.file.fileno())
        for pair in pairs:
            self.digest.update(_as_bytes(pair))
            self.lines_done += 1
        self.bytes_done += len(data)
        if self.settings is not None:
            state = {"lines": self.lines_done, "bytes": self.bytes_done, "digest": self.digest.hexdigest()}
            write_json(self.state_file, {"settings": self.settings, **state})

    def finish(self) -> None:
        """Give the file its name."""
        self.file.close()
        os.replace(self.partial, self.path)
        self.state_file.unlink(missing_ok=True)  # last: without it the partial file would begin anew


def _as_bytes(pair: Pair) -> bytes:
    return f"{pair[0]}\n{pair[1]}\n".encode()
