"""Stand-in results, of rows whose env cannot give one itself: the last observation once more, with an info.

The hub stores them for the rows of a worker that has ended; a worker stores them for an env that must be reset first.
"""

from __future__ import annotations

from envhub.arena.memory import STATUS_INFO, STATUS_OK, Arena
from envhub.values import codec

# Values of ``needs_reset``:
#   ONGOING         the row's episode goes on
#   ENDED           its episode has ended
#   FRESH           its env is new, and must be reset before its first step in every autoreset mode
#   REPORT_PENDING  its env is new, and the failure of the env before it was not reported to the client yet
ONGOING, ENDED, FRESH, REPORT_PENDING = 0, 1, 2, 3


def repeat_observation(arena: Arena, row: int) -> None:
    """Copy the last complete observation, which is in the other slot, to the slot of the request."""
    slot = int(arena.request[row]) & 1
    for leaf in arena.observations:
        leaf[slot, row] = leaf[1 - slot, row]


def truncate(arena: Arena, row: int, info_bytes: int, template: int = 0) -> None:
    """End the row's episode without a transition of its env; its info, of ``info_bytes``, is stored already."""
    stay(arena, row, info_bytes, template)
    arena.rewards[row] = 0.0
    arena.terminations[row] = False
    arena.truncations[row] = True
    arena.needs_reset[row] = FRESH


def stay(arena: Arena, row: int, info_bytes: int = 0, template: int = 0) -> None:
    """Leave the row's episode as it was; its info, of ``info_bytes``, is stored already."""
    repeat_observation(arena, row)
    arena.info_template[row] = template
    arena.info_length[row] = info_bytes
    arena.status[row] = STATUS_INFO if info_bytes else STATUS_OK


def with_objects(objects: bytes, info: bytes) -> bytes:
    """The blob of a row whose observation has leaves of no fixed size; without ``objects`` they are what they were."""
    return codec.encode_pair(objects, info)
