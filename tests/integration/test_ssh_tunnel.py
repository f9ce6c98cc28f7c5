"""A hub through ssh, by a command in the place of ssh that a test writes; ``test_ssh.py`` has a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from envhub_client.connection import known_hubs, ssh_tunnel
from hubs import wait_until

from envhub.errors import AddressError, HubUnreachable

Ssh = Callable[[str], None]
# Makes the socket that it is told to forward, and ends at the end of its input.
FORWARDING = """
import re, socket, sys
forwarded = next((each for each in sys.argv if ".sock:" in each), None)
if forwarded:
    here, there = forwarded.split(":")
    with open(here + ".there", "w") as file:  # before the socket: once the socket exists, the tunnel counts as open
        file.write(there)
    socket.socket(socket.AF_UNIX).bind(here)
    sys.stdin.read()
    sys.exit()
"""
# As of OpenSSH, which puts variables of the client and words of its own in place of some parts of the forwarded path.
EXPANDING = FORWARDING.replace(
    "here, there = forwarded.split",
    """import os
    asked = re.sub(r"\\$\\{(\\w+)\\}", lambda found: os.environ[found[1]], forwarded.partition(":")[2])
    print("asked for", asked.replace("%u", "alice"), file=sys.stderr)
    here, there = forwarded.split""",
)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ssh:
    """Makes this Python program the ssh command."""

    def write(text: str) -> None:
        (tmp_path / "ssh.py").write_text(text)
        monkeypatch.setenv(ssh_tunnel.COMMAND, f"{sys.executable} {tmp_path}/ssh.py")

    return write


@pytest.mark.parametrize("place", ["ssh://simbox", "ssh://simbox/tmp/hub.sock"])
def test_ssh_that_takes_too_long_is_told_as_unreachable(ssh: Ssh, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(ssh_tunnel, "OPEN_S", 0.2)
    ssh("import time; time.sleep(60)")
    with pytest.raises(HubUnreachable, match=r"ssh does not reach simbox: no connection within 0\.2 s$"):
        ssh_tunnel.forwarded(place)


def test_lines_of_the_startup_files_there_are_no_part_of_the_path(ssh: Ssh) -> None:
    ssh(FORWARDING + "print('Welcome to simbox')\nprint()\nprint('/run/user/7/envhub/hub.sock')")
    here = ssh_tunnel.forwarded("ssh://startup").removeprefix("ipc://")
    assert Path(f"{here}.there").read_text() == "/run/user/7/envhub/hub.sock"


@pytest.mark.parametrize("printed", ["", "Welcome to simbox\n"])
def test_shell_there_that_prints_no_path_is_told(ssh: Ssh, printed: str) -> None:
    ssh(f"print({printed!r})")
    with pytest.raises(HubUnreachable, match=f"path of the hub's socket, got '{printed.strip()}'"):
        ssh_tunnel.forwarded("ssh://simbox")


def test_ssh_has_no_part_of_the_programs_input(ssh: Ssh) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"of the program")
    os.close(writing)
    saved = os.dup(0)
    os.dup2(reading, 0)
    try:
        ssh(FORWARDING + "sys.stderr.write(repr(sys.stdin.read()))\nsys.exit(255)")
        with pytest.raises(HubUnreachable, match="ssh does not reach simbox: ''"):
            ssh_tunnel.forwarded("ssh://simbox")
        assert os.read(0, 100) == b"of the program"
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(reading)


@pytest.mark.parametrize("place", ["ssh://simbox", "ssh://simbox/tmp/hub.sock"])
def test_what_ssh_says_moves_no_cursor(ssh: Ssh, place: str) -> None:
    ssh(r"import sys; sys.stderr.write('\x1b[2Jno route\r\n'); sys.exit(255)")
    with pytest.raises(HubUnreachable) as raised:
        ssh_tunnel.forwarded(place)
    assert str(raised.value) == r"ssh does not reach simbox: \x1b[2Jno route"


def test_tunnel_goes_on_however_much_ssh_says(ssh: Ssh, tmp_path: Path) -> None:
    loud = f"sys.stderr.write('open failed' * 100_000)\n    open('{tmp_path}/said', 'w')\n    sys.stdin.read()"
    ssh(FORWARDING.replace("sys.stdin.read()", loud))
    ssh_tunnel.forwarded("ssh://loud/tmp/hub.sock")
    assert wait_until((tmp_path / "said").exists, timeout=10)


@pytest.mark.long
def test_machine_that_prints_without_an_end_fills_no_memory(
    ssh: Ssh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = tmp_path / "printed"

    class Printing(subprocess.Popen[bytes]):
        """Is returned once ssh has printed more than is kept: only then OPEN_S begins."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            assert wait_until(printed.exists)

    monkeypatch.setattr(subprocess, "Popen", Printing)
    monkeypatch.setattr(ssh_tunnel, "OPEN_S", 1.0)
    much = f"'n' * {2 * ssh_tunnel.TAIL_BYTES}"
    first = f"import sys\nprint({much}, end='', file=sys.stderr, flush=True)\nopen('{printed}', 'w')\n"
    ssh(first + "while True: sys.stdout.write('y' * 65536); sys.stderr.write('n' * 65536)")
    with pytest.raises(HubUnreachable, match=r"no connection within 1 s: n{4096}$"):
        ssh_tunnel.forwarded("ssh://simbox")


READ_BY_SSH = ["/tmp/${SECRET}/hub.sock", "/tmp/%u/hub.sock", "/tmp/$SECRET", "/tmp/a:b:22", r"/tmp/a\b", "/tmp/a\tb",
               "/tmp/a\0b", "/tmp/\x9b2J"]  # fmt: skip


@pytest.mark.parametrize("path", [*READ_BY_SSH, "tmp/hub.sock", "-oProxyCommand=x"])
def test_path_that_the_machine_there_names_reaches_no_ssh_that_would_read_it(
    ssh: Ssh, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("SECRET", "of-the-client")
    ssh(EXPANDING + f"print({path!r})")
    with pytest.raises(HubUnreachable) as raised:
        ssh_tunnel.forwarded("ssh://simbox")
    said = str(raised.value)
    assert f"does not reach simbox: the shell there should print the path of the hub's socket, got {path!r};" in said
    assert said.isprintable() and "of-the-client" not in said


@pytest.mark.parametrize("path", READ_BY_SSH)
def test_path_of_an_address_reaches_no_ssh_that_would_read_it(
    ssh: Ssh, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv("SECRET", "of-the-client")
    ssh(EXPANDING)
    for use in (ssh_tunnel.forwarded, known_hubs.resolve, known_hubs.add_own_key):
        with pytest.raises(AddressError, match="no place for ssh") as raised:
            use(f"ssh://simbox{path}")
        assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "place", ["ssh://-oProxyCommand=x", "ssh://me@-oProxyCommand=x", "ssh://-x@simbox", "ssh://sim%box", "ssh://${HOME}",
              "ssh://simbox:-1", "ssh://simbox:٣", "ssh://simbox:", "ssh://me@", "ssh://", "ssh://sim box",
              "ssh://simbox\n", "ssh://simbox/\ud800"]
)  # fmt: skip
def test_host_user_or_port_that_ssh_would_take_for_something_else_is_refused(ssh: Ssh, place: str) -> None:
    ssh("print('/tmp/hub.sock')")
    with pytest.raises(AddressError, match="no place for ssh") as raised:
        ssh_tunnel.forwarded(place)
    assert str(raised.value).isprintable()


def test_password_in_a_place_is_not_repeated() -> None:
    with pytest.raises(AddressError, match="no place for ssh") as raised:
        ssh_tunnel.forwarded("ssh://me:hunter2@simbox")
    assert "hunter2" not in str(raised.value)


def test_folder_for_the_end_of_a_tunnel_that_ssh_would_read_is_told(
    ssh: Ssh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "50%").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "50%"))
    ssh(FORWARDING)
    with pytest.raises(HubUnreachable, match="TMPDIR"):
        ssh_tunnel.forwarded("ssh://simbox/tmp/hub.sock")
    assert not [*(tmp_path / "50%").iterdir()]
