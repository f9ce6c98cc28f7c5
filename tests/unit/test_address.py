from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import msgpack
import msgspec
import pytest
from envhub_client.connection import known_hubs
from envhub_client.observer import token_bytes
from envhub_client.session.options import FaultOptions, HostingOptions, SessionOptions
from envhub_client.tools.console import reports
from envhub_server.catalog.registry import InterpreterKey, Registry
from envhub_server.processes.interpreter import InterpreterUnusable, find
from envhub_server.worker.context import describe_failure

import envhub
from envhub import cli
from envhub.errors import AddressError, hidden, hide_secrets_in
from envhub.files import user_text
from envhub.secret import Secret
from envhub.transport import address
from envhub.transport import address as addresses
from envhub.transport.address import Address, HubKeys, text_of, token_of
from envhub.values import codec


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


# --- secrets ----------------------------------------------------------------------------------------------------------


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
        if use is known_hubs.resolve or addresses.why_no_name(name):
            with pytest.raises(AddressError) as raised:
                use(name if name != ADDRESS or use is known_hubs.check_name else f"{name}x")
            assert name[10:40] not in str(raised.value)


NO_ADDRESSES = ["{}", " {}\n", "{}\0", "envhub://{}", "ENVHUB:{}@h:1", "tcp://h:{}", "tcp://{}:1", "tcp://[{}]:1", "tcp://{}@h:1",
    "tcp://h:1/{}", "ssh://h:22:{}", "ssh://-{}", "ssh://{}@h:x", "ssh://h:{}@h", "ray://{}", "ray://a/{}", "dns://{}",
    "dns://{}:1", "https://h/?token={}", "ipc://@{}", "ipc://{}-/x/" + "y" * 99]  # fmt: skip


@pytest.mark.parametrize("form", NO_ADDRESSES)
def test_secret_in_a_text_that_is_no_address_is_not_repeated(form: str, tmp_path: Path) -> None:
    given = form.format(TOKEN)
    uses: list[Callable[[], object]] = [
        lambda: envhub.make_vec("CartPole-v1", 2, hub=given),
        lambda: envhub.make_vec("CartPole-v1", 2, hub=[given, given]),
        lambda: envhub.make_vec("CartPole-v1", 2, hub=[given, 5]),  # type: ignore[list-item]
        lambda: envhub.connect(given, 0.1),
        lambda: known_hubs.check_name(given),
        lambda: known_hubs.name_of(given),
    ]
    for use in uses:
        with pytest.raises((AddressError, TypeError)) as raised:
            use()
        assert TOKEN[:43] not in str(raised.value)
    with contextlib.suppress(AddressError):
        assert TOKEN[:43] not in repr(reports([given], 0.1))


@pytest.mark.parametrize(
    "command",
    ["health {}", "fleet ls ssh://h:22:{}", "ls", "keys add a --keys keys --at {}", "keys add a --keys keys --at h:{}",
     "keys list --keys {}", "keys remove a --keys envhub://{}@h:1", "serve --config envhub://{}@h:1", "serve --name {}",
     "serve --keys envhub://{}@h:1", "serve --python envhub://{}@h:1", "serve --bind tcp://h:1:{}", "replay {}",
     "record CartPole-v1 envhub://{}@h:1", "login a envhub://{}@h:1", "{}",
     "fleet up --name {}"],
)  # fmt: skip
def test_command_does_not_repeat_a_secret(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("ENVHUB_ADDRESS", f"ssh://h:22:{TOKEN}" if command == "ls" else "")
    with contextlib.suppress(SystemExit):
        cli.run(command.format(TOKEN).split())
    printed = "".join(capsys.readouterr())
    assert printed and TOKEN[:40] not in re.sub(r"[\s│]", "", printed)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "text",
    ["tcp://simbox:5555", "envhub://***@simbox:5555", "ssh://me@simbox/run/hub.sock", "an envhub:// address",
     "my-experiment-2026-11-29-lr-0003-batch-64-seed1", f"tcp://{'very-long-name-' * 4}0.hubs.svc:5555",
     "HandManipulateEgg_ContinuousTouchSensors-v1", "a-v1-" * 100_000, "A-v" * 100_000 + "-v1",
     "a" * 500_000, ":" * 500_000, "a:" * 500_000, "me@" * 500_000],
)  # fmt: skip
def test_text_without_a_secret_is_shown_as_it_is(text: str) -> None:
    assert (hidden(text), addresses.written(text)) == (text, text)


def test_key_in_place_of_an_envs_name_is_not_repeated() -> None:
    key = "EIAfCyLLy2dRUPF_cNDi1hmBMI4AX336gCIK3t0Kg-g"
    logged = hide_secrets_in({"envs": [key, f"ALE/{key}-v5"]}), hide_secrets_in(f"no id '{key}'")
    error = ValueError(f"Environment `{key}` doesn't exist")
    failure = describe_failure(error, "env_raised", None, None, SimpleNamespace(name=key, hide_folders=False))
    unmatched = Registry([key]).unmatched(InterpreterKey(), [])
    with pytest.raises(InterpreterUnusable) as raised:
        find(key)
    assert not any(key in repr(each) for each in (logged, failure, [*unmatched.values()], raised.value))


def test_token_of_a_session_that_is_cut_is_not_repeated() -> None:
    token = "0123456789abcdef" * 2
    with pytest.raises(ValueError, match="32 hexadecimal digits") as raised:
        token_bytes(f"{token} ")[0] if token_bytes(token) else None  # spaces between digits are allowed, and after them
        token_bytes(token[:-1])
    assert token[:-1] not in str(raised.value)


@pytest.mark.parametrize("form", ["{}", "envhub://{}@h:1", "https://{}:x@h", "/run/{}"])
def test_secret_at_another_keyword_is_not_repeated(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keywords = [
        *(field.name for kind in (SessionOptions, FaultOptions, HostingOptions) for field in dataclasses.fields(kind)),
        *("vector", "wrappers", "env_kwargs"),
    ]
    unchecked = ("faults", "hosting", "record", "python", "copy", "label")
    given = [{each: form.format(TOKEN)} for each in keywords if each not in unchecked]
    for keyword in [
        *given,
        {"record": f"envhub://{TOKEN}@h:1"},
        {"hub": form.format(TOKEN), "lane": "fast"},
        {"env": ADDRESS},
    ]:
        with pytest.raises((TypeError, ValueError)) as raised:
            envhub.make_vec(**{"env": "CartPole-v1", "num_workers": 1, **keyword})  # type: ignore[arg-type]
        assert TOKEN[:40] not in str(raised.value)
    assert not [*tmp_path.iterdir()]
