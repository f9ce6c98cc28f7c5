"""A session outlives its connection: every step is made once and answered once, in the same episode."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chaos.chaos_proxy import Weather, proxy
from conformance.kit.raw_peer import RawPeer
from envhub_client import deadline
from hubs import ServedHub, serve, stopped, wait_until

import envhub
from envhub.protocol import messages
from envhub.protocol.messages import REPLY, Make, Op, Reset

NOTICE_S = 4.0  # within which a connection that is black-holed is noticed, on both sides
SLOW_S = 30.0  # more of it for a slow machine

CLIENT = """
import sys, time, envhub
address, lane, pause = sys.argv[1:]
envs = envhub.make_vec("counter", 2, hub=address, lane=lane)
envs.reset()
count = 0
while True:
    count += 1
    assert envs.step([0, 0])[0][:, 0].tolist() == [count, count], count
    print(count, flush=True)
    time.sleep(float(pause))
"""


class Stepping(subprocess.Popen[str]):
    """A program that steps and counts aloud; it ends where a step was lost, doubled or in another episode."""

    count = 0

    def hear(self) -> None:
        """Note what it has counted, until it ends."""
        for line in self.stdout or ():
            self.count = int(line)


@contextlib.contextmanager
def stepping(address: str, lane: str = "wire", pause: float = 0.001) -> Iterator[Stepping]:
    arguments = [sys.executable, "-c", CLIENT, address, lane, str(pause)]
    program = Stepping(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None and program.stdout.readline() == "1\n"
        threading.Thread(target=program.hear, daemon=True).start()
        yield program
    finally:
        program.kill()
        program.wait()


def warned(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return any(text in record.getMessage() for record in caplog.records)


def leased(client: envhub.Client) -> bool:
    return any(session["leased"] for session in client.sessions())


STOPPED = """
import sys, envhub
envs = envhub.make_vec("sleeper", 1, hub=sys.argv[1], lane="wire", reconnect_timeout=3)
envs.reset()
print("ready", flush=True)
print(envs.step([70])[0][0, 0], envs.step([0])[0][0, 0])
"""


@pytest.mark.long
@pytest.mark.parametrize("bind", ["tcp", pytest.param("ipc", marks=pytest.mark.chaos)])
def test_client_that_was_stopped_itself_for_longer_than_reconnect_timeout_goes_on(tmp_path: Path, bind: str) -> None:
    with (
        serve(tmp_path, "sleeper=odd_sims:Sleeper") as hub,
        subprocess.Popen([sys.executable, "-c", STOPPED, getattr(hub, bind)], stdout=-1, text=True) as program,
    ):
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        time.sleep(0.5)  # so that the step is under way; right, too, if it is not
        with stopped(program.pid):
            time.sleep(4.5)
        assert program.stdout.readline() == "1.0 2.0\n" and program.wait(60) == 0


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
            for count in itertools.count(1):
                observations, rewards, *_ = envs.step(np.array([count % 7, 1]))
                assert observations[:, 0].tolist() == [count, count] and rewards[0] == count % 7
                if count >= 200 and wire.cuts > 3:
                    break
                time.sleep(0.005)
        finally:
            stop.set()
            cutting.join()
        envs.close()


@pytest.mark.long
def test_session_whose_lease_ran_out_is_told_so(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter", "--lease", "0.3") as hub, proxy(hub.tcp) as wire:
        envs = envhub.make_vec("counter", 2, hub=wire.address)
        envs.reset()
        wire.hold()
        wire.cut()
        with envhub.connect(hub.ipc) as client:
            assert wait_until(lambda: not client.sessions(), 20)
        wire.hold(False)
        with pytest.raises(envhub.SessionLost, match="its lease ran out"):
            envs.step(np.array([1, 1]))
        envs.close()


# --- a connection that is silent --------------------------------------------------------------------------------------


@pytest.mark.long
def test_black_hole_is_noticed_on_both_sides_and_the_step_is_answered_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(tmp_path, "counter=sims:counter") as hub, proxy(hub.tcp) as wire, envhub.connect(hub.ipc) as client:
        envs = envhub.make_vec("counter", 2, hub=wire.address)
        envs.reset()
        for _ in range(3):
            envs.step([1, 1])
        wire.hold()
        envs.step_async([1, 1])
        with pytest.raises(envhub.HubTimeout):
            envs.step_wait(timeout=NOTICE_S)
        assert wait_until(lambda: warned(caplog, "out of reach") and leased(client), NOTICE_S + SLOW_S)
        wire.hold(False)
        assert envs.step_wait(timeout=20)[0][:, 0].tolist() == [4, 4]
        assert envs.step([1, 1])[0][:, 0].tolist() == [5, 5]
        assert warned(caplog, "within reach again") and wait_until(lambda: not leased(client))
        envs.close()


@pytest.mark.long
def test_black_hole_is_noticed_by_a_program_that_is_busy_elsewhere(
    hub: ServedHub, caplog: pytest.LogCaptureFixture
) -> None:
    with proxy(hub.tcp) as wire:
        envs = envhub.make_vec("counter", 2, hub=wire.address)
        envs.reset()
        wire.hold()
        assert wait_until(lambda: warned(caplog, "out of reach"), NOTICE_S + SLOW_S)
        wire.hold(False)
        assert wait_until(lambda: warned(caplog, "within reach again"), 10)
        assert envs.step([1, 1])[0][:, 0].tolist() == [1, 1]
        envs.close()


def test_delayed_replies_are_those_of_their_own_steps(hub: ServedHub) -> None:
    with proxy(hub.tcp) as wire:
        envs = envhub.make_vec("counter", 2, hub=wire.address)
        envs.reset()
        for count in range(1, 4):
            wire.hold()
            envs.step_async([count, count])
            with pytest.raises(envhub.HubTimeout):
                envs.step_wait(timeout=0.05)
            wire.weather(Weather(latency_s=0.15))
            observations, rewards, *_ = envs.step_wait(timeout=20)
            assert observations[:, 0].tolist() == rewards.tolist() == [count, count]
        wire.weather()
        envs.close()


# --- a client that is stopped, or busy --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "lane", "after_s"),
    [
        ("tcp", "wire", 0.1),
        ("ipc", "auto", 1.3),
        *(pytest.param("ipc", "wire", after_s, marks=pytest.mark.chaos) for after_s in (0.1, 1.3)),
    ],
)
def test_stopped_client_is_noticed_and_goes_on_in_the_same_episode(
    tmp_path: Path, kind: str, lane: str, after_s: float
) -> None:
    with (
        serve(tmp_path, "counter=sims:counter") as hub,
        envhub.connect(hub.ipc) as client,
        stepping(getattr(hub, kind), lane) as program,
    ):
        time.sleep(after_s)
        program.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: leased(client), NOTICE_S + SLOW_S)
        program.send_signal(signal.SIGCONT)
        assert wait_until(lambda: not leased(client), 10)
        stopped_at = program.count
        assert wait_until(lambda: program.count > stopped_at + 10, 10) and program.poll() is None


@pytest.mark.long
def test_stopped_client_frees_everything_at_the_end_of_its_lease(tmp_path: Path) -> None:
    with (
        serve(tmp_path, "counter=sims:counter", "--lease", "0.5") as hub,
        envhub.connect(hub.ipc) as client,
        stepping(hub.ipc) as program,
    ):
        program.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: not client.sessions() and not hub.workers(), NOTICE_S + 0.5 + SLOW_S)


@pytest.mark.long
def test_client_that_is_busy_keeps_its_session_for_longer_than_its_lease(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter", "--lease", "0.5") as hub:
        for address in (hub.tcp, hub.ipc):
            envs = envhub.make_vec("counter", 2, hub=address, lane="wire")
            envs.reset()
            envs.step([0, 0])
            ctypes.PyDLL(None).usleep(int(4.5e6 if address == hub.tcp else 2e6))  # no other thread of Python runs
            assert envs.step([0, 0])[0][:, 0].tolist() == [2, 2]
            envs.close()
        assert "client_lost" not in hub.log


@pytest.mark.long
def test_client_that_is_busy_elsewhere_while_its_connection_is_cut_keeps_its_session(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter", "--lease", "5") as hub, proxy(hub.tcp) as wire:
        envs = envhub.make_vec("counter", 2, hub=wire.address)
        envs.reset()
        envs.step([0, 0])
        wire.cut()
        with envhub.connect(hub.ipc) as client:
            assert wait_until(lambda: "client_lost" in hub.log)
            assert wait_until(lambda: not leased(client))  # a thread of the library says that it is back
            time.sleep(5.5)
            assert not leased(client)
        assert envs.step([0, 0])[0][:, 0].tolist() == [2, 2]
        envs.close()


# --- a hub that is stopped --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_stopped_hub_is_told_while_the_shared_lane_steps_on(hub: ServedHub, caplog: pytest.LogCaptureFixture) -> None:
    envs = envhub.make_vec("counter", 2, hub=hub.ipc)
    assert envs.lane == "shared"
    envs.reset()
    begun, count = time.monotonic(), 0
    hub.process.send_signal(signal.SIGSTOP)
    try:
        while not warned(caplog, "out of reach") and time.monotonic() - begun < NOTICE_S + SLOW_S:
            count += 1
            assert envs.step([0, 0])[0][:, 0].tolist() == [count, count]
        assert warned(caplog, "out of reach")
    finally:
        hub.process.send_signal(signal.SIGCONT)
    assert envs.get_attr("count") == (count, count)
    envs.close()


@pytest.mark.long
def test_envs_of_a_hub_that_is_out_of_reach_are_closed_without_waiting_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(tmp_path, "counter=sims:counter", "--lease", "0.5") as hub:
        envs = envhub.make_vec("counter", 2, hub=hub.tcp)
        envs.reset()
        hub.process.send_signal(signal.SIGSTOP)
        try:
            assert wait_until(lambda: warned(caplog, "out of reach"), NOTICE_S + SLOW_S)
            begun = time.monotonic()
            envs.close()
            assert time.monotonic() - begun < 2.0 + SLOW_S
        finally:
            hub.process.send_signal(signal.SIGCONT)
        assert wait_until(lambda: not hub.workers(), 10)


# --- a hub that is suspended ------------------------------------------------------------------------------------------


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
