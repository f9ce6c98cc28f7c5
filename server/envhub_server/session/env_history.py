"""Attributes and seeds that the client has set on its envs; the next process of a slot sets them again."""

from __future__ import annotations

from collections.abc import Sequence

from envhub.env_failure import reseeded
from envhub.protocol.messages import Make
from envhub_server.ipc import control
from envhub_server.ipc.control import SetAttributes
from envhub_server.session.slots import Slot


class EnvHistory:
    """The last seed of each env, and the attributes that were set on it."""

    def __init__(self, make: Make) -> None:
        """Begin with the seeds that the envs of a lost session have left to those of this one."""
        self._seeds: list[int | None] = make.seeds or [None] * make.num_envs
        self._attributes = SetAttributes()

    def note_seeds(self, seeds: Sequence[int | None], mask: Sequence[bool]) -> None:
        """Note a reset of the envs in ``mask``."""
        kept = zip(self._seeds, seeds, mask, strict=True)
        self._seeds = [seed if chosen and seed is not None else last for last, seed, chosen in kept]

    def note_attribute(self, message: control.SetAttrRows) -> bool:
        """Note a set attribute; False if it is too large to keep."""
        return self._attributes.note(message)

    def seeds(self, slot: Slot, replaced: int) -> list[int | None]:
        """The seeds of a slot's envs, after this number of replacements."""
        return [reseeded(self._seeds[row], replaced) for row in slot.rows]

    def attributes(self, slot: Slot) -> list[control.SetAttrRows]:
        """The messages that set the attributes of the envs of this slot."""
        return [*self._attributes.again(slot.rows)]
