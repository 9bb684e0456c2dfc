"""Translate lines: `python -m training.translate --model DIR < source.txt > target.txt`.

One line in, one line out, in the order of the input. A blank line stays blank and never reaches the model.
"""

import argparse
import copy
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hf_vanilla_trm  # noqa: F401  (its import makes the Auto classes know the model)
from training.arguments import positive_integer
from training.lines import as_line, read_lines
from training.tokenizer import check_vocabulary

BATCH_TOKENS = 8192
"""Source tokens times beams in a batch of decoding, padding included."""


def decoding_config(
    model: PreTrainedModel,
    *,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    max_length_a: float | None = None,
    max_length_b: int | None = None,
) -> GenerationConfig:
    """Return the model's generation config with some values replaced (None keeps the model's own).

    `max_length_a` and `max_length_b` cap a translation of n source tokens at a * n + b tokens, EOS included in both.
    They are entries of our own, saved in generation_config.json like the others; a model that has none gets a = 1 and
    b = 50 (section 6.1).
    """
    config = copy.deepcopy(model.generation_config)
    config.max_length_a = getattr(config, "max_length_a", 1.0) if max_length_a is None else max_length_a
    config.max_length_b = getattr(config, "max_length_b", 50) if max_length_b is None else max_length_b
    if num_beams is not None:
        config.num_beams = num_beams
    if length_penalty is not None:
        config.length_penalty = length_penalty
    if config.num_beams in (None, 1):  # a length penalty cannot be saved without beams
        config.length_penalty = None
    return config


class StopAtOwnLength(StoppingCriteria):
    """Ends each sentence at a cap of its own, so that a translation does not depend on its batch mates.

    Args:
        caps: Tokens that each sentence of the batch may generate, shape (batch,).
    """

    def __init__(self, caps: torch.Tensor) -> None:
        self.caps = caps

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Return True for the sequences, shape (batch * hypotheses, length), whose cap is reached."""
        hypotheses = input_ids.shape[0] // self.caps.shape[0]
        return input_ids.shape[1] - 1 >= self.caps.repeat_interleave(hypotheses)  # the start token does not count


def caps_of(config: GenerationConfig, source_lengths: Sequence[int]) -> list[int]:
    """Return how many tokens each sentence may generate, EOS included: a * source_length + b, and at least one.

    Args:
        config: From `decoding_config`.
        source_lengths: Tokens of each source, EOS included.
    """
    return [max(1, int(config.max_length_a * length + config.max_length_b)) for length in source_lengths]


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    config: GenerationConfig,
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> Iterator[tuple[int, str]]:
    """Translate texts in batches of similar length.

    Args:
        model: In evaluation mode.
        tokenizer: The model's own.
        texts: Any strings. One of nothing but white space is translated to "" without the model.
        config: From `decoding_config`.
        batch_tokens: Rows times longest source times beams, at most, unless one row alone is longer.

    Yields:
        (index, translation), longest source first. The translation is one line: line ends in it become spaces.
    """
    blank = [index for index, text in enumerate(texts) if not text.strip()]
    yield from ((index, "") for index in blank)
    filled = sorted(set(range(len(texts))).difference(blank))
    if not filled:
        return
    sources = dict(zip(filled, tokenizer([texts[index] for index in filled], verbose=False)["input_ids"], strict=True))
    filled.sort(key=lambda index: (-len(sources[index]), index))
    budget = batch_tokens // (config.num_beams or 1)
    while filled:
        rows = max(1, budget // len(sources[filled[0]]))
        batch, filled = filled[:rows], filled[rows:]
        outputs = _generate(model, tokenizer, [sources[index] for index in batch], config)
        for index, text in zip(batch, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True):
            yield index, as_line(text)


def translate_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    config: GenerationConfig,
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: str | None = None,
) -> list[str]:
    """Return the translations of `translate` in the order of the texts, under a progress bar named `progress`."""
    translations = translate(model, tokenizer, texts, config, batch_tokens=batch_tokens)
    bar = tqdm(translations, total=len(texts), desc=progress, unit="line", disable=progress is None, leave=False)
    return [text for _, text in sorted(bar)]


@torch.inference_mode()
def _generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: list[list[int]], config: GenerationConfig
) -> torch.Tensor:
    """Return token ids, shape (batch, longest), each row under its own cap."""
    padded = tokenizer.pad({"input_ids": sources}, padding_side="right", return_tensors="pt").to(model.device)
    caps = caps_of(config, [len(source) for source in sources])
    config = copy.deepcopy(config)
    config.max_new_tokens = max(caps)
    config.min_new_tokens = 1  # a line that is not blank has a translation
    own_length = StopAtOwnLength(torch.tensor(caps, device=model.device))
    return model.generate(
        input_ids=padded["input_ids"],
        attention_mask=padded["attention_mask"],
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([own_length]),
    )


def load(folder: str, device: torch.device | str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model (in evaluation mode) and tokenizer; code that comes with a model runs only if the user consents."""
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    except OSError as error:
        raise OSError(f"there is no model in {folder!r}, neither as a folder nor on the Hub ({error})") from error
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_vocabulary(model, tokenizer)
    best_device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    try:
        return model.to(device or best_device).eval(), tokenizer
    except (AssertionError, RuntimeError) as error:  # what PyTorch raises for a device that is not there
        raise ValueError(f"device ({device}) cannot be used: {error}") from error


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Translate lines, one line each.", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder or Hub id of a model with tokenizer")
    parser.add_argument("--input", type=Path, help="file of source lines (default: standard input)")
    parser.add_argument("--output", type=Path, help="file for the translations (default: standard output)")
    parser.add_argument("--num_beams", type=positive_integer, help="default: the model's own")
    parser.add_argument("--length_penalty", type=float, help="default: the model's own")
    parser.add_argument("--max_length_a", type=float, help="cap a * source_length + b; default: the model's own, or 1")
    parser.add_argument("--max_length_b", type=int, help="default: the model's own, or 50")
    parser.add_argument(
        "--batch_tokens", type=positive_integer, default=BATCH_TOKENS, help="source tokens times beams in a batch"
    )
    parser.add_argument("--device", type=torch.device, help="default: an accelerator if there is one")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Translate a file or standard input; return the exit code."""
    options = parse_arguments(arguments)
    transformers.utils.logging.disable_progress_bar()
    try:
        if options.input is None:
            lines = list(read_lines(sys.stdin.buffer, "standard input"))
        else:
            with options.input.open("rb") as file:
                lines = list(read_lines(file, str(options.input)))
        if options.output is not None:
            options.output.open("ab").close()  # better to learn now that it cannot be written
        model, tokenizer = load(options.model, options.device)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    config = decoding_config(
        model,
        num_beams=options.num_beams,
        length_penalty=options.length_penalty,
        max_length_a=options.max_length_a,
        max_length_b=options.max_length_b,
    )
    translations = translate_all(
        model, tokenizer, lines, config, batch_tokens=options.batch_tokens, progress="Translating"
    )
    text = "".join(f"{translation}\n" for translation in translations).encode("utf-8")
    if options.output is not None:
        options.output.write_bytes(text)
        return 0
    try:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
