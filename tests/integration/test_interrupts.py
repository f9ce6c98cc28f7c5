"""Ctrl-C anywhere in a wait loses nothing: it can be waited for again, or the result was as good as returned."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from types import FrameType
from typing import Any

import numpy as np
import pytest
import sims

import envhub
from envhub.vector_errors import NothingPending

RETURNING = 12  # places after the result is known to be had: there it is lost, as a return value is


class Talking(sims.Counter):
    """Says something else at every step, some of it too much for the arena."""

    def step(self, action: int) -> tuple[Any, ...]:
        observation, reward, terminated, truncated, _ = super().step(action)
        info: dict[str, Any] = {f"count{self.count % 40}": self.count}
        if self.count % 3 == 0:
            info["text"] = "x" * 5000
        return observation, reward, terminated, truncated, info


class Interrupt:
    """Raises ``KeyboardInterrupt`` at one of the places that a call passes in EnvHub's code."""

    def __init__(self, place: int) -> None:
        self._left = place
        self.raised = False

    def during(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, or None where it was interrupted."""
        sys.settrace(self._trace)
        try:
            return work()
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if "envhub" not in frame.f_code.co_filename:
            return None
        if event in ("line", "return"):
            self._left -= 1
            if self._left == 0:
                self.raised = True
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("lane", ["auto", "wire"])
@pytest.mark.parametrize("by_parts", [False, True])
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.long)])
def test_interrupt_anywhere_in_a_wait_loses_nothing(lane: str, by_parts: bool, stride: int) -> None:
    actions, lost = np.zeros(3, np.int64), 0
    with closing(envhub.make_vec([Talking] * 3, num_workers=2, lane=lane)) as envs:
        envs.reset()
        for count in range(1, 2000):
            if by_parts:
                envs.send(actions)
            else:
                envs.step_async(actions)
            wait = envs.recv if by_parts else envs.step_wait
            interrupt = Interrupt(count * stride)
            found = interrupt.during(wait)
            if interrupt.raised and found is None:
                try:
                    found = wait(timeout=20)
                except NothingPending:
                    lost += 1
            if found is not None:
                assert found[0][:, 0].tolist() == [count] * 3
                assert found[4][f"count{count % 40}"].tolist() == [count] * 3
            if not interrupt.raised:
                break
    assert not interrupt.raised and count * stride > 100
    assert lost <= RETURNING
