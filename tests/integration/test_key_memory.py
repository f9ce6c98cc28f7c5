"""The memory of a key's workers counts, whatever has filled it, and another key's workers go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_server.network.key_folder import KeyFolder
from hubs import serve, wait_until
from new_keys import address_of, admitted

import envhub

MIB = 1 << 20
BYTES_MAX = 200 * MIB


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The addresses of two clients of a hub."""
    keys = KeyFolder(tmp_path / "keys")
    keys.make_secret()
    tokens = [admitted(keys, name, worker_memory_bytes_max=BYTES_MAX) for name in ("alice", "mallory")]
    offered = "CartPole-v1", "hoarder=sims:Hoarder"
    with serve(tmp_path, *offered, "--keys", str(keys.path)) as hub:
        alice, mallory = (address_of(token, hub.tcp) for token in tokens)
        yield alice, mallory


def failure_of(envs: Any, action: int = 0) -> str:
    """Step until an env fails, first with this action; returns what is told of it."""
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        infos = envs.step(np.array([action]))[4]
        if "env_failure" in infos:
            (found,) = infos["env_failure"]
            assert found.cause == "memory"
            return str(found.message)
        action = 0
    raise AssertionError("no env failed")


def makes(hub: str) -> bool:
    """Whether the client may make a session."""
    try:
        envhub.make_vec("CartPole-v1", 1, hub=hub).close()
    except envhub.RequestRefused as error:
        assert "worker_memory_bytes_max" in str(error)
        return False
    return True


def filled_by_attributes(envs: Any) -> str:
    """Set attributes that a worker may not have together; returns what is told of its end."""
    for number in range(BYTES_MAX // (40 * MIB) + 1):  # no more: the next worker has none of them, and would take them
        try:
            envs.set_attr(f"x{number}", bytes(40 * MIB))
        except envhub.RequestRefused as error:  # too much was measured, and the worker is about to end
            assert "worker_memory_bytes_max" in str(error)
            break
        except envhub.WorkerDied as error:
            return str(error)
    return failure_of(envs)


@pytest.mark.long
def test_attributes_that_fill_a_worker_end_it_and_are_refused_meanwhile(clients: tuple[str, str]) -> None:
    alice, mallory = clients
    with (
        closing(envhub.make_vec("CartPole-v1", 1, hub=alice)) as honest,
        closing(envhub.make_vec("CartPole-v1", 1, hub=mallory)) as small,
        closing(envhub.make_vec("CartPole-v1", 1, hub=mallory)) as filled,
    ):
        for envs in (honest, small, filled):
            envs.reset()
        message = filled_by_attributes(filled)
        assert "had" in message and "the most of the workers of mallory" in message
        assert f"worker_memory_bytes_max={BYTES_MAX}" in message
        filled.reset()
        for envs in (honest, small):  # the smaller workers of the same key, too
            assert not envs.step(np.zeros(1, int))[3].any()
        assert wait_until(lambda: makes(mallory))  # it is measured again, and has no more than it may


@pytest.mark.long
def test_workers_of_all_sessions_of_a_key_count_together_and_the_largest_is_ended(
    clients: tuple[str, str],
) -> None:
    alice, mallory = clients
    with (
        closing(envhub.make_vec("hoarder", 1, hub=alice)) as honest,
        closing(envhub.make_vec("hoarder", 1, hub=mallory)) as first,
        closing(envhub.make_vec("hoarder", 1, hub=mallory)) as second,
    ):
        for envs in (honest, first, second):
            envs.reset()
        honest.step(np.array([150]))
        first.step(np.array([90]))
        assert "the most of the workers of mallory" in failure_of(second, 150)
        assert not any(envs.step(np.zeros(1, int))[3].any() for envs in (honest, first))
