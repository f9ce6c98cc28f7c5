"""Results in place of envs whose worker has ended, in a real arena and without a process."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from envhub_server.ipc.control import RowInfo
from envhub_server.memory.lost_rows import LostWorkerRows, ObjectCopies
from envhub_server.memory.session_memory import ArenaBudget, SessionMemory
from envhub_server.session.machine import SessionMachine
from envhub_server.session.slots import WorkerLoss
from envhub_server.session.state import Event

from envhub.arena.layout import Layout
from envhub.arena.memory import (
    FRESH,
    ONGOING,
    OP_CALL,
    OP_RESET,
    OP_STEP,
    REPORT_PENDING,
    STATUS_INFO,
    STATUS_OK,
    STATUS_RAISED,
    Arena,
)
from envhub.protocol import messages
from envhub.protocol.messages import Failure
from envhub.values import codec
from envhub.values.leaf import Leaf

ROWS, WORKERS, BUDGET = 4, 2, ArenaBudget(1 << 30)
FAILURE = Failure("worker_died", "request", "worker 0 was ended", env_index=0, worker=0)
TRUNCATED = WorkerLoss(FAILURE, raises=False, info=b"what happened")
RAISED = WorkerLoss(FAILURE, raises=True, info=b"what happened")
WAITING = (SessionMachine.on_rows_waiting, (0,))


def failures(reports: list[Event]) -> list[Failure]:
    """Those with which rows were completed."""
    return [facts[0] for method, facts in reports if method is SessionMachine.on_lost_row_failed]


def memory_of(info_bytes: int = 64) -> SessionMemory:
    return SessionMemory(
        Layout(ROWS, (Leaf("<f4", (2,)),), (Leaf("<i8", ()),), info_bytes), WORKERS, ArenaBudget(1 << 30)
    )


@pytest.fixture
def memory() -> Iterator[SessionMemory]:
    made = memory_of()
    yield made
    made.close()


def step(memory: SessionMemory, op: int = OP_STEP, rows: Collection[int] = range(ROWS)) -> None:
    """Post a step, or a reset of these rows."""
    memory.put_message(messages.pack(messages.Reset(mask=[row in rows for row in range(ROWS)])), BUDGET)
    memory.driver.post(op)


def finish(memory: SessionMemory, *rows: int, seen: float = 1.0) -> None:
    """These rows' worker completes what was posted."""
    arena = memory.arena
    for row in rows:
        arena.observations[0][arena.request[row] & 1, row] = seen
        arena.rewards[row], arena.status[row] = 1.0, STATUS_OK
        arena.done[row] = arena.request[row]


def brief(memory: SessionMemory, row: int) -> float:
    return float(memory.arena.observations[0][memory.arena.request[row] & 1, row, 0])


def test_step_of_a_worker_that_ended_is_a_truncation_with_the_last_observation(memory: SessionMemory) -> None:
    lost_rows, arena = LostWorkerRows(memory, None), memory.arena
    step(memory)
    finish(memory, 0, 1, 2, 3, seen=7.0)
    step(memory)
    finish(memory, 1, 3, seen=8.0)
    assert lost_rows.take(0, TRUNCATED) == [] and lost_rows.unrung
    assert arena.quiescent() and arena.truncations.tolist() == [True, False, True, False]
    assert [brief(memory, row) for row in range(ROWS)] == [7.0, 8.0, 7.0, 8.0]
    assert arena.rewards.tolist() == [0.0, 1.0, 0.0, 1.0] and not arena.terminations.any()
    assert arena.needs_reset.tolist() == [FRESH, ONGOING, FRESH, ONGOING]
    assert bytes(arena.infos[2, : arena.info_length[2]]) == TRUNCATED.info and arena.status[2] == STATUS_INFO


class Watched(np.ndarray):
    """Words that note at which moment each of them is set."""

    moments: ClassVar[list[dict[str, Any]]]
    arena: ClassVar[Arena]

    def __setitem__(self, key: Any, value: Any) -> None:
        arena = self.arena
        for row in np.arange(arena.layout.rows)[key].reshape(-1).tolist():
            said = bytes(arena.infos[row, : arena.info_length[row]])
            shown = float(arena.observations[0][arena.request[row] & 1, row, 0])
            self.moments.append({"row": row, "truncated": bool(arena.truncations[row]), "said": said, "shown": shown})
        super().__setitem__(key, value)


@pytest.mark.parametrize("rows", [1, 4, 5, 8])
def test_every_row_of_a_worker_is_truncated_and_is_done_only_then(rows: int) -> None:
    made = SessionMemory(Layout(rows, (Leaf("<f4", (2,)),), (Leaf("<i8", ()),), 64), 1, ArenaBudget(1 << 30))
    arena, lost_rows = made.arena, LostWorkerRows(made, None)
    step(made)
    finish(made, *range(rows), seen=7.0)
    step(made)
    Watched.moments, Watched.arena = [], arena
    arena.done = arena.done.view(Watched)
    lost_rows.take(0, TRUNCATED)
    wanted = {"truncated": True, "said": TRUNCATED.info, "shown": 7.0}
    assert Watched.moments == [{**wanted, "row": row} for row in range(rows)]
    assert arena.quiescent() and arena.truncations.all() and arena.rewards.tolist() == [0.0] * rows
    made.close()


def test_reset_that_is_done_once_more_leaves_the_observation_before_it_as_the_last(memory: SessionMemory) -> None:
    lost_rows, arena = LostWorkerRows(memory, None), memory.arena
    step(memory)
    finish(memory, 0, 1, 2, 3, seen=7.0)
    step(memory, OP_RESET)
    finish(memory, 0, 1, 3, seen=8.0)
    assert lost_rows.take(0, TRUNCATED) == []
    assert (arena.request - arena.done).tolist() == [1, 0, 1, 0]
    arena.observations[0][arena.request[0] & 1, 0, 0] = 99.0  # by the next worker, before it ended, too
    assert [float(row[0]) for row in arena.last_observations()[2][0]] == [7.0, 8.0, 7.0, 8.0]
    finish(memory, 0, 2, seen=9.0)
    assert arena.quiescent() and [brief(memory, row) for row in range(ROWS)] == [9.0, 8.0, 9.0, 8.0]


def test_half_written_results_of_a_worker_that_ended_are_never_read(memory: SessionMemory) -> None:
    lost_rows, arena = LostWorkerRows(memory, None), memory.arena
    step(memory)
    finish(memory, 0, 1, 2, 3, seen=7.0)
    step(memory)
    arena.observations[0][arena.request[0] & 1, 0, 0] = 99.0  # and then it ended
    arena.rewards[0], arena.terminations[0] = 5.0, True
    lost_rows.take(0, TRUNCATED)
    assert brief(memory, 0) == 7.0 and arena.rewards[0] == 0.0 and not arena.terminations[0]


def test_driver_is_to_be_woken_though_every_row_was_done(memory: SessionMemory) -> None:
    lost_rows = LostWorkerRows(memory, None)
    step(memory)
    finish(memory, *range(ROWS))
    lost_rows.take(0, TRUNCATED)
    assert lost_rows.unrung  # the worker may have ended before it rang


def test_loss_is_reported_by_the_next_step_and_later_steps_wait(memory: SessionMemory) -> None:
    lost_rows, arena = LostWorkerRows(memory, None), memory.arena
    lost_rows.take(0, TRUNCATED)
    assert arena.needs_reset[[0, 2]].tolist() == [REPORT_PENDING, REPORT_PENDING]
    step(memory)
    finish(memory, 1, 3)
    assert lost_rows.posted(0) == [] and arena.quiescent() and arena.truncations[0]
    step(memory)
    finish(memory, 1, 3)
    lost_rows.unrung = False
    assert lost_rows.posted(0) == [WAITING] and not arena.quiescent() and not lost_rows.unrung
    assert lost_rows.finish(0, TRUNCATED) == [] and arena.quiescent() and lost_rows.unrung


def test_worker_that_serves_again_is_left_alone(memory: SessionMemory) -> None:
    lost_rows = LostWorkerRows(memory, None)
    lost_rows.take(0, TRUNCATED)
    lost_rows.losses.pop(0)
    step(memory)
    assert lost_rows.posted(0) == [] and memory.arena.done[0] != memory.arena.request[0]


def test_process_that_ends_before_it_serves_changes_only_the_reported_loss(memory: SessionMemory) -> None:
    lost_rows = LostWorkerRows(memory, None)
    lost_rows.take(0, TRUNCATED)
    step(memory, OP_RESET)
    assert lost_rows.take(0, RAISED) == [] and lost_rows.losses == {0: RAISED}
    assert memory.arena.done[0] != memory.arena.request[0]


def test_reset_waits_for_the_next_process_and_rows_that_it_leaves_out_are_kept(memory: SessionMemory) -> None:
    lost_rows, arena = LostWorkerRows(memory, None), memory.arena
    step(memory)
    finish(memory, *range(ROWS), seen=7.0)
    step(memory, OP_RESET, rows=[0])
    finish(memory, 2, seen=7.0)
    lost_rows.take(0, TRUNCATED)
    assert (arena.done != arena.request)[[0, 2]].tolist() == [True, True]
    lost_rows.take(1, TRUNCATED)
    assert (arena.done == arena.request)[[1, 3]].all() and brief(memory, 1) == 7.0 and not arena.truncations[1]
    finish(memory, 0, 2, seen=7.0)
    step(memory, OP_RESET, rows=[1])  # by a client, after the ends
    assert lost_rows.posted(0) == [] and (arena.done == arena.request)[[0, 2]].all() and not arena.quiescent()
    assert lost_rows.posted(1) == [] and not (arena.done == arena.request)[[1, 3]].any()


@pytest.mark.parametrize("begun", [False, True])
def test_call_that_has_begun_fails_and_another_waits_for_the_next_process(memory: SessionMemory, begun: bool) -> None:
    lost_rows, arena = LostWorkerRows(memory, None), memory.arena
    step(memory)
    finish(memory, *range(ROWS), seen=7.0)
    assert memory.driver.post_call(OP_CALL, [0, 1]) == [0, 1]
    arena.begun[0] = arena.request[0] if begun else 0
    failed = failures(lost_rows.take(0, TRUNCATED))
    told = replace(FAILURE, message="worker 0 was ended during a call", env_index=0)
    assert failed == ([told] if begun else []) and (arena.done == arena.request).tolist() == [begun, False, True, True]
    assert arena.needs_reset[[0, 2]].tolist() == [REPORT_PENDING] * 2 and brief(memory, 0) == 7.0
    assert lost_rows.posted(0) == lost_rows.finish(0, TRUNCATED) == []


def test_objects_of_the_last_observation_outlive_a_call(memory: SessionMemory) -> None:
    lost_rows, arena = LostWorkerRows(memory, ObjectCopies()), memory.arena
    step(memory)
    for row in range(ROWS):
        leave(arena, row, codec.encode_pair(b"shown", b""))
    lost_rows.keep_objects()
    memory.driver.post_call(OP_CALL, [])
    for row in range(ROWS):
        leave(arena, row, codec.encode_pair(b"a", b"result"))
    assert lost_rows.objects(0) == [b"shown"] * 2


def test_objects_are_those_of_the_last_complete_observation() -> None:
    memory = memory_of(info_bytes=16)
    lost_rows, arena = LostWorkerRows(memory, ObjectCopies()), memory.arena
    step(memory)
    blob = codec.encode_pair(b"a text that was shown", b"")
    for row in (0, 2):
        lost_rows.on_row_info(RowInfo(row, blob, int(arena.request[row])))
        arena.info_length[row] = len(blob)
    finish(memory, *range(ROWS))
    lost_rows.keep_objects()
    assert lost_rows.objects(0) == [b"a text that was shown"] * 2
    step(memory)
    reports = lost_rows.take(0, TRUNCATED)
    assert [(method, facts[0]) for method, facts in reports] == [
        (SessionMachine.on_lost_row_info, row) for row in (0, 2)
    ]
    assert reports[0][1] == (0, codec.encode_pair(b"a text that was shown", TRUNCATED.info))
    assert arena.info_length[0] == len(codec.encode_pair(b"a text that was shown", TRUNCATED.info)) > 16
    assert lost_rows.objects(0) == [b"a text that was shown"] * 2  # also after that
    memory.close()


def test_steps_of_a_worker_that_has_left_wait_but_those_of_rows_that_were_cut(memory: SessionMemory) -> None:
    lost_rows, arena = LostWorkerRows(memory, ObjectCopies()), memory.arena
    step(memory)
    for row in (0, 2):
        leave(arena, row, codec.encode_pair(b"shown", b""))
    arena.needs_reset[[0, 2]] = FRESH, REPORT_PENDING
    step(memory)  # by a client, before the worker has left
    reports = lost_rows.take(0, TRUNCATED, has_left=True)
    assert reports[-1] == WAITING and arena.truncations[[0, 2]].tolist() == [False, True]
    assert arena.done[[0, 2]].tolist() == [arena.request[0] - 1, arena.request[2]]
    assert arena.needs_reset[[0, 2]].tolist() == [FRESH, FRESH] and lost_rows.unrung
    assert lost_rows.objects(0) == [b"shown"] * 2


# --- copies of objects ------------------------------------------------------------------------------------------------


def leave(arena: Arena, row: int, blob: bytes) -> None:
    """Complete the row as its worker does."""
    arena.put_info(row, blob)
    arena.info_length[row] = len(blob)
    arena.done[row] = arena.request[row]


def test_objects_of_rows_that_are_done_are_copied(memory: SessionMemory) -> None:
    copies, arena = ObjectCopies(), memory.arena
    arena.post(OP_STEP)
    leave(arena, 0, codec.encode_pair(b"zero", b"its info"))
    leave(arena, 1, codec.encode_pair(b"", b"its info"))
    copies.keep(arena, range(ROWS))
    assert [copies.last(arena, row) for row in range(ROWS)] == [b"zero", b"", b"", b""]
    arena.put_info(0, b"half of the next")  # of a worker that ends while it writes
    assert copies.last(arena, 0) == b"zero"


def test_objects_of_an_earlier_step_are_not_taken_for_the_last(memory: SessionMemory) -> None:
    copies, arena = ObjectCopies(), memory.arena
    arena.post(OP_STEP)
    leave(arena, 0, codec.encode_pair(b"first", b""))
    copies.keep(arena, [0])
    arena.post(OP_STEP)
    assert copies.last(arena, 0) == b"first"  # the second is not done
    leave(arena, 0, codec.encode_pair(b"second", b""))
    assert copies.last(arena, 0) == b""
    copies.keep(arena, [0])
    assert copies.last(arena, 0) == b"second"


def test_large_objects_are_those_that_were_sent_for_the_step(memory: SessionMemory) -> None:
    copies, arena, large = ObjectCopies(), memory.arena, codec.encode_pair(b"large" * 64, b"")
    arena.post(OP_STEP)
    copies.keep_large(0, int(arena.request[0]), large)
    leave(arena, 0, large)
    copies.keep(arena, [0])
    assert copies.last(arena, 0) == b"large" * 64
    arena.post(OP_STEP)
    copies.keep_large(0, int(arena.request[0]), codec.encode_pair(b"of the next", b""))
    copies.keep(arena, [0])
    assert copies.last(arena, 0) == b"large" * 64


@pytest.mark.parametrize("blob", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x92\x01\x02", b"\xa1x"])
def test_bytes_that_a_client_wrote_into_the_arena_break_nothing(memory: SessionMemory, blob: bytes) -> None:
    copies, arena = ObjectCopies(), memory.arena
    arena.post(OP_STEP)
    leave(arena, 0, blob)
    arena.info_length[1] = -5
    arena.done[1] = arena.request[1]
    copies.keep(arena, range(ROWS))
    assert [copies.last(arena, row) for row in range(ROWS)] == [b""] * ROWS


def test_blob_that_just_fits_is_read_from_the_arena_and_none_is_none() -> None:
    with_room = memory_of(info_bytes=len(blob := codec.encode_pair(b"just fits", b"")))
    copies, arena = ObjectCopies(), with_room.arena
    arena.post(OP_STEP)
    leave(arena, 0, blob)
    arena.done[1] = arena.request[1]  # of a row without a blob
    copies.keep(arena, range(ROWS))
    assert copies.last(arena, 0) == b"just fits" and copies.last(arena, 1) == b""
    with_room.close()


# --- what is left to others -------------------------------------------------------------------------------------------


def test_objects_of_rows_that_were_done_are_kept_when_their_worker_ends(memory: SessionMemory) -> None:
    lost_rows, arena = LostWorkerRows(memory, ObjectCopies()), memory.arena
    step(memory)
    leave(arena, 0, codec.encode_pair(b"done", b""))
    lost_rows.take(0, TRUNCATED)
    step(memory)
    assert lost_rows.posted(0) == [WAITING]  # row 2 has told of the loss
    assert bytes(arena.infos[0, : arena.info_length[0]]) == codec.encode_pair(b"done", TRUNCATED.info)


def test_reset_that_waits_for_the_next_process_is_not_finished_with_the_steps(memory: SessionMemory) -> None:
    lost_rows, arena = LostWorkerRows(memory, None), memory.arena
    step(memory)
    finish(memory, *range(ROWS))
    lost_rows.take(0, TRUNCATED)
    step(memory, OP_RESET)
    assert lost_rows.finish(0, TRUNCATED) == [] and not (arena.done == arena.request)[[0, 2]].any()


def test_each_row_that_raises_is_named_shows_its_last_observation_and_is_reset_next(memory: SessionMemory) -> None:
    lost_rows, arena = LostWorkerRows(memory, None), memory.arena
    step(memory)
    finish(memory, *range(ROWS), seen=7.0)
    step(memory)
    reports = lost_rows.take(0, RAISED)
    assert [failure.env_index for failure in failures(reports)] == [0, 2]
    assert arena.status[[0, 2]].tolist() == [STATUS_RAISED] * 2
    assert [brief(memory, row) for row in (0, 2)] == [7.0, 7.0]
    lost_rows.take(1, TRUNCATED)
    step(memory)
    lost_rows.finish(0, RAISED)
    assert arena.needs_reset[[0, 2]].tolist() == [FRESH, FRESH]


def test_rows_of_a_vector_env_report_their_loss_together_and_others_do_not(memory: SessionMemory) -> None:
    for is_batch in (False, True):
        lost_rows, arena = LostWorkerRows(memory, None, is_batch), memory.arena
        lost_rows.take(0, TRUNCATED)
        arena.needs_reset[0], arena.needs_reset[2] = FRESH, REPORT_PENDING
        step(memory)
        assert lost_rows.posted(0) == ([] if is_batch else [WAITING])
        lost_rows.finish(0, TRUNCATED)
        lost_rows.losses.pop(0)
        finish(memory, *range(ROWS))


def test_loss_that_is_raised_by_a_later_step_has_the_env_reset_next(memory: SessionMemory) -> None:
    lost_rows, arena = LostWorkerRows(memory, None), memory.arena
    assert not lost_rows.unrung
    step(memory)
    finish(memory, *range(ROWS))
    lost_rows.take(0, RAISED)
    assert arena.needs_reset[[0, 2]].tolist() == [REPORT_PENDING] * 2
    step(memory)
    reports = lost_rows.posted(0)
    assert [failure.env_index for failure in failures(reports)] == [0, 2]
    assert arena.needs_reset[[0, 2]].tolist() == [FRESH, FRESH]
