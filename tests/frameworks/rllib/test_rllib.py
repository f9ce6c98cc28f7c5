"""RLlib's env runners over a hub: by the id and by the creator, in this process and in Ray's, whole and env by env."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from hubs import kill_worker, serve, wait_until, worker_pid, worker_pids, worker_processes
from large_sims import Goals
from pages import blocks
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

import envhub.rllib

pytestmark = pytest.mark.timeout(600)

NUM_ENVS = 4


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def tcp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(tmp_path_factory.mktemp("hub"), "CartPole-v1") as hub:
        yield hub.tcp


def config(env: Any, env_config: dict[str, Any], mode: str = "vector_entry_point", runners: int = 0) -> PPOConfig:
    return (
        PPOConfig()
        .environment(env, env_config=env_config)
        .env_runners(
            num_env_runners=runners, num_envs_per_env_runner=NUM_ENVS, gym_env_vectorize_mode=mode, explore=True
        )
        .callbacks(envhub.rllib.CutEpisodes)
        .training(train_batch_size_per_learner=256, minibatch_size=128, num_epochs=1)
        .debugging(seed=1, log_level="ERROR")
    )


@pytest.mark.parametrize(("how", "mode", "runners"), [("id", "sync", 0), ("registered", "vector_entry_point", 2)])
def test_ppo_trains_in_each_way(how: str, mode: str, runners: int, tcp: str) -> None:
    def kinds(runner: Any) -> tuple[str, str]:  # in here, since Ray's processes cannot import this module
        envs = runner.env.unwrapped
        return type(envs).__name__, type(envs.envs[0].unwrapped).__name__ if hasattr(envs, "envs") else ""

    env_config = {"hub": tcp, "num_workers": 1, "step_timeout": 20.0}
    if how == "id":
        built = config("envhub:EnvHub/Remote-v0", {"env_id": "CartPole-v1", **env_config}, mode, runners)
    else:
        built = config(envhub.rllib.register(), {"env": "CartPole-v1", **env_config}, mode, runners)
    algorithm = built.build_algo()
    try:
        algorithm.train()
        result = algorithm.train()["env_runners"]
        made = algorithm.env_runner_group.foreach_env_runner(kinds, local_env_runner=runners == 0)
    finally:
        algorithm.stop()
    whole = ("SyncVectorEnv", "HubEnv") if mode == "sync" else ("HubVectorEnv", "")
    assert made == [whole] * max(runners, 1)
    assert result["num_env_steps_sampled_lifetime"] >= 512
    assert 8 <= result["episode_return_min"] <= result["episode_return_mean"] <= result["episode_return_max"] <= 500
    assert result["num_cut_episodes"] == 0


def test_options_of_make_vec_arrive() -> None:
    runner = SingleAgentEnvRunner(
        config=config(
            envhub.rllib.register(), {"env": "CartPole-v1", "num_workers": 2, "restart_wait": 7, "spin_us": 0}
        )
    )
    envs = runner.env.unwrapped
    assert (envs.num_workers, envs._session.options.faults.restart_wait) == (2, 7)
    runner.stop()
    envs = envhub.rllib.env_creator({"env": "CartPole-v1", "num_envs": 2})
    assert envs._session.options.faults.restart_wait == 30
    envs.close()


def test_workers_import_neither_ray_nor_torch() -> None:
    before = {each.pid for each in worker_processes(os.getpid())}
    runner = SingleAgentEnvRunner(config=config(envhub.rllib.register(), {"env": "CartPole-v1", "num_workers": 2}))
    try:
        own = {each.pid for each in worker_processes(os.getpid())} - before
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in own]
        assert len(maps) == 2 and not any(name in each for name in ("_raylet", "libtorch") for each in maps)
    finally:
        runner.stop()


def test_what_is_missing_is_named() -> None:
    with pytest.raises(TypeError, match="env_config needs 'env'"):
        envhub.rllib.env_creator({"num_envs": 2})
    with pytest.raises(TypeError, match="autoreset_mode is not to be given: RLlib"):
        envhub.rllib.env_creator({"env": "CartPole-v1", "num_envs": 2, "autoreset_mode": "SameStep"})


def test_cut_episodes_are_kept_apart(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1") as hub:
        env_config = {"env": "CartPole-v1", "hub": hub.ipc, "num_workers": 2}
        runner = SingleAgentEnvRunner(config=config(envhub.rllib.register(), env_config))
        # No CartPole falls within 7 steps: an env whose episode had just ended would be cut in none.
        before = runner.sample(num_timesteps=6 * NUM_ENVS, random_actions=True)
        running = {episode.id_: len(episode) for episode in before if not episode.is_done}
        kill_worker(hub.workers()[0].pid)
        samples = runner.sample(num_timesteps=100 * NUM_ENVS, random_actions=True)
        metrics = runner.get_metrics()
        runner.stop()
    cut = int(metrics["num_cut_episodes"].peek())
    assert cut == 2  # of the envs of one worker
    # The row that reports the crash was each cut episode's first of this sample, so nothing of them is left in it.
    ended = [episode for episode in samples if episode.is_done]
    assert len([episode for episode in samples if episode.id_ in running]) == len(running) - cut
    for episode in samples:
        infos, observations = episode.get_infos(), episode.get_observations()
        assert not any(info.get("invalid_transition") for info in infos)
        assert (episode.get_rewards() == 1).all() and not (observations[1:] == observations[:-1]).all(axis=1).any()
    whole = [episode.get_return() + running.get(episode.id_, 0) for episode in [*before, *ended] if episode.is_done]
    assert metrics["whole_episode_return_mean"].peek() == pytest.approx(np.mean(whole[-100:]))


def test_a_row_that_reports_a_crash_leaves_the_rest_of_its_episode() -> None:
    others = worker_pids()  # of sessions that are about to end
    runner = SingleAgentEnvRunner(
        config=config(envhub.rllib.register(), {"env": "CartPole-v1", "num_workers": NUM_ENVS})
    )
    runner.env.unwrapped.set_attr("theta_threshold_radians", 100.0)  # no episode ends by itself
    runner.env.unwrapped.set_attr("x_threshold", 1e6)
    steps, killed = 0, worker_pid(others)
    step = runner.env.step

    def step_and_kill(actions: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 10:
            kill_worker(killed)
        return step(actions)

    runner.env.step = step_and_kill
    samples = runner.sample(num_timesteps=14 * NUM_ENVS, random_actions=True)
    runner.stop()
    # The env that was killed at its 10th step has 9 before it, and 4 after the row that reports it and the reset: too
    # few for the new env, which has its own thresholds, to end by itself.
    assert sorted(len(episode) for episode in samples) == [4, 9, 15, 15, 15]
    (cut,) = [episode for episode in samples if episode.is_done]
    assert cut.is_truncated and not cut.is_terminated and len(cut) == 9 and len(cut.get_observations()) == 10


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("over_tcp", [False, True], ids=["private hub", "tcp"])
def test_the_example_learns(over_tcp: bool, tcp: str) -> None:
    spec = importlib.util.spec_from_file_location(
        "rllib_ppo", Path(__file__).parents[3] / "client/examples/rllib_ppo.py"
    )
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.learn(tcp if over_tcp else None, 2 if over_tcp else 0, 100_000, 1) >= 475


@pytest.mark.parametrize("many", [{}, {"num_envs": 2}], ids=["one env", "num_envs"])
def test_envs_whose_rewards_have_axes_are_refused(many: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"rewards of shape \(2,\), and for RLlib a reward is one number"):
        envhub.rllib.env_creator({"env": partial(Goals, declared=True), **many})
    env = envhub.rllib.env_creator({"env": Goals, **many})
    with closing(env):
        env.reset()
        with pytest.raises(ValueError, match=r"and for RLlib a reward is one number"):
            env.step(env.action_space.sample())
    assert wait_until(lambda: not worker_processes(os.getpid()))


@pytest.mark.parametrize("program", blocks("python rllib"))
def test_program_of_a_page_runs(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)
