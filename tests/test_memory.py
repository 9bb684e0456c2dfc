"""Peak memory, and giving large tensors back to the system, each by what the system itself says."""

import subprocess
import sys

import pytest

from training.memory import LARGE, return_large_blocks

HOLDING = """
import sys
import psutil, torch
from training.memory import return_large_blocks

changed = return_large_blocks(int(sys.argv[1]))
blocks = [torch.ones(1_500_000) for _ in range(40)]  # 6 MB each
kept = blocks[::2] + [torch.ones(100)]
held = psutil.Process().memory_info().rss
del blocks
kept.append(torch.ones(100))
print(changed, (held - psutil.Process().memory_info().rss) // 10**6)
"""


def test_small_models_are_left_as_they_are():
    assert not return_large_blocks(LARGE - 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc can be told")
def test_large_tensors_that_are_freed_are_given_back():
    """Of 40 blocks of 6 MB every second one is freed: 120 MB."""
    result = subprocess.run(
        [sys.executable, "-c", HOLDING, str(LARGE)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert result[0] == "True"
    assert 100 < int(result[1]) < 130
