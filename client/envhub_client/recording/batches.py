"""The memory between the program, which writes steps into it, and the process that makes episodes of them.

It has ``BATCHES`` batches of steps. The program fills one and hands it over; the process reads it and gives it back. A
step has the row of each recorded env in arrays as the vector env returned them, and a mark where these do not say what
happened to the env.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Dict, Text, Tuple

from envhub.errors import UnsupportedSpace
from envhub.values.leaf import OBJECT
from envhub.values.spaces import leaves

BATCHES = 8
STEPS_MAX = 1024  # of a batch
SIDE_MAX = 1 << 13  # pixels of a frame
TEXT_CHARS_MAX = 1 << 20
MADV_POPULATE_WRITE = 23  # of linux/mman.h; Python has no name for it


class StepMark(enum.IntEnum):
    """Mark of an env in a step; most often none, as its flags and the autoreset mode say what happened."""

    STEPPED = 0
    RESET = 1  # by the program: the observation is the first one of an episode, and the flags mean nothing
    STILL = 2  # nothing, as only other envs were reset
    FAILED = 3  # the env failed in this step, which is the last one of its episode
    BROKEN_OFF = 4  # a reset or step had no result, so that the env may have moved unseen
    MISSED = 5  # there was no room for the steps before


class StepBatch:
    """The arrays of a batch, each with a row for a step and in it one for an env; observations and actions by leaf."""

    def __init__(self, memory: np.ndarray) -> None:
        names = memory.dtype.names or ()
        self.observations, self.finals, self.actions = (
            [memory[name] for name in names if name.startswith(kind)] for kind in ("observation", "final", "action")
        )
        self.rewards, self.terminations, self.truncations = (memory[name] for name in FLAGS)
        self.marks = memory["mark"]
        self.frames = memory["frame"] if "frame" in names else memory["mark"][:, :0]


FLAGS = "reward", "termination", "truncation"


def step_of(spaces: Sequence[Space[Any]], num_envs: int, has_finals: bool, frames: Sequence[int]) -> np.dtype[Any]:
    """One step, as a structured dtype.

    Args:
        spaces: of observations and of actions, of one env.
        num_envs: the recorded ones.
        has_finals: whether an episode's last observation comes with the first one of the next.
        frames: the shape of all frames of the step; empty if none are recorded.
    """
    kinds = ["observation", "action", *(["final"] if has_finals else [])]
    fields: list[Any] = [
        (f"{kind}{number}", dtype, (num_envs, *shape))
        for kind, space in zip(kinds, [*spaces, spaces[0]], strict=False)
        for number, (dtype, shape) in enumerate(_columns(space))
    ]
    fields += [(name, "f8" if name == "reward" else "?", num_envs) for name in FLAGS]
    fields.append(("mark", "u1", num_envs))
    return np.dtype(fields + ([("frame", "u1", tuple(frames))] if frames else []), align=True)


def batches_of(step: np.dtype[Any], queue_bytes: int) -> tuple[int, int]:
    """The number of steps in a batch, at least one, and the bytes of all batches."""
    steps = max(1, min(STEPS_MAX, queue_bytes // BATCHES // step.itemsize))
    return steps, BATCHES * steps * step.itemsize


def mapped(descriptor: int, step: np.dtype[Any], steps: int) -> list[StepBatch]:
    """The batches in the memory behind this descriptor."""
    memory = mmap.mmap(descriptor, BATCHES * steps * step.itemsize)
    with contextlib.suppress(OSError):  # of a kernel before 5.14
        # Else a step takes ten times as long where it is the first to write into a page.
        memory.madvise(MADV_POPULATE_WRITE)
    return [StepBatch(each) for each in np.frombuffer(memory, step).reshape(BATCHES, steps)]


def check_recordable(space: Space[Any]) -> None:
    """Refuse a space that has parts for which a data set of Minari has no form.

    Raises:
        UnsupportedSpace: it has.
    """
    for part in _parts(space):
        (leaf,) = leaves(part)
        if isinstance(part, Text) and part.max_length > TEXT_CHARS_MAX:
            raise UnsupportedSpace(
                f"{part} cannot be recorded: its texts may have more than {TEXT_CHARS_MAX} characters"
            )
        if leaf == OBJECT and not isinstance(part, Text):
            raise UnsupportedSpace(f"{part} cannot be recorded: Minari stores arrays of a fixed size and texts")
        if not leaf.items:
            raise UnsupportedSpace(f"{part} cannot be recorded: Minari stores nothing that has no elements")


def _parts(space: Any) -> Iterator[Any]:
    """The parts of a space that are its leaves."""
    if isinstance(space, (Dict, Tuple)):
        for part in space.spaces.values() if isinstance(space, Dict) else space.spaces:
            yield from _parts(part)
    else:
        yield space


def _columns(space: Space[Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each leaf; a text has as many characters as its space allows."""
    for part in _parts(space):
        (leaf,) = leaves(part)
        yield (f"U{part.max_length}", ()) if isinstance(part, Text) else (leaf.dtype, leaf.shape)
