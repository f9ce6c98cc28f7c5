from __future__ import annotations

from collections.abc import Iterator

import pytest
from envhub_server.memory.loose_parts import LooseParts

from envhub.arena.layout import Layout
from envhub.arena.memory import OP_STEP, Arena, allocate
from envhub.arena.stand_in import put_info, with_objects
from envhub.values.leaf import Leaf

ROWS, INFO_BYTES = 3, 64


@pytest.fixture
def arena() -> Iterator[Arena]:
    layout = Layout(ROWS, (Leaf("<f4", (2,)),), (Leaf("<i8", ()),), INFO_BYTES)
    with open(allocate(layout), "r+b", buffering=0) as memory:
        yield Arena(layout, memory.fileno())


def leave(arena: Arena, row: int, blob: bytes) -> None:
    """As a worker that completes the row."""
    put_info(arena, row, blob)
    arena.info_length[row] = len(blob)
    arena.done[row] = arena.request[row]


def test_parts_of_rows_that_are_done_are_kept(arena: Arena) -> None:
    parts = LooseParts()
    arena.post(OP_STEP, 1)
    leave(arena, 0, with_objects(b"zero", b"its info"))
    leave(arena, 1, with_objects(b"", b"its info"))
    parts.keep(arena, range(ROWS))
    assert [parts.of(arena, row) for row in range(ROWS)] == [b"zero", b"", b""]
    put_info(arena, 0, b"half of the next")  # of a worker that ends while it writes
    assert parts.of(arena, 0) == b"zero"


def test_parts_of_an_earlier_step_are_not_taken_for_the_last(arena: Arena) -> None:
    parts = LooseParts()
    arena.post(OP_STEP, 1)
    leave(arena, 0, with_objects(b"first", b""))
    parts.keep(arena, [0])
    arena.post(OP_STEP, 0)
    assert parts.of(arena, 0) == b"first"  # the second is not done
    leave(arena, 0, with_objects(b"second", b""))
    assert parts.of(arena, 0) == b""
    parts.keep(arena, [0])
    assert parts.of(arena, 0) == b"second"


def test_large_parts_are_those_that_were_sent_for_the_step(arena: Arena) -> None:
    parts, large = LooseParts(), with_objects(b"large" * INFO_BYTES, b"")
    arena.post(OP_STEP, 1)
    parts.note_large(0, int(arena.request[0]), large)
    leave(arena, 0, large)
    parts.keep(arena, [0])
    assert parts.of(arena, 0) == b"large" * INFO_BYTES
    arena.post(OP_STEP, 0)
    parts.note_large(0, int(arena.request[0]), with_objects(b"of the next", b""))
    parts.keep(arena, [0])
    assert parts.of(arena, 0) == b"large" * INFO_BYTES


@pytest.mark.parametrize("blob", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x92\x01\x02", b"\xa1x"])
def test_what_a_client_wrote_into_the_arena_breaks_nothing(arena: Arena, blob: bytes) -> None:
    parts = LooseParts()
    arena.post(OP_STEP, 1)
    leave(arena, 0, blob)
    arena.info_length[1] = -5
    arena.done[1] = arena.request[1]
    parts.keep(arena, range(ROWS))
    assert [parts.of(arena, row) for row in range(ROWS)] == [b"", b"", b""]
