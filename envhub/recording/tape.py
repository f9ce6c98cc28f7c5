"""The tape: memory that the program writes steps into, and the process that records reads them from.

It is divided into blocks of steps. A block belongs to the program until it is handed over, then to the other process
until it is given back. A step of a block has a place for each env that is recorded, which holds what the vector env
returned, and a ``StepMark`` where that does not say everything. The words at the beginning say which block the program
writes, and how many steps of it are complete: by them the other process reads the rest, if the program is killed. And
they say whether there was no room for the steps that followed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import asdict, dataclass, replace
from typing import Any, Sequence

import numpy as np

from envhub.recording.marks import SAME_STEP
from envhub.sealing import check_sealed, new_memory
from envhub.values.leaf import Leaf

ALIGN = 64
HEADER_BYTES = 64
BLOCKS = 8
FEW, MANY = BLOCKS // 4, BLOCKS // 2  # free blocks
STEPS_MAX = 1024  # of a block
SIDE_MAX = 1 << 13  # pixels of a frame

_NO_BLOCK = -1
_MADV_POPULATE_WRITE = 23  # of linux/mman.h; Python has no name for it


@dataclass(frozen=True)
class TapeShape:
    """The sizes of a tape.

    Attributes:
        places: the envs that are recorded.
        steps: of a block.
        observations, actions: the leaves of an observation and of an action, as ``Leaf.wire``.
        mode: the autoreset mode; in SAME_STEP there is room for the last observations of episodes in ``finals``.
        frame: the shape of a frame; empty if none are recorded.
        films: the envs that are filmed.
    """

    places: int
    steps: int
    observations: list[Any]
    actions: list[Any]
    mode: str
    frame: tuple[int, ...] = ()
    films: int = 0

    def wire(self) -> dict[str, Any]:
        """Convert it to values of the codec."""
        return {**asdict(self), "frame": list(self.frame)}

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> TapeShape:
        """The shape of these values."""
        return cls(**{**values, "frame": tuple(values["frame"])})

    def leaves(self) -> tuple[list[Leaf], list[Leaf]]:
        """The leaves of an observation and of an action."""
        observations, actions = ([Leaf.from_wire(leaf) for leaf in kind] for kind in (self.observations, self.actions))
        return observations, actions

    def arrays(self) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """Name, dtype and shape of every array of a block."""
        cell = (self.steps, self.places)
        observations, actions = self.leaves()
        arrays = [("observations", np.dtype(leaf.dtype), (*cell, *leaf.shape)) for leaf in observations]
        if self.mode == SAME_STEP:
            arrays += [("finals", np.dtype(leaf.dtype), (*cell, *leaf.shape)) for leaf in observations]
        arrays += [("actions", np.dtype(leaf.dtype), (*cell, *leaf.shape)) for leaf in actions]
        arrays += [(name, np.dtype(bool), cell) for name in ("terminations", "truncations")]
        arrays += [("rewards", np.dtype(np.float64), cell), ("marks", np.dtype(np.uint8), cell)]
        if self.films:
            arrays.append(("frames", np.dtype(np.uint8), (self.steps, self.films, *self.frame)))
        return arrays

    def block_bytes(self) -> int:
        """The size of a block."""
        return sum(_aligned(dtype.itemsize * int(np.prod(shape))) for _, dtype, shape in self.arrays())


def is_frame(shape: Sequence[int]) -> bool:
    """True if arrays of this shape can be the frames of a film."""
    return len(shape) == 3 and shape[2] == 3 and all(1 <= side <= SIDE_MAX for side in shape[:2])


def steps_of(shape: TapeShape, queue_bytes: int) -> int:
    """Steps of each block if all have ``queue_bytes``; at least one."""
    one = replace(shape, steps=1).block_bytes()
    return max(1, min(STEPS_MAX, queue_bytes // BLOCKS // one))


class Block:
    """The arrays of one block, indexed by step and place.

    Attributes:
        observations, finals, actions: an array per leaf.
        mark_bytes: the memory of ``marks``, which a step is written into more quickly.
    """

    def __init__(self, shape: TapeShape, memory: memoryview) -> None:
        self.observations: list[np.ndarray] = []
        self.finals: list[np.ndarray] = []
        self.actions: list[np.ndarray] = []
        at = 0
        for name, dtype, dims in shape.arrays():
            size = dtype.itemsize * int(np.prod(dims))
            array = np.frombuffer(memory[at : at + size], dtype).reshape(dims)
            if name == "marks":
                self.mark_bytes = memory[at : at + size]
            at += _aligned(size)
            if name in ("observations", "finals", "actions"):
                getattr(self, name).append(array)
            else:
                setattr(self, name, array)

    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    marks: np.ndarray
    frames: np.ndarray


class Tape:
    """The memory behind a descriptor, as blocks.

    Attributes:
        words: the block that is written, how many of its steps are complete, and whether steps after them are missing.
    """

    def __init__(self, shape: TapeShape, descriptor: int, writes: bool = False) -> None:
        """Map it; with ``writes`` its pages are taken at once.

        Raises:
            OSError: this is no memfd.
            ValueError: it is too small, or its giver could make it smaller.
        """
        check_sealed(descriptor)
        self.shape = shape
        self._map = mmap.mmap(descriptor, tape_bytes(shape))
        with contextlib.suppress(OSError):  # of a kernel before 5.14
            if writes:  # else a step takes ten times as long where it is the first to write into a page
                self._map.madvise(_MADV_POPULATE_WRITE)
        memory = memoryview(self._map)
        self.words = memory[:HEADER_BYTES].cast("q")
        size = shape.block_bytes()
        starts = range(HEADER_BYTES, HEADER_BYTES + BLOCKS * size, size)
        self.blocks = [Block(shape, memory[start : start + size]) for start in starts]

    def begin(self, block: int | None) -> None:
        """Say which block is written from now on; None for none."""
        self.words[1] = 0
        self.words[0] = _NO_BLOCK if block is None else block

    def unfinished(self) -> tuple[int, int]:
        """The block that is being written, and its complete steps; 0 steps where there is none."""
        block, steps = self.words[0], self.words[1]
        return (block, steps) if 0 <= block < BLOCKS and 0 <= steps <= self.shape.steps else (0, 0)


def tape_bytes(shape: TapeShape) -> int:
    """The size of a tape."""
    return HEADER_BYTES + BLOCKS * shape.block_bytes()


def new_tape(shape: TapeShape) -> tuple[Tape, int]:
    """An empty tape and its descriptor. Its memory has no name."""
    descriptor = new_memory("envhub-recording", tape_bytes(shape))
    try:
        tape = Tape(shape, descriptor, writes=True)
    except BaseException:
        os.close(descriptor)
        raise
    tape.begin(None)
    return tape, descriptor


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
