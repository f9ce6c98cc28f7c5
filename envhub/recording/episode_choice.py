"""The choice of episodes: which of those that begin in a tape are recorded.

Runs on Python 3.8 and later, in workers too.
"""

from __future__ import annotations

import numpy as np

from envhub.recording.marks import SAME_STEP, Follower, StepMark, has
from envhub.recording.tape import Block


class EpisodeChoice:
    """Follows the envs of a tape, and chooses every n-th episode of each.

    Args:
        numbers: of the envs in their session, by place.
        mode: the autoreset mode.
        every: n.
        begun: how many episodes of each env of the session have begun, which is kept up to date where not every episode
            is recorded; None for none.

    Attributes:
        dropped: how many episodes began in steps that were missed.
    """

    def __init__(self, numbers: np.ndarray, mode: str, every: int, begun: np.ndarray | None) -> None:
        self._numbers, self._mode, self._every = numbers, mode, every
        self._begun = np.zeros(int(numbers.max(initial=0)) + 1, np.int64) if begun is None else begun
        self._follower = Follower(len(numbers), mode)
        self._followed = 0  # steps of the block
        self._wanted = np.zeros(len(numbers), bool)  # the episodes under way that ``every`` chooses
        self.dropped = 0

    @property
    def expecting(self) -> np.ndarray:
        """The places whose next step without a mark is a reset, as far as the block was followed, as bool."""
        return self._follower.expecting

    def begin_block(self) -> None:
        """Follow a new block from its first step."""
        self._followed = 0

    def follow_up(self, block: Block, at: int) -> None:
        """Follow the envs through the first ``at`` steps of the block, after which ``expecting`` holds."""
        if self._followed < at:
            last = at - 1
            # The last step decides about the next one, where no env was still in it.
            steps = slice(self._followed if block.marks[last].any() else last, at)
            self._follower.follow(block.marks[steps], block.terminations[steps] | block.truncations[steps])
            self._followed = at

    def choose(self, at: int, marks: np.ndarray, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mark those episodes that begin in step ``at`` and are not wanted.

        Returns:
            By place, bool: whether its observation is recorded, and whether its frame is.
        """
        before = self._wanted & ~has(marks, StepMark.CUT | StepMark.ABORT | StepMark.RESET)
        begins, stepped = (row[0] for row in self._follower.follow(marks[None], ended[None]))
        self._followed = at + 1
        failed = has(marks, StepMark.FAILED)
        ends = stepped & (ended | failed)
        wanted = self._count(begins)
        marks[begins & ~wanted] |= np.uint8(StepMark.SKIP)
        self._wanted = np.where(begins, wanted, before & ~ends)
        shown = stepped & before
        final = ends & ~failed if self._mode == SAME_STEP else np.zeros_like(ends)
        return shown | wanted, (shown & ~final) | wanted

    def _count(self, begins: np.ndarray) -> np.ndarray:
        """Count the episodes that begin; returns those that are wanted."""
        if self._every == 1:
            return begins
        wanted: np.ndarray = begins.copy()
        numbers = self._numbers[begins]
        wanted[begins] = self._begun[numbers] % self._every == 0
        self._begun[numbers] += 1
        return wanted

    def miss(self, marks: np.ndarray, ended: np.ndarray) -> None:
        """Count the episodes that begin in a step that is not written."""
        begins, _ = self._follower.follow(marks[None], ended[None])
        self.dropped += int(np.count_nonzero(self._count(begins[0])))

    def give_up(self) -> None:
        """Want no episode that is under way."""
        self._wanted[:] = False
