"""Connecting to several hubs: all at the same time, and all that was begun ends where one of them fails."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest
from hubs import ServedHub, signalled_in_a_wait, wait_until
from lying_hub import NUM_ENVS, LyingHub

import envhub
from envhub.protocol.messages import Failure, Op


class SilentPlace:
    """A place at which connections are accepted by the kernel, and no hub answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(10)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def ended(self) -> bool:
        """True if there was a connection, which its client has ended."""
        with self._listener.accept()[0] as connection:
            connection.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
        return True

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def silent() -> Iterator[list[SilentPlace]]:
    places = [SilentPlace() for _ in range(3)]
    yield places
    for place in places:
        place.close()


@dataclass(frozen=True)
class Left:
    """What the program has: its threads of the library, and the number of its files."""

    threads: frozenset[threading.Thread]
    files: int

    def is_within(self, before: Left) -> bool:
        """True if nothing was added to what the program had before."""
        return self.threads <= before.threads and self.files <= before.files


def left() -> Left:
    """What the program has now."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("envhub")]
    return Left(frozenset(threads), len(os.listdir("/proc/self/fd")))


@pytest.fixture
def before(hub: ServedHub) -> Iterator[Left]:
    """What a program has that is connected to a hub: its first connection opens files and starts a thread that stay."""
    with envhub.connect(hub.tcp):
        yield left()


def sessions(hub: ServedHub) -> set[str]:
    """The names of the sessions on this hub, on which other tests may have some."""
    with envhub.connect(hub.tcp) as client:
        return {each["session"] for each in client.sessions()}


def make(*addresses: str) -> envhub.HubVectorEnv:
    return envhub.make_vec("counter", len(addresses), hub=addresses, split=[1] * len(addresses))


def test_all_hubs_are_connected_to_before_one_has_answered(
    hub: ServedHub, silent: list[SilentPlace], before: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envhub_client.federation.opener.CONNECT_TIMEOUT_S", 0.5)
    sessions_before = sessions(hub)
    with pytest.raises(envhub.HubUnreachable) as caught:
        make(*(place.address for place in silent), hub.tcp)
    assert silent[0].address in str(caught.value) and caught.value.__cause__ is None
    assert all(place.ended() for place in silent)
    assert wait_until(lambda: left().is_within(before))
    assert sessions(hub) <= sessions_before


def test_interrupt_while_hubs_are_waited_for_ends_all_connections(
    hub: ServedHub, silent: list[SilentPlace], before: Left
) -> None:
    with pytest.raises(KeyboardInterrupt), signalled_in_a_wait(signal.SIGINT):
        make(hub.tcp, *(place.address for place in silent))
    assert all(place.ended() for place in silent)
    assert wait_until(lambda: left().is_within(before))


def test_error_is_that_of_the_first_hub_of_the_list_that_fails(
    silent: list[SilentPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Failure("unsupported_version", "hub", "this hub speaks 9.0")
    with LyingHub({Op.HELLO: (refusal, ())}) as other:
        refuses, is_silent, no_name = other.address, silent[0].address, "nobody"
        for timeout, error, hubs in (
            (10.0, envhub.VersionMismatch, (refuses, is_silent, no_name)),
            (10.0, envhub.AddressError, (no_name, is_silent, refuses)),
            (0.5, envhub.HubUnreachable, (is_silent, no_name, refuses)),  # of which that is known last
        ):
            monkeypatch.setattr("envhub_client.federation.opener.CONNECT_TIMEOUT_S", timeout)
            with pytest.raises(error, match=hubs[0]):
                make(*hubs)


def test_hub_that_gets_no_env_is_left_without_a_question() -> None:
    with LyingHub() as first, LyingHub() as second:
        addresses = [first.address, second.address]
        with closing(envhub.make_vec("x", NUM_ENVS, hub=addresses, split=[NUM_ENVS, 0], lane="wire")) as envs:
            envs.reset()
    assert Op.CLOSE in first.asked
    assert {*second.asked} - {Op.HEARTBEAT} == {Op.HELLO}  # with which a connection is kept up, if it lasts
