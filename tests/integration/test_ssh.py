"""A hub through ssh, by a real sshd on this machine."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from hubs import ServedHub, free_port, listening, lives, serve, wait_until

import envhub
from envhub.process import JOB_SIGNALS, TERMINAL_SIGNALS

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="there is no sshd here")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of an sshd that lets this user in by a key, which ``ENVHUB_SSH`` presents."""
    with sshd_of(tmp_path_factory.mktemp("sshd")) as number:
        yield number


@contextmanager
def sshd_of(folder: Path, options_of_key: str = "", log: Path = Path(os.devnull)) -> Iterator[int]:
    """Run an sshd that lets this user in by a key, which ``ENVHUB_SSH`` presents, and return its port."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "authorized").write_text(options_of_key + (folder / "user.pub").read_text())
    number = free_port()
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "ListenAddress": f"127.0.0.1:{number}",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
        "LogLevel": "DEBUG1",
    }
    flags = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    with (
        log.open("w") as file,
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen([str(SSHD), "-D", "-e", "-f", "/dev/null", *flags], stderr=file) as sshd,
    ):
        assert wait_until(lambda: listens(number))
        patch.setenv("ENVHUB_SSH", f"ssh -F none -i {folder / 'user'} {known}")
        try:
            yield number
        finally:
            sshd.terminate()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("hub"), "CartPole-v1") as served:
        yield served


def place(hub: ServedHub, port: int) -> str:
    return f"ssh://{getpass.getuser()}@127.0.0.1:{port}{hub.ipc.removeprefix('ipc://')}"


def test_hub_behind_ssh_needs_no_port_and_no_key(hub: ServedHub, port: int) -> None:
    with closing(envhub.make_vec("CartPole-v1", 2, hub=place(hub, port))) as envs:
        assert envs.reset(seed=1)[0].shape == (2, 4) and envs.lane == "wire"
        with envhub.connect(place(hub, port)) as client:  # by the same ssh
            assert len(client.sessions()) == 1
            (ssh,) = (child for child in psutil.Process().children() if child.name() == "ssh")
            for number in JOB_SIGNALS - TERMINAL_SIGNALS:
                ssh.send_signal(number)
            assert len(client.sessions()) == 1


def test_program_that_is_killed_leaves_no_ssh(hub: ServedHub, port: int) -> None:
    program = "import sys, time, envhub; envhub.connect(sys.argv[1]); print('up', flush=True); time.sleep(100)"
    run = [sys.executable, "-c", program, place(hub, port)]
    with subprocess.Popen(run, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"up\n"
        below = psutil.Process(trainer.pid).children()
        assert [child.name() for child in below] == ["ssh"]
        (path,) = map(Path, listening(trainer.pid))  # a socket in a folder of the user's own, and no port
        assert path.suffix == ".sock" and path.parent.stat().st_mode & 0o777 == 0o700
        trainer.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not any(map(lives, below)))


def test_what_ssh_says_is_told(port: int) -> None:
    with pytest.raises(envhub.HubUnreachable, match=r"(?i)permission denied"):
        envhub.connect(f"ssh://nobody@127.0.0.1:{port}")
    with pytest.raises(envhub.AddressError, match="no place for ssh"):
        envhub.connect("ssh://-oProxyCommand=x")


@pytest.fixture
def lying_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Path]]:
    """The port of an sshd whose shell prints a path that asks for a variable of the client, and its log."""
    (tmp_path / "shell").write_text("#!/bin/sh\necho '/tmp/${OF_THE_CLIENT}/%u'\ncat\n")
    (tmp_path / "shell").chmod(0o755)
    monkeypatch.setenv("OF_THE_CLIENT", "hunter2")
    log = tmp_path / "log"
    with sshd_of(tmp_path, f'command="{tmp_path / "shell"}" ', log) as number:
        yield number, log


def test_path_that_the_machine_there_reports_does_not_read_the_clients_environment(
    lying_port: tuple[int, Path],
) -> None:
    number, log = lying_port
    with pytest.raises(envhub.HubUnreachable, match=r"127\.0\.0\.1: .* got '/tmp/\$\{OF_THE_CLIENT\}/%u'"):
        envhub.connect(f"ssh://{getpass.getuser()}@127.0.0.1:{number}", timeout=1.0)
    assert "hunter2" not in log.read_text() and "direct-streamlocal" not in log.read_text()
    with pytest.raises(envhub.AddressError, match="no place for ssh"):
        envhub.connect(f"ssh://{getpass.getuser()}@127.0.0.1:{number}/tmp/${{OF_THE_CLIENT}}", timeout=1.0)
