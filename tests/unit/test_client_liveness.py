"""From when a client counts as gone, and as back."""

from __future__ import annotations

import math
import os
import socket
import time

import pytest
from envhub_server.network.connections import ClientLiveness, silent_s
from hubs import wait_until
from protocol_pair import TOKEN, ProtocolPair, joined

CONNECTION = 1  # as ``ProtocolPair`` numbers its first one


class Fixture:
    """A session's client, of which a test says when its connection was last heard and whether it is reached."""

    def __init__(self) -> None:
        self.pair: ProtocolPair = joined()
        self.silent_s = 0.0
        self.reached = True
        self.now_s = 100.0
        self.liveness = ClientLiveness(self.pair.hub, lambda connection: self.silent_s)
        self.liveness.check_soon(self.now_s)

    def look(self, seconds: float = 1.0, heartbeat_s: float = 1.0) -> bool:
        """Let so much time pass; whether the session's lease runs then."""
        self.now_s += seconds
        for token, _ in self.liveness.suspects(self.now_s):
            if not self.reached:
                self.liveness.lost(token, self.now_s)
        self.liveness.check(self.now_s, {TOKEN: heartbeat_s})
        return TOKEN in self.pair.hub.leases


@pytest.fixture
def client() -> Fixture:
    return Fixture()


def test_client_is_gone_when_three_beats_did_not_come_and_back_with_the_next(client: Fixture) -> None:
    client.silent_s = 2.9
    assert not client.look()
    client.silent_s = 3.1
    assert client.look() and client.pair.hub.next_expiry_s() == client.now_s + 60.0
    since_s = client.now_s
    assert client.look() and client.pair.hub.next_expiry_s() == since_s + 60.0  # the lease began once
    client.silent_s = 0.1
    assert not client.look()


def test_client_that_has_come_back_is_found_before_its_lease_ends_also_between_two_checks(client: Fixture) -> None:
    client.silent_s = 5.0
    assert client.look()
    client.silent_s = 0.0
    assert client.look(seconds=0.01), "it is not time to check"
    client.liveness.check(client.now_s, {TOKEN: 1.0}, at_once=True)
    assert TOKEN not in client.pair.hub.leases


def test_client_that_promised_no_beats_may_be_silent(client: Fixture) -> None:
    client.silent_s = math.inf
    assert not client.look(heartbeat_s=0.0)


def test_client_whose_connection_has_ended_is_not_back_when_its_descriptor_has_data(client: Fixture) -> None:
    client.silent_s = 5.0
    assert client.look()
    client.reached = False
    client.liveness.ended(CONNECTION, client.now_s)
    client.silent_s = 0.0  # of another connection, which has the same number now
    assert client.look() and client.look()


def test_client_of_an_ended_connection_is_gone_once_it_is_not_reached(client: Fixture) -> None:
    client.liveness.ended(CONNECTION, client.now_s)
    assert client.liveness.next_s == client.now_s
    assert not client.look(0.05)  # another connection may have had that number
    client.reached = False
    assert client.look(0.1)


def test_what_a_client_had_sent_before_its_connection_ended_brings_it_back_for_a_moment_only(client: Fixture) -> None:
    client.reached = False
    client.liveness.ended(CONNECTION, client.now_s)
    assert client.look()
    for _ in range(2):
        client.pair.step(b"left")
        assert not client.look()
        peer = client.pair.hub.peer_of(TOKEN)
        assert peer is not None
        for _ in range(3):
            client.liveness.on_late_message(peer, client.now_s)
        assert client.liveness.next_s == client.now_s and len([*client.liveness.suspects(client.now_s)]) == 1
        assert client.look()


def test_client_on_another_connection_is_not_probed_on_the_old_one(client: Fixture) -> None:
    client.pair.connection = 2
    client.pair.step(b"left")
    client.reached = False
    client.liveness.ended(CONNECTION, client.now_s)
    assert not client.look()


def test_kernel_reports_how_long_a_connection_was_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        peer = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with peer, accepted:
        assert wait_until(lambda: silent_s(accepted.fileno()) > 0.3)
        assert silent_s(accepted.fileno()) < time.monotonic() - begun + 0.1

        def heard() -> bool:
            peer.send(b"x")
            accepted.recv(1)
            return silent_s(accepted.fileno()) < 0.3

        assert wait_until(heard)
    assert silent_s(accepted.fileno()) == 0.0  # closed: nothing is known
    with open(os.devnull) as no_socket:
        assert silent_s(no_socket.fileno()) == 0.0
