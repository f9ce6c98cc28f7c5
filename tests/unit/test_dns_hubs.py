"""Hubs at the addresses of a name in DNS. The resolver of this machine knows no name with several."""

from __future__ import annotations

from pathlib import Path

import pytest
from envhub_client.connection import known_hubs
from envhub_client.connection.known_hubs import Member, members

from envhub.errors import AddressError, HubUnreachable
from envhub.secret import Secret
from envhub.transport.address import text_of

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
