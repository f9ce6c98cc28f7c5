"""How soon what goes wrong is noticed, told and mended: ``pytest -m benchmark -s``.

Figures are printed with the target of each; none fails a test, for the machine and its noise are nobody's fault. Times
that a user sets, such as a deadline or a lease, are taken off. Of who may connect there are no figures yet: a hub has
no keys.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from chaos.chaos_proxy import proxy
from conformance.kit.raw_peer import RawPeer
from hubs import HERE, ServedHub, lives, serve, wait_until
from zmtp import ZmtpPeer

import envhub
from envhub.protocol import messages
from envhub.protocol.messages import Make, Op, Reset

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

LANES = ("wire", "auto")
OFFERED = ("sleeper=odd_sims:Sleeper", "wide=odd_sims:Wide", "counter=sims:counter")
CLIENT = """
import sys, time, envhub
envs = envhub.make_vec("counter", 2, hub=sys.argv[1])
envs.reset()
print("ready", flush=True)
time.sleep(600)
"""
LEASE_S = 1.0
HUBS = 100


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("figures"), *OFFERED, "--lease", str(LEASE_S)) as served:
        yield served


def told(figure: str, target: str, samples_s: Sequence[float]) -> None:
    """Print a figure: target, median, 99th percentile, how many."""
    median, high = np.percentile(samples_s, [50, 99]) * 1000
    print(f"\n{figure:<58} {target:>16} {median:9.1f} ms {high:9.1f} ms  n={len(samples_s)}", end="")


def made(address: str, name: str = "sleeper", num_envs: int = 2, **options: object) -> envhub.HubVectorEnv:
    envs = envhub.make_vec(name, num_envs, hub=address, **options)
    envs.reset()
    return envs


def passed_s(condition: Callable[[], bool], timeout_s: float = 30.0) -> float:
    """Seconds until it is true."""
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() < begun_s + timeout_s
        time.sleep(0.0005)
    return time.monotonic() - begun_s


@pytest.mark.parametrize("lane", LANES)
def test_worker_killed(hub: ServedHub, lane: str) -> None:
    told_s, back_s = [], []
    for _ in range(20):
        with contextlib.closing(made(hub.ipc, num_workers=2, lane=lane)) as envs:
            _, pid = envs.call("pid")
            envs.step_async(np.array([0, 50]))
            time.sleep(0.05)
            begun_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            assert envs.step_wait()[3].tolist() == [False, True]
            told_s.append(time.monotonic() - begun_s)
            assert not envs.step(np.zeros(2, int))[3].any()
            back_s.append(time.monotonic() - begun_s)
    told(f"worker killed -> client told ({lane})", "<= 50 ms", told_s)
    told(f"worker killed -> its env steps again, after 0.1 s of backoff ({lane})", "<= 1500 ms", back_s)


@pytest.mark.parametrize("lane", LANES)
def test_env_hangs(hub: ServedHub, lane: str) -> None:
    limit_s, beyond_s = 0.5, []
    for _ in range(5):
        with contextlib.closing(made(hub.ipc, num_workers=2, lane=lane, step_timeout=limit_s)) as envs:
            envs.step(np.zeros(2, int))  # the first one has the time of the making
            begun_s = time.monotonic()
            assert envs.step(np.array([0, 6000]))[3].tolist() == [False, True]
            beyond_s.append(time.monotonic() - begun_s - limit_s)
    told(f"env hangs -> killed and answered, beyond the deadline ({lane})", "<= 1000 ms", beyond_s)


def test_hub_killed(tmp_path: Path) -> None:
    gone_s = []
    for number in range(HUBS):
        folder = tmp_path / str(number)
        folder.mkdir()
        binds = [f"ipc://{folder}/hub.sock"]
        with serve(folder, *OFFERED, binds=binds) as served, contextlib.closing(RawPeer(served.ipc)) as peer:
            assert peer.ask(Op.MAKE, messages.pack(Make(2, "counter")), b"k" * 16).failure is None
            hub = psutil.Process(served.process.pid)
            tree = [hub, *hub.children(recursive=True)]
            served.process.kill()
            gone_s.append(passed_s(lambda tree=tree: not any(map(lives, tree))))  # type: ignore[misc]
    told("hub killed -> no process, and so no memory, of it", "<= 1000 ms", gone_s)


def test_hub_drained(tmp_path: Path) -> None:
    ended_s = []
    for _ in range(5):
        with serve(tmp_path, *OFFERED) as served:
            sessions = [made(address, num_envs=8) for address in (served.ipc, served.tcp)]
            for envs in sessions:
                envs.step_async(np.full(8, 1))
            time.sleep(0.05)
            begun_s = time.monotonic()
            served.process.terminate()
            assert all(not envs.step_wait()[3].any() for envs in sessions)
            assert served.process.wait(20) == 0
            ended_s.append(time.monotonic() - begun_s)
            for envs in sessions:
                envs.close()
    told("SIGTERM with 16 steps under way -> answered, and the hub gone", "<= 8000 ms", ended_s)


def test_client_killed(hub: ServedHub) -> None:
    begins_s, freed_s = [], []
    with envhub.connect(hub.tcp) as watcher:
        for address in (hub.ipc, hub.tcp) * 4:
            program = subprocess.Popen([sys.executable, "-c", CLIENT, address], stdout=subprocess.PIPE, cwd=HERE)
            assert program.stdout is not None and program.stdout.readline()
            program.kill()
            begins_s.append(passed_s(lambda: watcher.sessions()[0]["leased"]))
            freed_s.append(passed_s(lambda: not watcher.sessions()) - LEASE_S)
            program.wait()
            program.stdout.close()
    told("client killed -> its lease begins", "<= 50 ms", begins_s)
    told("lease over -> its session freed, beyond the lease", "<= 1000 ms", freed_s)


class _Noted(logging.Handler):
    """When the library warned."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.times_s: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.times_s.append(time.monotonic())


def test_network_swallows_everything(tmp_path: Path) -> None:
    warned_s, lost_s, resumed_s = [], [], []
    with serve(tmp_path, *OFFERED) as served, proxy(served.tcp) as between:
        envs = made(between.address, num_envs=2, step_timeout=60)
        with contextlib.closing(envs):
            noted = _Noted()
            logging.getLogger("envhub").addHandler(noted)
            for _ in range(3):
                before = served.log.count("client_lost")
                envs.step_async(np.array([0, 1]))
                between.hold()
                begun_s = time.monotonic()
                lost_s.append(passed_s(lambda before=before: served.log.count("client_lost") > before))  # type: ignore[misc]
                with pytest.raises(envhub.HubTimeout):
                    envs.step_wait(timeout=max(0.1, begun_s + 5 - time.monotonic()))
                warned_s.append(next(at_s for at_s in noted.times_s if at_s > begun_s) - begun_s)
                between.hold(False)
                begun_s = time.monotonic()
                assert not envs.step_wait(timeout=30)[3].any()
                resumed_s.append(time.monotonic() - begun_s)
            logging.getLogger("envhub").removeHandler(noted)
    told("network silent -> the client warns", "<= 4000 ms", warned_s)
    told("network silent -> the hub begins the lease", "<= 4000 ms", lost_s)
    told("network back after 5 s -> the pending step of 0.1 s answered", "all", resumed_s)


def test_connection_cut(hub: ServedHub) -> None:
    resumed_s = []
    with proxy(hub.tcp) as between, contextlib.closing(made(between.address, num_envs=2)) as envs:
        for number in range(20):
            envs.step_async(np.array([0, 1]))
            between.cut()
            begun_s = time.monotonic()
            assert envs.step_wait(timeout=30)[0][:, 0].tolist() == [number + 1] * 2
            resumed_s.append(time.monotonic() - begun_s)
    told("connection cut in a step of 0.1 s -> answered", "100 % of them", resumed_s)


def _stepped_s(envs: envhub.HubVectorEnv, steps: int) -> list[float]:
    taken_s = []
    for _ in range(steps):
        begun_s = time.monotonic()
        envs.step(np.zeros(2, int))
        taken_s.append(time.monotonic() - begun_s)
    return taken_s


def test_slow_readers(tmp_path: Path) -> None:
    with serve(tmp_path, *OFFERED) as served, contextlib.ExitStack() as opened:
        envs = made(served.tcp, "counter", lane="wire")
        opened.callback(envs.close)
        _stepped_s(envs, 200)
        told("a step of a client by tcp, alone", "", _stepped_s(envs, 2000))
        memory = psutil.Process(served.process.pid).memory_info
        before = memory().rss
        for number in range(8):
            reader = opened.enter_context(ZmtpPeer(served.tcp))
            token = bytes([100 + number]) * 16
            reader.ask(Op.MAKE, messages.pack(Make(1, "wide", kwargs=_packed(mebibytes=1))), token, 1)
            reader.receive()
            reader.ask(Op.RESET, messages.pack(Reset()), token, 2)
            time.sleep(0.2)
            for seq in range(3, 103):
                reader.ask(Op.STEP, b"\x04", token, seq, bytes(8))
        told("the same beside 8 clients that ask for 1 MiB and never read", "p99 +<= 20 %", _stepped_s(envs, 2000))
        grown = (memory().rss - before) / 2**20
        print(
            f"\n{'memory of the hub beside them':<58} {'+<= 16 MiB':>16} {grown:+9.1f} MiB (arenas of 8 x 2 MiB in it)",
            end="",
        )


def _packed(**arguments: object) -> bytes:
    from envhub.values import codec

    return codec.encode(arguments)


def test_leaks(hub: ServedHub) -> None:
    process = psutil.Process(hub.process.pid)

    def measured() -> tuple[int, int, int, float]:
        gc.collect()
        assert wait_until(lambda: not hub.workers(), 20)
        children = len(process.children(recursive=True))
        return process.num_fds(), process.num_threads(), children, process.memory_info().rss / 2**20

    def session(address: str, kill: bool) -> None:
        with contextlib.closing(made(address)) as envs:
            if kill:
                os.kill(envs.call("pid")[0], signal.SIGKILL)
            envs.step(np.zeros(2, int))

    for what, kill in (("sessions made and closed", False), ("workers killed", True)):
        for number in range(10):
            session((hub.ipc, hub.tcp)[number % 2], kill)
        before = measured()
        for number in range(100):
            session((hub.ipc, hub.tcp)[number % 2], kill)
        fds, threads, children, rss = np.subtract(measured(), before)
        figure = f"100 {what}: descriptors, threads, processes, memory"
        print(
            f"\n{figure:<58} {'0, 0, 0, +<= 2':>16} {fds:+.0f}, {threads:+.0f}, {children:+.0f}, {rss:+.1f} MiB", end=""
        )
