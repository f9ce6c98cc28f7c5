"""Measurements of the ways to step the same envs, compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from envhub_client.tools.bench.entrant import ASYNC, SYNC
from envhub_client.tools.bench.timing import Ratio, Summary


@dataclass(frozen=True)
class Result:
    """Measurements of one way.

    Attributes:
        processes: the number of processes that the envs are in; 0 is the program's own.
        sizing: the reason for that number, where a hub has chosen it.
        summary: the times.
    """

    processes: int
    sizing: str
    summary: Summary


@dataclass(frozen=True)
class SizeResults:
    """Results of one number of envs.

    Attributes:
        num_envs: that number.
        alone: the times of one env by itself in the program's own process.
        computes: whether it computes in that time, rather than waits.
        by_way: the results of all other ways.
    """

    num_envs: int
    alone: Summary
    computes: bool
    by_way: Mapping[str, Result]

    @property
    def baseline(self) -> str:
        """The way to which the others are compared: ``AsyncVectorEnv``, or without it ``SyncVectorEnv``."""
        return ASYNC if ASYNC in self.by_way else SYNC

    def ratio(self, way: str) -> Ratio:
        """Number of times as fast as the baseline."""
        return self.by_way[way].summary.ratio_to(self.by_way[self.baseline].summary)

    def fastest(self) -> str:
        """The way with the highest rate."""
        return max(self.by_way, key=lambda way: self.by_way[way].summary.rate)

    def as_fast(self, way: str) -> list[str]:
        """Other ways that were faster than this one in some turn: the repeats do not tell them apart."""
        summary = self.by_way[way].summary
        return [
            other
            for other, result in self.by_way.items()
            if other != way and result.summary.ratio_to(summary).high >= 1.0
        ]

    def envs_us(self, way: str) -> float:
        """Microseconds of a batched step for which the envs themselves run, if the CPUs are free for them.

        The process with the most envs decides, or the CPUs where they are fewer than what computes.
        """
        share = -(-self.num_envs // max(1, self.by_way[way].processes))
        cpus = len(os.sched_getaffinity(0))
        return self.alone.p50_us * max(share, self.num_envs / cpus if self.computes else 0)
