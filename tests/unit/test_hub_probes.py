"""What a short connection finds out about a listener of this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from envhub_client.connection import hub_probes
from envhub_client.connection.hub_probes import other_user

from envhub.transport.address import Address
from envhub.transport.socket_owner import socket_owner, user_text

NOBODY = 65534
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_probes, "GREETING_S", 30.0)  # the thread of a listener may not have its turn for a second


@contextlib.contextmanager
def listening(user: int, greeting: bytes) -> Iterator[Address]:
    """The address of a listener of this user that says this to one connection, and ends it."""
    os.seteuid(user)
    try:
        server = socket.create_server(("127.0.0.1", 0))
    finally:
        os.seteuid(os.getuid())

    def greet() -> None:
        with server.accept()[0] as peer:
            peer.sendall(greeting)

    thread = threading.Thread(target=greet)
    thread.start()
    with server:
        port = server.getsockname()[1]
        yield Address(f"tcp://127.0.0.1:{port}", host="127.0.0.1", port=port)
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_owner_of_a_hub_is_known_if_it_is_another_user() -> None:
    with listening(NOBODY, SIGNATURE) as address:
        assert other_user(address) == NOBODY
    with listening(os.getuid(), SIGNATURE) as address:
        assert other_user(address) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("greeting", [b"", SIGNATURE[:9], b"HTTP/1.1 400 Bad Request\r\n"])
def test_forwarder_of_another_user_is_no_hub(greeting: bytes) -> None:
    with listening(NOBODY, greeting) as address:
        assert other_user(address) is None


def test_nobody_is_where_nothing_listens_or_on_another_machine() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert other_user(Address("", host="127.0.0.1", port=port)) is None
        assert socket_owner(socket.AF_INET, ("127.0.0.1", port), ("0.0.0.0", 0)) is None
    assert other_user(Address("tcp://192.0.2.1:5555", host="192.0.2.1", port=5555)) is None


def test_user_without_a_name_is_told_by_number() -> None:
    assert user_text(0) == "user 0 (root)" and user_text(3_999_999_999) == "user 3999999999"
