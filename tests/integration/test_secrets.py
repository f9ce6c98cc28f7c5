"""No secret of a run is in anything that the run leaves or shows, but in the files that keep keys."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest
from envhub_server.network.key_folder import KeyFolder
from hubs import HERE, ServedHub, serve, wait_until
from new_keys import answers
from zmq.utils import z85

import envhub
from envhub import cli
from envhub.transport import address as addresses
from envhub.transport import sockets
from envhub.transport.address import HubKeys, key_of, token_of

SIMBOX = "config/envhub/hubs/simbox"
KEPT = {"config/envhub/client.key", "keys/server.key", SIMBOX}  # below the folder of a test


class Evidence:
    """What a run shows or leaves, by where it was found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, dict[str, bytes]()

    def add(self, where: str, what: object) -> None:
        content = what if isinstance(what, bytes) else str(what).encode("utf-8", "surrogateescape")
        self.found[f"{where} ({len(self.found)})"] = content

    def add_value(self, where: str, value: Any) -> None:
        """What a value shows, also in pickles and JSON, where there are such of it."""
        self.add(f"{where} as text", f"{value!s} {value!r} {value}")
        with contextlib.suppress(TypeError, AttributeError):
            self.add(f"{where} in a pickle", pickle.dumps(value))
        with contextlib.suppress(TypeError, ValueError):
            self.add(f"{where} in JSON", json.dumps(vars(value), default=str))

    def add_process(self, process: int) -> None:
        for each in [psutil.Process(process), *psutil.Process(process).children(recursive=True)]:
            for name in ("cmdline", "environ"):
                # A worker of an earlier session may end just now.
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    self.add(f"{name} of {each.name()}", Path(f"/proc/{each.pid}/{name}").read_bytes())

    def add_files(self) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file() and str(path.relative_to(self.folder)) not in KEPT:
                self.add(str(path), path.read_bytes())

    @contextlib.contextmanager
    def error(self, where: str) -> Iterator[None]:
        """Within the block, an error is raised; it is evidence, with all that led to it."""
        with pytest.raises(Exception) as raised:
            yield
        self.add(f"error {where}", "".join(traceback.format_exception(raised.value)))
        self.add_value(f"error {where}", raised.value)

    def places_of(self, secret: bytes) -> list[str]:
        return [where for where, content in self.found.items() if any(form in content for form in forms(secret))]


def forms(secret: bytes) -> list[bytes]:
    """How the bytes may be written: as they are, by hexadecimal digits, Z85, and base64 at each place in other text."""
    found = [secret, secret.hex().encode(), secret.hex().upper().encode(), repr(secret)[2:-1].encode()]
    found += [z85.encode(secret)] if len(secret) % 4 == 0 else []
    for before in range(3):
        whole = base64.b64encode(bytes(before) + secret)
        part = whole[-(-before * 8 // 6) : (before + len(secret)) * 8 // 6]
        found += [part, part.replace(b"+", b"-").replace(b"/", b"_")]
    return found


def secret_of(address: str) -> bytes:
    return key_of(address.removeprefix("envhub://").partition("@")[0], 2)[32:]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ServedHub]:
    """A hub with keys that writes all that a hub can write."""
    (tmp_path / "hub.toml").write_text(f'replays = "{tmp_path}/replays"\n')
    (tmp_path / "config").mkdir()
    (tmp_path / "keys").mkdir(mode=0o700)
    files = ("--config", f"{tmp_path}/hub.toml", "--keys", f"{tmp_path}/keys")
    with serve(tmp_path, "counter=sims:counter", "naughty=sims:naughty", "CartPole-v1", *files) as served:
        yield served


def command(evidence: Evidence, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command of ``envhub``; what it prints is evidence."""
    with contextlib.suppress(SystemExit):
        cli.run([*arguments])
    found = capsys.readouterr()
    evidence.add(f"envhub {arguments[0]}", found.out + found.err)
    return found.out + found.err


def admitted(hub: ServedHub, capsys: pytest.CaptureFixture[str], folder: Path, name: str) -> str:
    """Admit a client by the command, whose output is to have the secret."""
    with contextlib.suppress(SystemExit):
        cli.run(["keys", "add", name, "--keys", str(folder / "keys"), "--at", hub.tcp.removeprefix("tcp://")])
    return capsys.readouterr().out.strip()


@pytest.mark.long
def test_no_secret_is_in_what_a_run_leaves_or_shows(
    tmp_path: Path,
    hub: ServedHub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ENVHUB_ADDRESS", raising=False)
    evidence = Evidence(tmp_path)
    alice, eve = (admitted(hub, capsys, tmp_path, name) for name in ("alice", "eve"))
    assert wait_until(lambda: answers(eve)) and answers(alice)
    tokens = [*record(evidence, hub, alice), *use_client(evidence, alice)]
    make_mistakes(evidence, alice)
    KeyFolder(tmp_path / "keys").remove("eve")
    with evidence.error("of a key that was removed"):
        while True:
            envhub.connect(eve, timeout=1.0).close()
    run_commands(evidence, alice, monkeypatch, capsys)
    use_names(evidence, alice, monkeypatch)
    hub.stop()
    evidence.add("log of the client", caplog.text)
    evidence.add_files()
    assert [*tmp_path.glob("recordings/*/recording.json")]
    own, server = (key_of((tmp_path / name).read_text().strip()) for name in sorted(KEPT - {SIMBOX}))
    secrets = {"alice": secret_of(alice), "eve": secret_of(eve), "own": own, "server": server}
    secrets |= {f"session {number}": bytes.fromhex(token) for number, token in enumerate(tokens)}
    found = {name: places for name, each in secrets.items() if (places := evidence.places_of(each))}
    assert not found, found


def record(evidence: Evidence, hub: ServedHub, address: str) -> Iterator[str]:
    """Record, by the address itself; returns the sessions' tokens."""
    for env in ("counter", "CartPole-v1"):  # of which this program knows the second only
        with closing(envhub.make_vec(env, 2, hub=address, record=evidence.folder / "recordings")) as envs:
            yield envs.token
            envs.reset(seed=1)
            for _ in range(30):
                envs.step(envs.action_space.sample())
            for name in ("address", "spec", "env_spec", "sizing", "recorded", "named"):
                evidence.add_value(f"{env}.{name}", getattr(envs, name))
            evidence.add_value(env, envs)
            if envs.spec is not None:
                evidence.add(f"{env}.spec.to_json()", envs.spec.to_json())
            evidence.add_process(os.getpid())
            evidence.add_process(hub.process.pid)


def use_client(evidence: Evidence, address: str) -> Iterator[str]:
    """Use a client, and an env that raises; returns the tokens of sessions that are taken over."""
    with closing(envhub.make_vec("naughty", 1, hub=address)) as envs, evidence.error("of an env"):
        envs.reset()
        envs.step([1])
    with envhub.connect(address) as client:
        evidence.add_value("client", client)
        for look in (client.envs, client.sessions, client.stats, client.health):
            evidence.add(look.__name__, look())
        detached = client.make_vec("counter", 1).detach()
        yield detached
        with closing(client.attach(detached)) as envs:
            yield envs.token
        with evidence.error("of a token that is cut"):
            client.attach(envs.token[:-1] + "x")
        with evidence.error("of a session that has ended"):
            client.attach(envs.token)
    parsed = addresses.parse(address)
    evidence.add_value("address", parsed)
    evidence.add_value("keys", parsed.keys)


def make_mistakes(evidence: Evidence, address: str) -> None:
    """Use the address where none with a key can be used, and spoil it."""
    with evidence.error("of a spec"):
        gym.make_vec("envhub:EnvHub/Remote-v0", num_envs=1, env_id="CartPole-v1", url=address)
    with evidence.error("of no hub"):
        envhub.make_vec("CartPole-v1", 1, hub=address, num_workers=0)
    token = address.removeprefix("envhub://").partition("@")[0]
    for text in (f"tcp://{token}@simbox:1", address[:-6], f"envhub://{token}", f"{address}x", f"{address}\n7",
                 token[43:], token[:60], address.replace("envhub:", "ENVHUB:"), f"ssh://me:{token}@simbox",
                 f"simbox {token}", f"envhub://{token}@sim box:1", f"envhub://{token}x@simbox:1"):  # fmt: skip
        with evidence.error("of an address"):
            envhub.connect(text, timeout=1.0)


def run_commands(
    evidence: Evidence, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keep the hub as simbox, and ask it; some commands have the address by mistake."""
    for name in ("simbox", address):
        monkeypatch.setattr("sys.stdin", io.StringIO(address))
        command(evidence, capsys, "login", name)
    keys = ("--keys", str(evidence.folder / "keys"))
    assert wait_until(lambda: "simbox: ok" in command(evidence, capsys, "ls"))  # a look waits 2 s for a hub
    assert "CartPole-v1" in command(evidence, capsys, "envs", "simbox")
    assert "alice" in command(evidence, capsys, "keys", "list", *keys)
    for mistake in (("add", address, *keys), ("remove", address, *keys), ("add", "bob", "--may", address, *keys)):
        command(evidence, capsys, "keys", *mistake)
    command(evidence, capsys, "keygen")


def use_names(evidence: Evidence, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make envs whose specs say by name where the hub is, or leave it to the variable."""
    for url, variable in (("simbox", ""), (None, address)):
        monkeypatch.setenv("ENVHUB_ADDRESS", variable)
        with closing(gym.make_vec("envhub:EnvHub/Remote-v0", num_envs=1, env_id="CartPole-v1", url=url)) as envs:
            assert envs.spec is not None
            evidence.add_value("spec", envs.spec)
            evidence.add("spec.to_json()", envs.spec.to_json())
    monkeypatch.delenv("ENVHUB_ADDRESS")


PROGRAM = """
import sys
import envhub, sims
envs = envhub.make_vec(lambda: sims.Counter(length=3), 2, record=sys.argv[1])  # by a hub of its own
envs.reset()
envs.step([1, 1])
print(*envs.call("environment", "ENVHUB_ADDRESS"), flush=True)
sys.stdin.read()
envs.close()
"""


@pytest.mark.long
def test_processes_of_a_program_whose_variable_has_a_key_have_no_key(tmp_path: Path) -> None:
    public, secret = sockets.new_key_pair()
    address = f"envhub://{token_of(HubKeys(public, secret)).reveal_secret()}@simbox:5555"
    environ = {**os.environ, "ENVHUB_ADDRESS": address}
    evidence, run = Evidence(tmp_path), [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(
        run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE, env=environ
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline().split() == ["envhub://***@simbox:5555"] * 2
        below = psutil.Process(program.pid).children(recursive=True)
        assert {each.name() for each in below} >= {"envhub-zygote", "envhub-worker"}
        for each in below:
            evidence.add_process(each.pid)
        program.communicate("")
    assert program.returncode == 0
    evidence.add_files()
    assert not evidence.places_of(secret.reveal_secret())
