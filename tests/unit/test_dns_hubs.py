"""Hubs at the addresses of a name in DNS. The resolver of this machine knows no name with several."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import pytest
from envhub_client.connection import known_hubs
from envhub_client.connection.known_hubs import Member, members
from envhub_client.tools.console import FLEET_HEADINGS, HubReport, fleet_cells, reports

from envhub.errors import AddressError, HubUnreachable
from envhub.fleet.hub_actor import actor_name, hub_of
from envhub.secret import Secret
from envhub.transport.address import check_fleet_name, text_of

TOKEN = text_of(bytes(range(64)))


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("ENVHUB_ADDRESS", raising=False)


def test_only_dns_names_a_place() -> None:
    place = known_hubs.dns_name(" DNS://hubs.default.svc:5555 ")
    assert place is not None and (place.host, place.port) == ("hubs.default.svc", 5555)
    others = ("tcp://hubs:5555", "hubs", "file:///dns", Secret(f"envhub://{TOKEN}@hubs:5555"))
    assert [known_hubs.dns_name(each) for each in others] == [None] * 4


FORM = "names no hubs; write dns://NAME:PORT"


@pytest.mark.parametrize(
    ("hub", "why"),
    [
        *((hub, f"{hub!r} {FORM}") for hub in ("dns://hubs", "dns://", "dns://:1", "dns://hubs:65536", " DNS://a:x")),
        ("dns://a\n:1", f"'dns://a\\n:1' {FORM}"),
        ("dns://hubs:0", "no hub is at port 0 of hubs"),
        ("dns://a b:1", "'a b' is no host"),
        ("dns://x@hubs:1", f"what was given {FORM}"),
    ],
)
def test_malformed_name_is_refused(hub: str, why: str) -> None:
    with pytest.raises(AddressError) as refused:
        members(hub)
    assert why in str(refused.value) and "@" not in str(refused.value)


def test_name_without_an_address_is_unreachable() -> None:
    with pytest.raises(HubUnreachable, match=r"dns://hubs\.invalid:5555: the name has no address"):
        members("dns://hubs.invalid:5555")


@pytest.mark.parametrize(("host", "expected"), [("192.0.2.7", "192.0.2.7:5"), ("[2001:db8::7]", "[2001:db8::7]:5")])
def test_address_without_a_name_stays_an_address(host: str, expected: str) -> None:
    assert members(f"dns://{host}:5") == (Member(expected, f"tcp://{expected}"),)


def test_each_hub_gets_the_keys_that_are_kept_for_the_name() -> None:
    known_hubs.keep("hubs", Secret(f"envhub://{TOKEN}@192.0.2.7:5"))
    ((_, address),) = members("dns://192.0.2.7:5")
    assert isinstance(address, Secret) and address.reveal_secret() == f"envhub://{TOKEN}@192.0.2.7:5"
    ((_, address),) = members("dns://192.0.2.7:6")
    assert address == "tcp://192.0.2.7:6"
    assert known_hubs.resolve("dns://192.0.2.7:5").keys is not None
    assert known_hubs.resolve("dns://192.0.2.7:6").text == "tcp://192.0.2.7:6"


# --- reports of fleets ------------------------------------------------------------------------------------------------


def test_hubs_that_do_not_answer_are_waited_for_together_until_one_deadline() -> None:
    with contextlib.ExitStack() as silent:
        servers = [silent.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(20)]
        addresses = [f"tcp://127.0.0.1:{server.getsockname()[1]}" for server in servers]
        began_s = time.monotonic()
        rows = reports(addresses, timeout=1.0)
        assert time.monotonic() - began_s < 15.0  # one after the other takes 20 s
    assert [(row.address, row.state, row.answers) for row in rows] == [
        (address, "unreachable", False) for address in addresses
    ]
    assert all("no hub answered at" in row.why for row in rows)


def test_hub_that_is_named_twice_is_asked_once_and_keys_are_not_shown() -> None:
    address = f"envhub://{text_of(bytes(64))}@127.0.0.1:1"
    (row,) = reports([address, address], timeout=0.2)
    assert row.name == row.address == "envhub://***@127.0.0.1:1" and text_of(bytes(64)) not in repr(row)


def test_name_that_stands_for_no_hub_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(HubUnreachable, match="the name has no address"):
        reports(["dns://hubs.invalid:5555"], timeout=0.2)
    (row,) = reports(["unknown"], timeout=0.2)
    assert row.state == "unreachable" and "no hub is known as 'unknown'" in row.why
    with pytest.raises(AddressError, match="names no hubs"):
        reports(["dns://hubs"], timeout=0.2)


def test_table_has_a_dash_for_what_a_hub_does_not_say() -> None:
    whole = HubReport("a", "tcp://a:1", "ok", "", "box", 1, 64, 4032, 8, 1234.6, 0)
    silent = HubReport("b\x1b", "tcp://b:1", why="no hub answered")
    assert fleet_cells(whole) == ["a", "tcp://a:1", "box", "ok", "1", "64", "4032", "8", "1235", "0"]
    assert fleet_cells(silent) == ["b\\x1b", "tcp://b:1", "-", "unreachable", *"------"]
    assert len(FLEET_HEADINGS) == len(fleet_cells(whole))


def test_actor_is_of_one_fleet_and_one_hub() -> None:
    assert actor_name("sims", 12) == "envhub:sims:12"
    assert hub_of("envhub:sims:12") == ("sims", 12)
    for name in ("envhub:sims", "envhub:sims:keeper", "sims:12", "other:sims:1", "envhub:a:b:1"):
        assert hub_of(name) is None


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "-a", "a b", "a" * 57, "head:10001"])
def test_name_that_no_fleet_can_have_is_refused(name: str) -> None:
    with pytest.raises(AddressError, match="is no name for a fleet"):
        check_fleet_name(name)
