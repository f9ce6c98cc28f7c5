"""The journals of a session's workers, in the hub: made for each process, and read once one of its envs has failed."""

from __future__ import annotations

import os

from envhub.arena.layout import Layout
from envhub_server.ipc.journal import Journal, JournalLayout, allocate


class Journals:
    """One journal for each process of a worker."""

    def __init__(self) -> None:
        self._journals: dict[int, Journal] = {}

    def make(self, worker: int, rows: int, layout: Layout) -> int | None:
        """The memory of a journal for the new process of this worker, of so many rows; the caller owns it.

        None if the process has one already.

        Raises:
            OSError: there is no memory or descriptor left.
        """
        if worker in self._journals:
            return None
        wanted = JournalLayout(rows, layout.observations, layout.actions)
        descriptor = allocate(wanted)
        try:
            self._journals[worker] = Journal(wanted, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def of(self, worker: int) -> Journal | None:
        """The journal of this worker; None if it has none."""
        return self._journals.get(worker)

    def swap(self, worker: int, spare: int) -> None:
        """Make the journal of a spare's process this worker's; that of the worker, if it has one, is over."""
        self._journals.pop(worker, None)
        if spare in self._journals:
            self._journals[worker] = self._journals.pop(spare)

    def forget(self, worker: int) -> None:
        """Let go of the journal of a process that has ended."""
        self._journals.pop(worker, None)

    def clear(self) -> None:
        """Let go of all journals."""
        self._journals.clear()
