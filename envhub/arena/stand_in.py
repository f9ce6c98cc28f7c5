"""Outcomes of rows whose env cannot give one itself: the last observation once more, and what is said beside it.

Used by the hub for the rows of a worker that has ended, and in a worker for an env that is to be reset first.
"""

from __future__ import annotations

import numpy as np

from envhub.arena.memory import STATUS_INFO, STATUS_OK, Arena
from envhub.values import codec

# What ``needs_reset`` says of a row: nothing; that its episode has ended; that its env is new, and is to be reset
# before its first step whatever the mode; and that besides nobody was told yet what became of the one before.
ONGOING, ENDED, FRESH, OWED = 0, 1, 2, 3


def repeat_observation(arena: Arena, row: int) -> None:
    """Have the slot that was asked for hold what the other one does, the last observation that was complete."""
    slot = int(arena.slot[row]) & 1
    for leaf in arena.observations:
        leaf[slot, row] = leaf[1 - slot, row]


def truncate(arena: Arena, row: int, info_bytes: int) -> None:
    """End the row's episode without a transition of its env's; its info is so long, and stands already."""
    repeat_observation(arena, row)
    arena.rewards[row] = 0.0
    arena.terminations[row] = False
    arena.truncations[row] = True
    arena.needs_reset[row] = FRESH
    arena.info_template[row] = 0
    arena.info_length[row] = info_bytes
    arena.status[row] = STATUS_INFO


def stay(arena: Arena, row: int, info_bytes: int = 0) -> None:
    """Leave the row as it was."""
    repeat_observation(arena, row)
    arena.info_template[row] = 0
    arena.info_length[row] = info_bytes
    arena.status[row] = STATUS_INFO if info_bytes else STATUS_OK


def beside(objects: bytes, info: bytes) -> bytes:
    """The blob of a row whose observation has leaves of no fixed size; without ``objects`` they are what they were."""
    return codec.encode([objects, info])


def put_info(arena: Arena, row: int, info: bytes) -> bool:
    """Store an encoded info in the row's place; False where it is too large for it."""
    if len(info) > arena.layout.info_bytes:
        return False
    arena.infos[row, : len(info)] = np.frombuffer(info, np.uint8)
    return True
