"""RLlib's env runners on a fleet: one hub for each, and learning goes on after the loss of a hub or of a node."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from envhub_client.tools.console import reports
from hubs import ServedHub, serve
from pages import blocks
from ray._private.authentication_test_utils import reset_auth_token_state
from ray.cluster_utils import Cluster
from ray.rllib.algorithms.ppo import PPOConfig
from ray_clusters import ray_cluster

import envhub.rllib
from envhub.fleet import Fleet

pytestmark = pytest.mark.timeout(600)

RUNNERS = 3
NUM_ENVS = 4


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


def sessions(*hubs: str) -> dict[str, int | None]:
    """The number of sessions on each hub of these names, as ``envhub fleet ls`` prints it."""
    return {each.name: each.sessions for each in reports(hubs, 10) if each.answers}


@pytest.fixture
def one_node() -> Iterator[None]:
    ray.init(num_cpus=RUNNERS + 1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def three_hubs(tmp_path: Path) -> Iterator[Sequence[ServedHub]]:
    """Hubs of the names ``hub-0`` to ``hub-2``."""
    with contextlib.ExitStack() as stack:
        hubs = []
        for number in range(RUNNERS):
            place = tmp_path / f"{number}"
            place.mkdir()
            hubs.append(stack.enter_context(serve(place, "CartPole-v1", "--name", f"hub-{number}")))
        yield hubs


def test_each_env_runner_has_a_hub_and_another_once_that_is_killed(
    one_node: None, three_hubs: Sequence[ServedHub]
) -> None:
    addresses = [hub.ipc for hub in three_hubs]
    with learner(config(addresses)) as algorithm:
        first = algorithm.train()["env_runners"]
        assert hubs_of_runners(algorithm) == [{"hub-1"}, {"hub-2"}, {"hub-0"}]
        assert [*sessions(*addresses).values()] == [1] * RUNNERS
        three_hubs[2].stop(signal.SIGKILL)
        began_s = time.monotonic()
        second = algorithm.train()["env_runners"]
        print(f"the iteration with the loss took {time.monotonic() - began_s:.1f} s")
        third = algorithm.train()["env_runners"]
        used = hubs_of_runners(algorithm)
        assert used[0] == {"hub-1"} and used[2] == {"hub-0"} and used[1] in (used[0], used[2])
        assert sum(count or 0 for count in sessions(*addresses).values()) == RUNNERS
        cut = [result["num_cut_episodes"] for result in (first, second, third)]
        assert cut[0] == 0 and 1 <= sum(cut) <= NUM_ENVS  # an env whose episode had just ended is cut in none
        sampled = [result["num_env_steps_sampled_lifetime"] for result in (first, second, third)]
        assert sampled[0] >= 600 and sampled[1] - sampled[0] >= 600 and sampled[2] - sampled[1] >= 600


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head for the learner, and three nodes for a hub and an env runner each, which want a token."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ray_cluster(patch, RUNNERS, {"num_cpus": 0}, {"resources": {"sim": 1}}) as nodes,
    ):
        yield nodes
    reset_auth_token_state()


@pytest.fixture
def fleet(cluster: Cluster) -> Iterator[Fleet]:
    """A fleet of three hubs, each on a node of its own."""
    fleet = Fleet.up("sims", ["CartPole-v1"], hubs=RUNNERS, resources={"sim": 1}, timeout=120)
    yield fleet
    fleet.down()


@pytest.mark.long
def test_task_of_ray_steps_on_the_fleet_without_another_init(fleet: Fleet) -> None:
    @ray.remote
    def stepped() -> tuple[list[str], list[int]]:  # in here, since Ray's processes cannot import this module
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("ray.init is called")

        ray.init = refuse
        with contextlib.closing(envhub.make_vec("CartPole-v1", 4, hub="ray://sims")) as envs:
            envs.reset(seed=1)
            shape = envs.step([0, 1, 0, 1])[0].shape
        with contextlib.closing(envhub.make_vec("CartPole-v1", 2, hub="ray://sims", hub_index=1)) as envs:
            envs.reset(seed=1)
            hubs = sorted({str(envs._session.hub_of(env)) for env in range(2)})
        return hubs, [*shape]

    assert ray.get(stepped.remote(), timeout=120) == (["sims/1"], [4, 4])


@pytest.mark.long
def test_program_of_the_page_learns_on_the_fleet(fleet: Fleet) -> None:
    (program,) = blocks("python rllib-fleet")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert 8 <= float(ran.stdout.splitlines()[-1]) <= 500
