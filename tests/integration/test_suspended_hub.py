"""A hub that is stopped for a while, as with its machine, judges nobody for that when it goes on."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conformance.kit.raw_peer import RawPeer
from envhub_client import deadline
from hubs import ServedHub, serve, stopped, wait_until

import envhub
from envhub.protocol import messages
from envhub.protocol.messages import REPLY, Make, Op, Reset

LEASE_S = STEP_TIMEOUT_S = 8.0  # which would be over, had they run while the hub was stopped
TOKEN = b"l" * 16


@pytest.mark.parametrize(
    "stopped_s",
    [pytest.param(10, marks=pytest.mark.long), pytest.param(60, marks=[pytest.mark.chaos, pytest.mark.timeout(240)])],
)
def test_stopped_hub_ends_no_session_and_no_worker(tmp_path: Path, stopped_s: int) -> None:
    with (
        serve(tmp_path, "sleeper=odd_sims:Sleeper", "--lease", str(LEASE_S)) as hub,
        contextlib.ExitStack() as sessions,
    ):
        envs = [sessions.enter_context(contextlib.closing(_made(hub, lane))) for lane in ("wire", "auto")]
        assert [each.lane for each in envs] == ["wire", "shared"]
        for each in envs:
            each.step_async(np.array([0, 10 * stopped_s + 10]))  # tenths of a second: it ends after the hub goes on
        _make_and_leave(hub)
        workers = {worker.pid for worker in hub.workers()}
        hub.process.send_signal(signal.SIGSTOP)
        time.sleep(stopped_s)
        hub.process.send_signal(signal.SIGCONT)
        assert _goes_on(hub)
        for each in envs:
            observations, _, _, truncations, infos = each.step_wait(timeout=30)
            assert observations[:, 0].tolist() == [1, 1] and not truncations.any() and not infos
            assert each.step(np.zeros(2, int))[0][:, 0].tolist() == [2, 2]
        assert {worker.pid for worker in hub.workers()} == workers
        assert "hub_suspended" in hub.log
        assert not any(event in hub.log for event in ("session_expired", "worker_exited", "env_late"))


def _made(hub: ServedHub, lane: str) -> envhub.HubVectorEnv:
    address = hub.tcp if lane == "wire" else hub.ipc
    times = {"step_timeout": STEP_TIMEOUT_S, "reconnect_timeout": 240.0}
    envs = envhub.make_vec("sleeper", 2, hub=address, num_workers=2, lane=lane, **times)
    envs.reset()
    return envs


def _make_and_leave(hub: ServedHub) -> None:
    """Have a session whose lease runs."""
    with contextlib.closing(RawPeer(hub.tcp)) as peer:
        assert peer.ask(Op.MAKE, messages.pack(Make(1, "sleeper")), TOKEN, 1).prelude.op == REPLY | Op.MAKE
        assert peer.ask(Op.RESET, messages.pack(Reset()), TOKEN, 2).prelude.op == REPLY | Op.RESET
    assert wait_until(lambda: "client_lost" in hub.log)


def _goes_on(hub: ServedHub) -> bool:
    with contextlib.closing(RawPeer(hub.tcp)) as peer:
        return peer.ask(Op.STEP, b"\x04", TOKEN, 3, bytes(8)).prelude.op == REPLY | Op.STEP


@pytest.mark.long
def test_step_whose_info_a_stopped_hub_has_times_out_and_can_be_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "ANSWER_S", 0.2)
    with (
        serve(tmp_path, "wordy=faulty:wordy") as hub,
        contextlib.closing(envhub.make_vec("wordy", 1, hub=hub.ipc)) as envs,
    ):
        envs.reset()
        assert envs.lane == "shared"
        with stopped(hub.process.pid):
            envs.step_async(np.zeros(1, int))
            with pytest.raises(envhub.HubTimeout, match="COLLECT"):
                envs.step_wait(timeout=5)
        assert "story" in envs.step_wait(timeout=30)[4]


@pytest.mark.long
def test_health_reports_how_long_the_hub_was_busy(tmp_path: Path) -> None:
    with serve(tmp_path, "sleeper=odd_sims:Sleeper") as hub, contextlib.closing(_made(hub, "wire")):
        stopped_s = math.inf
        while stopped_s > 1.8:  # which would be taken for a suspended machine
            begun_s = time.monotonic()
            hub.process.send_signal(signal.SIGSTOP)
            time.sleep(1.0)
            hub.process.send_signal(signal.SIGCONT)
            stopped_s = time.monotonic() - begun_s
        with envhub.connect(hub.tcp) as client:
            assert wait_until(lambda: 0.5 <= client.stats()["loop_lag_s"] < 2.0)
            assert client.health()["loop_lag_s"] >= 0.5  # the largest of the last minute
