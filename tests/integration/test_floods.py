"""Clients that do not read, that flood, and that talk nonsense without end cost the others nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from envhub_server.network.connections import MALFORMED_MAX
from hubs import ServedHub, serve, wait_until
from zmtp import ZmtpPeer, frame

import envhub
from envhub.protocol import messages
from envhub.protocol.messages import Close, Make, Op, Reset
from envhub.values import codec

MIB = 1 << 20
GROWN_MAX = 64 * MIB


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("floods"), "wide=odd_sims:Wide", "counter=sims:counter", "--lease", "3") as hub:
        yield hub


@pytest.fixture
def honest(flooded: ServedHub) -> Iterator[envhub.HubVectorEnv]:
    """A client beside, whose steps are all there at the end, of a hub that has not grown."""
    envs = envhub.make_vec("counter", 2, hub=flooded.tcp, lane="wire")
    with contextlib.closing(envs):
        envs.reset()
        before = rss(flooded)
        yield envs
        assert flooded.process.poll() is None and "internal_error" not in flooded.log
        assert rss(flooded) - before < GROWN_MAX


def rss(hub: ServedHub) -> int:
    return int(psutil.Process(hub.process.pid).memory_info().rss)


def goes_on(envs: envhub.HubVectorEnv, steps: int = 50) -> bool:
    """Whether it steps in order; no step may take as long as a hang."""
    first = int(envs.step(np.zeros(2, int))[0][0, 0])
    counts = []
    for _ in range(steps):
        envs.step_async(np.zeros(2, int))
        counts.append(int(envs.step_wait(timeout=10)[0][0, 0]))
    return counts == list(range(first + 1, first + 1 + steps))


@contextlib.contextmanager
def session(hub: ServedHub, token: bytes, mebibytes: int) -> Iterator[ZmtpPeer]:
    """One env, which has been reset; nothing but the greeting has been read."""
    with ZmtpPeer(hub.tcp) as peer:
        peer.connection.settimeout(10)
        peer.ask(Op.MAKE, messages.pack(Make(1, "wide", kwargs=codec.encode({"mebibytes": mebibytes}))), token, 1)
        assert wait_until(lambda: _phase(hub, token) == "ready", 20)
        peer.ask(Op.RESET, messages.pack(Reset()), token, 2)
        yield peer


def _phase(hub: ServedHub, token: bytes) -> str:
    with envhub.connect(hub.tcp) as client:
        return next((found["phase"] for found in client.sessions() if found["session"] == token.hex()[:8]), "")


@pytest.mark.long
def test_client_that_never_reads_is_given_no_more(flooded: ServedHub, honest: envhub.HubVectorEnv) -> None:
    with session(flooded, b"never reads" + bytes(5), mebibytes=8) as peer:
        for seq in range(3, 103):
            peer.ask(Op.STEP, b"\x04", b"never reads" + bytes(5), seq, bytes(8))
            time.sleep(0.005)
        assert goes_on(honest)


@pytest.mark.long
def test_memory_of_sessions_whose_replies_are_not_read_is_given_back(
    flooded: ServedHub, honest: envhub.HubVectorEnv
) -> None:
    before, mapped = rss(flooded), arenas(flooded)
    with contextlib.ExitStack() as peers:
        for number in range(4):
            token = bytes([number]) + b"unread" + bytes(9)  # a session is named by its first four bytes
            peer = peers.enter_context(session(flooded, token, mebibytes=16))
            for seq in (3, 4):
                peer.ask(Op.STEP, b"\x04", token, seq, bytes(8))
                assert wait_until(lambda: _phase(flooded, token) == "ready", 10)  # noqa: B023
            peer.ask(Op.CLOSE, messages.pack(Close()), token, 5)
        assert wait_until(lambda: arenas(flooded) <= mapped, 15)
        assert goes_on(honest) and rss(flooded) - before < GROWN_MAX


def arenas(hub: ServedHub) -> int:
    """How many arenas the hub has mapped."""
    return Path(f"/proc/{hub.process.pid}/maps").read_text().count("envhub-arena")


@pytest.mark.long
def test_client_that_does_not_wait_for_answers_is_refused(flooded: ServedHub, honest: envhub.HubVectorEnv) -> None:
    token = b"floods" + bytes(10)
    with session(flooded, token, mebibytes=1) as peer, envhub.connect(flooded.tcp) as client:
        refused = client.stats()["refused"]
        for seq in range(3, 2003):
            peer.ask(Op.STEP, b"\x04", token, seq, bytes(8))
        assert goes_on(honest)
        assert wait_until(lambda: client.stats()["refused"] > refused)


def test_announced_gigabyte_ends_its_connection_and_takes_no_memory(
    flooded: ServedHub, honest: envhub.HubVectorEnv
) -> None:
    with ZmtpPeer(flooded.tcp) as peer:
        peer.connection.settimeout(10)
        before = rss(flooded)
        peer.connection.sendall(b"\x02" + (1 << 30).to_bytes(8, "big") + bytes(1000))
        assert peer.ends()
        assert goes_on(honest) and rss(flooded) - before < 16 * MIB


def test_of_a_connection_that_is_ended_no_message_more_is_handled(flooded: ServedHub) -> None:
    with envhub.connect(flooded.tcp) as client, ZmtpPeer(flooded.tcp) as peer:
        malformed = client.stats()["malformed"]
        with contextlib.suppress(OSError):  # it is ended meanwhile
            peer.connection.sendall(frame(b"", False) * 1000)
            while peer.connection.recv(1 << 16):
                pass
        assert client.stats()["malformed"] == malformed + MALFORMED_MAX
