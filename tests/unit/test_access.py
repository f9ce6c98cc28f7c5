"""Who is behind a connection, and which connections are ended: without sockets."""

from __future__ import annotations

import os
import socket

from envhub_server.network import network_peer
from envhub_server.network.connections import HELLO_S, MALFORMED_MAX, Connections
from envhub_server.network.rights import ANYBODY, OWN_USER, Holder, Quotas

from envhub.protocol.messages import Op

ALICE = Holder("alice", quotas=Quotas(connections_max=2))
KEY, OTHER = b"a" * 32, b"b" * 32


def test_connection_that_sends_nothing_is_ended_once() -> None:
    known = Connections()
    known.accepted(5, True, 100.0)
    known.accepted(6, False, 101.0)
    assert known.next_s() == 100.0 + HELLO_S and known.is_own(5) and not known.is_own(6)
    assert known.silent(100.0 + HELLO_S - 0.1) == []
    assert known.heard(6, KEY, ALICE) == ""
    assert known.silent(100.0 + HELLO_S) == [5] and known.silent(1e9) == []


def connections(*descriptors: int) -> Connections:
    known = Connections()
    for descriptor in descriptors:
        known.accepted(descriptor, False, 0.0)
    return known


def test_client_has_so_many_connections_and_no_more() -> None:
    known = connections(5, 6, 7, 8)
    assert [known.heard(number, KEY, ALICE) for number in (5, 6)] == ["", ""]
    assert known.heard(5, KEY, ALICE) == ""
    assert "connections_max=2" in known.heard(7, KEY, ALICE)
    assert [known.refuse(7), known.refuse(7)] == [False, True]
    assert known.heard(8, b"", OWN_USER) == ""
    known.ended(5)
    assert known.heard(7, KEY, ALICE) == ""


def test_connections_of_a_key_that_was_removed_are_found() -> None:
    known = connections(5, 6, 7, 8)
    known.heard(5, KEY, ALICE)
    known.heard(6, OTHER, ALICE)
    known.heard(7, b"", OWN_USER)
    assert known.removed({OTHER}) == [5] and known.removed({}) == [5, 6]


def test_third_malformed_message_ends_the_connection() -> None:
    known = connections(5)
    assert [known.malformed(5) for _ in range(MALFORMED_MAX)] == [False] * (MALFORMED_MAX - 1) + [True]


def test_message_of_a_connection_that_has_ended_counts_for_none() -> None:
    known = connections(5, 6)
    known.ended(5)
    assert known.heard(5, KEY, ALICE) == "" and not known.malformed(5) and not known.refuse(5)
    assert known.removed({}) == [] and known.next_s() == HELLO_S


def test_rights() -> None:
    observer, admin = Holder("eve", "observe"), Holder("root", "admin")
    assert observer.may(Op.SESSIONS) and observer.may(Op.OBSERVE)
    assert not observer.may(Op.MAKE) and not observer.may(Op.ATTACH) and not observer.may(Op.STEP)
    assert ALICE.may(Op.MAKE) and ALICE.owns("alice") and not ALICE.owns("bob") and not ALICE.owns("")
    assert admin.owns("alice") and OWN_USER.owns("alice")
    assert OWN_USER.deploys and admin.deploys and Holder("dave", "deploy").deploys
    assert not ANYBODY.deploys and not ALICE.deploys and ANYBODY.may(Op.MAKE)


def test_kernel_names_the_user_behind_a_connection() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with (
            socket.create_server((host, 0), family=family) as server,
            socket.create_connection(server.getsockname()[:2]),
            server.accept()[0] as accepted,
        ):
            assert network_peer.uid(accepted.fileno()) == os.getuid()
    ours, theirs = socket.socketpair()
    assert network_peer.uid(ours.fileno()) == network_peer.LOCAL
    descriptor = ours.fileno()
    ours.close(), theirs.close()
    assert network_peer.uid(descriptor) == network_peer.UNKNOWN
