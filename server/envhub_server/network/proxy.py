"""The hub's side of its proxy, the process that clients of its tcp addresses connect to (``proxy_process``)."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from msgspec import msgpack

from envhub.process import blocked
from envhub.protocol.prelude import FRAMES_MAX
from envhub.transport.address import environment
from envhub_server.log import log
from envhub_server.network import connections, proxy_page
from envhub_server.network.proxy_page import EndedHandshake, PageEntry
from envhub_server.processes.supervisor import Supervisor

FRAMES_SHARE = 2  # of a message's, which a client may have sent and the hub has not read; some are heartbeats
CLOSE_S = 2.5  # for clients to read the last replies, and for the process to end
RESTART_S = 1.0  # from one start to the next
ENDING_S = 0.5  # for a process that has closed its socket to end
REPORT_BYTES_MAX = 256

_BOOT = "import sys; sys.path[:] = filter(None, sys.path); from envhub_server.network.proxy_process import main; "


class ProxyHandle:
    """The proxy of a hub; one that ends is started again, at the same addresses."""

    def __init__(
        self,
        children: Supervisor,
        on_ended_handshake: Callable[[EndedHandshake], None],
        curve: bool,
        bytes_max: int,
    ) -> None:
        """``children`` is told of the process; ``bytes_max``: that a client may have sent and the hub has not read."""
        self._children, self._loop, self._on_ended_handshake = children, children.loop, on_ended_handshake
        self._options = str(int(curve)), str(FRAMES_SHARE * FRAMES_MAX), str(bytes_max)
        self._listeners: Sequence[socket.socket] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._hub = -1
        self._name, self._words = b"", memoryview(b"")
        self._started_s = -math.inf

    def start(self, listeners: Sequence[socket.socket], hub: int) -> None:
        """Start it for these addresses; ``hub`` is the descriptor of the hub's socket for it. Raises ``OSError``."""
        self._listeners, self._hub = listeners, hub
        self._start()

    def _start(self) -> None:
        self._started_s = self._loop.clock.now_s()
        name, page = f"envhub-proxy-{secrets.token_hex(8)}", proxy_page.make_page()
        control = None
        try:
            words = proxy_page.words_of(page)
            self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._control.setblocking(False)
            passed = [control.fileno(), self._hub, page, *(each.fileno() for each in self._listeners)]
            arguments = [str(os.getpid()), name, *self._options, *map(str, passed)]
            with blocked():  # the hub says when to end
                self._process = subprocess.Popen(
                    [sys.executable, "-c", f"{_BOOT} main(sys.argv[1:])", *arguments],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    env={**environment(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            self._children.orphan_reaper.spared.add(self._process.pid)
        except BaseException:
            self._end()
            raise
        finally:
            os.close(page)
            if control is not None:
                control.close()
        self._name, self._words = b"\0" + name.encode() + b"/", words
        self._loop.poller.register(self._control.fileno(), self.on_ready)

    def on_ready(self, descriptor: int) -> None:
        """Hear of the handshakes that have ended; nothing more comes once the process has ended."""
        assert self._control is not None
        with contextlib.suppress(BlockingIOError):
            while message := self._control.recv(REPORT_BYTES_MAX):
                self._on_ended_handshake(msgpack.decode(message, type=EndedHandshake))
            # Event: The process that accepts tcp connections has ended; another is started.
            log.error("proxy_ended", status=self._end(), note="its clients connect again to the next one")
            self._loop.schedule.set(self._start_again, max(self._loop.clock.now_s(), self._started_s + RESTART_S))

    def _start_again(self) -> None:
        try:
            self._start()
        except OSError as error:
            log.error("proxy_ended", why=f"another cannot be started: {error}")
            self._loop.schedule.set(self._start_again, self._loop.clock.now_s() + RESTART_S)

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

    def _end(self) -> int | None:
        """Kill the process, if there is one; returns its status."""
        process, control, self._process, self._control = self._process, self._control, None, None
        if control is not None:
            self._loop.poller.unregister(control.fileno())
            control.close()
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed the socket, and is about to end
            process.wait(ENDING_S)
        process.kill()
        status = process.wait()
        self._children.orphan_reaper.spared.discard(process.pid)
        return status

    def close(self) -> None:
        """Have it pass on what the hub has sent, and end; the hub's ROUTER must be closed before."""
        if self._process is not None and self._control is not None:
            self._loop.poller.unregister(self._control.fileno())
            self._control.close()
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                log.warning("proxy_ended", why=f"it has not ended within {CLOSE_S:g} s, and is killed")
        self._end()
        if self._hub >= 0:
            os.close(self._hub)
