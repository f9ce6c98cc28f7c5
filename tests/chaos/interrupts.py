"""Interrupts at chosen lines: where a call passes in EnvHub's code, and ``KeyboardInterrupt`` at one such place."""

from __future__ import annotations

import gc
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import envhub_client

import envhub

FOLDERS = tuple(f"{Path(package.__file__ or '').parent}{os.sep}" for package in (envhub, envhub_client))


class Place(NamedTuple):
    """A line that is about to run, or a function that is about to return from one."""

    file: str
    line: int
    event: str
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} ({self.event}, {self.function})"


def _leaves_a_block(frame: FrameType) -> bool:
    """Whether its line is that of a ``with`` which is passed again on the way out, in the middle of its instructions.

    An exception of a trace function keeps ``__exit__`` from being called there; a signal never comes just then.
    """
    code, line = frame.f_code, frame.f_lineno
    if not linecache.getline(code.co_filename, line).lstrip().startswith("with "):
        return False
    return frame.f_lasti != min(start for start, _, found in code.co_lines() if found == line)


def _has_delivered(frame: FrameType) -> bool:
    """Whether it is a wait that hands its result or error to its caller: no call comes after that, and so no signal."""
    code = frame.f_code
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    is_wait = code.co_filename.endswith("session/pending.py") and code.co_name == "called"
    return is_wait and line in ("return result", "raise")


class Tracer:
    """Sees every place that this thread passes in these folders, and at which a signal may come."""

    folders = FOLDERS

    def during(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns, or None where it was interrupted."""
        gc.disable()  # it calls destructors of other tests' objects, which have no caller to raise to
        before = sys.gettrace()  # that of a measurement of coverage
        sys.settrace(self._trace)
        try:
            return work()
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(before)
            gc.enable()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.folders):
            return None
        if not _has_delivered(frame) and (event == "return" or (event == "line" and not _leaves_a_block(frame))):
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
    """Raises ``KeyboardInterrupt`` when a place is passed for the n-th time, or at the n-th place of all.

    Attributes:
        raised: whether it has.
        where: the place.
    """

    def __init__(self, time: int, place: Place | None = None) -> None:
        self._left = time
        self._place = place
        self.raised = False
        self.where: Place | None = None

    def passed(self, place: Place) -> None:
        if self._place in (None, place):
            self._left -= 1
            if self._left == 0:
                self.raised, self.where = True, place
                raise KeyboardInterrupt
