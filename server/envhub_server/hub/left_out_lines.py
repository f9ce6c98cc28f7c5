"""Counts of lines that the log and the audit file left out, which are written after a while."""

from __future__ import annotations

from collections.abc import Callable

from envhub_server.loop.loop import Loop
from envhub_server.repeats import REPEAT_S

Writer = Callable[[], bool]  # writes the counts that are due; returns True if there may be more later


class LeftOutLines:
    """Has each writer write how many lines it left out. It owns the time of that."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._writers: list[Writer] = []
        self._is_planned = False

    def add(self, writer: Writer) -> None:
        """Have this writer write its counts, too."""
        self._writers.append(writer)

    def plan(self) -> None:
        """Have the counts written after a while, if that is not planned."""
        if not self._is_planned:
            self._is_planned = True
            self._loop.schedule.set(self._write, self._loop.clock.now_s() + REPEAT_S)

    def _write(self) -> None:
        self._is_planned = False
        if True in [write() for write in self._writers]:  # each of them writes
            self.plan()
