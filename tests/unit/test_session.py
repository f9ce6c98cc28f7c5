from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from envhub_server.catalog.registry import EnvSettings, Recipe
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.ipc.control import (
    Build,
    BuildRest,
    CloseEnvs,
    Closing,
    FirstBuilt,
    Imported,
    Mapped,
    RowFailed,
    RowInfo,
    Serve,
    SharedChanged,
)
from envhub_server.processes.worker_handle import ExitCause, WorkerMessage
from envhub_server.session import state
from envhub_server.session.building import crowded_text
from envhub_server.session.launcher import Machine, WorkerCount, WorkerRules
from envhub_server.session.slots import Late, Progress, Stage
from envhub_server.session.state import HANDLERS, TRANSITIONS, Driver, IllegalEvent, LaneName, Phase
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import (
    EFFECTS,
    Answer,
    AnswerAttach,
    AnswerPart,
    CloseSide,
    End,
    EndRecall,
    Fail,
    FailAttach,
    FailPart,
    ForkZygote,
    GiveArena,
    GiveDrive,
    Goodbye,
    Grant,
    HandOver,
    KeepWaiting,
    Kill,
    Learn,
    Notify,
    PostMessage,
    PostPart,
    PostStep,
    Recall,
    RefuseSide,
    ReportClosing,
    ReportLate,
    StartProcesses,
    TakeDrive,
    TakePart,
    TakeRows,
    Tell,
    Transfer,
    WindUp,
    events,
)
from sessions import (
    ACTION,
    INFO_BYTES,
    KILLED,
    MACHINE,
    OBSERVATION,
    RAISED,
    RECIPE,
    SHUTTING_DOWN,
    WIDER,
    Session,
    begun,
    built,
    every,
    only,
    only_tell,
    ready,
    restarts,
    session_of,
    shared,
)

from envhub.arena.layout import whole_workers_text
from envhub.arena.memory import FIRST_CALL
from envhub.arena.spin import SPIN_US
from envhub.protocol import messages
from envhub.protocol.hub import FIRST_OPS
from envhub.protocol.messages import (
    SESSION_OPS,
    Call,
    Close,
    Collect,
    Done,
    EnvNames,
    Failure,
    Faults,
    Hosting,
    Made,
    Make,
    ProgramEnvironment,
    Receive,
    Reset,
    Send,
    SetAttr,
    Step,
    Templates,
    TemplatesRequest,
)
from envhub.values import codec
from envhub.values.leaf import ANYTHING, LEAVES_MAX, OBJECT

DRAINING = events.Draining(by_s=10.0, end_by_s=20.0, quiescent=True)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 400))
def test_blocks_hold_every_env_once_in_turn_and_differ_by_at_most_one(num_envs: int, workers: int) -> None:
    blocks = [worker.rows for worker in session_of(Make(num_envs), workers).slots]
    assert all(row % len(blocks) == number for number, block in enumerate(blocks) for row in block)
    assert sorted(row for block in blocks for row in block) == list(range(num_envs))
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert len(blocks) == max(1, min(workers, num_envs))


# --- a process of which not all envs are known to share one -----------------------------------------------------------


def test_envs_that_are_not_all_known_to_share_a_process_well_get_one_each() -> None:
    session = begun()
    started = session.worker_sent(0, replace(built(), may_share_process=False))
    assert Kill(0) in started and Kill(1) in started and StartProcesses((2,)) in started
    assert [worker.rows for worker in session.slots] == [[0], [1], [2]]
    for number in range(2):
        assert session.worker_sent(number, built()) == []  # of the envs that it made before
        again = session.exited(number)
        assert StartProcesses((session.number(number),)) in again and only_tell(Build, again).message.rows == [number]
    for number in range(3):
        assert session.phase is Phase.BUILDING
        session.worker_sent(number, built())
    answer = only(Answer, [session.worker_sent(number, Mapped()) for number in range(3)][-1])
    assert answer.message.num_workers == 3 and "not all of its envs are known" in answer.message.sizing
    assert (
        begun(hosting=messages.Hosting(shares_process=True)).worker_sent(0, replace(built(), may_share_process=False))
        == []
    )


UNTOLD = WorkerCount(2, "as the test wants it")
VECTOR = Recipe("CartPole-v1", settings=EnvSettings(vector=True))


def making(sizing: WorkerCount = UNTOLD, machine: Machine = MACHINE, recipe: Recipe = RECIPE, **rules: Any) -> Session:
    """A session of three envs whose workers are building."""
    session = Session(Make(3, "CartPole-v1"), recipe, sizing, INFO_BYTES, machine, restarts(), WorkerRules(**rules))
    session.handle(events.Made())
    return session


@pytest.mark.parametrize(
    "made",
    [
        {"sizing": replace(UNTOLD, chosen=True)},
        {"sizing": replace(UNTOLD, crowded=True)},
        {"machine": Machine((0,), 1, workers_max=2)},
        {"recipe": VECTOR},
    ],
    ids=["told", "crowded", "no room", "vector env"],
)
def test_envs_that_cannot_have_a_process_each_stay_where_they_are(made: dict[str, Any]) -> None:
    assert not every(Kill, making(**made).worker_sent(0, replace(built(), may_share_process=False)))


@pytest.mark.parametrize("are_made", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_env_that_cannot_be_made_fails_the_session(are_made: bool, raises: bool) -> None:
    session, second = making(), Failure("factory_failed", "env", "only one per process", env_index=2, worker=0)
    for worker in (0, 1) if are_made else ():
        session.worker_sent(worker, built())
    ended = ExitCause("exited with status 3")
    found = session.worker_sent(0, RowFailed(second)) if raises else session.exited(0, ended)
    assert isinstance(found[0], Fail) and session.phase is Phase.CLOSING


def test_client_is_told_once_what_envs_change_that_their_process_shares() -> None:
    session = ready()
    told = only(Notify, session.worker_sent(0, SharedChanged(["os.environ", "a bad word"])))
    assert "change os.environ, which all envs of a process" in told.text
    assert session.worker_sent(1, SharedChanged(["os.environ"])) == []
    assert ready().worker_sent(0, SharedChanged(["nothing that is shared"])) == []


# --- how many workers -------------------------------------------------------------------------------------------------

FIT, UNKNOWN = FirstBuilt(True, 1 << 20), FirstBuilt(False, 1 << 20)


def undecided(num_envs: int = 16) -> Session:
    """A session whose first envs are being made, to decide how many workers it gets."""
    make = Make(num_envs, "Ant-v5", pin=True)
    session = Session(make, RECIPE, None, INFO_BYTES, MACHINE, restarts())
    begun = session.handle(events.Made())
    assert StartProcesses((0, 1, 2, 3)) in begun and len(every(Tell, begun)) == 4  # one for each CPU
    for cpu, build in enumerate(every(Tell, begun)):
        assert build.message.first_only
        assert (build.message.rows[0], build.message.cpu) == (cpu, cpu)
    return session


@pytest.mark.parametrize(
    ("first", "workers", "why"),
    [
        ([FIT] * 4, 4, "known to share a process well"),
        ([UNKNOWN] * 4, 16, "nothing is known of this env"),
        ([FIT, UNKNOWN, FIT, FIT], 16, "nothing is known of this env"),
    ],
)
def test_first_envs_decide_how_many_workers_make_the_others(first: list[FirstBuilt], workers: int, why: str) -> None:
    session = undecided()
    for worker in (0, 1, 2):
        assert session.worker_sent(worker, first[worker]) == []
    started = [StartProcesses(tuple(range(4, workers)))] if workers > 4 else []
    rest = [Tell(worker, BuildRest(list(range(worker, 16, workers)))) for worker in range(4)]
    instructions = session.worker_sent(3, first[3])
    assert every(StartProcesses, instructions) == started
    assert [each for each in instructions if each in rest] == rest
    builds = [each.message for each in every(Tell, instructions) if isinstance(each.message, Build)]
    assert [(build.rows, build.first_only) for build in builds] == [([row], False) for row in range(4, workers)]
    for worker in range(workers):
        assert session.phase is Phase.BUILDING
        session.worker_sent(worker, built())
    answer = only(Answer, [session.worker_sent(worker, Mapped()) for worker in range(workers)][-1])
    assert answer.message.num_workers == workers and why in answer.message.sizing


def test_workers_that_make_the_other_envs_once_the_number_is_decided_have_their_time_for_it() -> None:
    session = undecided()
    for worker in range(4):
        session.worker_sent(worker, FIT)
    limit_s = session.make.faults.init_s
    late = every(ReportLate, session.sampled(0.0, limit_s + 1.0))
    assert [(each.process, each.late.row) for each in late if each.late.expired] == [(n, n + 4) for n in range(4)]


@pytest.mark.parametrize("known", [False, True])
def test_client_is_told_that_its_envs_share_processes_for_want_of_room(known: bool) -> None:
    machine = replace(MACHINE, workers_max=5)
    sizing = WorkerCount(5, "as the test wants it", crowded=True) if known else None
    session = Session(Make(16), RECIPE, sizing, INFO_BYTES, machine, restarts())
    notified = session.handle(events.Made())
    if not known:
        notified = [session.worker_sent(worker, UNKNOWN) for worker in range(4)][-1]
    assert every(Notify, notified) == [Notify("processes_shared", crowded_text(16, 5))]


def test_session_may_come_to_have_a_process_for_each_env_until_the_first_are_made_but_no_more_than_it_may() -> None:
    for num_envs, processes in ((16, 16), (300, 64)):
        machine = replace(MACHINE, workers_max=64)
        session = Session(Make(num_envs), RECIPE, None, INFO_BYTES, machine, restarts())
        assert session.processes == processes
    assert sized(2).processes == 16 and sized(2, chosen=True).processes == 2  # which may need one each, or must not
    assert ready().processes == 2


def learned(session: Session) -> bool:
    """Whether later sessions share imports, once all of those that are still to be made are made."""
    for message in (built(), Mapped()):
        for worker, slot in enumerate(session.slots):
            if slot.stage in (Stage.BUILDING, Stage.MAPPING):
                instructions = session.worker_sent(worker, message)
    return only(Learn, instructions).shares_imports


def sharing(gpus: Sequence[int] = (), **of_make: Any) -> Session:
    """A session of 16 envs with 16 workers, which may share imports, as it begins to make its envs."""
    make = Make(16, **of_make)
    count, rules = WorkerCount(16, "told", True), WorkerRules(shares_imports=True, hosting=Hosting(gpus=list(gpus)))
    return Session(make, RECIPE, count, INFO_BYTES, MACHINE, restarts(), rules)


@pytest.mark.parametrize("shareable", [False, True])
def test_other_workers_start_once_the_first_has_imported_what_they_are_to_have(shareable: bool) -> None:
    session = sharing()
    begun = session.handle(events.Made())
    assert StartProcesses((0,)) in begun and only_tell(Build, begun).message.says_imported
    forked, started, *told = (
        session.worker_sent(0, Imported(shareable)) if shareable else [None, *session.worker_sent(0, Imported())]
    )
    assert forked == (ForkZygote(0, ()) if shareable else None)
    assert started == StartProcesses(tuple(range(1, 16)), shares_imports=shareable)
    assert [build.process for build in every(Tell, told)] == [*range(1, 16)]
    assert not any(build.message.says_imported for build in every(Tell, told))
    assert session.worker_sent(0, Imported(True)) == []
    assert learned(session)
    session.exited(1)
    assert every(StartProcesses, session.elapsed(60.0)) == [StartProcesses((16,), shares_imports=shareable)]


@pytest.mark.parametrize("own", [{"gpus": [0]}, {"worker_setup": "sims:set_up"}, {"worker_setup_code": b"pickled"}])
def test_workers_whose_imports_may_differ_start_at_once(own: dict[str, Any]) -> None:
    instructions = sharing(**own).handle(events.Made())
    assert StartProcesses(tuple(range(16))) in instructions
    assert not any(build.message.says_imported for build in every(Tell, instructions))


@pytest.mark.parametrize("late", [False, True])
def test_worker_that_ends_with_the_imports_of_another_makes_its_envs_without(late: bool) -> None:
    session = sharing()
    session.handle(events.Made())
    session.worker_sent(0, Imported(True))
    if late:  # which it may be by itself
        session.slots[1].process.killed_for = Late("init", 1, 61.0, 60.0)
        assert every(Fail, session.exited(1)) and session.phase is Phase.CLOSING
        return
    again = session.exited(1)
    assert StartProcesses((16,)) in again and only_tell(Build, again).process == 16
    assert not learned(session)  # later sessions do without from the start


def test_progress_counts_the_first_envs() -> None:
    session = undecided()
    session.worker_sent(2, UNKNOWN)
    assert (session.progress.built, session.progress.num_envs) == (1, 16)


def test_session_whose_interpreter_cannot_be_used_is_not_made() -> None:
    ends = begun().exited(0, replace(KILLED, unready="it lacks numpy"))
    assert Fail(Failure("env_unready", "hub", "'CartPole-v1' is not ready: it lacks numpy")) in ends
    assert every(Kill, ends) == [Kill(1)]
    only(TakeRows, ready().exited(0, replace(KILLED, unready="it lacks numpy")))  # it has made its envs before


def test_session_whose_envs_have_no_place_in_shared_memory_is_not_made() -> None:
    session = begun(1, 1)
    ends = session.worker_sent(0, replace(built(), observation_leaves=[["<f4", []]] * (LEAVES_MAX + 1)))
    failure = only(Fail, ends).failure
    assert failure.code == "limit" and every(Kill, ends) == [Kill(0)]
    assert "have no place in shared memory: an observation space of 1001 leaves" in failure.message


def sized(workers: int, chosen: bool = False, factories: bytes = b"", **rules: Any) -> Session:
    """A session of 16 envs that has so many workers, which make their envs."""
    sizing = WorkerCount(workers, "as the test wants it", chosen)
    make = Make(16, factories=factories)
    session = Session(make, RECIPE, sizing, INFO_BYTES, MACHINE, restarts(), WorkerRules(**rules))
    session.handle(events.Made())
    return session


# --- making -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "wanted_us", "worker_us", "driver_us"),
    [(3, None, SPIN_US, SPIN_US), (4, None, SPIN_US, 0), (5, None, 0, 0), (5, 7, 7, 7), (3, 0, 0, 0)],
)
def test_who_spins_follows_from_the_numbers_of_workers_and_cpus(
    workers: int, wanted_us: int | None, worker_us: int, driver_us: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envhub.arena.spin.HAS_FENCE", True)
    sizing = WorkerCount(workers, "as the test wants it")
    make = Make(8, "CartPole-v1", spin_us=wanted_us)
    session = Session(make, RECIPE, sizing, INFO_BYTES, Machine((0, 1, 2, 3), 4), restarts())
    assert (session.building.worker_spin_us, session.building.driver_spin_us) == (worker_us, driver_us)


def test_only_workers_of_a_private_hub_may_unpickle() -> None:
    program_environment = ProgramEnvironment(["/x"], "/", {}, b"r")
    private = only_tell(Build, session_of(Make(1, program_environment=program_environment), 1).handle(events.Made()))
    public = only_tell(Build, session_of(Make(1), 1).handle(events.Made()))
    assert private.message.allow_pickle and private.message.sys_path == ["/x"]
    assert not public.message.allow_pickle and public.message.sys_path == []


def test_make_is_answered_when_the_last_worker_has_mapped() -> None:
    session = begun()
    session.worker_sent(0, built())
    session.worker_sent(1, built())
    assert session.worker_sent(1, Mapped()) == []
    made = Made(3, 2, [OBSERVATION], ACTION, b"meta", "rgb_array", "{}", sizing="as the test wants it", window=4)
    handed_over = [HandOver(0, 0, Serve(), 0), HandOver(1, 1, Serve(), 0)]
    assert session.worker_sent(0, Mapped()) == [*handed_over, Learn(False), Answer(made)]
    assert session.phase is Phase.READY and not session.requests.pending_reply


def test_spaces_of_every_env_are_told_where_they_may_differ() -> None:
    session = begun(observation_mode="different")
    session.worker_sent(0, built(OBSERVATION, OBSERVATION))
    session.worker_sent(1, built(WIDER))
    session.worker_sent(0, Mapped())
    answer = only(Answer, session.worker_sent(1, Mapped()))
    assert answer.message.observation_spaces == [OBSERVATION, WIDER, OBSERVATION]


@pytest.mark.parametrize("mode", ["any", "first"])
def test_actions_of_different_structures_are_objects_where_any_are_taken(mode: str) -> None:
    session = begun(observation_mode=mode)
    own, other = ("Tuple", "Dict") if mode == "any" else ("", "")
    session.worker_sent(0, replace(built(), action_structure=own))
    given = session.worker_sent(1, replace(built(), action_structure=other))
    message = every(GiveArena, given)[0].message
    as_told = ([OBJECT.wire()], codec.encode(ANYTHING)) if mode == "any" else ([["<i8", []]], ACTION)
    assert (message.action_leaves, message.action_space) == as_told
    session.worker_sent(0, Mapped())
    answer = only(Answer, session.worker_sent(1, Mapped()))
    assert answer.message.action_space == as_told[1]


def test_arena_that_cannot_be_had_fails_the_make() -> None:
    session = begun(1, 1)
    session.worker_sent(0, built())
    limit = Failure("limit", "hub", "no memory left")
    assert session.handle(events.ArenaRefused("no memory left")) == [Fail(limit), Kill(0)]


def test_failures_of_memory_and_rows_are_nothing_to_a_session_that_closes() -> None:
    session = begun(1, 1)
    session.worker_sent(0, built())
    session.handle(events.Abandoned(SHUTTING_DOWN))
    assert session.handle(events.ArenaRefused("no memory left")) == []
    assert session.handle(events.LostRowFailed(RAISED)) == [] and session.requests.failure is None


@pytest.mark.parametrize("mapping", [False, True])
def test_worker_that_dies_while_making_fails_the_make(mapping: bool) -> None:
    session = begun()
    if mapping:
        session.worker_sent(0, built())
        session.worker_sent(1, built())
    ends = session.exited(1, ExitCause("was ended by SIGSEGV"))
    failure = only(Fail, ends).failure
    assert failure.code == "worker_died" and "SIGSEGV" in failure.message
    assert only(Kill, ends) == Kill(0)
    assert session.exited(0, ExitCause("was ended by SIGKILL")) == [End()]


def test_message_that_no_worker_should_send_ends_the_session() -> None:
    session = ready()
    assert session.worker_sent(0, EnvNames([])) == [Kill(0), Kill(1)]
    assert session.phase is Phase.CLOSING
    session = ready()
    session.request(Close())
    assert session.worker_sent(0, EnvNames([])) == [] and session.requests.pending_reply


@pytest.mark.parametrize(
    "reset", [Reset([1]), Reset([1, 2, 3, 4]), Reset(mask=[True]), Reset(mask=[False] * 3), Reset(mask=[True] * 4)]
)
def test_reset_that_does_not_fit_is_refused_and_nothing_moves(reset: Reset) -> None:
    session = ready()
    fail = only(Fail, session.request(reset))
    assert (fail.failure.code, fail.failure.scope) == ("refused", "request")
    assert session.phase is Phase.READY and not session.requests.pending_reply
    assert session.request(Step(b"\x04")) == [PostStep()]


# --- step -------------------------------------------------------------------------------------------------------------


def test_of_several_exceptions_the_first_envs_is_told() -> None:
    for rows in ((2, 0, 3), (1, 3)):
        session = ready(4, 4)
        session.request(Step(b"\x04"))
        failures = {row: Failure("env_raised", "env", "no", env_index=row, worker=row) for row in rows}
        for row, failure in failures.items():
            session.worker_sent(row, RowFailed(failure))
        assert session.rows_done() == [Fail(failures[min(rows)])]


def test_info_that_a_worker_sent_is_kept_with_the_number_of_its_request() -> None:
    session = shared()
    session.worker_sent(0, RowInfo(0, b"a frame", number=7))
    session.handle(events.LostRowInfo(2, b"of an ended worker"))  # which belongs to the last request in any case
    assert session.infos.numbers == {0: 7} and session.infos.take(0) == b"a frame"
    assert session.infos.numbers == {} and session.infos.large == {2: b"of an ended worker"}


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [Reset(), Call("render", b"args", rows=[0]), SetAttr("gravity", [b"1"])])
def test_request_with_a_message_is_posted_and_answered_when_its_rows_are_done(request_: Any) -> None:
    session = ready()
    assert session.request(request_) == [PostMessage()] and session.phase is Phase.MOVING
    assert session.rows_done() == [Answer(Done(), arrays=True)] and session.phase is Phase.READY


@pytest.mark.parametrize("rows", [[3], [1, 0], [1, 1]])
def test_rows_of_a_call_ascend_and_exist(rows: list[int]) -> None:
    session = ready()
    for request_ in (Call("render", b"", rows=rows), SetAttr("gravity", [b"1"], rows=rows)):
        failed = only(Fail, session.request(request_))
        assert "must ascend, and be less than 3" in failed.failure.message
    assert session.request(Step(b"\x04")) == [PostStep()]


def test_class_that_a_question_names_may_have_any_name() -> None:
    session = ready(program_environment=None)
    failed = only(Fail, session.request(Call("_secret", b"", question="exists")))
    assert failed.failure.code == "not_permitted"
    assert session.request(Call("__main__:Mine", b"", question="wrapped")) == [PostMessage()]


def test_options_each_are_those_of_all_envs() -> None:
    failed = only(Fail, ready().request(Reset(options_each=[b"a"])))
    assert "the options of 3 envs, got 1" in failed.failure.message


@pytest.mark.parametrize("count", [0, 2, 4])
def test_values_of_another_number_are_refused_and_nothing_is_set(count: int) -> None:
    session = ready()
    fail = only(Fail, session.request(SetAttr("gravity", [b"1"] * count)))
    assert fail.failure.code == "refused" and f"got {count}" in fail.failure.message
    assert session.phase is Phase.READY


@pytest.mark.parametrize(
    "request_", [Call("__setstate__", b""), Call("_x", b"", only_kind=True), SetAttr("_x", [b"1"])]
)
def test_private_names_are_refused_on_the_network_only(request_: Any) -> None:
    session = ready()
    fail = only(Fail, session.request(request_))
    assert fail.failure.code == "not_permitted" and session.phase is Phase.READY
    private = ready(program_environment=ProgramEnvironment([], "/", {}))
    assert private.request(request_) == [PostMessage()]


# --- closing ----------------------------------------------------------------------------------------------------------


def test_exception_in_close_is_told_and_the_session_ends_all_the_same() -> None:
    session = ready(2, 1)
    session.request(Close())
    session.worker_sent(0, RowFailed(RAISED))
    assert session.closed(0) == [Fail(RAISED), End()]


def test_workers_that_do_not_close_in_time_are_killed() -> None:
    session = ready()
    session.request(Close())
    session.closed(0)
    session.elapsed(5.0)
    assert session.next_deadline_s() == session.make.faults.close_s
    cut = Notify("envs_cut_short", "env 1 ended before close was over: each env has close_timeout=60 s")
    assert session.elapsed(60.0) == [Kill(1), cut, Answer(Done())]  # which may never end
    assert session.next_deadline_s() == math.inf and session.elapsed(120.0) == []
    assert session.exited(1) == [End()]
    assert session.next_deadline_s() == math.inf


@pytest.mark.parametrize("again", [[], [1], [3]])
def test_each_env_has_its_own_time_to_close_once(again: list[int]) -> None:
    session = ready(4, 1, faults=Faults(close_s=10.0), row_offset=40)
    session.request(Close())
    session.closes(0, 0, now_s=9.0)
    for now_s, rows, due_s in ((18.0, [1, 2], 38.0), (37.0, [3], 47.0)):
        assert not every(Kill, session.elapsed(now_s))
        session.closes(0, *rows, now_s=now_s)
        assert session.next_deadline_s() == due_s
    if again:  # whatever its envs have written on its channel
        session.closes(0, *again, now_s=46.0)
    ends = session.elapsed(47.0)
    assert only(Kill, ends) and [each.text[:6] for each in every(Notify, ends)] == ([] if again else ["env 43"])


def test_env_that_is_at_work_when_its_session_closes_has_a_second() -> None:
    session, progress = ready(), Progress(5, 0, "call")
    session.request(Call("x", b""))
    session.request(Close(), quiescent=False)
    session.closes(1, 1)
    assert session.elapsed(1.0, progress, Progress(7, 1, ""), quiescent=False) == [Kill(0)]
    session.exited(0)
    ends = session.closed(1)
    why = "an env was still at its step, reset or call after 1 s"
    cut = Notify("envs_cut_short", f"envs 0, 2 ended before close was over: {why}")
    assert ends == [cut, Answer(Done()), End()]


def test_client_is_told_which_envs_are_slow_to_close() -> None:
    session = ready()
    session.request(Close())
    session.closed(1)
    session.handle(WorkerMessage(0, Closing([2])))
    assert session.elapsed(4.0) == [ReportLate(0, Late("close", 2, 4.0, 60.0))]
    assert session.elapsed(5.0) == [ReportClosing(((0, (2,)),))]


@pytest.mark.parametrize("asked", [False, True])
def test_envs_that_are_cut_short_are_told_unless_their_client_wants_it_so(asked: bool) -> None:
    session = ready()
    if asked:
        session.request(Close())
        session.closes(0, 0)
        session.closes(0, 2)
    for _ in range(2):  # whose process has not ended in between
        assert session.request(Close(terminate=True)) == [Kill(0), Kill(1)]
    session.exited(0)
    cut = Notify("envs_cut_short", "envs 1, 2 ended before close was over: the program waited no longer")
    assert session.exited(1) == [*([cut] if asked else []), Answer(Done()), End()]


def test_process_that_ends_while_it_closes_its_envs_is_told() -> None:
    session = ready(2, 1)
    session.request(Close())
    session.closes(0, 0)
    session.closes(0, 1)
    why = "env 1 ended before close was over: the process was ended by SIGKILL"
    assert session.exited(0) == [Notify("envs_cut_short", why), Answer(Done()), End()]


def test_requests_while_closing_are_refused() -> None:
    session = ready()
    session.handle(events.LeaseExpired())
    fail = only(Fail, session.request(Step(b"\x04")))
    assert "lease ran out" in fail.failure.message


def test_close_of_a_session_that_is_ending_anyway_is_answered_at_its_end() -> None:
    session = ready(1, 1)
    assert session.attachable
    assert session.handle(DRAINING) == [Goodbye(SHUTTING_DOWN), Tell(0, CloseEnvs())]
    assert session.request(Close()) == [] and not session.attachable
    assert session.closed(0) == [Answer(Done()), End()]


def test_client_that_waits_for_the_end_of_an_abandoned_session_is_told_first_which_envs_were_cut_short() -> None:
    session = ready(2, 1)
    session.request(Close())
    session.closes(0, 0)
    assert session.handle(events.Abandoned(SHUTTING_DOWN)) == [Kill(0)]
    cut = Notify("envs_cut_short", "envs 0, 1 ended before close was over: the hub is shutting down")
    assert session.exited(0) == [cut, Answer(Done()), End()]


ASKED = [Tell(0, CloseEnvs()), Tell(1, CloseEnvs())]


def test_session_whose_lease_expires_while_it_is_taken_over_closes_its_envs() -> None:
    session = shared()
    session.handle(events.Attached(quiescent=True))
    ended = session.handle(events.LeaseExpired())
    assert every(Tell, ended) == ASKED and only(FailAttach, ended) and not every(Transfer, ended)


# --- a hub that shuts down --------------------------------------------------------------------------------------------


def test_session_that_closes_after_the_hub_began_to_shut_down_has_no_more_time_than_the_hub() -> None:
    for close_s, until_s in ((1e6, 20.0), (15.0, 15.0)):
        session = ready(faults=Faults(close_s=close_s))
        session.request(Step(b"\x04"))
        session.handle(DRAINING)
        session.handle(events.Draining(by_s=100.0, end_by_s=200.0, quiescent=True))
        assert session.elapsed(9.95, quiescent=False) == []
        assert session.next_deadline_s() == 10.0
        assert Goodbye(SHUTTING_DOWN) in session.rows_done()
        session.elapsed(9.99)
        assert session.next_deadline_s() == until_s


def test_session_that_ends_after_its_time_in_a_hub_that_shuts_down_ends_once() -> None:
    session = ready(1, 1)
    session.exited(0)
    session.request(Step(b"\x04"))
    assert session.handle(DRAINING) == []
    assert session.request(Close(), now_s=11.0) == [Answer(Done()), End()]


def test_hub_that_shuts_down_waits_no_longer_than_that() -> None:
    session = ready()
    session.request(Step(b"\x04"))
    session.handle(DRAINING)
    assert session.elapsed(9.9, quiescent=False) == []
    ends = session.elapsed(10.0, quiescent=False)
    assert Fail(SHUTTING_DOWN) in ends and Goodbye(SHUTTING_DOWN) in ends and every(Tell, ends) == ASKED
    assert session.elapsed(11.0, Progress(7, 0, "step"), None, quiescent=False) == [Kill(0)]
    session.elapsed(15.0)
    cut = "env 1 ended before close was over: the hub is shutting down, which gives envs drain_close_timeout"
    assert Notify("envs_cut_short", cut) in session.elapsed(20.0)


def test_hub_that_shuts_down_begins_no_request() -> None:
    session = ready()
    session.sends(0)
    assert session.handle(DRAINING) == []
    assert session.request(Step(b"\x04")) == [Fail(SHUTTING_DOWN)]
    session.request(Receive(1))
    ends = session.handle(events.PartDone((0,)))
    assert only(AnswerPart, ends) and Goodbye(SHUTTING_DOWN) in ends


def test_hub_that_shuts_down_lets_a_client_that_drives_end_its_step() -> None:
    session = shared()
    assert session.handle(events.Draining(10.0, 20.0, quiescent=False)) == [WindUp()]
    assert session.elapsed(0.1, quiescent=False) == []
    assert Goodbye(SHUTTING_DOWN) in session.elapsed(0.2, quiescent=True)


# --- parts of a batch -------------------------------------------------------------------------------------------------


def test_part_is_posted_and_received_once_enough_rows_are_done() -> None:
    session = ready()
    assert session.request(Send([0, 2], b"\x04")) == [PostPart(), Answer(Done())]
    assert session.request(Receive(5)) == [KeepWaiting(), TakePart(2)]  # not more than there are
    session.worker_sent(0, RowInfo(2, b"large"))
    answer = session.handle(events.PartDone((0, 2), ((0, b"small"),), (2,)))
    assert answer == [AnswerPart(((0, b"small"), (2, b"large")), (0, 2))]
    assert session.request(Receive(1)) == [Answer(Done())]


def test_row_of_a_part_that_raised_is_told_by_itself() -> None:
    session = ready()
    session.sends(0, 1)
    session.worker_sent(1, RowInfo(1, b"of the step before"))
    session.worker_sent(1, RowFailed(RAISED))
    session.request(Receive(1))
    assert session.handle(events.PartDone((), raised=1)) == [FailPart(RAISED)]
    assert session.request(Collect([0, 1])) == [Answer(Done())]
    assert session.request(Receive(5))[-1:] == [TakePart(1)]


def test_sends_that_wait_are_answered_in_their_order_with_as_many_rows_as_the_last_one_wants() -> None:
    session = ready()
    assert session.request(Send([0], b"\x04", 1)) == [PostPart(), KeepWaiting(), TakePart(1)]
    assert session.request(Send([1], b"\x04", 2), quiescent=False) == [PostPart(), KeepWaiting(), TakePart(2)]
    assert session.request(TemplatesRequest([])) == [Answer(Templates([], []))]
    assert session.handle(events.PartDone((1,))) == [AnswerPart((), (1,)), TakePart(1)]
    assert session.handle(events.PartDone((0,))) == [AnswerPart((), (0,))]


def test_of_more_than_two_that_wait_the_oldest_is_answered_without_rows_and_so_are_all_once_no_row_is_left() -> None:
    session = ready()
    for row in range(2):
        session.request(Send([row], b"\x04", 1))
    assert session.request(Send([2], b"\x04", 3)) == [PostPart(), KeepWaiting(), AnswerPart(), TakePart(3)]
    assert session.handle(events.PartDone((0, 1, 2))) == [AnswerPart((), (0, 1, 2)), AnswerPart()]


def test_refused_send_leaves_those_that_wait() -> None:
    session = ready()
    session.request(Send([0], b"\x04", 1))
    session.effects.misfit = "they do not fit"
    for _ in range(2):
        fail = only(Fail, session.request(Send([1], b"\x04", 1)))
        assert fail.failure == Failure("bad_actions", "request", "they do not fit; no env has moved")
    session.handle(events.Draining(9.0, 9.0, False))
    assert session.request(Send([1], b"\x04", 1), quiescent=False) == [Fail(SHUTTING_DOWN)]
    assert AnswerPart((), (0,)) in session.handle(events.PartDone((0,)))


def test_close_gives_up_what_waits_and_another_end_fails_it() -> None:
    session = ready()
    session.request(Send([0, 1], b"\x04", 1))
    session.request(Receive(1))
    session.request(Close())
    assert session.handle(events.PartDone((0,))) == []
    session.closed(0)
    assert session.closed(1) == [Answer(Done()), End()]
    session = ready()
    session.request(Send([0, 1], b"\x04", 1))
    session.request(Receive(1))
    over = Failure("session_lost", "session", "its lease ran out")
    assert session.handle(events.LeaseExpired())[:2] == [FailPart(over)] * 2


def test_whole_batch_waits_for_the_rows_that_went_by_parts() -> None:
    session = ready()
    session.sends(0)
    for request in (Step(b"\x04"), Reset(), Call("x", b"")):
        fail = only(Fail, session.request(request))
        assert "RECEIVE" in fail.failure.message


def test_actions_that_do_not_fit_are_refused_and_the_session_goes_on() -> None:
    session = ready()
    session.request(Step(b"\x04"))
    refused = Failure("bad_actions", "request", "no")
    assert session.handle(events.NotPosted(refused)) == [Fail(refused)]
    assert session.request(Step(b"\x04")) == [PostStep()]
    broken = ready(faults=Faults(restarts_max=0))
    broken.request(Step(b"\x04"))
    assert only(Fail, broken.exited(0)).failure.code == "restarts_exhausted" and broken.phase is Phase.BROKEN
    assert broken.handle(events.NotPosted(refused)) == []


# --- who drives -------------------------------------------------------------------------------------------------------


def test_client_with_the_ticket_drives_until_it_asks_for_something() -> None:
    session = ready()
    assert session.handle(events.SideConnected(quiescent=True)) == [Grant(), GiveDrive()]
    assert (session.lane, session.driver) == (LaneName.SHARED, Driver.CLIENT)
    called = session.request(Call("x", b""))
    assert called == [TakeDrive(), PostMessage()] and session.driver is Driver.HUB
    answered = session.rows_done()
    assert only(Answer, answered) and GiveDrive() in answered and session.driver is Driver.CLIENT


def test_hub_takes_the_drive_for_a_step_by_message() -> None:
    session = shared()
    assert session.request(Step(b"\x04")) == [TakeDrive(), PostStep()]
    assert session.driver is Driver.HUB and session.phase is Phase.MOVING


def test_client_that_drives_keeps_the_drive_when_it_asks_for_what_its_step_left() -> None:
    session = shared()
    session.worker_sent(1, RowFailed(RAISED))
    assert session.request(Collect([1]), quiescent=False) == [Fail(RAISED)]
    assert session.request(Collect([0]), quiescent=False) == [Answer(Done())]
    assert session.driver is Driver.CLIENT


def test_failure_of_a_step_is_told_to_the_client_that_took_over_meanwhile() -> None:
    session = shared()
    session.handle(events.Attached(quiescent=False))
    session.worker_sent(1, RowFailed(RAISED))
    assert session.handle(events.SideClosed(quiescent=False)) == [CloseSide(), Transfer()]
    assert session.elapsed(0.0) == [TakeDrive(), TakeDrive(), AnswerAttach()]
    assert session.request(Collect([1])) == [Fail(RAISED)]


def test_failure_of_an_env_that_is_another_workers_is_not_kept() -> None:
    session = shared()
    session.worker_sent(0, RowFailed(RAISED))
    assert session.request(Collect([0, 1, 2])) == [Answer(Done())]


def test_client_whose_step_is_under_way_is_refused() -> None:
    session = shared()
    fail = only(Fail, session.request(Reset(), quiescent=False))
    assert "a step that the client drives has not ended" in fail.failure.message
    assert session.driver is Driver.CLIENT


@pytest.mark.parametrize("why", ["busy", "shared", "not quiescent", "taken over", "by parts", "broken"])
def test_side_socket_is_refused_while_something_is_under_way(why: str) -> None:
    session = shared() if why == "shared" else ready(faults=Faults(restarts_max=0))
    if why == "by parts":
        session.request(Send([0], b"\x04"))
    if why == "broken":
        session.exited(0)
    if why == "busy":
        session.request(Step(b"\x04"))
    if why == "taken over":
        session.request(Step(b"\x04"))
        session.handle(events.Attached(quiescent=False))
    assert session.handle(events.SideConnected(quiescent=why != "not quiescent")) == [RefuseSide()]


def test_hub_drives_once_the_client_has_left_and_its_rows_are_done() -> None:
    session = shared()
    assert session.handle(events.SideClosed(quiescent=False)) == [CloseSide()]
    assert session.driver is Driver.CLIENT and session.next_deadline_s() < math.inf
    assert session.handle(events.SideConnected(quiescent=True)) == [RefuseSide()]
    assert session.elapsed(0.5, quiescent=False) == []
    assert session.elapsed(1.0, quiescent=True) == [TakeDrive()]
    assert session.driver is Driver.HUB


# --- takeover ---------------------------------------------------------------------------------------------------------


def test_client_that_takes_over_before_the_envs_are_made_fails_the_make_and_waits_for_them() -> None:
    session = begun(1, 1)
    failed, transferred = session.handle(events.Attached(quiescent=True))
    assert isinstance(failed, Fail) and transferred == Transfer() and failed.failure.code == "session_lost"
    session.worker_sent(0, built())
    done = session.worker_sent(0, Mapped())
    assert [type(each) for each in done] == [HandOver, Learn, TakeDrive, AnswerAttach] and session.phase is Phase.READY


def test_takeover_waits_for_the_request_under_way() -> None:
    session = ready()
    session.request(Step(b"\x04"))
    assert session.handle(events.Attached(quiescent=False)) == [Transfer()]
    ended = session.rows_done()
    assert only(Answer, ended) and ended[-2:] == [TakeDrive(), AnswerAttach()]


def test_takeover_waits_for_the_receive_under_way_and_gives_up_what_else_was_sent() -> None:
    session = ready()
    session.sends(0, 1)
    session.request(Receive(1))
    assert session.handle(events.Attached(quiescent=True)) == [Transfer()]
    assert session.elapsed(1.0) == []
    assert session.handle(events.PartDone((0,))) == [AnswerPart((), (0,))]
    assert session.elapsed(2.0) == [TakeDrive(), AnswerAttach()]
    assert session.request(Step(b"\x04")) == [PostStep()]


def test_client_that_has_the_memory_is_asked_to_let_go_before_another_has_the_session() -> None:
    session = shared(faults=Faults(restart_wait_s=5.0))
    assert session.handle(events.Attached(quiescent=True), 1.0) == [Recall()]
    assert session.elapsed(5.9) == [] and session.lane is LaneName.SHARED
    followed = session.handle(events.SideClosed(quiescent=True), 5.9)
    assert followed == [CloseSide(), Transfer(), TakeDrive(), TakeDrive(), AnswerAttach()]
    assert session.elapsed(6.1) == []


def test_takeover_waits_for_rows_that_a_client_which_let_go_has_posted() -> None:
    session = shared()
    session.handle(events.Attached(quiescent=False))
    assert session.handle(events.SideClosed(quiescent=False)) == [CloseSide(), Transfer()]
    assert session.handle(events.SideConnected(quiescent=True)) == [RefuseSide()]
    assert session.elapsed(1.0, quiescent=False) == []
    assert only(AnswerAttach, session.elapsed(2.0))


@pytest.mark.parametrize("process", [123, 0])
@pytest.mark.parametrize("draining", [False, True])
def test_client_that_does_not_let_go_keeps_its_session_and_is_named(process: int, draining: bool) -> None:
    session = ready(faults=Faults(restart_wait_s=5.0))
    session.handle(events.SideConnected(quiescent=True, process=process))
    session.handle(events.Attached(quiescent=True), 1.0)
    if draining:
        session.handle(events.Draining(by_s=20.0, end_by_s=30.0, quiescent=False), 2.0)
    kept = session.elapsed(6.0, quiescent=False)
    assert [type(each) for each in kept] == [EndRecall, FailAttach, *[WindUp] * draining]
    failure = only(FailAttach, kept).failure
    assert failure.code == "refused" and ("process 123" if process else "another container") in failure.message
    assert session.driver is Driver.CLIENT and session.lane is LaneName.SHARED
    assert session.elapsed(7.0, quiescent=False) == []


def test_holder_goes_on_where_the_client_that_attaches_is_gone() -> None:
    session = shared()
    session.handle(events.Attached(quiescent=True))
    assert [type(each) for each in session.handle(events.AttachGivenUp())] == [EndRecall, FailAttach]
    assert session.handle(events.AttachGivenUp()) == []


def test_takeover_of_a_session_that_breaks_is_told() -> None:
    session = shared(faults=Faults(restarts_max=0))
    session.handle(events.Attached(quiescent=True))
    ends = session.exited(0)
    assert session.phase is Phase.BROKEN and only(FailAttach, ends).failure.code == "session_lost"
    assert [type(each) for each in session.handle(events.Attached(quiescent=True))] == [Transfer, FailAttach]


def test_takeover_of_a_session_that_is_ended_is_told_by_whom() -> None:
    session = shared()
    session.handle(events.Attached(quiescent=True))
    why = Failure("session_lost", "session", "session 00010203 was ended by admin ops: a demo")
    assert only(FailAttach, session.handle(events.Abandoned(why))).failure == why


# --- the phases -------------------------------------------------------------------------------------------------------


def test_event_in_a_phase_in_which_it_cannot_come_is_an_error() -> None:
    with pytest.raises(IllegalEvent, match="on_made in phase ready"):
        ready().handle(events.Made())
    with pytest.raises(IllegalEvent, match="EnvNames in phase ready"):
        ready().request(EnvNames([]))  # which is no request


def test_every_request_and_every_effect_has_its_method() -> None:
    assert EFFECTS.keys() <= {*dir(SessionRuntime)}
    assert {messages.REQUESTS[op] for op in SESSION_OPS & messages.REQUESTS.keys() - FIRST_OPS} <= HANDLERS.keys()
    for name, following in TRANSITIONS.items():
        assert Phase.ENDED not in following, name


def diagram() -> str:
    """The transitions between two phases and the methods that may cause them, as a Mermaid state diagram."""
    edges: dict[tuple[str, str], list[str]] = {}
    for name, following in TRANSITIONS.items():
        for phase, others in following.items():
            for other in others:
                edges.setdefault((phase.name, other.name), []).append(name.removeprefix("on_"))
    lines = [
        f"    {before} --> {after}: {', '.join(sorted(names))}" for (before, after), names in sorted(edges.items())
    ]
    return "\n".join(["stateDiagram-v2", "    [*] --> BUILDING", *lines, "    ENDED --> [*]"])


def test_documented_diagram_is_that_of_the_methods() -> None:
    document = Path(state.__file__).with_name("PHASES.md").read_text()
    assert f"```mermaid\n{diagram()}\n```\n" in document
    assert "    READY --> MOVING: call, reset, set_attr, step\n" in document and "ENDED --> READY" not in document
    for phase in Phase:
        assert f"| `{phase.name}` |" in document


# --- vector envs ------------------------------------------------------------------------------------------------------


def vector_env() -> Session:
    """A session of two workers, each with a vector env."""
    return ready(3, 2, recipe=Recipe("CartPole-v1", settings=EnvSettings(vector=True)))


def test_vector_envs_rows_are_sent_together() -> None:
    session = vector_env()
    assert session.made is not None and session.made.vector
    assert only(Fail, session.request(Send([0, 1], b"\x04"))) == Fail(
        Failure("refused", "request", whole_workers_text(3, 2))
    )
    assert session.request(Send([2, 0], b"\x04"))[:1] == [PostPart()]


def test_vector_env_has_options_for_all_of_its_envs() -> None:
    assert PostMessage() in vector_env().request(Reset(options=b"options"))
    refused = only(Fail, vector_env().request(Reset(options_each=[b"", b"", b""])))
    assert "options for all of its envs" in refused.failure.message


# --- what changes nothing ---------------------------------------------------------------------------------------------


def test_large_info_of_a_row_of_another_process_is_not_kept() -> None:
    session = ready(3, 2)
    assert session.worker_sent(0, RowInfo(1, b"of worker 1")) == []


def test_worker_number_of_a_process_is_its_slot_and_of_a_spare_its_own() -> None:
    session = ready(3, 2)
    assert [session.slots.worker(session.number(worker)) for worker in range(2)] == [0, 1]


def test_session_that_is_discarded_has_ended() -> None:
    session = ready(3, 2)
    session.discard()
    assert session.phase is Phase.ENDED


def test_first_step_of_an_env_is_a_step_to_people() -> None:
    first, later = Progress(FIRST_CALL, 0, "init"), Progress(0, 0, "reset")
    assert (first.verb, first.is_first, later.verb, later.is_first) == ("step", True, "reset", False)
