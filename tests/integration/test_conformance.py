"""``envhub conformance`` passes a hub that keeps its promises and fails one that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq
from hubs import ServedHub

from envhub.protocol.messages import REPLY, Op
from envhub.protocol.prelude import Prelude


def conformance(address: str, *envs: str) -> tuple[int, dict[str, str], set[str]]:
    """Exit status, why each check that failed did, and for which envs checks were skipped."""
    options = [part for env in envs for part in ("--env", env)]
    ran = subprocess.run(
        [sys.executable, "-m", "envhub", "conformance", address, "--json", *options],
        capture_output=True,
        text=True,
        timeout=100,
    )
    verdicts = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(verdicts) >= 12, ran.stderr
    failed = {verdict["check"]: verdict["why"] for verdict in verdicts if not verdict["passed"]}
    return ran.returncode, failed, {verdict["env"] for verdict in verdicts if verdict["skipped"]}


def test_hub_conforms(hub: ServedHub) -> None:
    assert conformance(hub.tcp, "CartPole-v1", "graphs") == (0, {}, set())


@pytest.mark.long
@pytest.mark.parametrize("lane", ["ipc", "tcp"])
def test_hub_conforms_with_other_envs(hub: ServedHub, lane: str) -> None:
    # No episode of counter ever ends.
    assert conformance(getattr(hub, lane), "nested", "Blackjack-v1", "counter") == (0, {}, {"counter"})


@pytest.mark.long
def test_table_shows_whatever_an_env_says(hub: ServedHub) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "envhub", "conformance", hub.tcp, "--env", "unwell"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert ran.returncode == 1 and "[/no/markup]" in ran.stdout, ran.stderr


def test_env_that_is_not_offered_is_told_in_a_line(hub: ServedHub) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "envhub", "conformance", hub.tcp, "--env", "Nope-v0"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 1 and "does not offer Nope-v0" in ran.stderr and "Traceback" not in ran.stderr


@contextmanager
def tampered(address: str, tamper: Callable[[list[bytes]], list[bytes]]) -> Iterator[str]:
    """A hub's address behind somebody who changes its replies."""
    context = zmq.Context()
    front = context.socket(zmq.ROUTER)
    front.linger = 0
    port = front.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def forward() -> None:
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        while not stop.is_set():
            while front.poll(5 if not backs else 0):
                peer, *frames = front.recv_multipart()
                if peer not in backs:
                    backs[peer] = context.socket(zmq.DEALER)
                    backs[peer].linger = 0
                    backs[peer].connect(address)
                backs[peer].send_multipart(frames)
            for peer, back in backs.items():
                while back.poll(1):
                    front.send_multipart([peer, *tamper(back.recv_multipart())])
        for back in backs.values():
            back.close()

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join()
        front.close()
        context.term()


def shorten_steps(frames: list[bytes]) -> list[bytes]:
    """A hub that forgets the last byte of what it observed."""
    if Prelude.unpack(frames[0]).op == REPLY | Op.STEP:
        return [frames[0], frames[1][:-1], *frames[2:]]
    return frames


@pytest.mark.long
def test_hub_that_breaks_a_promise_fails_and_the_promise_is_named(hub: ServedHub) -> None:
    with tampered(hub.tcp, shorten_steps) as address:
        status, failed, _ = conformance(address, "CartPole-v1")
    assert status == 1
    assert "frames have [47, 30] bytes, not [48, 30]" in failed["frames are those that the spaces say"]
    assert "results have the dtypes and shapes of the spaces" in failed


@pytest.mark.long
def test_missing_hub_is_told_in_a_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "envhub", "conformance", "ipc:///no/such.sock", "--timeout", "0.5"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
