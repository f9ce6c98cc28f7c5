"""Snapshots of envs on two hubs: on both or on none, and lost with a hub that is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np
import psutil
import pytest
from chaos.interrupts import Interrupt
from envhub_client.federation.session import JointSnapshots
from hubs import ServedHub, below, wait_until
from several_hubs import SeveralHubs, fixtures
from snapshot_sims import wander

import envhub
from envhub.errors import RequestRefused, SnapshotLost, SnapshotRefused

ROWS = 4  # two on each hub
AGAIN_S = 60.0  # for envs that are made again, on a slow machine
ONES = np.ones(ROWS, int)


running, hubs = fixtures(2, "history=snapshot_sims:History")


def made(hubs: SeveralHubs, *lanes: str, **options: Any) -> envhub.HubVectorEnv:
    envs = envhub.make_vec("history", ROWS, hub=hubs.addresses(*lanes), split=[2, 2], snapshots=True, **options)
    envs.reset(seed=1)
    return envs


def processes(hub: ServedHub, name: str) -> set[int]:
    return {pid for pid, _ in below(psutil.Process(hub.process.pid), name)}


@pytest.mark.long
@pytest.mark.parametrize(
    "lanes", [*(pytest.param((lane,), marks=pytest.mark.long) for lane in ("tcp", "ipc")), ("tcp", "ipc")]
)
def test_rows_of_equal_histories_have_equal_results_on_both_hubs(hubs: SeveralHubs, lanes: tuple[str, ...]) -> None:
    with closing(made(hubs, *lanes)) as envs:
        assert wander(envs, 60, 0, [1, 2], of_a_hub=2)["compared"] > 20


def test_snapshot_of_all_has_one_name_and_each_env_goes_on_on_its_own_hub(hubs: SeveralHubs) -> None:
    first, second = hubs.addresses("ipc", "tcp")
    with closing(made(hubs, "ipc", "tcp")) as envs:
        seen, *_ = envs.step(ONES)
        every, of_one = envs.snapshot(), envs.snapshot([3], name="one")
        assert (every.env_ids, every.steps, every.depth) == ((0, 1, 2, 3), (1, 1, 1, 1), 1)
        assert [(each.name, each.env_ids) for each in envs.snapshots()] == [(every.name, (0, 1, 2, 3)), ("one", (3,))]
        envs.step(ONES)
        with pytest.raises(SnapshotRefused, match=f"env 2 is on the hub at {second}, .* env 0 on the hub at {first}"):
            envs.restore(every, [1, 2], source=0)
        with pytest.raises(SnapshotRefused, match=r"env 2 is none of the envs \[3\]"):
            envs.restore(of_one, [2])
        observations, infos = envs.restore(every, [0, 1, 2], source=[1, 0, 3])
        assert (observations[:3] == seen[[1, 0, 3]]).all() and (observations[3] != seen[3]).any()
        assert infos["steps"].tolist()[:3] == [1, 1, 1]
        with pytest.raises(RequestRefused, match="a snapshot 'one' already"):
            envs.snapshot([0], name="one")
        envs.drop(every)
        with pytest.raises(SnapshotLost, match="it was dropped"):
            envs.restore(every.name)
        assert (envs.restore("one")[0][3] == seen[3]).all()


def test_snapshot_that_one_hub_refuses_is_on_no_hub(hubs: SeveralHubs) -> None:
    with closing(made(hubs, "ipc")) as envs:
        with closing(envhub.make_vec("history", ROWS, hub=hubs.addresses("ipc"), split=[2, 2], snapshots=True)) as more:
            more.reset(seed=1, env_ids=[0, 1])
            with pytest.raises(SnapshotRefused, match="env 2 cannot be copied, because of its env, which is to"):
                more.snapshot(name="of some")
            assert more.snapshots() == [] and more.snapshot([0, 1], name="of some").env_ids == (0, 1)
        envs.step(ONES)


def test_no_env_is_restored_where_one_hub_cannot(hubs: SeveralHubs) -> None:
    with closing(made(hubs, "ipc")) as envs:
        snapshot = envs.snapshot()
        workers = [processes(hub, "envhub-worker") for hub in hubs.hubs]
        (lost, _) = processes(hubs.hubs[1], "envhub-snapshot")
        seen, *_ = envs.step(ONES)
        os.kill(lost, signal.SIGKILL)
        assert wait_until(lambda: not psutil.pid_exists(lost))
        with pytest.raises(SnapshotLost, match="has lost its snapshot, whose process was ended by SIGKILL"):
            envs.restore(snapshot)
        assert (envs.observe().observations == seen).all()
        assert wait_until(lambda: [processes(hub, "envhub-worker") for hub in hubs.hubs] == workers)
        envs.step(ONES)


@pytest.mark.long
def test_snapshots_of_a_killed_hub_are_lost_and_nothing_else(hubs: SeveralHubs) -> None:
    address = hubs.addresses("tcp")[1]
    with closing(made(hubs, "tcp", on_hub_loss="recreate", restart_wait=0.5)) as envs:
        seen, *_ = envs.step(ONES)
        snapshot = envs.snapshot()
        hubs.kill(1)
        while not envs.step(ONES)[3][3]:
            pass
        with pytest.raises(SnapshotRefused, match=f"env 2 was lost with the hub at {address}"):
            envs.snapshot([0, 2])
        with pytest.raises(SnapshotLost, match=f"env 2 has lost its snapshot with the hub at {address}"):
            envs.restore(snapshot)
        assert [each.env_ids for each in envs.snapshots()] == [(0, 1)]
        assert (envs.restore(snapshot, [0, 1])[0][:2] == seen[:2]).all()
        hubs.start(1)
        assert wait_until(lambda: not envs.step(ONES)[3][2:].any(), AGAIN_S)
        with pytest.raises(SnapshotLost, match=address):
            envs.restore(snapshot, [2])
        again = envs.snapshot()
        seen = envs.observe().observations
        envs.step(ONES)
        assert (envs.restore(again)[0] == seen).all()


@pytest.mark.long
@pytest.mark.parametrize("when", ["prepare", "commit"])
def test_hub_that_is_killed_in_a_restore_takes_its_own_envs_along(
    hubs: SeveralHubs, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = JointSnapshots._ask

    def killed_before(snapshots: JointSnapshots, requests: Mapping[Any, Any]) -> Any:
        if any(each.action == when for each in requests.values()):
            hubs.kill(1)
        return ask(snapshots, requests)

    monkeypatch.setattr(JointSnapshots, "_ask", killed_before)
    with closing(made(hubs, "tcp", on_hub_loss="recreate", restart_wait=0.5)) as envs:
        taken, *_ = envs.step(ONES)
        snapshot = envs.snapshot()
        seen, *_ = envs.step(ONES)
        with pytest.raises((SnapshotLost, envhub.HubLost), match=hubs.addresses("tcp")[1]):
            envs.restore(snapshot)
        following, _, _, truncations, _ = envs.step(ONES)
        assert truncations[2:].all() and (following[2:] == seen[2:]).all()
        assert (envs.restore(snapshot, [0, 1])[0][:2] == taken[:2]).all()
        assert ((envs.step(ONES)[0] == seen)[:2] if when == "prepare" else (following == seen)[:2]).all()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a destructor
@pytest.mark.parametrize(
    "stride", [1999, pytest.param(251, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.chaos)]
)
@pytest.mark.parametrize("lane", [pytest.param("ipc", marks=pytest.mark.long), "tcp"])
def test_interrupted_request_is_carried_out_on_both_hubs_or_on_neither(
    hubs: SeveralHubs, lane: str, stride: int
) -> None:
    with closing(made(hubs, lane)) as envs:
        snapshot = envs.snapshot()
        from_snapshot, *_ = envs.step(ONES)
        for turn in range(1, 10_000):
            envs.restore(snapshot)
            envs.step(2 * ONES)
            with envs.snapshot() as between:
                from_here, *_ = envs.step(ONES)
                envs.restore(between)
            interrupt = Interrupt(turn * stride)
            interrupt.during(lambda: envs.restore(snapshot))
            following, *_, infos = envs.step(ONES)
            if "invalid_transition" in infos:  # all were restored, and this program has not seen it yet
                envs.step(ONES)
                following, *_ = envs.step(ONES)
            assert any((following == each).all() for each in (from_snapshot, from_here)), interrupt.where
            is_over, interrupt = not interrupt.raised, Interrupt(turn * stride)
            interrupt.during(lambda: envs.snapshot(name="again"))
            listed = [each for each in envs.snapshots() if each.name == "again"]
            assert [each.env_ids for each in listed] in ([], [(0, 1, 2, 3)]), interrupt.where
            for each in listed:
                envs.drop(each)
            if is_over and not interrupt.raised:
                break
        assert turn * stride > 300
