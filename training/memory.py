"""The most memory that a process, or its accelerator, has held; and how to hold less of it."""

import contextlib
import ctypes
import sys
from pathlib import Path

import torch

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new measurement, where the system allows it; elsewhere the peak is that of the whole process.

    Args:
        device: A CUDA device is measured by PyTorch's own count.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # Linux: the high-water mark begins anew at what is held now
        CLEAR_REFS.write_text("5")


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: what was allocated on an accelerator, or the resident memory of the process on a CPU.

    Args:
        device: As for `reset_peak_memory`.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    except (OSError, KeyError):
        import resource  # which Windows lacks

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


M_MMAP_THRESHOLD = -3  # of mallopt(3)
LARGE = 7_000_000
"""Bytes of one layer's output from which on memory matters more than the time to clear it: the paper's base model, with
4,096 tokens.
"""


def return_large_blocks(hidden_state_bytes: int) -> bool:
    """Have the C library take large tensors from the system, and give them back when they are freed.

    By default glibc keeps what is freed on its heap, where tensors, which are aligned, do not fit the holes that others
    of their size have left: at base size a training step holds 0.9 GB more than it uses. New memory has to be cleared,
    which costs an eighth of a step for small models in bfloat16, and nothing that can be measured at base size.

    Args:
        hidden_state_bytes: Size of a layer's output for a whole batch. Nothing is changed where it is below `LARGE`.

    Returns:
        Whether it was changed: never on systems other than Linux with glibc.
    """
    if hidden_state_bytes < LARGE or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, LARGE // 2) == 1
