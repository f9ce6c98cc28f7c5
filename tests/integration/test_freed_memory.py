"""A hub and its workers take the memory of large messages from what they freed, not anew from the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import sims
from envhub_client.private_hub.process import private_hub

import envhub

FRAME = (480, 480, 3)
PAGES = int(np.prod(FRAME)) // 4096  # of one frame


class Drawn(sims.Counter):
    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.full(FRAME, 7, np.uint8)


def _faults(pids: Sequence[int]) -> int:
    """The pages that these processes have got so far."""
    stats = (Path(f"/proc/{pid}/stat").read_text() for pid in pids)
    return sum(int(stat.rpartition(")")[2].split()[7]) for stat in stats)


def test_frames_take_no_new_pages() -> None:
    with closing(envhub.make_vec(partial(Drawn, render_mode="rgb_array"), 2)) as envs:
        envs.reset(seed=0)
        for _ in range(20):
            envs.render([1])
        pids = private_hub().pid, *envs.call("pid")
        before = _faults(pids)
        for _ in range(20):
            envs.render([1])
        assert (_faults(pids) - before) / 20 < PAGES
