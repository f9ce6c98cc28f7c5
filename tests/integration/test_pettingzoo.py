"""Multi-agent envs of a hub: equal to the envs themselves in a plain loop, and after failures."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import team_envs
from envhub_client.frameworks import raise_missing
from gymnasium.error import ResetNeeded
from hubs import ServedHub, serve, wait_until
from pettingzoo.test import parallel_api_test, parallel_seed_test

import envhub
from envhub.pettingzoo import HubParallelEnv

LANES = ["shared", "wire", "tcp"]


@pytest.fixture(scope="module")
def teams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    offered = [f"{name}={factory}" for name, factory in team_envs.KINDS.items()]
    with serve(tmp_path_factory.mktemp("teams"), *offered, "CartPole-v1") as hub:
        yield hub


def options_of(lane: str, teams: ServedHub) -> dict[str, Any]:
    options = {"shared": {}, "wire": {"lane": "wire"}, "tcp": {"hub": teams.tcp}}
    return options[lane]


def made(name: str, lane: str, teams: ServedHub, **options: Any) -> HubParallelEnv:
    factory = name if lane == "tcp" else alone_of(name)
    return envhub.pettingzoo.make(factory, **options_of(lane, teams), **options)


def alone_of(name: str) -> Any:
    return {"team": team_envs.Team, "numbers": team_envs.by_number}[name]


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


@pytest.mark.parametrize(
    ("hosted", "alone"),
    [(team_envs.duel_in_turns, team_envs.duel), (team_envs.tic_tac_toe, team_envs.tic_tac_toe)],
    ids=["by the worker", "by its factory"],
)
def test_env_whose_agents_take_turns_is_made_parallel(hosted: Any, alone: Any) -> None:
    with closing(envhub.pettingzoo.make(hosted)) as env:
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


@pytest.mark.parametrize("lane", ["shared", "tcp"])
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


def test_env_goes_on_from_a_snapshot_with_the_agents_that_it_had(teams: ServedHub) -> None:
    with closing(made("team", "shared", teams, snapshots=True)) as env:
        env.reset(seed=1)

        def step() -> Any:
            return env.step({agent: seeded(env.action_space(agent), 5).sample() for agent in env.agents})

        for _ in range(team_envs.QUITS):
            shown, *_ = step()
        agents, snapshot = env.agents, env.hub_env.snapshot()
        following = [step() for _ in range(team_envs.LENGTH - team_envs.QUITS)]
        assert env.agents == [] and len(agents) == 3
        observations, _ = env.restore(snapshot)
        assert env.agents == agents and equal(observations, {agent: shown[agent] for agent in observations})
        again = [step() for _ in following]
        assert all(all(map(equal, *pair)) for pair in zip(again, following, strict=True))


def test_actions_that_do_not_fit_are_refused_with_their_agents_name(teams: ServedHub) -> None:
    with closing(made("team", "shared", teams)) as env:
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
    with pytest.raises(TypeError, match="two agents of one text"):
        envhub.pettingzoo.make(lambda: team_envs.Team(("1", 1, 2, 3)))
    assert wait_until(lambda: len(teams.workers()) <= before)  # one that lists what the hub offers may have been born


def test_episode_without_agents_is_told(teams: ServedHub) -> None:
    with closing(made("team", "shared", teams)) as env:
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


def test_user_of_batches_reads_which_way_is_left(teams: ServedHub) -> None:
    before = len(teams.workers())
    makes: list[Any] = [
        lambda: envhub.make_vec("team", 2, hub=teams.tcp),
        lambda: envhub.make_vec(team_envs.Team, 1),
        lambda: envhub.AsyncVectorEnv([team_envs.Team]),
    ]
    for make in makes:
        with pytest.raises(TypeError, match=r"multi-agent envs are not batched: envhub.pettingzoo.make gives one as a"):
            make()
    assert wait_until(lambda: len(teams.workers()) <= before)


def test_name_that_is_retired_says_what_is_left() -> None:
    with pytest.raises(ImportError, match=r"make_vec is retired: make a ParallelEnv for each env by envhub.pettingzoo"):
        getattr(envhub.pettingzoo, "make_vec")  # noqa: B009
    with pytest.raises(ImportError, match=r"WholeEpisodeMonitor is retired: use VecMonitor, .*frameworks\.md shows"):
        raise_missing("envhub.sb3", "WholeEpisodeMonitor")
    with pytest.raises(AttributeError, match=r"module 'envhub.pettingzoo' has no attribute 'mkae'"):
        getattr(envhub.pettingzoo, "mkae")  # noqa: B009


def test_pettingzoo_is_imported_when_it_is_used() -> None:
    program = "import sys, envhub; assert 'pettingzoo' not in sys.modules; print(envhub.pettingzoo.make.__module__)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout == "envhub_client.frameworks.pettingzoo\n", ran.stderr
