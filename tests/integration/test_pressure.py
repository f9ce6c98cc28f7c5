"""What runs short is told to whoever asks for more of it; those who have what they need do not notice."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from hubs import ServedHub, serve, wait_until

import envhub
from envhub.address import parse, side_path

DESCRIPTORS_MAX = 256
FLOOD = 300
HANDSHAKE_S = 3.0  # until libzmq drops a connection that says nothing


def descriptors(hub: ServedHub) -> int:
    return psutil.Process(hub.process.pid).num_fds()


def limit_descriptors(hub: ServedHub, number: int) -> None:
    resource.prlimit(hub.process.pid, resource.RLIMIT_NOFILE, (number, number))


def raw_connection(hub: ServedHub, kind: str) -> socket.socket:
    """A connection that has been begun and never says a word."""
    if kind == "tcp":
        family, place = socket.AF_INET, ("127.0.0.1", parse(hub.tcp).port)
    else:
        path = parse(hub.ipc).path if kind == "ipc" else side_path(parse(hub.ipc))
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


@pytest.mark.parametrize("kind", ["ipc", "tcp", "side", "all"])
def test_flood_of_connections_keeps_nobody_from_stepping(tmp_path: Path, kind: str) -> None:
    with serve(tmp_path, "counter=sims:counter") as hub, contextlib.ExitStack() as flood:
        limit_descriptors(hub, DESCRIPTORS_MAX)
        own = envhub.make_vec("counter", 1, hub=hub.ipc, lane="wire", autoreset_mode="Disabled")
        with stepping(own) as counts, stepping(envhub.make_vec("counter", 1, hub=hub.tcp, lane="wire")) as others:
            for each in [kind] if kind != "all" else ["ipc", "tcp", "side"]:
                for _ in range(FLOOD):
                    flood.enter_context(raw_connection(hub, each))
            seen = len(counts), len(others)
            assert wait_until(lambda: len(counts) > seen[0] + 50 and len(others) > seen[1] + 50, 20)
            assert kind == "side" or wait_until(lambda: "descriptors_short" in hub.log)
            assert descriptors(hub) < DESCRIPTORS_MAX
            flood.close()
            assert wait_until(lambda: descriptors(hub) < DESCRIPTORS_MAX / 3, 3 * HANDSHAKE_S)
            assert kind == "side" or wait_until(lambda: "descriptors_back" in hub.log)
            for address in (hub.ipc, hub.tcp):
                envhub.make_vec("counter", 1, hub=address).close()
        assert hub.stop() == 0
        assert [path.suffix for path in tmp_path.iterdir()] == [".log"]
