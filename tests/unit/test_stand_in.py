"""Results of rows whose env cannot give one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from envhub.arena.layout import Layout
from envhub.arena.memory import OP_STEP, STATUS_INFO, STATUS_OK, STATUS_RAISED, Arena, allocate
from envhub.arena.stand_in import FRESH, ONGOING, mark_no_step, repeat_observation, truncate, with_objects
from envhub.values import codec
from envhub.values.leaf import Leaf

ROWS, INFO_BYTES = 2, 8


@pytest.fixture
def arena() -> Iterator[Arena]:
    """An arena in which each row has shown its number, and is to show more in slot 1."""
    layout = Layout(ROWS, (Leaf("<i8", (2,)), Leaf("|u1", ())), (), INFO_BYTES)
    with open(allocate(layout), "r+b", buffering=0) as memory:
        arena = Arena(layout, memory.fileno())
        for leaf in arena.observations:
            leaf[0] = np.arange(1, 1 + ROWS).reshape(ROWS, *[1] * (leaf.ndim - 2))
            leaf[1] = 99  # half of what a worker wrote before it died
        arena.post(OP_STEP)
        arena.rewards[:], arena.terminations[:] = 5, True
        arena.status[:], arena.info_template[:], arena.info_length[:] = STATUS_RAISED, 3, 7
        yield arena


def shown(arena: Arena, slot: int) -> list[list[int]]:
    return [arena.observations[0][slot, :, 0].tolist(), arena.observations[1][slot].tolist()]


def test_last_observation_is_repeated_in_the_slot_that_was_asked_for(arena: Arena) -> None:
    repeat_observation(arena, 1)
    assert shown(arena, 1) == [[99, 2]] * 2 and shown(arena, 0) == [[1, 2]] * 2


def test_truncated_row_ends_its_episode_without_a_reward(arena: Arena) -> None:
    truncate(arena, 0, 4)
    assert shown(arena, 1) == [[1, 99]] * 2
    assert (arena.rewards[0], arena.terminations[0], arena.truncations[0]) == (0, False, True)
    assert (arena.status[0], arena.info_template[0], arena.info_length[0]) == (STATUS_INFO, 0, 4)
    assert arena.needs_reset[0] == FRESH
    assert (arena.rewards[1], arena.status[1], arena.needs_reset[1]) == (5, STATUS_RAISED, ONGOING)


@pytest.mark.parametrize(("info_bytes", "status"), [(0, STATUS_OK), (6, STATUS_INFO)])
def test_row_that_stays_shows_its_last_observation(arena: Arena, info_bytes: int, status: int) -> None:
    mark_no_step(arena, 1, info_bytes)
    assert shown(arena, 1) == [[99, 2]] * 2
    assert (arena.status[1], arena.info_template[1], arena.info_length[1]) == (status, 0, info_bytes)
    assert arena.needs_reset[1] == ONGOING


def test_stand_in_leaves_the_row_with_its_worker(arena: Arena) -> None:
    truncate(arena, 0, 0)
    mark_no_step(arena, 1)
    assert (arena.request != arena.done).all()  # who stores it says ``done`` last


def test_info_is_stored_if_there_is_room_for_it(arena: Arena) -> None:
    assert arena.put_info(0, b"12345678") == 0 and arena.infos[0].tobytes() == b"12345678"
    assert arena.put_info(0, b"ab") == 0 and arena.infos[0].tobytes() == b"ab345678"
    assert arena.put_info(0, b"123456789") is None and arena.infos[0].tobytes() == b"ab345678"
    assert not arena.infos[1].any()


def test_blob_with_objects_holds_objects_and_info() -> None:
    assert codec.decode(with_objects(b"objects", b"info")) == [b"objects", b"info"]
