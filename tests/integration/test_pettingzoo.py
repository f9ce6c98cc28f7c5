"""Multi-agent envs of a hub: equal to the envs themselves in a plain loop, by agent and batched, and after failures."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import other_sims
import pytest
import team_envs
from gymnasium.error import ResetNeeded
from hubs import ServedHub, serve, wait_until
from pettingzoo.test import parallel_api_test, parallel_seed_test

import envhub
from envhub.pettingzoo import HubParallelEnv, HubParallelVectorEnv

LANES = ["in-process", "shared", "wire", "tcp"]
MODES = ["NextStep", "SameStep", "Disabled"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def teams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    offered = [f"{name}={factory}" for name, factory in team_envs.KINDS.items()]
    with serve(tmp_path_factory.mktemp("teams"), *offered, "CartPole-v1") as hub:
        yield hub


def options_of(lane: str, teams: ServedHub) -> dict[str, Any]:
    options = {"in-process": {"num_workers": 0}, "shared": {}, "wire": {"lane": "wire"}, "tcp": {"hub": teams.tcp}}
    return options[lane]


def made(name: str, lane: str, teams: ServedHub, **options: Any) -> HubParallelEnv:
    factory = name if lane == "tcp" else alone_of(name)
    return envhub.pettingzoo.make(factory, **options_of(lane, teams), **options)


def alone_of(name: str) -> Any:
    return {"team": team_envs.Team, "numbers": team_envs.by_number, "zombies": other_sims.zombies}[name]


def equal(found: Any, expected: Any) -> bool:
    """Whether both have the same keys and values; arrays also in their dtypes, and numbers in being whole."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, np.ndarray) and (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    return bool(np.asarray(found).dtype.kind == np.asarray(expected).dtype.kind and np.array_equal(found, expected))


def seeded(space: Any, seed: int) -> Any:
    space.seed(seed)
    return space


def played(env: Any, factory: Any, episodes: int = 2) -> int:
    """Play an env and the same in a plain loop, and compare all that they give; returns how many steps that took."""
    alone, steps = (alone_of(factory) if isinstance(factory, str) else factory)(), 0
    assert env.possible_agents == alone.possible_agents and env.agents == []
    actions = {agent: seeded(env.action_space(agent), 5) for agent in env.possible_agents}
    for seed in [3, *[None] * (episodes - 1)]:
        assert all(map(equal, env.reset(seed=seed), alone.reset(seed=seed)))
        assert {*env.agents} == {*alone.agents}
        while alone.agents:
            acts = {agent: actions[agent].sample() for agent in env.agents}
            results, expected = env.step(acts), list(alone.step(acts))
            expected[1] = {agent: float(reward) for agent, reward in expected[1].items()}
            assert all(map(equal, results, expected)), (results, expected)
            assert {*env.agents} == {*alone.agents}
            steps += 1
        assert env.agents == [] and env.step({}) == ({}, {}, {}, {}, {})
    return steps


# --- one env ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lane"),
    [
        *(("team", lane) for lane in LANES),
        ("numbers", "tcp"),
        *(pytest.param("numbers", lane, marks=pytest.mark.long) for lane in LANES[:-1]),
    ],
)
def test_env_is_equal_to_itself_in_a_plain_loop(name: str, lane: str, teams: ServedHub) -> None:
    with closing(made(name, lane, teams)) as env:
        assert played(env, name) == 2 * team_envs.LENGTH


@pytest.mark.long
@pytest.mark.parametrize("lane", ["shared", "tcp"])
def test_knights_archers_zombies_is_equal_to_itself_in_a_plain_loop(lane: str, teams: ServedHub) -> None:
    with closing(made("zombies", lane, teams)) as env:
        assert played(env, "zombies") > 50


@pytest.mark.parametrize(
    ("hosted", "alone"),
    [(team_envs.duel_in_turns, team_envs.duel), (team_envs.tic_tac_toe, team_envs.tic_tac_toe)],
    ids=["by the worker", "by its factory"],
)
def test_env_whose_agents_take_turns_is_made_parallel(hosted: Any, alone: Any) -> None:
    with closing(envhub.pettingzoo.make(hosted, num_workers=0)) as env:
        assert played(env, alone) > 0


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("lane", [pytest.param("shared", marks=pytest.mark.long), "tcp"])
def test_pettingzoos_own_tests_pass(lane: str, teams: ServedHub) -> None:
    def make() -> HubParallelEnv:
        return envhub.pettingzoo.make(
            "team_envs:by_flags" if lane == "shared" else "flagged", **options_of(lane, teams)
        )

    with closing(make()) as env:
        parallel_api_test(env, num_cycles=50)
    parallel_seed_test(make, num_cycles=20)


@pytest.mark.parametrize("lane", ["in-process", "tcp"])
def test_what_else_the_env_has_is_reached(lane: str, teams: ServedHub) -> None:
    with closing(made("team", lane, teams, render_mode="rgb_array")) as env:
        assert (env.render_mode, env.metadata["name"], env.max_num_agents, env.num_agents) == (
            "rgb_array",
            "team",
            4,
            0,
        )
        env.reset(seed=1)
        env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        assert env.render().tolist() == np.ones((4, 4, 3)).tolist()
        assert env.state_space is env.state_space and env.state_space.contains(env.state()) and env.state()[0] == 1
        assert env.quits is True and env.doubled(4) == 8
        assert not hasattr(env, "halved") and env.unwrapped is env
        assert env.observation_space("guard") is env.observation_space("guard")
        assert env.action_space("guard") is env.action_space("guard")


def test_actions_that_do_not_fit_are_refused_with_their_agents_name(teams: ServedHub) -> None:
    with closing(made("team", "in-process", teams)) as env:
        with pytest.raises(ResetNeeded, match="before the first reset"):
            env.step({})
        env.reset(seed=1)
        good = {"scout": 1, "guard": np.int64(2), "quitter": np.array([1, 3])}
        for changed, problem in [
            ({"guard": None}, "no action of agent 'guard', which is alive; the env has not moved"),
            ({"nobody": 1}, "an action of 'nobody', which is no agent of this env"),
            ({"scout": 3}, "the action of agent 'scout' is 3, which is not in Discrete(3)"),
            ({"quitter": np.array([1, 3, 1])}, "the action of agent 'quitter' is of shape (3,)"),
            ({"quitter": np.array([1, 4])}, "the action of agent 'quitter' is array([1, 4]), which is not in Multi"),
        ]:
            actions = {agent: action for agent, action in {**good, **changed}.items() if action is not None}
            with pytest.raises(envhub.SpaceMismatch, match=re.escape(problem)):
                env.step(actions)
        assert env.agents == ["scout", "guard", "quitter"] and env.steps == 0
        for _ in range(team_envs.JOINS):  # "late" is not alive yet, and its action ignored whatever it is
            env.step({**good, "late": None})
        # Numbers of another dtype are in the space, as for the env itself.
        env.step({**good, "late": np.zeros(2, np.float64)})
        assert env.agents == ["scout", "guard", "late"]


def test_what_is_no_parallel_env_is_refused(teams: ServedHub) -> None:
    before = len(teams.workers())
    with pytest.raises(TypeError, match="is no PettingZoo parallel env"):
        envhub.pettingzoo.make("CartPole-v1", hub=teams.tcp)
    with pytest.raises(TypeError, match="is no PettingZoo parallel env"):
        envhub.pettingzoo.make_vec("CartPole-v1", 2, hub=teams.tcp)
    with pytest.raises(TypeError, match="two agents of one text"):
        envhub.pettingzoo.make(lambda: team_envs.Team(("1", 1, 2, 3)), num_workers=0)
    assert wait_until(lambda: len(teams.workers()) <= before)  # one that lists what the hub offers may have been born


def test_agents_that_infos_of_a_batch_cannot_tell_apart_are_refused() -> None:
    twins = functools.partial(team_envs.Team, ("a", "_a", "b", "c"))
    with closing(envhub.pettingzoo.make(twins, num_workers=0)) as env:
        assert played(env, twins) > 0
    with pytest.raises(ValueError, match="agents 'a' and '_a' have one place in infos; rename one"):
        envhub.pettingzoo.make_vec(twins, 2, num_workers=0)


class LikeATeam(gym.Env):  # type: ignore[type-arg]
    """An env of Gymnasium that has agents, and no infos of them."""

    possible_agents = ["a"]
    observation_space = action_space = gym.spaces.Dict({"a": gym.spaces.Discrete(2)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return {"a": 1}, {}


class OfOtherKeys(LikeATeam):
    possible_agents = ["b"]


def test_env_that_does_not_say_which_agents_are_alive_is_refused() -> None:
    for make in (envhub.pettingzoo.make, envhub.pettingzoo.make_vec):
        refused = pytest.raises(envhub.RequestRefused, match="do not say which agents are alive")
        with closing(make(LikeATeam, num_workers=0)) as made, refused:
            made.reset()
    with pytest.raises(TypeError, match=r"with the agents \['b'\] has the observations .* which are not by agent"):
        envhub.pettingzoo.make(OfOtherKeys, num_workers=0)


def test_episode_without_agents_is_told(teams: ServedHub) -> None:
    with closing(made("team", "in-process", teams)) as env:
        with pytest.raises(ValueError, match="has no agent after its reset: an episode begins with one or more"):
            env.reset(options={"empty": True})
        assert env.reset(seed=1)[0].keys() == {*env.agents} and len(env.agents) == 3


# --- failures ---------------------------------------------------------------------------------------------------------


def steps_until_end(env: HubParallelEnv, observations: Any) -> tuple[Any, Any, Any]:
    """Step an env until no agent is alive; returns who acted last, what they saw before, and the last results."""
    while True:
        acting, before = list(env.agents), observations
        observations, *_ = results = env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        if not env.agents:
            return acting, before, results


@pytest.mark.parametrize("lane", [pytest.param("shared", marks=pytest.mark.long), "tcp"])
def test_end_of_a_process_truncates_the_living_agents(lane: str, teams: ServedHub) -> None:
    with closing(made("team", lane, teams)) as env:
        env.hub_env.set_wrapper_attr("dies_at", team_envs.QUITS + 1)
        acting, before, results = steps_until_end(env, env.reset(seed=2)[0])
        observations, rewards, terminations, truncations, infos = results
        assert acting == ["scout", "guard", "late"] == list(observations)
        assert equal(observations, {agent: before[agent] for agent in acting})
        assert rewards == dict.fromkeys(acting, 0.0) and terminations == dict.fromkeys(acting, False)
        assert truncations == dict.fromkeys(acting, True)
        assert all(info["invalid_transition"] and info["env_failure"].cause == "crash" for info in infos.values())
        env.hub_env.set_wrapper_attr("dies_at", -1)
        assert played(env, "team") == 2 * team_envs.LENGTH


def test_end_of_a_process_raises_where_the_policy_is_to_raise(teams: ServedHub) -> None:
    with closing(made("team", "shared", teams, on_crash="raise")) as env:
        env.hub_env.set_wrapper_attr("dies_at", 2)
        with pytest.raises(envhub.WorkerDied):
            steps_until_end(env, env.reset(seed=2)[0])
        assert env.agents == []
        env.hub_env.set_wrapper_attr("dies_at", -1)
        assert played(env, "team") == 2 * team_envs.LENGTH


def test_exception_of_the_env_is_raised_and_a_reset_goes_on(teams: ServedHub) -> None:
    with closing(made("team", "tcp", teams)) as env:
        env.hub_env.set_wrapper_attr("raises_at", 2)
        with pytest.raises(RuntimeError, match="the team is lost"):
            steps_until_end(env, env.reset(seed=2)[0])
        assert env.agents == []
        env.hub_env.set_wrapper_attr("raises_at", -1)
        assert played(env, "team") == 2 * team_envs.LENGTH


def test_exception_of_the_env_truncates_the_living_agents_where_the_policy_says_so(teams: ServedHub) -> None:
    with closing(made("team", "shared", teams, on_exception="truncate")) as env:
        env.hub_env.set_wrapper_attr("raises_at", 2)
        *_, (_, _, _, truncations, infos) = steps_until_end(env, env.reset(seed=2)[0])
        assert truncations == {"scout": True, "guard": True, "quitter": True}
        assert infos["guard"]["env_failure"].cause == "exception" and infos["guard"]["invalid_transition"]
        env.hub_env.set_wrapper_attr("raises_at", -1)
        assert played(env, "team") == 2 * team_envs.LENGTH


# --- batched ----------------------------------------------------------------------------------------------------------

NUM_ENVS, STEPS = 3, 25


class Loop:
    """Envs in a plain loop, with the autoreset of Gymnasium."""

    def __init__(self, name: str, mode: str) -> None:
        self.envs, self.mode = [alone_of(name)() for _ in range(NUM_ENVS)], mode
        self.ended = [False] * NUM_ENVS

    def reset(self, seed: int | None) -> list[Any]:
        self.ended = [False] * NUM_ENVS
        return [env.reset(seed=None if seed is None else seed + row)[0] for row, env in enumerate(self.envs)]

    def step(self, actions: Any) -> list[Any]:
        """Of each env what it gave, and the last observations of an episode."""
        return [self._step(row, actions) for row in range(NUM_ENVS)]

    def _step(self, row: int, actions: Any) -> Any:
        env = self.envs[row]
        if self.ended[row]:
            self.ended[row] = False
            return env.reset()[0], {}, {}, {}, {}, None
        results = env.step({agent: actions[agent][row] for agent in env.agents})
        self.ended[row] = not env.agents
        if self.ended[row] and self.mode == "SameStep":
            self.ended[row] = False
            return (env.reset()[0], *results[1:], results[0])
        return (*results, None)


def same_row(batch: Any, row: int, value: Any) -> bool:
    if isinstance(batch, dict):
        return all(same_row(batch[key], row, value[key]) for key in batch)
    return bool(np.array_equal(batch[row], value))


@pytest.mark.parametrize(
    ("lane", "mode", "name"),
    [
        ("in-process", "NextStep", "numbers"),
        ("tcp", "SameStep", "team"),
        ("shared", "Disabled", "team"),
        *(pytest.param(lane, mode, "team", marks=pytest.mark.long) for lane in LANES for mode in MODES),
    ],
)
def test_batch_is_equal_to_the_envs_in_a_plain_loop(lane: str, mode: str, name: str, teams: ServedHub) -> None:
    factory = name if lane == "tcp" else alone_of(name)
    loop = Loop(name, mode)
    made = envhub.pettingzoo.make_vec(factory, NUM_ENVS, autoreset_mode=mode, **options_of(lane, teams))
    with closing(made) as envs:
        agents = loop.envs[0].possible_agents
        assert envs.possible_agents == agents and envs.num_envs == NUM_ENVS
        spaces = [seeded(envs.action_space(agent), 1) for agent in agents]
        observations, _ = envs.reset(seed=7)
        check_observations(envs, observations, loop.reset(seed=7))
        ends = 0
        for _ in range(STEPS):
            actions = {agent: space.sample() for agent, space in zip(agents, spaces, strict=True)}
            before, results = envs.alive, loop.step(actions)
            observations, rewards, terminations, truncations, infos = envs.step(actions)
            check_observations(envs, observations, [each[0] for each in results])
            for agent in agents:
                assert (rewards[agent].dtype, truncations[agent].dtype) == (np.float64, np.bool_)
                assert rewards[agent].tolist() == [each[1].get(agent, 0.0) for each in results]
                assert terminations[agent].tolist() == [each[2].get(agent, False) for each in results]
                assert truncations[agent].tolist() == [each[3].get(agent, False) for each in results]
                assert not (terminations[agent] | truncations[agent])[~before[agent]].any()
            assert set(infos) <= {"agent_infos", "_agent_infos", "final_obs", "_final_obs", "final_info", "_final_info"}
            for row, (*_, final) in enumerate(results):
                told = infos["final_info"] if final is not None else infos
                for agent, info in results[row][4].items():
                    assert told["agent_infos"][agent]["total"][row] == info["total"]
                assert (final is not None) == bool(infos.get("_final_obs", [False] * NUM_ENVS)[row])
                if final is not None:
                    assert all(same_row({0: [infos["final_obs"][row][agent]]}, 0, {0: final[agent]}) for agent in final)
            ends += int(envs.ended.sum())
            if mode == "Disabled" and envs.ended.any():
                ended = envs.ended
                observations, _ = envs.reset(options={"reset_mask": ended})
                assert ended.all() and not envs.ended.any()
                check_observations(envs, observations, loop.reset(None))
        assert ends == NUM_ENVS * (STEPS // (team_envs.LENGTH + (mode == "NextStep")))


def check_observations(envs: HubParallelVectorEnv, observations: Any, expected: list[Any]) -> None:
    for agent in envs.possible_agents:
        assert envs.observation_space(agent).contains(observations[agent])
        for row, each in enumerate(expected):
            assert agent not in each or same_row(observations[agent], row, each[agent])
            alive = envs.alive[agent][row]
            assert not alive or agent in each


@pytest.mark.parametrize("mode", [*MODES[:2], pytest.param("Disabled", marks=pytest.mark.long)])
def test_a_batch_goes_on_when_a_process_ends(mode: str, teams: ServedHub) -> None:
    made = envhub.pettingzoo.make_vec(team_envs.Team, 2, autoreset_mode=mode, num_workers=2, restart_wait=60.0)
    with closing(made) as envs:
        envs.reset(seed=7)
        actions = {agent: envs.action_space(agent).sample() for agent in envs.possible_agents}
        envs.step(actions)
        envs.envs.set_attr("dies_at", 2, [1])
        before = envs.alive
        _, rewards, terminations, truncations, infos = envs.step(actions)
        assert infos["invalid_transition"].tolist() == [False, True] == envs.ended.tolist()
        assert infos["env_failure"][1].cause == "crash"
        for agent in envs.possible_agents:
            assert truncations[agent].tolist() == [False, before[agent][1]] and not terminations[agent].any()
            assert rewards[agent][1] == 0.0 and not envs.alive[agent][1]
        envs.envs.set_attr("dies_at", -1, [1])
        if mode == "Disabled":
            envs.reset(options={"reset_mask": envs.ended})
        else:
            envs.step(actions)
        assert [bool(alive[1]) for alive in envs.alive.values()] == [True, True, False, True]
        assert [bool(alive[0]) for alive in envs.alive.values()] == [True, True, mode != "Disabled", True]
        assert not envs.ended.any()


def test_actions_of_a_batch_that_do_not_fit_are_refused_with_their_agents_name(teams: ServedHub) -> None:
    with closing(envhub.pettingzoo.make_vec(team_envs.Team, 2, num_workers=0)) as envs:
        envs.reset(seed=1)
        actions = {agent: envs.action_space(agent).sample() for agent in envs.possible_agents}
        for changed, problem in [
            ({"guard": None}, "no actions of agent 'guard', which is alive in envs [0, 1]; no env has moved"),
            ({"nobody": [1, 2]}, "actions of 'nobody', which is no agent of these envs"),
            ({"quitter": np.zeros((2, 3), int)}, "the actions of agent 'quitter' is of shape (2, 3)"),
        ]:
            wrong = {agent: batch for agent, batch in {**actions, **changed}.items() if batch is not None}
            with pytest.raises(envhub.SpaceMismatch, match=re.escape(problem)):
                envs.step(wrong)
        assert envs.envs.get_attr("steps") == (0, 0)
        del actions["late"]  # which is alive nowhere
        envs.step(actions)


def test_pettingzoo_is_imported_when_it_is_used() -> None:
    program = "import sys, envhub; assert 'pettingzoo' not in sys.modules; print(envhub.pettingzoo.make.__module__)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout == "envhub_client.frameworks.pettingzoo\n", ran.stderr
