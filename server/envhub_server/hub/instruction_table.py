"""Entries of the tables that say which method carries out each kind of instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from envhub_server.session.instructions import Instruction

Part = TypeVar("Part")
Kind = TypeVar("Kind", bound=Instruction)
Table = Mapping[type, Callable[[Part, Any], None]]


def entry(kind: type[Kind], carry_out: Callable[[Part, Kind], None]) -> tuple[type, Callable[[Part, Any], None]]:
    """Entry of a kind of instruction, whose method takes an instruction of that kind."""
    return kind, carry_out
