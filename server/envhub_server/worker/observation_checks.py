"""Checks that observations are in their space, and that they are finite."""

from __future__ import annotations

from typing import Any

import numpy as np

from envhub.values import spaces

STEPS_CHECKED_FIRST = 100  # the observations of an env's first steps that are all compared with the space
STEPS_PER_CHECK = 256  # after them, one observation in this many


class NotFinite(ValueError):
    """An observation or a reward is infinite or not a number."""


class CheckPlan:
    """Says which observations of an env are compared with its space.

    Attributes:
        steps_left: up to the next one, including it; not positive where none is compared any more.
    """

    def __init__(self) -> None:
        self.steps_left = self._checks = 0

    def begin(self, is_checked: bool = True) -> None:
        self.steps_left = 1 if is_checked else 0

    def plan_next(self) -> None:
        self._checks += 1
        self.steps_left = 1 if self._checks < STEPS_CHECKED_FIRST else STEPS_PER_CHECK

    def stop(self) -> None:
        self.steps_left = 0


def why_not_finite(space: Any, observation: Any) -> str:
    """Describe the values of an observation that are infinite or not a number; empty if none is."""
    for number, part in enumerate(spaces.flatten(space, observation)):
        if wrong := _not_finite(part):
            return f"{wrong} values of part {number} of an observation are not finite"
    return ""


def _not_finite(part: Any) -> int:
    """Number of values are infinite or not a number, in an array, or in the arrays of a Graph, Sequence or OneOf."""
    if isinstance(part, dict):
        return sum(map(_not_finite, part.values()))
    if isinstance(part, (tuple, list)):
        return sum(map(_not_finite, part))
    if isinstance(part, (float, np.ndarray, np.floating)) and np.asarray(part).dtype.kind in "fc":
        return int(np.size(part) - np.count_nonzero(np.isfinite(part)))
    return 0
