"""Objects with the interface of dm_env or of PettingZoo, without these packages: what counts is their methods."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from envhub_server.worker.other_interfaces import DmEnv, ParallelEnv, as_gymnasium
from gymnasium import spaces

FIRST, MID, LAST = range(3)


class Step(SimpleNamespace):
    def last(self) -> bool:
        return bool(self.step_type == LAST)


def spec(dtype: Any = float, shape: tuple[int, ...] = (), **bounds: Any) -> SimpleNamespace:
    return SimpleNamespace(dtype=np.dtype(dtype), shape=shape, **bounds)


class Walk:
    """A dm_env environment that ends after three steps with a discount of its choice."""

    def __init__(self, discount: float = 1.0, rewards: Any = None) -> None:
        self.steps, self.discount, self.actions = 0, discount, []  # type: ignore[var-annotated]
        self.reward_spec = lambda: spec() if rewards is None else rewards
        self.closed = False

    def observation_spec(self) -> Any:
        parts = {"z": spec(np.float32, (2,)), "a": [spec(np.int32), spec(bool)], "n": spec(np.int64, num_values=4)}
        return OrderedDict(parts)

    def action_spec(self) -> Any:
        return spec(np.float64, (2,), minimum=-1.0, maximum=np.array([1.0, 2.0]))

    def observation(self) -> Any:
        return {"z": np.full(2, self.steps, np.float32), "a": [self.steps, True], "n": self.steps}

    def reset(self) -> Step:
        self.steps = 0
        return Step(step_type=FIRST, reward=None, discount=None, observation=self.observation())

    def step(self, action: Any) -> Step:
        self.steps += 1
        self.actions.append(action)
        kind, discount = (LAST, self.discount) if self.steps == 3 else (MID, 1.0)
        return Step(step_type=kind, reward=0.5, discount=discount, observation=self.observation())

    def close(self) -> None:
        self.closed = True


def test_specs_become_spaces_in_the_order_of_their_keys() -> None:
    env = DmEnv(Walk())
    kinds = {key: type(space) for key, space in env.observation_space.items()}
    assert list(kinds.items()) == [("z", spaces.Box), ("a", spaces.Tuple), ("n", spaces.Discrete)]
    assert env.observation_space["a"][1].dtype == bool and env.observation_space["n"].n == 4
    assert env.observation_space["z"] == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert env.action_space == spaces.Box(np.array([-1.0, -1.0]), np.array([1.0, 2.0]), dtype=np.float64)


def test_observation_may_have_the_keys_of_its_spec_as_attributes() -> None:
    class Seen(NamedTuple):
        grid: Any
        inside: Any

    class Grid(Walk):
        def observation_spec(self) -> Any:
            return {"grid": spec(np.int32, (2,)), "inside": {"count": spec(np.int32)}}

        def observation(self) -> Any:
            return Seen(np.array([1, 2], np.int32), SimpleNamespace(count=3))

    observation, _ = as_gymnasium(Grid(), "grid").reset()
    assert observation["grid"].tolist() == [1, 2] and observation["grid"].dtype == np.int32
    assert observation["inside"] == {"count": 3}


@pytest.mark.parametrize("discount", [0.0, 0.3, 1.0])
def test_episode_of_dm_env_is_terminated_if_its_discount_is_zero(discount: float) -> None:
    env = DmEnv(Walk(discount))
    observation, info = env.reset()
    assert info == {} and env.observation_space.contains(observation)
    ends = [env.step(np.zeros(2))[1:] for _ in range(3)]
    assert ends[:2] == [(0.5, False, False, {"timestep.discount": 1.0})] * 2
    assert ends[2] == (0.5, discount == 0, discount != 0, {"timestep.discount": discount})


def test_stepping_an_ended_dm_env_begins_an_episode_without_a_reward() -> None:
    env = DmEnv(Walk())
    env.env.step = lambda action: env.env.reset()
    assert env.step(np.zeros(2))[1:] == (0.0, False, False, {})


@pytest.mark.parametrize("place", ["task", "env"])
def test_seed_of_dm_control_seeds_the_random_state_that_it_has(place: str) -> None:
    walk, random = Walk(), np.random.RandomState(1)
    if place == "task":
        walk.task = SimpleNamespace(random=random)  # type: ignore[attr-defined]
    else:
        walk.random_state = random  # type: ignore[attr-defined]
    env = DmEnv(walk)
    assert env.np_random_seed == -1
    env.reset(seed=5)
    assert random.rand() == np.random.RandomState(5).rand() and env.np_random_seed == 5
    env.reset()
    assert random.rand() != np.random.RandomState(5).rand() and env.get_wrapper_attr("np_random_seed") == 5
    assert isinstance(env.get_wrapper_attr("np_random"), np.random.Generator)


def test_seed_that_nothing_takes_is_warned_of() -> None:
    env = DmEnv(Walk())
    with pytest.warns(UserWarning, match="takes no seed"):
        env.reset(seed=5)
    with pytest.raises(AttributeError, match="np_random"):
        env.get_wrapper_attr("np_random")


@pytest.mark.parametrize("rewards", [[spec(), spec()], {"a": spec()}, spec(float, (2,))])
def test_dm_env_with_more_than_one_reward_is_refused(rewards: Any) -> None:
    with pytest.raises(TypeError, match="a reward of an env is one number"):
        DmEnv(Walk(rewards=rewards))


def test_dm_env_with_a_spec_of_text_is_refused() -> None:
    walk = Walk()
    walk.action_spec = lambda: spec(object, string_type=str)  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="only specs of numbers"):
        DmEnv(walk)


def test_attributes_reach_the_object_and_the_env_keeps_its_own() -> None:
    env = DmEnv(Walk())
    assert env.get_wrapper_attr("discount") == 1.0 and env.has_wrapper_attr("steps")
    assert env.set_wrapper_attr("discount", 0.5) and env.env.discount == 0.5
    assert env.set_wrapper_attr("fresh", 1) and env.env.fresh == 1
    assert not env.set_wrapper_attr("none", 1, force=False) and not env.has_wrapper_attr("none")
    assert env.get_wrapper_attr("action_space") is env.action_space
    env.close()
    assert env.env.closed


# --- PettingZoo -------------------------------------------------------------------------------------------------------


class Game:
    """A parallel env in which agent ``i`` ends after ``i + 1`` steps, in the way that ``ends`` says."""

    possible_agents = [0, 1, 2]
    metadata = {"name": "game", "render_fps": 5}
    render_mode = "rgb_array"

    def __init__(self, ends: tuple[str, str, str] = ("dead", "dead", "dead"), late: int = -1) -> None:
        self.ends, self.late, self.acted = ends, late, []  # type: ignore[var-annotated]

    def observation_space(self, agent: int) -> Any:
        low = 0.5 if agent == 2 else 0.0
        return spaces.Dict({"position": spaces.Box(low, 9, (2,)), "kind": spaces.Discrete(3, start=1)})

    def action_space(self, agent: int) -> Any:
        return spaces.Discrete(agent + 2)

    def _observations(self) -> Any:
        return {agent: {"position": np.full(2, 7.0, np.float32), "kind": 2} for agent in self.agents}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.seeded, self.options, self.steps = seed, options, 0
        self.agents = [agent for agent in self.possible_agents if agent != self.late]
        return self._observations(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.acted.append(actions)
        acting, self.steps = list(actions), self.steps + 1
        ends = {agent: agent < self.steps for agent in acting}
        observations = self._observations()
        self.agents = [agent for agent in self.agents if not ends[agent]]
        return (
            observations,
            {agent: 1 + agent for agent in acting},
            {agent: ends[agent] and self.ends[agent] == "dead" for agent in acting},
            {agent: ends[agent] and self.ends[agent] == "late" for agent in acting},
            {agent: {"steps": self.steps} for agent in acting},
        )

    def render(self) -> Any:
        return np.zeros((4, 4, 3), np.uint8)


ACTION = {"0": 1, "1": 2, "2": 3}


def lists(info: Any) -> Any:
    """The info with lists for arrays, which are of bool."""
    assert all(value.dtype == np.bool_ for value in info.values() if isinstance(value, np.ndarray))
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in info.items()}


def test_agents_are_the_keys_of_one_env() -> None:
    env = as_gymnasium(Game(), "it")
    assert list(env.observation_space) == list(env.action_space) == ["0", "1", "2"]
    assert env.action_space["2"] == spaces.Discrete(4)
    assert env.metadata["render_fps"] == 5 and env.render_mode == "rgb_array" and env.render().shape == (4, 4, 3)
    observation, info = env.reset(seed=3, options={"a": 1})
    assert env.observation_space.contains(observation) and lists(info) == {"alive": [1, 1, 1], "observed": [1, 1, 1]}
    assert (env.env.seeded, env.env.options, env.np_random_seed) == (3, {"a": 1}, 3)


def test_agent_that_is_dead_sends_no_action_and_observes_what_is_nearest_to_zero() -> None:
    env = ParallelEnv(Game())
    env.reset()
    steps = [env.step(ACTION) for _ in range(3)]
    assert env.env.acted == [{0: 1, 1: 2, 2: 3}, {1: 2, 2: 3}, {2: 3}]
    assert [step[1] for step in steps] == [6.0, 5.0, 3.0]
    assert [step[2:4] for step in steps] == [(False, False), (False, False), (True, False)]
    assert all(env.observation_space.contains(step[0]) for step in steps)
    last = steps[1][0]
    assert last["0"]["position"].tolist() == [0, 0] and last["0"]["kind"] == 1 and last["2"]["kind"] == 2
    assert lists(steps[1][4]) == {
        "rewards": {"0": 0.0, "1": 2.0, "2": 3.0},
        "terminations": {"0": True, "1": True, "2": False},
        "truncations": {"0": False, "1": False, "2": False},
        "alive": [0, 0, 1],
        "observed": [0, 1, 1],
        "reported": [0, 1, 1],
        "agent_infos": {"1": {"steps": 2}, "2": {"steps": 2}},
    }
    env.reset()
    assert env.step(ACTION)[4]["terminations"] == {"0": True, "1": False, "2": False}


@pytest.mark.parametrize("ends", [("dead", "dead", "late"), ("late", "late", "late"), ("late", "dead", "dead")])
def test_episode_in_which_an_agent_was_truncated_is_truncated(ends: Any) -> None:
    env = ParallelEnv(Game(ends))
    env.reset()
    assert [env.step(ACTION)[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


def test_agent_that_never_came_does_not_count() -> None:
    env = ParallelEnv(Game(late=1))
    observation, info = env.reset()
    assert observation["1"]["position"].tolist() == [0, 0] and info["alive"].tolist() == [True, False, True]
    assert [env.step(ACTION)[2:4] for _ in range(3)][-1] == (True, False)


def test_agents_that_come_and_leave_without_a_flag_are_told() -> None:
    env = ParallelEnv(Game(late=1))
    env.reset()
    env.env.agents = [1, 2]  # agent 0 has left, and agent 1 has come
    _, _, terminated, truncated, info = env.step(ACTION)
    assert env.env.acted == [{1: 2, 2: 3}] and not terminated and not truncated
    assert lists(info)["alive"] == lists(info)["observed"] == lists(info)["reported"] == [False, True, True]


def test_episode_goes_on_with_an_agent_that_has_come_back_after_its_end() -> None:
    env = ParallelEnv(Game())
    env.reset()
    env.step(ACTION)
    env.step(ACTION)  # only agent 2 is alive
    step = env.env.step
    env.env.step = lambda actions: (step(actions), setattr(env.env, "agents", [0]))[0]
    _, _, terminated, truncated, info = env.step(ACTION)
    assert not terminated and not truncated and info["alive"].tolist() == [True, False, False]
    assert info["terminations"] == {"0": False, "1": True, "2": True}


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (1, {0: np.ones(2)}, r"returned array\(\[1., 1.\]\) as the reward of 0: an agent's reward is one number"),
        (1, {0: None}, "returned None as the reward of 0: an agent's reward is one number"),
        (2, {"__all__": False}, "agent '__all__', which is not in its possible_agents"),
        (3, {7: False}, "agent 7, which is not in its possible_agents"),
    ],
)
def test_reward_that_is_no_number_and_flag_of_no_agent_are_refused(place: int, value: Any, problem: str) -> None:
    env = ParallelEnv(Game())
    env.reset()
    results = [{}, {}, {}, {}, {}]
    results[place] = value
    env.env.step = lambda actions: tuple(results)
    with pytest.raises((TypeError, ValueError), match=problem):
        env.step(ACTION)


@pytest.mark.parametrize(("results", "returned"), [(({}, {}, {}, {}), "a tuple of 4"), (None, "a NoneType")])
def test_step_of_a_parallel_env_without_five_values_is_told(results: Any, returned: str) -> None:
    env = ParallelEnv(Game())
    env.reset()
    env.env.step = lambda actions: results
    with pytest.raises(TypeError, match=f"step of .*Game.* returned {returned}, and not observations, rewards"):
        env.step(ACTION)


def test_agents_that_no_key_can_stand_for_are_refused() -> None:
    game = Game()
    game.possible_agents = [0, 1, "1"]  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"two agents of one text: \[0, 1, '1'\]"):
        ParallelEnv(game)


def test_episode_that_begins_without_an_agent_or_with_an_unknown_one_is_refused() -> None:
    env = ParallelEnv(Game())
    for agents, problem in [([], "no agent after its reset"), ([0, 7], "agent 7, which is not in its possible_agents")]:
        env.env.reset = lambda agents=agents, **_: (setattr(env.env, "agents", agents), ({}, {}))[1]
        with pytest.raises(ValueError, match=problem):
            env.reset()


def test_info_of_no_agent_is_kept() -> None:
    env = ParallelEnv(Game())
    env.env.reset = lambda **_: (setattr(env.env, "agents", [0]), ({}, {"common": {"turn": 1}}))[1]
    assert env.reset()[1]["agent_infos"] == {"common": {"turn": 1}}


def test_agent_whose_observations_have_no_zero_is_refused() -> None:
    game = Game()
    game.observation_space = lambda agent: spaces.Tuple([spaces.Text(3)])  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="agent 0 have a Text, which has no zero"):
        ParallelEnv(game)


# --- what is no env ---------------------------------------------------------------------------------------------------


def without(kind: Any, *names: str) -> Any:
    inherited = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("__") and name not in names}
    return type("Broken", (), inherited)()


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (without(Walk, "step"), "which is no dm_env environment: it has no `step`"),
        (without(Walk, "step", "action_spec"), "which is no dm_env environment: it has no `action_spec`, `step`"),
        (without(Game, "possible_agents"), "which is no PettingZoo parallel env: it has no `possible_agents`"),
        (SimpleNamespace(observation_space=1, action_space=1, reset=1), "which is no env: it has no `step`"),
        (Walk, "the class Walk in place of an env"),
        (
            SimpleNamespace(observation_space={"a": 1}, action_space=1, reset=1, step=1),
            "whose observation_space is {'a': 1} and no space of gymnasium.spaces",
        ),
    ],
)
def test_what_is_no_env_is_refused_naming_what_it_lacks(made: Any, problem: str) -> None:
    with pytest.raises(TypeError) as caught:
        as_gymnasium(made, "sims:make")
    assert str(caught.value).startswith("sims:make returned ") and problem in str(caught.value)


def test_env_whose_agents_take_turns_is_refused_with_what_to_return() -> None:
    game = Game()
    game.agent_iter = lambda: iter(())  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"take turns \(AEC\).*return parallel_env"):
        as_gymnasium(game, "it")
