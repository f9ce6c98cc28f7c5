"""Snapshots of envs: exact, branched, refused, lost and dropped."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from combinations import each_value
from envhub_server.session.snapshots import DEPTH_MAX
from hubs import ServedHub, below, serve, session_row, wait_until, worker_pids
from snapshot_sims import History, wander

import envhub
from envhub.options import HubOptions

LANES = ["private", "shared", "wire"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), "history=snapshot_sims:History", "counter=sims:counter") as served:
        yield served


def made(hub: ServedHub, where: str, num_envs: int = 3, **options: Any) -> envhub.HubVectorEnv:
    address = {"private": None, "shared": hub.ipc, "wire": hub.tcp}[where]
    env, lane = "history" if address else History, "wire" if where == "wire" else "auto"
    envs = envhub.make_vec(env, num_envs, hub=address, lane=lane, snapshots=True, **options)
    envs.reset(seed=1)
    return envs


@pytest.mark.parametrize(
    ("where", "mode"), each_value(LANES, ["NextStep", "SameStep", "Disabled"], others=pytest.mark.long)
)
def test_rows_of_equal_histories_have_equal_results(hub: ServedHub, where: str, mode: str) -> None:
    with closing(made(hub, where, autoreset_mode=mode)) as envs:
        assert sum(wander(envs, 60, seed, [1, 2])["compared"] for seed in range(2)) > 20


def test_one_env_is_branched_into_many_by_seeds(hub: ServedHub) -> None:
    with closing(made(hub, "shared", 4)) as envs:
        seen, *_ = envs.step(np.arange(4))
        with envs.snapshot([0], name="fork") as snapshot:
            assert (snapshot.name, snapshot.env_ids, snapshot.steps) == ("fork", (0,), (1,))
            assert snapshot.depth == 1 and snapshot.nbytes > 1 << 16
            observations, infos = envs.restore(snapshot, env_ids=[1, 2, 3], source=0)
            assert (observations[1:] == seen[0]).all() and infos["steps"].tolist() == [0, 1, 1, 1]
            branches, *_ = envs.step(np.zeros(4, int))
            assert (branches == branches[0]).all()
            envs.restore("fork", env_ids=[3, 1], source=0, reseed=[7, 8])
            envs.restore("fork", env_ids=[0, 2], source=[0, 0], reseed=np.int64(7))
            others, *_ = envs.step(np.zeros(4, int))
            assert (others[3] == others[0]).all() and (others[1] == others[2]).all() and (others[0] != others[1]).any()
        with pytest.raises(envhub.errors.SnapshotLost, match=r"'fork' of .* was dropped"):
            envs.restore(snapshot)


def test_snapshot_lasts_until_nothing_refers_to_it(hub: ServedHub) -> None:
    with closing(made(hub, "shared", 2)) as envs:
        kept, dropped = envs.snapshot(), envs.snapshot()
        assert [each.name for each in envs.snapshots()] == [kept.name, dropped.name]
        envs.restore(dropped)
        del dropped
        gc.collect()
        assert [each.name for each in envs.snapshots()] == [kept.name]


def test_snapshots_go_with_the_session_to_who_attaches(hub: ServedHub) -> None:
    envs = made(hub, "wire", 2)
    seen, *_ = envs.step(np.zeros(2, int))
    snapshot = envs.snapshot(name="left")
    envs.step(np.zeros(2, int))
    token = envs.detach()
    del snapshot
    with envhub.connect(hub.tcp) as client, closing(client.attach(token)) as taken:
        assert [each.name for each in taken.snapshots()] == ["left"]
        observations, _ = taken.restore("left")
        assert (observations == seen).all()


def test_snapshot_whose_process_is_killed_is_lost_and_nothing_else(hub: ServedHub) -> None:
    with closing(made(hub, "shared", 2)) as envs:
        before = {*snapshot_processes(hub)}
        snapshot = envs.snapshot([1])
        (process,) = {*snapshot_processes(hub)} - before
        seen, *_ = envs.step(np.zeros(2, int))
        os.kill(process, signal.SIGKILL)
        assert wait_until(lambda: not psutil.pid_exists(process))
        with pytest.raises(
            envhub.errors.SnapshotLost, match="env 1 has lost its snapshot, whose process was ended by SIG"
        ):
            envs.restore(snapshot)
        assert [each.problems for each in envs.snapshots()] == [
            ("has lost its snapshot, whose process was ended by SIGKILL",)
        ]
        assert (envs.observe().observations == seen).all()
        envs.step(np.zeros(2, int))


def snapshot_processes(hub: ServedHub) -> list[int]:
    return [pid for pid, _ in below(psutil.Process(hub.process.pid), "envhub-snapshot")]


@pytest.mark.long
def test_hub_that_is_killed_takes_its_snapshots_along(tmp_path: Path) -> None:
    with serve(tmp_path, "history=snapshot_sims:History") as served:
        envs = envhub.make_vec("history", 2, hub=served.ipc, snapshots=True)
        envs.reset(seed=1)
        envs.snapshot(name="kept")
        snapshots = snapshot_processes(served)
        assert len(snapshots) == 2
        served.process.kill()
        assert wait_until(lambda: not any(map(psutil.pid_exists, snapshots)))
        with pytest.raises(envhub.errors.HubLost):
            envs.step(np.zeros(2, int))


@pytest.mark.parametrize("where", ["shared", "wire"])
def test_envs_that_are_under_way_are_neither_copied_nor_restored(hub: ServedHub, where: str) -> None:
    with closing(made(hub, where, 2)) as envs:
        snapshot = envs.snapshot([1])
        envs.send(np.ones(1, int), [0])
        for request in (envs.snapshot, lambda: envs.restore(snapshot), envs.snapshots):
            with pytest.raises(envhub.SessionBusy, match="under way"):
                request()
        seen, *_ = envs.recv()
        between = envs.snapshot()
        envs.send(np.ones(2, int))
        following, *_ = envs.recv()
        observations, _ = envs.restore(between)
        assert (observations[0] == seen[0]).all()
        envs.send(np.ones(2, int))
        assert (envs.recv()[0] == following).all()


def test_single_env_goes_on_from_its_snapshot(hub: ServedHub) -> None:
    with closing(envhub.make("history", hub=hub.tcp, snapshots=True)) as env:
        env.reset(seed=1)
        seen, *_, info = env.step(1)
        with env.snapshot("here") as snapshot:
            assert (snapshot.name, snapshot.steps) == ("here", (1,))
            following, *results = env.step(2)
            observation, shown = env.restore(snapshot)
            assert (observation == seen).all() and shown == info
            again, *other = env.step(2)
            assert (again == following).all() and other == results
            env.restore("here", reseed=5)
            assert (env.step(2)[0] != following).any()
            there = env.snapshot()
            assert [each.name for each in env.snapshots()] == ["here", there.name]
            env.drop(there)
        assert not env.snapshots()
        with pytest.raises(envhub.errors.SnapshotLost):
            env.restore(snapshot)


def test_session_that_ends_leaves_no_snapshot(hub: ServedHub) -> None:
    with closing(made(hub, "wire", 2)) as envs:
        snapshots = [envs.snapshot() for _ in range(3)]
        assert len(snapshot_processes(hub)) >= 6
    del snapshots
    assert wait_until(lambda: not snapshot_processes(hub))


def test_worker_that_ends_leaves_its_snapshots(hub: ServedHub) -> None:
    with closing(made(hub, "shared", 2)) as envs:
        seen, *_ = envs.step(np.zeros(2, int))
        snapshot = envs.snapshot()
        following, *_ = envs.step(np.ones(2, int))
        os.kill(session_row(hub.ipc, envs)["workers"][0], signal.SIGKILL)
        while not envs.step(np.zeros(2, int))[3][0]:
            pass
        observations, _ = envs.restore(snapshot)
        assert (observations == seen).all() and (envs.step(np.ones(2, int))[0] == following).all()


@pytest.mark.parametrize(
    "refused, match",
    [
        (lambda envs: envs.snapshot([0, 0]), "different"),
        (lambda envs: envs.restore("none"), "no snapshot 'none'"),
        (lambda envs: envs.restore(envs.snapshot([0]), [1]), "env 1 is none of the envs"),
        (lambda envs: [envs.snapshot(name="twice"), envs.snapshot(name="twice")], "a snapshot 'twice' already"),
        (lambda envs: envs.snapshot(name="x" * 65), "at most 64 printable"),
        (lambda envs: envs.restore(envs.snapshot(), source=9), "env 9 is none of the envs"),
        (lambda envs: envs.restore(envs.snapshot(), reseed=[1, -1]), "not negative"),
    ],
)
def test_request_that_makes_no_sense_is_refused_and_the_session_goes_on(
    hub: ServedHub, refused: Any, match: str
) -> None:
    with closing(envhub.make_vec("history", 2, hub=hub.ipc, snapshots=True)) as envs:
        with pytest.raises(
            envhub.errors.SnapshotRefused, match="env 0 cannot be copied, because of its env, which is to be reset"
        ):
            envs.snapshot()
        envs.reset(seed=1)
        with pytest.raises((ValueError, envhub.errors.EnvHubError), match=match):
            refused(envs)
        envs.step(np.zeros(2, int))


def test_snapshot_that_was_dropped_is_not_another_one_of_its_name(hub: ServedHub) -> None:
    with closing(made(hub, "shared", 1)) as envs:
        with envs.snapshot(name="x") as former:
            envs.drop("x")
            envs.drop(former)
            envs.step(np.zeros(1, int))
            present = envs.snapshot(name="x")
            with pytest.raises(envhub.errors.SnapshotLost, match="was dropped"):
                envs.restore(former)
        assert [each.name for each in envs.snapshots()] == ["x"]  # the block's end drops the former one alone
        envs.restore(present)


def test_error_in_a_block_is_raised_and_the_snapshot_dropped_by_the_next_request(hub: ServedHub) -> None:
    with closing(made(hub, "shared", 1)) as envs:
        with pytest.raises(ZeroDivisionError), envs.snapshot():
            envs.step_async(np.zeros(1, int))
            raise ZeroDivisionError
        envs.step_wait()
        assert envs.snapshots() == []


@pytest.mark.parametrize("what", ["snapshot", "restore"])
def test_request_that_is_interrupted_leaves_nothing_behind(
    hub: ServedHub, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(envhub.StepObserver):
        errors: list[BaseException | None] = []

        def broken_off(self, error: BaseException | None) -> None:
            self.errors.append(error)

    with closing(made(hub, "wire", 1)) as envs:
        envs.add_observer(broken := Broken())
        kept = envs.snapshot(name="kept")
        with monkeypatch.context() as patched:
            patched.setattr(envs._session.connection, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                envs.snapshot(name="half") if what == "snapshot" else envs.restore(kept)
        assert [type(each) for each in broken.errors] == ([KeyboardInterrupt] if what == "restore" else [])
        assert [each.name for each in envs.snapshots()] == ["kept"]
        envs.restore(kept)
        envs.step(np.zeros(1, int))


def test_vector_env_of_one_process_is_refused() -> None:
    with pytest.raises(ValueError, match="vector=True steps all of them in one"):
        envhub.make_vec("CartPole-v1", 2, vector=True, snapshots=True)


@pytest.mark.long
def test_env_that_has_not_told_of_a_crash_is_refused_beyond_the_limit_too(tmp_path: Path) -> None:
    with (
        serve(tmp_path, "history=snapshot_sims:History", "--snapshots-max", "1") as served,
        closing(envhub.make_vec("history", 1, hub=served.ipc, snapshots=True, on_crash="restore")) as envs,
        envhub.connect(served.ipc) as client,
    ):
        envs.reset(seed=1)
        kept = envs.snapshot()
        envs.step(np.zeros(1, int))
        former = client.sessions()[0]["workers"][0]
        os.kill(former, signal.SIGKILL)
        assert wait_until(lambda: served.log.count("worker_started") == 2)
        assert wait_until(lambda: client.sessions()[0]["processes"][0]["doing"] == "waiting")
        with pytest.raises(envhub.errors.SnapshotRefused, match=r"is to be reset first|is being started again"):
            envs.snapshot()
        assert envs.step(np.zeros(1, int))[3][0] and len(envs.snapshots()) == 1
        envs.restore(kept)


def test_envs_without_snapshots_say_what_to_ask_for(hub: ServedHub) -> None:
    with closing(envhub.make_vec("history", 2, hub=hub.ipc)) as envs:
        envs.reset(seed=1)
        with pytest.raises(envhub.errors.SnapshotRefused, match="made without snapshots=True"):
            envs.snapshot()


class Threaded(History):
    """Has a thread, which no copy has."""

    def reset(self, **options: Any) -> Any:
        import threading

        threading.Thread(target=threading.Event().wait, name="waits", daemon=True).start()
        return super().reset(**options)


def test_env_with_a_thread_is_refused_by_its_name_unless_it_is_told_to_be_safe() -> None:
    for snapshots, allowed in ((True, False), ("unsafe", True)):
        with closing(envhub.make_vec(Threaded, 1, snapshots=snapshots)) as envs:
            envs.reset(seed=1)
            assert (envs.snapshots_allowed[0] == "") is allowed
            if not allowed:
                with pytest.raises(envhub.errors.SnapshotRefused, match="because of the thread"):
                    envs.snapshot()
            envs.step(np.zeros(1, int))


def test_snapshots_beyond_the_depth_are_earlier_ones_and_the_same_actions(hub: ServedHub) -> None:
    with closing(made(hub, "wire", 1)) as envs:
        before = len(snapshot_processes(hub))
        chain, seen = [envs.snapshot()], [envs.observe().observations]
        for number in range(DEPTH_MAX + 5):
            if number < DEPTH_MAX + 1:
                envs.restore(chain[-1])
            seen.append(envs.step(np.full(1, number))[0])
            chain.append(envs.snapshot())
        assert [snapshot.depth for snapshot in chain] == [*range(1, DEPTH_MAX + 1), *[DEPTH_MAX] * 6]
        assert len(snapshot_processes(hub)) == before + DEPTH_MAX
        assert max(snapshot.nbytes for snapshot in chain[DEPTH_MAX:]) < 1 << 12
        for snapshot, observation in reversed([*zip(chain, seen, strict=True)]):
            assert (envs.restore(snapshot)[0] == observation).all()
        envs.restore(chain[-1])
        following = envs.step(np.zeros(1, int))[0]
        last = chain[-1]
        del snapshot, chain[:]
        gc.collect()
        envs.snapshots()
        assert wait_until(lambda: len(snapshot_processes(hub)) == before + 1)  # the one that the last is based on
        envs.restore(last)
        assert (envs.step(np.zeros(1, int))[0] == following).all()
        assert envs.snapshot().depth == 2
        envs.drop(last)


@pytest.mark.long
def test_snapshots_beyond_the_number_of_processes_are_earlier_ones_and_the_same_actions(hub: ServedHub) -> None:
    with closing(made(hub, "shared", 2)) as envs:
        before, kept = len(snapshot_processes(hub)), []
        for number in range(HubOptions().snapshots_max // 2 + 10):
            kept.append((envs.snapshot(name=f"{number}"), envs.step(np.full(2, number % 7))[0]))
        assert len(snapshot_processes(hub)) == before + HubOptions().snapshots_max
        for number in (-1, -10, 100):
            envs.restore(kept[number][0])
            assert (
                envs.step(np.full(2, (len(kept) + number) % 7 if number < 0 else number % 7))[0] == kept[number][1]
            ).all()


class Heavy(History):
    """Takes actions of 64 KiB."""

    action_space = gym.spaces.Box(0, 1, (1 << 13,), np.float64)

    def step(self, action: Any) -> Any:
        return super().step(float(action.sum()))


def restored_from_a_chain(envs: Any) -> list[envhub.Snapshot]:
    """Snapshots that descend from one another; a further one is the last of them, and the actions since."""
    chain = [envs.snapshot()]
    for _ in range(DEPTH_MAX - 1):
        envs.restore(chain[-1])
        chain.append(envs.snapshot())
    envs.restore(chain[-1])
    return chain


@pytest.mark.long
def test_requests_that_no_socket_takes_at_once_are_made_again_and_kept_no_longer_than_needed() -> None:
    before = worker_pids()
    with closing(envhub.make_vec(Heavy, 1, snapshots=True)) as envs:
        envs.reset(seed=1)
        chain = restored_from_a_chain(envs)
        for number in range(40):
            seen = envs.step(np.full((1, 1 << 13), number / 100))[0]
        last = envs.snapshot()
        assert last.nbytes > 1 << 20
        envs.step(np.zeros((1, 1 << 13)))
        assert (envs.restore(last)[0] == seen).all()
        del chain, last
        assert envs.snapshots() == []
        envs.step(np.zeros((1, 1 << 13)))
        assert wait_until(lambda: len(worker_pids() - before) == 1)
        worker = psutil.Process(*(worker_pids() - before))
        nbytes = worker.memory_info().rss
        for _ in range(200):
            envs.step(np.zeros((1, 1 << 13)))
        assert worker.memory_info().rss < nbytes + (1 << 22)  # of 13 MB of actions


class Unrepeatable(History):
    """Draws rewards from the system; its observations are always the same."""

    def _observed(self, *happened: Any) -> np.ndarray:
        return np.full(16, 200, np.uint8)

    def step(self, action: Any) -> Any:
        observation, _, *others = super().step(action)
        return observation, float(os.urandom(1)[0]) + os.urandom(1)[0] / 256, *others


@pytest.mark.long
def test_env_that_does_not_repeat_has_lost_its_snapshot_and_goes_on() -> None:
    with closing(envhub.make_vec(Unrepeatable, 1, snapshots=True)) as envs:
        envs.reset(seed=1)
        chain = restored_from_a_chain(envs)
        envs.step(np.zeros(1, int))
        chain.append(envs.snapshot())
        shown = envs.step(np.zeros(1, int))[0]
        with pytest.raises(envhub.errors.SnapshotLost, match="env 0 does not repeat: after the same 1 requests"):
            envs.restore(chain[-1])
        assert (envs.observe().observations == shown).all()
        envs.step(np.zeros(1, int))


@pytest.mark.long
def test_snapshots_beyond_the_depth_of_an_env_that_was_called_are_refused(hub: ServedHub) -> None:
    with closing(made(hub, "shared", 1)) as envs:
        chain = restored_from_a_chain(envs)
        envs.set_attr("mark", 1)
        with pytest.raises(envhub.errors.SnapshotLimit, match="no snapshot of it from which the same actions lead"):
            envs.snapshot()
        envs.step(np.zeros(1, int))
        del chain


@pytest.mark.parametrize(("where", "mode"), [("private", "NextStep"), ("wire", "SameStep")])
def test_env_whose_worker_ends_begins_its_next_episode_at_its_newest_snapshot(
    hub: ServedHub, where: str, mode: str
) -> None:
    with closing(made(hub, where, 2, on_crash="restore", autoreset_mode=mode)) as envs:
        envs.reset(seed=5)
        older = envs.snapshot()
        seen = envs.step(np.full(2, 3))[0].copy()
        newer = envs.snapshot()
        following = envs.step(np.full(2, 4))[0].copy()
        address = envs._session.connection.address
        os.kill(session_row(address, envs)["workers"][1], signal.SIGKILL)
        assert wait_until(lambda: bool(session_row(address, envs)["restarts"]))
        observations, rewards, _, truncations, infos = envs.step(np.zeros(2, int))
        while not truncations[1]:
            observations, rewards, _, truncations, infos = envs.step(np.zeros(2, int))
        assert (observations[1] == following[1]).all() and rewards[1] == 0 and infos["env_failure"][1].cause == "crash"
        assert (envs.step(np.zeros(2, int))[0][1] == seen[1]).all()
        assert (envs.step(np.full(2, 4))[0][1] == following[1]).all()
        del older, newer
