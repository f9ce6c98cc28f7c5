"""RLlib's env runners on a fleet: one hub for each, and learning goes on after the loss of a hub or of a node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from envhub_client.fleet.report import reports
from hubs import ServedHub, serve
from ray.rllib.algorithms.ppo import PPOConfig

import envhub.rllib

pytestmark = pytest.mark.timeout(600)

RUNNERS = 3
NUM_ENVS = 2


def config(hub: Any, **env_config: Any) -> PPOConfig:
    """PPO of CartPole, with short iterations."""
    return (
        PPOConfig()
        .environment(
            envhub.rllib.register(),
            env_config={"env": "CartPole-v1", "hub": hub, "num_workers": 1, "step_timeout": 60.0, **env_config},
        )
        .env_runners(
            num_env_runners=RUNNERS,
            num_envs_per_env_runner=NUM_ENVS,
            gym_env_vectorize_mode="vector_entry_point",
            env_runner_cls=envhub.rllib.FleetEnvRunner,
        )
        .callbacks(envhub.rllib.CutEpisodes)
        .training(train_batch_size_per_learner=600, minibatch_size=200, num_epochs=2)
        .debugging(seed=1, log_level="ERROR")
    )


@contextlib.contextmanager
def learner(built: PPOConfig) -> Iterator[Any]:
    algorithm = built.build_algo()
    try:
        yield algorithm
    finally:
        algorithm.stop()


def hubs_of_runners(algorithm: Any) -> list[set[str]]:
    """The names of the hubs that have the envs of each env runner, in the runners' order."""

    def hubs(runner: Any) -> set[str]:  # in here, since Ray's processes cannot import this module
        envs = runner.env.unwrapped
        return {envs._session.hub_of(env) for env in range(envs.num_envs)}

    found: list[set[str]] = algorithm.env_runner_group.foreach_env_runner(hubs, local_env_runner=False)
    return found


def sessions(hub: str) -> dict[str, int | None]:
    """The number of sessions on each hub of a fleet, as ``envhub fleet ls`` prints it."""
    return {each.name: each.sessions for each in reports([hub], 10) if each.answers}


@pytest.fixture
def one_node() -> Iterator[None]:
    ray.init(num_cpus=RUNNERS + 1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def announced(tmp_path: Path) -> Iterator[tuple[str, Sequence[ServedHub]]]:
    """A fleet of three hubs, ``hub-0`` to ``hub-2``, which are announced in a folder."""
    folder = tmp_path / "announced"
    folder.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        hubs = []
        for number in range(RUNNERS):
            place = tmp_path / f"{number}"
            place.mkdir()
            options = "--name", f"hub-{number}", "--announce", str(folder)
            hubs.append(stack.enter_context(serve(place, "CartPole-v1", *options)))
        yield f"file://{folder}", hubs


def test_each_env_runner_has_a_hub_and_another_once_that_is_killed(
    one_node: None, announced: tuple[str, Sequence[ServedHub]]
) -> None:
    fleet, hubs = announced
    with learner(config(fleet)) as algorithm:
        first = algorithm.train()["env_runners"]
        assert hubs_of_runners(algorithm) == [{"hub-1"}, {"hub-2"}, {"hub-0"}]
        assert sessions(fleet) == {"hub-0": 1, "hub-1": 1, "hub-2": 1}
        hubs[2].process.kill()
        began_s = time.monotonic()
        second = algorithm.train()["env_runners"]
        print(f"the iteration with the loss took {time.monotonic() - began_s:.1f} s")
        third = algorithm.train()["env_runners"]
        used = hubs_of_runners(algorithm)
        assert used[0] == {"hub-1"} and used[2] == {"hub-0"} and used[1] in ({"hub-0"}, {"hub-1"})
        assert sum(count or 0 for count in sessions(fleet).values()) == RUNNERS
        cut = [result["num_cut_episodes"] for result in (first, second, third)]
        assert cut[0] == 0 and sum(cut) == NUM_ENVS
        sampled = [result["num_env_steps_sampled_lifetime"] for result in (first, second, third)]
        assert sampled[0] >= 600 and sampled[1] - sampled[0] >= 600 and sampled[2] - sampled[1] >= 600
