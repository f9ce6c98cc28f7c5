"""RLlib's sampling over a hub, beside its vectorize mode ``async``.

``pytest -m benchmark -n 0 -s tests/benchmarks/test_frameworks_rllib.py`` needs ``ray[rllib]``. The ratios are
printed with their targets; they fail no test.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hubs import serve

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

NUM_ENVS, STEPS, TURNS = 16, 200, 5
TARGETS = {"private hub": 2.0, "hub over tcp": 1.5}


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


@pytest.mark.parametrize("random_actions", [True, False], ids=["random actions", "a policy's actions"])
def test_rllib_sampling(random_actions: bool, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    import envhub.rllib

    name = envhub.rllib.register()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    with serve(tmp_path, "CartPole-v1") as hub:
        samplers = {
            "async": sampler("CartPole-v1", {}, "async", random_actions),
            "private hub": sampler(name, {"env": "CartPole-v1"}, "vector_entry_point", random_actions),
            "hub over tcp": sampler(
                name, {"env": "CartPole-v1", "hub": hub.tcp, "lane": "wire"}, "vector_entry_point", random_actions
            ),
        }
        rates: dict[str, list[float]] = {way: [] for way in samplers}
        for _ in range(TURNS):
            for way, sample in samplers.items():
                rates[way].append(sample())
    medians = {way: statistics.median(found) for way, found in rates.items()}
    for way, target in TARGETS.items():
        ratio = medians[way] / medians["async"]
        print(f"{way}: {medians[way]:,.0f} env-steps/s, {ratio:.2f} x async's {medians['async']:,.0f}; target {target}")
    assert all(min(found) > 0 for found in rates.values())
