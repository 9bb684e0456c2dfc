"""Average the weights of checkpoints, as section 6.1 of the paper does with the last 5 or 20.

`python -m training.average_checkpoints --run DIR --last 5 --output DIR` averages the newest checkpoints of a run;
`--checkpoints DIR DIR ...` names them. The output is a folder that the Auto classes load;
`training.publish` takes it, too, where it is in the folder of the run.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel

from training.architecture import check_architecture
from training.checkpoint import find_checkpoints, write_folder
from training.loading import named_errors
from training.run_log import weights_digest, write_json

logger = logging.getLogger("training")


def average_checkpoints(folders: Sequence[Path]) -> PreTrainedModel:
    """Return the first checkpoint's model with each weight the mean over all checkpoints.

    A parameter that several modules share is one parameter, averaged once. Sums are in float64.

    Args:
        folders: Folders that `from_pretrained` loads, in any order.

    Raises:
        OSError: If there is no model in one of them, or its weights are damaged.
        ValueError: If there are no folders, or one is of another architecture than the first.
    """
    if not folders:
        raise ValueError("there is nothing to average: no checkpoint is given")
    model = _load(folders[0])
    sums = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    for folder in folders[1:]:
        other_model = _load(folder)
        check_architecture(other_model.config, model.config, str(folder), str(folders[0]))
        for name, parameter in other_model.named_parameters():
            sums[name] += parameter.detach().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(sums[name] / len(folders))
    return model


def _load(folder: Path) -> PreTrainedModel:
    with named_errors(str(folder)):
        return AutoModelForSeq2SeqLM.from_pretrained(folder)


def save_average(output: Path, model: PreTrainedModel, folders: Sequence[Path]) -> None:
    """Write a folder that the Auto classes load, with average.json, which says what it is the mean of.

    Raises:
        OSError: If it cannot be written.
    """
    names = [Path(os.path.relpath(folder.resolve(), output.parent)).as_posix() for folder in folders]

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(folders[0]).save_pretrained(temporary)
        write_json(temporary / "average.json", {"checkpoints": names, "weights": weights_digest(temporary)})

    write_folder(output, write)


def main(arguments: Sequence[str] | None = None) -> int:
    """Average and save; return the exit code."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description="Average the weights of checkpoints.", allow_abbrev=False)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--checkpoints", type=Path, nargs="+", metavar="DIR", help="the checkpoints to average")
    which.add_argument("--run", type=Path, help="output_dir of a training run, for its newest checkpoints")
    parser.add_argument("--last", type=int, help="how many of the run's checkpoints (with --run)")
    parser.add_argument("--output", type=Path, required=True, help="folder for the averaged model")
    options = parser.parse_args(arguments)
    if (options.run is None) != (options.last is None):
        parser.error("--run and --last go together")

    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        parser.error(f"--output ({options.output}) exists and is not empty: nothing is overwritten")

    folders = options.checkpoints
    if options.run is not None:
        found = find_checkpoints(options.run)
        if not 0 < options.last <= len(found):
            parser.error(
                f"--last ({options.last}) must be from 1 to the {len(found)} checkpoints kept in {options.run}"
            )
        folders = found[-options.last :]
    try:
        save_average(options.output.resolve(), average_checkpoints(folders), folders)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    logger.info("averaged %s into %s", ", ".join(map(str, folders)), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
