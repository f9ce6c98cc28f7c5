"""Envs whose observations and actions are an array or a number each, which is all that some rivals host."""

from __future__ import annotations

from gymnasium import spaces

from side_by_side.entrant import Task

ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)


class CannotHost(Exception):
    """A rival has no such envs."""


def only_arrays(task: Task) -> None:
    """Raise ``CannotHost`` unless observations and actions are an array or a number each."""
    if not isinstance(task.observation_space, ARRAYS) or not isinstance(task.action_space, ARRAYS):
        raise CannotHost(task.name)
