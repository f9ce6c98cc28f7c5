"""Waiting for a word of the arena: spin for as long as parking would cost, then park.

A parked process is woken by the kernel, which costs tens of microseconds on both sides. Spinning costs a CPU, so it is
bounded, and it is only done where it was of use recently.
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
DIGITS_MAX = 20  # of the variable; Python reads no number of thousands of digits
# A machine that also loads in order: what a word guards can be read once the word was seen, without a system call.
HAS_FENCE = platform.machine() in ("x86_64", "AMD64")
SKIPS_MAX = 127  # waits that only park, after many vain spins

RING = (1).to_bytes(8, sys.byteorder)  # what is written to an eventfd, to wake the process that is parked at it

_free_lock = threading.Lock()  # on x86-64 taking it is an atomic exchange, which is a fence


def fence() -> None:
    """Store what was stored before this call before loading anything after it; only where ``HAS_FENCE``.

    Of two processes that each store a word, call this and then load the other's word, at least one sees what the other
    has stored; without a fence both may miss it.
    """
    with _free_lock:
        pass


class Spinner:
    """Spins for one process, before it parks.

    Attributes:
        spins: whether it spins at all.
    """

    def __init__(self, spin_us: int, clock_ns: Callable[[], int]) -> None:
        """Spin for up to ``spin_us`` microseconds of ``clock_ns``; 0 is not at all."""
        self._limit_ns = spin_us * 1000
        self.spins = spin_us > 0
        self._clock_ns = clock_ns
        self._skips = self._penalty = 0

    def spin(self, ready: Callable[[], bool]) -> bool:
        """True if it is ready, now or while this spins."""
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
        # Each vain spin in a row doubles the number of waits that only park.
        self._skips = self._penalty = min(2 * self._penalty + 1, SKIPS_MAX)
        return False


def spin_us(processes: int, cpus: int, quota: bool) -> int:
    """For how many microseconds to spin; ``quota`` says whether a cgroup limits the CPU time.

    ``processes`` are the workers of a session for one of them, and one more for their driver. A worker that spins keeps
    its CPU from going idle while the driver computes. The driver may share that CPU: a process that slept gets it
    before one that spun. A driver that spins takes CPU time from workers that compute, unless it has a CPU to itself.

    No process spins where that would spend a cgroup's quota, or where a weaker memory order than x86-64's forbids to
    read what a word guards without a system call.

    Raises:
        ValueError: ``ENVHUB_SPIN_US`` is no number of microseconds.
    """
    configured = configured_spin_us()
    if configured is not None:
        return configured
    return SPIN_US if processes <= cpus and not quota and HAS_FENCE else 0


def configured_spin_us() -> int | None:
    """The value of ``ENVHUB_SPIN_US``; None where it is not set.

    Raises:
        ValueError: it is no number of microseconds.
    """
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    if text is None:
        return None
    is_number = text.isdecimal() and len(text) <= DIGITS_MAX
    return checked_spin_us(int(text) if is_number else -1, ENVIRONMENT_VARIABLE)


def checked_spin_us(wanted: int, name: str) -> int:
    """The number itself; ``name`` is what an error calls it.

    Raises:
        ValueError: it is not between 0 and ``SPIN_US_MAX``.
    """
    if not 0 <= wanted <= SPIN_US_MAX:
        raise ValueError(f"{name} is a number of microseconds between 0 and {SPIN_US_MAX}")
    return wanted
