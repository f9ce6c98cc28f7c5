"""The hub's side of its proxy, the process that clients of its tcp addresses connect to (``proxy_process``)."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

from envhub.process import blocked
from envhub.transport.address import environment
from envhub_server.log import Logger
from envhub_server.network import connections, proxy_page
from envhub_server.network.proxy_page import EndedHandshake, PageEntry
from envhub_server.processes.supervisor import Supervisor

FRAMES_SHARE = 2  # of a message's, which a client may have sent and the hub has not read; some are heartbeats
CLOSE_S = 2.5  # for clients to read the last replies, and for the process to end
RESTART_S = 1.0  # from one start to the next
REPORT_BYTES_MAX = 256

_BOOT = "import sys; sys.path[:] = filter(None, sys.path); from envhub_server.network.proxy_process import main; "

log = Logger("envhub.hub")


class ProxyHandle:
    """The proxy of a hub; one that ends is started again, at the same addresses.

    Attributes:
        pidfd: readable once the process has ended; negative while there is none.
        reporting: readable where ``reports`` has some; negative while there is no process.
        restart_s: when to call ``check`` next.
    """

    def __init__(self, children: Supervisor, hub: int, curve: bool, frames_max: int, bytes_max: int) -> None:
        """Make the handle of a proxy that is not started yet.

        Args:
            children: which is told of the process.
            hub: a descriptor of the socket of the hub's own, which the handle closes.
            curve: whether CURVE encrypts what clients send.
            frames_max: of one message.
            bytes_max: that a client may have sent and the hub has not read.
        """
        self._children, self._hub = children, hub
        self._options = str(int(curve)), str(FRAMES_SHARE * frames_max), str(bytes_max)
        self._listeners: Sequence[socket.socket] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.pidfd = self.reporting = -1
        self._name, self._words = b"", memoryview(b"")
        self._started_s = -math.inf
        self.restart_s = math.inf

    def start(self, listeners: Sequence[socket.socket], now_s: float) -> None:
        self._listeners = listeners
        self._started_s = now_s
        name, page = f"envhub-proxy-{secrets.token_hex(8)}", proxy_page.make_page()
        control = None
        try:
            words = proxy_page.words_of(page)
            self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control.setblocking(False)
            passed = [control.fileno(), self._hub, page, *(each.fileno() for each in listeners)]
            arguments = [str(os.getpid()), name, *self._options, *map(str, passed)]
            with blocked():  # the hub says when to end
                self._process = subprocess.Popen(
                    [sys.executable, "-c", f"{_BOOT} main(sys.argv[1:])", *arguments],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    env={**environment(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            self._children.orphan_reaper.spare(self._process.pid)
            self.pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            self._end()
            raise
        finally:
            os.close(page)
            if control is not None:
                control.close()
        self._name, self._words = b"\0" + name.encode() + b"/", words
        self.reporting = self._control.fileno()

    def reports(self) -> Iterator[EndedHandshake]:
        """The connections that have ended in their handshakes since the last call."""
        if self._control is None:
            return
        with contextlib.suppress(BlockingIOError):
            while message := self._control.recv(REPORT_BYTES_MAX):
                yield EndedHandshake.unpack(message)
            self.reporting = -1

    def entry(self, descriptor: int) -> PageEntry | None:
        try:
            with connections.copied(descriptor) as connection:
                name = connection.getpeername() if connection.family == socket.AF_UNIX else b""
        except OSError:
            return None
        if not isinstance(name, bytes) or not name.startswith(self._name):
            return None
        slot, number, _, host = name[len(self._name) :].decode().split("/", 3)
        return PageEntry(self._words, int(slot), int(number), host)

    def ended(self, now_s: float) -> None:
        status = None if self._process is None else self._process.wait()
        self._end()
        self.restart_s = max(now_s, self._started_s + RESTART_S)
        # Event: The process that accepts tcp connections has ended; another is started.
        log.error("proxy_ended", status=status, note="its clients connect again to the next one")

    def check(self, now_s: float) -> None:
        if self._process is None:
            self.restart_s = math.inf
            try:
                self.start(self._listeners, now_s)
            except OSError as error:
                self.restart_s = now_s + RESTART_S
                log.error("proxy_ended", why=f"another cannot be started: {error}")

    def _end(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process is not None:
            self._children.orphan_reaper.reaped(self._process.pid)
        if self._control is not None:
            self._control.close()
        self._process, self._control, self.pidfd, self.reporting = None, None, -1, -1

    def close(self) -> None:
        """Have it pass on what the hub has sent, and end; the hub's own socket must be closed before."""
        if self._process is not None and self._control is not None:
            self._control.close()
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                log.warning("proxy_ended", why=f"it has not ended within {CLOSE_S:g} s, and is killed")
        self._end()
        os.close(self._hub)
