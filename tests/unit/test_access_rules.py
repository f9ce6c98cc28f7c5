"""Who a message is of and whether it is refused, by keys and without: with a ROUTER that nobody connects to."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq
from envhub_server.network import connections
from envhub_server.network.access import (
    ANYONE,
    CHANGED,
    IPC_ORIGIN,
    KEYS_S,
    OWN,
    REFUSED_S,
    REMOVED,
    UNKNOWN_KEY_S,
    Access,
)
from envhub_server.network.connections import (
    ANYBODY,
    GONE_MAX,
    HELLO_S,
    OWN_USER,
    UNREAD_S,
    Connections,
    KnownConnection,
)
from envhub_server.network.key_folder import KeyFolder
from envhub_server.network.proxy import ProxyHandle
from envhub_server.network.proxy_page import (
    BYTES_READ,
    NUMBER,
    RECEIVED_NS,
    WORDS,
    EndedHandshake,
    PageEntry,
)
from hubs import wait_until
from new_keys import keys_in
from zmq.utils.monitor import recv_monitor_message

from envhub.errors import AddressError, KeysError
from envhub.transport import sockets
from envhub.transport.address import HubKeys, text_of

DESCRIPTOR = 1 << 20  # of no connection
HOST = "192.0.2.7"
DIRECT, PROXIED = 1 << 20, range((1 << 20) + 1, (1 << 20) + 4)  # descriptors of no connections
BY_PROXY = f"{IPC_ORIGIN}0:0:7"  # as libzmq knows it
HANDSHAKES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return keys_in(tmp_path / "keys")


@pytest.fixture
def router() -> Iterator[tuple[Any, Any]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as opened:
        yield context, opened


@pytest.fixture
def access(keys: KeyFolder, router: tuple[Any, Any], tmp_path: Path) -> Iterator[Access]:
    """Of a hub that knows alice, who may have one connection, and bob."""
    for name in ("alice", "bob"):
        keys.add(name, key(name))
    path = keys.path / "clients/alice.toml"
    path.write_text(path.read_text() + "[quotas]\nconnections_max = 1")
    made = Access(keys.path, False, 100)
    made.guard(*router)
    yield made
    made.close()


def key(name: str) -> bytes:
    return name.encode().ljust(32, b"-")


def said(name: str = "", descriptor: int = DESCRIPTOR, origin: str = HOST, user: str | None = None) -> list[Any]:
    """What libzmq knows of a message: its frame is asked for no more."""
    user = (text_of(key(name)) if name else "") if user is None else user
    return [{"User-Id": user, "Peer-Address": origin, zmq.SRCFD: descriptor}]


def known_of(access: Access, descriptor: int = DESCRIPTOR) -> KnownConnection:
    known = access.connections.get(descriptor)
    assert known is not None
    return known


def audited(lines: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(line["event"], line.get("client", ""), line.get("host", "")) for line in lines if line["audit"]]


# --- with keys --------------------------------------------------------------------------------------------------------


def test_client_is_the_holder_of_its_key_from_its_first_message_on(access: Access, lines: list[dict[str, Any]]) -> None:
    assert access.accepted(DESCRIPTOR, 100.0) == [] and known_of(access).silent_until_s == 100.0 + HELLO_S
    for _ in range(2):
        holder, why = access.holder(b"peer", said("alice"), 100.1)
        assert (holder.name, holder.right, why) == ("alice", "use", "")
        known = known_of(access)
        assert (known.holder, known.client, known.key, known.origin) == (holder, "alice", key("alice"), HOST)
        assert known.silent_until_s == math.inf and not known.is_others
    assert audited(lines) == [("connected", "alice", HOST)]


def test_client_with_too_many_connections_is_refused_and_its_first_one_is_not(access: Access) -> None:
    for descriptor in (DESCRIPTOR, DESCRIPTOR + 1, DESCRIPTOR + 2):
        access.accepted(descriptor, 100.0)
    assert access.holder(b"peer 0", said("alice"), 100.0)[1] == ""
    for _ in range(2):
        holder, why = access.holder(b"peer 1", said("alice", DESCRIPTOR + 1), 100.0)
        assert holder.name == "alice" and why == "alice has 1 connections, of connections_max=1"
        assert known_of(access, DESCRIPTOR + 1).holder is None
    assert access.holder(b"peer 0", said("alice"), 100.0)[1] == ""
    assert access.holder(b"peer 2", said("bob", DESCRIPTOR + 2), 100.0)[1] == "", "another client's do not count"
    access.ended(DESCRIPTOR, 100.1)
    assert access.holder(b"peer 1", said("alice", DESCRIPTOR + 1), 100.2)[1] == ""


def test_client_that_is_refused_has_a_second_to_read_why(access: Access) -> None:
    access.accepted(DESCRIPTOR, 100.0)
    assert access.refused(b"peer", DESCRIPTOR, "too many", 100.0) == []
    assert known_of(access).silent_until_s == 100.0 + REFUSED_S
    assert access.refused(b"peer", DESCRIPTOR, "too many", 100.5) == [(known_of(access), "too many")]
    assert access.refused(b"another", DESCRIPTOR, "too many", 100.5) == []
    access.accepted(DESCRIPTOR, 200.0)
    assert access.refused(b"other", DESCRIPTOR, REMOVED, 200.0) == [(known_of(access), REMOVED)]


@pytest.mark.parametrize("user", [text_of(key("eve")), ""])
def test_key_that_is_not_known_or_none_is_refused(access: Access, user: str) -> None:
    access.accepted(DESCRIPTOR, 100.0)
    assert access.holder(b"peer", said(user=user), 100.0) == (ANYBODY, REMOVED)
    assert known_of(access).holder is None


@pytest.mark.parametrize("who", [{"origin": f"{IPC_ORIGIN}0:0:7"}, {"user": OWN}])
def test_own_user_needs_no_key(access: Access, who: dict[str, str]) -> None:
    access.accepted(DESCRIPTOR, 100.0)
    assert access.holder(b"peer", said(**who), 100.0) == (OWN_USER, "")
    assert known_of(access).holder is OWN_USER and known_of(access).key == b""


def test_message_of_a_connection_that_has_ended_is_its_clients_all_the_same(
    access: Access, lines: list[dict[str, Any]]
) -> None:
    assert access.holder(b"peer", said("alice"), 100.0)[0].name == "alice"
    assert audited(lines) == [] and access.ends(b"peer", DESCRIPTOR, "why", 100.0) == []
    assert access.refused(b"peer", DESCRIPTOR, "why", 100.0) == access.malformed(b"peer", DESCRIPTOR, 100.0) == []
    access.accepted(DESCRIPTOR, 100.1)
    assert access.ends(b"peer", DESCRIPTOR, "why", 100.2) == [(known_of(access), "why")]


def test_client_with_the_routing_id_of_a_connection_that_has_ended_has_no_connection_more(access: Access) -> None:
    access.accepted(DESCRIPTOR, 100.0)
    assert access.holder(b"peer", said("alice"), 100.0)[1] == ""
    access.accepted(DESCRIPTOR - 1, 100.0)
    assert "connections_max" in access.holder(b"chosen", said("alice", DESCRIPTOR - 1), 100.0)[1]
    access.ended(DESCRIPTOR - 1, 100.0)
    access.accepted(DESCRIPTOR - 1, 100.1)
    assert "connections_max" in access.holder(b"chosen", said("alice", DESCRIPTOR - 1), 100.2)[1]
    assert access.holder(b"peer", said("alice"), 100.2)[1] == ""


def test_change_of_the_keys_ends_the_connections_that_it_concerns(
    access: Access, keys: KeyFolder, lines: list[dict[str, Any]]
) -> None:
    for number, name in enumerate(("alice", "bob")):
        access.accepted(DESCRIPTOR + number, 100.0)
        access.holder(b"peer %d" % number, said(name, DESCRIPTOR + number), 100.0)
    assert access.next_s() == 0.0, "the folder is looked at at once"
    assert access.check(100.0) == [] and access.next_s() <= 100.0 + KEYS_S
    keys.remove("alice")
    assert access.check(100.0 + KEYS_S / 2) == []
    assert access.check(100.0 + KEYS_S) == [(known_of(access), CHANGED)]
    assert access.holder(b"peer 0", said("alice"), 100.6) == (ANYBODY, REMOVED)
    assert access.check(100.0 + 2 * KEYS_S) == [], "once"
    access.ended(DESCRIPTOR, 101.0)
    keys.add("carol", key("carol"))
    assert access.check(100.0 + 3 * KEYS_S) == [], "nobody's who is connected"
    events = [("keys_read", "alice", ""), ("disconnected", "alice", HOST), ("keys_read", "carol", "")]
    assert audited(lines)[-3:] == events
    assert "removed" in [line.get("why") for line in lines]


def test_folder_of_keys_that_does_not_exist_is_refused(router: tuple[Any, Any], tmp_path: Path) -> None:
    folder = tmp_path / "kyes"
    access = Access(folder, False, 100)
    with pytest.raises(KeysError, match=f"there is no folder {folder}; `envhub keys add NAME --keys {folder}` makes"):
        access.guard(*router)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ((False, False, False, False), "it sent nothing"),
        ((False, True, False, False), "it sent nothing"),
        ((True, False, False, False), "it ended before the hub had answered"),
        ((True, True, True, False), "it ended before the hub had let it in"),
        ((True, True, False, False), "no key, or one for another hub"),
        ((True, True, True, True), "unknown key"),
    ],
)
def test_handshake_that_ends_is_refused_only_where_both_sides_have_spoken_and_the_hub_did_not_let_it_in(
    access: Access, lines: list[dict[str, Any]], said: tuple[bool, bool, bool, bool], why: str
) -> None:
    access.handshake_ended(EndedHandshake("2001:db8::7", *said))
    refused = "key" in why
    assert (access.handshakes_refused, access.handshakes_unfinished) == (refused, not refused)
    (line,) = lines
    event = "client_refused" if refused else "handshake_unfinished"
    assert (line["event"], line["host"], line["why"]) == (event, "2001:db8::7", why)


def test_end_of_a_clients_last_connection_is_audited(access: Access, lines: list[dict[str, Any]]) -> None:
    for number in range(2):
        access.accepted(DESCRIPTOR + number, 100.0)
        access.holder(b"peer %d" % number, said("bob", DESCRIPTOR + number), 100.0)
    access.accepted(DESCRIPTOR + 2, 100.0)
    access.holder(b"alice", said("alice", DESCRIPTOR + 2), 100.0)
    for number in range(2):
        assert ("disconnected", "bob", HOST) not in audited(lines)
        access.ended(DESCRIPTOR + number, 101.0)
    assert audited(lines)[-1] == ("disconnected", "bob", HOST)


def test_address_refuses_a_client_with_a_key_that_nobody_knows(access: Access, router: tuple[Any, Any]) -> None:
    port = router[1].bind_to_random_port("tcp://127.0.0.1")
    access.prove(f"tcp://127.0.0.1:{port}")  # else it raises
    assert access.handshakes_refused == 0, "which is the hub's own test"
    assert access.open_to_all


def test_key_that_was_added_just_now_is_let_in_but_the_folder_is_not_read_for_each_stranger(
    access: Access, keys: KeyFolder, router: tuple[Any, Any]
) -> None:
    context, opened = router
    address = f"tcp://127.0.0.1:{opened.bind_to_random_port('tcp://127.0.0.1')}"
    server = sockets.public_key(keys.secret())
    found = []
    for now_s, name in [(100.0, "carol"), (100.0 + UNKNOWN_KEY_S / 2, "dave"), (100.0 + UNKNOWN_KEY_S, "eve")]:
        public, secret = sockets.new_key_pair()
        keys.add(name, public)
        with context.socket(zmq.DEALER) as client:
            client.setsockopt(zmq.LINGER, 0)
            client.setsockopt(zmq.RECONNECT_IVL, -1)
            sockets.present_keys(client, HubKeys(server, secret))
            with sockets.open_monitor(client, HANDSHAKES) as monitor:
                client.connect(address)
                assert wait_until(access.asked) and access.answer(now_s) and not access.answer(now_s)
                found.append(recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
                client.monitor(None, 0)
    assert found == [True, False, True]


# --- without keys -----------------------------------------------------------------------------------------------------


def test_hub_without_keys_admits_anybody_whom_its_addresses_let_in() -> None:
    access = Access(None, True, 100)
    assert access.open_to_all and access.handshakes_refused == access.connections_ended == 0
    assert access.accepted(DESCRIPTOR, 100.0) == [], "also of another user"
    assert access.holder(b"peer", said(), 100.0) == (ANYBODY, "")
    assert known_of(access).origin == HOST and not access.connections.others
    access.close()


@pytest.mark.parametrize("guarded_by", ["keys", "nothing", "user"])
def test_hub_that_cannot_know_its_user_from_others_serves_no_tcp_address(
    router: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, keys: KeyFolder, guarded_by: str
) -> None:
    monkeypatch.setattr(connections, "kernel_tells", lambda: False)
    access = Access(keys.path if guarded_by == "keys" else None, guarded_by == "nothing", 100)
    if guarded_by == "user":
        with pytest.raises(AddressError, match="--keys"):
            access.guard(*router)
    else:
        access.guard(*router)
    access.close()


def test_client_that_sends_nothing_is_ended_and_told_why(access: Access) -> None:
    access.accepted(DESCRIPTOR, 100.0)
    assert access.check(100.0 + UNREAD_S) == []
    ((known, why),) = access.check(100.0 + HELLO_S)
    assert known.descriptor == DESCRIPTOR and "sent nothing" in why


def test_origin_is_told_of_a_peer_that_is_there() -> None:
    known = Connections()
    for descriptor, peer, origin in ((5, b"alice", HOST), (6, b"bob", "192.0.2.8")):
        known.accepted(descriptor, 100.0).origin = origin
        known.of(peer, descriptor, 100.0)
    assert (known.origin(b"alice"), known.origin(b"bob"), known.origin(b"eve")) == (HOST, "192.0.2.8", "")
    assert len(known) == 2


def test_last_peers_that_have_gone_are_remembered_and_those_without_a_word_take_no_place() -> None:
    known = Connections()
    for number in range(GONE_MAX + 1):
        known.accepted(number, 100.0)
        known.of(b"peer %d" % number, number, 100.0)
        known.ended(number, 100.0)
        known.accepted(number, 100.0)
        if number:
            known.ended(number, 100.0)  # of which no message came
            known.accepted(number, 100.0)
    assert known.of(b"peer 0", 0, 100.1) is not None, "which is forgotten"
    for number in (1, 2, GONE_MAX):
        assert known.of(b"peer %d" % number, number, 100.1) is None


# --- by the proxy -----------------------------------------------------------------------------------------------------


class Page:
    """The page of a proxy that has these connections, in memory of this process."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(len(PROXIED) * WORDS * 8)).cast("q")
        for descriptor in PROXIED:
            self.write(descriptor, NUMBER, descriptor)

    def write(self, descriptor: int, word: int, value: int) -> None:
        """Write a word as the proxy does."""
        self.words[PROXIED.index(descriptor) * WORDS + word] = value

    def entry(self, descriptor: int) -> PageEntry | None:
        slot = PROXIED.index(descriptor) if descriptor in PROXIED else None
        return None if slot is None else PageEntry(self.words, slot, descriptor, HOST)


@pytest.fixture
def page(access: Access) -> Page:
    access.proxy = cast("ProxyHandle", made := Page())
    return made


def said_by_proxy(descriptor: int, user: str, origin: str = BY_PROXY) -> list[Any]:
    """A message of two frames: what libzmq knows of it, which has a length of 3, and 5 bytes."""
    return [{"User-Id": user, "Peer-Address": origin, zmq.SRCFD: descriptor}, b"12345"]


def test_client_of_the_proxy_is_the_holder_of_its_key_and_not_the_hubs_own_user(
    access: Access, page: Page, lines: list[dict[str, Any]]
) -> None:
    assert access.accepted(PROXIED[0], 100.0) == []
    holder, why = access.holder(b"peer", said_by_proxy(PROXIED[0], text_of(key("alice"))), 100.0)
    assert (holder.name, why) == ("alice", "") and audited(lines) == [("connected", "alice", HOST)]
    access.accepted(PROXIED[1], 100.0)
    assert access.holder(b"other", said_by_proxy(PROXIED[1], text_of(b"eve".ljust(32))), 100.0) == (ANYBODY, REMOVED)


def test_client_of_the_proxy_is_anybody_where_no_keys_are_wanted(router: tuple[Any, Any]) -> None:
    access = Access(None, True, 100)
    access.guard(*router)
    access.proxy = cast("ProxyHandle", Page())
    access.accepted(PROXIED[0], 100.0)
    assert access.holder(b"peer", said_by_proxy(PROXIED[0], ANYONE), 100.0) == (ANYBODY, "")
    assert not access.encrypted
    access.close()


def test_proxy_is_told_of_what_was_read_of_its_connections(access: Access, page: Page) -> None:
    message = said_by_proxy(PROXIED[0], text_of(key("alice")))
    assert access.read(b"peer", message, 100.0) is False  # the connection is not known yet
    access.accepted(PROXIED[0], 100.0)
    access.accepted(DIRECT, 100.0)
    for count in (1, 2):
        assert access.read(b"peer", message, 100.0) is True
        entry = access.entries[b"peer"]
        assert entry is not None and entry.frames_read == 2 * count and page.words[BYTES_READ] == 8 * count
    assert access.read(b"direct", said_by_proxy(DIRECT, ""), 100.0) is True and access.entries[b"direct"] is None
    access.ended(PROXIED[0], 100.1)
    access.accepted(PROXIED[0], 100.1)  # another one has the number by now
    assert access.read(b"peer", message, 100.2) is True and [*access.entries] == [b"direct"]
    access.ended(DIRECT, 100.3)
    assert not access.entries


def test_silence_of_a_client_is_what_the_proxy_says(access: Access, page: Page) -> None:
    for descriptor in (DIRECT, PROXIED[0]):
        access.accepted(descriptor, 100.0)
    assert access.silence_s(PROXIED[0]) == access.silence_s(DIRECT) == access.silence_s(DIRECT - 1) == 0.0
    page.write(PROXIED[0], RECEIVED_NS, time.monotonic_ns() - 5 * 10**9)
    assert 5.0 <= access.silence_s(PROXIED[0]) < 60.0
