"""The hub as a service: what it tells systemd, by a socket as systemd has it, and the unit that is written for it."""

from __future__ import annotations

import configparser
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from envhub_server import systemd
from envhub_server.loop import Loop
from envhub_server.systemd import ServiceManager, quoted, unit_of
from hubs import serve, stopped

import envhub
from envhub.cli import commands
from envhub.options import HubOptions

NAMES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
WATCHDOG_S = 0.4


@pytest.fixture(params=["path", pytest.param("abstract", marks=pytest.mark.long)])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A socket for what services tell, and its value in ``NOTIFY_SOCKET``."""
    name = f"{tmp_path}/notify" if request.param == "path" else f"@{tmp_path}/notify"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as received:
        received.bind(name.replace("@", "\0"))
        received.settimeout(60)
        yield name, received


def word(received: socket.socket) -> list[str]:
    return received.recv(4096).decode().splitlines()


def words_until(received: socket.socket, first: str) -> list[str]:
    while (said := word(received))[0] != first:
        assert said[0] == "WATCHDOG=1", said
    return said


def test_systemd_is_told_what_the_hub_does(listening: tuple[str, socket.socket], tmp_path: Path) -> None:
    address, received = listening
    variables = dict(zip(NAMES, (address, str(int(WATCHDOG_S * 1e6)), ""), strict=True))
    kept = [part for name in NAMES for part in ("--worker-env", name)]
    (tmp_path / "hub.toml").touch()
    with serve(tmp_path, "CartPole-v1", "--config", f"{tmp_path}/hub.toml", *kept, environ=variables) as hub:
        listens = f"on {' '.join(hub.addresses)}"
        assert word(received) == ["READY=1", f"STATUS=serving {listens}: 0 sessions, 0 envs"]
        envs = envhub.make_vec("CartPole-v1", num_envs=3, hub=hub.ipc)
        while word(received) != ["WATCHDOG=1", f"STATUS=serving {listens}: 1 sessions, 3 envs"]:
            pass
        below = psutil.Process(hub.process.pid).children(recursive=True)
        assert len(below) > 1 and not {*NAMES} & {name for each in below for name in each.environ()}
        with stopped(hub.process.pid):
            received.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    word(received)  # from before it was stopped
            received.settimeout(3 * WATCHDOG_S)
            with pytest.raises(TimeoutError):
                word(received)
        received.settimeout(60)
        assert word(received)[0] == "WATCHDOG=1"
        envs.close()
        for sessions_max in (0, 3):
            (tmp_path / "hub.toml").write_text(f"sessions_max = {sessions_max}")
            hub.process.send_signal(signal.SIGHUP)
            assert words_until(received, "RELOADING=1")[1].removeprefix("MONOTONIC_USEC=").isdecimal()
            status = words_until(received, "READY=1")[1]
            assert ("reload refused: " in status) == (sessions_max == 0), status
        envs = envhub.make_vec("CartPole-v1", num_envs=1, hub=hub.ipc)
        with envhub.connect(hub.ipc) as client:
            client.drain()
        emptying = f"STATUS=emptying {listens}: 1 sessions, 1 envs"
        while (told := word(received))[-1] != emptying:
            assert told[0] == "WATCHDOG=1"  # by systemd's clock it has only begun to stop at STOPPING=1
        envs.close()
        assert hub.process.wait(60) == 0
        assert words_until(received, "STOPPING=1")[1].startswith(f"STATUS=emptying {listens}: 0 sessions")


def test_systemd_is_told_when_a_signal_stops_the_hub(listening: tuple[str, socket.socket], tmp_path: Path) -> None:
    address, received = listening
    with serve(tmp_path, "CartPole-v1", environ={"NOTIFY_SOCKET": address}) as hub:
        assert hub.stop() == 0
        assert word(received)[0] == "READY=1"
        assert word(received) == ["STOPPING=1", f"STATUS=draining on {' '.join(hub.addresses)}: 0 sessions, 0 envs"]


@pytest.mark.long
def test_hub_whose_service_manager_is_gone_goes_on(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", environ={"NOTIFY_SOCKET": f"{tmp_path}/none"}) as hub:
        envhub.make_vec("CartPole-v1", num_envs=1, hub=hub.ipc).close()
        assert '"event": "service_manager_unreachable"' in hub.log


@pytest.mark.parametrize("own", [True, False])
def test_watchdog_of_another_process_is_not_told(tmp_path: Path, own: bool) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as received:
        received.bind(f"{tmp_path}/notify")
        environ = dict(zip(NAMES, (f"{tmp_path}/notify", "9000000", str(os.getpid() if own else 1)), strict=True))
        manager = ServiceManager(environ)
        assert not environ
        manager.ready(Loop(), lambda: "two\nlines")
        manager.reloading()
        assert word(received) == ["READY=1", "STATUS=two lines"]
        assert [word(received)[0] for _ in range(own)] == ["WATCHDOG=1"] * own
        reloading, at, _ = word(received)
        assert reloading == "RELOADING=1" and at.removeprefix("MONOTONIC_USEC=").isdecimal()


# --- the unit ---------------------------------------------------------------------------------------------------------


def unit(capsys: pytest.CaptureFixture[str], *arguments: str) -> configparser.ConfigParser:
    with pytest.raises(SystemExit) as ended:
        commands.app(["service", "install", "--print", *arguments])
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(printed.out)
    return parser


def test_unit_runs_serve_with_its_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["a=my_sims:make", "--bind", "tcp://127.0.0.1:5555", "--name", "50% of $HOME", "--drain-timeout", "60"]
    made = unit(capsys, *arguments, "--run-as", "alice")["Service"]
    assert made["Type"] == "notify" and made["KillMode"] == "mixed" and made["User"] == "alice"
    assert made["ExecReload"] == "kill -HUP $MAINPID" and int(made["WatchdogSec"]) > 0
    assert made["ExecStart"].startswith(sys.executable)
    assert made["ExecStart"].endswith('serve a=my_sims:make --bind tcp://127.0.0.1:5555 --name "50%% of $$HOME" '
                                      "--drain-timeout 60")  # fmt: skip
    assert int(made["TimeoutStopSec"]) > 60 + HubOptions().drain_close_timeout
    assert made["WorkingDirectory"] == os.getcwd()
    own = unit(capsys, "--user", "CartPole-v1")
    assert "User" not in own["Service"] and own["Install"]["WantedBy"] == "default.target"
    harmful = {
        "MemoryDenyWriteExecute",
        "PrivateDevices",
        "PrivateTmp",
        "PrivateIPC",
        "ProtectHome",
        "RestrictNamespaces",
    }
    assert not harmful & {*made}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a-b_c=1", "a-b_c=1"),
        ("100%", "100%%"),
        ("$HOME", "$$HOME"),
        ("a b", '"a b"'),
        ('a"\\', '"a\\"\\\\"'),
        ("", '""'),
    ],
)
def test_words_of_the_command_are_quoted(text: str, expected: str) -> None:
    assert quoted(text) == expected


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "envhub-of-a-test.service"
    file.write_text(unit_of([sys.executable, "-c", "a b; $x %h"], str(tmp_path), 7.0, "daemon"))
    ran = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and str(file) not in ran.stderr, ran.stderr


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        commands.app(["service", *arguments])
    return ended.value.code


def test_service_is_refused_without_systemd_and_by_a_bad_option(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "BOOTED", str(tmp_path / "none"))
    for command in ("install", "uninstall"):
        assert run(command, "--user") == 1
        assert "this machine is not run by systemd" in capsys.readouterr().err
    monkeypatch.delenv("SUDO_USER", raising=False)
    assert run("install", "CartPole-v1") == 2 and "--run-as" in capsys.readouterr().err
    assert run("install", "--user", "--sessions-max", "0") == 2
    assert "sessions-max = 0" in capsys.readouterr().err


def test_service_whose_start_has_failed_is_listed_no_more_once_it_is_uninstalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without systemd its command is a script, which writes down what it is to do."""
    script, told = tmp_path / "systemctl", tmp_path / "told"
    script.write_text(f"#!/bin/sh\necho $* >> {told}\n[ $2 != reset-failed ]\n")
    script.chmod(0o755)
    monkeypatch.setattr(systemd, "BOOTED", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert not run("install", "--user", "--unit", "sims", "CartPole-v1")
    assert not run("uninstall", "--user", "--unit", "sims") and not (tmp_path / "systemd/user/sims.service").exists()
    acts = ["disable --now sims", "reset-failed sims", "daemon-reload"]
    assert told.read_text().splitlines() == [f"--user {act}" for act in acts]


def test_unit_of_another_is_neither_replaced_nor_removed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "BOOTED", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "systemd/user/sims.service"
    assert not run("install", "--user", "--unit", "sims", "CartPole-v1")
    assert path.read_text().startswith(systemd.MARK)
    assert capsys.readouterr().out.splitlines()[2] == "  systemctl --user enable --now sims"
    path.write_text("[Unit]\n")
    for command, status in (("install", 2), ("uninstall", 1)):
        assert run(command, "--user", "--unit", "sims") == status
        assert path.read_text() == "[Unit]\n" and str(path) in capsys.readouterr().err
