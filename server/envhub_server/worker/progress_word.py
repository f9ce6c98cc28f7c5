"""The progress word of a worker, which shows the hub the row that the worker runs."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

from envhub.arena.memory import TURN_ONE, Arena


class ProgressWord:
    """Stores the word; the stepper stores it without a call, because it does so for every row.

    Attributes:
        words: of all workers, each at its first row.
        at: the index of this worker's word.
        turn: counts the calls of envs; its lower bits are free for those of the group that is called.
    """

    words: Any

    def __init__(self) -> None:
        self.at = self.turn = 0

    def attach(self, arena: Arena, at: int) -> None:
        """Use the word of this row in ``arena``."""
        self.words, self.at = arena.turn.data, at
        self.resume()

    def resume(self) -> None:
        """Continue to count from the present word, which another worker may have written."""
        self.turn = self.words[self.at] & ~(TURN_ONE - 1)

    def begin(self, target: Any) -> None:
        """Store that the worker is about to call this group, or this env."""
        self.turn += TURN_ONE
        self.show(target.turn)

    def show(self, bits: int) -> None:
        """Store these lower bits; 0 where no env is called."""
        self.words[self.at] = self.turn | bits

    @contextlib.contextmanager
    def rendering(self, target: Any) -> Iterator[None]:
        """Within the context, the worker renders this env between steps."""
        self.begin(target)
        yield
        self.show(0)
