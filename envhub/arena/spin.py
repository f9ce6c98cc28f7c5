"""Waiting for a word of the arena: look at it for as long as parking would cost, then park.

A parked process is woken by the kernel, which costs tens of microseconds on both sides. Looking costs a CPU, so it is
bounded, and it is only done where it recently paid.

Of two processes that each store a word and then load the other's, both may miss what the other stored, unless a fence
stands between store and load. On x86-64 an atomic exchange is one, and taking a free lock is an atomic exchange.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from typing import Callable

ENVIRONMENT_VARIABLE = "ENVHUB_SPIN_US"
SPIN_US = 200  # with both sides parked, a wake-up and the caches that are cold after it cost about as much
SPIN_US_MAX = 1000
# A machine that also loads in order: what a word guards can be read once the word was seen, without a system call.
HAS_FENCE = platform.machine() in ("x86_64", "AMD64")
SKIPS_MAX = 127  # waits that only park, after a row of vain spins

RING = (1).to_bytes(8, sys.byteorder)  # what is written to an eventfd, to wake who is parked at it


_free_lock = threading.Lock()


def fence() -> None:
    """Store what was stored before this call before loading anything after it; only where ``HAS_FENCE``.

    Of two processes that each store, call this and then load, at least one sees what the other has stored.
    """
    with _free_lock:
        pass


class Spinner:
    """How one process looks before it parks."""

    def __init__(self, spin_us: int, clock_ns: Callable[[], int]) -> None:
        """Look for up to ``spin_us`` microseconds of ``clock_ns``; 0 is not at all."""
        self._limit_ns = spin_us * 1000
        self._clock_ns = clock_ns
        self._skips = self._penalty = 0

    @property
    def looks(self) -> bool:
        """Whether it looks at all."""
        return self._limit_ns > 0

    def spin(self, ready: Callable[[], bool]) -> bool:
        """Whether it is ready, now or while we look."""
        if ready():
            return True
        if not self._limit_ns:
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
        # Each vain spin in a row doubles the number of waits that go without.
        self._skips = self._penalty = min(2 * self._penalty + 1, SKIPS_MAX)
        return False


def spin_us(processes: int, cpus: int, quota: bool) -> int:
    """For how long to look where so many processes share so many CPUs.

    Nobody looks where a spinning process would take the CPU of one that computes, where a cgroup's quota would be spent
    on looking, or where another machine's weaker memory order forbids to read what a word guards without a system call.

    Args:
        processes: workers and those who drive them, of whom one side waits while the other computes.
        cpus: usable ones.
        quota: whether a cgroup limits the CPU time.

    Raises:
        ValueError: ``ENVHUB_SPIN_US`` is no number of microseconds.
    """
    told = told_spin_us()
    if told is not None:
        return told
    looks = processes <= cpus and not quota and HAS_FENCE
    return SPIN_US if looks else 0


def told_spin_us() -> int | None:
    """What ``ENVHUB_SPIN_US`` says; None where it is not set.

    Raises:
        ValueError: it is no number of microseconds.
    """
    told = os.environ.get(ENVIRONMENT_VARIABLE)
    return None if told is None else checked_spin_us(int(told) if told.isdecimal() else -1, ENVIRONMENT_VARIABLE)


def checked_spin_us(wanted: int, name: str) -> int:
    """The number itself, which is called so.

    Raises:
        ValueError: it is not between 0 and ``SPIN_US_MAX``.
    """
    if not 0 <= wanted <= SPIN_US_MAX:
        raise ValueError(f"{name} is a number of microseconds between 0 and {SPIN_US_MAX}")
    return wanted
