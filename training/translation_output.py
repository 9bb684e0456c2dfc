"""Where translations go: standard output, or a file that is complete or not there, and can be continued.

While a file is being written it is called `NAME.partial`, and `NAME.partial.json` says how much of it is certain.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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


class StandardOutput:
    """Writes to standard output. There is nothing to continue."""

    lines_done = 0

    def write(self, text: str, sources: Iterable[str]) -> None:
        """Write what some sources came to.

        Raises:
            BrokenPipeError: If the reader has seen enough.
        """
        del sources
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()

    def finish(self) -> None:
        """Do nothing: all is written."""


class OutputFile:
    """Writes a file.

    Args:
        path: The file; one that is there is replaced when the new one is complete.
        settings: What must be the same if the file is continued.
        resume: Continue what an interrupted run has left.

    Attributes:
        lines_done: Lines of the source whose translations are written.

    Raises:
        OSError: If nothing can be written there.
        ValueError: If there is an incomplete file and `resume` was not asked for, or it began with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self.state_file = path.with_name(f"{path.name}.partial.json")
        self.settings = settings
        self.lines_done = self.bytes_done = 0
        self.digest = hashlib.sha256()
        self.expected_digest: str | None = None
        if self.state_file.exists():
            if not resume:
                raise ValueError(
                    f"{self.partial} was interrupted: continue it with --resume, or delete it and its .json"
                )
            self._continue(json.loads(self.state_file.read_text()))
        else:
            self.partial.write_bytes(b"")
            self._save_state()
        self.file = self.partial.open("r+b")
        self.file.truncate(self.bytes_done)
        self.file.seek(self.bytes_done)

    def _continue(self, state: dict[str, Any]) -> None:
        changed = [name for name, value in self.settings.items() if state["settings"].get(name) != value]
        if changed:
            name = changed[0]
            raise ValueError(
                f"{self.partial} was begun with {name} {state['settings'].get(name)!r}, not {self.settings[name]!r}"
            )
        self.lines_done, self.bytes_done = state["lines"], state["bytes"]
        self.expected_digest = state["digest"]

    def _save_state(self) -> None:
        state = {"lines": self.lines_done, "bytes": self.bytes_done, "digest": self.digest.hexdigest()}
        write_json(self.state_file, {"settings": self.settings, **state})

    def skip_done(self, sources: Iterable[str]) -> Iterator[str]:
        """Return those of the sources that are not translated yet.

        Raises:
            ValueError: If those before are not what was translated.
        """
        sources = iter(sources)
        for _ in range(self.lines_done):
            self.digest.update(_with_end(next(sources, "")))
        if self.expected_digest not in (None, self.digest.hexdigest()):
            raise ValueError(
                f"the first {self.lines_done} lines are not those of which {self.partial} has translations"
            )
        return sources

    def write(self, text: str, sources: Iterable[str]) -> None:
        """Write what some sources came to, so that it survives an interruption."""
        data = text.encode("utf-8")
        self.file.write(data)
        self.file.flush()
        os.fsync(self.file.fileno())
        for source in sources:
            self.digest.update(_with_end(source))
            self.lines_done += 1
        self.bytes_done += len(data)
        self._save_state()

    def finish(self) -> None:
        """Give the file its name."""
        self.file.close()
        os.replace(self.partial, self.path)
        self.state_file.unlink()


def _with_end(line: str) -> bytes:
    return f"{line}\n".encode()
