"""A hub reached through the user's own ssh, one for each place, which forwards its ipc socket to this machine."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import IO

from envhub.errors import AddressError, HubUnreachable, brief, printable
from envhub.process import JOB_SIGNALS, TERMINAL_SIGNALS, blocked
from envhub.transport.address import quoted

COMMAND = "ENVHUB_SSH"  # the environment variable with the command, if it is another than ``ssh``
# OpenSSH puts variables of the client's environment and words of its own in place of ``${`` and ``%`` in the paths of
# -L (ssh_config(5), TOKENS), and has no escape for the one, and in old versions none for the other. ``:`` and a
# backslash are parts of -L itself. So a path that has one is refused.
_PATH = r"/[^$%:\\\x00-\x1f\x7f-\x9f\ud800-\udfff]*"
_UNREAD = "without $, %, :, backslashes and control characters, which ssh would read"
# Neither the user nor the host can be an option, of ssh or of a command in its configuration.
_HOST = r"([A-Za-z0-9_][\w.@-]*@)?[A-Za-z0-9_][\w.-]*"
_DESTINATION = re.compile(rf"ssh://(?P<host>{_HOST})(:(?P<port>[0-9]{{1,5}}))?(?P<path>{_PATH})?")
OPEN_S = 60.0  # for ssh to connect; it may ask the user for a password
POLL_S = 0.05
NAME_CHARS_MAX = 24  # in the folder of temporary files of macOS, whose path has some 50 characters
TAIL_BYTES = 4096  # of what ssh and the machine there say
TAIL_S = 1.0  # for it, once ssh has ended: a process below it may have its output open still
# What ``envhub.transport.address.default_address`` says there, in the shell of that user.
_DEFAULT_PATH = (
    'd="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"; '
    'if [ -n "$XDG_RUNTIME_DIR" ] || [ -d "$d" ]; then echo "$d/envhub/hub.sock"; '
    'else echo "${TMPDIR:-/tmp}/envhub-$(id -u)/hub.sock"; fi'
)


class _Tail:
    """The last bytes of a pipe, which is read until its end, so that its writer never waits."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._text = b""
        self._reader = threading.Thread(target=self._read, args=(pipe,), name="envhub-ssh", daemon=True)
        self._reader.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                self._text = (self._text + chunk)[-TAIL_BYTES:]

    def text(self) -> bytes:
        self._reader.join(TAIL_S)
        return self._text


_lock = threading.Lock()
_tunnels: dict[tuple[int, str], tuple[subprocess.Popen[bytes], str]] = {}  # by process and destination


def parse(destination: str) -> tuple[str, str | None, str | None]:
    """``[USER@]HOST``, and the port and the path that ``ssh://[USER@]HOST[:PORT][/PATH]`` has."""
    match = _DESTINATION.fullmatch(destination)
    if match is None:
        form = f"ssh://[USER@]HOST[:PORT][/PATH/OF/hub.sock], the path {_UNREAD}"
        raise AddressError(f"{quoted(destination)} is no place for ssh; write {form}")
    return match["host"], match["port"], match["path"]


def forwarded(destination: str) -> str:
    """The ipc address on this machine to which the hub's socket at ``ssh://[USER@]HOST[:PORT][/PATH]`` is forwarded."""
    host, port, path = parse(destination)
    with _lock:
        ssh, address = _tunnels.get((os.getpid(), destination), (None, ""))
        if ssh is None or ssh.poll() is not None:
            ssh, address = _open(host, port, path)
            _tunnels[os.getpid(), destination] = ssh, address
        return address


def _open(host: str, port: str | None, path: str | None) -> tuple[subprocess.Popen[bytes], str]:
    try:
        ssh_command = shlex.split(os.environ.get(COMMAND, "")) or ["ssh"]
    except ValueError as error:
        raise HubUnreachable(f"ssh does not reach {host}: {COMMAND} is no command: {error}") from error
    command = [*ssh_command, "-T", *(["-p", port] if port else [])]
    if shutil.which(command[0]) is None:
        raise HubUnreachable(f"ssh does not reach {host}: there is no command {command[0]!r}; {COMMAND} names another")
    path = path or _default_path(host, command)
    import tempfile  # not for `envhub health`, which is asked every few seconds

    if not re.fullmatch(_PATH, tempfile.gettempdir()):
        text = f"its socket here would be in {tempfile.gettempdir()!r}; name a folder by TMPDIR {_UNREAD}"
        raise HubUnreachable(f"ssh does not reach {host}: {text}")
    folder = Path(tempfile.mkdtemp(prefix="envhub-ssh-"))
    name = f"{host}.sock"
    socket = folder / (name if len(name) <= NAME_CHARS_MAX else "hub.sock")  # a socket's path must be short
    options = ["-o", "ExitOnForwardFailure=yes", "-L", f"{socket}:{path}"]
    # ``cat`` reads a pipe of the program, so that ssh ends with the program, however that ends.
    with blocked(JOB_SIGNALS - TERMINAL_SIGNALS):  # Ctrl-C may answer its question for a password
        ssh = subprocess.Popen(
            [*command, *options, host, "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    assert ssh.stderr is not None
    errors = _Tail(ssh.stderr)
    atexit.register(_close, ssh, folder, os.getpid())
    until_s = time.monotonic() + OPEN_S
    while not socket.exists():
        if (is_late := time.monotonic() >= until_s) or ssh.poll() is not None:
            _close(ssh, folder, os.getpid())
            raise _unreachable(host, errors.text(), is_late)
        time.sleep(POLL_S)
    return ssh, f"ipc://{socket}"


def _default_path(host: str, command: list[str]) -> str:
    # No input: it is the program's. ssh asks for a passphrase or a password on the terminal itself, /dev/tty.
    ssh = subprocess.Popen(
        [*command, host, _DEFAULT_PATH], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert ssh.stdout is not None and ssh.stderr is not None
    printed, errors = _Tail(ssh.stdout), _Tail(ssh.stderr)
    try:
        status = ssh.wait(OPEN_S)
    except BaseException as error:  # an interrupt, too, must not leave it behind
        ssh.kill()
        ssh.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise _unreachable(host, errors.text(), is_late=True) from error
        raise
    if status:
        raise _unreachable(host, errors.text())
    # The shell's startup files may print lines, too, before it runs the command.
    path = os.fsdecode((printed.text().strip().splitlines() or [b""])[-1])
    if not re.fullmatch(_PATH, path):
        text = f"the shell there should print the path of the hub's socket, got {brief(path, 300)}"
        text += f"; it begins with /, {_UNREAD}"
        raise _unreachable(host, text.encode())
    return path


def _unreachable(host: str, errors: bytes, is_late: bool = False) -> HubUnreachable:
    causes = [f"no connection within {OPEN_S:g} s"] if is_late else []
    if text := printable(errors.decode(errors="replace").strip()):
        causes.append(text)
    return HubUnreachable(f"ssh does not reach {host}: {': '.join(causes) or 'it ended, and did not say why'}")


def _close(ssh: subprocess.Popen[bytes], folder: Path, starter: int) -> None:
    if os.getpid() != starter:
        return
    ssh.kill()
    ssh.wait()
    shutil.rmtree(folder, ignore_errors=True)
