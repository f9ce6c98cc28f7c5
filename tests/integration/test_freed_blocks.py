"""Blocks that a process frees are used again, without new pages from the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

ROUNDS = """
import resource
from envhub.process import {function}
{function}({kept})
for number in range(20):
    if number == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * {size} for _ in range(3)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "kept", "size", "taken"),
    [
        ("keep_freed_memory", "", 1 << 20, False),
        ("keep_freed_memory", "", 40 << 20, True),
        ("keep_large_blocks", 160 << 20, 40 << 20, False),
        ("keep_large_blocks", 1 << 20, 40 << 20, True),
    ],
)
def test_freed_blocks_are_used_again_up_to_what_is_kept(function: str, kept: int, size: int, taken: bool) -> None:
    code = ROUNDS.format(function=function, kept=kept, size=size)
    faults = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert (faults > 10) == taken, faults
