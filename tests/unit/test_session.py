from __future__ import annotations

from typing import Any

import pytest
from envhub_server.catalog.registry import Recipe
from envhub_server.catalog.step_costs import StepCost
from envhub_server.ipc.control import (
    BuildRest,
    CallFailed,
    CallResults,
    CallRows,
    CloseEnvs,
    FirstBuilt,
    MapArena,
    Mapped,
    ResetRows,
    RowFailed,
    RowInfo,
    Serve,
    SetAttrRows,
    StepTimes,
)
from envhub_server.processes.exit_cause import ExitCause
from envhub_server.session.instructions import (
    Answer,
    ArenaRefused,
    Drive,
    End,
    Exited,
    Fail,
    HandOver,
    Kill,
    LearnCost,
    MakeArena,
    Notify,
    StartWorkers,
    Tell,
)
from envhub_server.session.state import Phase, SessionState
from envhub_server.session.worker_count import WorkerCount
from hypothesis import given, settings
from hypothesis import strategies as st
from sessions import (
    ACTION,
    INFO_BYTES,
    MACHINE,
    OBSERVATION,
    RAISED,
    RECIPE,
    STOPPING,
    WIDER,
    begun,
    built,
    ready,
    restarts,
    session_of,
)

from envhub.arena.layout import Layout
from envhub.arena.memory import OP_RESET, OP_STEP
from envhub.protocol.messages import Call, Close, Done, EnvNames, Failure, Made, Make, Reset, SetAttr, Step, World
from envhub.values.leaf import Leaf

# --- blocks -----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 400))
def test_blocks_hold_every_env_once_in_turn_and_differ_by_at_most_one(num_envs: int, workers: int) -> None:
    blocks = session_of(Make(num_envs), workers).blocks
    assert all(row % len(blocks) == number for number, block in enumerate(blocks) for row in block)
    assert sorted(row for block in blocks for row in block) == list(range(num_envs))
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1
    assert len(blocks) == max(1, min(workers, num_envs))


# --- how many workers -------------------------------------------------------------------------------------------------

IN_PROCESS, UNKNOWN = FirstBuilt(True, 1 << 20), FirstBuilt(False, 1 << 20)


def undecided(num_envs: int = 16) -> SessionState:
    """A session whose first envs are being made, to decide how many workers it gets."""
    session = session_of(Make(num_envs, "CartPole-v1", pin=True), None)
    started, *builds = session.start()
    assert started == StartWorkers((0, 1, 2, 3)) and len(builds) == 4  # one for each CPU
    for cpu, build in enumerate(builds):
        assert isinstance(build, Tell) and build.message.first_only
        assert (build.message.rows[0], build.message.cpu) == (cpu, cpu)
    return session


@pytest.mark.parametrize(
    ("first", "workers", "why"),
    [
        ([IN_PROCESS] * 4, 4, "known to compute in their process"),
        ([UNKNOWN] * 4, 16, "nothing is known of this env"),
        ([IN_PROCESS, UNKNOWN, IN_PROCESS, IN_PROCESS], 16, "nothing is known of this env"),
    ],
)
def test_first_envs_decide_how_many_workers_make_the_others(first: list[FirstBuilt], workers: int, why: str) -> None:
    session = undecided()
    for worker in (0, 1, 2):
        assert session.event(worker, first[worker]) == []
    started = [StartWorkers(tuple(range(4, workers)))] if workers > 4 else []
    rest = [Tell(worker, BuildRest(list(range(worker, 16, workers)))) for worker in range(4)]
    instructions = session.event(3, first[3])
    assert instructions[: len(started) + 4] == [*started, *rest]
    builds = [told.message for told in instructions[len(started) + 4 :] if isinstance(told, Tell)]
    assert [(build.rows, build.first_only) for build in builds] == [([row], False) for row in range(4, workers)]
    for event in (built(), Mapped()):
        answers = [session.event(worker, event) for worker in range(workers)]
    answer = answers[-1][-1]
    assert isinstance(answer, Answer) and answer.message.num_workers == workers and why in answer.message.sizing


def test_progress_counts_the_first_envs() -> None:
    session = undecided()
    session.event(2, UNKNOWN)
    assert (session.building.built, session.building.num_envs) == (1, 16)


@pytest.mark.parametrize("event", [RowFailed(RAISED), Exited(ExitCause("was ended by SIGKILL"))])
def test_session_whose_first_env_cannot_be_made_is_not_made(event: Any) -> None:
    session = undecided()
    session.event(1, UNKNOWN)
    answer, *kills = session.event(0, event)
    alive = [1, 2, 3] if isinstance(event, Exited) else [0, 1, 2, 3]
    assert isinstance(answer, Fail) and kills == [Kill(worker) for worker in alive]
    assert session.event(1, UNKNOWN) == []


def test_session_that_is_abandoned_before_its_first_envs_are_made_ends() -> None:
    session = undecided()
    assert session.abandon(STOPPING, terminate=True) == [Fail(STOPPING), *map(Kill, range(4))]
    ends = [session.event(worker, Exited(ExitCause("was ended by SIGKILL"))) for worker in range(4)]
    assert ends == [[], [], [], [End()]]


def sized(workers: int, told: bool = False) -> SessionState:
    """A session of 16 envs that has so many workers."""
    sizing = WorkerCount(workers, "as the test wants it", told)
    session = SessionState(Make(16), RECIPE, sizing, INFO_BYTES, MACHINE, restarts())
    session.start()
    return session


def test_cost_of_a_step_is_learned_from_all_workers_together() -> None:
    session = sized(2, told=True)
    assert session.event(0, StepTimes(20, 20_000_000, 0)) == []  # too few steps to say anything
    assert session.event(1, StepTimes(20, 20_000_000, 80_000_000)) == [LearnCost(StepCost(0.001, 0.002))]


def test_user_is_told_once_that_another_number_of_workers_is_better() -> None:
    session = sized(1)
    waits = StepTimes(64, 6_400_000, 640_000_000)  # 10 ms each
    learn, notify = session.event(0, waits)
    assert isinstance(learn, LearnCost) and isinstance(notify, Notify)
    assert "16 envs in 1 workers: 16 would" in notify.text and "10 ms of waiting" in notify.text
    assert session.event(0, waits) == [learn]


def test_user_who_chose_the_number_of_workers_is_told_nothing() -> None:
    assert sized(1, told=True).event(0, StepTimes(64, 0, 640_000_000)) == [LearnCost(StepCost(0.0, 0.01))]


def test_worker_that_tells_nonsense_of_its_steps_is_not_believed() -> None:
    assert sized(1).event(0, StepTimes(64, -1, 10**30)) == []
    assert sized(1).event(0, StepTimes(-64, 1, 1)) == []


# --- making -----------------------------------------------------------------------------------------------------------


def test_every_worker_is_told_to_build_its_block() -> None:
    make = Make(3, "CartPole-v1", kwargs=b"k", autoreset_mode="SameStep")
    session = session_of(make, 2, Recipe("CartPole-v1", ("mine",), "m:f"))
    started, first, second = session.start()
    assert started == StartWorkers(tuple(range(2)))
    assert isinstance(first, Tell) and isinstance(second, Tell)
    assert (first.worker, first.message.rows, first.message.worker) == (0, [0, 2], 0)
    assert (second.worker, second.message.rows, second.message.worker) == (1, [1], 1)
    assert (first.message.name, first.message.kwargs, first.message.entry) == ("CartPole-v1", b"k", "m:f")
    assert (first.message.modules, first.message.autoreset_mode) == (["mine"], "SameStep")
    assert session.phase is Phase.BUILDING and not session.idle


def test_only_workers_of_a_private_hub_may_unpickle() -> None:
    private = session_of(Make(1, world=World(["/x"], "/", {}, b"r")), 1).start()[1]
    public = session_of(Make(1), 1).start()[1]
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
    made = Made(3, 2, [OBSERVATION], ACTION, b"meta", "rgb_array", "{}", sizing="as the test wants it")
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
    assert session.event(0, Exited(ExitCause("was ended by SIGKILL"))) == []
    assert session.event(1, Exited(ExitCause("was ended by SIGKILL"))) == [End()]


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
    fail, kill = session.event(1, Exited(ExitCause("was ended by SIGSEGV")))
    assert isinstance(fail, Fail)
    assert fail.failure.code == "worker_died" and "SIGSEGV" in fail.failure.message
    assert kill == Kill(0)
    assert session.event(0, Exited(ExitCause("was ended by SIGKILL"))) == [End()]


def test_only_worker_that_dies_while_building_ends_the_session_at_once() -> None:
    session = begun(1, 1)
    fail, end = session.event(0, Exited(ExitCause("exited with status 3")))
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
    assert session.moved() == [Answer(Done(), arrays=True)]
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
    assert session.request(Step(b"\x04")) == [Drive(OP_STEP)]


# --- step -------------------------------------------------------------------------------------------------------------


def test_step_drives_all_rows_and_is_answered_with_the_arrays() -> None:
    session = ready()
    assert session.request(Step(b"\x04")) == [Drive(OP_STEP)]
    assert not session.idle
    assert session.moved() == [Answer(Done(), arrays=True)]
    assert session.idle


def test_doorbell_between_requests_is_nothing() -> None:
    session = ready()
    assert session.moved() == []
    assert session.phase is Phase.READY


def test_exception_in_step_is_told_once_all_rows_are_done_and_the_session_goes_on() -> None:
    session = ready()
    session.request(Step(b"\x04"))
    assert session.event(0, RowFailed(RAISED)) == []
    assert session.moved() == [Fail(RAISED)]
    assert session.phase is Phase.READY
    session.request(Step(b"\x04"))
    assert session.moved() == [Answer(Done(), arrays=True)]


def test_of_several_exceptions_the_first_envs_is_told() -> None:
    session = ready(4, 4)
    session.request(Step(b"\x04"))
    failures = {row: Failure("env_raised", "env", "no", env_index=row, worker=row) for row in (2, 0, 3)}
    for row, failure in failures.items():
        session.event(row, RowFailed(failure))
    assert session.moved() == [Fail(failures[0])]


def test_infos_too_large_for_the_arena_are_kept_until_the_next_request() -> None:
    session = ready()
    session.request(Step(b"\x04"))
    assert session.event(0, RowInfo(2, b"large")) == []
    session.moved()
    assert session.infos == {2: b"large"}
    session.request(Step(b"\x04"))
    assert session.infos == {}


# --- calls ------------------------------------------------------------------------------------------------------------


def test_call_is_answered_with_one_result_per_env_in_order() -> None:
    session = ready()
    assert session.request(Call("render", b"args")) == [
        Tell(0, CallRows("render", b"args", number=1)),
        Tell(1, CallRows("render", b"args", number=1)),
    ]
    assert session.phase is Phase.CALLING
    assert session.event(1, CallResults([b"c"])) == []
    assert session.event(0, CallResults([b"a", b"b"])) == [Answer(Done(), rows=((0, b"a"), (1, b"c"), (2, b"b")))]
    assert session.phase is Phase.READY


def test_exception_in_a_call_is_told_once_every_worker_has_answered() -> None:
    session = ready()
    session.request(Call("render", b""))
    assert session.event(0, CallFailed(RAISED)) == []
    assert session.event(1, CallResults([b"c"])) == [Fail(RAISED)]
    assert session.request(Step(b"\x04")) == [Drive(OP_STEP)]


def test_results_of_an_earlier_call_are_not_mixed_into_the_next() -> None:
    session = ready()
    session.request(Call("first", b""))
    session.event(1, CallResults([b"old"]))
    session.event(0, CallFailed(RAISED))
    numbers = {tell.message.number for tell in session.request(Call("second", b""))}  # type: ignore[union-attr]
    assert numbers == {2}
    session.event(0, CallResults([b"a", b"b"]))
    assert session.event(1, CallResults([b"c"])) == [Answer(Done(), rows=((0, b"a"), (1, b"c"), (2, b"b")))]


def test_set_attr_gives_each_worker_its_values() -> None:
    session = ready()
    assert session.request(SetAttr("gravity", [b"1", b"2", b"3"])) == [
        Tell(0, SetAttrRows("gravity", each=[b"1", b"3"], number=1)),
        Tell(1, SetAttrRows("gravity", each=[b"2"], number=1)),
    ]
    session.event(0, CallResults([b"", b""]))
    assert session.event(1, CallResults([b""])) == [Answer(Done(), rows=((0, b""), (1, b""), (2, b"")))]


def test_one_value_is_set_on_every_env() -> None:
    session = ready()
    assert session.request(SetAttr("gravity", [b"1"])) == [
        Tell(0, SetAttrRows("gravity", b"1", number=1)),
        Tell(1, SetAttrRows("gravity", b"1", number=1)),
    ]


@pytest.mark.parametrize("count", [0, 2, 4])
def test_values_of_another_number_are_refused_and_nothing_is_set(count: int) -> None:
    session = ready()
    (fail,) = session.request(SetAttr("gravity", [b"1"] * count))
    assert isinstance(fail, Fail) and fail.failure.code == "refused" and f"got {count}" in fail.failure.message
    assert session.phase is Phase.READY


# --- closing ----------------------------------------------------------------------------------------------------------


def test_close_is_answered_when_the_last_worker_has_ended() -> None:
    session = ready()
    assert session.request(Close()) == [Tell(0, CloseEnvs()), Tell(1, CloseEnvs())]
    assert session.phase is Phase.CLOSING
    assert session.event(1, Exited(ExitCause("exited with status 0"))) == []
    assert session.event(0, Exited(ExitCause("exited with status 0"))) == [Answer(Done()), End()]


def test_close_with_terminate_kills_the_workers() -> None:
    session = ready()
    assert session.request(Close(terminate=True)) == [Kill(0), Kill(1)]
    session.event(0, Exited(ExitCause("was ended by SIGKILL")))
    assert session.event(1, Exited(ExitCause("was ended by SIGKILL"))) == [Answer(Done()), End()]


def test_exception_in_close_is_told_and_the_session_ends_all_the_same() -> None:
    session = ready(2, 1)
    session.request(Close())
    session.event(0, RowFailed(RAISED))
    assert session.event(0, Exited(ExitCause("exited with status 0"))) == [Fail(RAISED), End()]


def test_close_after_an_exception_in_step_is_answered_without_it() -> None:
    session = ready(1, 1)
    session.request(Step(b"\x04"))
    session.event(0, RowFailed(RAISED))
    session.moved()
    session.request(Close())
    assert session.event(0, Exited(ExitCause("exited with status 0"))) == [Answer(Done()), End()]


def test_workers_that_do_not_close_in_time_are_killed() -> None:
    session = ready()
    session.request(Close())
    session.event(0, Exited(ExitCause("exited with status 0")))
    assert session.close(terminate=True) == [Kill(1)]
    assert session.event(1, Exited(ExitCause("was ended by SIGKILL"))) == [Answer(Done()), End()]


def test_requests_while_closing_are_refused() -> None:
    session = ready()
    session.abandon(STOPPING, terminate=False)
    (fail,) = session.request(Step(b"\x04"))
    assert isinstance(fail, Fail) and "closing" in fail.failure.message


def test_close_of_a_session_that_is_ending_anyway_is_answered_at_its_end() -> None:
    session = ready(1, 1)
    assert session.abandon(STOPPING, terminate=False) == [Tell(0, CloseEnvs())]
    assert session.request(Close()) == []
    assert session.event(0, Exited(ExitCause("exited with status 0"))) == [Answer(Done()), End()]


def test_abandoned_session_tells_the_request_under_way_why() -> None:
    session = ready()
    session.request(Step(b"\x04"))
    assert session.abandon(STOPPING, terminate=False) == [Fail(STOPPING), Tell(0, CloseEnvs()), Tell(1, CloseEnvs())]
    session.event(0, Exited(ExitCause("exited with status 0")))
    assert session.event(1, Exited(ExitCause("exited with status 0"))) == [End()]


def test_idle_session_is_abandoned_without_a_word() -> None:
    assert ready().abandon(STOPPING, terminate=True) == [Kill(0), Kill(1)]


def test_session_abandoned_while_building_fails_its_make() -> None:
    session = begun()
    assert session.abandon(STOPPING, terminate=False) == [Fail(STOPPING), Tell(0, CloseEnvs()), Tell(1, CloseEnvs())]
