"""Starting Accelerate, with as many processes as were asked for, and the log."""

import logging
import os
from pathlib import Path

import psutil
import torch
import transformers
from accelerate import Accelerator, DistributedType
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.tracking import get_available_trackers

from training.arguments import RecipeArguments

LAUNCHERS = ("accelerate", "accelerate_cli.py", "accelerate.commands.accelerate_cli")
"""What a command line of `accelerate launch` begins with, Python and its flags aside."""


def start_accelerator(recipe: RecipeArguments) -> Accelerator:
    """Start Accelerate, and make sure that as many processes train together as the launcher was asked for.

    Raises:
        ValueError: If they do not, if FSDP was asked for in vain, or for a tracker that is not installed.
    """
    available = [str(tracker) for tracker in get_available_trackers()]
    if recipe.report_to not in ("none", *available):
        raise ValueError(f"report_to ({recipe.report_to}) needs its package: pip install {recipe.report_to}")
    accelerator = Accelerator(
        cpu=recipe.use_cpu or not torch.accelerator.is_available(),  # without it, ranks on a CPU ignore each other
        mixed_precision=recipe.mixed_precision,
        log_with=None if recipe.report_to == "none" else recipe.report_to,
        project_dir=recipe.output_dir,
    )
    check_processes(accelerator.num_processes)
    check_fsdp(accelerator)
    if accelerator.device.type == "cpu":
        torch.set_num_threads(recipe.cpu_threads or cores_of_a_rank())
    return accelerator


def check_processes(number: int, what: str = "train") -> None:
    """Make sure that as many processes work together as the launcher was asked for.

    Args:
        number: How many do.
        what: What they do together, for the message.

    Raises:
        ValueError: If it is another number: they would train as many separate models, or fewer than asked for.
    """
    asked = processes_asked_for()
    if number != asked:
        raise ValueError(
            f"the launcher was asked for {asked} processes, but {number} would {what} together; on a CPU, where "
            "`accelerate launch` starts only one, use `torchrun --standalone --nproc_per_node N`"
        )


def cores_of_a_rank() -> int:
    """Return this process's share of the machine's cores; launchers leave a CPU one thread unless told otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def check_fsdp(accelerator: Accelerator) -> None:
    """Refuse to train whole copies of a model whose parameters were to be divided over the processes.

    Raises:
        ValueError: If the launcher was asked for FSDP, and accelerate, as it does on a CPU, has taken no notice; or if
            it was asked for a kind of it that training does not have.
    """
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError("FSDP is version 1 here: training divides by version 2, `fsdp_version: 2`")
    if accelerator.distributed_type == DistributedType.FSDP and accelerator.mixed_precision == "fp16":
        raise ValueError("mixed_precision fp16 is not for FSDP: use bf16")
    wanted = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes")
    if wanted and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            f"the launcher was asked for FSDP, but accelerate runs {accelerator.distributed_type.value}: on a CPU, and "
            "with one process, there is no FSDP. Launch without it"
        )


def processes_asked_for() -> int:
    """Return the number of processes that the launcher was asked for, as far as it can be seen.

    torchrun tells its processes. `accelerate launch --cpu --num_processes 2` starts a single one and tells it nothing,
    so the launcher's own command line, and the configuration file that it reads, are read again.
    """
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    try:
        launcher = psutil.Process().parent()
        words = launcher.cmdline() if launcher is not None else []
    except psutil.Error:
        return 1
    if "launch" not in words[:4] or not any(Path(word).name in LAUNCHERS for word in words[:3]):
        return 1
    options = launch_command_parser().parse_args(words[words.index("launch") + 1 :])
    if options.num_processes is not None:
        return max(1, options.num_processes)
    file = options.config_file or default_config_file
    return max(1, load_config_from_file(file).num_processes) if Path(file).is_file() else 1


def start_logging(accelerator: Accelerator) -> None:
    """Log to stderr, on the main process only."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("training").setLevel(logging.INFO if accelerator.is_main_process else logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
