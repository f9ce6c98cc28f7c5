"""Whose the connections are that come by the proxy, what is told to it, and what the hub does about what it says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import zmq
from envhub_server.network.access import IPC_ORIGIN, REMOVED, Access
from envhub_server.network.authenticator import ANYONE
from envhub_server.network.connections import ANYBODY
from envhub_server.network.key_folder import KeyFolder
from envhub_server.network.proxy import ProxyHandle
from envhub_server.network.proxy_page import (
    BYTES_READ,
    DENIED,
    HEARD_NS,
    NUMBER,
    PARTIAL,
    STATE,
    WORDS,
    PageEntry,
)
from hubs import wait_until

from envhub.transport import sockets
from envhub.transport.address import HubKeys, text_of

DIRECT, PROXIED = 1 << 20, range((1 << 20) + 1, (1 << 20) + 4)  # descriptors of no connections
HOST, ALICE = "192.0.2.7", b"alice".ljust(32, b"-")
BY_PROXY = f"{IPC_ORIGIN}0:0:7"  # as libzmq knows it


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
def keys(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.make_secret()
    folder.add("alice", ALICE)
    return folder


@pytest.fixture
def router() -> Iterator[tuple[Any, Any]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as opened:
        yield context, opened


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture
def access(keys: KeyFolder, router: tuple[Any, Any], page: Page, tmp_path: Path) -> Iterator[Access]:
    made = Access(keys.path, False, 100)
    made.guard(*router)
    made.proxy = cast("ProxyHandle", page)
    yield made
    made.close()


def said(descriptor: int, user: str, origin: str = BY_PROXY) -> list[Any]:
    """A message of two frames: what libzmq knows of it, which has a length of 3, and 5 bytes."""
    return [{"User-Id": user, "Peer-Address": origin, zmq.SRCFD: descriptor}, b"12345"]


def audited(lines: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(line["event"], line.get("client", ""), line.get("host", "")) for line in lines if line["audit"]]


def test_client_of_the_proxy_is_the_holder_of_its_key_and_not_the_hubs_own_user(
    access: Access, lines: list[dict[str, Any]]
) -> None:
    assert access.accepted(PROXIED[0], 100.0) == []
    holder, why = access.holder(b"peer", said(PROXIED[0], text_of(ALICE)), 100.0)
    assert (holder.name, why) == ("alice", "") and audited(lines) == [("connected", "alice", HOST)]
    access.accepted(PROXIED[1], 100.0)
    assert access.holder(b"other", said(PROXIED[1], text_of(b"eve".ljust(32))), 100.0) == (ANYBODY, REMOVED)


def test_client_of_the_proxy_is_anybody_where_no_keys_are_wanted(router: tuple[Any, Any], page: Page) -> None:
    access = Access(None, True, 100)
    access.guard(*router)
    access.proxy = cast("ProxyHandle", page)
    access.accepted(PROXIED[0], 100.0)
    assert access.holder(b"peer", said(PROXIED[0], ANYONE), 100.0) == (ANYBODY, "")
    assert not access.encrypted
    access.close()


def test_proxy_is_told_of_what_was_read_of_its_connections(access: Access, page: Page) -> None:
    message = said(PROXIED[0], text_of(ALICE))
    assert access.read(b"peer", message, 100.0) is False  # the connection is not known yet
    access.accepted(PROXIED[0], 100.0)
    access.accepted(DIRECT, 100.0)
    for count in (1, 2):
        assert access.read(b"peer", message, 100.0) is True
        entry = access.entries[b"peer"]
        assert entry is not None and entry.frames_read == 2 * count and page.words[BYTES_READ] == 8 * count
    assert access.read(b"direct", said(DIRECT, ""), 100.0) is True and access.entries[b"direct"] is None
    access.ended(PROXIED[0], 100.1)
    access.accepted(PROXIED[0], 100.1)  # another one has the number by now
    assert access.read(b"peer", message, 100.2) is True and [*access.entries] == [b"direct"]
    access.ended(DIRECT, 100.3)
    assert not access.entries


def test_silence_of_a_client_is_what_the_proxy_says(access: Access, page: Page) -> None:
    for descriptor in (DIRECT, PROXIED[0]):
        access.accepted(descriptor, 100.0)
    assert access.silence_s(PROXIED[0]) == access.silence_s(DIRECT) == access.silence_s(DIRECT - 1) == 0.0
    page.write(PROXIED[0], HEARD_NS, time.monotonic_ns() - 5 * 10**9)
    assert 5.0 <= access.silence_s(PROXIED[0]) < 60.0


def test_client_with_an_unknown_key_is_noted_once_with_the_address_that_the_proxy_has(
    access: Access, keys: KeyFolder, router: tuple[Any, Any], page: Page, lines: list[dict[str, Any]]
) -> None:
    context, opened = router
    address = f"tcp://127.0.0.1:{opened.bind_to_random_port('tcp://127.0.0.1')}"
    server = sockets.public_key(keys.secret())
    for descriptor in (DIRECT, *PROXIED):
        access.accepted(descriptor, 100.0)
    with ExitStack() as clients:
        for _ in range(3):  # which libzmq asks about, and does not say by which connection
            client = clients.enter_context(context.socket(zmq.DEALER))
            client.setsockopt(zmq.LINGER, 0)
            sockets.present_keys(client, HubKeys(server, sockets.new_key_pair()[1]))
            client.connect(address)
            assert wait_until(access.asked) and access.answer(100.0)
        page.write(PROXIED[0], STATE, DENIED)
        page.write(PROXIED[1], STATE, PARTIAL)
        for _ in range(2):
            access.check(100.1, ())
            assert access.handshakes_refused == 1
        for descriptor in (DIRECT, PROXIED[0], PROXIED[1]):
            access.ended(descriptor, 100.2)
            assert access.handshakes_refused == 1
        page.write(PROXIED[2], STATE, DENIED)
        access.ended(PROXIED[2], 100.3)
        assert access.handshakes_refused == 2
    assert audited(lines) == [("client_refused", "", HOST)] * 2
