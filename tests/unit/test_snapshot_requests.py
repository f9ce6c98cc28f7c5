from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from envhub_server.ipc.control import (
    ForgetRequests,
    HandedOver,
    Leave,
    Mapped,
    NotRepeated,
    SnapshotTaken,
    TakeSnapshot,
)
from envhub_server.processes.worker_handle import WorkerMessage
from envhub_server.session import snapshots
from envhub_server.session.state import Phase
from recorder import (
    Answer,
    DropSnapshot,
    Effect,
    Fail,
    HandOver,
    Kill,
    RepeatRequests,
    StartProcesses,
    StartRestored,
    TakeRows,
    Tell,
    events,
)
from recorder import (
    TakeSnapshot as Take,
)
from sessions import Session, every, only, ready

from envhub.protocol.messages import Close, Done, Failure, Faults, Hosting, Recycle, SnapshotRequest, Step, Table

CALL_S = 60.0
STEP = Step(b"\x04")


def made(num_envs: int = 2, **make: Any) -> Session:
    """A session of envs with a process each."""
    options = {"snapshots": "safe", "faults": Faults(call_s=CALL_S), **make}
    return ready(num_envs, num_envs, **options)


def asks(session: Session, action: str, name: str = "a", now_s: float = 0.0, **named: Any) -> list[Effect]:
    return session.request(SnapshotRequest(action, name, **named), now_s=now_s)


def taken(session: Session, name: str = "a", rows: tuple[int, ...] = (0, 1), now_s: float = 0.0) -> list[Effect]:
    """What is done once a snapshot of these rows is taken, each by a process of its own."""
    orders = every(Take, asks(session, "take", name, now_s, rows=[*rows]))
    calls: list[Effect] = []
    for row, order in zip(rows, orders, strict=True):
        calls += session.worker_sent(row, SnapshotTaken(order.wanted.serial, [], 3, 1), now_s)
        calls += session.handle(events.SnapshotBorn(order.wanted.serial, 1000), now_s)
    return calls


def mapped(session: Session, process: int, now_s: float = 0.0) -> list[Effect]:
    return session.handle(WorkerMessage(process, Mapped()), now_s)


def failure(calls: list[Effect]) -> tuple[str, str]:
    failed: Failure = only(Fail, calls).failure
    return failed.code, failed.message


def table(calls: list[Effect]) -> list[dict[str, Any]]:
    answer = only(Answer, calls).message
    assert isinstance(answer, Table)
    return answer.rows


# --- taking -----------------------------------------------------------------------------------------------------------


def test_snapshot_is_taken_once_all_processes_have_said_so_and_run() -> None:
    session = made(2)
    calls = asks(session, "take", "a", rows=[])
    assert calls == [Take(0, TakeSnapshot("a", 1)), Take(1, TakeSnapshot("a", 2))]
    assert session.worker_sent(0, SnapshotTaken(1, [], 3, 1)) == session.handle(events.SnapshotBorn(2, 500)) == []
    assert session.handle(events.SnapshotBorn(1, 1000)) == []
    (row,) = table(session.worker_sent(1, SnapshotTaken(2, [], 4, 2, ended=True)))
    assert row == {
        "name": "a",
        "rows": [0, 1],
        "steps": [3, 4],
        "episodes": [1, 2],
        "ended": [False, True],
        "nbytes": 1500,
        "depth": 1,
        "problems": ["", ""],
    }
    assert table(asks(session, "list")) == [row]
    assert session.worker_sent(1, SnapshotTaken(2, [])) == session.handle(events.SnapshotBorn(9, 1)) == []  # are late


def test_hub_chooses_a_name_that_is_free() -> None:
    session = made(1)
    taken(session, "snapshot-2", (0,))
    taken(session, "", (0,))
    assert [row["name"] for row in table(asks(session, "list"))] == ["snapshot-2", "snapshot-3"]


@pytest.mark.parametrize(
    "make, request_, found",
    [
        ({"snapshots": ""}, {}, ("snapshot_refused", "these envs were made without snapshots=True")),
        ({}, {"name": "x" * 65}, ("refused", "the name of a snapshot has at most 64 printable characters")),
        ({}, {"name": "a\n"}, ("refused", "the name of a snapshot has at most 64 printable characters")),
        ({}, {"name": "there"}, ("refused", "there is a snapshot 'there' already: drop it first")),
        ({}, {"rows": [1, 0]}, ("refused", "the rows of a snapshot must ascend, and be less than 2")),
        ({}, {"rows": [0, 2]}, ("refused", "the rows of a snapshot must ascend, and be less than 2")),
    ],
)
def test_take_that_makes_no_sense_is_refused(
    make: dict[str, Any], request_: dict[str, Any], found: tuple[str, str]
) -> None:
    session = made(2, **make)
    if request_.get("name") == "there":
        taken(session, "there")
    assert failure(session.request(SnapshotRequest("take", **{"name": "a", **request_}))) == found


def test_operator_may_forbid_snapshots() -> None:
    session = made(1)
    session.launcher.rules = replace(session.launcher.rules, snapshots_max=0)
    assert failure(asks(session, "take")) == ("snapshot_refused", "the hub's operator says snapshots_max=0")


def test_envs_that_share_a_process_or_are_started_again_are_not_copied() -> None:
    session = ready(2, 1, snapshots="safe")
    assert failure(asks(session, "take"))[1].startswith("env 0 shares its process with envs [0, 1]")
    session = made(2, row_offset=4)
    session.exited(1)
    assert failure(asks(session, "take")) == (
        "snapshot_refused",
        "env 5 is being started again: reset or step it first",
    )


def test_a_session_lists_so_many_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LISTED_MAX", 3)
    session = made(2)
    taken(session)
    assert failure(asks(session, "take", "b")) == (
        "snapshot_limit",
        "a session keeps snapshots of 3 envs at most: drop some",
    )


def test_env_that_cannot_be_copied_is_named_and_no_part_of_the_snapshot_stays() -> None:
    session = made(2)
    asks(session, "take")
    assert session.worker_sent(0, SnapshotTaken(1, ["the pipe 7", "a thread"], 0, 0)) == []
    session.worker_sent(1, SnapshotTaken(2, []))
    calls = session.handle(events.SnapshotBorn(2, 1))
    assert failure(calls) == (
        "snapshot_refused",
        "env 0 cannot be copied, because of the pipe 7; a thread",
    )
    assert every(DropSnapshot, calls) == [DropSnapshot(1), DropSnapshot(2)]
    assert table(asks(session, "list")) == []


def test_snapshot_whose_process_or_worker_ends_meanwhile_is_lost() -> None:
    session = made(2)
    asks(session, "take")
    session.worker_sent(0, SnapshotTaken(1, []))
    session.ended(-1)
    calls = session.exited(1)
    assert failure(calls) == ("snapshot_lost", "env 0 has lost its snapshot, whose process was ended by SIGKILL")
    session = made(2)
    asks(session, "take", rows=[1])
    assert every(Fail, session.exited(0)) == []
    assert failure(session.exited(1)) == ("snapshot_lost", "env 1 was lost while its snapshot was taken")


def test_worker_that_is_recycled_while_its_snapshot_is_taken_has_taken_none() -> None:
    session = made(2, hosting=Hosting(recycle=Recycle(episodes=10)))
    asks(session, "take", rows=[1])
    session.ended(-1)
    assert failure(session.worker_sent(1, HandedOver()))[0] == "snapshot_lost"


def test_close_is_answered_once_though_a_snapshot_was_being_taken() -> None:
    session = made(2)
    asks(session, "take")
    assert not every(Fail, session.request(Close(terminate=True)))
    ends = [session.exited(row) for row in (0, 1)]
    assert not any(every(Fail, each) for each in ends) and only(Answer, ends[-1]).message == Done()


def test_take_that_is_late_is_given_up() -> None:
    session = made(2)
    asks(session, "take", now_s=1.0)
    assert session.next_deadline_s() <= 1.0 + CALL_S
    assert every(Fail, session.elapsed(CALL_S)) == []
    calls = session.elapsed(1.0 + CALL_S)
    assert failure(calls) == ("snapshot_lost", f"the snapshot was not done within call_timeout={CALL_S:g} s")
    assert every(DropSnapshot, calls) == [DropSnapshot(1), DropSnapshot(2)]
    assert session.worker_sent(0, SnapshotTaken(1, [])) == []


def test_old_snapshots_are_dropped_and_the_oldest_is_a_deadline() -> None:
    session = made(2)
    taken(session, now_s=5.0)
    assert session.snapshots.next_s() == 5.0 + snapshots.AGE_MAX_S
    assert every(DropSnapshot, session.elapsed(5.0 + snapshots.AGE_MAX_S)) == [DropSnapshot(1), DropSnapshot(2)]
    assert session.snapshots.next_s() == math.inf


# --- snapshots that are requests since an earlier one ---------------------------------------------------------------


def replayed(session: Session, name: str, serial: int, base: int) -> list[Effect]:
    """What is done about a snapshot of row 0 that is another one, and what was asked since then."""
    (order,) = every(Take, asks(session, "take", name, rows=[0]))
    assert (order.wanted.serial, order.wanted.forks) == (serial, False)
    return session.worker_sent(0, SnapshotTaken(serial, [], 5, 1, base=base, requests=b"requests"))


def limited(**make: Any) -> Session:
    """A session with a snapshot of its one env, and no more processes of snapshots."""
    session = made(1, **make)
    session.launcher.rules = replace(session.launcher.rules, snapshots_max=1)
    taken(session, "base", (0,))
    return session


def test_snapshot_beyond_the_limit_is_an_earlier_one_and_requests() -> None:
    session = limited()
    (row,) = table(replayed(session, "later", 2, 1))
    assert (row["steps"], row["nbytes"], row["depth"]) == ([5], len(b"requests"), 1)
    assert every(DropSnapshot, asks(session, "list", drop=["base"])) == []  # the later one needs it
    calls = asks(session, "restore", "later")
    process = only(StartRestored, calls).process
    assert StartRestored(process, snapshot=1) in calls and RepeatRequests(process, "later", b"requests") in calls
    mapped(session, process)
    assert table(session.worker_sent(0, HandedOver())) == []
    assert every(DropSnapshot, asks(session, "list", drop=["later"])) == [DropSnapshot(1)]


def test_snapshot_is_lost_with_the_one_that_it_needs() -> None:
    session = limited()
    replayed(session, "later", 2, 1)
    assert session.ended(-1) == [Tell(0, ForgetRequests())]
    assert failure(asks(session, "restore", "later"))[0] == "snapshot_lost"
    assert session.ended(-1) == []


def test_env_that_does_not_repeat_is_not_restored() -> None:
    session = limited()
    replayed(session, "later", 2, 1)
    process = only(StartRestored, asks(session, "restore", "later")).process
    calls = session.handle(WorkerMessage(process, NotRepeated("does not repeat")))
    assert failure(calls) == ("snapshot_lost", "env 0 does not repeat") and Kill(process) in calls
    assert mapped(session, process) == []
    assert session.handle(WorkerMessage(process, NotRepeated("does not repeat"))) == []


def test_snapshot_that_needs_one_that_is_not_kept_is_beyond_the_limit() -> None:
    session = limited()
    asks(session, "take", "later")
    code, text = failure(session.worker_sent(0, SnapshotTaken(2, [], 5, 1)))
    assert code == "snapshot_limit" and "gets no more processes (snapshots_max=1, " in text


def test_row_goes_on_from_its_newest_snapshot_after_a_crash() -> None:
    session = made(2, faults=Faults("restore", call_s=CALL_S))
    taken(session, "a")
    taken(session, "b", (0,))
    session.exited(0)
    session.exited(1)
    starts = every(StartRestored, session.elapsed(1e5))
    assert [each.snapshot for each in starts] == [3, 2]
    session.worker_sent(0, Mapped(), 1e5)
    assert session.slots[0].serving is not None
    assert session.slots[1].process is not None


def test_row_goes_on_from_an_older_snapshot_where_the_newest_does_not_repeat() -> None:
    session = limited(faults=Faults("restore", call_s=CALL_S))
    replayed(session, "later", 2, 1)
    session.exited(0)
    calls = session.elapsed(1e5)
    assert RepeatRequests(session.number(0), "later", b"requests") in calls
    assert every(Kill, session.worker_sent(0, NotRepeated("does not repeat"), 1e5))
    session.exited(0)
    assert only(StartRestored, session.elapsed(2e5)).snapshot == 1
    asks(session, "list", drop=["base", "later"])
    assert every(Kill, session.worker_sent(0, NotRepeated("does not repeat"), 2e5))
    session.exited(0)
    assert every(StartProcesses, session.elapsed(3e5))


# --- restoring --------------------------------------------------------------------------------------------------------


def restoring(session: Session, action: str = "restore", now_s: float = 0.0, **named: Any) -> list[int]:
    """The processes that are started to restore rows."""
    return [start.process for start in every(StartRestored, asks(session, action, now_s=now_s, **named))]


def test_rows_change_hands_once_all_copies_are_ready() -> None:
    session = made(2)
    taken(session)
    first, second = restoring(session)
    assert mapped(session, second) == []
    assert mapped(session, first) == [Tell(row, Leave(restored=True)) for row in (0, 1)]
    calls = session.worker_sent(1, HandedOver())
    assert only(HandOver, calls).process == second and every(Answer, calls) == []
    assert table(session.worker_sent(0, HandedOver())) == []
    assert [slot.process and slot.process.number for slot in session.slots] == [first, second]
    session.closed(0)
    assert session.snapshots.next_s() == snapshots.AGE_MAX_S
    taken(session, "deeper")
    assert table(asks(session, "list"))[1]["depth"] == 2
    asks(session, "list", drop=["a"])
    assert table(asks(session, "list"))[0]["depth"] == 1


def test_one_row_is_branched_into_others() -> None:
    session = made(3)
    taken(session, rows=(2,))
    starts = every(StartRestored, asks(session, "restore", rows=[0, 1], sources=[2, 2]))
    assert [start.snapshot for start in starts] == [1, 1]


@pytest.mark.parametrize(
    "request_, found",
    [
        ({"name": "none"}, ("snapshot_lost", "this session has no snapshot 'none': it was dropped")),
        ({"rows": [1, 0]}, ("refused", "the rows to restore must ascend")),
        ({"rows": [0, 2]}, ("refused", "the rows to restore must ascend")),
        ({"rows": [0], "sources": [0, 1]}, ("refused", "the rows to restore must ascend")),
        ({"rows": [0], "sources": [1]}, ("snapshot_refused", "env 1 is none of the envs [0] of snapshot 'a'")),
    ],
)
def test_restore_that_makes_no_sense_is_refused(request_: dict[str, Any], found: tuple[str, str]) -> None:
    session = made(2)
    taken(session, rows=(0,))
    code, text = failure(session.request(SnapshotRequest("restore", **{"name": "a", **request_})))
    assert code == found[0] and text.startswith(found[1])


@pytest.mark.parametrize("action", ["restore", "prepare"])
def test_restore_whose_process_ends_before_all_are_ready_changes_nothing(action: str) -> None:
    session = made(2)
    taken(session)
    first, second = restoring(session, action)
    mapped(session, first)
    calls = session.ended(second)
    assert failure(calls) == ("snapshot_lost", "env 1 cannot be restored: its process was ended by SIGKILL")
    assert every(Kill, calls) == [Kill(first)]
    assert session.ended(first) == []
    assert [slot.process and slot.process.number for slot in session.slots] == [0, 1]


def test_restore_from_a_process_that_has_ended_is_lost() -> None:
    session = made(2)
    taken(session)
    session.ended(-2)
    assert table(asks(session, "list"))[0]["problems"] == [
        "",
        "has lost its snapshot, whose process was ended by SIGKILL",
    ]
    assert failure(asks(session, "restore")) == (
        "snapshot_lost",
        "env 1 has lost its snapshot, whose process was ended by SIGKILL",
    )


def test_restore_that_is_late_is_given_up() -> None:
    session = made(2)
    taken(session)
    first, second = restoring(session, now_s=1.0)
    mapped(session, first, 1.0)
    calls = session.elapsed(1.0 + CALL_S)
    assert failure(calls) == ("snapshot_lost", f"the restore was not done within call_timeout={CALL_S:g} s")
    assert every(Kill, calls) == [Kill(first), Kill(second)]
    assert mapped(session, second, 70.0) == []  # it was sent before the kill
    (third, _) = restoring(session, now_s=80.0)
    assert session.ended(second, now_s=80.0) == [] and mapped(session, third, 80.0) == []


def test_process_that_does_not_leave_in_time_is_killed_and_the_row_is_restored() -> None:
    session = made(2)
    taken(session)
    for process in restoring(session):
        mapped(session, process)
    session.worker_sent(0, HandedOver())
    assert Kill(1) in session.elapsed(CALL_S)
    assert session.snapshots.next_s() == snapshots.AGE_MAX_S
    assert table(session.exited(1, now_s=CALL_S)) == []
    assert session.slots[1].serving is not None


def test_rows_whose_process_has_ended_or_is_started_again_are_restored_at_once() -> None:
    session = made(2)
    taken(session)
    session.exited(0)
    session.exited(1)
    session.elapsed(1e5)  # both are started again
    again = session.number(0)
    first, second = restoring(session, now_s=1e5)
    mapped(session, first, 1e5)
    calls = mapped(session, second, 1e5)
    assert Kill(again) in calls and table(calls) == []
    assert session.slots[0].loss is None


def test_successor_that_ends_before_it_has_its_row_leaves_it_to_the_next_process() -> None:
    session = made(2)
    taken(session)
    first, second = restoring(session)
    mapped(session, first)
    mapped(session, second)
    session.worker_sent(1, HandedOver())
    assert table(session.ended(first)) == []
    session.worker_sent(0, HandedOver())
    assert session.slots[0].process is not None and session.slots[0].process.number not in (0, first)


def test_end_of_a_successor_ends_no_other_restore() -> None:
    session = made(2)
    taken(session)
    first, second = restoring(session)
    mapped(session, first)
    mapped(session, second)
    assert session.ended(first) == []
    assert table(session.worker_sent(1, HandedOver())) == []
    (lost,) = every(TakeRows, session.worker_sent(0, HandedOver()))
    assert (lost.slot, lost.left) == (0, False)  # the hub says what its next step is


def test_restored_process_that_ends_soon_again_and_again_is_started_again() -> None:
    session = made(1)
    taken(session, rows=(0,))
    for _ in range(4):  # more than processes that never serve may
        (number,) = restoring(session)
        mapped(session, number)
        if session.slots[0].successor is not None:
            session.worker_sent(0, HandedOver())
        session.exited(0)
        assert session.phase is Phase.READY


# --- a restore by halves ----------------------------------------------------------------------------------------------


def prepared(now_s: float = 0.0) -> tuple[Session, list[int]]:
    session = made(2)
    taken(session, now_s=now_s)
    processes = restoring(session, "prepare", now_s)
    assert mapped(session, processes[0], now_s) == []
    assert mapped(session, processes[1], now_s) == [Answer(Table([]))]
    return session, processes


def test_what_is_prepared_changes_hands_with_commit() -> None:
    session, processes = prepared()
    assert asks(session, "commit", drop=["a"]) == [
        DropSnapshot(1),
        DropSnapshot(2),
        *(Tell(row, ForgetRequests()) for row in (0, 1)),
        *(Tell(row, Leave(restored=True)) for row in (0, 1)),
    ]
    session.worker_sent(0, HandedOver())
    calls = session.worker_sent(1, HandedOver())
    assert table(calls) == []
    assert every(Tell, calls)[-2:] == [Tell(number, ForgetRequests()) for number in processes]
    assert [slot.process and slot.process.number for slot in session.slots] == processes


@pytest.mark.parametrize(
    "request_",
    [
        SnapshotRequest(),
        SnapshotRequest("take", "b"),
        SnapshotRequest("prepare", "a"),
        STEP,
    ],
)
def test_any_other_request_ends_what_is_prepared(request_: Any) -> None:
    session, processes = prepared()
    calls = session.request(request_)
    assert every(Kill, calls) == [Kill(number) for number in processes] and every(Fail, calls) == []
    assert all(session.ended(number) == [] for number in processes)
    if isinstance(request_, Step):
        assert session.rows_done() == [Answer(Done(), arrays=True)]
    if request_ in (SnapshotRequest(), STEP):
        text = "no restore from snapshot 'a' is prepared: its processes have ended"
        assert failure(asks(session, "commit")) == ("snapshot_lost", text)


def test_what_is_prepared_has_its_own_deadline_and_ends_without_an_answer() -> None:
    session, processes = prepared(5.0)
    assert every(Kill, session.elapsed(4.0 + CALL_S)) == []
    calls = session.elapsed(5.0 + CALL_S)
    assert every(Kill, calls) == [Kill(number) for number in processes] and every(Fail, calls) == []
    assert failure(asks(session, "commit", now_s=70.0))[0] == "snapshot_lost"


def test_prepared_process_that_ends_ends_the_others() -> None:
    session, (first, second) = prepared()
    calls = session.ended(first)
    assert every(Kill, calls) == [Kill(second)] and every(Fail, calls) == []
    assert failure(asks(session, "commit"))[0] == "snapshot_lost"


def test_commit_before_all_are_ready_or_of_another_snapshot_is_refused() -> None:
    session, _ = prepared()
    assert failure(asks(session, "commit", "b"))[0] == "snapshot_lost"
    session.handle(events.Draining(10.0, 20.0, True))
    assert session.phase is Phase.CLOSING


def test_close_ends_what_is_prepared() -> None:
    session, processes = prepared()
    calls = session.request(Close(terminate=True))
    assert {each.process for each in every(Kill, calls)} == {0, 1, *processes}
    for number in (0, 1, *processes):
        session.ended(number)
    assert session.phase is Phase.ENDED
