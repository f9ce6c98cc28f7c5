"""One row of a worker: what its steps and resets store, and the first step of an env that replaces another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from envhub_server.ipc import control
from envhub_server.worker.row import DISABLED, NEXT_STEP, EnvRunner, Row
from envhub_server.worker.row_memory import CHECKED_FIRST_S, STEPS_CHECKED_FIRST, STEPS_PER_CHECK, CheckPlan, NotFinite
from gymnasium import spaces
from scripted_env import GIVE_INFO, GO_ON, LEAVE_THE_SPACE, RAISE, TERMINATE, ScriptedEnv

from envhub.arena.layout import Layout
from envhub.arena.memory import FIRST_CALL, FRESH, ONGOING, OP_RESET, OP_STEP, REPORT_PENDING, Arena, allocate
from envhub.env_failure import reseeded
from envhub.values import actions, codec
from envhub.values.info_columns import Template, Writer
from envhub.values.leaf import OBJECT
from envhub.values.spaces import leaves, space_mismatch

ROWS, INFO_BYTES, MINE = 3, 128, 1
INT64 = actions.DTYPES.index(np.dtype(np.int64))
INT8 = actions.DTYPES.index(np.dtype(np.int8))


class Place:
    """A row in an arena, and the driver's part in what it does."""

    def __init__(self, env: Any, mode: str, arena: Arena, columns: Writer | None = None) -> None:
        self.env, self.arena, self.columns = env, arena, columns
        self.sent: list[tuple[int, bytes]] = []
        self.suspected: list[str] = []
        build = control.Build(0, [MINE], "", b"", b"", "", [], mode, allow_pickle=False)
        self.row = Row(MINE, EnvRunner(env), build)
        self.attach(arena)

    def attach(self, arena: Arena) -> None:
        self.arena = arena
        spaces_of_env = self.env.observation_space, self.env.action_space
        self.row.attach(arena, *spaces_of_env, self._send, self.columns)

    def _send(self, message: Any) -> None:
        match message:
            case control.RowInfo(row, info, number):
                assert type(number) is int and number == self.arena.request[MINE]
                self.sent.append((row, info))
            case control.Suspicious(_, what):
                self.suspected.append(what)

    def post(self, op: int, action: int = GO_ON, code: int = INT64) -> None:
        dtype = actions.DTYPES[code]
        self.arena.actions[0][: ROWS * dtype.itemsize].view(dtype)[MINE] = action
        self.arena.action_codes[0][:] = code
        self.arena.post(op)

    def finish(self) -> None:
        """As the worker, after a step or reset that has not failed."""
        self.arena.done[:] = self.arena.request

    def step(self, action: int = GO_ON, code: int = INT64) -> None:
        self.post(OP_STEP, action, code)
        self.row.step()
        self.finish()

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.post(OP_RESET)
        self.row.reset(seed, options)
        self.finish()

    @property
    def slot(self) -> int:
        return int(self.arena.request[MINE]) & 1

    @property
    def observation(self) -> list[float]:
        found: list[float] = self.arena.observations[0][self.slot, MINE].tolist()
        return found

    @property
    def result(self) -> tuple[float, bool, bool]:
        arena = self.arena
        return float(arena.rewards[MINE]), bool(arena.terminations[MINE]), bool(arena.truncations[MINE])

    @property
    def needs_reset(self) -> int:
        return int(self.arena.needs_reset[MINE])

    @property
    def info(self) -> Any:
        length = int(self.arena.info_length[MINE])
        assert length <= INFO_BYTES and self.arena.info_template[MINE] == 0
        return codec.decode(self.arena.infos[MINE, :length].tobytes()) if length else None


def new_arena(env: Any) -> Arena:
    observed = tuple(leaf for leaf in leaves(env.observation_space) if leaf != OBJECT)
    layout = Layout(ROWS, observed, tuple(leaves(env.action_space)), INFO_BYTES)
    with open(allocate(layout), "r+b", buffering=0) as memory:
        arena = Arena(layout, memory.fileno())
    arena.format(epoch=1)
    return arena


def placed(mode: str = NEXT_STEP, env: Any = None, columns: Writer | None = None) -> Place:
    env = ScriptedEnv() if env is None else env
    return Place(env, mode, new_arena(env), columns)


def begun(mode: str = NEXT_STEP) -> Place:
    place = placed(mode)
    place.reset()
    return place


def test_actions_of_another_dtype_are_read_from_the_next_step_on() -> None:
    place = begun()
    place.step(GO_ON)
    place.step(TERMINATE, INT8)
    assert place.result == (2, True, False)


# --- infos ------------------------------------------------------------------------------------------------------------


def test_info_of_numbers_goes_to_columns_once_its_template_is_announced() -> None:
    announced: dict[int, Any] = {}
    columns = Writer(INFO_BYTES, lambda number, example, _: announced.__setitem__(number, codec.decode(example)))
    place = placed(columns=columns)
    place.reset()
    place.step(GIVE_INFO)
    place.step(GIVE_INFO)
    (number,) = announced
    template = Template(announced[number])
    assert place.arena.info_template[MINE] == number
    assert place.arena.info_length[MINE] == template.nbytes
    records = np.frombuffer(place.arena.infos[MINE, : template.nbytes].tobytes(), template.dtype)
    assert template.infos(records) == [{"n": 2}]
    place.step()
    assert place.arena.info_template[MINE] == place.arena.info_length[MINE] == 0


@pytest.mark.parametrize(("results", "told"), [((1, 2), "a tuple of 2"), (None, "a NoneType")])
def test_step_that_does_not_return_five_values_is_named(results: Any, told: str) -> None:
    class Odd(ScriptedEnv):
        def step(self, action: int) -> Any:
            return results

    place = placed(env=Odd())
    place.reset()
    with pytest.raises(TypeError, match=rf"step of env \d returned {told}, and not an observation, a reward"):
        place.step()


@pytest.mark.parametrize("slot_is_half_written", [False, True])
def test_failed_step_repeats_the_last_complete_observation(slot_is_half_written: bool) -> None:
    place = begun()
    place.step()
    place.post(OP_STEP, RAISE)
    with pytest.raises(RuntimeError, match="broke"):
        place.row.step()
    if slot_is_half_written:
        place.arena.observations[0][place.slot, MINE] = -7
    place.row.repeat_last()
    place.finish()
    assert place.observation == [1, 1] and place.arena.info_length[MINE] == 0
    place.step()
    assert place.observation == [1, 2]


# --- checked observations ---------------------------------------------------------------------------------------------


class Observing(ScriptedEnv):
    """Observes this element of this space."""

    def __init__(self, space: Any, observation: Any) -> None:
        super().__init__()
        self.observation_space, self.seen = space, observation

    def reset(self, **how: Any) -> Any:
        return self.seen, super().reset(**how)[1]

    def step(self, action: int) -> Any:
        return (self.seen, *super().step(action)[1:])


PAIR = spaces.Box(-np.inf, np.inf, (2,))
ILL_PAIR = np.array([1, np.nan], np.float32)


@pytest.mark.parametrize(
    ("space", "observation"),
    [
        (spaces.Graph(PAIR, None), spaces.GraphInstance(ILL_PAIR[None], None, None)),
        (spaces.Sequence(PAIR), (np.zeros(2, np.float32), ILL_PAIR)),
        (spaces.Sequence(spaces.Dict(x=PAIR), stack=True), {"x": ILL_PAIR[None]}),
        (spaces.OneOf([spaces.Discrete(2), PAIR]), (np.int64(1), ILL_PAIR)),
        (spaces.Dict(a=PAIR, b=spaces.Sequence(PAIR)), {"a": np.zeros(2, np.float32), "b": (ILL_PAIR,)}),
    ],
    ids=["graph", "sequence", "stacked-sequence", "one-of", "dict-of-sequence"],
)
def test_value_that_is_not_finite_is_refused_in_spaces_of_varying_size(space: Any, observation: Any) -> None:
    place = placed(env=Observing(space, observation))
    place.row._finite_only = True
    for ask in (place.reset, place.step):
        with pytest.raises(NotFinite, match="1 values of part"):
            ask()


class Rewarding(ScriptedEnv):
    """Gives this reward."""

    def __init__(self, reward: Any) -> None:
        super().__init__()
        self.reward = reward

    def step(self, action: int) -> Any:
        seen, _, *rest = super().step(action)
        return (seen, self.reward, *rest)


def test_reward_that_is_not_finite_is_refused() -> None:
    place = placed(env=Rewarding(np.inf))
    place.row._finite_only = True
    place.reset()
    with pytest.raises(NotFinite, match="a reward of inf"):
        place.step()


def test_space_that_cannot_tell_is_reported_once() -> None:
    class Strange(spaces.Box):
        def contains(self, x: Any) -> bool:
            raise ZeroDivisionError

    place = begun()
    place.env.observation_space = Strange(-1, 1, (2,))
    place.step()
    place.step()
    assert len(place.suspected) == 1 and "ZeroDivisionError" in place.suspected[0]


def test_after_the_first_steps_only_some_observations_are_checked() -> None:
    place = begun()
    for _ in range(STEPS_CHECKED_FIRST):
        place.step()
    place.step(LEAVE_THE_SPACE)
    assert place.suspected == []
    plan = CheckPlan()
    plan.plan_next(CHECKED_FIRST_S / 2)
    assert plan.steps_left == 1
    plan.plan_next(CHECKED_FIRST_S / 2)
    assert plan.steps_left == STEPS_PER_CHECK


# --- envs that replace others -----------------------------------------------------------------------------------------


def test_fresh_env_is_reset_by_its_first_step_with_the_seed_that_it_was_given() -> None:
    place = placed()
    place.arena.needs_reset[:] = FRESH
    place.row.take_over({MINE: 7}, None, b"", {})
    assert place.row.awaits_first_reset
    place.step(RAISE)  # which the env never sees
    assert (place.observation, place.result, place.needs_reset) == ([1, 0], (0, False, False), ONGOING)
    assert place.env.seeds == [7] and not place.row.awaits_first_reset
    place.step(TERMINATE)
    place.step()
    place.arena.needs_reset[:] = FRESH
    place.step()
    assert place.env.seeds == [7, None, None]


def test_fresh_env_of_disabled_mode_is_truncated_until_it_is_reset() -> None:
    place = placed(DISABLED)
    place.arena.needs_reset[:] = FRESH
    for _ in range(2):
        place.step()
        assert place.result == (0, False, True) and place.info == {"invalid_transition": True}
        assert place.needs_reset == FRESH
    place.reset()
    assert place.needs_reset == ONGOING and place.env.seeds == [None]


def test_env_that_replaces_one_with_an_unreported_failure_raises_that_failure_first() -> None:
    place = placed()
    place.arena.needs_reset[:] = REPORT_PENDING
    place.row.take_over({MINE: 7}, LookupError("its worker died"), b"", {})
    place.post(OP_STEP)
    with pytest.raises(LookupError, match="its worker died"):
        place.row.step()
    place.row.repeat_last()
    place.finish()
    assert place.needs_reset == FRESH and place.env.seeds == []
    place.step()
    assert place.env.seeds == [7] and place.needs_reset == ONGOING


def test_env_that_replaces_one_with_an_unreported_failure_is_truncated_first() -> None:
    place = placed()
    place.arena.needs_reset[:] = REPORT_PENDING
    place.row.take_over({MINE: 7}, None, codec.encode({"invalid_transition": True}), {})
    place.step()
    assert place.result == (0, False, True) and place.info == {"invalid_transition": True}
    assert place.needs_reset == FRESH and place.env.seeds == []
    place.step()
    assert place.observation == [1, 0] and place.env.seeds == [7]


def test_reset_discards_an_unreported_failure() -> None:
    place = placed()
    place.arena.needs_reset[:] = REPORT_PENDING
    place.row.take_over({MINE: 7}, LookupError("its worker died"), b"", {})
    place.reset(seed=9)
    place.step()
    assert place.env.seeds == [9] and place.observation == [1, 1]


def test_env_that_is_made_again_here_is_reset_with_a_seed_that_follows_from_the_last() -> None:
    place = placed()
    place.reset(seed=3)
    place.step()
    again = ScriptedEnv()
    place.post(OP_STEP, RAISE)
    place.row.truncate(b"")
    place.finish()
    place.row.rebuilt(EnvRunner(again))
    assert place.row.env is again and place.row.bits == MINE | FIRST_CALL
    place.step()
    assert again.seeds == [reseeded(3, 1)] and place.env.seeds == [3]


@pytest.mark.parametrize("pending", [False, True])
def test_row_goes_on_from_the_slot_that_holds_its_last_observation(pending: bool) -> None:
    place = begun()
    place.step()
    if pending:
        place.post(OP_STEP)
    place.attach(place.arena)  # as a worker that has just come
    if not pending:
        place.post(OP_STEP)
    place.row.repeat_last()
    assert place.observation == [1, 1]


# --- object leaves ----------------------------------------------------------------------------------------------------


class Talking(gymnasium.Env[Any, int]):
    """Observes a number and a word."""

    observation_space = spaces.Dict({"n": spaces.Discrete(100), "word": spaces.Text(9)})
    action_space = spaces.Discrete(8)

    def __init__(self) -> None:
        self.n = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return {"n": 0, "word": "zero"}, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == RAISE:
            raise RuntimeError("the simulator broke")
        self.n += 1
        return {"n": self.n, "word": f"word{self.n}"}, 0.0, False, False, {"n": self.n}


@pytest.fixture
def talking() -> Iterator[Place]:
    place = placed(env=Talking())
    place.reset()
    place.step()
    yield place


def said(place: Place) -> tuple[Any, Any]:
    objects, info = place.info
    return codec.decode(objects) if objects else None, codec.decode(info) if info else None


def test_row_that_repeats_its_observation_repeats_its_object_leaves(talking: Place) -> None:
    talking.post(OP_STEP, RAISE)
    with pytest.raises(RuntimeError):
        talking.row.step()
    talking.row.repeat_last()
    assert said(talking) == (["word1"], None)


def test_env_that_replaces_another_repeats_the_object_leaves_that_it_was_given() -> None:
    place = placed(env=Talking())
    place.arena.needs_reset[:] = REPORT_PENDING
    place.row.take_over({}, None, codec.encode({"invalid_transition": True}), {MINE: codec.encode(["before"])})
    place.step()
    assert said(place) == (["before"], {"invalid_transition": True})


SPACE = spaces.Dict(
    {
        "pos": spaces.Box(-1, 1, (2,)),
        "parts": spaces.Tuple([spaces.Discrete(5), spaces.Text(3)]),
        "any": spaces.Graph(spaces.Discrete(2), None),
    }
)
FITS = {"pos": np.zeros(2, np.float32), "parts": (1, "a"), "any": None}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "observation is None, and its space has the keys 'any', 'parts', 'pos'"),
        ({"pos": FITS["pos"], "parts": (1, "a")}, "observation has no 'any', which its space has"),
        ({**FITS, "pos": np.zeros(3)}, "observation['pos'] is of shape (3,), and its space of shape (2,)"),
        ({**FITS, "pos": None}, "observation['pos'] is None, and its space of shape (2,)"),
        ({**FITS, "pos": [[1], [1, 2]]}, "observation['pos'] is no array: its parts have several lengths"),
        ({**FITS, "parts": [2]}, "observation['parts'] has 1 parts, and its space 2"),
        ({**FITS, "parts": 3}, "observation['parts'] is a int, and its space a tuple of 2"),
        ({**FITS, "parts": (0.5, "a")}, "observation['parts'][0] is of dtype float64, and its space of dtype int64"),
        (
            {**FITS, "parts": (2**70, "a")},
            "observation['parts'][0] is an int of more than 64 bits, and its space of dtype int64",
        ),
        (FITS, ""),
    ],
)
def test_first_part_that_does_not_fit_is_named(value: Any, why: str) -> None:
    assert space_mismatch(SPACE, value, "observation") == why
