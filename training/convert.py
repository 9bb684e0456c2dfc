"""Bring a model in, or take it out: `python -m training.convert --model FOLDER --to FORMAT --output FOLDER`.

A MarianMT of transformers, as the OPUS-MT models are, becomes ours with `--to vanilla_trm`, its tokenizer beside it.
Ours becomes a MarianMT with `--to marian`, and either of them a folder for CTranslate2 with `--to ctranslate2`. With
`--to onnx` and `--to torch_export` ours becomes files for ONNX Runtime, or programs for torch alone.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, MarianMTModel, PreTrainedTokenizerBase

from hf_vanilla_trm import (
    VanillaTrmForConditionalGeneration,
    export_ctranslate2,
    export_onnx,
    export_programs,
    from_marian,
    to_marian,
)
from training.checkpoint import save_model_folder, write_folder
from training.loading import named_errors
from training.tokenizer import check_vocabulary

MODELS = {"vanilla_trm": VanillaTrmForConditionalGeneration, "marian": MarianMTModel}
PROGRAMS = {"onnx": export_onnx, "torch_export": export_programs}
FORMATS = (*MODELS, "ctranslate2", *PROGRAMS)
LENGTHS = (3, 9, 30)
"""Tokens of the sources with which a conversion is checked."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, and refuse what does not go together."""
    parser = argparse.ArgumentParser(description="Convert a model with its tokenizer.", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder or Hub id of a vanilla_trm or a MarianMT with tokenizer")
    parser.add_argument("--to", required=True, choices=FORMATS, help="what it becomes")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must not be there")
    parser.add_argument(
        "--quantization", help="type of CTranslate2's weights, as float32 (default), int8 or int8_float32"
    )
    options = parser.parse_args(arguments)
    if options.quantization is not None and options.to != "ctranslate2":
        parser.error(f"--quantization ({options.quantization}) is for --to ctranslate2, not {options.to}")
    return options


def load_either(folder: str) -> Any:
    """Return a vanilla_trm or a MarianMT in float32 and evaluation mode.

    Raises:
        OSError: If there is no model.
        ValueError: If it is of another type.
    """
    with named_errors(folder):
        model_type = AutoConfig.from_pretrained(folder).model_type
        if model_type not in MODELS:
            raise ValueError(f"the model in {folder} is a {model_type}; it must be one of {', '.join(MODELS)}")
        return MODELS[model_type].from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def largest_difference(model: Any, other: Any) -> float:
    """Return the largest difference of the logits of two models, for random sources and targets of `LENGTHS`."""
    generator = torch.Generator().manual_seed(0)
    config, largest = model.config, 0.0
    for length in LENGTHS:
        source = torch.randint(config.vocab_size, (1, length), generator=generator)
        target = torch.randint(config.decoder_vocab_size, (1, length), generator=generator)
        mask = torch.ones_like(source)
        logits = [one(source, mask, decoder_input_ids=target, use_cache=False).logits for one in (model, other)]
        largest = max(largest, float((logits[0] - logits[1]).abs().max()))
    return largest


def convert(model: Any, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> str:
    """Convert and write; return what is worth knowing of the result."""
    if options.to == "ctranslate2":
        kind = options.quantization or "float32"

        def write(temporary: Path) -> None:
            export_ctranslate2(model, tokenizer, temporary, quantization=kind)

        write_folder(options.output, write)
        return f"a folder for CTranslate2, its weights in {kind}"
    if options.to in PROGRAMS:

        def write_program(temporary: Path) -> None:
            PROGRAMS[options.to](model, temporary)
            tokenizer.save_pretrained(temporary)

        write_folder(options.output, write_program)
        return f"encoder and decoder for {options.to}, with the tokenizer"
    converted = from_marian(model) if options.to == "vanilla_trm" else to_marian(model)
    difference = largest_difference(model, converted)
    save_model_folder(options.output, converted, tokenizer)
    return f"a {type(converted).__name__}, whose logits differ by at most {difference:.1e}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; return the exit code."""
    options = parse_arguments(arguments)
    try:
        if options.output.exists():
            raise FileExistsError(f"output ({options.output}) is there already")
        model = load_either(options.model)
        if model.config.model_type == options.to:
            raise ValueError(f"the model in {options.model} is a {options.to} already")
        if model.config.model_type == "marian" and options.to in PROGRAMS:
            raise ValueError(f"a MarianMT goes to {options.to} by way of ours: convert it --to vanilla_trm first")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        check_vocabulary(model, tokenizer)
        result = convert(model, tokenizer, options)
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
