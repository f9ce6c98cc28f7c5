"""Who is behind a connection, and which connections are ended: without sockets."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket

import pytest
import zmq
from envhub_server.network import connections as network_connections
from envhub_server.network.access import OTHERS_S, Access
from envhub_server.network.connections import (
    ANYBODY,
    FULL_CHECKS,
    GONE_S,
    HELLO_S,
    OWN_USER,
    PROGRESS_BYTES,
    PROGRESS_S,
    UNREAD_EACH_S,
    UNREAD_S,
    UNREAD_SHARE_MIN,
    Connections,
    Holder,
    KnownConnection,
    Quotas,
    silent_s,
)
from envhub_server.network.proxy_page import (
    FULL_BYTES,
    FULL_FRAMES,
    FULL_HANDSHAKE,
    NUMBER,
    PARTIAL,
    RECEIVED,
    RECEIVED_NS,
    STATE,
    UNREAD_BYTES,
    WORDS,
    PageEntry,
)
from hubs import wait_until
from zmq.utils.monitor import recv_monitor_message

from envhub.protocol.messages import Op
from envhub.transport import sockets

ALICE = Holder("alice", quotas=Quotas(connections_max=2))
NO_SOCKET = 1 << 20  # a descriptor; of whose connection that would be nobody knows
_HANDSHAKES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
KEY, OTHER = b"a" * 32, b"b" * 32


def connections(*descriptors: int) -> Connections:
    known = Connections()
    for descriptor in descriptors:
        known.accepted(descriptor, 100.0)
    return known


def hear(known: Connections, descriptor: int, key: bytes, holder: Holder) -> None:
    found = known.of(b"peer %d" % descriptor, descriptor, 100.0)
    assert found is not None
    found.key, found.holder, found.silent_until_s = key, holder, math.inf


def numbers(found: list[KnownConnection]) -> list[int]:
    return [known.descriptor for known in found]


def test_connection_that_sends_nothing_is_ended_once() -> None:
    known = connections(5)
    known.accepted(6, 101.0)
    assert known.next_s() == 100.0 + UNREAD_S and numbers(known.unread(1, 100.1)) == []
    assert known.next_s() == 100.0 + HELLO_S and numbers(known.silent(100.0 + HELLO_S - 0.1)) == []
    hear(known, 6, KEY, ALICE)
    assert numbers(known.silent(100.0 + HELLO_S)) == [5] and numbers(known.silent(1e9)) == []


def test_connections_of_a_key_that_was_removed_or_has_another_right_are_found() -> None:
    known = connections(5, 6, 7, 8)
    hear(known, 5, KEY, ALICE)
    hear(known, 6, OTHER, ALICE)
    hear(known, 7, b"", OWN_USER)
    assert numbers(known.changed({OTHER: ALICE})) == [5] and numbers(known.changed({})) == [5, 6]
    assert numbers(known.changed({KEY: Holder("alice", "observe"), OTHER: Holder("alice", "use", Quotas())})) == [5]
    assert numbers(known.changed({KEY: Holder("zoe", ALICE.right), OTHER: ALICE})) == [5]


def test_message_of_a_connection_that_has_ended_is_of_none_though_its_number_is_used_again() -> None:
    known = connections(5)
    assert known.of(b"old", 5, 100.0) is not None
    known.ended(5, 100.0)
    assert known.of(b"old", 5, 100.0) is None
    known.accepted(5, 100.1)
    assert known.of(b"old", 5, 100.2) is None
    new = known.of(b"new", 5, 100.2)
    assert new is not None and known.of(b"new", 5, 100.2) is new and known.of(b"other", 5, 100.2) is None
    known.ended(5, 100.3)
    known.accepted(5, 100.4)
    assert known.of(b"new", 5, 100.3 + GONE_S) is not None  # it has chosen its routing id, and is back


def test_messages_of_a_connection_that_the_hub_ends_are_cut_off_for_a_moment() -> None:
    known = connections(5, 6)
    peer = known.of(b"peer", 5, 100.0)
    assert peer is not None and not known.disconnected
    known.disconnect(peer, 100.0)
    silent = known.get(6)
    assert silent is not None
    known.disconnect(silent, 100.0)  # of which no message has come
    assert known.disconnected == {b"peer": 100.0 + GONE_S}


def proxied(known: Connections, descriptor: int) -> PageEntry:
    """What the proxy has of a connection that was let in."""
    found = known.get(descriptor)
    assert found is not None
    words = memoryview(bytearray(2 * WORDS * 8)).cast("q")
    words[WORDS + NUMBER] = 7
    found.entry, found.silent_until_s = PageEntry(words, 1, 7, "10.0.0.9"), math.inf
    return found.entry


def say(entry: PageEntry, word: int, value: int) -> None:
    """Write a word as the proxy does."""
    entry.words[WORDS + word] = value


def ends(known: Connections, now_s: float) -> list[tuple[int, str]]:
    return [(each.descriptor, why) for each, why in known.unfinished(1024, now_s)]


def test_connection_at_its_limit_is_ended_unless_a_message_of_it_was_read() -> None:
    known = connections(5, 6)
    entry = proxied(known, 5)
    say(entry, STATE, PARTIAL | FULL_FRAMES)
    for number in range(10):  # it pipelines
        entry.read(1024, 0)
        assert ends(known, 100.0 + number) == []
    found = [ends(known, 110.0 + number) for number in range(FULL_CHECKS + 3)]
    assert [each for each in found if each] == [[(5, "one of its messages has more than 1024 frames")]]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (FULL_FRAMES, "one of its messages has more than 1024 frames"),
        (FULL_BYTES, "it has sent too many bytes of a message that does not end"),
        (FULL_HANDSHAKE, "it has sent too many bytes before it was let in"),
    ],
)
def test_connection_is_ended_once_it_was_at_its_limit_at_so_many_checks_in_a_row(state: int, why: str) -> None:
    known = connections(5)
    entry = proxied(known, 5)
    once = [*[[]] * (FULL_CHECKS - 1), [(5, why)], []]
    say(entry, STATE, state)
    assert [ends(known, 100.0) for _ in once] == once
    entry.read(1, 0)
    assert [ends(known, 100.0) for _ in once] == once
    say(entry, STATE, 0)
    assert ends(known, 100.0) == []
    say(entry, STATE, state)
    assert [ends(known, 100.0) for _ in once] == once


def test_connection_that_was_not_let_in_has_the_time_for_its_handshake_and_no_other() -> None:
    known = connections(5)
    entry = proxied(known, 5)
    found = known.get(5)
    assert found is not None
    found.silent_until_s = 1000.0
    say(entry, STATE, PARTIAL)
    assert [ends(known, 100.0 + number * PROGRESS_S) for number in range(4)] == [[]] * 4


def test_message_that_comes_too_slowly_ends_its_connection() -> None:
    known = connections(5)
    entry = proxied(known, 5)
    say(entry, STATE, PARTIAL)
    say(entry, RECEIVED, 100)
    assert ends(known, 100.0) == [] and ends(known, 100.0 + 0.9 * PROGRESS_S) == []
    say(entry, RECEIVED, 100 + PROGRESS_BYTES)
    assert ends(known, 100.0 + PROGRESS_S) == [] and ends(known, 100.0 + 1.9 * PROGRESS_S) == []
    entry.read(2, 60)
    assert ends(known, 100.0 + 2 * PROGRESS_S) == []
    say(entry, STATE, 0)
    assert ends(known, 100.0 + 4 * PROGRESS_S) == []
    say(entry, STATE, PARTIAL)
    assert ends(known, 100.0 + 5 * PROGRESS_S) == []
    (found,) = ends(known, 100.0 + 6 * PROGRESS_S)
    assert found[0] == 5 and "have come within 10 s" in found[1] and ends(known, 100.0 + 9 * PROGRESS_S) == []


def test_client_that_sends_too_much_of_messages_without_an_end_is_ended_where_most_comes() -> None:
    known = connections(5, 6, 7, 8, 9)
    for descriptor in (5, 6):
        hear(known, descriptor, KEY, ALICE)
    hear(known, 7, OTHER, Holder("bob"))
    entries = {descriptor: proxied(known, descriptor) for descriptor in (5, 6, 7, 8)}  # and 9 came by itself

    def unread(counts: dict[int, int], most: int, now_s: float) -> list[int]:
        for descriptor, count in counts.items():
            say(entries[descriptor], UNREAD_BYTES, count)
        return numbers(known.unread(most, now_s))

    assert unread({5: 40, 6: 60, 7: 100}, 100, 101.0) == []
    assert known.next_s() == 101.0 + UNREAD_SHARE_MIN * UNREAD_S + 5 * UNREAD_EACH_S
    assert unread({6: 61}, 100, 102.0) == [6]
    assert unread({6: 0, 7: 101}, 100, 103.0) == [7]
    assert unread({7: 0, 8: 101}, 100, 104.0) == [8]  # which has not said a word
    assert unread({5: 400, 8: 0}, 1000, 105.0) == []
    assert known.next_s() == pytest.approx(105.0 + 0.6 * UNREAD_S + 5 * UNREAD_EACH_S)


def test_entry_that_is_another_connections_by_now_says_nothing_and_is_not_written() -> None:
    words = memoryview(bytearray(2 * WORDS * 8)).cast("q")
    words[WORDS + NUMBER] = 7
    old = PageEntry(words, 1, 7, "")
    words[WORDS + NUMBER], words[WORDS + STATE], words[WORDS + RECEIVED_NS] = 8, PARTIAL, 9
    assert old.state == old.received == old.received_ns == old.unread_bytes == 0
    new = PageEntry(words, 1, 8, "")
    old.read(5, 5)
    assert new.frames_read == 0 and new.state == PARTIAL


def test_rights() -> None:
    observer, admin = Holder("eve", "observe"), Holder("root", "admin")
    asks = {Op.HELLO, Op.HEARTBEAT, Op.LIST, Op.STATS, Op.HEALTH, Op.STATUS, Op.OBSERVE}
    assert {op for op in Op if observer.may(op)} == asks and all(map(ALICE.may, Op))
    assert ALICE.may(Op.MAKE) and ALICE.owns("alice") and not ALICE.owns("bob") and not ALICE.owns("")
    assert admin.owns("alice") and OWN_USER.owns("alice")
    for other in (observer, ANYBODY, Holder("dave", "deploy")):
        assert not other.owns("alice") and other.owns(other.name)
    assert OWN_USER.deploys and admin.deploys and Holder("dave", "deploy").deploys
    assert not ANYBODY.deploys and not ALICE.deploys and ANYBODY.may(Op.MAKE)


def test_kernel_says_whose_connections_there_are() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.create_server((host, 0), family=family) as server:
            peer = socket.create_connection(server.getsockname()[:2])
            with server.accept()[0] as accepted:
                assert not network_connections.is_others(accepted.fileno())
                peer.close()  # of a socket without a process nobody can say whose it was
                assert network_connections.is_others(accepted.fileno())
    with socket.socketpair()[0] as local:
        assert not network_connections.is_others(local.fileno())


def test_number_that_another_file_has_by_now_leaves_no_descriptor_behind() -> None:
    with open(os.devnull) as no_socket:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="non-socket"):
            network_connections.copied(no_socket.fileno())
        assert network_connections.is_others(no_socket.fileno())
        assert silent_s(no_socket.fileno()) == 0.0
        assert {*os.listdir("/proc/self/fd")} <= {*before}


@pytest.mark.parametrize("goes", [True, False])
def test_own_user_waits_for_connections_of_others_to_end(goes: bool) -> None:
    access = Access(None, False, 100)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as client:
        access.guard(context, router)
        assert not access.asked() and not access.answer(100.0)
        client.setsockopt(zmq.LINGER, 0)
        with sockets.open_monitor(client, _HANDSHAKES) as monitor:
            client.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
            access.accepted(NO_SOCKET, 100.0)
            assert wait_until(access.asked)
            assert not access.answer(100.0) and not access.answer(100.0 + OTHERS_S / 2)
            assert access.asked() and access.check(100.6) == [] and access.next_s() == 100.0 + OTHERS_S
            if goes:
                access.ended(NO_SOCKET, 100.6)
            assert access.answer(100.6 if goes else 100.0 + OTHERS_S)
            found = recv_monitor_message(monitor)["event"]
            assert found == (zmq.EVENT_HANDSHAKE_SUCCEEDED if goes else zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            assert access.handshakes_refused == (not goes) and access.next_s() > 100.0 + OTHERS_S and not access.asked()
            client.monitor(None, 0)
        access.close()


def test_asks_that_wait_keep_the_hub_from_no_sleep() -> None:
    access = Access(None, False, 100)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, contextlib.ExitStack() as clients:
        access.guard(context, router)
        assert access.zap is not None
        access.accepted(NO_SOCKET, 100.0)
        descriptor = int(access.zap.FD)
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        for _ in range(3):
            client = clients.enter_context(context.socket(zmq.DEALER))
            client.setsockopt(zmq.LINGER, 0)
            client.connect(address)
            assert select.select([descriptor], [], [], 20)[0]
            # libzmq signals a client in one part or in two, of which the second may come a moment after the first.
            assert wait_until(lambda: access.asked() and not select.select([descriptor], [], [], 0)[0])
            assert not access.answer(100.0)
        access.ended(NO_SOCKET, 100.5)
        assert access.next_s() <= 100.5 and access.answer(100.5)
        for _ in range(2):  # those that asked meanwhile
            assert wait_until(access.asked) and access.answer(100.6)
        assert access.handshakes_refused == 0
        access.close()
