"""The hub's side of its web page: a child process, which is started again if it ends, and never waited for.

The process gets its settings by its stdin, as a line of JSON, and after it the lines of the hub's log. It is a client
of the hub, so nothing here knows of sessions. Whenever the hub ends, the kernel kills it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import subprocess
import sys
from collections import deque
from dataclasses import replace
from importlib.util import find_spec
from urllib.parse import urlencode

import msgspec

from envhub.errors import KeysError
from envhub.options import OptionError
from envhub.process import blocked
from envhub.transport import address
from envhub.transport.tcp import listening
from envhub_server import log as hub_log
from envhub_server.config import HubConfig
from envhub_server.log import NonblockingWriter, log
from envhub_server.processes.supervisor import Supervisor
from envhub_server.web.gate import ADMIN, VIEWER, WebAccess

PACKAGES = "nicegui", "prometheus_client"
PASSWORD = "ENVHUB_WEB_PASSWORD"
PASSWORD_CHARS_MIN = 8
BACKLOG = 64  # connections that wait, also while the process is started again
RESTART_S = 3.0  # before another process is started
LOG_LINES_MAX = 500  # which a process that is started gets
PIPE_BYTES = 1 << 20
OUTPUT_BYTES_MAX = 4096  # in one event

_BOOT = "import sys; sys.path[:] = filter(None, sys.path); from envhub_server.web.page import main; main(sys.argv[1:])"


class WebSettings(msgspec.Struct, frozen=True):
    """Settings of the process, besides the descriptor that it listens at."""

    hub: str  # the hub's address
    name: str
    access: WebAccess
    replays: str  # the folder of the hub's replays; empty for none
    films: str


class WebProcess:
    """The process of the page; ``url`` is where a browser finds it."""

    def __init__(self, config: HubConfig) -> None:
        """Listen at the address of the page; raises ``OptionError``."""
        if missing := [name for name in PACKAGES if find_spec(name) is None]:
            text = f"--web needs {', '.join(missing)}, which cannot be imported"
            raise OptionError(f'{text}: run `pip install "envhub-rl[web]"`')
        wanted, passwords, query = address.parse_bind(f"tcp://{config.web}"), _passwords(config), ""
        if not passwords and not wanted.is_loopback:  # with a proxy, too: others reach the port without it
            raise OptionError(
                f"--web {config.web} can be reached from other machines: give a password by --web-password-file FILE "
                f"or {PASSWORD}, or serve at 127.0.0.1 and have a reverse proxy there ask for one (--web-proxy ORIGIN)"
            )
        if not passwords and not config.web_proxy:
            passwords = [(secrets.token_hex(24), ADMIN)]
            query = f"?{urlencode({'token': passwords[0][0]})}"
        try:
            self._listener = listening(wanted, BACKLOG)
        except OSError as error:
            why = (error.strerror or str(error)).partition(" (")[0]
            raise OptionError(f"--web {config.web}: {why}; choose another address") from error
        self.port = self._listener.getsockname()[1]
        self.url = config.web_proxy or f"http://{wanted.host}:{self.port}/{query}"
        # Cookies hold as long as the hub runs.
        self._access = WebAccess(passwords, secrets.token_hex(32), self.port, config.web_proxy, wanted.is_loopback)
        self._config = config
        self._lines: deque[bytes] = deque(maxlen=LOG_LINES_MAX)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: NonblockingWriter | None = None
        hub_log.copy_to(self._on_line)

    def reached(self, config: HubConfig) -> HubConfig:
        """The configuration with an ipc address, by which the page acts as the hub's own user."""
        if any(bind.startswith("ipc:") for bind in config.bind):
            return config
        return replace(config, bind=(*config.bind, f"ipc://{address.runtime_folder()}/web-{self.port}.sock"))

    def start(self, hub: str, children: Supervisor) -> None:
        """Start the process in this thread, which must not end before the hub; ``hub`` is the hub's ipc address."""
        config = self._config
        replays, films = (str(each.absolute()) if each else "" for each in (config.replays, config.web_films))
        settings = WebSettings(hub, config.name_of_hub, self._access, replays, films)
        self._settings = msgspec.json.encode(settings) + b"\n"
        self._loop, self._children = children.loop, children
        self._start()

    def _start(self) -> None:
        environ = {**address.environment(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environ.pop(PASSWORD, None)
        arguments = [sys.executable, "-c", _BOOT, str(os.getpid()), str(self._listener.fileno())]
        passed, pipe = [self._listener.fileno()], subprocess.PIPE
        try:
            with blocked():  # the hub says when to end
                process = subprocess.Popen(
                    arguments, 0, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=environ, pass_fds=passed
                )
        except OSError as error:
            self._start_again(f"it cannot be started: {error}")
            return
        assert process.stdin is not None and process.stdout is not None
        self._process, self._output = process, process.stdout
        self._children.orphan_reaper.spared.add(process.pid)
        with contextlib.suppress(OSError):  # the user has too many pipes: then it begins with fewer lines
            fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._writer = NonblockingWriter(process.stdin.fileno())
        self._writer.write(self._settings + b"".join(self._lines))
        self._loop.poller.register(self._output.fileno(), self.on_ready)

    def on_ready(self, descriptor: int) -> None:
        """Log what the process printed, such as the traceback of a bug; it has ended once nothing more can come."""
        if output := os.read(descriptor, OUTPUT_BYTES_MAX):
            # Event: The process of the web page printed this, as where a request failed.
            log.warning("web_output", text=output.decode(errors="backslashreplace").strip())
            return
        self._start_again(f"its status was {self._end()}")

    def _start_again(self, why: str) -> None:
        # Event: The process of the web page has ended; another is started soon. Sessions notice nothing.
        log.error("web_ended", why=why)
        self._loop.schedule.set(self._start, self._loop.clock.now_s() + RESTART_S)

    def _on_line(self, line: bytes) -> None:
        self._lines.append(line)
        if self._writer is not None:
            self._writer.write(line)

    def _end(self) -> int | None:
        """Kill the process, if there is one; returns its status."""
        process, self._process, self._writer = self._process, None, None
        if process is None:
            return None
        self._loop.poller.unregister(self._output.fileno())
        with process:  # which closes its pipes
            process.kill()
        self._children.orphan_reaper.spared.discard(process.pid)
        return process.returncode

    def close(self) -> None:
        hub_log.copy_to(None)
        self._end()
        self._listener.close()


def _passwords(config: HubConfig) -> list[tuple[str, str]]:
    """Passwords with their roles: in a file that of those who act, and in its second line that of those who look."""
    text = os.environ.get(PASSWORD, "")
    if config.web_password_file is not None:
        try:
            text = address.read_private(config.web_password_file) or "empty"
        except KeysError as error:
            raise OptionError(f"--web-password-file: {error}") from error
    passwords = [line.strip() for line in text.splitlines()][:2]
    if any(len(each) < PASSWORD_CHARS_MIN for each in passwords) or len({*passwords}) < len(passwords):
        raise OptionError(f"passwords of the web page differ, and have at least {PASSWORD_CHARS_MIN} characters")
    return [*zip(passwords, (ADMIN, VIEWER), strict=False)]
