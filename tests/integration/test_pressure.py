"""What runs short is told to whoever asks for more of it; those who have what they need do not notice."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
from envhub_server.memory.session_memory import ArenaBudget, SessionMemory
from envhub_server.session.launcher import BOOTS_MAX
from hubs import ServedHub, serve, wait_until

import envhub
from envhub.arena.layout import Layout
from envhub.transport.address import parse, side_path
from envhub.values.leaf import Leaf

DESCRIPTORS_MAX = 256
FLOOD = 300
BURST = 60  # of connections between two steps; one larger than the reserve of descriptors may end a hub (limits.md)
IDLE = 100
HANDSHAKE_S = 3.0  # until libzmq drops a connection that says nothing


def descriptors(hub: ServedHub) -> int:
    return psutil.Process(hub.process.pid).num_fds()


def limit_descriptors(hub: ServedHub, number: int) -> None:
    _, hard = resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE, (number, hard))


def raw_connection(hub: ServedHub, kind: str) -> socket.socket:
    """A connection that has been begun and never says a word."""
    if kind == "tcp":
        family, place = socket.AF_INET, ("127.0.0.1", parse(hub.tcp).port)
    else:
        path = parse(hub.ipc).path if kind == "ipc" else side_path(parse(hub.ipc).path)
        family, place = socket.AF_UNIX, path  # type: ignore[assignment]
    begun = socket.socket(family)
    begun.setblocking(False)

    def tried() -> bool:
        try:
            begun.connect(place)
        except BlockingIOError:  # no room in the queue; of tcp: under way
            return family == socket.AF_INET
        return True

    wait_until(tried, 0.1)
    return begun


@contextlib.contextmanager
def stepping(envs: envhub.HubVectorEnv) -> Iterator[list[int]]:
    """Step these counters all the while; every count that they said."""
    counts: list[int] = []
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            counts.append(int(envs.step(np.zeros(envs.num_envs, int))[0][0, 0]))

    with contextlib.closing(envs):
        envs.reset()
        stepper = threading.Thread(target=run)
        stepper.start()
        try:
            yield counts
        finally:
            over.set()
            stepper.join()
    assert counts == list(range(1, len(counts) + 1))


def step_on(*counted: list[int], steps: int = 1) -> bool:
    """Whether each of these makes so many more steps in time."""
    wanted = [len(counts) + steps for counts in counted]
    return wait_until(lambda: all(len(counts) >= least for counts, least in zip(counted, wanted, strict=True)))


def _is_short(hub: ServedHub, kind: str, flood: contextlib.ExitStack) -> bool:
    """Whether the hub has few descriptors; connections by tcp for which there was no room come but slowly."""
    flood.enter_context(raw_connection(hub, kind))
    return "descriptors_short" in hub.log


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        "all",
        "proxied",
        *(pytest.param(each, marks=pytest.mark.chaos) for each in ("ipc", "tcp", "side", "proxied, all")),
    ],
)
def test_flood_of_connections_keeps_no_session_from_stepping(tmp_path: Path, kind: str) -> None:
    options = ["--insecure"] if "proxied" in kind else []
    kind = {"proxied": "tcp", "proxied, all": "all"}.get(kind, kind)
    with serve(tmp_path, "counter=sims:counter", *options) as hub, contextlib.ExitStack() as flood:
        limit_descriptors(hub, DESCRIPTORS_MAX)
        own = envhub.make_vec("counter", 1, hub=hub.ipc, lane="wire", autoreset_mode="Disabled")
        with stepping(own) as counts, stepping(envhub.make_vec("counter", 1, hub=hub.tcp, lane="wire")) as others:
            kinds = [kind] if kind != "all" else ["ipc", "tcp", "side"]
            for number in range(FLOOD * len(kinds)):
                flood.enter_context(raw_connection(hub, kinds[number % len(kinds)]))
                assert number % BURST or step_on(counts, others)
            assert step_on(counts, others, steps=50)
            assert kind == "side" or wait_until(lambda: _is_short(hub, kinds[0], flood), 20)
            flood.close()
            assert wait_until(lambda: descriptors(hub) < DESCRIPTORS_MAX / 3, 3 * HANDSHAKE_S)
            assert kind == "side" or wait_until(lambda: "descriptors_back" in hub.log)
            for address in (hub.ipc, hub.tcp):
                envhub.make_vec("counter", 1, hub=address).close()
        assert hub.stop() == 0
        assert [path.suffix for path in tmp_path.iterdir()] == [".log"]


@pytest.mark.long
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.chaos), "meanwhile"])
def test_flood_ends_no_hub_whose_socket_somebody_has_removed(tmp_path: Path, when: str) -> None:
    with serve(tmp_path, "counter=sims:counter") as hub, contextlib.ExitStack() as flood:
        limit_descriptors(hub, DESCRIPTORS_MAX)
        if when == "before":
            Path(parse(hub.ipc).path).unlink()
        assert wait_until(lambda: _is_short(hub, "tcp", flood), 20)
        for left in tmp_path.glob("*.sock*"):
            if not left.name.endswith(".lock"):
                left.unlink()
        flood.close()
        assert wait_until(lambda: "descriptors_back" in hub.log, 20)
        envhub.make_vec("counter", 1, hub=hub.tcp).close()
        assert hub.process.poll() is None


@pytest.mark.long
def test_peers_that_say_nothing_lock_nobody_out_for_long(tmp_path: Path) -> None:
    """They have shaken hands, so that libzmq waits for them without end."""
    with (
        serve(tmp_path, "counter=sims:counter", binds=["tcp://127.0.0.1:0"]) as hub,
        contextlib.closing(envhub.make_vec("counter", 1, hub=hub.tcp)) as envs,
        zmq.Context() as context,
        contextlib.ExitStack() as opened,
    ):
        envs.reset()
        limit_descriptors(hub, DESCRIPTORS_MAX)
        for _ in range(IDLE):
            dealer = opened.enter_context(context.socket(zmq.DEALER))
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RECONNECT_IVL, -1)
            dealer.connect(hub.tcp)
        assert wait_until(lambda: "descriptors_short" in hub.log, 10)
        envhub.connect(hub.tcp, timeout=30.0).close()
        assert envs.step(np.zeros(1, int))[0][0, 0] == 1


@pytest.mark.long
def test_worker_that_cannot_be_started_for_want_of_descriptors_is_once_there_are_some(tmp_path: Path) -> None:
    with (
        serve(tmp_path, "counter=sims:counter") as hub,
        envhub.connect(hub.ipc) as client,
        closing(envhub.make_vec("counter", 4, hub=hub.ipc, num_workers=2, restarts_max=BOOTS_MAX)) as envs,
    ):
        envs.reset()
        limit_descriptors(hub, descriptors(hub) - 6)
        os.kill(envs.call("pid")[1], signal.SIGKILL)
        # More often than a worker that cannot make its envs is tried: this says nothing about them. The log has equal
        # lines but once in ten seconds.
        assert wait_until(lambda: client.sessions()[0]["restarts"] > 1 + BOOTS_MAX)
        assert "cannot be started: " in hub.log
        limit_descriptors(hub, 4096)
        _, _, _, truncations, infos = envs.step(np.zeros(4, int))
        assert truncations.tolist() == [False, True, False, True]
        assert infos["_env_failure"].tolist() == truncations.tolist()
        assert wait_until(lambda: not envs.step(np.zeros(4, int))[3].any())
        assert "internal_error" not in hub.log


@contextlib.contextmanager
def _descriptors_left(number: int) -> Iterator[None]:
    """Have about so many descriptors left in this process: the limit is on their numbers, not on how many there are."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = itertools.filterfalse(used.__contains__, itertools.count())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, number, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_for_which_there_are_no_descriptors_leaves_nothing_behind() -> None:
    layout = Layout(4, (Leaf("<f8", (2,)),), (Leaf("<i8", ()),), 64)
    gc.collect()  # of what earlier tests have left
    before, made = psutil.Process().num_fds(), []
    for left in range(24):
        with _descriptors_left(left):
            try:
                made.append(SessionMemory(layout, 4, ArenaBudget(1 << 40)))
            except OSError as error:
                assert error.errno == errno.EMFILE
            else:
                made.pop().close()
                made.append(None)
        assert psutil.Process().num_fds() <= before
    assert 1 <= len(made) < 24


# --- a hub that may open too few files --------------------------------------------------------------------------------


LIMITED = (
    "import resource, runpy, sys; n = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_NOFILE, (n, n)); "
    "runpy.run_module('envhub', run_name='__main__', alter_sys=True)"
)
PROGRAM = (
    "import resource, gymnasium, envhub; resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80)); "
    "envhub.AsyncVectorEnv([lambda: gymnasium.make('CartPole-v1')])"
)


@pytest.mark.long
@pytest.mark.parametrize("limit", [40, *(pytest.param(each, marks=pytest.mark.long) for each in (32, 120))])
def test_hub_that_can_serve_nobody_says_so_and_ends(tmp_path: Path, limit: int) -> None:
    binds = ["--bind", "tcp://127.0.0.1:0", "--bind", f"ipc://{tmp_path}/hub.sock"]
    command = [sys.executable, "-c", LIMITED, str(limit), "serve", "CartPole-v1", *binds]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    assert f"the limit is {limit}, " in line and " are in use, " in line and "`ulimit -n 1024`" in line
    assert [*tmp_path.iterdir()] == []


@pytest.mark.long
def test_private_hub_that_can_serve_nobody_says_so() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert "envhub: the private hub cannot start: too few open files: the limit is 80, " in run.stderr
    assert "envhub.errors.HubUnreachable: the private hub did not start" in run.stderr


@pytest.mark.long
def test_hub_that_starts_serves_one_client_after_the_other(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", program=("-c", LIMITED, "176")) as hub:
        for _ in range(3):
            for address in hub.addresses:
                with closing(envhub.make_vec("CartPole-v1", 1, hub=address)) as envs:
                    envs.reset()
