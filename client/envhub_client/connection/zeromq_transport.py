"""Messages over ZeroMQ: a DEALER socket, which libzmq connects again by itself, and what its monitor says of that."""

from __future__ import annotations

import errno
import logging
import math
import os
import select
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from io import FileIO
from typing import Any

import zmq

from envhub import errors
from envhub.protocol import prelude
from envhub.protocol.client import ClientProtocol, Reply
from envhub.secret import Secret
from envhub.transport import address as envhub_address
from envhub.transport import sockets
from envhub.transport.sockets import Context
from envhub_client.connection.failures import OTHERS_CONNECTED, Refusals
from envhub_client.connection.local_sockets import PROBE_S, LocalSockets, OwnHub

# libzmq has room for 1023 sockets otherwise, and reserves 12 bytes for each. A connection has three: its own, its
# monitor, and the monitor's other end.
SOCKETS_MAX = 16383


class ConnectionContext(zmq.Context["zmq.Socket[bytes]"]):
    """The program's context, as one connection sees it: ``destroy`` closes only the sockets of this connection."""

    def term(self) -> None:
        """Close this view; the context itself stays, for other connections."""
        self.closed = True


class SharedContext:
    """The ZeroMQ context of all connections: with an I/O thread for each, steps cost up to twice the CPU time."""

    def __init__(self, inherited: SharedContext | None = None) -> None:
        self._inherited = inherited  # of the parent of a forked child; pyzmq would warn if it was collected
        self._lock = threading.RLock()  # a signal handler may connect while its thread holds the lock
        self._context: Context | None = None

    def view(self) -> ConnectionContext:
        with self._lock:
            if self._context is None:
                context: Context = zmq.Context()
                context.set(zmq.MAX_SOCKETS, min(SOCKETS_MAX, context.get(zmq.SOCKET_LIMIT)))
                self._context = context
            return ConnectionContext(self._context)


shared_context = SharedContext()


def _forked() -> None:
    global shared_context
    shared_context = SharedContext(inherited=shared_context)  # a child has none of the threads of its parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


READABLE = 1  # EPOLLIN, and the same of every system
# Windows' select is not interrupted by Ctrl-C, which Python handles at the end of a turn.
SELECT_S = 0.2


class SelectorWaiter:
    """Waits for descriptors where there is no epoll, as that does, for at most ``SELECT_S``."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def register(self, descriptor: int | FileIO, events: int, /) -> None:
        self._selector.register(descriptor, events)

    def poll(self, timeout_s: float, /) -> Sequence[tuple[int, int]]:
        """The descriptors that are readable, each with its events; none after ``timeout_s`` seconds or earlier."""
        return [(key.fd, events) for key, events in self._selector.select(min(timeout_s, SELECT_S))]

    def close(self) -> None:
        self._selector.close()


if sys.platform == "linux":
    new_waiter = select.epoll  # ``selectors`` takes several times as long for a wait
else:
    new_waiter = SelectorWaiter


# It must never fill up: libzmq (4.3.5) aborts at a heartbeat of a connection that has ended while its queue was full.
# So it has no limit, and is emptied twice a second; sockets at which more than ``UNASKED_MESSAGES_MAX``
# messages wait that were not asked for are replaced.
RECEIVE_QUEUE_MESSAGES_MAX = 0
UNASKED_MESSAGES_MAX = 1000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, HEARTBEAT_TTL_MS = 1000, 2000, 4000
RECONNECT_MS, RECONNECT_MAX_MS = 20, 500
AGAIN_S = 0.5

_POLLIN = int(zmq.POLLIN)  # a plain number, as in ``envhub.transport.sockets``
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_NO_MORE_SOCKETS = (
    "this program has as many sockets or files as it may; close connections that it does not need, or raise its limit "
    "of open files (`ulimit -n`)"
)
_MONITORED = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _REFUSALS

# The sockets of each transport that is not closed, by its view of the context. The garbage collector would close
# the sockets of a reference cycle by their destructors, which warn of it; so these are never part of such a cycle.
_UNCLOSED: dict[Any, list[Any]] = {}

logger = logging.getLogger("envhub")


class ZeroMqTransport:
    """Messages over ZeroMQ, to the hub at an address or of a name."""

    def __init__(self, address: str | Secret[str], own: OwnHub | None = None) -> None:
        self.refusals = Refusals(envhub_address.guarded(address))
        self.address, self.crosses_network = self.refusals.target.text, self.refusals.target.crosses_network
        self.local_sockets: LocalSockets | None = None
        self.received_ns = 0
        self._own = own
        self._pidfd: FileIO | None = None  # of the hub's process, if it is this program's own
        # Whether every message that was begun at the sockets, in or out, was finished, and no other key is to be used.
        self._whole = True
        self._handshaking = False
        self._again_s: float | None = None  # when to connect again: libzmq does not, after what is no handshake
        self._context: Any = None
        self._socket: Any = None
        self._monitor: Any = None
        self._waiter: Any = None

    @property
    def closed(self) -> bool:
        return self._context is not None and bool(self._context.closed)

    def open(self, protocol: ClientProtocol) -> None:
        self._protocol = protocol
        self._context = shared_context.view()
        if self._own is not None:
            self._pidfd = FileIO(os.dup(self._own.pidfd))  # is closed also where an interrupt drops the connection
        if self.refusals.target.is_ipc:
            self.local_sockets = LocalSockets(self.refusals.target.path, self._own)
        self._connect()

    def _connect(self) -> None:
        try:
            self._open_sockets()
        except (OSError, zmq.ZMQError) as error:
            if error.errno != errno.EMFILE:
                raise
            raise errors.HubUnreachable(
                f"no connection to {errors.hub_at(self.address)}: {_NO_MORE_SOCKETS}"
            ) from error
        local = self.local_sockets
        try:
            self._socket.connect(self.address if local is None else f"ipc://{local.path()}")
        except zmq.ZMQError as error:
            raise errors.AddressError(f"{self.address} is no address to connect to: {error}") from error
        self._on_monitor()  # libzmq signals only what comes after the socket was found to be empty

    def _open_sockets(self) -> None:
        # Not IMMEDIATE: with it, the hub's last messages are thrown away when its end of the connection closes.
        limit, target = RECEIVE_QUEUE_MESSAGES_MAX, self.refusals.target
        self._socket = dealer = sockets.open_socket(self._context, zmq.DEALER, prelude.FRAME_BYTES_MAX, limit)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        dealer.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TTL_MS)
        dealer.setsockopt(zmq.LINGER, 0)
        sockets.choose_family(dealer, target)
        if target.keys is not None:
            sockets.present_keys(dealer, target.keys)
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._monitor = sockets.open_monitor(dealer, _MONITORED)
        _UNCLOSED[self._context] = [dealer, self._monitor]
        self._waiter = new_waiter()
        self._poll = [(dealer, _POLLIN)]
        self.descriptors = dealer.FD, self._monitor.FD
        for descriptor in self.descriptors:
            self._waiter.register(descriptor, READABLE)
        if self._pidfd is not None:
            self._waiter.register(self._pidfd, READABLE)

    def advice(self) -> str:
        if self.local_sockets is not None:
            return self.local_sockets.why_silent()
        usual = "is `envhub serve --bind` running there, is the port right, does a firewall stand between?"
        return self._why_unresolved() or self._protocol.obstacle or usual

    def _why_unresolved(self) -> str:
        target = self.refusals.target
        try:
            socket.getaddrinfo(target.host.strip("[]"), target.port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:  # a label of a name may be too long for IDNA
            why = getattr(error, "strerror", None) or str(error)
            return f"the host {target.host!r} cannot be resolved here ({why}): is its name right?"
        except OSError as error:  # of this process, such as too many open files
            return f"this process cannot look up the host {target.host!r}: {error.strerror}"
        return ""

    # An exception between two frames of a message would have the next message taken for the rest of this one. So each
    # is noted before it begins, and sockets at which one was not finished are replaced before they are used again.

    def send(self, frames: Sequence[Any]) -> None:
        if not self._whole:
            self._replace_torn_sockets()
        self._whole = False
        try:
            sockets.send(self._socket, frames)
        except zmq.Again:
            # Not connected just now. The protocol asks after the request once it is, and sends it again.
            logger.debug("a request to %s waits for the connection", self.address)
        self._whole = True

    def receive(self, until_s: float = -math.inf) -> Reply | None:
        """Take in what has arrived, or arrives until then or the next tick; the reply, if that is among it."""
        if self._again_s is not None and time.monotonic() >= self._again_s:
            self._whole = False
        if not self._whole:
            self._replace_torn_sockets()
        try:
            # Asked before each wait: a send, too, may take in what libzmq has signalled by the socket's descriptor.
            if not zmq.zmq_poll(self._poll, 0) and not self._arrives(until_s):
                return None
        except (OSError, ValueError, zmq.ZMQError) as error:
            if not self._context.closed:
                raise
            text = f"this connection to {errors.hub_at(self.address)} was closed meanwhile"
            raise errors.LocalProtocolError(text) from error
        for _ in range(UNASKED_MESSAGES_MAX):
            self._whole = False
            try:
                frames = sockets.receive(self._socket, prelude.FRAMES_MAX)
                if frames[-1].more:
                    raise errors.RemoteProtocolError(f"a message of more than {prelude.FRAMES_MAX} frames")
            except zmq.Again:
                self._whole = True
                return None
            self._whole = True
            self.received_ns = time.monotonic_ns()
            reply = self._protocol.receive([*map(sockets.view, frames)], self.received_ns / 1e9)
            if reply is not None:
                return reply
        self._whole = False  # see ``UNASKED_MESSAGES_MAX``
        return None

    def _arrives(self, until_s: float) -> bool:
        now_s, arrived = time.monotonic(), False
        ours, monitors = self.descriptors
        for descriptor, _ in self._waiter.poll(min(self._protocol.next_tick_s(now_s), max(0.0, until_s - now_s))):
            if descriptor == ours:
                arrived = True
            elif descriptor == monitors:
                self._on_monitor()
            else:
                self._protocol.lost("its process has ended")
        return arrived and self._whole

    def _on_monitor(self) -> None:
        closed = silent = renewed = False
        self._whole = False  # libzmq signals nothing more of a socket that was read and not emptied
        while self._monitor.poll(0):
            try:
                event, value = sockets.read_monitor(self._monitor, zmq.NOBLOCK)
            except zmq.Again:  # a signal handler that used the connection has taken it
                continue
            closed = event == zmq.EVENT_CLOSED
            broken, self._handshaking = self._handshaking, event == zmq.EVENT_CONNECTED
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._protocol.connected()
            elif event == zmq.EVENT_CONNECTED:
                self._protocol.accepted()
            elif event & _REFUSALS:
                silent = True  # as a hub is that is stopped
                renewed = self._on_refusal(event, value) or renewed
            elif event == zmq.EVENT_DISCONNECTED:
                self._protocol.disconnected(time.monotonic())
                if broken:
                    self._again_s = time.monotonic() + AGAIN_S
        self._whole = not renewed
        if not closed and not silent:
            return
        if self.local_sockets is not None and self.local_sockets.has_moved() and not zmq.zmq_poll(self._poll, 0):
            self._whole = False  # nothing of the former hub is left to be read: connect to the one at its path
        elif closed and self._refuses():  # once, however many attempts have failed meanwhile
            self._protocol.refused(time.monotonic())

    def _on_refusal(self, event: int, value: int) -> bool:
        """Note a handshake that failed; returns whether there is another key now, with which to connect again."""
        renewed = False
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self.refusals.target.keys is None:
            self._protocol.obstacle, self._again_s = OTHERS_CONNECTED, time.monotonic() + AGAIN_S
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            renewed = self.refusals.unknown_key()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._protocol.obstacle = self._protocol.obstacle or self.refusals.why_broken()
        elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self.refusals.other_mechanism()
        else:
            self._again_s = time.monotonic() + AGAIN_S
        if self.refusals.denied:
            self._protocol.lost("it does not let this client in")
        return renewed

    def _refuses(self) -> bool:
        """True if nothing listens at the address, which proves a loss; that the network does not get there does not."""
        if self.local_sockets is not None:
            return self.local_sockets.refuses()
        target = self.refusals.target
        try:
            socket.create_connection((target.host.strip("[]"), target.port), PROBE_S).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False

    def reconnect(self) -> None:
        self._whole = False

    def _replace_torn_sockets(self) -> None:
        self._close_sockets()
        self._again_s, self._handshaking = None, False
        self._connect()
        self._whole = True

    def _close_sockets(self) -> None:
        if self._socket is not None and not self._socket.closed:
            self._socket.monitor(None, 0)
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close()
        if self._waiter is not None:
            self._waiter.close()

    def close(self) -> None:
        """Close all of it; again, after an interrupt."""
        if self._pidfd is not None:
            self._pidfd.close()
        self._close_sockets()
        if self._context is not None:
            self._context.destroy(linger=0)  # what an interrupt has left open before is closed at the next attempt
        if self.local_sockets is not None:
            self.local_sockets.close()
        _UNCLOSED.pop(self._context, None)
