"""Interrupts at chosen lines: where a call passes in EnvHub's code, and ``KeyboardInterrupt`` at one such place."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

PACKAGES = {"envhub", "envhub_client"}


class Place(NamedTuple):
    """A line that is about to run, or a function that is about to return from one."""

    file: str
    line: int
    event: str
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} ({self.event}, {self.function})"


def _may_leave_a_block(place: Place) -> bool:
    """Whether the line may be that of a ``with`` whose block is about to be left.

    An exception of a trace function keeps ``__exit__`` from being called there; a signal never comes just then.
    """
    return place.event == "line" and linecache.getline(place.file, place.line).lstrip().startswith("with ")


class Tracer:
    """Sees every place that this thread passes."""

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
        if not PACKAGES & set(Path(frame.f_code.co_filename).parts[-2:-1]):
            return None
        if event in ("line", "return"):
            self.passed(Place(frame.f_code.co_filename, frame.f_lineno, event, frame.f_code.co_name))
        return self._trace

    def passed(self, place: Place) -> None:
        """Hear of a place."""


class Places(Tracer):
    """Counts the places."""

    def __init__(self) -> None:
        self.found: Counter[Place] = Counter()

    def passed(self, place: Place) -> None:
        self.found[place] += 1


class Interrupt(Tracer):
    """Raises ``KeyboardInterrupt`` when a place is passed for the n-th time.

    Attributes:
        raised: whether it has.
    """

    def __init__(self, place: Place, time: int) -> None:
        self._place = place
        self._left = time
        self.raised = False

    def passed(self, place: Place) -> None:
        if place == self._place:
            self._left -= 1
            if self._left == 0 and _may_leave_a_block(place):
                return
            if self._left == 0:
                self.raised = True
                raise KeyboardInterrupt
