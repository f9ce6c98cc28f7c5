"""A hub reached through the user's own ssh: its ipc socket, forwarded to a socket on this machine.

One ``ssh`` serves all connections of this program to one place. It ends with the program, however that ends: the remote
command reads a pipe of the program until its end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from envhub.errors import AddressError, HubUnreachable

COMMAND = "ENVHUB_SSH"  # the environment variable with the command, if it is another than ``ssh``
PLACE = re.compile(r"ssh://(?P<host>[A-Za-z0-9_][\w.@-]*)(:(?P<port>\d+))?(?P<path>/.*)?")
OPEN_S = 60.0  # for ssh to connect; it may ask the user for a password
POLL_S = 0.05
# What ``envhub.transport.address.default_address`` says there, in the shell of that user.
_DEFAULT_PATH = (
    'd="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"; '
    'if [ -n "$XDG_RUNTIME_DIR" ] || [ -d "$d" ]; then echo "$d/envhub/hub.sock"; '
    'else echo "${TMPDIR:-/tmp}/envhub-$(id -u)/hub.sock"; fi'
)

_lock = threading.Lock()
_tunnels: dict[tuple[int, str], tuple[subprocess.Popen[bytes], str]] = {}  # by process and place


def forwarded(place: str) -> str:
    """The ipc address on this machine to which the hub's socket at ``ssh://[USER@]HOST[:PORT][/PATH]`` is forwarded.

    Raises:
        AddressError: this is no such place.
        HubUnreachable: ssh does not get there; the message has what it says.
    """
    found = PLACE.fullmatch(place)
    if found is None:
        raise AddressError(f"{place!r} is no place for ssh; write ssh://[USER@]HOST[:PORT][/PATH/OF/hub.sock]")
    with _lock:
        ssh, address = _tunnels.get((os.getpid(), place), (None, ""))
        if ssh is None or ssh.poll() is not None:
            ssh, address = _open(found["host"], found["port"], found["path"])
            _tunnels[os.getpid(), place] = ssh, address
        return address


def _open(host: str, port: str | None, path: str | None) -> tuple[subprocess.Popen[bytes], str]:
    command = [*shlex.split(os.environ.get(COMMAND, "ssh")), "-T", *(["-p", port] if port else [])]
    if shutil.which(command[0]) is None:
        raise HubUnreachable(f"ssh does not reach {host}: there is no command {command[0]!r}; {COMMAND} names another")
    if path is None:
        asked = subprocess.run([*command, host, _DEFAULT_PATH], capture_output=True, text=True, timeout=OPEN_S)
        if asked.returncode:
            raise HubUnreachable(f"ssh does not reach {host}: {asked.stderr.strip()}")
        path = asked.stdout.strip()
    folder = Path(tempfile.mkdtemp(prefix="envhub-ssh-"))
    socket = folder / f"{host}.sock"
    options = ["-o", "ExitOnForwardFailure=yes", "-L", f"{socket}:{path}"]
    ssh = subprocess.Popen(
        [*command, *options, host, "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    atexit.register(_close, ssh, folder, os.getpid())
    until_s = time.monotonic() + OPEN_S
    while not socket.exists():
        if ssh.poll() is not None or time.monotonic() >= until_s:
            _close(ssh, folder, os.getpid())
            said = ssh.stderr.read().decode(errors="replace").strip() if ssh.stderr is not None else ""
            raise HubUnreachable(f"ssh does not reach {host}: {said or f'no connection within {OPEN_S:g} s'}")
        time.sleep(POLL_S)
    return ssh, f"ipc://{socket}"


def _close(ssh: subprocess.Popen[bytes], folder: Path, owner: int) -> None:
    if os.getpid() != owner:
        return
    ssh.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        ssh.wait(5)
    shutil.rmtree(folder, ignore_errors=True)
