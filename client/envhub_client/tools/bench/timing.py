"""Timing several ways to step side by side: in turn, again and again, so that what else the machine does hits all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

WARM_UP = 0.1  # of the time of a measurement


@dataclass(frozen=True)
class Summary:
    """Summary of the repeats of one way."""

    rate: float  # env-steps/s, the median of the repeats
    slowest: float  # env-steps/s of the slowest repeat
    fastest: float  # env-steps/s of the fastest repeat
    p50_us: float  # microseconds of a batched step, the median over all repeats
    p99_us: float  # the 99th percentile of the same


def summarize(num_envs: int, repeats: list[np.ndarray]) -> Summary:
    """Summarize seconds per batched step, one array per repeat."""
    rates = [num_envs * len(seconds) / float(seconds.sum()) for seconds in repeats]
    p50, p99 = np.percentile(np.concatenate(repeats), [50, 99]) * 1e6
    return Summary(float(np.median(rates)), min(rates), max(rates), float(p50), float(p99))


def interleave(
    ways: Mapping[str, Callable[[], object]],
    seconds: float,
    repeats: int,
    turn: Callable[[str], AbstractContextManager[object]] = nullcontext,
    measured: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> dict[str, list[np.ndarray]]:
    """Time every way in turn, ``repeats`` times over, each for ``seconds`` after a warm-up.

    Each measurement is made within ``measured`` of the way's name, and with its warm-up within ``turn`` of it. Returns
    by name the seconds of every batched step, one array per repeat.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, step in ways.items():
            with turn(name):
                step_times(step, WARM_UP * seconds)
                with measured(name):
                    found[name].append(step_times(step, seconds))
    return found


def step_times(step: Callable[[], object], seconds: float) -> np.ndarray:
    """The seconds of each call of ``step``, at least one, until ``seconds`` have passed."""
    times: list[float] = []
    before_s = time.perf_counter()
    end_s = before_s + seconds
    while not times or before_s < end_s:
        step()
        now_s = time.perf_counter()
        times.append(now_s - before_s)
        before_s = now_s
    return np.array(times)
