"""A connection to a hub: the DEALER socket around a ``ClientProtocol``.

One connection carries one request at a time and at most one session. It reconnects by itself; ``HubLost`` is raised
only on proof that the hub is gone, or after it was out of reach for too long.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from io import FileIO
from operator import attrgetter
from typing import Any, NoReturn

import zmq

import envhub
from envhub import errors
from envhub.protocol import prelude as protocol
from envhub.protocol.client import ClientProtocol, Reply
from envhub.protocol.messages import Collect, Failure, Hello, Op, Welcome
from envhub.secret import Secret
from envhub.transport import address as envhub_address
from envhub.transport import sockets
from envhub.transport.socket_owner import user_text
from envhub_client.connection import hub_probes, keepalive, known_hubs
from envhub_client.connection.broken_handshakes import BrokenHandshakes
from envhub_client.connection.failures import raise_failure
from envhub_client.connection.keepalive import TEND_S
from envhub_client.connection.local_sockets import KEY_OR_OWN_HUB, PROBE_S, LocalSockets, OwnHub
from envhub_client.connection.making_line import MakingLine

CONNECT_TIMEOUT_S = 10.0
# It must never fill up: libzmq (4.3.5) aborts at a heartbeat of a connection that has ended while its queue was full.
# So it has no limit, and is emptied twice a second; sockets at which more than so many messages wait that nobody has
# asked for are replaced.
RECEIVE_QUEUE_MESSAGES_MAX = 0
UNASKED_MESSAGES_MAX = 1000
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, HEARTBEAT_TTL_MS = 1000, 2000, 4000
RECONNECT_MS, RECONNECT_MAX_MS = 20, 500

_BUFFER = attrgetter("buffer")
_POLLIN = int(zmq.POLLIN)  # a plain number, as in ``envhub.transport.sockets``
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_MONITORED = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _REFUSALS
# Rows of broken handshakes after which a hub was there. One that comes back behind a forwarder is there after one row.
PROBES = 2

_Lock: Any = type(threading.RLock())

# The context and the sockets of each connection that is not closed. Of a reference cycle, the garbage collector may
# take a context before its sockets, for which the context waits; so these are never part of such a cycle.
_UNCLOSED: dict[int, list[Any]] = {}
_numbers = itertools.count()  # of connections

logger = logging.getLogger("envhub")


class _User(_Lock):  # type: ignore[misc]
    """A lock, held by the thread that uses a connection, which may nest its uses; another thread is refused.

    Attributes:
        closed: whether the connection is closed, or was begun to be: an interrupt may have left some of it open.
    """

    def __init__(self, address: str) -> None:
        super().__init__()  # for locks that are written in Python, as gevent's are
        self.closed = False
        self._address = address
        self._pid = os.getpid()
        self._kept_alive = threading.Lock()  # held while the keep-alive thread is using the connection, for an instant

    def check(self) -> None:
        """Check that there is a connection to use.

        Raises:
            LocalProtocolError: the connection is closed.
            Forked: it belongs to the process that this one was forked from.
        """
        if self.closed:
            raise errors.LocalProtocolError(f"this connection to the hub at {self._address} is closed")
        if os.getpid() != self._pid:
            raise errors.Forked("this connection was made before a fork; connect again in the child")

    def __enter__(self) -> None:
        if self.closed or os.getpid() != self._pid:
            self.check()
        if not self.acquire(blocking=False):
            self.take()

    def take(self) -> None:
        """Use the connection until ``release``, even if it is closed.

        Raises:
            ConnectionInUse: another thread uses it.
        """
        if not self.acquire(blocking=False):
            with self._kept_alive:
                if not self.acquire(blocking=False):
                    text = "another thread is using this connection; give each thread a vector env of its own"
                    raise errors.ConnectionInUse(text)

    def while_idle(self, work: Callable[[], None]) -> None:
        """Call ``work``, unless a thread is using the connection; a thread that is about to use it waits."""
        with self._kept_alive:
            if self.acquire(blocking=False):
                try:
                    work()
                finally:
                    self.release()


class Connection:
    """One DEALER connection.

    Attributes:
        protocol: what is known of the requests and of the hub; only this class changes it.
        welcome: the hub's description of itself.
        sent_ns: when the last request began to be sent, on the monotonic clock.
        heard_ns: when the last message arrived.
        tend_ns: when ``tend`` is due, on the monotonic clock.
        local_sockets: the hub's Unix sockets, where its address is of ipc.
        making_line: shows how far a making is, until its caller ends it.
        in_use: for ``with``: use the connection in this thread alone. Entering it raises ``LocalProtocolError`` where
            the connection is closed, ``ConnectionInUse`` where another thread uses it, and ``Forked`` in a child.
    """

    def __init__(
        self,
        address: str | Secret[str],
        token: bytes = protocol.NO_SESSION,
        timeout: float = CONNECT_TIMEOUT_S,
        own: OwnHub | None = None,
        reconnect_timeout: float = protocol.RECONNECT_S,
    ) -> None:
        """Connect to an address, or the hub of a name, within ``timeout`` seconds, and say hello.

        ``token`` is of the session that it is to carry. ``own`` is this program's own hub, if it is that. While a
        request is pending, the hub may be out of reach for ``reconnect_timeout`` seconds.

        Raises:
            AddressError: not an address, nor the name of a hub.
            AccessDenied: the hub does not let this client's key in, or none without one.
            ValueError: ``timeout`` is not positive and finite.
            HubUnreachable: no hub answered in time.
            VersionMismatch: it speaks another protocol version.
        """
        self._given: str | Secret[str] = envhub_address.guarded(address)
        self._target = known_hubs.resolve(self._given)
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
        self.address = self._target.text
        self._denied = ""  # why the hub does not let this client in
        self._broken_handshakes = BrokenHandshakes(sockets.HANDSHAKE_MS / 2000)
        self._probes = 0  # after rows of broken handshakes, that have found a hub which waits for a hello
        self._pid = os.getpid()
        self._pidfd: FileIO | None = None  # of the hub's process, if it is this program's own
        self.local_sockets: LocalSockets | None = None
        self._warned = False
        self.making_line = MakingLine()
        self._tried = f"for {timeout:g} s"  # how long a hub that is out of reach is tried, for messages
        self.sent_ns = self.heard_ns = self.tend_ns = 0
        self._frame_bytes_max = protocol.FRAME_BYTES_MAX
        self._closers: list[Callable[[], None]] = []
        # Whether every message that was begun at the sockets, in or out, was finished, and no other key is to be used.
        self._whole = True
        self._number = next(_numbers)
        self._socket: Any = None
        self._monitor: Any = None
        self._epoll: Any = None
        self.protocol = ClientProtocol(token, reconnect_timeout)
        self._context = zmq.Context()
        self.in_use = _User(self.address)
        try:
            if own is not None:
                self._pidfd = FileIO(os.dup(own.pidfd))  # is closed also where an interrupt drops the connection
            if self._target.is_ipc:
                self.local_sockets = LocalSockets(self._target.path, own)
            self._open()
            self.welcome: Welcome = self._hello(timeout)
            self._tried = f"for reconnect_timeout={reconnect_timeout:g} s"
            self._frame_bytes_max = self.welcome.limits.get("message_bytes_max", protocol.FRAME_BYTES_MAX)
            keepalive.keep_alive.add(self)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        # Not IMMEDIATE: with it, the hub's last messages are thrown away when its end of the connection closes.
        limit = RECEIVE_QUEUE_MESSAGES_MAX
        self._socket = dealer = sockets.open_socket(self._context, zmq.DEALER, protocol.FRAME_BYTES_MAX, limit)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        dealer.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TTL_MS)
        dealer.setsockopt(zmq.LINGER, 0)
        sockets.choose_family(dealer, self._target)
        if self._target.keys is not None:
            sockets.present_keys(dealer, self._target.keys)
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._monitor = sockets.open_monitor(dealer, _MONITORED)
        _UNCLOSED[self._number] = [self._context, dealer, self._monitor]
        self._epoll = select.epoll()
        self._poll = [(dealer, _POLLIN)]
        self._descriptors = dealer.FD, self._monitor.FD
        for descriptor in self._descriptors:
            self._epoll.register(descriptor, select.EPOLLIN)
        if self._pidfd is not None:
            self._epoll.register(self._pidfd, select.EPOLLIN)
        try:
            dealer.connect(f"ipc://{self.local_sockets.place()}" if self.local_sockets is not None else self.address)
        except zmq.ZMQError as error:
            raise errors.AddressError(f"{self.address} is no address to connect to: {error}") from error
        self._on_monitor()  # libzmq signals only what comes after the socket was found to be empty

    def _hello(self, timeout: float) -> Welcome:
        try:
            reply = self.ask(Op.HELLO, Hello(client=envhub.__version__), timeout=timeout)
        except (errors.HubTimeout, errors.HubLost) as error:
            hint = "is `envhub serve --bind` running there, is the port right, does a firewall stand between?"
            if self.local_sockets is not None:
                hint = self.local_sockets.why_silent()
            elif why := self._why_unresolved():
                hint = f"the host {self._target.host!r} cannot be resolved here ({why}): is its name right?"
            elif self._broken_handshakes.any and self._target.keys is not None:
                hint = "it accepts connections and does not go on: is it stopped or overloaded, or a forwarder without "
                hint += "its hub, or a hub with another key than this address says?"
            raise errors.HubUnreachable(f"no hub answered at {self.address} within {timeout:g} s: {hint}") from error
        assert isinstance(reply.message, Welcome)
        return reply.message

    def _why_unresolved(self) -> str:
        """Why the host has no address; empty if it has one."""
        try:
            socket.getaddrinfo(self._target.host.strip("[]"), self._target.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # a label of a name may be too long for IDNA
            return getattr(error, "strerror", None) or str(error)
        return ""

    # --- requests ---------------------------------------------------------------------------------------------------

    def send(self, op: Op, message: Any, frames: Sequence[Any] = (), keep: bool = False) -> None:
        """Begin a request; ``wait`` for its reply. The frames must not change until then.

        With ``keep``, an interrupt meanwhile leaves it pending: the hub may have it, or is sent it once more.

        Raises:
            RequestRefused: it is larger than what the hub accepts; nothing was sent.
            LocalProtocolError: a request is pending, or another thread is using the connection.
        """
        with self.in_use:
            if (pending := self.protocol.pending) is not None:
                raise self._busy(pending)
            try:
                self.sent_ns = time.monotonic_ns()
                now_s = self.sent_ns / 1e9
                if self.protocol.loss(now_s):
                    self._check_hub(now_s)
                sent = self.protocol.request(op, message, frames, now_s)
                if (nbytes := max(map(len, sent))) > self._frame_bytes_max:
                    limit = f"message_bytes_max={self._frame_bytes_max} of the hub at {self.address}"
                    raise errors.RequestRefused(f"a {op.name} request of {nbytes} bytes is more than {limit}")
                if not self.protocol.held:
                    self._send(sent)
            except BaseException as error:
                if not keep or isinstance(error, Exception):
                    self.give_up()
                raise

    def _busy(self, pending: Op) -> errors.LocalProtocolError:
        return errors.LocalProtocolError(f"a {pending.name} is pending at the hub at {self.address}")

    def synchronize(self) -> None:
        """Give up what is pending, and wait until the hub is done with all that it was asked for in this session.

        Raises:
            EnvHubError: the session has failed or ended, or the hub is lost.
        """
        self.give_up()
        # Once the hub has answered a request, it begins none of a lower number, however late that comes.
        self.ask(Op.COLLECT, Collect([]))

    def give_up(self) -> None:
        """Forget the pending request, if there is one; its reply is dropped should it come."""
        self.in_use.take()
        try:
            self.protocol.give_up()
        finally:
            self.in_use.release()

    def wait(self, timeout: float | None = None) -> Reply:
        """The pending request's reply, a failure included; until the next request, it can be had again.

        Raises:
            HubTimeout: it did not come within ``timeout`` seconds; call again to go on waiting.
            HubLost: the hub is gone.
            LocalProtocolError: no request is pending, or another thread is using the connection.
        """
        with self.in_use:
            return self.protocol.answer or self._await(timeout)

    def _await(self, timeout: float | None) -> Reply:
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while True:
            if self.protocol.pending is None:  # the program gave it up, if not before then in a signal handler
                raise errors.LocalProtocolError(f"no request is pending at the hub at {self.address}")
            now_s = time.monotonic()
            wait_s = self.protocol.next_tick_s(now_s)
            if deadline_s is not None:
                wait_s = min(wait_s, max(0.0, deadline_s - now_s))
            if (reply := self._hear(wait_s)) is not None:
                return reply
            self._send_due()
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise errors.HubTimeout(
                    f"no reply from the hub at {self.address} within {timeout:g} s; it can be waited for again"
                )

    def _send_due(self) -> None:
        """Send what is due, if the hub is still there; errors as for ``_check_hub``."""
        now_s = time.monotonic()
        self._check_hub(now_s)
        self._say(now_s)

    def _hear(self, wait_s: float) -> Reply | None:
        """Receive what has come, or comes within ``wait_s`` seconds; returns the pending reply, if it is among it."""
        if not self._whole:
            self._replace_torn_sockets()
        ours, monitors = self._descriptors
        try:
            # Asked before each wait: a send, too, may take in what libzmq has signalled by the socket's descriptor.
            arrived = bool(zmq.zmq_poll(self._poll, 0))
            ready = () if arrived else self._epoll.poll(wait_s)
        except (OSError, ValueError, zmq.ZMQError) as error:
            if not self._context.closed:
                raise
            text = f"this connection to the hub at {self.address} was closed meanwhile"
            raise errors.LocalProtocolError(text) from error
        for descriptor, _ in ready:
            if descriptor == ours:
                arrived = True
            elif descriptor == monitors:
                self._on_monitor()
            else:
                self.protocol.lost("its process has ended")
        return self._receive() if arrived and self._whole else None

    def _say(self, now_s: float) -> None:
        for frames in self.protocol.tick(now_s):
            self._send(frames)
        self._log_trouble(now_s)

    def tend(self) -> None:
        """Keep up the connection while no thread waits on it: reconnect, warn, tell the hub whose session it carries.

        A lane that does not wait on the connection calls this every ``TEND_S``, when ``tend_ns`` has passed.

        Raises:
            HubLost: the hub is gone.
        """
        with self.in_use:
            if self._hear(0) is None:
                self._send_due()
            self.tend_ns = time.monotonic_ns() + int(TEND_S * 1e9)

    def keep_alive(self) -> None:
        """Keep up the connection while its program is busy elsewhere; errors are raised at its next use."""
        if os.getpid() == self._pid:
            self.in_use.while_idle(self._keep_alive)

    def _keep_alive(self) -> None:
        if self._context.closed:
            return
        try:
            self._hear(0)
        except errors.RemoteProtocolError as error:  # the hub is asked again for what this was to be
            logger.warning("a message from the hub at %s was thrown away: %s", self.address, error)
            self._whole = False  # with all that may have come after it
        now_s = time.monotonic()
        if not self.protocol.loss(now_s):
            self._say(now_s)

    def lose(self, why: str) -> NoReturn:
        """Know that the hub has ended, from somewhere else than this connection.

        Raises:
            HubLost: always, and by whatever is asked from now on.
        """
        self.protocol.lost(why)
        raise errors.HubLost(f"the hub at {self.address} is lost: {why}")

    def _check_hub(self, now_s: float) -> None:
        """Check that the hub is still there.

        Raises:
            HubLost: it is gone.
            AccessDenied: it does not let this client in (any more).
            SessionLost: it has ended the session.
            RequestRefused: it ends each connection on which the pending request is sent; the request is given up.
        """
        if loss := self.protocol.loss(now_s):
            self.protocol.give_up()
            if self._denied:
                raise errors.AccessDenied(self._denied)
            if self.protocol.goodbye is not None:
                raise_failure(self.protocol.goodbye, self.address)
            raise errors.HubLost(f"the hub at {self.address} is lost: {loss}")
        if (op := self.protocol.cut_off) is not None:
            self.protocol.give_up()
            raise errors.RequestRefused(
                f"{protocol.CUTS_MAX} connections to the hub at {self.address} ended, each after the {op.name} request "
                "was sent on it; the request was given up. Look for connection_ended in the hub's log; if it is not "
                "there, something between this client and the hub ends them"
            )

    def _log_trouble(self, now_s: float) -> None:
        trouble = self.protocol.trouble(now_s)
        if bool(trouble) is self._warned:
            return
        self._warned = bool(trouble)
        if trouble:
            tried = f"for {protocol.REFUSED_S:g} s" if self.protocol.is_refused else self._tried
            logger.warning("the hub at %s is out of reach: %s; it is tried %s", self.address, trouble, tried)
        else:
            logger.warning("the hub at %s is within reach again", self.address)

    def ask(self, op: Op, message: Any, frames: Sequence[Any] = (), timeout: float | None = None) -> Reply:
        """Send a request and wait for its reply; a failure is raised.

        Raises:
            HubTimeout: no reply within ``timeout`` seconds; the request is given up, as at an interrupt.
            EnvHubError: whatever the failure says, see ``envhub_client.connection.failures``.
        """
        with self.in_use:
            if (pending := self.protocol.pending) is not None:
                raise self._busy(pending)
            try:  # around all of it: an interrupt must not leave the request pending
                self.send(op, message, frames)
                reply = self.wait(timeout)
            except errors.HubTimeout:
                self.give_up()
                text = f"the hub at {self.address} did not answer {op.name} within {timeout:g} s"
                raise errors.HubTimeout(text) from None  # the cause says that it can be waited for again
            except BaseException:
                self.give_up()
                raise
        if isinstance(reply.message, Failure):
            raise_failure(reply.message, self.address)
        return reply

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A connection is neither pickled nor copied, nor is what holds one.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"a connection to a hub ({self.address}) cannot be pickled or copied; connect where it is used")

    def on_close(self, closer: Callable[[], None]) -> None:
        """Have this called when the connection is closed, in the process that it belongs to."""
        self._closers.append(closer)

    def close(self) -> None:
        """Close the sockets; in a forked child, where they are not ours, do nothing."""
        if os.getpid() != self._pid or self._context.closed:
            return
        keepalive.keep_alive.drop(self)
        self.in_use.take()
        try:
            self.in_use.closed = True
            for closer in self._closers:
                closer()
            if self._pidfd is not None:
                self._pidfd.close()
            self._close_sockets()
            self._context.destroy(linger=0)  # what an interrupt has left open before is closed at the next attempt
            if self.local_sockets is not None:
                self.local_sockets.close()
        finally:
            self.in_use.release()
        _UNCLOSED.pop(self._number, None)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close a connection that nobody can use any more."""
        if is_finalizing() or not hasattr(self, "in_use"):
            return
        try:
            self.close()
        except BaseException:  # an interrupt; nobody else is left to close it
            self.close()
            raise

    # --- the socket -------------------------------------------------------------------------------------------------

    # An exception between two frames of a message would have the next message taken for the rest of this one. So each
    # is noted before it begins, and sockets at which one was not finished are replaced before they are used again.

    def _send(self, frames: Sequence[Any]) -> None:
        if not self._whole:
            self._replace_torn_sockets()
        self._whole = False
        try:
            sockets.send(self._socket, frames)
        except zmq.Again:
            # Not connected just now. The protocol asks after the request once it is, and sends it again.
            logger.debug("a request to %s waits for the connection", self.address)
        self._whole = True

    def _replace_torn_sockets(self) -> None:
        self._close_sockets()
        self._open()
        self._whole = True

    def _close_sockets(self) -> None:
        if self._socket is not None and not self._socket.closed:
            self._socket.monitor(None, 0)
            self._socket.close(linger=0)
        if self._monitor is not None:
            self._monitor.close()
        if self._epoll is not None:
            self._epoll.close()

    def _receive(self) -> Reply | None:
        for _ in range(UNASKED_MESSAGES_MAX):
            self._whole = False
            try:
                frames = sockets.receive(self._socket, protocol.FRAMES_MAX)
                if frames[-1].more:
                    raise errors.RemoteProtocolError(f"a message of more than {protocol.FRAMES_MAX} frames")
            except zmq.Again:
                self._whole = True
                return None
            self._whole = True
            self.heard_ns = time.monotonic_ns()
            reply = self.protocol.receive([*map(_BUFFER, frames)], self.heard_ns / 1e9)
            if self.protocol.progress is not None or self.protocol.notices:
                self._log_progress()
            if self._warned:
                self._log_trouble(self.heard_ns / 1e9)
            if reply is not None:
                return reply
        self._whole = False  # see ``UNASKED_MESSAGES_MAX``
        return None

    def _log_progress(self) -> None:
        if (progress := self.protocol.progress) is not None:
            self.protocol.progress = None
            counts = progress.phase, progress.built, progress.num_envs
            doing = f"importing {progress.importing}" if progress.importing else progress.starting
            doing = f" ({errors.printable(doing)})" if doing else ""
            text = "the hub at %s is %s: %d of %d envs stand%s"
            logger.info(text, self.address, *counts, doing, extra={"progress": counts})
            waited_s = (self.heard_ns - self.sent_ns) / 1e9
            self.making_line.show(f"{progress.built} of {progress.num_envs} envs made{doing}", waited_s)
        while self.protocol.notices:
            logger.warning("the hub at %s: %s", self.address, self.protocol.notices.pop(0))

    def _on_monitor(self) -> None:
        closed = silent = renewed = False
        self._whole = False  # libzmq signals nothing more of a socket that was read and not emptied
        while self._monitor.poll(0):
            try:
                event, value = sockets.read_monitor(self._monitor, zmq.NOBLOCK)
            except zmq.Again:  # a signal handler that used the connection has taken it
                continue
            closed = event == zmq.EVENT_CLOSED
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._broken_handshakes.succeeded()
                self._probes = 0
                self.protocol.connected()
            elif event == zmq.EVENT_CONNECTED:
                self._broken_handshakes.begun()
            elif event == zmq.EVENT_CLOSED:
                self._broken_handshakes.interrupted()
            elif event & _REFUSALS:
                silent = True  # as a hub is that is stopped
                renewed = renewed or self._on_refusal(event, value)
            elif event == zmq.EVENT_DISCONNECTED:
                self.protocol.disconnected(time.monotonic())
        self._whole = not renewed
        self._broken_handshakes.read(time.monotonic())
        if not closed and not silent:
            return
        if self.local_sockets is not None and self.local_sockets.has_moved() and not zmq.zmq_poll(self._poll, 0):
            self._whole = False  # nothing of the former hub is left to be read: connect to the one at its path
        elif closed and self._refuses():  # once, however many attempts have failed meanwhile
            self.protocol.refused(time.monotonic())

    def _on_refusal(self, event: int, value: int) -> bool:
        """Know that the hub does not let this client in, if that is what a handshake that failed means.

        Returns:
            Whether there is another key by now, with which new sockets are to try.
        """
        keys, why = self._target.keys, ""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            if keys is not None and self._take_new_key():
                return True
            why = self._why_unknown()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            why = self._why_mismatched()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._broken_handshakes.failed(value, time.monotonic()):
            why = self._why_broken()
        if why:
            self._denied = f"the hub at {self.address} {why}"
            self.protocol.lost("it does not let this client in")
        return False

    def _why_unknown(self) -> str:
        if self._target.keys is None:
            return "lets in its own user only, and not while others are connected; serve with --keys for others"
        why, ask = "it was removed, or never added", "ask its operator for `envhub keys add`"
        if (kept := known_hubs.kept_key(self._target)) is None:
            return f"does not know this key: {why}; {ask}"
        return f"does not know this key, which is {kept.place}: {why}; {ask}, and {kept.remedy}"

    def _why_mismatched(self) -> str:
        kept = known_hubs.kept_key(self._target)
        if self._target.keys is not None:
            remedy = f"; the one for it is {kept.place}: {kept.remedy}" if kept is not None else ""
            return f"takes no keys: connect to its tcp:// address{remedy}"
        if kept is None or not kept.name:
            return "lets nobody in without a key: connect with the envhub:// address that its operator gives you"
        return f"lets nobody in without a key, and one for it is {kept.place}: connect by hub={kept.name!r}"

    def _why_broken(self) -> str:
        """Why the hub has ended a row of handshakes; empty while it is not proved, see ``broken_handshakes``."""
        if self._target.keys is None:
            user = hub_probes.other_user(self._target)
            text = (
                f"belongs to {user_text(user)}, and without keys it serves that user alone" if user is not None else ""
            )
            return text and f"{text}: {KEY_OR_OWN_HUB}"
        self._probes = self._probes + 1 if hub_probes.waits_for_hello(self._target) else 0
        if self._probes < PROBES:
            return ""
        why, ask = "has another key than this address says", "ask its operator for the address"
        if (kept := known_hubs.kept_key(self._target)) is None:
            return f"{why}: {ask}"
        return f"{why}, which is {kept.place}: {ask}, and {kept.remedy}"

    def _take_new_key(self) -> bool:
        """Use the key that this user keeps for the hub of this name by now; returns whether it is another one."""
        try:
            target = known_hubs.kept_now(self._given)
        except (errors.AddressError, errors.KeysError):
            return False
        if target is None or target.text != self._target.text or target.keys in (None, self._target.keys):
            return False
        self._target = target
        return True

    def _refuses(self) -> bool:
        """Whether nothing listens at the address, which proves a loss; that the network does not get there does not."""
        if self.local_sockets is not None:
            return self.local_sockets.refuses()
        parsed = self._target
        try:
            socket.create_connection((parsed.host.strip("[]"), parsed.port), PROBE_S).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False
