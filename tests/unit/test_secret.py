"""``Secret``: what shows a key, and what refuses to."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import msgpack
import msgspec
import pytest
from envhub_client.connection import known_hubs
from envhub_client.observer import token_bytes

import envhub
from envhub.errors import AddressError
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub.transport.keys import HubKeys, text_of, token_of
from envhub.values import codec

A, B, C = (bytes([number]) * 32 for number in (1, 66, 67))
TOKEN = text_of(A + B)
ADDRESS = f"envhub://{TOKEN}@simbox:5555"
LEFT_OUT = "envhub://***@simbox:5555"


@pytest.mark.parametrize("value", [b"hunter2", "hunter2"])
def test_text_of_a_secret_is_three_stars(value: Any) -> None:
    secret = Secret(value)
    shown = [str(secret), repr(secret), f"{secret}", f"{secret!r:>10}", f"{secret:>30}", "{:d}".format(secret)]  # noqa: UP032
    assert all(each.strip() == "***" for each in shown)
    assert logging.LogRecord("", 0, "", 0, "%s %r", (secret, secret), None).getMessage() == "*** ***"
    assert secret.reveal_secret() == value and not hasattr(secret, "__dict__")
    assert json.dumps({"key": secret}, default=str) == '{"key": "***"}'


@pytest.mark.parametrize("pack", [pickle.dumps, cloudpickle.dumps, json.dumps, msgpack.packb, msgspec.json.encode,
                                  msgspec.to_builtins, codec.encode, bytes, len, iter, hash, vars,
                                  lambda secret: secret.__getstate__()])  # fmt: skip
def test_secret_is_written_by_nothing(pack: Any) -> None:
    with pytest.raises((TypeError, codec.EncodeError)) as raised:
        pack(Secret(b"hunter2"))
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("value", [HubKeys(A, Secret(B)), addresses.parse(ADDRESS)])
@pytest.mark.parametrize("pack", [pickle.dumps, cloudpickle.dumps, msgspec.json.encode, msgspec.to_builtins])
def test_what_has_a_secret_in_it_is_not_written_either(pack: Any, value: Any) -> None:
    with pytest.raises(TypeError):
        pack(value)


def test_secret_by_pickle_of_codec_stays_here() -> None:
    with pytest.raises(codec.EncodeError, match="a key is not pickled"):
        codec.encode({"keys": Secret(b"hunter2")}, codec.as_pickle)


def test_secrets_are_equal_by_their_values() -> None:
    assert Secret(b"a") == Secret(b"a") != Secret(b"b") and Secret("ä") == Secret("ä") != Secret("a")
    assert Secret(b"a") != b"a" and Secret("a") != "a"
    assert HubKeys(A, Secret(B)) == HubKeys(A, Secret(B)) != HubKeys(A, Secret(C))


def test_copy_of_a_secret_is_itself() -> None:
    secret = Secret(b"a")
    assert copy.copy(secret) is copy.deepcopy(secret) is secret
    found = dataclasses.asdict(addresses.parse(ADDRESS))
    assert found["keys"]["secret"] == Secret(B) and "BBB" not in repr(found)


def test_address_with_keys_is_written_down_without_them() -> None:
    guarded = addresses.guarded(ADDRESS)
    assert isinstance(guarded, Secret) and addresses.guarded(guarded) is guarded
    assert addresses.parse(guarded) == addresses.parse(ADDRESS)
    assert addresses.written(guarded) == LEFT_OUT
    assert addresses.written(addresses.guarded(f" Envhub:{TOKEN}")) == "***"  # malformed
    for other in ("tcp://simbox:5555", "simbox", "ssh://me@simbox", "ipc:///tmp/a@b", LEFT_OUT, "", None):
        assert addresses.guarded(other) is other
        assert other is None or addresses.written(other) == other
    assert token_of(HubKeys(A, Secret(B))) == Secret(TOKEN)


def test_address_whose_keys_were_left_out_has_those_that_are_kept_for_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("ENVHUB_ADDRESS", raising=False)
    with pytest.raises(AddressError, match=r"keys of envhub://\*\*\*@simbox:5555 were left out .* run `envhub login`"):
        known_hubs.resolve(LEFT_OUT)
    known_hubs.keep("aside", f"envhub://{text_of(A + C)}@simbox:5556")
    known_hubs.keep("broken", "envhub://x@simbox:5555")
    known_hubs.keep("plain", "tcp://simbox:5555")
    with pytest.raises(AddressError, match="run `envhub login`"):
        known_hubs.resolve(LEFT_OUT)
    known_hubs.keep("mine", ADDRESS)
    assert known_hubs.resolve(LEFT_OUT) == addresses.parse(ADDRESS)
    monkeypatch.setenv("ENVHUB_ADDRESS", f"envhub://{text_of(A + C)}@simbox:5555")
    assert known_hubs.resolve(LEFT_OUT).keys == HubKeys(A, Secret(C))


def test_variables_of_a_process_that_needs_no_hub_have_no_key() -> None:
    found = addresses.environment({"ENVHUB_ADDRESS": ADDRESS, "PATH": "/bin"})
    assert found == {"ENVHUB_ADDRESS": LEFT_OUT, "PATH": "/bin"}
    for others in ({}, {"ENVHUB_ADDRESS": "simbox"}, {"ENVHUB_ADDRESS": ""}):
        assert addresses.environment(others) == others


@pytest.mark.parametrize("name", [ADDRESS, TOKEN[43:], TOKEN[:64]])
def test_key_in_the_place_of_a_name_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for use in (known_hubs.check_name, known_hubs.resolve):
        if use is known_hubs.resolve or not known_hubs.NAME.fullmatch(name):
            with pytest.raises(AddressError) as raised:
                use(name if name != ADDRESS or use is known_hubs.check_name else f"{name}x")
            assert name[10:40] not in str(raised.value)


def test_token_of_a_session_that_is_cut_is_not_repeated() -> None:
    token = "0123456789abcdef" * 2
    with pytest.raises(ValueError, match="32 hexadecimal digits") as raised:
        token_bytes(f"{token} ")[0] if token_bytes(token) else None  # spaces between digits are allowed, and after them
        token_bytes(token[:-1])
    assert token[:-1] not in str(raised.value)


def test_hub_beside_envs_of_the_own_process_is_not_repeated() -> None:
    with pytest.raises(ValueError, match=r"hub=\*\*\* in a hub's"):
        envhub.make_vec("CartPole-v1", 1, hub=ADDRESS, num_workers=0)
