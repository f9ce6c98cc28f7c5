"""How long a step of an env takes: of one more env than was asked for, before the others are made."""

from __future__ import annotations

import time
from typing import Any

MEASURE_S = 0.05
STEPS_MAX = 1000


def step_s(runner: Any) -> float:
    """Seconds that a step takes on average, resets included, of as many steps with random actions as tell.

    The very first one is not counted, for much is only made then.
    """
    runner.reset(None, None)
    ended = _step(runner)
    steps, start_s = 0, time.perf_counter()
    while not steps or (steps < STEPS_MAX and time.perf_counter() - start_s < MEASURE_S):
        if ended:
            runner.autoreset()
        ended = _step(runner)
        steps += 1
    return (time.perf_counter() - start_s) / steps


def _step(runner: Any) -> bool:
    _, _, terminated, truncated, _ = runner.step(runner.env.action_space.sample())
    return bool(terminated or truncated)
