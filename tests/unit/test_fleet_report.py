"""Reports of fleets: what a hub that answers, or does not, looks like in them."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import pytest
from envhub_client.tools.console import HubReport, reports, table

from envhub.errors import AddressError, HubUnreachable
from envhub.fleet.hub_actor import actor_name, hub_of
from envhub.transport.address import check_fleet_name, text_of


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
    lines = [line.split() for line in table([whole, silent])]
    assert lines[1] == ["a", "tcp://a:1", "box", "ok", "1", "64", "4032", "8", "1235", "0"]
    assert lines[2] == ["b\\x1b", "tcp://b:1", "-", "unreachable", *"------"]
    assert len(lines[0]) == len(lines[1])


def test_actor_is_of_one_fleet_and_one_hub() -> None:
    assert actor_name("sims", 12) == "envhub:sims:12"
    assert hub_of("envhub:sims:12") == ("sims", 12)
    for name in ("envhub:sims", "envhub:sims:keeper", "sims:12", "other:sims:1", "envhub:a:b:1"):
        assert hub_of(name) is None


@pytest.mark.parametrize("name", ["", "a:b", "a/b", "-a", "a b", "a" * 57, "head:10001"])
def test_name_that_no_fleet_can_have_is_refused(name: str) -> None:
    with pytest.raises(AddressError, match="is no name for a fleet"):
        check_fleet_name(name)
