"""Ways to translate with one and the same model, as a benchmark compares them: our `search`, in int8 as well,
transformers' `generate`, CTranslate2 and ONNX Runtime.

Each takes the tokens of any number of sentences and makes its own batches of them, of a size that it is told. ONNX
Runtime decodes greedily; the length penalty of the others is 0.6, but of their own kind: of the paper's in `search`,
else the length's power.
`search` caps every translation at 50 tokens more than its own source, `generate` at 50 more than the longest of the
batch, and CTranslate2 at 50 more than the longest of all.
"""

import functools
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_trm import BeamSearchOptions, OnnxTranslator, quantize, search_by_length

LENGTH_PENALTY, MAX_LENGTH_B = 0.6, 50
PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    "int8_weights": torch.bfloat16,
    "int8_dynamic": torch.float32,
}
"""Of what `quantize` does not bring to int8, where it is called."""

Tokens = list[int]
Decode = Callable[[Sequence[Tokens], int], list[Tokens]]
"""Translates sentences in batches of a size; each translation ends with EOS, unless it was ended by its cap."""


class OwnProcess:
    """A system's `Decode` in a process of its own, which lives as long as this object.

    Libraries get in each other's way in one process: CTranslate2 brings another OpenMP than PyTorch, and with both
    loaded PyTorch was a quarter slower.

    Args:
        load: Makes the `Decode` there.
    """

    def __init__(self, load: Callable[[], Decode]) -> None:
        self.process = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_load, initargs=(load,))

    def __call__(self, sources: Sequence[Tokens], size: int) -> list[Tokens]:
        """Translate sentences in batches of a size."""
        return self.process.submit(_translate, sources, size).result()


_of_this_process: list[Decode] = []


def _load(load: Callable[[], Decode]) -> None:
    _of_this_process[:] = [load()]


def _translate(sources: Sequence[Tokens], size: int) -> list[Tokens]:
    return _of_this_process[0](sources, size)


@dataclass(frozen=True)
class System:
    """A decoder to measure.

    Attributes:
        load: Makes its `Decode`, also in another process.
        sizes: Of batches, to be tried.
        unit: What the sizes count: "sentences", or "source tokens", padding included.
        weights: Returns the bytes of its weights when they are saved.
    """

    load: Callable[[], Decode]
    sizes: tuple[int, ...]
    unit: str
    weights: Callable[[], int]


def batches_of_tokens(sources: Sequence[Tokens], order: Sequence[int], tokens: int) -> list[list[int]]:
    """Return the numbers of sources in batches: rows times longest source is at most `tokens`, but for a row alone.

    Args:
        sources: Tokens of each.
        order: In which they are taken.
        tokens: The budget.
    """
    batches: list[list[int]] = []
    longest = 0
    for number in order:
        longest = max(longest, len(sources[number]))
        if not batches or (len(batches[-1]) + 1) * longest > tokens:
            batches.append([])
            longest = len(sources[number])
        batches[-1].append(number)
    return batches


def padded(sources: Sequence[Tokens], pad: int) -> dict[str, torch.Tensor]:
    """Return a batch as `input_ids` and `attention_mask`, both `(batch, source_length)`."""
    rows = [torch.tensor(source) for source in sources]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(source) for source in sources])
    mask = torch.arange(input_ids.size(1)) < lengths.unsqueeze(1)
    return {"input_ids": input_ids, "attention_mask": mask.long()}


def load_model(folder: str, precision: str) -> Any:
    """Return a model in evaluation mode with weights of a precision, a key of `PRECISIONS`.

    Raises:
        ImportError: If it is int8 and torchao is not installed.
    """
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=PRECISIONS[precision]).eval()
    return quantize(model, precision) if precision.startswith("int8") else model


def weights_bytes(folder: str, precision: str) -> int:
    """Return the bytes of a model's weights when they are saved in a precision; what is shared or tied counts once."""
    buffer = io.BytesIO()
    torch.save(load_model(folder, precision).state_dict(), buffer)
    return buffer.tell()


def file_bytes(folder: Path, pattern: str) -> int:
    """Return the bytes of all files of a folder that match a pattern."""
    return sum(path.stat().st_size for path in folder.glob(pattern))


def load_search(folder: str, precision: str, beams: int) -> Decode:
    """Return the search of our own model; a size is of source tokens, padding included."""
    model = load_model(folder, precision)
    options = BeamSearchOptions(num_beams=beams, alpha=LENGTH_PENALTY, max_length_b=MAX_LENGTH_B)

    def decode(sources: Sequence[Tokens], size: int) -> list[Tokens]:
        found = dict(search_by_length([model], dict(enumerate(sources)), options, batch_tokens=size * beams))
        return [found[number][0].tokens for number in range(len(sources))]

    return decode


def best_of_search(model: Any, sources: Sequence[Tokens], beams: int) -> list[Any]:
    """Return the best hypothesis of our model's `search` for each source of a batch."""
    batch = padded(sources, model.config.pad_token_id)
    found = model.search(**batch, num_beams=beams, alpha=LENGTH_PENALTY, max_length_b=MAX_LENGTH_B)
    return [hypotheses[0] for hypotheses in found]


def load_generate(folder: str, precision: str, beams: int) -> Decode:
    """Return transformers' `generate` of our model or of a MarianMT; a size is of sentences."""
    model = load_model(folder, precision)
    pad, eos = model.config.pad_token_id, model.config.eos_token_id
    options = {"do_sample": False, "num_beams": beams, "length_penalty": LENGTH_PENALTY if beams > 1 else None}

    def decode_batch(batch: Sequence[Tokens]) -> list[Tokens]:
        cap = max(map(len, batch)) + MAX_LENGTH_B
        rows = model.generate(**padded(batch, pad), **options, max_new_tokens=cap).tolist()
        return [without_padding(row[1:], eos, pad) for row in rows]

    return functools.partial(by_length, decode_batch)


def by_length(
    decode_batch: Callable[[Sequence[Tokens]], list[Tokens]], sources: Sequence[Tokens], size: int
) -> list[Tokens]:
    """Translate sentences in batches of so many, the longest first; return the translations in the sentences' order."""
    order = sorted(range(len(sources)), key=lambda number: (-len(sources[number]), number))
    found = {}
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        found |= dict(zip(batch, decode_batch([sources[number] for number in batch]), strict=True))
    return [found[number] for number in range(len(sources))]


def load_onnx(folder: Path) -> Decode:
    """Return greedy decoding by ONNX Runtime; a size is of sentences.

    Args:
        folder: From `export_onnx`.
    """
    translator = OnnxTranslator(folder, threads=torch.get_num_threads())

    def decode_batch(batch: Sequence[Tokens]) -> list[Tokens]:
        inputs = padded(batch, 0)  # padding is not read
        cap = max(map(len, batch)) + MAX_LENGTH_B
        return translator.greedy(inputs["input_ids"], inputs["attention_mask"], max_length=cap)

    return functools.partial(by_length, decode_batch)


def without_padding(tokens: Tokens, eos: int, pad: int) -> Tokens:
    """Return tokens up to EOS, or where there is none without the padding at their end."""
    if eos in tokens:
        return tokens[: tokens.index(eos) + 1]
    while tokens and tokens[-1] == pad:
        tokens = tokens[:-1]
    return tokens


def load_ctranslate2(
    folder: Path, kind: str, beams: int, vocabulary: Sequence[str], *, thread_a_batch: bool = False
) -> Decode:
    """Return the translator of CTranslate2, with as many threads as PyTorch has; a size is of source tokens.

    Args:
        folder: From `export_ctranslate2`.
        kind: In which type it computes.
        beams: Of the search.
        vocabulary: Its tokens, by id.
        thread_a_batch: Whether each thread translates batches of its own; else all work on one batch.
    """
    import ctranslate2

    threads = torch.get_num_threads()
    inter, intra = (threads, 1) if thread_a_batch else (1, threads)
    translator = ctranslate2.Translator(
        str(folder), device="cpu", compute_type=kind, inter_threads=inter, intra_threads=intra
    )
    ids = {token: number for number, token in enumerate(vocabulary)}

    def decode(sources: Sequence[Tokens], size: int) -> list[Tokens]:
        results = translator.translate_batch(
            [[vocabulary[token] for token in source] for source in sources],
            beam_size=beams,
            length_penalty=LENGTH_PENALTY,
            max_decoding_length=max(map(len, sources)) + MAX_LENGTH_B,
            min_decoding_length=0,
            max_batch_size=size,
            batch_type="tokens",
            return_end_token=True,
        )
        return [[ids[token] for token in result.hypotheses[0]] for result in results]

    return decode
