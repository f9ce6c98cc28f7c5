"""RLlib's sampling over a hub, beside its vectorize mode ``async``.

``pytest -m benchmark -n 0 -s tests/benchmarks/test_frameworks_rllib.py`` needs ``ray[rllib]``. The ratios are
printed with their targets; they fail no test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hubs import serve
from turns import tell_ratios

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

NUM_ENVS, STEPS = 16, 200


def sampler(env: str, env_config: dict[str, Any], mode: str, random_actions: bool) -> Callable[[], float]:
    """A function that samples once, and returns the env-steps per second."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    built = (
        PPOConfig()
        .environment(env, env_config=env_config)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=NUM_ENVS, gym_env_vectorize_mode=mode)
    )
    runner = SingleAgentEnvRunner(config=built)
    runner.sample(num_timesteps=20 * NUM_ENVS, random_actions=random_actions)

    def sample() -> float:
        start_s = time.perf_counter()
        runner.sample(num_timesteps=STEPS * NUM_ENVS, random_actions=random_actions)
        return STEPS * NUM_ENVS / (time.perf_counter() - start_s)

    return sample


@pytest.mark.parametrize("actions", ["random actions", "a policy's actions"])
def test_rllib_sampling(actions: str, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    import envhub.rllib

    name, random_actions = envhub.rllib.register(), actions == "random actions"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    with serve(tmp_path, "CartPole-v1") as hub:
        samplers = {
            "async": sampler("CartPole-v1", {}, "async", random_actions),
            "private hub": sampler(name, {"env": "CartPole-v1"}, "vector_entry_point", random_actions),
            "tcp": sampler(
                name, {"env": "CartPole-v1", "hub": hub.tcp, "lane": "wire"}, "vector_entry_point", random_actions
            ),
        }
        measure = f"RLlib sampling, CartPole-v1, {NUM_ENVS} envs, {actions}"
        tell_ratios(measure, samplers, "async", {"private hub": 2.0, "tcp": 1.5})
