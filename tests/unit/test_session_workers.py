from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from envhub_server.ipc.control import (
    BYTES_MAX,
    Build,
    Building,
    CloseEnvs,
    EpisodesDone,
    Faulted,
    FirstBuilt,
    HandedOver,
    InfoTemplate,
    Leave,
    Mapped,
    RowFailed,
    RowInfo,
    Serve,
    SetAttrRows,
    TakeSlot,
)
from envhub_server.processes.worker_handle import ExitCause, WorkerExited, WorkerMessage
from envhub_server.session.replacement import SPARE_RETRY_MAX_S, SPARE_RETRY_S
from envhub_server.session.requests import KEPT_TEMPLATES_MAX
from envhub_server.session.slots import SAMPLE_S, Progress, Stage, WorkerLoss
from envhub_server.session.state import Driver, LaneName, Phase
from envhub_server.session.supervision import MEMORY_S, MIB, STACKS_S
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import (
    Answer,
    AnswerAttach,
    AnswerPart,
    Assign,
    CloseSide,
    Effect,
    End,
    Fail,
    FailAttach,
    FailPart,
    FinishSteps,
    GiveArena,
    GiveDrive,
    Grant,
    HandOver,
    KeepReplay,
    Kill,
    Notify,
    PostMessage,
    PostPart,
    PostStep,
    ReportLate,
    StartProcesses,
    TakeDrive,
    TakePart,
    TakeRows,
    Tell,
    Warn,
    events,
)
from sessions import (
    KILLED,
    RAISED,
    SHUTTING_DOWN,
    Session,
    begun,
    built,
    every,
    only,
    only_tell,
    ready,
    session_of,
    shared,
)

from envhub.protocol.messages import (
    Call,
    Close,
    Collect,
    Done,
    Failure,
    Faults,
    Hosting,
    Make,
    Receive,
    Recycle,
    Reset,
    Send,
    SetAttr,
    Step,
    TemplatesRequest,
)
from envhub.values import codec
from envhub.values.info_columns import EXAMPLE_BYTES_MAX

# --- workers that end -------------------------------------------------------------------------------------------------


def env_failure(loss: WorkerLoss) -> dict[str, Any]:
    info = codec.decode(loss.info)
    assert info["invalid_transition"] is True
    found: dict[str, Any] = info["env_failure"]
    return found


def broken(**faults: Any) -> Session:
    """A session whose worker 0 is not started again."""
    session = ready(faults=Faults(restarts_max=0, **faults))
    session.exited(0)
    assert session.phase is Phase.BROKEN
    return session


def test_worker_with_too_much_memory_is_ended_and_its_rows_are_told_why() -> None:
    session = ready(hosting=Hosting(memory_max=100 * MIB))
    assert session.next_deadline_s() == MEMORY_S and session.supervision.measures(MEMORY_S)
    assert session.elapsed(MEMORY_S, memory={0: 99 * MIB, 1: 100 * MIB}) == []
    assert not session.supervision.measures(MEMORY_S) and session.next_deadline_s() == 2 * MEMORY_S
    assert session.elapsed(2 * MEMORY_S, memory={0: 101 * MIB, 1: 99 * MIB}) == [Kill(0)]
    assert session.elapsed(3 * MEMORY_S, memory={0: 102 * MIB}) == []  # it is about to end
    assert session.supervision.reason(0) == "had 101 MiB of memory, more than memory_max=104857600 bytes"
    assert session.supervision.reason(1) == ""
    taken = only(TakeRows, session.exited(0, now_s=3 * MEMORY_S))
    assert taken.loss.failure.code == "worker_died"
    told = env_failure(taken.loss)
    assert told["cause"] == "memory"
    assert (
        told["message"]
        == "worker 0 (envs 0, 2) had 101 MiB of memory, more than memory_max=104857600 bytes, and was ended"
    )
    found = session.elapsed(4 * MEMORY_S, memory={0: 200 * MIB, 9: 200 * MIB})  # of it, and of one that nobody knows
    assert not every(Kill, found)
    assert session.slots[0].stage is Stage.BUILDING
    taken = only(TakeRows, session.exited(0, now_s=4.0))  # this time by itself
    assert env_failure(taken.loss)["cause"] == "crash"


@pytest.mark.parametrize("request_", [None, Step(b"\x04"), Reset()])
def test_rows_of_a_worker_that_ended_are_the_hubs_and_the_session_goes_on(request_: Any) -> None:
    session = ready()
    if request_ is not None:
        session.request(request_)
    taken = only(TakeRows, session.exited(0))
    assert taken.slot == 0 and not taken.loss.raises
    told = env_failure(taken.loss)
    assert (told["cause"], told["signal"], told["exit_status"], told["restarts"]) == ("crash", "SIGKILL", None, 0)
    assert told["message"] == "worker 0 (envs 0, 2) was ended by SIGKILL" and told["log_tail"] == "its last words"
    if request_ is not None:
        answer = only(Answer, session.rows_done())
        assert answer.arrays
    assert session.phase is Phase.READY and not session.requests.pending_reply


def test_worker_is_started_again_when_its_time_has_come_and_serves_its_rows() -> None:
    session = ready()
    session.exited(1, now_s=100.0)
    assert session.elapsed(100.0) == []
    again = session.elapsed(100.1)
    build = only_tell(Build, again)
    assert StartProcesses((2,)) in again
    assert (build.process, build.message.rows) == (2, [1])
    assert session.elapsed(100.2) == []
    mapped = only(GiveArena, session.worker_sent(1, built()))
    assert (mapped.process, mapped.slot) == (2, 1) and mapped.message.num_envs == 3
    handed = only(HandOver, session.worker_sent(1, Mapped(), now_s=101.0))
    assert handed.replaced == 1
    assert handed.message.failure is None and b"env_failure" in handed.message.info
    assert session.request(Step(b"\x04")) == [PostStep()]


def late(session: Session) -> float:
    """Have env 2 of worker 0 hang in a step of the session until its worker is killed; returns the time."""
    session.request(Step(b"\x04"))
    at = Progress(word=7, row=2, kind="step")
    limit_s = session.make.faults.step_s
    end_s = limit_s + SAMPLE_S
    assert session.elapsed(0.0, at, None, quiescent=False) == []
    report = every(ReportLate, session.sampled(0.0, end_s, at, None, quiescent=False))[-1]
    assert report.process == 0 and report.late.expired
    assert session.next_deadline_s() <= end_s + STACKS_S
    assert session.elapsed(end_s + STACKS_S, at, None, quiescent=False) == [Kill(0)]
    return end_s + STACKS_S


def test_env_that_was_late_is_named_and_so_is_what_it_was_to_do() -> None:
    session = ready(faults=Faults(step_s=1.5))
    late(session)
    tail = 'a word\nCurrent thread 0x0001 (most recent call first):\n  File "x.py", line 3 in step\n'
    taken = only(TakeRows, session.exited(0, ExitCause("was ended by SIGKILL", "SIGKILL", log_tail=tail)))
    told = env_failure(taken.loss)
    assert told["cause"] == "timeout"
    assert told["message"].startswith("env 2 did not finish its step within step_timeout=1.5 s; its worker 0 ")
    assert told["traceback"].startswith("Current thread") and "a word" not in told["traceback"]


@pytest.mark.parametrize("kind", ["reset", "init", "call"])
def test_deadline_is_of_what_the_env_is_called_for(kind: str) -> None:
    session = ready(faults=Faults(reset_s=1.0, init_s=2.0, call_s=3.0))
    limit_s = {"reset": 1.0, "init": 2.0, "call": 3.0}[kind]
    session.request(Call("x", b"") if kind == "call" else Step(b"\x04"))
    at = Progress(word=7, row=1, kind=kind)
    before_s = limit_s - SAMPLE_S
    assert session.elapsed(0.0, None, at) == [] and session.sampled(0.0, before_s, None, at) == []
    report = only(ReportLate, session.sampled(before_s, limit_s + SAMPLE_S, None, at))
    assert (report.late.kind, report.late.row) == (kind, 1)


def test_pause_of_the_machine_is_not_the_time_of_an_env() -> None:
    session = ready(faults=Faults(step_s=0.5))
    session.request(Step(b"\x04"))
    at = Progress(word=7, row=2, kind="step")
    assert session.elapsed(0.1, at, None, quiescent=False) == []
    assert session.elapsed(2.0, at, None, quiescent=False) == []  # planned for 0.2
    assert session.elapsed(2.1, at, None, quiescent=False) == []
    report = only(ReportLate, session.elapsed(4.0, at, None, quiescent=False))  # nor has it between two pauses
    assert report.late.expired


def test_pause_while_the_client_paused_is_not_the_time_of_an_env() -> None:
    """The hub samples rarely then, and a worker makes its env again."""
    session = shared(faults=Faults(init_s=2.0))
    session.exited(0)
    session.sampled(0.0, 1.5)
    session.worker_sent(0, Building(1), now_s=1.5)
    for pause_s in (0.0, 1.9):
        assert session.elapsed(session.next_deadline_s() + pause_s) == []


def test_worker_that_makes_its_envs_has_the_time_for_one_for_each() -> None:
    session = begun(4, 2, faults=Faults(init_s=10.0))
    assert session.elapsed(0.0) == session.sampled(0.0, 5.0) == []
    session.worker_sent(0, Building(1))
    report = only(ReportLate, session.sampled(5.0, 10.1))  # worker 0 is at its second env by now
    assert (report.process, report.late.row) == (1, 1)


def test_worker_that_waits_for_the_others_is_not_late() -> None:
    session = begun(4, 2, faults=Faults(init_s=10.0))
    session.worker_sent(0, built())
    assert session.elapsed(0.0) == []
    assert [report.process for report in session.sampled(0.0, 10.1)] == [1]  # type: ignore[attr-defined]


def test_worker_that_takes_long_to_map_the_arena_is_late() -> None:
    session = begun(faults=Faults(init_s=10.0))
    for worker in (0, 1):
        session.worker_sent(worker, built())
    session.worker_sent(0, Mapped())
    assert session.elapsed(0.0) == []
    assert [report.process for report in session.sampled(0.0, 10.1)] == [1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("faults", "hangs", "raises"),
    [
        (Faults(), False, False),
        (Faults(on_crash="raise"), False, True),
        (Faults(on_timeout="raise"), False, False),
        (Faults(on_crash="raise"), True, False),
        (Faults(on_timeout="raise"), True, True),
    ],
)
def test_each_cause_has_a_policy(faults: Faults, hangs: bool, raises: bool) -> None:
    session = ready(faults=faults)
    now_s = late(session) if hangs else 0.0
    assert session.elapsed(now_s, quiescent=False) == []  # it is ended once
    taken = only(TakeRows, session.exited(0, now_s=now_s))
    assert taken.loss.raises is raises
    handed = only(HandOver, session.replaced())
    assert (handed.message.failure is not None) is raises


def test_failure_that_the_hub_tells_in_place_of_a_worker_fails_the_step_and_no_more() -> None:
    session = ready(faults=Faults(on_crash="raise"))
    session.request(Step(b"\x04"))
    taken = only(TakeRows, session.exited(0))
    session.handle(events.LostRowFailed(taken.loss.failure))
    assert session.rows_done() == [Fail(taken.loss.failure)]
    assert taken.loss.failure.code == "worker_died" and taken.loss.failure.scope == "request"
    assert session.phase is Phase.READY


def test_why_a_process_could_not_make_its_envs_is_told_of_that_process_alone() -> None:
    session = ready()
    session.exited(0)
    for now_s, fails in ((1.0, True), (2.0, False)):
        session.elapsed(now_s)
        if fails:
            session.worker_sent(0, RowFailed(Failure("factory_failed", "env", "no such file", env_index=0, worker=0)))
        taken = only(TakeRows, session.exited(0, now_s=now_s))
        assert ("; before that: no such file" in taken.loss.failure.message) is fails


@pytest.mark.parametrize("request_", [Step(b"\x04"), Reset(), Call("render", b"")])
def test_last_end_of_a_worker_fails_the_request_under_way_at_once(request_: Any) -> None:
    session = ready(faults=Faults(restarts_max=0))
    session.request(request_)
    fail = only(Fail, session.exited(0))
    assert (fail.failure.code, fail.failure.scope) == ("restarts_exhausted", "session")
    assert (fail.failure.worker, fail.failure.env_index) == (0, 0)
    assert "worker 0 (envs 0, 2) was ended by SIGKILL" in fail.failure.message
    assert fail.failure.log_tail == "its last words"
    assert session.phase is Phase.BROKEN


def test_env_that_raises_too_often_breaks_the_session() -> None:
    session = ready(faults=Faults(restarts_max=2))
    for phase in (Phase.READY, Phase.READY, Phase.BROKEN):
        assert session.worker_sent(0, Faulted(2, "ValueError: no"), 1.0) == [] and session.phase is phase
    fail = only(Fail, session.request(Step(b"\x04")))
    assert "env 2 raised ValueError: no" in fail.failure.message
    assert (fail.failure.env_index, fail.failure.worker) == (2, 0)


def test_what_other_workers_still_say_after_the_last_end_is_nothing() -> None:
    session = broken()
    assert session.worker_sent(1, RowFailed(RAISED)) == []
    assert session.rows_done() == []
    assert session.exited(1) == [] and session.elapsed(1e9) == []
    assert session.phase is Phase.BROKEN


def test_worker_that_makes_its_envs_again_is_not_waited_for_at_the_end() -> None:
    session = ready(2, 2)
    session.exited(0)
    session.elapsed(session.next_deadline_s())
    assert session.slots[0].stage is Stage.BUILDING
    assert session.request(Close()) == [Kill(2), Tell(1, CloseEnvs())]


def test_session_that_waits_for_a_worker_is_closed_without_it() -> None:
    session = ready(1, 1)
    session.exited(0)
    assert session.request(Close()) == [Answer(Done()), End()]


# --- what is told to the next process ---------------------------------------------------------------------------------


def test_worker_that_says_again_what_is_known_changes_nothing() -> None:
    session = ready()
    assert (
        session.worker_sent(0, built())
        == session.worker_sent(0, Mapped())
        == session.worker_sent(0, FirstBuilt(True, 1))
        == []
    )
    assert session.slots[0].stage is Stage.SERVING
    session = begun()
    assert (
        session.worker_sent(0, FirstBuilt(True, 1)) == [] and session.slots[0].process.first is None
    )  # the number is decided


def test_spare_that_has_ended_is_nothing_any_more() -> None:
    session = ready()
    assert session.worker_sent(7, Mapped()) == session.exited(7) == []


def test_only_the_last_forms_of_infos_of_a_worker_are_kept_and_none_that_is_too_large() -> None:
    def known(*numbers: int) -> list[int]:
        answer = only(Answer, session.request(TemplatesRequest([*numbers])))
        found: list[int] = answer.message.numbers
        return found

    session = ready()
    session.worker_sent(0, InfoTemplate(0, bytes(EXAMPLE_BYTES_MAX)))
    session.worker_sent(0, InfoTemplate(1, bytes(EXAMPLE_BYTES_MAX + 1)))  # which no honest worker sends
    for number in range(2, KEPT_TEMPLATES_MAX + 1):
        session.worker_sent(0, InfoTemplate(number, b"example"))
    assert known(0, 1, 2, KEPT_TEMPLATES_MAX) == [0, 2, KEPT_TEMPLATES_MAX]
    session.worker_sent(0, InfoTemplate(0, b"again"))
    session.worker_sent(0, InfoTemplate(KEPT_TEMPLATES_MAX + 1, b"one more"))
    assert known(0, 2, 3, KEPT_TEMPLATES_MAX + 1) == [0, 3, KEPT_TEMPLATES_MAX + 1]


def test_large_info_in_place_of_a_worker_takes_the_place_of_the_rows_last_failure() -> None:
    session = shared()
    session.worker_sent(1, RowFailed(RAISED))
    assert session.handle(events.LostRowInfo(1, b"info")) == []
    assert session.request(Collect([0, 1])) == [Answer(Done(), rows=((1, b"info"),))]


def test_what_a_step_left_is_forgotten_with_the_next_request_of_all_envs() -> None:
    for request, left in product((Step(b"\x04"), Reset()), (RowFailed(RAISED), RowInfo(1, b"info"))):
        session = ready()
        session.worker_sent(1, left)
        session.request(request)
        session.rows_done()
        assert session.request(Collect([0, 1, 2])) == [Answer(Done())]


def test_message_about_a_step_that_was_given_up_is_dropped() -> None:
    session = ready()
    session.request(Step(b""))
    for stale in (RowInfo(0, b"old", number=1), RowFailed(RAISED, number=1)):
        fields = {"worker": 0, "message": type(stale).__name__, "of": 1}
        assert session.handle(WorkerMessage(0, stale, current=False)) == [Warn("stale_answer_dropped", fields)]
    assert not session.infos.large
    only(Answer, session.rows_done())


def test_what_the_next_process_says_before_it_serves_is_of_no_earlier_step() -> None:
    session = ready()
    session.exited(0)
    session.elapsed(1.0)
    failed = RowFailed(Failure("factory_failed", "env", "no", env_index=0, worker=0))
    assert session.handle(WorkerMessage(2, failed, current=False)) == []
    assert session.slots[0].boot_failure == failed.failure


def test_steps_wait_for_the_next_process_only_for_so_long() -> None:
    session = ready(faults=Faults(restart_wait_s=5.0))
    assert session.handle(events.RowsWaiting(0), 99.0) == []  # no worker is lost
    session.exited(0)
    session.handle(events.RowsWaiting(0), 100.0)
    session.handle(events.RowsWaiting(0), 103.0)  # the first one counts
    finished = [[each.slot for each in every(FinishSteps, session.elapsed(at))] for at in (104, 105, 106)]
    assert finished == [[], [0], []]


def test_processes_that_cannot_be_started_fail_the_make() -> None:
    session = begun()
    ends = session.handle(events.NotStarted((0, 1), "no descriptors"))
    assert "cannot be started: no descriptors" in only(Fail, ends).failure.message
    assert every(Kill, ends) == [Kill(0), Kill(1)] and End() in ends


def test_process_that_cannot_be_started_again_is_tried_later() -> None:
    session = ready()
    session.exited(0, now_s=0.0)
    session.elapsed(0.1)
    session.handle(events.NotStarted((2,), "no descriptors"), 0.1)
    assert session.slots[0].process is None and 0.1 < session.next_deadline_s() <= 0.4


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [Step(b"\x04"), Reset()])
def test_steps_are_looked_after_also_where_each_is_shorter_than_the_time_between_samples(request_: Any) -> None:
    session = ready()
    session.elapsed(1.0)
    assert session.next_deadline_s() == math.inf
    for now_s in (5.0, 5.0 + SAMPLE_S / 2):
        session.request(request_, now_s=now_s)
        assert session.next_deadline_s() == 5.0 + SAMPLE_S
        session.rows_done()


def test_process_that_cannot_build_its_envs_while_the_session_closes_is_not_told() -> None:
    session = ready()
    session.exited(0)
    session.elapsed(1.0)
    session.request(Close())
    session.worker_sent(0, RowFailed(Failure("factory_failed", "env", "no such file", env_index=0, worker=0)))
    session.exited(0)
    assert session.closed(1) == [Answer(Done()), End()]


def test_env_has_all_of_its_time_for_a_step_that_its_worker_has_not_begun() -> None:
    session = ready(faults=Faults(step_s=1.0))
    at = Progress(word=7, row=1, kind="step")
    session.request(Step(b"\x04"))
    assert session.sampled(0.0, 1.0, None, at) == []
    session.rows_done()
    session.elapsed(1.1, None, replace(at, kind=""))
    session.request(Step(b"\x04"))
    assert session.sampled(1.1, 1.4, None, at) == []


# --- any life ---------------------------------------------------------------------------------------------------------


class FakeHub:
    """Effects on fake workers and a fake client, which count what the session says.

    Its queue is the hub's: what comes of an effect is handled after those events that came before.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.now_s = 0.0
        self.alive: set[int] = set()
        self.started: set[int] = set()
        self.inbox: list[tuple[int, Any]] = []  # what workers have said and the session not yet heard
        self.queue: deque[Any] = deque()
        self.asked, self.told, self.ends = 1, 0, 0
        self.heirs = self.heirs_told = 0
        self.posted: set[int] = set()  # slots whose rows are not done
        self.parts = 0
        self.serving: dict[int, int] = {}  # which process serves a slot
        self.holds = False  # whether a client has the arena
        session.effects.listener = self.carry_out
        self.deliver(events.Made())

    @property
    def quiescent(self) -> bool:
        return not self.posted

    def deliver(self, event: Any) -> None:
        self.queue.append(event)
        while self.queue:
            self.session.handle(self.queue.popleft(), self.now_s)
        closing = self.session.phase is Phase.CLOSING  # whose time may be over when it begins
        assert closing or self.session.next_deadline_s() >= self.now_s, "a deadline that is past"

    def carry_out(self, instruction: Any) -> None:
        assert self.ends == 0, f"{instruction} after the end"
        self.hold(instruction)
        match instruction:
            case StartProcesses(processes):
                assert all(process > last for process in processes for last in self.started), "a number used twice"
                self.started.update(processes)
                self.alive.update(processes)
            case Tell(process, message):
                self.inbox += [(process, reply) for reply in self.reply_to(message)]
            case GiveArena(process):
                self.inbox.append((process, Mapped()))
            case Assign(slot, process):
                assert process in self.alive and process not in self.serving.values()
                self.serving.pop(slot, None)
            case TakeRows(slot, process, left=left):
                assert left == (process in self.alive)
                self.serving.pop(slot, None)
                self.posted.discard(slot)
            case HandOver(slot, process):
                assert process in self.alive and slot not in self.serving, "two owners of a row"
                self.serving[slot] = process
            case PostMessage() | PostStep():
                assert not self.posted and self.session.driver is Driver.HUB
                self.posted = set(self.serving)
                if not self.posted:
                    self.queue.append(events.RowsDone())
            case PostPart():
                self.parts += 1
            case TakePart(rows):
                assert rows == 1 and self.parts
                if events.PartDone((0,)) not in self.queue:
                    self.parts -= 1
                    self.queue.append(events.PartDone((0,)))
            case GiveDrive():
                assert not self.posted and not self.parts
            case TakeDrive():
                assert not self.posted
                self.parts = 0
            case AnswerAttach() | FailAttach():
                self.heirs_told += 1
            case Answer() | Fail() | AnswerPart() | FailPart():
                self.told += 1
            case Kill(process):
                self.inbox.append((process, KILLED))
            case End():
                self.ends += 1

    def hold(self, instruction: Any) -> None:
        """At most one client has the arena."""
        if isinstance(instruction, (Grant, AnswerAttach)):
            assert not self.holds, "two clients have the arena"
        if isinstance(instruction, (Grant, CloseSide)):
            self.holds = isinstance(instruction, Grant)

    def reply_to(self, message: Any) -> list[Any]:
        match message:
            case CloseEnvs():
                return [ExitCause("exited with status 0")]
            case SetAttrRows() | Serve() | TakeSlot():
                return []
            case Leave():
                return [HandedOver()]
            case Build(first_only=True):
                return [FirstBuilt(False, 1 << 20)]
            case _:
                return [built()]

    def hear(self, index: int) -> None:
        """The session hears the next of what the worker of this message has said: a channel keeps its order."""
        worker = self.inbox[index][0]
        event = self.inbox.pop(next(i for i, (number, _) in enumerate(self.inbox) if number == worker))[1]
        if worker not in self.alive:
            return
        if isinstance(event, ExitCause):
            self.alive.discard(worker)
            self.inbox = [(number, said) for number, said in self.inbox if number != worker]
            self.posted -= {slot for slot, process in self.serving.items() if process == worker}
            self.deliver(WorkerExited(worker, event))
        else:
            self.deliver(WorkerMessage(worker, event))

    def finish(self) -> None:
        """Every row is done."""
        self.posted.clear()
        self.deliver(events.RowsDone())

    def ask(self, request: Any) -> None:
        self.asked += 1
        self.deliver(events.Request(request, self.quiescent))

    def act(self, what: str, data: st.DataObject) -> None:
        state = self.session
        match what:
            case "hear" if self.inbox:
                self.hear(data.draw(st.integers(0, len(self.inbox) - 1)))
            case "move" if state.phase is Phase.MOVING:
                self.finish()
            case "ask" if not state.requests.pending_reply:
                # The protocol admits nothing but CLOSE while ATTACH waits for the envs.
                self.ask(data.draw(st.sampled_from(CLOSES if state.making else REQUESTS)))
            case "raise" if state.phase is Phase.MOVING and self.alive & {*self.serving.values()}:
                self.deliver(WorkerMessage(min(self.alive & {*self.serving.values()}), RowFailed(RAISED)))
            case "age" if self.alive & {*self.serving.values()}:
                process = data.draw(st.sampled_from(sorted(self.alive & {*self.serving.values()})))
                self.inbox.append((process, EpisodesDone()))
            case "die" if self.alive:
                self.inbox.insert(
                    0, (data.draw(st.sampled_from(sorted(self.alive))), ExitCause("was ended by SIGSEGV"))
                )
                self.hear(0)
            case "tick":
                self.now_s += data.draw(st.sampled_from([0.1, 10.0]))
                self.deliver(events.Elapsed(self.quiescent, (None,) * len(state.slots)))
            case "connect":
                self.deliver(events.SideConnected(self.quiescent))
            case "leave" if state.lane is LaneName.SHARED:
                self.deliver(events.SideClosed(self.quiescent))
            case "drive" if state.driver is Driver.CLIENT and self.serving:
                self.posted = set(self.serving)
            case "done" if state.driver is Driver.CLIENT or state.phase is Phase.READY:
                self.posted.clear()
            case "attach" if state.attachable:
                self.heirs += not self.session.takeover_pending  # the last of several is told
                self.deliver(events.Attached(self.quiescent))
            case "end":
                ends = [events.Abandoned(SHUTTING_DOWN), events.LeaseExpired()]
                ends.append(events.Draining(self.now_s + 5.0, self.now_s + 9.0, self.quiescent))
                self.deliver(data.draw(st.sampled_from(ends)))


REQUESTS = [Step(b"\x04"), Reset(), Reset([1]), Call("x", b""), SetAttr("x", [b""]), Receive(1)]
REQUESTS += [Send([0], b"\x04"), Send([0], b"\x04", 1)]
CLOSES = [Close(), Close(terminate=True)]
REQUESTS += [Collect([0]), *CLOSES]
ACTS = ["hear"] * 4 + ["move"] * 2 + ["ask"] * 2
ACTS += ["raise", "age", "die", "tick", "connect", "leave", "drive", "done", "attach", "end"]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 7), st.none() | st.integers(1, 3), st.integers(0, 2), st.booleans(), st.data())
def test_every_request_gets_one_answer_and_every_session_one_end(
    num_envs: int, workers: int | None, spares: int, made: bool, data: st.DataObject
) -> None:
    hosting = Hosting(spares=spares, recycle=Recycle(episodes=10))
    hub = FakeHub(session_of(Make(num_envs, hosting=hosting), workers))
    while made and hub.inbox:
        hub.hear(0)
    for _ in range(data.draw(st.integers(0, 60), label="events")):
        if hub.ends:
            break
        hub.act(data.draw(st.sampled_from(ACTS)), data)
        assert hub.told in (hub.asked, hub.asked - 1)
        assert hub.session.requests.pending_reply == (hub.told != hub.asked) or hub.ends
    if not hub.ends:
        hub.deliver(events.Abandoned(SHUTTING_DOWN))
    while hub.inbox:
        hub.hear(0)
    assert hub.ends == 1 and hub.session.phase is Phase.ENDED
    assert hub.told == hub.asked
    assert hub.heirs_told == hub.heirs
    assert hub.alive == set()


def test_new_envs_of_a_worker_are_given_the_attributes_that_were_set_last() -> None:
    session = ready()
    for rows, name, values in (([0, 2], "gravity", [b"1", b"3"]), ([0], "wind", [b"w"]), ([2], "gravity", [b"9"])):
        assert session.worker_sent(0, SetAttrRows(rows, name, values)) == []
    session.worker_sent(1, SetAttrRows([0, 1], "gravity", [b"2", b"2"]))  # it does not have row 0
    session.exited(0)
    instructions = session.replaced()
    assert every(Tell, instructions) == [
        Tell(2, SetAttrRows([0], "wind", [b"w"])),
        Tell(2, SetAttrRows([0, 2], "gravity", [b"1", b"9"])),
    ]
    assert only(HandOver, instructions).slot == 0


def test_attribute_without_room_is_reported() -> None:
    session = ready()
    reported = session.worker_sent(0, SetAttrRows([0], "map", [bytes(BYTES_MAX)]))
    assert reported == [Warn("attribute_not_kept", {"name": "map"})]


# --- replays of what an env was asked before it failed ----------------------------------------------------------------


def recorded(**make: Any) -> Session:
    """A session whose replays are kept."""
    session = ready(**make)
    session.launcher.rules = replace(session.launcher.rules, replays="kept")
    return session


def test_replay_is_kept_of_the_process_that_served_and_not_of_the_next_that_never_did() -> None:
    session = recorded()
    ended = session.exited(0, now_s=100.0)
    kept = only(KeepReplay, ended)
    assert (kept.slot, kept.process, kept.row, kept.trace) == (0, 0, None, b"")
    assert only(TakeRows, ended).loss.failure.replay == kept.failure.replay == "kept-worker0-1"
    session.elapsed(100.2)
    taken = only(TakeRows, session.exited(0, now_s=100.3))
    assert taken.loss.failure.replay == ""


@pytest.mark.parametrize("trace", [b"", b"its trace"])
def test_replay_of_an_env_that_raised_has_its_trace(trace: bytes) -> None:
    session = recorded()
    session.request(Step(b"\x04"))
    failure = Failure("env_raised", "env", "no", 2, 0, type="ValueError", traceback="its traceback")
    found = session.worker_sent(0, RowFailed(failure, number=5, trace=trace))
    if not trace:
        assert found == []
        return
    kept = only(KeepReplay, found)
    assert (kept.row, kept.trace) == (2, trace)
    told = kept.failure
    assert (told.cause, told.message, told.exception, told.traceback) == (
        "exception",
        "no",
        "ValueError",
        "its traceback",
    )
    assert only(Fail, session.rows_done()) == Fail(replace(failure, replay=told.replay)) and told.replay


@pytest.mark.parametrize("row", [None, 1, 9])
def test_no_replay_is_kept_of_an_env_that_is_not_the_workers(row: int | None) -> None:
    session = recorded()
    session.request(Step(b"\x04"))
    assert (
        session.worker_sent(0, RowFailed(Failure("env_raised", "env", "no", row, 0), number=5, trace=b"its trace"))
        == []
    )
    assert (
        session.worker_sent(1, RowFailed(Failure("env_raised", "env", "no", None, 1), number=5, trace=b"its trace"))
        == []
    )


# --- what is refused, told and planned --------------------------------------------------------------------------------


def test_client_does_not_drive_a_session_that_has_broken() -> None:
    session = shared(faults=Faults(restarts_max=0))
    session.request(Reset())
    found = session.exited(0)
    assert session.phase is Phase.BROKEN and session.driver is Driver.HUB
    assert not every(GiveDrive, found)


@pytest.mark.parametrize("last", [0, 1])
def test_failure_of_no_env_comes_before_those_of_envs(last: int) -> None:
    session = ready()
    session.request(Call("x", b""))
    failures = [Failure("env_raised", "env", "of env 1", env_index=1), Failure("refused", "request", "of none")]
    for number in (1 - last, last):
        session.worker_sent(number, RowFailed(failures[number]))
    assert only(Fail, session.rows_done()).failure.message == "of none"


@pytest.mark.parametrize("kind", ["init", "step", "reset"])
def test_client_that_does_not_step_is_looked_after_four_times_in_the_shortest_deadline(kind: str) -> None:
    times = {"init_s": 400.0, "step_s": 400.0, "reset_s": 400.0, f"{kind}_s": 2.0}
    session, now_s = shared(faults=Faults(**times)), 0.0
    for _ in range(20):
        now_s += 1.0
        session.elapsed(now_s)
    assert session.next_deadline_s() == now_s + 0.5


def test_envs_that_close_have_their_time_and_a_hub_that_shuts_down_gives_them_no_more() -> None:
    session = ready(faults=Faults(close_s=5.0))
    session.request(Close())
    assert not every(Kill, session.elapsed(4.9)) and session.next_deadline_s() == 5.0
    session.handle(events.Draining(100.0, 200.0, quiescent=True))
    assert session.next_deadline_s() == 5.0
    session.handle(events.Draining(2.0, 3.0, quiescent=True))
    assert session.next_deadline_s() == 3.0


# --- workers that are made ahead, and take the place of others ------------------------------------------------------

SPARES = {"hosting": Hosting(spares=1)}


def spared(num_envs: int = 3, workers: int = 2, **make: Any) -> Session:
    """A session with its spares, which have made their envs."""
    session = ready(num_envs, workers, **{**SPARES, **make})
    for number in session.slots.spares:
        assert session.worker_sent(number, built()) == []
    return session


def places(instructions: list[Effect]) -> list[tuple[int, list[int]]]:
    """The workers that spares are made as, with their rows."""
    told = (each.message for each in instructions if isinstance(each, Tell))
    return [(message.worker, message.rows) for message in told if isinstance(message, Build)]


def test_spare_takes_the_place_of_a_worker_that_ends_and_another_one_is_made() -> None:
    session = spared()
    ended = session.exited(1, now_s=5.0)
    assert only(TakeRows, ended).slot == 1 and Assign(1, 2) in ended
    given, placed = only(GiveArena, ended), only_tell(TakeSlot, ended)
    assert (given.process, given.slot, placed.process) == (2, 1, 2)
    assert (placed.message.worker, placed.message.rows) == (1, [1])
    assert StartProcesses((3,), spare=True) in ended and only_tell(Build, ended).process == 3
    handed = only(HandOver, session.worker_sent(1, Mapped(), now_s=5.0))
    assert (handed.slot, handed.process) == (1, 2)
    assert session.restarts == 1 and list(session.slots.spares) == [3]
    assert session.elapsed(60.0) == []  # no other process is started for the worker


def test_process_that_is_started_for_a_lost_worker_becomes_the_spare_if_a_spare_is_ready_first() -> None:
    session = ready(**SPARES)
    assert len(session.exited(0)) == 1  # the spare is still being made
    session.elapsed(0.2)
    session.worker_sent(0, Building(1))
    swapped = session.worker_sent(2, built())
    assert Assign(0, 2) in swapped and only_tell(TakeSlot, swapped) and only(GiveArena, swapped)
    assert session.slots.spares[3].stage is Stage.BUILDING and session.slots.spares[3].built == 1
    only(HandOver, session.worker_sent(0, Mapped()))
    assert session.worker_sent(3, built()) == [] and session.slots.spares[3].stage is Stage.BUILT


def test_spares_of_devices_are_made_for_each_device() -> None:
    session = ready(4, 4, hosting=Hosting(spares=2, gpus=[5, 6]))
    assert {spare.slot_index for spare in session.slots.spares.values()} == {0, 1}
    numbers = {spare.slot_index: number for number, spare in session.slots.spares.items()}
    for number in session.slots.spares:
        session.worker_sent(number, built())
    assert Assign(3, numbers[1]) in session.exited(3)
    assert Assign(2, numbers[0]) in session.exited(2)


@pytest.mark.parametrize("make", [{"kwargs_each": [b"0", b"1", b"2"]}, {"factories": b"three"}])
def test_spare_of_envs_that_differ_is_for_one_worker_first_for_that_which_ended_most_often(make: Any) -> None:
    session = spared(3, 3, **make)
    assert session.slots.spares[3].slot_index == 0
    assert len(session.exited(1)) == 1
    ended = session.exited(0)
    assert StartProcesses((4,), spare=True) in ended and places(ended) == [(0, [0])]
    assert Assign(1, 3) in spared(3, 3, factories=b"three", alike=True).exited(1)


def test_spare_that_ends_is_made_again_later_each_time() -> None:
    session = ready(**SPARES)
    now_s = 0.0
    for retry_s in (SPARE_RETRY_S, 2 * SPARE_RETRY_S, 4 * SPARE_RETRY_S):
        (number,) = session.slots.spares
        assert session.worker_sent(number, RowFailed(RAISED)) == []
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
    session.worker_sent(number, built(), now_s=now_s)
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
    assert session.slots.spares[2].killed_for is not None and session.worker_sent(2, built(), now_s=1.2) == []
    assert len(session.exited(0, now_s=1.2)) == 1


def test_broken_session_keeps_no_spares() -> None:
    session = spared(faults=Faults(restarts_max=0))
    assert Kill(2) in session.exited(0) and session.phase is Phase.BROKEN
    assert session.exited(2) == []


def test_process_that_hangs_is_ended_and_not_the_spare_that_has_its_place_now() -> None:
    session = ready(faults=Faults(init_s=1.0), **SPARES)
    session.exited(0)
    session.elapsed(0.2)
    session.sampled(0.2, 1.0)
    session.worker_sent(2, Building(1))  # so that only the lost worker's process hangs
    session.sampled(1.0, 1.4)
    assert session.slots[0].process.killed_for is not None
    assert Assign(0, 2) in session.worker_sent(2, built(), now_s=1.5)
    session.worker_sent(0, Mapped(), now_s=1.5)
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
    told = session.worker_sent(number, built(), now_s)
    assert Tell(leaving, Leave(cut)) in told
    instructions = session.worker_sent(worker, HandedOver(), now_s)
    assert only_tell(CloseEnvs, instructions).process == leaving
    assert only(Assign, instructions) == Assign(worker, number)
    given = only(GiveArena, instructions)
    assert (given.process, given.slot) == (number, worker)
    return [*told, *instructions, *session.worker_sent(worker, Mapped(), now_s)]


def test_spare_takes_over_without_a_restart_and_the_worker_ends() -> None:
    session = ready(**WORN)
    begun = session.worker_sent(1, EpisodesDone())
    assert StartProcesses((2,), spare=True) in begun and places(begun) == [(1, [1])]
    swapped = recycled(session, 1, 2, now_s=7.0)
    taken = only(TakeRows, swapped)
    assert (taken.slot, taken.process, taken.left) == (1, 1, True)
    handed = only(HandOver, swapped)
    assert (handed.slot, handed.process, handed.replaced) == (1, 2, 1)
    told = codec.decode(handed.message.info)["env_failure"]  # for a row that was cut
    assert (told["cause"], told["message"]) == ("recycle", "worker 1 (env 1) was recycled")
    assert session.restarts == 0 and session.recycled == 1 and session.expects_end(1)
    assert session.closed(1, now_s=7.1) == [] and not session.slots.spares
    assert session.next_deadline_s() == math.inf and len(session.worker_sent(0, EpisodesDone(), now_s=7.2)) == 2
    assert session.phase is Phase.READY and session.slots[1].serves_since_s == 7.0


def test_worker_that_is_too_old_is_recycled() -> None:
    session = ready(hosting=Hosting(recycle=Recycle(age_s=30.0)))
    assert session.next_deadline_s() == 30.0
    assert session.elapsed(29.0) == []
    assert StartProcesses((2,), spare=True) in session.elapsed(30.0)
    session.worker_sent(2, built(), now_s=31.0)
    session.worker_sent(0, HandedOver(), now_s=31.0)
    session.worker_sent(0, Mapped(), now_s=31.0)
    assert session.slots[0].serves_since_s == 31.0 and session.slots[1].needs_recycling


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
    session.worker_sent(0, EpisodesDone())
    recycled(session, 0, 2, cut=cut)


def test_worker_that_ends_before_it_left_is_lost_and_the_spare_serves() -> None:
    session = ready(**WORN)
    session.worker_sent(1, EpisodesDone())
    session.worker_sent(2, built())
    ended = session.exited(1)
    assert only(Assign, ended) == Assign(1, 2) and not only(TakeRows, ended).left
    assert only(HandOver, session.worker_sent(1, Mapped())).message.info == only(TakeRows, ended).loss.info
    assert session.restarts == 1 and session.recycled == 0 and session.elapsed(60.0) == []


def test_worker_that_is_due_while_another_leaves_has_a_spare_made() -> None:
    session = ready(**WORN)
    session.worker_sent(0, EpisodesDone())
    session.worker_sent(2, built())
    begun = session.worker_sent(1, EpisodesDone())
    assert StartProcesses((3,), spare=True) in begun and places(begun) == [(1, [1])]
    assert session.worker_sent(3, built()) == [Tell(1, Leave())]


def test_spare_that_is_ready_before_the_next_process_of_a_lost_worker_leaves_no_spare_behind() -> None:
    session = ready(**WORN)
    session.worker_sent(1, EpisodesDone())
    session.exited(1)
    session.elapsed(0.2)
    swapped = session.worker_sent(2, built())
    assert only(Kill, swapped) == Kill(3) and Assign(1, 2) in swapped
    assert session.ended(3) == [] and not session.slots.spares


def test_worker_that_left_when_the_spare_had_ended_gets_another_process_at_once() -> None:
    session = ready(**WORN)
    session.worker_sent(1, EpisodesDone())
    session.worker_sent(2, built())
    session.exited(2)
    left = session.worker_sent(1, HandedOver())
    assert StartProcesses((3,)) in left and session.slots[1].loss is not None
    session.worker_sent(1, built())
    assert only(HandOver, session.worker_sent(1, Mapped())).process == 3 and session.restarts == 0


def test_worker_that_left_and_does_not_close_in_time_is_ended() -> None:
    session = ready(faults=Faults(close_s=2.0), **WORN)
    session.worker_sent(1, EpisodesDone())
    recycled(session, 1, 2, now_s=1.0)
    assert session.elapsed(2.9) == []
    assert session.elapsed(3.0) == [Kill(1)]
    cut = "env 1 ended before close was over: each env has close_timeout=2 s"
    assert session.ended(1) == [Notify("envs_cut_short", cut)] and session.restarts == 0


def test_worker_that_left_closes_its_envs_also_when_its_session_breaks_and_closes() -> None:
    session = ready(faults=Faults(restarts_max=0), **WORN)
    session.worker_sent(1, EpisodesDone())
    recycled(session, 1, 2)
    assert not every(Kill, session.exited(0)) and session.phase is Phase.BROKEN
    session.closes(1, 1, now_s=50.0)
    assert session.next_deadline_s() == 110.0
    assert session.request(Close(), now_s=60.0) == [Tell(2, CloseEnvs())]
    assert session.closed(1) == [] and every(End, session.closed(2))


def test_spare_whose_envs_are_made_when_the_session_is_over_takes_no_place() -> None:
    session = ready(**WORN)
    session.worker_sent(1, EpisodesDone())
    session.request(Close())
    assert session.worker_sent(2, built()) == []
    session = ready(hosting=Hosting(spares=1), faults=Faults(restarts_max=0))
    session.exited(1)
    assert session.phase is Phase.BROKEN and session.worker_sent(2, built()) == []


def test_worker_is_not_recycled_before_its_predecessor_has_ended() -> None:
    session = ready(**WORN)
    session.worker_sent(1, EpisodesDone())
    recycled(session, 1, 2)
    assert session.worker_sent(1, EpisodesDone()) == []
    begun = session.ended(1)
    assert StartProcesses((3,), spare=True) in begun and places(begun) == [(1, [1])]


def test_spare_that_fails_again_and_again_is_tried_once_a_minute() -> None:
    session = ready(**SPARES)
    session.replacement.spares.failed = 5000
    session.exited(2, now_s=100.0)
    assert session.next_deadline_s() == 100.0 + SPARE_RETRY_MAX_S


# --- restarts that somebody orders ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["truncate", "raise"])
def test_ordered_restart_is_a_truncation_and_takes_nothing_of_the_budget(policy: str) -> None:
    session = ready(faults=Faults(restarts_max=0, on_crash=policy))
    for count in range(1, 4):
        order = events.RestartOrdered(2, "was restarted by root: a leak")
        assert session.handle(order, now_s=count) == [Kill(session.number(0))]
        taken = only(TakeRows, session.exited(0, now_s=count))
        told = env_failure(taken.loss)
        assert (told["cause"], told["message"]) == ("restart", "worker 0 (envs 0, 2) was restarted by root: a leak")
        assert not taken.loss.raises and session.slots[0].restart_at_s == count
        session.replaced(0, now_s=count)
    assert (session.restarts, session.recycled) == (0, 3)


def test_worker_that_waits_for_its_restart_is_started_at_once() -> None:
    session = ready()
    session.exited(0)
    assert session.handle(events.RestartOrdered(0, "was restarted by root"), now_s=0.01) == []
    assert session.slots[0].restart_at_s == 0.01


def test_session_that_does_not_serve_restarts_nothing() -> None:
    assert begun().handle(events.RestartOrdered(0, "was restarted by root")) == []
