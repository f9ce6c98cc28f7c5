"""The driver's side of an arena; the workers' side is played by the test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pytest

from envhub.arena.layout import Layout
from envhub.arena.memory import OP_RESET, OP_STEP, STATUS_INFO, STATUS_OK, STATUS_RAISED, Arena, ArenaDriver, allocate
from envhub.values.actions import DTYPES, OUT_OF_BAND, PYTHON
from envhub.values.leaf import OBJECT, Leaf

ROWS, INFO_BYTES = 4, 16
INT64, INT32, FLOAT32 = (DTYPES.index(np.dtype(name)) for name in ("i8", "i4", "f4"))
CODES = bytes([INT64, FLOAT32])
LAYOUT = Layout(ROWS, (Leaf("<f4", (2,)),), (Leaf("<i8", ()), Leaf("<f4", (3,))), INFO_BYTES)

WORDS = [-5, -1, (1 << 63) - 1, -1 << 63]  # that a peer may have written


class Sides(NamedTuple):
    driver: ArenaDriver
    arena: Arena

    def finish(self, rows: Iterable[int] = range(ROWS), value: float = 0.0, status: int = STATUS_OK) -> None:
        """As the rows' workers do."""
        for row in rows:
            self.arena.observations[0][self.arena.request[row] & 1, row] = value
            self.arena.rewards[row] = value
            self.arena.status[row] = status
            self.arena.done[row] = self.arena.request[row]

    def step(self, value: float) -> list[float]:
        """One step of all rows, each of which shows ``value``; returns what they show."""
        self.driver.post(OP_STEP, CODES, actions(ROWS))
        self.finish(value=value)
        return self.brief()

    def brief(self) -> list[float]:
        return [float(value) for value in self.driver.observations()[0][:, 0]]

    def send(self, *rows: int) -> None:
        self.driver.post_rows(np.array(rows), CODES, actions(len(rows)))

    def ready(self) -> tuple[list[int], int | None]:
        rows, raised = self.driver.ready()
        return rows.tolist(), raised


def actions(count: int, first: int = 0) -> list[np.ndarray]:
    return [np.arange(first, first + count), np.arange(3 * count, dtype=np.float32).reshape(count, 3) + first]


def mapped(layout: Layout) -> Iterator[Arena]:
    with open(allocate(layout), "r+b", buffering=0) as memory:
        yield Arena(layout, memory.fileno())


@pytest.fixture
def arena() -> Iterator[Arena]:
    yield from mapped(LAYOUT)


@pytest.fixture
def sides(arena: Arena) -> Sides:
    return Sides(ArenaDriver(arena), arena)


def integers(arena: Arena) -> list[int]:
    return arena.actions[0][: 8 * ROWS].view(np.int64).tolist()  # type: ignore[no-any-return]


# --- all rows ---------------------------------------------------------------------------------------------------------


def test_post_hands_every_row_to_its_worker_with_its_action(sides: Sides) -> None:
    batch = actions(ROWS, first=5)
    sides.driver.post(OP_STEP, CODES, batch)
    arena = sides.arena
    assert arena.request.tolist() == [1] * ROWS and arena.op.tolist() == [OP_STEP] * ROWS
    assert [column.tolist() for column in arena.action_codes] == [[INT64] * ROWS, [FLOAT32] * ROWS]
    assert integers(arena) == batch[0].tolist()
    assert np.array_equal(arena.actions[1][: batch[1].nbytes].view(np.float32).reshape(ROWS, 3), batch[1])


def test_results_alternate_between_the_slots(sides: Sides) -> None:
    assert sides.step(1) == [1] * ROWS
    first = sides.driver.observations()[0]
    assert sides.step(2) == [2] * ROWS
    assert first[:, 0].tolist() == [1] * ROWS  # a view, which the next step but one writes over
    assert sides.step(3) == [3] * ROWS
    assert first[:, 0].tolist() == [3] * ROWS


def test_codes_are_written_when_they_change(sides: Sides) -> None:
    sides.step(1)
    for column in sides.arena.action_codes:
        column[:] = 0  # so that a write is seen
    sides.step(2)
    sides.driver.post(OP_RESET)
    sides.finish()
    sides.step(3)
    assert not sides.arena.action_codes[0].any()
    sides.driver.post(OP_STEP, bytes([INT64 | PYTHON, FLOAT32]), actions(ROWS))
    assert sides.arena.action_codes[0].tolist() == [INT64 | PYTHON] * ROWS
    sides.finish()
    sides.driver.forget()
    sides.arena.action_codes[0][:] = 0
    sides.driver.post(OP_STEP, bytes([INT64 | PYTHON, FLOAT32]), actions(ROWS))
    assert sides.arena.action_codes[0].tolist() == [INT64 | PYTHON] * ROWS


def test_leaf_without_an_array_keeps_its_place_in_the_codes() -> None:
    layout = Layout(2, (), (OBJECT, Leaf("<i8", ())), INFO_BYTES)
    for arena in mapped(layout):
        ArenaDriver(arena).post(OP_STEP, bytes([OUT_OF_BAND, INT64]), [np.array([7, 8])])
        assert arena.actions[1][:16].view(np.int64).tolist() == [7, 8]
        assert arena.action_codes[0].tolist() == [OUT_OF_BAND] * 2


def test_another_driver_goes_on_where_the_last_one_was(sides: Sides) -> None:
    sides.step(1)
    successor = Sides(ArenaDriver(sides.arena), sides.arena)
    successor.driver.take_over()
    assert successor.step(2) == [2] * ROWS
    assert sides.arena.request.tolist() == [2] * ROWS
    sides.driver.forget()
    assert sides.step(3) == [3] * ROWS and successor.brief() == [3] * ROWS


def test_driver_that_takes_over_has_no_rows_of_parts(sides: Sides) -> None:
    sides.send(1)
    assert sides.driver.sent.count(1) == 1
    sides.driver.take_over()
    assert sides.driver.sent.count(1) == 0


def test_post_that_was_interrupted_is_looked_up_in_the_arena(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    sides.step(1)
    post = Arena.post

    def interrupted(arena: Arena, op: int) -> None:
        post(arena, op)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Arena, "post", interrupted)
        sides.driver.post(OP_STEP, CODES, actions(ROWS))
    sides.finish(value=2)
    assert sides.step(3) == [3] * ROWS
    last_but_one = sides.arena.observations[0][1 - (sides.arena.done & 1), np.arange(ROWS), 0]
    assert last_but_one.tolist() == [2] * ROWS


def test_post_that_was_interrupted_before_its_words_were_written_is_made_again(sides: Sides) -> None:
    class Interrupted(int):
        def to_bytes(self, *_: object, **__: object) -> bytes:
            raise KeyboardInterrupt

    sides.step(1)
    with pytest.raises(KeyboardInterrupt):
        sides.driver.post(Interrupted(OP_STEP), CODES, actions(ROWS))
    assert sides.step(2) == [2] * ROWS
    last_but_one = sides.arena.observations[0][1 - (sides.arena.done & 1), np.arange(ROWS), 0]
    assert last_but_one.tolist() == [1] * ROWS


def test_codes_of_which_an_interrupt_let_only_some_be_written_are_written_again(sides: Sides) -> None:
    def interrupted() -> Iterator[np.ndarray]:
        yield columns[0]
        raise KeyboardInterrupt

    sides.step(1)
    columns = sides.arena.action_codes
    sides.arena.action_codes = interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        sides.driver.post(OP_STEP, bytes([INT64 | PYTHON, FLOAT32]), actions(ROWS))
    sides.arena.action_codes = columns
    sides.step(2)
    assert [column.tolist() for column in columns] == [[INT64] * ROWS, [FLOAT32] * ROWS]


def test_post_that_ended_with_its_driver_is_gone_on_with(sides: Sides) -> None:
    sides.step(1)
    sides.arena.op[:] = OP_STEP
    sides.arena.request[:2] = 2  # a client that was killed wrote no more
    sides.finish([0, 1], value=2)
    sides.driver.take_over()
    assert sides.step(3) == [3] * ROWS
    last_but_one = sides.arena.observations[0][1 - (sides.arena.done & 1), np.arange(ROWS), 0]
    assert last_but_one.tolist() == [2, 2, 1, 1]


# --- some rows --------------------------------------------------------------------------------------------------------


def test_rows_are_sent_while_others_are_under_way(sides: Sides) -> None:
    sides.driver.post_rows(np.array([0]), CODES, actions(1, first=5))
    sides.driver.post_rows(np.array([2]), CODES, actions(1, first=6))
    assert sides.driver.sent.count(1) == 2 and [integers(sides.arena)[row] for row in (0, 2)] == [5, 6]
    sides.finish([0], value=1)
    sides.driver.taken([0])
    sides.send(0)
    sides.finish([0, 2], value=2)
    observations, *_ = sides.driver.results(np.array([0, 2]))  # which are in different slots
    assert observations[0].tolist() == [[2, 2]] * 2


def test_rows_are_reported_when_they_are_done_until_they_are_taken(sides: Sides) -> None:
    sides.send(0, 2, 3)
    sides.finish([2, 0], value=5)
    assert sides.driver.done() == 2
    for _ in range(2):
        assert sides.ready() == ([0, 2], None)
    observations, rewards, terminations, truncations = sides.driver.results(np.array([0, 2]))
    assert observations[0].tolist() == [[5, 5]] * 2 and rewards.tolist() == [5, 5]
    assert not terminations.any() and not truncations.any()
    sides.driver.taken(np.array([0, 2]))
    assert sides.ready() == ([], None) and sides.driver.sent.count(1) == 1


def test_rows_that_raised_are_reported_one_by_one_and_before_others(sides: Sides) -> None:
    sides.send(0, 1, 2)
    sides.finish([0], value=1)
    sides.finish([1, 2], status=STATUS_RAISED)
    for row in (1, 2):
        assert sides.ready() == ([], row)
        sides.driver.taken(row)
    assert sides.ready() == ([0], None)


def test_row_under_way_is_not_sent_again(sides: Sides) -> None:
    sides.send(0)
    with pytest.raises(ValueError, match=r"envs \[0\] are under way"):
        sides.send(0, 1)
    sides.finish([0])
    with pytest.raises(ValueError, match="under way"):  # done, but its result was not taken
        sides.send(0)
    assert sides.arena.request.tolist() == [1, 0, 0, 0]
    sides.driver.taken([0])
    sides.send(0, 1)
    assert sides.driver.sent.count(1) == 2


def test_row_of_a_whole_batch_under_way_is_not_sent(sides: Sides) -> None:
    sides.driver.post(OP_STEP, CODES, actions(ROWS))
    with pytest.raises(ValueError, match="under way"):
        sides.send(2)
    assert sides.driver.sent.count(1) == 0


def test_actions_of_another_item_size_wait_for_those_under_way(sides: Sides) -> None:
    sides.send(0)
    smaller = [np.zeros(1, np.int32), np.zeros((1, 3), np.float32)]
    with pytest.raises(ValueError, match="another size"):
        sides.driver.post_rows(np.array([1]), bytes([INT32, FLOAT32]), smaller)
    assert sides.arena.request.tolist() == [1, 0, 0, 0]
    sides.finish([0])
    sides.driver.taken([0])
    sides.driver.post_rows(np.array([1]), bytes([INT32, FLOAT32]), smaller)
    assert sides.arena.action_codes[0].tolist() == [INT64, INT32, 0, 0]


def test_whole_batch_after_parts_goes_on_in_each_rows_own_slot(sides: Sides) -> None:
    sides.step(1)
    sides.send(1)
    sides.finish([1], value=2)
    sides.driver.taken([1])
    assert sides.step(3) == [3] * ROWS
    assert sides.driver.mixed
    other = sides.arena.observations[0][1 - (sides.arena.done & 1), np.arange(ROWS), 0]
    assert other.tolist() == [1, 2, 1, 1]
    mixed = sides.driver.observations()[0]
    assert sides.step(4) == [4] * ROWS and mixed[:, 0].tolist() == [3] * ROWS  # a copy
    sides.send(1)
    sides.finish([1], value=5)
    sides.driver.taken([1])
    assert sides.step(6) == [6] * ROWS and not sides.driver.mixed


def test_infos_are_in_the_arena_if_they_are_small_enough(sides: Sides) -> None:
    sides.send(0, 1, 2, 3)
    blob = b"sixteen bytes..."
    for row, length in enumerate((0, INFO_BYTES, INFO_BYTES + 1, 3)):
        sides.arena.infos[row] = np.frombuffer(blob, np.uint8)
        sides.arena.info_length[row] = length
    sides.arena.info_template[3] = 9  # in columns
    sides.finish(status=STATUS_INFO)
    assert sides.driver.infos(np.arange(ROWS)) == ({1: blob}, [2])
    assert sides.driver.infos(np.array([0, 3])) == ({}, [])
    sides.arena.info_length[0] = 1
    assert sides.driver.infos(np.array([0])) == ({0: b"s"}, [])


@pytest.mark.parametrize("word", WORDS)
def test_rows_are_posted_whatever_a_peer_has_written(sides: Sides, word: int) -> None:
    sides.arena.request[:] = sides.arena.done[:] = word
    for value in (1.0, 2.0):
        assert sides.step(value) == [value] * ROWS
