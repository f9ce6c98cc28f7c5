"""Workers that are made ahead, and take the place of those that end, or that are recycled."""

from __future__ import annotations

import math
from typing import Any

import pytest
from envhub_server.ipc.control import (
    Build,
    Building,
    CloseEnvs,
    EpisodesDone,
    Leave,
    Left,
    Mapped,
    RowFailed,
    TakePlace,
)
from envhub_server.session.replacement import SPARE_RETRY_MAX_S, SPARE_RETRY_S
from envhub_server.session.slots import Stage
from envhub_server.session.state import Phase
from envhub_server.session.supervision import MEMORY_S, STACKS_S
from recorder import (
    Assign,
    Effect,
    End,
    GiveArena,
    HandOver,
    Kill,
    Notify,
    ReportLate,
    StartProcesses,
    TakeRows,
    Tell,
    events,
)
from sessions import KILLED, RAISED, Session, built, every, only, only_tell, ready

from envhub.env_failure import reseeded
from envhub.protocol.messages import Call, Close, Faults, Hosting, Recycle, Reset, Step
from envhub.values import codec

SPARES = {"hosting": Hosting(spares=1)}
MIB = 1 << 20


def spared(num_envs: int = 3, workers: int = 2, **make: Any) -> Session:
    """A session with its spares, which have made their envs."""
    session = ready(num_envs, workers, **{**SPARES, **make})
    for number in session.slots.spares:
        assert session.said(number, built()) == []
    return session


def places(instructions: list[Effect]) -> list[tuple[int, list[int]]]:
    """The workers that spares are made as, with their rows."""
    told = (each.message for each in instructions if isinstance(each, Tell))
    return [(message.worker, message.rows) for message in told if isinstance(message, Build)]


def test_spares_are_made_once_the_session_is_ready() -> None:
    session = ready(**SPARES)
    assert list(session.slots.spares) == [2] and session.slots.spares[2].place == 0
    assert session.said(2, Building(1)) == [] and session.slots.spares[2].built == 1
    assert session.said(2, built()) == [] and session.slots.spares[2].stage is Stage.BUILT
    assert session.processes == 3 and session.next_deadline_s() == math.inf
    assert not any(map(session.expects_end, range(4)))


def test_spare_takes_the_place_of_a_worker_that_ends_and_another_one_is_made() -> None:
    session = spared()
    ended = session.exited(1, now_s=5.0)
    assert only(TakeRows, ended).slot == 1 and Assign(1, 2) in ended
    given, placed = only(GiveArena, ended), only_tell(TakePlace, ended)
    assert (given.process, given.slot, placed.process) == (2, 1, 2)
    assert (placed.message.worker, placed.message.rows) == (1, [1])
    assert StartProcesses((3,), spare=True) in ended and only_tell(Build, ended).process == 3
    handed = only(HandOver, session.said(1, Mapped(), now_s=5.0))
    assert (handed.slot, handed.process) == (1, 2)
    assert session.restarts == 1 and list(session.slots.spares) == [3]
    assert session.elapsed(60.0) == []  # no other process is started for the worker


def test_process_that_is_started_for_a_lost_worker_becomes_the_spare_if_a_spare_is_ready_first() -> None:
    session = ready(**SPARES)
    assert len(session.exited(0)) == 1  # the spare is still being made
    session.elapsed(0.2)
    session.said(0, Building(1))
    swapped = session.said(2, built())
    assert Assign(0, 2) in swapped and only_tell(TakePlace, swapped) and only(GiveArena, swapped)
    assert session.slots.spares[3].stage is Stage.BUILDING and session.slots.spares[3].built == 1
    only(HandOver, session.said(0, Mapped()))
    assert session.said(3, built()) == [] and session.slots.spares[3].stage is Stage.BUILT


def test_two_workers_that_end_at_once_get_a_spare_each_as_far_as_there_are_any() -> None:
    session = spared(4, 4, hosting=Hosting(spares=2))
    for slot in (1, 2):
        ended = session.exited(slot)
        assert only(Assign, ended).slot == slot and only_tell(TakePlace, ended) and only(GiveArena, ended)
    assert not every(Assign, session.exited(3))
    session.elapsed(0.2)
    assert session.slots[3].stage is Stage.BUILDING


def test_spares_of_devices_are_made_for_each_device() -> None:
    session = ready(4, 4, hosting=Hosting(spares=2, gpus=[5, 6]))
    assert {spare.place for spare in session.slots.spares.values()} == {0, 1}
    numbers = {spare.place: number for number, spare in session.slots.spares.items()}
    for number in session.slots.spares:
        session.said(number, built())
    assert Assign(3, numbers[1]) in session.exited(3)
    assert Assign(2, numbers[0]) in session.exited(2)


@pytest.mark.parametrize("make", [{"kwargs_each": [b"0", b"1", b"2"]}, {"factories": b"three"}])
def test_spare_of_envs_that_differ_is_for_one_worker_first_for_that_which_ended_most_often(make: Any) -> None:
    session = spared(3, 3, **make)
    assert session.slots.spares[3].place == 0
    assert len(session.exited(1)) == 1
    ended = session.exited(0)
    assert StartProcesses((4,), spare=True) in ended and places(ended) == [(0, [0])]
    assert Assign(1, 3) in spared(3, 3, factories=b"three", alike=True).exited(1)


def test_spare_that_ends_is_made_again_later_each_time() -> None:
    session = ready(**SPARES)
    now_s = 0.0
    for retry_s in (SPARE_RETRY_S, 2 * SPARE_RETRY_S, 4 * SPARE_RETRY_S):
        (number,) = session.slots.spares
        assert session.said(number, RowFailed(RAISED)) == []
        assert session.exited(number, now_s=now_s) == [] and not session.slots.spares
        assert not every(
            StartProcesses, session.exited(0, now_s=now_s + retry_s / 2)
        )  # nor is it sooner for a worker that ends
        slot = session.slots[0]
        session.slots.begin(slot).stage, slot.loss = Stage.SERVING, None
        now_s += retry_s
        begun = session.elapsed(now_s)
        assert only(StartProcesses, begun).spare and only_tell(Build, begun)
    assert session.restarts == 3  # of the worker alone
    (number,) = session.slots.spares
    session.said(number, built(), now_s=now_s)
    session.exited(number, now_s=now_s)
    assert session.elapsed(now_s + SPARE_RETRY_S)  # for it had made its envs


def test_spare_that_hangs_or_has_too_much_memory_is_ended() -> None:
    session = ready(faults=Faults(init_s=1.0), **SPARES)
    session.elapsed(1.0)
    late = only(ReportLate, session.sampled(1.0, 2.1))
    assert late.process == 2
    assert session.elapsed(2.5 + STACKS_S) == [Kill(2)]
    session = spared(hosting=Hosting(spares=1, memory_max=MIB))
    assert session.elapsed(MEMORY_S, memory={2: 2 * MIB}) == [Kill(2)]
    assert len(session.exited(0)) == 1  # it is about to end


def test_spare_that_is_about_to_be_ended_as_it_was_late_takes_no_place() -> None:
    session = ready(faults=Faults(init_s=1.0), **SPARES)
    session.sampled(0.0, 1.2)
    assert session.slots.spares[2].late is not None and session.said(2, built(), now_s=1.2) == []
    assert len(session.exited(0, now_s=1.2)) == 1


def test_session_ends_with_its_spares() -> None:
    session = spared()
    told = session.request(Close())
    assert told == [Tell(number, CloseEnvs()) for number in range(3)]
    assert session.exited(0) == session.exited(2) == []
    assert every(End, session.exited(1))


def test_broken_session_keeps_no_spares() -> None:
    session = spared(faults=Faults(restarts_max=0))
    assert Kill(2) in session.exited(0) and session.phase is Phase.BROKEN
    assert session.exited(2) == []


def test_process_that_hangs_is_ended_and_not_the_spare_that_has_its_place_now() -> None:
    session = ready(faults=Faults(init_s=1.0), **SPARES)
    session.exited(0)
    session.elapsed(0.2)
    session.sampled(0.2, 1.0)
    session.said(2, Building(1))  # so that only the lost worker's process hangs
    session.sampled(1.0, 1.4)
    assert session.slots[0].process.late is not None
    assert Assign(0, 2) in session.said(2, built(), now_s=1.5)
    session.said(0, Mapped(), now_s=1.5)
    assert session.elapsed(1.5 + STACKS_S) == [Kill(3)]


def test_draining_hub_makes_no_more_spares() -> None:
    session = spared()
    session.request(Call("pid", b"", []))
    session.handle(events.Draining(10.0, 20.0, quiescent=True))
    assert not every(StartProcesses, session.exited(1, KILLED))


def test_spare_that_no_process_can_be_had_for_is_tried_again_later() -> None:
    session = ready(**SPARES)
    assert session.handle(events.NotStarted((2,), "no memory")) == []
    assert not session.slots.spares and session.next_deadline_s() == SPARE_RETRY_S


# --- workers that are recycled ----------------------------------------------------------------------------------------

WORN = {"hosting": Hosting(recycle=Recycle(episodes=10))}


def recycled(session: Session, worker: int, number: int, now_s: float = 0.0, cut: bool = False) -> list[Effect]:
    """Have the worker leave once the spare of this number has made its envs; the spare serves then."""
    leaving = session.number(worker)
    told = session.said(number, built(), now_s)
    assert Tell(leaving, Leave(cut)) in told
    instructions = session.said(worker, Left(), now_s)
    assert only_tell(CloseEnvs, instructions).process == leaving
    assert only(Assign, instructions) == Assign(worker, number)
    given = only(GiveArena, instructions)
    assert (given.process, given.slot) == (number, worker)
    return [*told, *instructions, *session.said(worker, Mapped(), now_s)]


def test_spare_takes_over_without_a_restart_and_the_worker_ends() -> None:
    session = ready(**WORN)
    session.request(Reset([3, 4, 5]))
    session.rows_done()
    begun = session.said(1, EpisodesDone())
    assert StartProcesses((2,), spare=True) in begun and places(begun) == [(1, [1])]
    swapped = recycled(session, 1, 2, now_s=7.0)
    taken = only(TakeRows, swapped)
    assert (taken.slot, taken.process, taken.left, taken.resetting) == (1, 1, True, None)
    handed = only(HandOver, swapped)
    assert (handed.slot, handed.process, handed.message.seeds) == (1, 2, [reseeded(4, 1)])
    told = codec.decode(handed.message.info)["env_failure"]  # for a row that was cut
    assert (told["cause"], told["message"]) == ("recycle", "worker 1 (env 1) was recycled")
    assert session.restarts == 0 and session.recycled == 1 and session.expects_end(1)
    assert session.closed(1, now_s=7.1) == [] and not session.slots.spares
    assert session.next_deadline_s() == math.inf and len(session.said(0, EpisodesDone(), now_s=7.2)) == 2
    assert session.phase is Phase.READY and session.slots[1].serves_since_s == 7.0


@pytest.mark.parametrize("request_", [Step(b"\x04"), Reset(), Call("pid", b"", [])])
def test_request_under_way_goes_on_with_the_worker_that_took_over(request_: Any) -> None:
    session = ready(**WORN)
    session.said(1, EpisodesDone())
    session.said(2, built())
    session.request(request_)
    session.said(1, Left())
    handed = only(HandOver, session.said(1, Mapped()))
    assert (handed.pending is None) == isinstance(request_, Step)
    assert session.phase in (Phase.MOVING, Phase.CALLING)


def test_worker_that_is_too_old_is_recycled() -> None:
    session = ready(hosting=Hosting(recycle=Recycle(age_s=30.0)))
    assert session.next_deadline_s() == 30.0
    assert session.elapsed(29.0) == []
    assert StartProcesses((2,), spare=True) in session.elapsed(30.0)
    session.said(2, built(), now_s=31.0)
    session.said(0, Left(), now_s=31.0)
    session.said(0, Mapped(), now_s=31.0)
    assert session.slots[0].serves_since_s == 31.0 and session.slots[1].due_for_recycling


def test_worker_with_too_much_memory_is_recycled_and_not_ended() -> None:
    session = ready(hosting=Hosting(recycle=Recycle(memory_bytes=MIB)))
    assert session.next_deadline_s() == MEMORY_S
    assert session.elapsed(MEMORY_S, memory={0: MIB, 1: MIB}) == []
    begun = session.elapsed(2 * MEMORY_S, memory={0: MIB, 1: MIB + 1})
    assert StartProcesses((2,), spare=True) in begun and places(begun) == [(1, [1])]
    recycled(session, 1, 2, now_s=0.5)
    assert session.closed(1) == [] and session.elapsed(0.55) == []  # nothing is known of the memory of the next yet


@pytest.mark.parametrize(
    ("num_envs", "mode", "cut"),
    [(2, "NextStep", False), (2, "Disabled", False), (2, "SameStep", True), (3, "NextStep", True)],
)
def test_worker_of_one_env_leaves_between_episodes_and_others_at_once(num_envs: int, mode: str, cut: bool) -> None:
    session = ready(num_envs, 2, autoreset_mode=mode, **WORN)
    session.said(0, EpisodesDone())
    recycled(session, 0, 2, cut=cut)


def test_workers_are_recycled_one_after_the_other() -> None:
    session = ready(**WORN)
    assert len(session.said(0, EpisodesDone())) == 2 and session.said(1, EpisodesDone()) == []
    begun = recycled(session, 0, 2, cut=True)
    assert StartProcesses((3,), spare=True) in begun and places(begun) == [(1, [1])]


def test_spare_that_is_there_takes_over_and_another_one_is_made() -> None:
    session = spared(hosting=Hosting(spares=1, recycle=Recycle(episodes=10)))
    begun = session.said(1, EpisodesDone())
    assert Tell(1, Leave()) in begun
    assert StartProcesses((3,), spare=True) in begun and only_tell(Build, begun).process == 3
    assert only(Assign, session.said(1, Left())) == Assign(1, 2)
    ended = session.exited(1)
    assert ended == every(TakeRows, ended)  # the next spare is still being made


def test_worker_that_ends_before_it_left_is_lost_and_the_spare_serves() -> None:
    session = ready(**WORN)
    session.said(1, EpisodesDone())
    session.said(2, built())
    ended = session.exited(1)
    assert only(Assign, ended) == Assign(1, 2) and not only(TakeRows, ended).left
    assert only(HandOver, session.said(1, Mapped())).message.info == only(TakeRows, ended).loss.info
    assert session.restarts == 1 and session.recycled == 0 and session.elapsed(60.0) == []


def test_worker_that_is_due_while_another_leaves_has_a_spare_made() -> None:
    session = ready(**WORN)
    session.said(0, EpisodesDone())
    session.said(2, built())
    begun = session.said(1, EpisodesDone())
    assert StartProcesses((3,), spare=True) in begun and places(begun) == [(1, [1])]
    assert session.said(3, built()) == [Tell(1, Leave())]


def test_spare_that_is_ready_before_the_next_process_of_a_lost_worker_leaves_no_spare_behind() -> None:
    session = ready(**WORN)
    session.said(1, EpisodesDone())
    session.exited(1)
    session.elapsed(0.2)
    swapped = session.said(2, built())
    assert only(Kill, swapped) == Kill(3) and Assign(1, 2) in swapped
    assert session.ended(3) == [] and not session.slots.spares


def test_worker_that_left_when_the_spare_had_ended_gets_another_process_at_once() -> None:
    session = ready(**WORN)
    session.said(1, EpisodesDone())
    session.said(2, built())
    session.exited(2)
    left = session.said(1, Left())
    assert StartProcesses((3,)) in left and session.slots[1].loss is not None
    session.said(1, built())
    assert only(HandOver, session.said(1, Mapped())).process == 3 and session.restarts == 0


def test_worker_that_left_and_does_not_close_in_time_is_ended() -> None:
    session = ready(faults=Faults(close_s=2.0), **WORN)
    session.said(1, EpisodesDone())
    recycled(session, 1, 2, now_s=1.0)
    assert session.elapsed(2.9) == []
    assert session.elapsed(3.0) == [Kill(1)]
    cut = "env 1 ended before close was over: each env has close_timeout=2 s"
    assert session.ended(1) == [Notify("envs_cut_short", cut)] and session.restarts == 0


def test_worker_that_left_closes_its_envs_also_when_its_session_breaks_and_closes() -> None:
    session = ready(faults=Faults(restarts_max=0), **WORN)
    session.said(1, EpisodesDone())
    recycled(session, 1, 2)
    assert not every(Kill, session.exited(0)) and session.phase is Phase.BROKEN
    session.closes(1, 1, now_s=50.0)
    assert session.next_deadline_s() == 110.0
    assert session.request(Close(), now_s=60.0) == [Tell(2, CloseEnvs())]
    assert session.closed(1) == [] and every(End, session.closed(2))


def test_spare_whose_envs_are_made_when_the_session_is_over_takes_no_place() -> None:
    session = ready(**WORN)
    session.said(1, EpisodesDone())
    session.request(Close())
    assert session.said(2, built()) == []
    session = ready(hosting=Hosting(spares=1), faults=Faults(restarts_max=0))
    session.exited(1)
    assert session.phase is Phase.BROKEN and session.said(2, built()) == []


def test_worker_is_not_recycled_before_its_predecessor_has_ended() -> None:
    session = ready(**WORN)
    session.said(1, EpisodesDone())
    recycled(session, 1, 2)
    assert session.said(1, EpisodesDone()) == []
    begun = session.ended(1)
    assert StartProcesses((3,), spare=True) in begun and places(begun) == [(1, [1])]


def test_spare_that_fails_again_and_again_is_tried_once_a_minute() -> None:
    session = ready(**SPARES)
    session.replacement.spares.failed = 5000
    session.exited(2, now_s=100.0)
    assert session.next_deadline_s() == 100.0 + SPARE_RETRY_MAX_S
