"""Let a model share parameters across its layers, or give each layer its own: `python -m training.convert_sharing`.

`--parameter_sharing none` gives a model that translates as before. Every other mode fills what is shared with the mean
of the layers that will share it: a starting point for `training.finetune`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig

import hf_vanilla_trm
from hf_vanilla_trm import VanillaTrmPreTrainedModel, share_parameters
from training.checkpoint import save_model_folder
from training.loading import named_errors
from training.tokenizer import load_tokenizer


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Change which layers share their parameters.", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder or Hub id of a model with tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must not be there")
    parser.add_argument("--parameter_sharing", required=True, help="what is shared: none, attention, ffn or all")
    parser.add_argument("--num_unique_layers", type=int, default=1, help="distinct layers of a stack (default: 1)")
    parser.add_argument("--sharing_order", default="sequence", help="sequence (default), cycle or cycle_reverse")
    return parser.parse_args(arguments)


def load_any(folder: str) -> VanillaTrmPreTrainedModel:
    """Load a model as the class that was saved, which may be an encoder or a classifier.

    Raises:
        OSError: If there is no model.
        ValueError: If it is of another type.
    """
    with named_errors(folder):
        config = AutoConfig.from_pretrained(folder)
        if config.model_type != "vanilla_trm":
            raise ValueError(f"the model in {folder} is a {config.model_type}, which shares nothing here")
        names = config.architectures or ["VanillaTrmForConditionalGeneration"]
        model: VanillaTrmPreTrainedModel = getattr(hf_vanilla_trm, names[0]).from_pretrained(folder)
        return model


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert; return the exit code."""
    options = parse_arguments(arguments)
    try:
        if options.output.exists():
            raise FileExistsError(f"output ({options.output}) is there already")
        model, tokenizer = load_any(options.model), load_tokenizer(options.model)
        converted = share_parameters(
            model,
            options.parameter_sharing,
            num_unique_layers=options.num_unique_layers,
            sharing_order=options.sharing_order,
        )
        save_model_folder(options.output, converted, tokenizer)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{options.output}: {converted.num_parameters():,} parameters; {options.model} has {model.num_parameters():,}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
