"""Models and their tokenizers, from a folder or the Hub, ready to translate."""

import contextlib
from collections.abc import Iterator

import torch
from safetensors import SafetensorError
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_vanilla_trm  # noqa: F401  (its import makes the Auto classes know the model)
from training.tokenizer import check_vocabulary

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTIZED = {"int8_weights": torch.bfloat16, "int8_dynamic": torch.float32}
"""Kinds of `quantize`, and the precision of all that is not int8 then."""


@contextlib.contextmanager
def named_errors(folder: str) -> Iterator[None]:
    """Say of what a library could not load, in a context that loads, which model it was.

    Raises:
        OSError: If there is no model, or its weights are damaged.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"there is no model in {folder!r}, neither as a folder nor on the Hub ({error})") from error
    except SafetensorError as error:
        raise OSError(f"the weights of the model in {folder!r} are damaged ({error})") from error


def load(
    folder: str, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model (in evaluation mode) and tokenizer; code that comes with a model runs only if the user consents.

    Args:
        folder: A folder, or a Hub id.
        device: None takes an accelerator if there is one.
        dtype: Of the weights.

    Raises:
        OSError: If there is no model, or its weights are damaged.
        ValueError: If the device is not there, or the tokenizer is of another vocabulary.
    """
    with named_errors(folder):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    check_vocabulary(model, tokenizer)
    best_device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    try:
        return model.to(device or best_device).eval(), tokenizer
    except (AssertionError, RuntimeError) as error:  # what PyTorch raises for a device that is not there
        raise ValueError(f"device ({device}) cannot be used: {error}") from error


def load_for_search(
    folder: str, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model that has our search, and its tokenizer; see `load`.

    Raises:
        OSError: If there is no model.
        ValueError: As `load`, or if the model is of another package.
    """
    model, tokenizer = load(folder, device, dtype)
    if not hasattr(model, "search"):
        raise ValueError(f"{folder} is a {type(model).__name__}: only models of this package are decoded here")
    return model, tokenizer
