"""A session's shared memory as the hub has it: the arena, its descriptor, and the bells that go with it."""

from __future__ import annotations

import os

from envhub.arena.driver import ArenaDriver
from envhub.arena.layout import Layout
from envhub.arena.memory import Arena, allocate
from envhub_server.memory.step_frames import StepFrames


class Memory:
    """The arena, and how the hub steps in it while it drives.

    Attributes:
        arena: mapped.
        descriptor: of the memory; it is given to workers and to a client.
        bells: the eventfds of the client, by which it is woken, and of each worker, by which the client wakes it.
        driver: steps in the arena.
        frames: of the steps that its client sends.
    """

    def __init__(self, layout: Layout, workers: int) -> None:
        """Allocate and map it.

        Raises:
            OSError: memory, address space or descriptors are not to be had; nothing is left behind.
        """
        self.bells: list[int] = []
        self.descriptor = -1
        try:
            for _ in range(1 + workers):
                self.bells.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            self.descriptor = allocate(layout)
            self.arena = Arena(layout, self.descriptor)
        except OSError:
            self.close()
            raise
        self.arena.format(epoch=1)
        self.driver = ArenaDriver(self.arena)
        self.frames = StepFrames(self.arena)

    def batches(self) -> tuple[list[int], list[int]]:
        """When each worker's last batch began, and when it ended, in nanoseconds of the monotonic clock."""
        workers = len(self.bells) - 1
        return self.arena.began_ns[:workers].tolist(), self.arena.ended_ns[:workers].tolist()

    def another(self) -> Memory:
        """Memory of the same layout.

        Raises:
            OSError: as when it was made.
        """
        return Memory(self.arena.layout, len(self.bells) - 1)

    def close(self) -> None:
        """Close the descriptors; the memory goes with the last view of it."""
        for bell in self.bells:
            os.close(bell)
        self.bells = []
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
