from __future__ import annotations

import random
from typing import Any

import pytest
from envhub_server.control import (
    Built,
    CallResults,
    CallRows,
    CloseEnvs,
    Faulted,
    MapArena,
    Mapped,
    Measured,
    ResetRows,
    RowFailed,
    RowInfo,
    Serve,
    SetAttrRows,
)
from envhub_server.ending import Ending
from envhub_server.ends import Outcome
from envhub_server.instructions import (
    Answer,
    ArenaRefused,
    Drive,
    End,
    Exited,
    Fail,
    HandOver,
    Kill,
    MakeArena,
    Moved,
    StartWorkers,
    TakeOver,
    Tell,
)
from envhub_server.instructions import MapArena as MapRestarted
from envhub_server.registry import Recipe
from envhub_server.restart import RestartPolicy, Restarts
from envhub_server.seeds import reseeded
from envhub_server.session import Phase, Session
from envhub_server.sizing import Sizing
from envhub_server.watchdog import Late
from hypothesis import given, settings
from hypothesis import strategies as st

from envhub import codec
from envhub.arena import OP_RESET, OP_STEP
from envhub.layout import Layout, Leaf
from envhub.messages import (
    Call,
    Close,
    Done,
    EnvNames,
    Failure,
    Faults,
    Made,
    Make,
    Reset,
    SetAttr,
    Step,
    World,
)

SIZING = Sizing((0, 1, 2, 3), 4, spin_us=0)
OBSERVATION, WIDER, ACTION = b"a space", b"a wider one of the same leaves", b"actions"
INFO_BYTES = 64
RAISED = Failure("env_raised", "env", "no", env_index=1, worker=0)
LATE = Late("step", 2, 1.6, 1.5)
STOPPING = Failure("draining", "hub", "the hub is shutting down")


def restarts(**policy: Any) -> Restarts:
    return Restarts(RestartPolicy(jitter=0.0, **policy), random.Random(0))


def built(*observations: bytes) -> Built:
    return Built(list(observations or [OBSERVATION]), ACTION, [["<f4", [4]]], [["<i8", []]], b"meta", "rgb_array", "{}")


def begun(num_envs: int = 3, workers: int = 2, **make: Any) -> Session:
    """A session whose workers are building."""
    made = Make(num_envs, "CartPole-v1", **make)
    policy = restarts(restarts_max=made.faults.restarts_max)
    session = Session(made, Recipe("CartPole-v1"), workers, INFO_BYTES, SIZING, policy)
    session.start()
    return session


def ready(num_envs: int = 3, workers: int = 2, **make: Any) -> Session:
    """A session that is made, idle."""
    session = begun(num_envs, workers, **make)
    for worker in range(len(session.blocks)):
        session.event(worker, built())
    for worker in range(len(session.blocks)):
        session.event(worker, Mapped())
    assert session.phase is Phase.READY and session.idle
    return session


# --- blocks -----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 400))
def test_blocks_hold_every_env_once_in_turn_and_differ_by_at_most_one(num_envs: int, workers: int) -> None:
    blocks = Session(Make(num_envs), Recipe(""), workers, 0, SIZING, restarts()).blocks
    assert all(row % len(blocks) == number for number, block in enumerate(blocks) for row in block)
    assert sorted(row for block in blocks for row in block) == list(range(num_envs))
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert len(blocks) == max(1, min(workers, num_envs))


# --- measuring --------------------------------------------------------------------------------------------------------


def measuring(num_envs: int = 16) -> Session:
    session = Session(Make(num_envs, "CartPole-v1", pin=True), Recipe("CartPole-v1"), 0, INFO_BYTES, SIZING, restarts())
    started, build = session.start()
    assert started == StartWorkers(tuple(range(1))) and isinstance(build, Tell)
    assert build.message.measure and build.message.rows == [0] and build.message.cpu is None
    assert session.phase is Phase.MEASURING
    return session


@pytest.mark.parametrize(("step_s", "workers"), [(10e-6, 3), (1e-3, 4)])
def test_measured_step_decides_how_many_workers_build(step_s: float, workers: int) -> None:
    session = measuring()
    assert session.event(0, Measured(step_s)) == []
    started, *builds = session.event(0, Exited(Ending("exited with status 0")))
    assert started == StartWorkers(tuple(range(workers))) and session.phase is Phase.BUILDING
    assert [build.message.rows for build in builds if isinstance(build, Tell)] == session.blocks
    assert [build.message.cpu for build in builds if isinstance(build, Tell)] == list(range(workers))
    for event in (built(), Mapped()):
        answers = [session.event(worker, event) for worker in range(workers)]
    answer = answers[-1][-1]
    assert isinstance(answer, Answer) and answer.message.step_s == step_s


def test_env_that_cannot_be_stepped_at_random_gets_the_usual_workers() -> None:
    session = measuring()
    assert session.event(0, RowFailed(RAISED)) == []
    assert session.event(0, Exited(Ending("exited with status 0")))[0] == StartWorkers(tuple(range(3)))


def test_session_that_is_abandoned_while_it_measures_ends_with_its_worker() -> None:
    session = measuring()
    assert session.abandon(STOPPING, terminate=True) == [Fail(STOPPING), Kill(0)]
    assert session.event(0, Exited(Ending("was ended by SIGKILL"))) == [End()]


# --- making -----------------------------------------------------------------------------------------------------------


def test_every_worker_is_told_to_build_its_block() -> None:
    make = Make(3, "CartPole-v1", kwargs=b"k", autoreset_mode="SameStep")
    session = Session(make, Recipe("CartPole-v1", ("mine",), "m:f"), 2, INFO_BYTES, SIZING, restarts())
    started, first, second = session.start()
    assert started == StartWorkers(tuple(range(2)))
    assert isinstance(first, Tell) and isinstance(second, Tell)
    assert (first.worker, first.message.rows, first.message.worker) == (0, [0, 2], 0)
    assert (second.worker, second.message.rows, second.message.worker) == (1, [1], 1)
    assert (first.message.name, first.message.kwargs, first.message.entry) == ("CartPole-v1", b"k", "m:f")
    assert (first.message.modules, first.message.autoreset_mode) == (["mine"], "SameStep")
    assert session.phase is Phase.BUILDING and not session.idle


def test_only_workers_of_a_private_hub_may_unpickle() -> None:
    private = Session(Make(1, world=World(["/x"], "/", {}, b"r")), Recipe(""), 1, 0, SIZING, restarts()).start()[1]
    public = Session(Make(1), Recipe(""), 1, 0, SIZING, restarts()).start()[1]
    assert isinstance(private, Tell) and isinstance(public, Tell)
    assert private.message.allow_pickle and private.message.sys_path == ["/x"]
    assert not public.message.allow_pickle and public.message.sys_path == []


def test_arena_is_made_when_the_last_worker_has_built() -> None:
    session = begun()
    assert session.event(1, built()) == []
    layout = Layout(3, (Leaf("<f4", (4,)),), (Leaf("<i8", ()),), INFO_BYTES)
    message = MapArena(3, [["<f4", [4]]], [["<i8", []]], INFO_BYTES, OBSERVATION, ACTION, "same", 0)
    assert session.event(0, built()) == [MakeArena(layout, message, loose=False)]
    assert session.phase is Phase.MAPPING


def test_make_is_answered_when_the_last_worker_has_mapped() -> None:
    session = begun()
    session.event(0, built())
    session.event(1, built())
    assert session.event(1, Mapped()) == []
    made = Made(3, 2, [OBSERVATION], ACTION, b"meta", "rgb_array", "{}")
    assert session.event(0, Mapped()) == [HandOver(0, Serve()), HandOver(1, Serve()), Answer(made)]
    assert session.phase is Phase.READY and session.idle


def test_spaces_of_every_env_are_told_where_they_may_differ() -> None:
    session = begun(observation_mode="different")
    session.event(0, built(OBSERVATION, OBSERVATION))
    session.event(1, built(WIDER))
    session.event(0, Mapped())
    answer = session.event(1, Mapped())[-1]
    assert isinstance(answer, Answer)
    assert answer.message.observation_spaces == [OBSERVATION, WIDER, OBSERVATION]


def test_env_whose_spaces_cannot_be_batched_fails_the_make_and_ends_its_workers() -> None:
    session = begun()
    session.event(0, built())
    session.event(1, built())
    failure = Failure("factory_failed", "env", "spaces are not equivalent", env_index=2, worker=1)
    assert session.event(1, RowFailed(failure)) == [Fail(failure), Kill(0), Kill(1)]
    assert session.phase is Phase.CLOSING


def test_env_that_cannot_be_built_fails_the_make_and_ends_its_workers() -> None:
    session = begun()
    failure = Failure("factory_failed", "env", "no such file", env_index=2, worker=1)
    assert session.event(1, RowFailed(failure)) == [Fail(failure), Kill(0), Kill(1)]
    assert session.event(0, built()) == []  # it was on its way
    assert session.event(0, Exited(Ending("was ended by SIGKILL"))) == []
    assert session.event(1, Exited(Ending("was ended by SIGKILL"))) == [End()]


def test_env_that_does_not_fit_the_arena_fails_the_make() -> None:
    session = begun(1, 1)
    session.event(0, built())
    failure = Failure("factory_failed", "env", "leaves differ", env_index=0, worker=0)
    assert session.event(0, RowFailed(failure)) == [Fail(failure), Kill(0)]


def test_arena_that_cannot_be_had_fails_the_make() -> None:
    session = begun(1, 1)
    session.event(0, built())
    limit = Failure("limit", "hub", "no memory left")
    assert session.event(-1, ArenaRefused("no memory left")) == [Fail(limit), Kill(0)]


@pytest.mark.parametrize("mapping", [False, True])
def test_worker_that_dies_while_making_fails_the_make(mapping: bool) -> None:
    session = begun()
    if mapping:
        session.event(0, built())
        session.event(1, built())
    fail, kill = session.event(1, Exited(Ending("was ended by SIGSEGV")))
    assert isinstance(fail, Fail)
    assert fail.failure.code == "worker_died" and "SIGSEGV" in fail.failure.message
    assert kill == Kill(0)
    assert session.event(0, Exited(Ending("was ended by SIGKILL"))) == [End()]


def test_only_worker_that_dies_while_building_ends_the_session_at_once() -> None:
    session = begun(1, 1)
    fail, end = session.event(0, Exited(Ending("exited with status 3")))
    assert isinstance(fail, Fail) and fail.failure.env_index == 0
    assert end == End()


def test_message_that_no_worker_should_send_ends_the_session() -> None:
    session = ready()
    assert session.event(0, EnvNames([])) == [Kill(0), Kill(1)]
    assert session.phase is Phase.CLOSING


# --- reset ------------------------------------------------------------------------------------------------------------


def test_reset_drives_all_rows_and_tells_each_worker_its_seeds() -> None:
    session = ready()
    assert session.request(Reset([7, None, 9], [], b"options")) == [
        Drive(OP_RESET),
        Tell(0, ResetRows([0, 2], [7, 9], b"options")),
        Tell(1, ResetRows([1], [None], b"options")),
    ]
    assert session.phase is Phase.MOVING
    assert session.event(-1, Moved()) == [Answer(Done(), arrays=True)]
    assert session.phase is Phase.READY


def test_reset_with_a_mask_says_which_rows_every_worker_resets() -> None:
    session = ready(4, 2)
    assert session.request(Reset([1, 2, 3, 4], [False, True, False, False])) == [
        Drive(OP_RESET),
        Tell(0, ResetRows([], [], b"")),
        Tell(1, ResetRows([1], [2], b"")),
    ]


def test_mask_of_every_row_is_a_reset_of_all() -> None:
    session = ready(2, 1)
    assert session.request(Reset([], [True, True]))[0] == Drive(OP_RESET)


@pytest.mark.parametrize(
    "reset", [Reset([1]), Reset([1, 2, 3, 4]), Reset(mask=[True]), Reset(mask=[False] * 3), Reset(mask=[True] * 4)]
)
def test_reset_that_does_not_fit_is_refused_and_nothing_moves(reset: Reset) -> None:
    session = ready()
    (fail,) = session.request(reset)
    assert isinstance(fail, Fail) and (fail.failure.code, fail.failure.scope) == ("refused", "request")
    assert session.phase is Phase.READY and session.idle
    assert session.request(Step(b"\x04")) == [Drive(OP_STEP, b"\x04")]


# --- step -------------------------------------------------------------------------------------------------------------


def test_step_drives_all_rows_and_is_answered_with_the_arrays() -> None:
    session = ready()
    assert session.request(Step(b"\x04")) == [Drive(OP_STEP, b"\x04")]
    assert not session.idle
    assert session.event(-1, Moved()) == [Answer(Done(), arrays=True)]
    assert session.idle


def test_doorbell_between_requests_is_nothing() -> None:
    session = ready()
    assert session.event(-1, Moved()) == []
    assert session.phase is Phase.READY


def test_exception_in_step_is_told_once_all_rows_are_done_and_the_session_goes_on() -> None:
    session = ready()
    session.request(Step(b"\x04"))
    assert session.event(0, RowFailed(RAISED)) == []
    assert session.event(-1, Moved()) == [Fail(RAISED)]
    assert session.phase is Phase.READY
    session.request(Step(b"\x04"))
    assert session.event(-1, Moved()) == [Answer(Done(), arrays=True)]


def test_of_several_exceptions_the_first_envs_is_told() -> None:
    session = ready(4, 4)
    session.request(Step(b"\x04"))
    failures = {row: Failure("env_raised", "env", "no", env_index=row, worker=row) for row in (2, 0, 3)}
    for row, failure in failures.items():
        session.event(row, RowFailed(failure))
    assert session.event(-1, Moved()) == [Fail(failures[0])]


def test_infos_too_large_for_the_arena_are_kept_until_the_next_request() -> None:
    session = ready()
    session.request(Step(b"\x04"))
    assert session.event(0, RowInfo(2, b"large")) == []
    session.event(-1, Moved())
    assert session.infos == {2: b"large"}
    session.request(Step(b"\x04"))
    assert session.infos == {}


# --- calls ------------------------------------------------------------------------------------------------------------


def test_call_is_answered_with_one_result_per_env_in_order() -> None:
    session = ready()
    assert session.request(Call("render", b"args")) == [
        Tell(0, CallRows("render", b"args")),
        Tell(1, CallRows("render", b"args")),
    ]
    assert session.phase is Phase.CALLING
    assert session.event(1, CallResults([b"c"])) == []
    assert session.event(0, CallResults([b"a", b"b"])) == [Answer(Done(), rows=((0, b"a"), (1, b"c"), (2, b"b")))]
    assert session.phase is Phase.READY


def test_exception_in_a_call_is_told_once_every_worker_has_answered() -> None:
    session = ready()
    session.request(Call("render", b""))
    assert session.event(0, RowFailed(RAISED)) == []
    assert session.event(1, CallResults([b"c"])) == [Fail(RAISED)]
    assert session.request(Step(b"\x04")) == [Drive(OP_STEP, b"\x04")]


def test_results_of_an_earlier_call_are_not_mixed_into_the_next() -> None:
    session = ready()
    session.request(Call("first", b""))
    session.event(1, CallResults([b"old"]))
    session.event(0, RowFailed(RAISED))
    session.request(Call("second", b""))
    session.event(0, CallResults([b"a", b"b"]))
    assert session.event(1, CallResults([b"c"])) == [Answer(Done(), rows=((0, b"a"), (1, b"c"), (2, b"b")))]


def test_set_attr_gives_each_worker_its_values() -> None:
    session = ready()
    assert session.request(SetAttr("gravity", [b"1", b"2", b"3"])) == [
        Tell(0, SetAttrRows("gravity", each=[b"1", b"3"])),
        Tell(1, SetAttrRows("gravity", each=[b"2"])),
    ]
    session.event(0, CallResults([b"", b""]))
    assert session.event(1, CallResults([b""])) == [Answer(Done(), rows=((0, b""), (1, b""), (2, b"")))]


def test_one_value_is_set_on_every_env() -> None:
    session = ready()
    assert session.request(SetAttr("gravity", [b"1"])) == [
        Tell(0, SetAttrRows("gravity", b"1")),
        Tell(1, SetAttrRows("gravity", b"1")),
    ]


@pytest.mark.parametrize("count", [0, 2, 4])
def test_values_of_another_number_are_refused_and_nothing_is_set(count: int) -> None:
    session = ready()
    (fail,) = session.request(SetAttr("gravity", [b"1"] * count))
    assert isinstance(fail, Fail) and fail.failure.code == "refused" and f"got {count}" in fail.failure.message
    assert session.phase is Phase.READY


# --- workers that end -------------------------------------------------------------------------------------------------

KILLED = Exited(Ending("was ended by SIGKILL", "SIGKILL", log_tail="its last words"))


def env_failure(outcome: Outcome) -> dict[str, Any]:
    info = codec.decode(outcome.info)
    assert info["invalid_transition"] is True
    found: dict[str, Any] = info["env_failure"]
    return found


def broken(**faults: Any) -> Session:
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
        (answer,) = session.event(-1, Moved())
        assert isinstance(answer, Answer) and answer.arrays
    assert session.phase is Phase.READY and session.idle


def test_worker_is_started_again_when_its_time_has_come_and_serves_its_rows() -> None:
    session = ready()
    session.request(Reset([3, 4, 5]))
    session.event(-1, Moved())
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
    assert session.request(Step(b"\x04")) == [Drive(OP_STEP, b"\x04")]


def test_env_that_was_late_is_named_and_so_is_what_it_was_to_do() -> None:
    session = ready()
    session.request(Step(b"\x04"))
    tail = 'a word\nCurrent thread 0x0001 (most recent call first):\n  File "x.py", line 3 in step\n'
    (taken,) = session.event(0, Exited(Ending("was ended by SIGKILL", "SIGKILL", log_tail=tail), LATE))
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
    assert session.event(-1, Moved()) == [Fail(taken.outcome.failure)]
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
        session.event(0, Exited(Ending("exited with status 0")), now_s)
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
    assert session.event(-1, Moved()) == []
    assert session.event(1, KILLED) == [] and session.tick(1e9) == []
    assert session.phase is Phase.BROKEN


def test_broken_session_closes_the_envs_that_are_left() -> None:
    session = broken()
    assert session.request(Close()) == [Tell(1, CloseEnvs())]
    assert session.event(1, Exited(Ending("exited with status 0"))) == [Answer(Done()), End()]


def test_broken_session_without_workers_is_closed_at_once() -> None:
    session = ready(1, 1, faults=Faults(restarts_max=0))
    session.event(0, KILLED)
    assert session.request(Close()) == [Answer(Done()), End()]


def test_session_that_waits_for_a_worker_is_closed_without_it() -> None:
    session = ready(1, 1)
    session.event(0, KILLED)
    assert session.request(Close()) == [Answer(Done()), End()]
    assert session.tick(1e9) == []


# --- closing ----------------------------------------------------------------------------------------------------------


def test_close_is_answered_when_the_last_worker_has_ended() -> None:
    session = ready()
    assert session.request(Close()) == [Tell(0, CloseEnvs()), Tell(1, CloseEnvs())]
    assert session.phase is Phase.CLOSING
    assert session.event(1, Exited(Ending("exited with status 0"))) == []
    assert session.event(0, Exited(Ending("exited with status 0"))) == [Answer(Done()), End()]


def test_close_with_terminate_kills_the_workers() -> None:
    session = ready()
    assert session.request(Close(terminate=True)) == [Kill(0), Kill(1)]
    session.event(0, Exited(Ending("was ended by SIGKILL")))
    assert session.event(1, Exited(Ending("was ended by SIGKILL"))) == [Answer(Done()), End()]


def test_exception_in_close_is_told_and_the_session_ends_all_the_same() -> None:
    session = ready(2, 1)
    session.request(Close())
    session.event(0, RowFailed(RAISED))
    assert session.event(0, Exited(Ending("exited with status 0"))) == [Fail(RAISED), End()]


def test_close_after_an_exception_in_step_is_answered_without_it() -> None:
    session = ready(1, 1)
    session.request(Step(b"\x04"))
    session.event(0, RowFailed(RAISED))
    session.event(-1, Moved())
    session.request(Close())
    assert session.event(0, Exited(Ending("exited with status 0"))) == [Answer(Done()), End()]


def test_workers_that_do_not_close_in_time_are_killed() -> None:
    session = ready()
    session.request(Close())
    session.event(0, Exited(Ending("exited with status 0")))
    assert session.close(terminate=True) == [Kill(1)]
    assert session.event(1, Exited(Ending("was ended by SIGKILL"))) == [Answer(Done()), End()]


def test_requests_while_closing_are_refused() -> None:
    session = ready()
    session.abandon(STOPPING, terminate=False)
    (fail,) = session.request(Step(b"\x04"))
    assert isinstance(fail, Fail) and "closing" in fail.failure.message


def test_close_of_a_session_that_is_ending_anyway_is_answered_at_its_end() -> None:
    session = ready(1, 1)
    assert session.abandon(STOPPING, terminate=False) == [Tell(0, CloseEnvs())]
    assert session.request(Close()) == []
    assert session.event(0, Exited(Ending("exited with status 0"))) == [Answer(Done()), End()]


def test_abandoned_session_tells_the_request_under_way_why() -> None:
    session = ready()
    session.request(Step(b"\x04"))
    assert session.abandon(STOPPING, terminate=False) == [Fail(STOPPING), Tell(0, CloseEnvs()), Tell(1, CloseEnvs())]
    session.event(0, Exited(Ending("exited with status 0")))
    assert session.event(1, Exited(Ending("exited with status 0"))) == [End()]


def test_idle_session_is_abandoned_without_a_word() -> None:
    assert ready().abandon(STOPPING, terminate=True) == [Kill(0), Kill(1)]


def test_session_abandoned_while_building_fails_its_make() -> None:
    session = begun()
    assert session.abandon(STOPPING, terminate=False) == [Fail(STOPPING), Tell(0, CloseEnvs()), Tell(1, CloseEnvs())]


# --- any life ---------------------------------------------------------------------------------------------------------


class FakeHub:
    """Carries out instructions against fake workers, and counts what the session says."""

    def __init__(self, session: Session) -> None:
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
                    self.inbox.append((worker, Exited(Ending("was ended by SIGKILL"))))
                case End():
                    self.ends += 1

    def reply_to(self, worker: int, message: Any) -> list[Any]:
        block = self.session.blocks[worker]
        match message:
            case CallRows() | SetAttrRows():
                return [CallResults([b""] * len(block))]
            case CloseEnvs():
                return [Exited(Ending("exited with status 0"))]
            case ResetRows():
                return []
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
@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_every_request_gets_one_answer_and_every_session_one_end(
    num_envs: int, workers: int, data: st.DataObject
) -> None:
    hub = FakeHub(Session(Make(num_envs), Recipe("x"), workers, 0, SIZING, restarts()))
    now_s = 0.0
    for _ in range(data.draw(st.integers(0, 40), label="events")):
        if hub.ends:
            break
        what = data.draw(st.sampled_from(["hear", "hear", "hear", "move", "ask", "raise", "die", "tick", "abandon"]))
        if what == "hear" and hub.inbox:
            hub.hear(data.draw(st.integers(0, len(hub.inbox) - 1)))
        elif what == "move" and hub.moving:
            hub.apply(hub.session.event(-1, Moved()))
        elif what == "ask" and hub.session.idle:
            hub.ask(data.draw(st.sampled_from(REQUESTS)))
        elif what == "raise" and hub.moving and hub.alive:
            hub.apply(hub.session.event(min(hub.alive), RowFailed(RAISED)))
        elif what == "die" and hub.alive:
            hub.inbox.insert(0, (data.draw(st.sampled_from(sorted(hub.alive))), Exited(Ending("was ended by SIGSEGV"))))
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
