"""Spares: workers that are made ahead, and take the place of those that end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from envhub_server.ipc.control import Build, Building, CloseEnvs, Mapped, RowFailed, TakePlace
from envhub_server.session import stimuli
from envhub_server.session.instructions import (
    End,
    GiveArena,
    HandOver,
    Instruction,
    Kill,
    ReportLate,
    StartProcesses,
    SwapProcesses,
    TakeRows,
    Tell,
)
from envhub_server.session.state import MEMORY_S, SPARE_RETRY_S, STACKS_S, Phase, Stage
from sessions import KILLED, RAISED, Session, built, ready

from envhub.protocol.messages import Call, Close, Faults, Hosting

SPARES = {"hosting": Hosting(spares=1)}
MIB = 1 << 20


def spared(num_envs: int = 3, workers: int = 2, **make: Any) -> Session:
    """A session with its spares, which have made their envs."""
    session = ready(num_envs, workers, **{**SPARES, **make})
    for number in session.spares:
        assert session.said(number, built()) == []
    return session


def places(instructions: list[Instruction]) -> list[tuple[int, list[int]]]:
    """The workers that spares are made as, with their rows."""
    told = (each.message for each in instructions if isinstance(each, Tell))
    return [(message.worker, message.rows) for message in told if isinstance(message, Build)]


def test_spares_are_made_once_the_session_is_ready() -> None:
    session = ready(**SPARES)
    assert list(session.spares) == [2] and session.spares[2].rows == [0, 2]
    assert session.said(2, Building(1)) == [] and session.spares[2].built == 1
    assert session.said(2, built()) == [] and session.spares[2].stage is Stage.BUILT
    assert session.processes == 3 and session.next_deadline_s() == math.inf


def test_spare_takes_the_place_of_a_worker_that_ends_and_another_one_is_made() -> None:
    session = spared()
    taken, swapped, told, given, started, build = session.exited(1, now_s=5.0)
    assert isinstance(taken, TakeRows) and taken.worker == 1
    assert swapped == SwapProcesses(1, 2) and isinstance(given, GiveArena) and given.worker == 1
    assert isinstance(told, Tell) and told.worker == 1
    assert isinstance(told.message, TakePlace) and (told.message.worker, told.message.rows) == (1, [1])
    assert started == StartProcesses((3,), spare=True) and isinstance(build, Tell) and build.worker == 3
    (handed,) = session.said(1, Mapped(), now_s=5.0)
    assert isinstance(handed, HandOver) and handed.worker == 1
    assert session.restarts == 1 and list(session.spares) == [3]
    assert session.elapsed(60.0) == []  # no other process is started for the worker


def test_process_that_is_started_for_a_lost_worker_becomes_the_spare_if_a_spare_is_ready_first() -> None:
    session = ready(**SPARES)
    assert len(session.exited(0)) == 1  # the spare is still being made
    session.elapsed(0.2)
    session.said(0, Building(1))
    swapped, told, given = session.said(2, built())
    assert swapped == SwapProcesses(0, 2) and isinstance(told, Tell) and isinstance(given, GiveArena)
    assert session.spares[2].stage is Stage.BUILDING and session.spares[2].built == 1
    (handed,) = session.said(0, Mapped())
    assert isinstance(handed, HandOver)
    assert session.said(2, built()) == [] and session.spares[2].stage is Stage.BUILT


def test_spare_that_is_ready_later_than_the_lost_workers_next_process_stays_a_spare() -> None:
    session = ready(**SPARES)
    session.exited(0)
    session.elapsed(0.2)
    session.said(0, built())
    assert session.said(2, built()) == [] and list(session.spares) == [2]


def test_two_workers_that_end_at_once_get_a_spare_each_as_far_as_there_are_any() -> None:
    session = spared(4, 4, hosting=Hosting(spares=2))
    assert [type(each) for each in session.exited(1)[1:4]] == [SwapProcesses, Tell, GiveArena]
    assert [type(each) for each in session.exited(2)[1:4]] == [SwapProcesses, Tell, GiveArena]
    assert len(session.exited(3)) == 1
    session.elapsed(0.2)
    assert session.workers[3].stage is Stage.BUILDING


def test_call_under_way_ends_with_a_worker_and_its_spare_serves() -> None:
    session = spared()
    session.request(Call("pid", b"", []))
    instructions = session.exited(1)
    assert any(isinstance(each, SwapProcesses) for each in instructions) and session.phase is Phase.CALLING


def test_spares_of_devices_are_made_for_each_device() -> None:
    session = ready(4, 4, hosting=Hosting(spares=2, gpus=[5, 6]))
    assert {spare.place for spare in session.spares.values()} == {0, 1}
    numbers = {spare.place: number for number, spare in session.spares.items()}
    for number in session.spares:
        session.said(number, built())
    assert session.exited(3)[1] == SwapProcesses(3, numbers[1])
    assert session.exited(2)[1] == SwapProcesses(2, numbers[0])


@pytest.mark.parametrize("make", [{"kwargs_each": [b"0", b"1", b"2"]}, {"factories": b"three"}])
def test_spare_of_envs_that_differ_is_for_one_worker_first_for_that_which_ended_most_often(make: Any) -> None:
    session = spared(3, 3, **make)
    assert session.spares[3].place == 0
    assert len(session.exited(1)) == 1
    *_, started, build = session.exited(0)
    assert started == StartProcesses((4,), spare=True) and places([build]) == [(0, [0])]
    assert spared(3, 3, factories=b"three", alike=True).exited(1)[1] == SwapProcesses(1, 3)


def test_spare_that_ends_is_made_again_later_each_time() -> None:
    session = ready(**SPARES)
    now_s = 0.0
    for retry_s in (SPARE_RETRY_S, 2 * SPARE_RETRY_S, 4 * SPARE_RETRY_S):
        (number,) = session.spares
        assert session.said(number, RowFailed(RAISED)) == []
        assert session.exited(number, now_s=now_s) == [] and not session.spares
        assert session.exited(0, now_s=now_s + retry_s / 2)[1:] == []  # nor is it sooner for a worker that ends
        session.workers[0].loss, session.workers[0].stage = None, Stage.SERVING
        session.workers[0].restart_at_s = math.inf
        now_s += retry_s
        started, build = session.elapsed(now_s)
        assert isinstance(started, StartProcesses) and started.spare and isinstance(build, Tell)
    assert session.restarts == 3  # of the worker alone


def test_spare_that_hangs_or_has_too_much_memory_is_ended() -> None:
    session = ready(faults=Faults(init_s=1.0), **SPARES)
    session.elapsed(1.0)
    (late,) = session.elapsed(2.5)
    assert isinstance(late, ReportLate) and late.worker == 2
    assert session.elapsed(2.5 + STACKS_S) == [Kill(2)]
    session = spared(hosting=Hosting(spares=1, memory_max=MIB))
    assert session.elapsed(MEMORY_S, memory={2: 2 * MIB}) == [Kill(2)]
    assert len(session.exited(0)) == 1  # it is about to end


def test_session_ends_with_its_spares() -> None:
    session = spared()
    told = session.request(Close())
    assert told == [Tell(number, CloseEnvs()) for number in range(3)]
    assert session.exited(0) == session.exited(2) == []
    assert any(isinstance(each, End) for each in session.exited(1))


def test_spare_may_be_the_last_to_end() -> None:
    session = spared()
    session.request(Close())
    assert session.exited(0) == session.exited(1) == []
    assert any(isinstance(each, End) for each in session.exited(2)) and session.phase is Phase.ENDED


def test_broken_session_keeps_no_spares() -> None:
    session = spared(faults=Faults(restarts_max=0))
    assert Kill(2) in session.exited(0) and session.phase is Phase.BROKEN
    assert session.exited(2) == []


def test_draining_hub_makes_no_more_spares() -> None:
    session = spared()
    session.request(Call("pid", b"", []))
    session.handle(stimuli.Draining(10.0, 20.0, quiescent=True))
    assert not any(isinstance(each, StartProcesses) for each in session.exited(1, KILLED))


def test_spare_that_no_process_can_be_had_for_is_tried_again_later() -> None:
    session = ready(**SPARES)
    assert session.handle(stimuli.WorkersNotStarted((2,), "no memory")) == []
    assert not session.spares and session.next_deadline_s() == SPARE_RETRY_S
