"""Stand-in results for rows whose env cannot step: the last observation repeated, with an info.

The hub stores them for the rows of a worker that has ended; a worker stores them for an env that must be reset first.
"""

from __future__ import annotations

from envhub.arena.memory import STATUS_INFO, STATUS_OK, Arena
from envhub.values import codec

# Values of ``needs_reset``:
#   ONGOING         the row's episode goes on
#   ENDED           its episode has ended
#   FRESH           its env is new, and in every autoreset mode its first step is a reset
#   REPORT_PENDING  its env is new, and the client has not seen the former env's failure yet
ONGOING, ENDED, FRESH, REPORT_PENDING = 0, 1, 2, 3


def repeat_observation(arena: Arena, row: int) -> None:
    """Copy the last complete observation, which is in the other slot, to the slot of the request."""
    slot = int(arena.request[row]) & 1
    for leaf in arena.observations:
        leaf[slot, row] = leaf[1 - slot, row]


def truncate(arena: Arena, row: int, info_bytes: int, template: int = 0) -> None:
    """End the row's episode without a step of its env; its info, of ``info_bytes``, must be stored already."""
    mark_no_step(arena, row, info_bytes, template)
    arena.rewards[row] = 0.0
    arena.terminations[row] = False
    arena.truncations[row] = True
    arena.needs_reset[row] = FRESH


def mark_no_step(arena: Arena, row: int, info_bytes: int = 0, template: int = 0) -> None:
    """Mark that the row did not step: its episode goes on. Its info, of ``info_bytes``, must be stored already."""
    repeat_observation(arena, row)
    arena.info_template[row] = template
    arena.info_length[row] = info_bytes
    arena.status[row] = STATUS_INFO if info_bytes else STATUS_OK


def with_objects(objects: bytes, info: bytes) -> bytes:
    """The info of a row whose observation has leaves of variable size; without ``objects`` these did not change."""
    return codec.encode_pair(objects, info)
