from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from envhub_client.connection import known_hubs

import envhub
from envhub.errors import AddressError
from envhub.transport import address
from envhub.transport.address import Address, text_of
from envhub.transport.socket_file import user_text


def test_address_is_of_tcp_with_a_host_and_a_port_or_of_ipc_with_a_path() -> None:
    found = address.parse_hub("tcp://simbox:5555")
    assert found == Address("tcp://simbox:5555", host="simbox", port=5555) and not found.is_ipc
    found = address.parse_hub("ipc:///run/hub.sock")
    assert found.path == "/run/hub.sock" and found.is_ipc
    assert address.parse("tcp://127.0.0.1:0").port == 0
    with pytest.raises(AddressError, match="no hub is at port 0 of simbox"):
        address.parse_hub("tcp://simbox:0")


@pytest.mark.parametrize(
    "host", ["simbox", "sim_box.", "a.example.org", "10.0.0.1", "127.1", "xn--bcher-kva.de", "bücher.de", "[::1]",
             "[fe80::1%eth0]"]
)  # fmt: skip
def test_host_of_a_hub_is_a_name_or_an_ip_address(host: str) -> None:
    assert address.parse_hub(f"tcp://{host}:5555").host == host


@pytest.mark.parametrize(
    "host", ["bad host", "-simbox", "a..b", ".", "*", "a/b", "eth0;simbox", "x" * 64, "a." * 127 + "a",
             "::1", "[simbox]", "[::1", "[]", "[::1]x"]
)  # fmt: skip
def test_host_that_no_machine_can_have_is_refused(host: str) -> None:
    for text in (f"tcp://{host}:5555", f"envhub://{text_of(bytes(64))}@{host}:5555"):
        with pytest.raises(AddressError, match=r"no host; write its name or IP address") as raised:
            address.parse_hub(text)
        assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "text",
    ["", "tcp://", "tcp://host", "tcp://host:", "tcp://:5555", "tcp://host:port", "tcp://host:-1", "tcp://host:65536",
     "ipc://", "tcp://simbox:٣", "tcp://simbox:+1", "tcp://simbox:000001", "http://host:80", "host:5555",
     "/run/hub.sock", "udp://host:1", "inproc://x"],
)  # fmt: skip
def test_text_that_is_no_address_is_refused_with_the_right_forms(text: str) -> None:
    with pytest.raises(AddressError, match="tcp://HOST:PORT or ipc://PATH"):
        address.parse(text)


@pytest.mark.parametrize(
    "text",
    ["ipc:///tmp/a\0b", "tcp://a\0b:1", "tcp://a\x1b[2J:1", "ipc:///tmp/a\nb", "ipc:///tmp/\x9b2J", "ipc:///tmp/\udcff",
     "ipc:///tmp/\ud800", "\0", "envhub://\0@a:1", "simbox\0"],
)  # fmt: skip
def test_address_with_control_characters_or_of_no_encoding_is_refused(text: str) -> None:
    for parse in (address.parse, address.parse_hub, known_hubs.resolve):
        with pytest.raises(AddressError, match="is no address: it has control characters, or is no UTF-8") as raised:
            parse(text)
        assert str(raised.value).isprintable()


def test_source_of_an_address_that_names_no_hub_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVHUB_ADDRESS", "tcp://a\x01:1")
    for use in (envhub.connect, lambda: envhub.make_vec("CartPole-v1")):
        with pytest.raises(AddressError, match=r"^ENVHUB_ADDRESS: 'tcp://a\\x01:1' has control characters"):
            use()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    known_hubs.keep("simbox", "ipc:///tmp/a\0b")
    with pytest.raises(AddressError, match=r"envhub/hubs/simbox: 'ipc:///tmp/a\\x00b' is no address"):
        known_hubs.resolve("simbox")


def test_ipc_path_that_no_socket_can_have_is_refused() -> None:
    address.parse("ipc://" + "x" * address.IPC_PATH_BYTES_MAX)
    for path in ("x" * (address.IPC_PATH_BYTES_MAX + 1), "é" * 54):
        with pytest.raises(AddressError, match="at most 107 bytes"):
            address.parse(f"ipc://{path}")
    with pytest.raises(AddressError, match="choose a path"):  # any user could listen there
        address.parse("ipc://@envhub-1")


def test_loopback_is_reached_from_this_machine_only() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "[::1]"):
        assert address.parse(f"tcp://{host}:1").is_loopback
    for host in ("0.0.0.0", "*", "192.168.0.1", "[::]", "simbox", "localhost.example.org"):
        assert not address.parse(f"tcp://{host}:1").is_loopback


def test_default_address_is_in_the_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert address.default_address() == f"ipc://{tmp_path}/envhub/hub.sock" and not (tmp_path / "envhub").exists()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(os.getuid()) in str(address.runtime_folder())


def test_only_a_folder_of_this_user_alone_is_private(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    address.check_private(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch(mode=0o600)
    for name in ("link", "file"):
        with pytest.raises(AddressError):
            address.check_private(tmp_path / name)
    for mode in (0o701, 0o710, 0o770, 0o777, 0o1777):
        (tmp_path / "real").chmod(mode)
        with pytest.raises(AddressError, match="0700"):
            address.check_private(tmp_path / "real")


def test_side_socket_is_where_its_path_has_room() -> None:
    assert address.side_path("/run/hub.sock") == "/run/hub.sock.side"
    assert address.side_path("x" * (address.IPC_PATH_BYTES_MAX - 4)) is None


@pytest.mark.parametrize("hub", [5, None, b"tcp://a:1"])
def test_what_is_no_text_is_told_by_its_type(hub: Any) -> None:
    with pytest.raises(AddressError, match=f"a value of type {type(hub).__name__} is no address; write tcp://"):
        address.parse(hub)


def test_user_without_a_name_is_told_by_number() -> None:
    assert user_text(0) == "user 0 (root)" and user_text(3_999_999_999) == "user 3999999999"
