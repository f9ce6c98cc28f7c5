"""A hub that is told to stop answers what is under way, refuses what is new, and is gone in time."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hubs import ServedHub, lives, serve, stopped, wait_until

import envhub

GONE_S = 30.0  # 10 are promised, when `docker stop` kills; the rest is for a slow machine
NUM_ENVS = 8
OFFERED = ("sleeper=odd_sims:Sleeper", "stubborn=odd_sims:Stubborn")


def made(hub: ServedHub, name: str, lane: str) -> envhub.HubVectorEnv:
    address, options = hub.tcp if lane == "wire" else hub.ipc, {"num_workers": NUM_ENVS, "close_timeout": 5.0}
    envs = envhub.make_vec(name, NUM_ENVS, hub=address, lane=lane, **options)
    envs.reset()
    return envs


@pytest.mark.parametrize("name", ["sleeper", pytest.param("stubborn", marks=pytest.mark.long)])
def test_steps_under_way_are_answered_and_new_ones_refused(tmp_path: Path, name: str) -> None:
    with serve(tmp_path, *OFFERED) as hub, contextlib.ExitStack() as opened:
        sessions = [opened.enter_context(contextlib.closing(made(hub, name, lane))) for lane in ("wire", "auto")]
        assert [envs.lane for envs in sessions] == ["wire", "shared"]
        client = opened.enter_context(envhub.connect(hub.tcp))
        workers = hub.workers()
        with stopped(*(worker.pid for worker in workers)):
            for envs in sessions:
                envs.step_async(np.zeros(NUM_ENVS, int))
            # The hub has the request.
            assert wait_until(lambda: "moving" in [found["phase"] for found in client.sessions()])
            hub.process.terminate()
            assert wait_until(lambda: '"event": "stopping"' in hub.log)
            with pytest.raises(envhub.HubLost, match="shutting down"):
                client.make_vec("sleeper", 1)
        for envs in sessions:
            observations, _, _, truncations, _ = envs.step_wait(timeout=GONE_S)
            assert observations[:, 0].tolist() == [1] * NUM_ENVS and not truncations.any()
        for envs in sessions:
            with pytest.raises(envhub.HubLost):
                envs.step(np.zeros(NUM_ENVS, int))
        assert hub.process.wait(GONE_S) == 0
        assert not any(map(lives, workers))


@pytest.mark.long
@pytest.mark.parametrize("lane", ["wire", pytest.param("auto", marks=pytest.mark.chaos)])
def test_second_signal_does_not_wait_for_steps(tmp_path: Path, lane: str) -> None:
    offered = (*OFFERED, "--drain-timeout", "600")
    with serve(tmp_path, *offered) as hub, contextlib.closing(made(hub, "stubborn", lane)) as envs:
        workers = hub.workers()
        envs.step_async(np.full(NUM_ENVS, 6000))  # for which it waits after one signal
        hub.process.terminate()
        assert wait_until(lambda: '"event": "stopping"' in hub.log)
        hub.process.terminate()
        assert hub.process.wait(GONE_S) == 0
        assert not any(map(lives, workers))
        with pytest.raises(envhub.HubLost):
            envs.step_wait(timeout=10)
