"""The most memory that a process, or its accelerator, has held."""

import contextlib
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
