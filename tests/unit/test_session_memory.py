"""A worker's rows and progress as the arena's words say, and the budget of shared memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from envhub_server.ipc.control import BYTES_MAX, ENTRY_BYTES, SetAttributes, SetAttrRows
from envhub_server.memory.session_memory import ArenaBudget, SessionMemory, UnreadMemory, UnreadObservations
from envhub_server.session.slots import Progress

from envhub.arena.layout import Layout
from envhub.arena.memory import FIRST_CALL, OP_RESET, OP_STEP
from envhub.protocol.messages import pack_rows
from envhub.transport.sockets import ZERO_COPY_BYTES
from envhub.values.leaf import Leaf

ROWS, WORKERS = 4, 2


@pytest.fixture
def memory() -> Iterator[SessionMemory]:
    made = SessionMemory(Layout(ROWS, (Leaf("<f4", (2,)),), (Leaf("<i8", ()),), 64), WORKERS, ArenaBudget(1 << 30))
    yield made
    made.close()


def test_progress_names_the_row_that_the_worker_executes(memory: SessionMemory) -> None:
    arena = memory.arena
    assert memory.progress(1) == Progress(0, 1, "")
    memory.driver.post(OP_STEP)
    arena.progress[1] = 3 | 1 << 21
    assert memory.progress(1) == Progress(3 | 1 << 21, 3, "step")
    arena.progress[1] = 3 | FIRST_CALL
    assert memory.progress(1).kind == "init"
    arena.done[3] = arena.request[3]
    arena.progress[1] = 3 | 1 << 21
    assert memory.progress(1) == Progress(3 | 1 << 21, 1, "step")  # it has not begun with the other
    arena.progress[1] = 0  # no row of its own
    assert memory.progress(1).row == 1
    arena.done[:] = arena.request
    memory.driver.post(OP_RESET)
    assert memory.progress(0).kind == "reset"


def test_rows_of_a_worker_have_equal_distances(memory: SessionMemory) -> None:
    assert [memory.rows(worker).tolist() for worker in range(WORKERS)] == [[0, 2], [1, 3]]
    assert np.array_equal(memory.words(1).rows, [1, 3])


def test_budget_of_all_sessions() -> None:
    whole = ArenaBudget(100)
    part = ArenaBudget(80, whole)
    part.use(60)
    assert (part.left, whole.left) == (20, 40)
    whole.use(30)
    assert part.left == 10
    part.use(-60)
    assert (part.left, whole.left) == (70, 70)


def test_memory_counts_in_its_budget_until_it_is_unmapped() -> None:
    layout = Layout(ROWS, (Leaf("<f4", (2,)),), (Leaf("<i8", ()),), 64)
    budget, unread = ArenaBudget(2 * layout.nbytes()), UnreadMemory(64)
    first, second = (SessionMemory(layout, WORKERS, budget) for _ in range(2))
    assert budget.left == 0
    with pytest.raises(OSError, match="of arena_bytes_max 0 are left"):
        SessionMemory(layout, WORKERS, budget)
    view, ref = second.arena.rewards, second.arena.memory_ref()
    second.close()
    del second
    unread.add(ref, layout.nbytes(), budget, set(), 100.0)
    assert budget.left == 0
    del view
    gc.collect()
    unread.release()
    assert budget.left == layout.nbytes()
    first.close()


def test_client_is_sent_no_more_observations_than_it_reads() -> None:
    unread, arrays = UnreadObservations(100), [np.zeros(60, np.uint8)]
    assert not unread.refusal("alice", 101)  # of however large observations one may always wait
    unread.add("alice", arrays)
    assert "next to 60 that were not read" in unread.refusal("alice", 60)
    assert not unread.refusal("alice", 40) and not unread.refusal("bob", 60)
    arrays.clear()
    assert not unread.refusal("alice", 60)


def test_results_of_calls_count_until_they_are_gone() -> None:
    budget, unread = ArenaBudget(100), UnreadMemory(64)
    results, why = unread.results([(0, bytes(52))], False, budget)
    assert not why and bytes(results[0]) == pack_rows([(0, bytes(52))]) and budget.left == 40
    assert unread.results([(0, bytes(52))], False, budget) == (
        [],
        "the results of a call have 52 bytes; of arena_bytes_max 40 are left",
    )
    results.clear()
    assert not unread.results([(0, bytes(52))], False, budget)[1]
    unread.release()
    assert budget.left == 100


def test_results_of_many_bytes_are_not_joined() -> None:
    large, small = [(row, bytes([row]) * ZERO_COPY_BYTES) for row in range(3)], [(row, b"0") for row in range(3)]
    budget, unread = ArenaBudget(1 << 20), UnreadMemory(2 * ZERO_COPY_BYTES)
    frames, why = unread.results(large, True, budget)
    assert not why and [bytes(frame) for frame in frames] == [blob for _, blob in large]
    assert [bytes(frame) for frame in unread.results(small, True, budget)[0]] == [pack_rows(small)]
    assert [bytes(frame) for frame in unread.results(large[:1], True, budget)[0]] == [pack_rows(large[:1])]
    frames, why = unread.results(large, False, budget)
    assert not frames and "one frame has at most 131072: call fewer envs at a time" in why


def test_place_of_a_large_info_grows_within_the_budget(memory: SessionMemory) -> None:
    arena, budget = memory.arena, ArenaBudget(100_000)
    assert arena.put_info(1, bytes(5_000)) is None
    memory.grow(1, 5_000, budget)
    assert 5_000 <= arena.rooms[1] <= 8_192 and budget.left == 100_000 - arena.rooms[1]
    assert arena.rooms.tolist() == [0, arena.rooms[1], 0, 0] and memory.nbytes == arena.layout.nbytes() + arena.rooms[1]
    blob = bytes(range(250)) * 20
    arena.info_template[1], arena.info_length[1] = arena.put_info(1, blob), len(blob)
    assert bytes(arena.info(1) or b"") == blob and arena.put_info(0, blob) is None
    memory.grow(1, 200_000, budget)
    assert arena.rooms[1] <= 8_192 and arena.put_info(1, bytes(9_000)) is None
    arena.info_length[1] = 9_000  # which only a client may have written
    arena.info_template[2], arena.info_length[2] = 7, 9_000
    assert arena.info(1) is None and arena.sent_by_channel() == [1, 2]
    assert arena.info(2) is None and arena.columns(np.arange(4)) == [] and arena.infos_of(slice(1, 3), 9_000) is None
    arena.give_room(2, 9_000)
    assert arena.columns(np.arange(4))[0].data.shape == (1, 9_000) and len(arena.info(2) or b"") == 9_000
    memory.grow(3, arena.layout.info_bytes, budget)
    assert arena.rooms[3] == 0


def test_last_values_are_set_again_in_the_order_in_which_they_were_set() -> None:
    kept = SetAttributes()
    for message in (
        SetAttrRows([0, 1], "mass", [b"one"] * 2),
        SetAttrRows([1, 2], "wind", [b"1", b"2"]),
        SetAttrRows([0], "mass", [b"two"]),
    ):
        assert kept.add(message)
    assert kept.again([0, 1]) == [SetAttrRows([1], "wind", [b"1"]), SetAttrRows([0, 1], "mass", [b"two", b"one"])]
    assert not kept.again([3])


def test_value_without_room_takes_the_place_of_the_one_before() -> None:
    kept = SetAttributes()
    largest = bytes(BYTES_MAX - 2 * ENTRY_BYTES - 4)
    assert kept.add(SetAttrRows([0], "map", [largest])) and kept.add(SetAttrRows([0], "mass", [b"four"]))
    assert not kept.add(SetAttrRows([0], "mass", [b"fives"]))
    assert [message.name for message in kept.again([0])] == ["map"]
    assert kept.add(SetAttrRows([0], "map", [b"small"])) and kept.add(SetAttrRows([0], "mass", [b"fives"]))
