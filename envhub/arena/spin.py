"""Waiting for a word of the arena: spin for as long as parking would cost, then park.

The kernel wakes a parked process, which costs tens of microseconds on both sides. Spinning costs a CPU, so it is
bounded, and a process spins only while it has paid recently.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from typing import Callable

ENVIRONMENT_VARIABLE = "ENVHUB_SPIN_US"
SPIN_US = 200  # about the cost of a wake-up of both sides, with the cold caches after it
SPIN_US_MAX = 1000
DIGITS_MAX = 20  # of the variable; Python refuses numbers of thousands of digits
# A machine that also loads in order: data that a word guards can be read after the word, without a system call.
HAS_FENCE = platform.machine() in ("x86_64", "AMD64")
SKIPS_MAX = 127  # waits that only park, after many unsuccessful spins

RING = (1).to_bytes(8, sys.byteorder)  # the bytes that wake a process parked at an eventfd

_free_lock = threading.Lock()  # on x86-64 taking it is an atomic exchange, which is a fence


def fence() -> None:
    """Complete all stores before any later load, lest two processes miss each other's; only with ``HAS_FENCE``."""
    with _free_lock:
        pass


class Spinner:
    """The spinning of one process before it parks."""

    def __init__(self, spin_us: int, clock_ns: Callable[[], int]) -> None:
        self._limit_ns = spin_us * 1000
        self.spins = spin_us > 0
        self._clock_ns = clock_ns
        self._skips = self._penalty = 0

    def spin(self, ready: Callable[[], bool]) -> bool:
        if ready():
            return True
        if not self.spins:
            return False
        if self._skips:
            self._skips -= 1
            return False
        clock_ns = self._clock_ns
        end_ns = clock_ns() + self._limit_ns
        while clock_ns() < end_ns:
            if ready():
                self._penalty = 0
                return True
        # Each consecutive unsuccessful spin doubles the number of waits that only park.
        self._skips = self._penalty = min(2 * self._penalty + 1, SKIPS_MAX)
        return False


def spin_us(processes: int, cpus: int, quota: bool) -> int:
    """The microseconds to spin for ``processes`` on ``cpus``; none where a ``quota`` of a cgroup would be spent.

    A worker counts the workers, and their driver itself, too: one that spins takes CPU time from workers that compute,
    and the scheduler prefers a process that slept. Raises ``ValueError``.
    """
    configured = configured_spin_us()
    if configured is not None:
        return configured
    return SPIN_US if processes <= cpus and not quota and HAS_FENCE else 0


def configured_spin_us() -> int | None:
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if text is None:
        return None
    is_number = text.isdecimal() and len(text) <= DIGITS_MAX
    return checked_spin_us(int(text) if is_number else -1, ENVIRONMENT_VARIABLE)


def checked_spin_us(wanted: int, name: str) -> int:
    if not 0 <= wanted <= SPIN_US_MAX:
        raise ValueError(f"{name} is a number of microseconds between 0 and {SPIN_US_MAX}")
    return wanted
