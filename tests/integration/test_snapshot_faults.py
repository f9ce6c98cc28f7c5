"""Snapshots under names that are used again, of envs that get in the way, and with processes that end meanwhile."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hubs import ServedHub, below, kill_worker, serve, session_row, stopped, wait_until, worker_pids
from snapshot_sims import History, wander

import envhub
from envhub.protocol.messages import Reset


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(
        tmp_path_factory.mktemp("hub"), "history=snapshot_sims:History", "unseeded=snapshot_sims:Unseeded"
    ) as served:
        yield served


def made(hub: ServedHub, num_envs: int = 2, **options: Any) -> Any:
    envs = envhub.make_vec("history", num_envs, hub=hub.ipc, snapshots=True, **options)
    envs.reset(seed=1)
    return closing(envs)


@pytest.mark.long
def test_name_of_a_snapshot_that_was_dropped_is_free_for_another(hub: ServedHub) -> None:
    with made(hub) as envs:
        root = envs.snapshot(name="root")
        for _ in range(4):
            seen, *_ = envs.step(np.zeros(2, int))
            envs.drop(root)
            root = envs.snapshot(name="root")  # the last one is not referred to any more, and is no reason to drop this
            gc.collect()
            assert [each.name for each in envs.snapshots()] == ["root"]
            assert (envs.restore(root)[0] == seen).all()


def test_seed_of_a_restored_env_seeds_the_generators_that_it_would_have(hub: ServedHub) -> None:
    with closing(envhub.make_vec("unseeded", 2, hub=hub.ipc, snapshots=True)) as envs:
        envs.reset()  # without a seed, so that nothing is seeded by one
        snapshot = envs.snapshot()
        seeded, _ = envs.reset(seed=5)
        envs.restore(snapshot)
        assert (envs.reset(seed=5)[0] == seeded).all()


def test_client_that_comes_before_a_restored_env_was_seen_is_told_so(hub: ServedHub) -> None:
    with made(hub) as envs:
        seen, *_ = envs.step(np.zeros(2, int))
        snapshot = envs.snapshot(name="left")
        following, *_ = envs.step(np.ones(2, int))
        envs._ask("restore", snapshot.name, [0, 1], [0, 1])  # as one that is killed then
        token = envs.detach()
    with envhub.connect(hub.ipc) as client, closing(client.attach(token)) as taken:
        assert (taken.observe().observations == following).all()
        *_, truncations, infos = taken.step(np.ones(2, int))
        assert truncations.all() and infos["invalid_transition"].all()
        assert (taken.step(np.ones(2, int))[0] == seen).all()
        assert (taken.step(np.ones(2, int))[0] == following).all()


class Drawn(History):
    """Is drawn."""

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def render(self) -> np.ndarray:
        return np.zeros((2, 2, 3), np.uint8)


def test_env_that_is_restored_after_a_crash_and_drawn_is_where_its_next_result_says() -> None:
    before = worker_pids()
    with closing(envhub.make_vec(Drawn, 1, snapshots=True, on_crash="restore")) as envs:
        envs.reset(seed=1)
        seen, *_ = envs.step(np.zeros(1, int))
        snapshot = envs.snapshot()
        following, *_ = envs.step(np.ones(1, int))
        (worker,) = worker_pids() - before
        kill_worker(worker)
        while not envs.step(np.zeros(1, int))[3][0]:
            pass
        envs.render()
        assert (envs.step(np.ones(1, int))[0] == seen).all()
        assert (envs.step(np.ones(1, int))[0] == following).all()
        del snapshot


def test_env_that_ends_before_it_was_seen_and_goes_on_from_its_own_snapshot_is_lost_to_the_restore() -> None:
    first = worker_pids()
    with closing(envhub.make_vec(History, 2, snapshots=True, on_crash="restore")) as envs:
        envs.reset(seed=1)
        snapshot = envs.snapshot()
        before = worker_pids() - first
        envs._ask("restore", snapshot.name, [0], [1])
        assert wait_until(lambda: len(worker_pids() - first) == 2)
        (worker,) = worker_pids() - first - before
        kill_worker(worker)
        envs._last_reset = Reset([None, None], [True, False], snapshot=snapshot.name)
        envs._session.begin_reset(envs._last_reset)
        with pytest.raises(envhub.SnapshotLost, match="env 0 was not restored from"):
            envs.reset_wait()


class Waiting(History):
    """Waits for children that it does not have, and lets the kernel reap those that it has."""

    def reset(self, **options: Any) -> Any:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        with pytest.raises(ChildProcessError):
            os.wait()
        return super().step(action)


class Reaping(History):
    """Has a handler that waits for any child."""

    def reset(self, **options: Any) -> Any:
        def reap(*_: Any) -> None:
            with contextlib.suppress(ChildProcessError):
                os.wait()

        signal.signal(signal.SIGCHLD, reap)
        return super().reset(**options)


@pytest.mark.long
@pytest.mark.parametrize("env", [Waiting, Reaping])
def test_env_that_waits_for_children_is_copied_exactly(env: type[History]) -> None:
    with closing(envhub.make_vec(env, 2, snapshots=True)) as envs:
        assert wander(envs, 60, 1, [1, 2])["compared"] > 5


def test_env_whose_restored_process_is_killed_as_it_takes_its_place_is_lost_and_the_others_are_not(
    hub: ServedHub,
) -> None:
    with made(hub) as envs:
        seen, *_ = envs.step(np.zeros(2, int))
        snapshot = envs.snapshot()
        following, *_ = envs.step(np.ones(2, int))
        pids = [each["pid"] for each in session_row(hub.ipc, envs)["processes"]]
        raised: list[BaseException] = []

        def restore() -> None:
            try:
                envs.restore(snapshot)
            except envhub.errors.EnvHubError as error:
                raised.append(error)

        restoring = threading.Thread(target=restore)
        with stopped(pids[0]):  # so that it does not leave
            restoring.start()
            assert wait_until(lambda: not psutil.pid_exists(pids[1]))  # and this one has left, so all were ready
            (waiting,) = [each["pid"] for each in session_row(hub.ipc, envs)["processes"] if each["worker"] > 1]
            os.kill(waiting, signal.SIGKILL)
            assert wait_until(lambda: not psutil.pid_exists(waiting))
        restoring.join(30)
        assert not restoring.is_alive()
        assert [type(error) for error in raised] == [envhub.errors.SnapshotLost] and "env 0" in str(raised[0])
        assert (envs.observe().observations[1] == seen[1]).all()
        assert (envs.step(np.ones(2, int))[0][1] == following[1]).all()
        assert (envs.restore(snapshot)[0] == seen).all()
        assert (envs.step(np.ones(2, int))[0] == following).all()


@pytest.mark.long
def test_generations_of_an_env_hold_no_more_than_the_first_ones(hub: ServedHub) -> None:
    with made(hub, 1) as envs:

        def processes() -> list[int]:
            return [each["pid"] for each in session_row(hub.ipc, envs)["processes"]]

        def held() -> list[int]:
            assert wait_until(lambda: len(processes()) == 1)  # the one before has ended
            (worker,) = processes()
            of_hub, maps = psutil.Process(hub.process.pid), Path(f"/proc/{worker}/maps").read_text()
            snapshots = len(below(of_hub, "envhub-snapshot"))
            return [of_hub.num_fds(), psutil.Process(worker).num_fds(), maps.count("memfd:"), snapshots]

        snapshot, first = envs.snapshot(), [0]
        for generation in range(50):
            envs.restore(snapshot)
            envs.step(np.zeros(1, int))
            snapshot = envs.snapshot()
            envs.snapshots()  # and drop the one before
            if generation == 4:
                # The hub may still have the connection of the question before.
                first = min(held() for _ in range(5))
        assert wait_until(lambda: held() == first), (first, held())
        kept = [envs.snapshot() for _ in range(5)]
        # A channel and the descriptor of the process.
        assert wait_until(lambda: held()[0] == first[0] + 2 * len(kept))
