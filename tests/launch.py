"""Programs started the way users start them, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

CLONE = Path(__file__).parent.parent
PYTHON = [sys.executable, "-m"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]


def run(command, *, stdin=None, timeout=300, check=True):
    """Run a command in the clone, one thread a process; return it completed, stdout and stderr as bytes.

    A two-rank launch that is not over after 120 s is ended and tried once more.
    """
    if command[: len(TWO_RANKS)] != TWO_RANKS:
        return _run_once(command, stdin, timeout, check)
    try:
        return _run_once(command, stdin, 120, check)
    except TimeoutError:  # one launch has hung, and why is not known
        return _run_once(command, stdin, timeout, check)


def _run_once(command, stdin, timeout, check):
    """A launcher whose time is up is asked to end first, so that it ends its ranks."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=CLONE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        stdout, stderr = process.communicate(stdin, timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        stdout, stderr = process.communicate(timeout=30)
        raise TimeoutError(f"still running after {timeout} s:\n{stderr.decode()}") from None
    if check:
        assert process.returncode == 0, stderr.decode()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
