"""RLlib's multi-agent env runners over a hub, whose agents come and go, and after crashes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import team_envs
from hubs import kill_worker, worker_pid, worker_pids
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv

import envhub.rllib

pytestmark = pytest.mark.timeout(600)

AGENTS = ["scout", "guard", "late", "quitter"]
JOINS, QUITS, FALLS, LENGTH = team_envs.JOINS, team_envs.QUITS, team_envs.FALLS, team_envs.LENGTH


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def config(env_config: dict[str, Any], num_envs: int = 2) -> PPOConfig:
    return (
        PPOConfig()
        .environment(envhub.rllib.register(multi_agent=True), env_config=env_config)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs)
        .multi_agent(policies={*AGENTS}, policy_mapping_fn=lambda agent, episode, **kwargs: agent)
        .callbacks(envhub.rllib.CutEpisodes)
        .training(train_batch_size_per_learner=128, minibatch_size=64, num_epochs=1)
        .debugging(seed=1, log_level="ERROR")
    )


def lengths(episode: Any) -> dict[str, int]:
    return {agent: len(own) for agent, own in episode.agent_episodes.items()}


def test_agents_that_come_and_leave_have_their_own_steps() -> None:
    runner = MultiAgentEnvRunner(config=config({"env": team_envs.by_vectors}, num_envs=1))
    try:
        episodes = runner.sample(num_episodes=2, random_actions=True)
    finally:
        runner.stop()
    for episode in episodes:
        assert len(episode) == LENGTH and episode.is_truncated and not episode.is_terminated
        # The step with which the fourth leaves without an observation is its last one.
        assert lengths(episode) == {"scout": LENGTH, "guard": FALLS, "late": LENGTH - JOINS, "quitter": QUITS}
        ends = {agent: (own.is_terminated, own.is_truncated) for agent, own in episode.agent_episodes.items()}
        assert ends == {"scout": (False, True), "guard": (True, False), "late": (False, True), "quitter": (True, False)}


def test_rllibs_own_wrapper_is_equal_where_all_agents_are_there_from_the_start() -> None:
    env = envhub.rllib.multi_agent_env_creator({"env": team_envs.by_flags, "num_workers": 1})
    other = ParallelPettingZooEnv(team_envs.by_flags())
    assert env.possible_agents == AGENTS and {*other.possible_agents} == {*AGENTS} - {"late"}
    assert str(env.reset(seed=1)[0]["scout"]) == str(other.reset(seed=1)[0]["scout"])
    for step in range(LENGTH):
        actions = {agent: env.get_action_space(agent).sample() for agent in env.agents}
        found, expected = env.step(actions), other.step(actions)
        assert found[1] == expected[1]
        assert [flags["__all__"] for flags in found[2:4]] == [flags["__all__"] for flags in expected[2:4]]
        assert found[2]["__all__"] is False and found[3]["__all__"] is (step == LENGTH - 1)
    env.close()


def test_row_that_reports_a_crash_is_taken_out_of_each_agents_episode() -> None:
    runner = MultiAgentEnvRunner(config=config({"env": team_envs.by_vectors}))
    try:
        cut = runner.env.envs[0].unwrapped.par_env.hub_env
        cut.set_wrapper_attr("dies_at", QUITS + 2)
        samples = runner.sample(num_timesteps=2 * 7, random_actions=True)
        metrics = runner.get_metrics()
    finally:
        runner.stop()
    assert metrics["num_cut_episodes"].peek() == 1
    (done,) = [episode for episode in samples if episode.is_done]
    assert lengths(done) == {"scout": QUITS + 1, "guard": QUITS + 1, "late": QUITS + 1 - JOINS, "quitter": QUITS}
    for agent, own in done.agent_episodes.items():
        assert (own.is_terminated, own.is_truncated) == (agent == "quitter", agent != "quitter")
    for episode in samples:
        for own in episode.agent_episodes.values():
            assert not any(info.get("invalid_transition") for info in own.get_infos())
            assert own.module_id == own.agent_id and own.multi_agent_episode_id == episode.id_


def test_ppo_trains_and_goes_on_after_crashes() -> None:
    others = worker_pids()  # of sessions that are about to end
    algorithm = config({"env": "team_envs:by_vectors", "step_timeout": 20.0}).build_algo()
    try:
        first = algorithm.train()["env_runners"]
        assert first["num_cut_episodes"] == 0 and first["episode_len_mean"] == LENGTH
        cut = 0
        for _ in range(2):
            kill_worker(worker_pid(others))
            result = algorithm.train()
            cut += result["env_runners"]["num_cut_episodes"]
            assert {*AGENTS} <= result["learners"].keys()
    finally:
        algorithm.stop()
    assert cut == 2 and result["env_runners"]["num_env_steps_sampled_lifetime"] >= 3 * 128


def test_what_is_missing_is_named() -> None:
    with pytest.raises(TypeError, match="env_config needs 'env'"):
        envhub.rllib.multi_agent_env_creator({})
    with pytest.raises(TypeError, match="make takes no 'num_envs'"):
        envhub.rllib.multi_agent_env_creator({"env": team_envs.Team, "num_envs": 2})
