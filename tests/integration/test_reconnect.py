"""A session outlives its connection: every step is made once and answered once, in the same episode."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hubs import ServedHub, serve
from proxy import proxy

import envhub


def test_step_under_way_is_answered_after_its_connection_was_cut(hub: ServedHub) -> None:
    with proxy(hub.tcp) as wire:
        envs = envhub.make_vec("naughty", 2, hub=wire.address)
        envs.reset()
        for count in range(1, 6):
            envs.step_async(np.array([6, 6]))  # sleeps 0.2 s
            time.sleep(0.05)
            wire.cut()
            assert envs.step_wait(timeout=20)[0][:, 0].tolist() == [count, count]
        envs.close()


def test_steps_between_cuts_run_exactly_once(hub: ServedHub) -> None:
    with proxy(hub.tcp) as wire:
        envs = envhub.make_vec("counter", 2, hub=wire.address)
        envs.reset()
        stop = threading.Event()

        def nemesis() -> None:
            while not stop.wait(0.15):
                wire.cut()

        cutting = threading.Thread(target=nemesis)
        cutting.start()
        try:
            for count in range(1, 200):
                observations, rewards, *_ = envs.step(np.array([count % 7, 1]))
                assert observations[:, 0].tolist() == [count, count] and rewards[0] == count % 7
                time.sleep(0.005)
        finally:
            stop.set()
            cutting.join()
        assert wire.cuts > 3
        envs.close()


@pytest.mark.long
def test_silent_connection_is_warned_of_and_recovers(hub: ServedHub, caplog: pytest.LogCaptureFixture) -> None:
    with proxy(hub.tcp) as wire, caplog.at_level(logging.WARNING, "envhub"):
        envs = envhub.make_vec("counter", 2, hub=wire.address)
        envs.reset()
        wire.hold()
        envs.step_async(np.array([1, 1]))
        with pytest.raises(envhub.HubTimeout):
            envs.step_wait(timeout=4.8)
        assert any("out of reach" in record.getMessage() for record in caplog.records)
        wire.hold(False)
        assert envs.step_wait(timeout=20)[0][:, 0].tolist() == [1, 1]
        assert envs.step(np.array([1, 1]))[0][:, 0].tolist() == [2, 2]
        envs.close()


def test_session_whose_lease_ran_out_is_told_so(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter", "--lease", "0.3") as hub, proxy(hub.tcp) as wire:
        envs = envhub.make_vec("counter", 2, hub=wire.address)
        envs.reset()
        wire.hold()
        wire.cut()
        with envhub.connect(hub.ipc) as client:
            while client.sessions():
                time.sleep(0.05)
        wire.hold(False)
        with pytest.raises(envhub.SessionLost, match="its lease ran out"):
            envs.step(np.array([1, 1]))
        envs.close()
