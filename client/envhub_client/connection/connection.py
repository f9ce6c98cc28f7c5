"""A connection to a hub: requests and replies over a ``ZeroMqTransport``, by the rules of ``ClientProtocol``."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NoReturn, SupportsIndex, cast

import envhub
from envhub import errors
from envhub.protocol import prelude as protocol
from envhub.protocol.client import CUTS_MAX, ClientProtocol, FrameTooLarge, Reply
from envhub.protocol.messages import Collect, Failure, Hello, Op, Welcome
from envhub.protocol.validation import HUB_NAME_CHARS_MAX, MESSAGE_BYTES_MIN, ROWS_MAX
from envhub.secret import Secret
from envhub_client.connection.failures import UserReports, raise_failure
from envhub_client.connection.zeromq_transport import ZeroMqTransport
from envhub_client.deadline import Deadline, no_reply

CONNECT_TIMEOUT_S = 10.0
CHECK_S = 0.5
LOOKED_S = CHECK_S / 2  # since the last look at a connection that is in use; longer than any wait for its descriptors
SUSPECT_S = 1.0  # before the time at which a hub counts as silent, it must have seemed silent already
RECHECK_S = 0.2  # between the first look or refusal by which a hub seems out of reach and one that proves it

logger = logging.getLogger("envhub")


class KeepAlive:
    """A thread that tells the hub whose session a new connection carries, while the program is busy elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # which a thread may hold when the garbage collector closes a connection in it
        self._kept = weakref.WeakValueDictionary[int, Any]()  # connections, each with its ``keep_alive``
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def add(self, kept: object) -> None:
        with self._lock:
            self._kept[id(kept)] = kept
            begun = self._thread is not None and self._thread.is_alive()  # not if an interrupt came before its start
            if not begun and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="envhub-keep-alive", daemon=True)
                self._thread.start()

    def drop(self, kept: object) -> None:
        with self._lock:
            self._kept.pop(id(kept), None)

    def stop(self) -> None:
        self._stopped.set()
        if (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(CHECK_S):
            with self._lock:
                # A list at once: the garbage collector may have this thread drop one in the middle of a loop over them.
                each_kept = [kept for kept in [each() for each in self._kept.valuerefs()] if kept is not None]
                if not each_kept:
                    self._thread = None
                    return
            while each_kept:  # each reference is given up at once: the program may drop a connection meanwhile
                each_kept.pop().keep_alive()


keep_alive = KeepAlive()


def _forked() -> None:
    global keep_alive
    keep_alive = KeepAlive()  # a child has neither the thread nor the connections


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
atexit.register(lambda: keep_alive.stop())  # before the interpreter ends the thread in the middle of something


_Lock: Any = type(threading.RLock())
NOT_BLOCKING = (False,)  # the argument of ``acquire``


class UserLock(_Lock):  # type: ignore[misc]
    """A lock for ``with``, held by the thread that uses an object, which may nest its uses; another is refused."""

    def __init__(self) -> None:
        super().__init__()  # for locks that are written in Python, as gevent's are
        self.closed = False  # or begun to be closed: an interrupt may have left some of it open
        self._pid = os.getpid()

    def check(self) -> None:
        """Refuse the use of an object that is closed, or of another process."""

    def take(self) -> None:
        """Take the lock where ``with`` did not get it at once, or refuse it."""

    def __enter__(self) -> None:
        if self.closed or os.getpid() != self._pid:
            self.check()
        taken: list[bool] = []
        try:
            # A signal handler runs once a call has returned: one call takes the lock and notes it, so that no interrupt
            # leaves the lock taken, which would keep other threads out for good.
            taken.extend(map(self.acquire, NOT_BLOCKING))
        except BaseException:
            if taken and taken[0]:
                self.release()
            raise
        if not taken[0]:
            self.take()


class ConnectionLock(UserLock):
    """A lock of a connection, which its keep-alive thread uses, too."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._kept_alive = threading.Lock()  # held while the keep-alive thread is using the connection, for an instant

    def check(self) -> None:
        if self.closed:
            raise errors.LocalProtocolError(f"this connection to {errors.hub_at(self._address)} is closed")
        if os.getpid() != self._pid:
            raise errors.Forked("this connection was made before a fork; connect again in the child")

    def take(self) -> None:
        if not self.acquire(blocking=False):
            with self._kept_alive:
                if not self.acquire(blocking=False):
                    text = "another thread is using this connection; give each thread a vector env of its own"
                    raise errors.ConnectionInUse(text)

    def while_idle(self, work: Callable[[], None]) -> None:
        with self._kept_alive:
            if self.acquire(blocking=False):
                try:
                    work()
                finally:
                    self.release()


class Connection:
    """One connection, for one request at a time and at most one session, which reconnects by itself."""

    def __init__(
        self,
        transport: ZeroMqTransport,
        token: bytes = protocol.NO_SESSION,
        timeout: float = CONNECT_TIMEOUT_S,
        reconnect_timeout: float = protocol.RECONNECT_S,
    ) -> None:
        """Begin to connect by this transport, and say hello; ``await_hub`` waits until ``timeout`` seconds from now."""
        if not isinstance(cast("object", timeout), Real) or not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        self.address, self.crosses_network = transport.address, transport.crosses_network
        self.hub: str | None = None  # its name; None for a private hub, and where it is not known
        self.row_offset, self.num_envs = 0, ROWS_MAX  # of its session, the first one in its vector env
        self._transport = transport
        self._pid = os.getpid()
        self.sent_ns = self.check_ns = 0  # of the last request, and when ``check`` is due
        self._suspected_s = math.inf  # when the hub seemed out of reach first
        self.on_close: list[Callable[[], None]] = []  # called when it is closed, in its own process; the last one first
        self.on_idle: list[Callable[[], None]] = []  # called each ``CHECK_S`` by the keep-alive thread, unless in use
        self._end: Exception | None = None  # the reason why the last request is pending no more and has no reply
        self.protocol = ClientProtocol(token, reconnect_timeout)  # only this class and the transport change it
        self.reports = UserReports(self.address, self.protocol)
        self.reports.tried = f"for {timeout:g} s"
        self.in_use = ConnectionLock(self.address)
        self._hello_deadline = Deadline(timeout)
        self.welcome: Welcome  # once ``await_hub`` has returned
        try:
            transport.open(self.protocol)
            self.local_sockets = transport.local_sockets
            self.send(Op.HELLO, Hello(client=envhub.__version__))
            keep_alive.add(self)
        except BaseException:
            self.close()
            raise

    def await_hub(self) -> Connection:
        """Wait until the hub has said what it is, and return this connection; after an error, it is closed."""
        try:
            try:
                welcome = self.result(self._hello_deadline.left_s()).message
            except (errors.HubTimeout, errors.HubLost) as error:
                within = f"within {self._hello_deadline.timeout:g} s"
                hub = errors.hub_at(self.address).removeprefix("the hub at ")
                text = f"no hub answered at {hub} {within}: {self._transport.advice()}"
                raise errors.HubUnreachable(text) from (error if isinstance(error, errors.HubLost) else None)
            assert isinstance(welcome, Welcome)
            self.welcome = welcome
            self.hub = None if self.welcome.private else self.welcome.name[:HUB_NAME_CHARS_MAX] or None
            accepted = self.welcome.limits.get("message_bytes_max", protocol.FRAME_BYTES_MAX)
            if accepted < MESSAGE_BYTES_MIN:
                raise self.breach(f"it says that it accepts messages of {accepted} bytes")
            self.protocol.frame_bytes_max = min(accepted, protocol.FRAME_BYTES_MAX)
        except BaseException:
            self.close()
            raise
        self.reports.tried = f"for reconnect_timeout={self.protocol.reconnect_s:g} s"
        return self

    @property
    def descriptors(self) -> Sequence[int]:
        return self._transport.descriptors

    def send(self, op: Op, message: object, frames: Sequence[protocol.Frame] = (), keep: bool = False) -> None:
        """Begin a request, whose frames must not change until its reply; ``keep`` it pending after an interrupt."""
        with self.in_use:
            if self.protocol.pending is not None:
                raise self._busy_error(self.protocol.pending.op)
            try:
                self.sent_ns = time.monotonic_ns()
                now_s = self.sent_ns / 1e9
                if self.protocol.loss(now_s):
                    self._check_hub(now_s)
                sent = self.protocol.request(op, message, frames, now_s)
                self._end = None
                if sent:
                    self._transport.send(sent)
            except FrameTooLarge as error:
                limit = f"message_bytes_max={self.protocol.frame_bytes_max} of {errors.hub_at(self.address)}"
                text = f"a {op.name} request of {error.nbytes} bytes is more than {limit}"
                raise errors.RequestRefused(text) from None
            except BaseException as error:
                if not keep or isinstance(error, Exception):
                    self.give_up()
                raise

    def _busy_error(self, pending: Op) -> errors.LocalProtocolError:
        return errors.LocalProtocolError(f"a {pending.name} is pending at {errors.hub_at(self.address)}")

    def synchronize(self) -> None:
        """Give up what is pending, and wait until the hub is done with all that it was asked for in this session."""
        self.give_up()
        # Once the hub has answered a request, it begins none of a lower number, however late that comes.
        self.ask(Op.COLLECT, Collect([]))

    def give_up(self) -> None:
        self.in_use.take()
        try:
            self._end = None
            self.protocol.give_up()
        finally:
            self.in_use.release()

    def wait(self, timeout: float | None = None, is_over: Callable[[], object] | None = None) -> Reply:
        """The pending request's reply, also a failure. Until the next request it can be waited for again.

        With ``is_over`` wait for that with replies to SEND and RECEIVE, and return what is to be ignored.
        """
        with self.in_use:
            if self.protocol.answer is not None and is_over is None:
                return self.protocol.answer
            deadline_s = math.inf if timeout is None else time.monotonic() + timeout
            while True:
                # Else the program gave it up, if not before then in a signal handler.
                if self.protocol.pending is None and not (is_over is not None and self.protocol.receives):
                    text = f"no request is pending at {errors.hub_at(self.address)}"
                    raise self._end or errors.LocalProtocolError(text)
                try:
                    reply = self._transport.receive(deadline_s)
                except errors.RemoteProtocolError as error:
                    raise self.breach(str(error)) from error
                if self.reports.warned or self.protocol.notices or self.protocol.progress is not None:
                    self._report()
                if reply is not None or (is_over is not None and is_over()):
                    return reply  # type: ignore[return-value]
                now_s = time.monotonic()
                self._check_hub(now_s)
                self._send_pending(now_s)
                if timeout is not None and time.monotonic() >= deadline_s:
                    raise errors.of_hub(errors.HubTimeout(no_reply([self.address], timeout)), self.hub)

    def result(self, timeout: float | None = None) -> Reply:
        reply = self.wait(timeout)
        if isinstance(reply.message, Failure):
            self.fail(reply.message)
        return reply

    def await_room(self) -> None:
        """Wait until the hub takes a further SEND, RECEIVE or TEMPLATES."""
        if not self.protocol.has_room:
            self.wait(None, lambda: self.protocol.has_room)

    def await_received(self, timeout: float | None) -> None:
        """Wait until there is a reply to SEND or RECEIVE that was not taken."""
        if not self.protocol.received:
            self.wait(timeout, lambda: self.protocol.received)

    def _send_pending(self, now_s: float) -> None:
        for frames in self.protocol.tick(now_s):
            self._transport.send(frames)
        self.reports.report_reach(now_s)

    def check(self) -> None:
        """Keep up the connection on behalf of a lane that does not wait on it, when ``check_ns`` has passed."""
        with self.in_use:
            try:
                if self._transport.receive() is None:
                    now_s = time.monotonic()
                    self._check_hub(now_s)
                    self._send_pending(now_s)
            except errors.RemoteProtocolError as error:
                raise self.breach(str(error)) from error
            self._report()
            self.check_ns = time.monotonic_ns() + int(CHECK_S * 1e9)

    def keep_alive(self) -> None:
        """Keep up the connection while its program is busy elsewhere; errors are raised at its next use."""
        if os.getpid() == self._pid:
            self.in_use.while_idle(self._keep_alive)

    def _keep_alive(self) -> None:
        if self._transport.closed:
            return
        for look in self.on_idle:
            look()
        if self.protocol.looked_s > time.monotonic() - LOOKED_S:
            return  # it may be waited for by its descriptors, and what they signal would be taken in here
        try:
            self._transport.receive()
        except errors.RemoteProtocolError as error:  # the hub is asked again for what this was to be
            logger.warning("a message from %s was thrown away: %s", errors.hub_at(self.address), error)
            self._transport.reconnect()  # and all that may have come after it is dropped
        self._report()
        now_s = time.monotonic()
        self.protocol.looked(now_s)
        if not self.protocol.loss(now_s):
            self._send_pending(now_s)

    def lose(self, why: str) -> NoReturn:
        """Know from elsewhere that the hub has ended: raise ``HubLost``, as whatever is asked from now on will."""
        self.protocol.lost(why)
        raise self._loss(why)

    def _loss(self, why: str) -> errors.HubLost:
        return errors.of_hub(errors.HubLost(f"{errors.hub_at(self.address)} is lost: {why}"), self.hub)

    def _check_hub(self, now_s: float) -> None:
        """Raise the reason why the pending request gets no reply any more, if there is one."""
        self.protocol.looked(now_s)
        try:
            if loss := self.protocol.loss(now_s):
                if denied := self._transport.refusals.denied:
                    raise errors.of_hub(errors.AccessDenied(denied), self.hub)
                if self.protocol.goodbye is not None:
                    self.fail(self.protocol.goodbye)
                raise self._loss(loss)
            if (op := self.protocol.cut_off) is not None:
                raise errors.RequestRefused(
                    f"{CUTS_MAX} connections to {errors.hub_at(self.address)} ended, each after the {op.name} "
                    "request was sent on it; the request was given up. Look for connection_ended in the hub's log; if "
                    "it is not there, something between this client and the hub ends them"
                )
        except Exception as error:
            self._end = error  # before the request is given up: a wait that is interrupted in between is repeated
            self.protocol.give_up()
            raise

    def check_reach(self, silence_s_max: float) -> None:
        """Check that the hub's address does not refuse connections, and that it has not been silent for so long."""
        now_s = time.monotonic()
        # Only the second look or refusal counts: at the first one messages may wait to be taken in, since this program
        # was stopped itself, and a forwarder that is started again refuses for a moment.
        if self.protocol.refused_s >= RECHECK_S:
            raise self._loss("connections to its address are refused")
        silence_s = self.protocol.silence_s(now_s)
        if silence_s < silence_s_max - SUSPECT_S:
            self._suspected_s = math.inf
            return
        self._suspected_s = min(self._suspected_s, now_s)
        if now_s - self._suspected_s >= RECHECK_S and silence_s >= silence_s_max:
            raise self._loss(f"it has been silent for {silence_s:.1f} s")

    def _report(self) -> None:
        self.reports.report(time.monotonic(), (self._transport.received_ns - self.sent_ns) / 1e9)

    def ask(self, op: Op, message: object, timeout: float | None = None) -> Reply:
        """Send a request and wait for its reply; a failure is raised. After an error here, it is given up."""
        with self.in_use:
            if self.protocol.pending is not None:
                raise self._busy_error(self.protocol.pending.op)
            try:  # around all of it: an interrupt must not leave the request pending
                if op is Op.TEMPLATES:
                    self.await_room()
                self.send(op, message)
                return self.result(timeout)
            except errors.HubTimeout:
                self.give_up()
                text = f"{errors.hub_at(self.address)} did not answer {op.name} within {timeout:g} s"
                # Without its cause, which says that it can be waited for again.
                raise errors.of_hub(errors.HubTimeout(text), self.hub) from None
            except BaseException:
                self.give_up()
                raise

    def breach(self, what: str) -> errors.RemoteProtocolError:
        text = f"{errors.hub_at(self.address)} broke the protocol: {what}"
        return errors.of_hub(errors.RemoteProtocolError(text), self.hub)

    def fail(self, failure: Failure) -> NoReturn:
        if (env := failure.env_index) is not None and env >= self.num_envs:
            raise self.breach(f"a failure of env {env} of {self.num_envs}")
        raise_failure(failure, self.address, self.hub, self.row_offset)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        hub = errors.hub_at(self.address)
        raise TypeError(f"a connection to {hub} cannot be pickled or copied; connect where it is used")

    def close(self) -> None:
        """Close the sockets; in a forked child, where they are not ours, do nothing."""
        if os.getpid() != self._pid or self._transport.closed:
            return
        keep_alive.drop(self)
        self.in_use.take()
        try:
            self.in_use.closed = True
            for closer in reversed(self.on_close):
                closer()
            self._transport.close()
        finally:
            self.in_use.release()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing() or not hasattr(self, "in_use"):
            return
        try:
            self.close()
        except BaseException:  # an interrupt; nothing else closes it later
            self.close()
            raise


def connect(
    address: str | Secret[str], token: bytes = protocol.NO_SESSION, timeout: float = CONNECT_TIMEOUT_S
) -> Connection:
    """A connection to the hub at this address, or of this name, which has answered."""
    return Connection(ZeroMqTransport(address), token, timeout).await_hub()
