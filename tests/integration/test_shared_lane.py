"""The shared lane: how it is had, what falls back, and what only it could get wrong. All other tests use it, too."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sims
from envhub_client.private_hub.process import private_hub
from gymnasium import spaces
from hubs import ServedHub, serve

import envhub
from envhub.protocol.messages import Collect
from envhub.transport.address import parse, side_path


def test_lane_is_the_shared_one_where_it_can_be_had(hub: ServedHub) -> None:
    wanted = {None: "shared", hub.ipc: "shared", hub.tcp: "wire"}
    for address, lane in wanted.items():
        envs = envhub.make_vec("CartPole-v1", 2, hub=address)
        assert envs.lane == lane
        with envhub.connect(address or envs._session.connection.address) as client:
            assert lane in {row["lane"] for row in client.sessions()}
        envs.close()
        envs = envhub.make_vec("CartPole-v1", 2, hub=address, lane="wire")
        assert envs.lane == "wire"
        envs.close()
    with pytest.raises(ValueError, match="lane"):
        envhub.make_vec("CartPole-v1", 2, lane="fast")


def test_lane_of_the_environment_is_that_of_sessions_which_name_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def lane_of(options: dict[str, Any]) -> str:
        with contextlib.closing(envhub.make_vec("CartPole-v1", 2, **options)) as envs:
            assert len(envs.reset()[0]) == 2
            return envs.lane

    for variable, lane in {"wire": "wire", "auto": "shared", "": "shared"}.items():
        monkeypatch.setenv("ENVHUB_LANE", variable)
        assert [lane_of({}), lane_of({"lane": "auto"}), lane_of({"lane": "wire"})] == [lane, "shared", "wire"]
    monkeypatch.setenv("ENVHUB_LANE", "wire")
    with contextlib.closing(envhub.AsyncVectorEnv([lambda: gym.make("CartPole-v1")])) as envs:
        assert envs.lane == "wire"
    monkeypatch.setenv("ENVHUB_LANE", "shared")
    with pytest.raises(ValueError, match="ENVHUB_LANE must be 'auto' or 'wire', got 'shared'"):
        envhub.make_vec("CartPole-v1", 2)
    assert lane_of({"lane": "wire"}) == "wire"


@pytest.mark.long
def test_without_a_side_socket_the_wire_is_used(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter") as served:
        side = side_path(parse(served.ipc).path)
        assert side is not None
        os.unlink(side)
        envs = envhub.make_vec("counter", 2, hub=served.ipc)
        assert envs.lane == "wire"
        envs.reset()
        assert envs.step([1, 2])[1].tolist() == [1, 2]
        envs.close()
        assert served.stop() == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".log"]


def knock(path: str, ticket: bytes) -> bytes:
    """What the side socket says to this ticket."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(5)
        peer.connect(path)
        peer.sendall(ticket)
        try:
            return peer.recv(100)
        except ConnectionResetError:
            return b""


def test_tickets_are_checked_and_good_once(hub: ServedHub) -> None:
    envs = envhub.make_vec("counter", 2, hub=hub.ipc)
    path = side_path(parse(hub.ipc).path)
    assert path is not None and envs.lane == "shared"
    for ticket in (bytes(16), b"x" * 16, b"short", os.urandom(16)):
        assert knock(path, ticket) == b""
    idle = [socket.socket(socket.AF_UNIX) for _ in range(100)]
    for one in idle:
        one.connect(path)  # and says nothing
    envs.reset()
    assert envs.step([1, 2])[1].tolist() == [1, 2]
    other = envhub.make_vec("counter", 2, hub=hub.ipc)
    assert other.lane == "shared"
    for one in idle:
        one.close()
    other.close()
    envs.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_other_users_get_nothing() -> None:
    envs = envhub.make_vec(sims.Counter, 1)
    hub = private_hub().own
    for file in (hub.socket, hub.side):
        program = (
            "import os, socket\nos.setuid(65534)\ns = socket.socket(socket.AF_UNIX)\n"
            f"s.connect('/proc/{os.getpid()}/fd/{file}')"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
        assert "PermissionError" in ran.stderr
    envs.close()


class Odd(gym.Env[Any, Any]):
    """Observes and hears words, and its infos are large on demand."""

    observation_space = spaces.Dict({"n": spaces.Discrete(10**6), "word": spaces.Text(5000)})
    action_space = spaces.Discrete(3)
    count = 0

    def observe(self) -> Any:
        return {"n": self.count, "word": str(self.count)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        if action == 2:
            raise ValueError("two")
        blob = "x" * (5000 if action else 5)
        return self.observe(), 0.0, False, False, {"blob": blob, "type": type(action).__name__}


@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_everything_in_turn(lane: str) -> None:
    envs = envhub.make_vec([Odd] * 3, num_workers=2, lane=lane)
    envs.reset()
    count = 0
    for number in range(30):
        kind = number % 6
        if kind < 3:
            batch: Any = [np.array([0, 0, 0]), [0, 1, np.int32(0)], [1, 1, 1]][kind]  # the second travels beside
            observations, *_, infos = envs.step(batch)
            count += 1
            assert observations["n"].tolist() == [count] * 3 and observations["word"] == (str(count),) * 3
            assert [len(blob) for blob in infos["blob"]] == [5000 if one else 5 for one in batch]
        elif kind == 3:
            assert envs.get_attr("count") == (count,) * 3
            envs.set_attr("mark", [number] * 3)
        elif kind == 4:
            with pytest.raises(ValueError, match="two"):
                envs.step([0, 2, 0])
            count += 1
        else:
            observations, _ = envs.reset(options={"reset_mask": np.array([True, True, False])})
            assert observations["n"].tolist() == [0, 0, count] and observations["word"][2] == str(count)
            envs.reset()
            count = 0
    envs.close()


def test_exception_that_the_hub_does_not_report_is_an_error_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = envhub.make_vec(sims.Naughty, 2)
    envs.reset()
    connection = envs._session.connection
    ask = connection.ask
    monkeypatch.setattr(connection, "ask", lambda op, message, timeout: ask(op, Collect([])))  # of no env
    envs.send([1, 6])
    with pytest.raises(envhub.RemoteProtocolError, match=r"\[0\] raised"):
        envs.recv()
    assert envs.recv()[-1].tolist() == [1]
    with pytest.raises(envhub.RemoteProtocolError, match=r"\[0\] raised"):
        envs.step([1, 6])
    monkeypatch.undo()
    assert envs.reset()[0][:, 0].tolist() == [0, 0]
    envs.close()


@pytest.mark.long
@pytest.mark.parametrize("waits", ["for the step first", "for the hub first"])
def test_running_step_ends_before_its_hub_does(tmp_path: Path, waits: str) -> None:
    with serve(tmp_path, "naughty=sims:naughty") as served:
        envs = envhub.make_vec("naughty", 2, hub=served.ipc)
        assert envs.lane == "shared"
        envs.reset()
        envs.step_async([6, 6])  # 0.2 s each
        served.process.send_signal(signal.SIGTERM)
        if waits == "for the hub first":
            served.process.wait(10)
        assert envs.step_wait()[1].tolist() == [6, 6]
        assert served.process.wait(10) == 0
        with pytest.raises(envhub.HubLost):
            envs.step([0, 0])
        envs.close()


@pytest.fixture(scope="module")
def brief_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A hub that soon ends the session of a client that is gone."""
    with serve(
        tmp_path_factory.mktemp("brief"), "counter=sims:counter", "naughty=sims:naughty", "--lease", "0.5"
    ) as hub:
        yield hub


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "steps", [pytest.param(5_000, marks=pytest.mark.long), pytest.param(300_000, marks=pytest.mark.chaos)]
)
@pytest.mark.parametrize("spin", ["0", "200"])
def test_no_wake_up_is_lost(spin: str, steps: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENVHUB_SPIN_US", spin)
    with serve(tmp_path, "counter=sims:counter") as served:
        envs = envhub.make_vec("counter", 8, hub=served.ipc, num_workers=4)
        envs.reset()
        batches = [np.arange(8) + number for number in range(50)]
        for step in range(steps):
            envs.step_async(batches[step % 50])
            observations, rewards, *_ = envs.step_wait(timeout=20)  # a lost one would end in this
            assert observations[0, 0] == observations[7, 0] == step + 1 and rewards[3] == 3 + step % 50
        envs.close()


SCRIBBLER = """
import os, fcntl, signal, sys, envhub
envs = envhub.make_vec("counter", 2, hub={hub!r})
envs.reset()
lane = envs._session.lane
lane._arena.header[:] = 2**63 - 1
lane._arena.request[:] = lane._arena.done[:] = 2**63 - 1
lane._arena.info_length[:] = lane._arena.status[:] = 2**63 - 1
for bell in (lane._bell, *lane._bells):
    try:
        os.write(bell, (2**64 - 2).to_bytes(8, sys.byteorder))
    except BlockingIOError:
        pass
    fcntl.fcntl(bell, fcntl.F_SETFL, fcntl.fcntl(bell, fcntl.F_GETFL) & ~os.O_NONBLOCK)
print("scribbled", flush=True)
{then}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "then",
    [
        "os._exit(0)",
        "envs.call('pid')",
        pytest.param("envs.close()", marks=pytest.mark.chaos),
        pytest.param("os.kill(envs.call('pid')[0], 9)", marks=pytest.mark.chaos),
    ],
)
def test_client_that_scribbles_over_its_memory_harms_only_itself(brief_hub: ServedHub, then: str) -> None:
    other = envhub.make_vec("counter", 2, hub=brief_hub.ipc)
    other.reset()
    program = [sys.executable, "-c", SCRIBBLER.format(hub=brief_hub.ipc, then=then)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
        assert client.stdout is not None and client.stdout.readline() == b"scribbled\n"
        for number in range(60):
            assert other.step([number, 1])[1].tolist() == [number, 1] and other.get_attr("count") == (number + 1,) * 2
            time.sleep(0.005)
        client.kill()
    assert brief_hub.process.poll() is None and "internal_error" not in brief_hub.log
    other.close()


def test_views_can_be_read_in_a_forked_child() -> None:
    envs = envhub.AsyncVectorEnv([sims.Counter] * 2, copy=False)
    envs.reset()
    seen = envs.step([0, 0])[0]
    pid = os.fork()
    if pid == 0:
        os._exit(0 if seen[0, 0] == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    envs.close()


def test_endless_timeouts_are_no_error() -> None:
    envs = envhub.make_vec(sims.Counter, 1)
    envs.reset()
    envs.step_async([3])
    assert envs.step_wait(timeout=1e9)[1].tolist() == [3]
    envs.close()
