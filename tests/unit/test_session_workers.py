from __future__ import annotations

from typing import Any

import pytest
from envhub_server.ipc.control import (
    Build,
    CallResults,
    CallRows,
    CloseEnvs,
    Faulted,
    FirstBuilt,
    Mapped,
    ResetRows,
    RowFailed,
    SetAttrRows,
)
from envhub_server.ipc.reseeding import reseeded
from envhub_server.processes.exit_cause import ExitCause
from envhub_server.session.failure_text import Outcome
from envhub_server.session.instructions import (
    Answer,
    Drive,
    End,
    Exited,
    Fail,
    HandOver,
    Kill,
    MakeArena,
    StartWorkers,
    TakeOver,
    Tell,
)
from envhub_server.session.instructions import MapArena as MapRestarted
from envhub_server.session.state import Phase, SessionState
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import LATE, RAISED, STOPPING, built, ready, session_of

from envhub.arena.memory import OP_STEP
from envhub.protocol.messages import Call, Close, Done, Failure, Faults, Make, Reset, SetAttr, Step
from envhub.values import codec

# --- workers that end -------------------------------------------------------------------------------------------------

SEGFAULT = Exited(ExitCause("was ended by SIGSEGV"))
KILLED = Exited(ExitCause("was ended by SIGKILL", "SIGKILL", log_tail="its last words"))


def env_failure(outcome: Outcome) -> dict[str, Any]:
    info = codec.decode(outcome.info)
    assert info["invalid_transition"] is True
    found: dict[str, Any] = info["env_failure"]
    return found


def broken(**faults: Any) -> SessionState:
    """A session whose worker 0 is not started again."""
    session = ready(faults=Faults(restarts_max=0, **faults))
    session.event(0, KILLED)
    assert session.phase is Phase.BROKEN
    return session


@pytest.mark.parametrize("request_", [None, Step(b"\x04"), Reset()])
def test_rows_of_a_worker_that_ended_are_the_hubs_and_the_session_goes_on(request_: Any) -> None:
    session = ready()
    if request_ is not None:
        session.request(request_)
    (taken,) = session.event(0, KILLED)
    assert isinstance(taken, TakeOver) and taken.worker == 0 and not taken.outcome.raises
    told = env_failure(taken.outcome)
    assert (told["cause"], told["signal"], told["exit_status"], told["restarts"]) == ("crash", "SIGKILL", None, 0)
    assert told["message"] == "worker 0 (envs 0, 2) was ended by SIGKILL" and told["log_tail"] == "its last words"
    if request_ is not None:
        (answer,) = session.moved()
        assert isinstance(answer, Answer) and answer.arrays
    assert session.phase is Phase.READY and session.idle


def test_worker_is_started_again_when_its_time_has_come_and_serves_its_rows() -> None:
    session = ready()
    session.request(Reset([3, 4, 5]))
    session.moved()
    session.event(1, KILLED, now_s=100.0)
    assert session.tick(100.0) == []
    started, build = session.tick(100.1)
    assert started == StartWorkers((1,)) and isinstance(build, Tell)
    assert (build.worker, build.message.rows) == (1, [1])
    assert session.tick(100.2) == []
    (mapped,) = session.event(1, built())
    assert isinstance(mapped, MapRestarted) and mapped.worker == 1 and mapped.message.num_envs == 3
    (handed,) = session.event(1, Mapped(), now_s=101.0)
    assert isinstance(handed, HandOver) and handed.message.seeds == [reseeded(4, 1)]
    assert handed.message.failure is None and b"env_failure" in handed.message.info
    assert session.request(Step(b"\x04")) == [Drive(OP_STEP)]


def test_env_that_was_late_is_named_and_so_is_what_it_was_to_do() -> None:
    session = ready()
    session.request(Step(b"\x04"))
    tail = 'a word\nCurrent thread 0x0001 (most recent call first):\n  File "x.py", line 3 in step\n'
    (taken,) = session.event(0, Exited(ExitCause("was ended by SIGKILL", "SIGKILL", log_tail=tail), LATE))
    assert isinstance(taken, TakeOver)
    told = env_failure(taken.outcome)
    assert told["cause"] == "timeout"
    assert told["message"].startswith("env 2 did not finish its step within step_timeout=1.5 s; its worker 0 ")
    assert told["traceback"].startswith("Current thread") and "a word" not in told["traceback"]


@pytest.mark.parametrize(
    ("faults", "exited", "raises"),
    [
        (Faults(), KILLED, False),
        (Faults(on_crash="raise"), KILLED, True),
        (Faults(on_timeout="raise"), KILLED, False),
        (Faults(on_crash="raise"), Exited(KILLED.ending, LATE), False),
        (Faults(on_timeout="raise"), Exited(KILLED.ending, LATE), True),
    ],
)
def test_each_cause_has_a_policy(faults: Faults, exited: Exited, raises: bool) -> None:
    session = ready(faults=faults)
    (taken,) = session.event(0, exited)
    assert isinstance(taken, TakeOver) and taken.outcome.raises is raises
    session.tick(1e9)
    session.event(0, built())
    (handed,) = session.event(0, Mapped())
    assert isinstance(handed, HandOver) and (handed.message.failure is not None) is raises


def test_failure_that_the_hub_tells_in_place_of_a_worker_fails_the_step_and_no_more() -> None:
    session = ready(faults=Faults(on_crash="raise"))
    session.request(Step(b"\x04"))
    (taken,) = session.event(0, KILLED)
    assert isinstance(taken, TakeOver)
    session.event(0, RowFailed(taken.outcome.failure))
    assert session.moved() == [Fail(taken.outcome.failure)]
    assert taken.outcome.failure.code == "worker_died" and taken.outcome.failure.scope == "request"
    assert session.phase is Phase.READY


def test_call_fails_when_a_worker_ends_in_it_and_every_other_has_answered() -> None:
    session = ready()
    session.request(Call("render", b""))
    assert len(session.event(0, KILLED)) == 1
    (fail,) = session.event(1, CallResults([b""]))
    assert isinstance(fail, Fail) and fail.failure.code == "worker_died" and fail.failure.message.endswith("a call")
    assert session.phase is Phase.READY


def test_call_waits_for_a_worker_that_is_on_its_way() -> None:
    session = ready()
    session.event(0, KILLED)
    session.request(Call("render", b""))
    assert session.event(1, CallResults([b"b"])) == []
    session.tick(1e9)
    session.event(0, built())
    session.event(0, Mapped())
    (answer,) = session.event(0, CallResults([b"a", b"c"]))
    assert isinstance(answer, Answer) and answer.rows == ((0, b"a"), (1, b"b"), (2, b"c"))


def test_worker_that_cannot_build_its_envs_any_more_is_given_up_after_three_tries() -> None:
    session = ready(faults=Faults(restarts_max=100))
    session.event(0, KILLED)
    failure = Failure("factory_failed", "env", "no such file", env_index=0, worker=0)
    for now_s in (10.0, 20.0, 30.0):
        assert session.phase is Phase.READY
        assert session.tick(now_s)[0] == StartWorkers((0,))
        assert session.event(0, RowFailed(failure)) == []
        session.event(0, Exited(ExitCause("exited with status 0")), now_s)
    (fail,) = session.request(Step(b"\x04"))
    assert isinstance(fail, Fail) and fail.failure.code == "restarts_exhausted"
    assert "no such file" in fail.failure.message and "4 times" in fail.failure.message


@pytest.mark.parametrize("request_", [Step(b"\x04"), Reset(), Call("render", b"")])
def test_last_end_of_a_worker_fails_the_request_under_way_at_once(request_: Any) -> None:
    session = ready(faults=Faults(restarts_max=0))
    session.request(request_)
    (fail,) = session.event(0, KILLED)
    assert isinstance(fail, Fail)
    assert (fail.failure.code, fail.failure.scope) == ("restarts_exhausted", "session")
    assert (fail.failure.worker, fail.failure.env_index) == (0, 0)
    assert "worker 0 (envs 0, 2) was ended by SIGKILL" in fail.failure.message
    assert fail.failure.log_tail == "its last words"
    assert session.phase is Phase.BROKEN


@pytest.mark.parametrize("request_", [Step(b"\x04"), Reset(), Call("render", b""), SetAttr("x", [b""])])
def test_every_request_after_the_last_end_fails_at_once(request_: Any) -> None:
    session = broken()
    for _ in range(2):
        (fail,) = session.request(request_)
        assert isinstance(fail, Fail) and fail.failure.code == "restarts_exhausted"
        assert session.idle


def test_env_that_raises_too_often_breaks_the_session() -> None:
    session = ready(faults=Faults(restarts_max=2))
    assert [session.event(0, Faulted(2, "ValueError: no"), 1.0) for _ in range(3)] == [[], [], []]
    (fail,) = session.request(Step(b"\x04"))
    assert isinstance(fail, Fail) and "env 2 raised ValueError: no" in fail.failure.message


def test_what_other_workers_still_say_after_the_last_end_is_nothing() -> None:
    session = broken()
    assert session.event(1, RowFailed(RAISED)) == []
    assert session.moved() == []
    assert session.event(1, KILLED) == [] and session.tick(1e9) == []
    assert session.phase is Phase.BROKEN


def test_broken_session_closes_the_envs_that_are_left() -> None:
    session = broken()
    assert session.request(Close()) == [Tell(1, CloseEnvs())]
    assert session.event(1, Exited(ExitCause("exited with status 0"))) == [Answer(Done()), End()]


def test_broken_session_without_workers_is_closed_at_once() -> None:
    session = ready(1, 1, faults=Faults(restarts_max=0))
    session.event(0, KILLED)
    assert session.request(Close()) == [Answer(Done()), End()]


def test_session_that_waits_for_a_worker_is_closed_without_it() -> None:
    session = ready(1, 1)
    session.event(0, KILLED)
    assert session.request(Close()) == [Answer(Done()), End()]
    assert session.tick(1e9) == []


# --- any life ---------------------------------------------------------------------------------------------------------


class FakeHub:
    """Carries out instructions against fake workers, and counts what the session says."""

    def __init__(self, session: SessionState) -> None:
        self.session = session
        self.alive = set(range(len(session.blocks)))
        self.inbox: list[tuple[int, Any]] = []  # what workers have said and the session not yet heard
        self.asked, self.told, self.ends = 1, 0, 0
        self.moving = False
        self.serving: set[int] = set()
        self.apply(session.start())

    def apply(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            assert self.ends == 0, f"{instruction} after the end"
            match instruction:
                case Tell(worker, message):
                    self.inbox += [(worker, reply) for reply in self.reply_to(worker, message)]
                case MakeArena():
                    self.inbox += [(worker, Mapped()) for worker in sorted(self.alive)]
                case MapRestarted(worker):
                    self.inbox.append((worker, Mapped()))
                case StartWorkers(numbers):
                    self.alive.update(numbers)
                case TakeOver(worker):
                    assert worker not in self.alive
                    self.serving.discard(worker)
                case HandOver(worker):
                    assert worker in self.alive and worker not in self.serving, "two owners of a row"
                    self.serving.add(worker)
                case Drive():
                    self.moving = True
                case Answer() | Fail():
                    self.told += 1
                    self.moving = False
                case Kill(worker):
                    self.inbox.append((worker, Exited(ExitCause("was ended by SIGKILL"))))
                case End():
                    self.ends += 1

    def reply_to(self, worker: int, message: Any) -> list[Any]:
        block = self.session.blocks[worker]
        match message:
            case CallRows() | SetAttrRows():
                return [CallResults([b""] * len(block))]
            case CloseEnvs():
                return [Exited(ExitCause("exited with status 0"))]
            case ResetRows():
                return []
            case Build(first_only=True):
                return [FirstBuilt(False, 1 << 20)]
            case _:
                return [built()]

    def hear(self, index: int) -> None:
        worker, event = self.inbox.pop(index)
        if worker not in self.alive:
            return
        if isinstance(event, Exited):
            self.alive.discard(worker)
        self.apply(self.session.event(worker, event))

    def ask(self, request: Any) -> None:
        self.asked += 1
        self.apply(self.session.request(request))


REQUESTS = [Step(b"\x04"), Reset(), Reset([1]), Call("x", b""), SetAttr("x", [b""]), Close(), Close(terminate=True)]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 7), st.none() | st.integers(1, 3), st.data())
def test_every_request_gets_one_answer_and_every_session_one_end(
    num_envs: int, workers: int | None, data: st.DataObject
) -> None:
    hub = FakeHub(session_of(Make(num_envs), workers))
    now_s = 0.0
    for _ in range(data.draw(st.integers(0, 40), label="events")):
        if hub.ends:
            break
        what = data.draw(st.sampled_from(["hear", "hear", "hear", "move", "ask", "raise", "die", "tick", "abandon"]))
        if what == "hear" and hub.inbox:
            hub.hear(data.draw(st.integers(0, len(hub.inbox) - 1)))
        elif what == "move" and hub.moving:
            hub.apply(hub.session.moved())
        elif what == "ask" and hub.session.idle:
            hub.ask(data.draw(st.sampled_from(REQUESTS)))
        elif what == "raise" and hub.moving and hub.alive:
            hub.apply(hub.session.event(min(hub.alive), RowFailed(RAISED)))
        elif what == "die" and hub.alive:
            hub.inbox.insert(
                0, (data.draw(st.sampled_from(sorted(hub.alive))), Exited(ExitCause("was ended by SIGSEGV")))
            )
            hub.hear(0)
        elif what == "tick":
            now_s += 10.0
            hub.apply(hub.session.tick(now_s))
        elif what == "abandon":
            hub.apply(hub.session.abandon(STOPPING, data.draw(st.booleans())))
        assert hub.told in (hub.asked, hub.asked - 1)
        assert hub.session.idle == (hub.told == hub.asked)
    if not hub.ends:
        hub.apply(hub.session.abandon(STOPPING, terminate=True))
    while hub.inbox:
        hub.hear(0)
    assert hub.ends == 1
    assert hub.told == hub.asked
    assert hub.alive == set()
