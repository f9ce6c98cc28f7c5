"""What an authenticated client that means harm costs another one. Ratios are printed; none fails a test.

An honest client steps by itself, while an attacker with a key attacks its hub, and while the same attacker attacks
another hub of the machine, in turn. The last one shows what the attacker costs as any other process does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from envhub_server.network.key_folder import KeyFolder
from hubs import ServedHub, serve, wait_until
from new_keys import address_of, admitted

import envhub
from envhub.protocol import messages
from envhub.protocol.messages import Hello, Make, Op, Question, Reset
from envhub.protocol.prelude import NO_SESSION, Prelude
from envhub.transport import sockets
from envhub.transport.keys import HubKeys, keys_of, token_of
from envhub.values import codec

REPEATS, SECONDS = 5, 3.0
TARGET = 2.0
ENVS, READERS = 4, 8
MIB = 1 << 20
OFFERED = ["CartPole-v1", "wide=odd_sims:Wide"]
PATIENCE_MS = 30_000

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]


class Keyed:
    """A connection by a key, for any requests."""

    def __init__(self, place: str, keys: HubKeys) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = 1
        sockets.present_keys(self.socket, keys)
        self.socket.connect(place)
        self.hub_id = 0
        self.hub_id = Prelude.unpack(self.ask(Op.HELLO, messages.pack(Hello()), NO_SESSION, 1)).hub_id

    def send(self, op: Op, header: bytes, token: bytes, seq: int, *frames: bytes) -> None:
        """Send a request as soon as there is room for it."""
        if self.socket.poll(PATIENCE_MS, zmq.POLLOUT):
            self.socket.send_multipart([Prelude(op, self.hub_id, token, seq).pack() + header, *frames])

    def ask(self, op: Op, header: bytes, token: bytes, seq: int) -> bytes:
        self.send(op, header, token, seq)
        assert self.socket.poll(PATIENCE_MS), f"no reply to {op.name}"
        return bytes(self.socket.recv_multipart()[0])


def read_slowly(place: str, keys: HubKeys, attacking: Event) -> None:
    """Eight sessions with observations of 1 MiB that are stepped without end, of whose replies few are read."""
    peers = [(Keyed(place, keys), os.urandom(16)) for _ in range(READERS)]
    for peer, token in peers:
        make = Make(1, "wide", kwargs=codec.encode({"mebibytes": 1}), num_workers=1)
        assert Prelude.unpack(peer.ask(Op.MAKE, messages.pack(make), token, 1)).op != messages.REPLY | Op.FAILURE
        peer.ask(Op.RESET, messages.pack(Reset()), token, 2)
    seq = 2
    while True:
        attacking.wait()
        seq += 1
        for peer, token in peers:
            if peer.socket.poll(0, zmq.POLLOUT):
                peer.send(Op.STEP, b"\x04", token, seq, bytes(8))
        if seq % 10 == 0 and peers[0][0].socket.poll(0):
            peers[0][0].socket.recv_multipart()
        time.sleep(0.005)


def flood(place: str, keys: HubKeys, attacking: Event) -> None:
    """Small requests, as many as the connection takes, whose replies are read."""
    peer, seq = Keyed(place, keys), 1
    while True:
        attacking.wait()
        seq += 1
        peer.send(Op.HEALTH, messages.pack(Question()), NO_SESSION, seq)
        while peer.socket.poll(0):
            peer.socket.recv_multipart()


def send_much(place: str, keys: HubKeys, attacking: Event) -> None:
    """Messages of 32 MiB, one after the other."""
    peer, seq, large = Keyed(place, keys), 1, bytes(32 * MIB)
    while True:
        attacking.wait()
        seq += 1
        peer.send(Op.HEALTH, messages.pack(Question()), NO_SESSION, seq, large)
        while peer.socket.poll(0):
            peer.socket.recv_multipart()


Attack = Callable[[str, HubKeys, Event], None]


class GuardedHub:
    """A hub with keys, and the keys of an honest client and of an attacker."""

    def __init__(self, hub: ServedHub, folder: KeyFolder) -> None:
        self.place, self.folder = hub.tcp, folder
        self.honest, self.attacker = self._add("honest"), self._add("attacker")
        self.address = address_of(token_of(self.honest).reveal_secret(), hub.tcp)
        assert wait_until(self._answers, 20)

    def _add(self, name: str) -> HubKeys:
        return keys_of(admitted(self.folder, name, "deploy"))

    def _answers(self) -> bool:
        with contextlib.suppress(envhub.EnvHubError):
            envhub.connect(self.address).close()
            return True
        return False


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[GuardedHub]:
    folder.mkdir()
    keys = KeyFolder(folder / "keys")
    keys.make_secret()
    with serve(folder, *OFFERED, "--keys", str(keys.path)) as hub:
        yield GuardedHub(hub, keys)
        with envhub.connect(hub.ipc) as client:
            assert client.health()["status"] == "ok"


@contextlib.contextmanager
def attacker(attack: Attack, hub: GuardedHub) -> Iterator[Event]:
    """A process that attacks while the event is set."""
    context = multiprocessing.get_context("spawn")
    attacking = context.Event()
    process = context.Process(target=attack, args=(hub.place, hub.attacker, attacking), daemon=True)
    process.start()
    try:
        yield attacking
        assert process.is_alive()
    finally:
        process.kill()
        process.join()


def step_times_s(envs: Any) -> list[float]:
    """What each step took, for some seconds."""
    actions, found = np.zeros(ENVS, int), []
    until_s = time.perf_counter() + SECONDS
    while (began_s := time.perf_counter()) < until_s:
        envs.step(actions)
        found.append(time.perf_counter() - began_s)
    return found


@contextlib.contextmanager
def during(attacking: Event) -> Iterator[None]:
    attacking.set()
    try:
        time.sleep(0.5)  # until it has its sessions and its queues are full
        yield
    finally:
        attacking.clear()
        time.sleep(0.5)  # until the hub has handled what was sent


@pytest.mark.parametrize("attack", [read_slowly, flood, send_much], ids=lambda attack: str(attack.__name__))
def test_step_beside_an_attacker(tmp_path: Path, attack: Attack) -> None:
    with contextlib.ExitStack() as stack:
        hub, other = (stack.enter_context(guarded(tmp_path / name)) for name in ("hub", "other"))
        envs = stack.enter_context(contextlib.closing(envhub.make_vec("CartPole-v1", ENVS, hub=hub.address)))
        here, elsewhere = (stack.enter_context(attacker(attack, each)) for each in (hub, other))
        envs.reset(seed=1)
        with during(here), during(elsewhere):
            step_times_s(envs)
        p99: dict[str, list[float]] = {"alone": [], "attacked": [], "another attacked": []}
        for _ in range(REPEATS):
            p99["alone"].append(float(np.percentile(step_times_s(envs), 99)))
            with during(here):
                p99["attacked"].append(float(np.percentile(step_times_s(envs), 99)))
            with during(elsewhere):
                p99["another attacked"].append(float(np.percentile(step_times_s(envs), 99)))
    print(f"\n{attack.__name__}: p99 of a step of {ENVS} CartPoles by tcp with keys, ms, medians of {REPEATS} turns:")
    for name, found in p99.items():
        ratios = [ours / alone for ours, alone in zip(found, p99["alone"], strict=True)]
        print(
            f"  {name:16} {np.median(found) * 1e3:6.2f}, ratio {np.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}; target of an attacked hub {TARGET:g})"
        )
