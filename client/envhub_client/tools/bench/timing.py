"""Timing several ways to step side by side: in turn, again and again, so that what else the machine does hits all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

WARM_UP = 0.1  # of the time of a measurement


@dataclass(frozen=True)
class Ratio:
    """Rate of one way to that of another: the median of the repeats, the lowest and the highest."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """Summary of the repeats of one way."""

    rates: tuple[float, ...]  # env-steps/s of each repeat, in order
    p50_us: float  # microseconds of a batched step, the median over all repeats
    p99_us: float  # the 99th percentile of the same

    @property
    def rate(self) -> float:
        """Env-steps/s, the median of the repeats."""
        return float(np.median(self.rates))

    def ratio_to(self, other: Summary) -> Ratio:
        """Number of times as fast as another way in the same turns."""
        ratios = np.array(self.rates) / np.array(other.rates)
        return Ratio(float(np.median(ratios)), float(ratios.min()), float(ratios.max()))


def summarize(env_steps: int, repeats: list[np.ndarray]) -> Summary:
    """Summarize seconds per batched step, one array per repeat; a batched step is of ``env_steps``."""
    rates = tuple(env_steps * len(seconds) / float(seconds.sum()) for seconds in repeats)
    p50, p99 = np.percentile(np.concatenate(repeats), [50, 99]) * 1e6
    return Summary(rates, float(p50), float(p99))


def interleave(
    ways: Mapping[str, Callable[[], object]],
    seconds: float,
    repeats: int,
    turn: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> dict[str, list[np.ndarray]]:
    """Time every way in turn, ``repeats`` times over, each for ``seconds`` after a warm-up.

    Each measurement with its warm-up is made within ``turn`` of the way's name. Returns by name the seconds of every
    batched step, one array per repeat.
    """
    times: dict[str, list[np.ndarray]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, step in ways.items():
            with turn(name):
                step_times(step, WARM_UP * seconds)
                times[name].append(step_times(step, seconds))
    return times


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
