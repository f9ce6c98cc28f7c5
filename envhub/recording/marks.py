"""Marks of envs in the steps of a tape, as far as they do not follow from the flags of the steps before.

Most steps have no mark: each env was stepped, or was reset because its episode had ended. Runs on Python 3.8 and later.
"""

from __future__ import annotations

import numpy as np

NEXT_STEP, SAME_STEP = "NextStep", "SameStep"  # of ``AutoresetMode``, which older Gymnasium lacks


class StepMark:
    """Mark of an env in a step; 0 for one that was stepped, or reset as the autoreset mode has it.

    Plain numbers, since the program marks envs between their steps.
    """

    RESET = 1  # the env was reset: the observation is the first one of an episode, and the flags mean nothing
    STEPPED = 2  # the env was stepped and not reset, even if its episode had ended
    STILL = 4  # nothing happened to the env; with ``RESET`` as well, its next step without a mark is its reset
    FAILED = 8  # the env failed in this step, with which its episode ends
    CUT = 16  # the episode under way ended before this step, without a last one
    ABORT = 32  # steps are missing before this one, so that the episode under way is not recorded
    SKIP = 64  # the episode that begins with this step is not recorded
    LAST = 128  # no episode begins with this step: it belongs to another tape


EXPLICIT = (
    StepMark.RESET | StepMark.STEPPED | StepMark.STILL
)  # of which an env has one, or follows from the steps before


class Follower:
    """Follows the envs of a tape from step to step, in this autoreset mode.

    Attributes:
        expecting: the envs whose next step without a mark is their reset, bool ``(places,)``.
    """

    def __init__(self, places: int, mode: str) -> None:
        self._mode = mode
        self.expecting = np.zeros(places, bool)

    def follow(self, marks: np.ndarray, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """With which of the next steps an episode begins, and which of them belong to the episode that was under way.

        ``marks`` and ``ended``, whether a flag is set, have a row for each step; so have the results.
        """
        if len(marks) == 1 and not marks.any():
            return self._follow_unmarked(ended)
        still, reset, failed = (has(marks, mark) for mark in (StepMark.STILL, StepMark.RESET, StepMark.FAILED))
        broken_off = has(marks, StepMark.CUT | StepMark.ABORT)
        ends = np.where(still, reset, self._ends(ended, failed, reset))
        resets = self._expected(still & ~(broken_off | reset), broken_off, ends)
        resets &= ~has(marks, EXPLICIT)
        reset &= ~still
        begins, stepped = (reset | resets) & ~failed, ~(still | reset | resets)
        if self._mode == SAME_STEP:
            begins |= stepped & ended & ~failed
        return begins & ~has(marks, StepMark.LAST), stepped

    def _follow_unmarked(self, ended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Follow one step without marks, with fewer operations than ``follow``: each step may need it."""
        resets = self.expecting[None]
        self.expecting = ended[0] if self._mode == NEXT_STEP else np.zeros_like(ended[0])
        begins: np.ndarray = resets | ended if self._mode == SAME_STEP else resets
        return begins, ~resets

    def _ends(self, ended: np.ndarray, failed: np.ndarray, reset: np.ndarray) -> np.ndarray:
        """After which steps an env is to be reset."""
        if self._mode == NEXT_STEP:
            ends: np.ndarray = (ended & ~reset) | failed
            return ends
        return failed if self._mode == SAME_STEP else np.zeros_like(failed)

    def _expected(self, undecided: np.ndarray, broken_off: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """In which steps each env is to be reset: after one of ``ends``, and those in which nothing was decided."""
        after = ends
        if undecided.any():
            last = np.where(undecided, -1, np.arange(len(ends))[:, None])  # the step that decides about the next one
            last = np.maximum.accumulate(last, axis=0)
            after = np.where(last < 0, self.expecting, np.take_along_axis(ends, np.maximum(last, 0), axis=0))
        before = np.concatenate([self.expecting[None], after[:-1]])
        if len(after):
            self.expecting = after[-1]
        expected: np.ndarray = before & ~broken_off
        return expected


def has(marks: np.ndarray, mark: int) -> np.ndarray:
    """Mask of those marks that have any of the bits of ``mark``."""
    mask: np.ndarray = (marks & np.uint8(mark)) != 0
    return mask
