"""Making a session: a connection, the request, the lane; on a private hub or a running one."""

from __future__ import annotations

import atexit
import getpass
import logging
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from envhub import errors
from envhub.protocol.messages import Attach, Close, Made, Make, Op, ProgramOrigin
from envhub.protocol.validation import ORIGIN_CHARS_MAX
from envhub.secret import Secret
from envhub.transport.address import guarded
from envhub.values.compression import BYTE_NS, LIBRARIES, available
from envhub_client.connection.connection import Connection, connect
from envhub_client.connection.zeromq_transport import HEARTBEAT_MS, ZeroMqTransport
from envhub_client.deadline import Deadline
from envhub_client.lanes.base import HubLane
from envhub_client.lanes.wire import WireLane
from envhub_client.private_hub.program_environment import pickled_by_value_if_unimportable, program_environment
from envhub_client.session.description import SessionDescription, Sizing, ValueCodec, describe
from envhub_client.session.factories import own_python, pickled_for_workers
from envhub_client.session.options import PRIVATE, SessionOptions

if TYPE_CHECKING:
    from envhub_client.private_hub.process import PrivateHub

KILL_TIMEOUT_S = 2.0
EXIT_S = 1.0  # for hubs that serve others, too, to end the sessions of a program that ends
SEQS_AHEAD = 1 << 32  # of the requests that a daemon thread may send until then

log = logging.getLogger("envhub")


class SessionMaker:
    """Makes a session, or takes one over: on the hub at an address, or without one on the private hub."""

    connection: Connection  # of the session, once it was asked for
    description: SessionDescription
    sizing: Sizing
    compression: str = ""  # of its observations; empty for none, as on the shared lane
    adopted_s: float  # when the session was taken into use, on the monotonic clock

    def __init__(self, address: str | Secret[str] | None, make: Make | Attach, options: SessionOptions) -> None:
        self.hub: str | Secret[str] | None = guarded(address)
        self.values = ValueCodec(allow_pickle=address is None)
        self.options = options
        self.closed = False  # or its end has begun
        self.keeps_last = False  # whether the lane is to have ``last_observations``
        self.losses = 0  # of sessions before it, in a row, that ended soon
        self._make = make
        self._connections: list[Connection] = []  # every one on which a session of ours may be

    def make(self, timeout: float) -> HubLane:
        """Make the session and return its lane; an error, as for ``Session``, leaves ``end`` to do."""
        private = program_hub() if self.hub is None else None
        try:
            made = self._made_on_hub(timeout)
        except errors.HubUnreachable:
            if private is None or private.alive:
                raise
            made = self._made_on_hub(timeout)  # it had just been killed
        return self.describe(made)

    def _made_on_hub(self, timeout: float) -> Made:
        self.begin(begun_connection(self.hub, timeout, self.options.reconnect_timeout).await_hub())
        return self.made()

    def begin(self, connection: Connection, seeds: Sequence[int | None] | None = None) -> None:
        """Ask for a session by this connection; ``made`` waits for it. Errors as for ``_complete``.

        The ``seeds`` of the envs' first resets are those of a lost session.
        """
        end_at_exit(self)
        self._connections.append(connection)  # before there is a session on it: an interrupt may come as soon as it is
        self.connection, self.compression = connection, _chosen_compression(self.options.compression, connection)
        compression_ns = BYTE_NS if self.options.compression == "auto" else 0.0
        origin = own_origin(self.options.hosting.label)
        wanted = replace(self._make, compression=self.compression, compression_ns=compression_ns, origin=origin)
        if isinstance(wanted, Attach):
            connection.send(Op.ATTACH, wanted)
        else:
            connection.row_offset, connection.num_envs = wanted.row_offset, wanted.num_envs
            make = self._complete(wanted)
            if seeds is not None:
                own = [] if all(seed is None for seed in seeds) else [*seeds]
                make = replace(make, seeds=own, fresh=True)
            connection.send(Op.MAKE, make)

    def _complete(self, make: Make) -> Make:
        """The request with what the options say; ``RequestRefused`` for one that either side cannot keep."""
        options, hosting, setup = self.options, self.options.hosting, self.options.hosting.worker_setup
        own = None
        if self.hub is None:
            python = "" if hosting.python is None else os.path.expanduser(str(hosting.python))
            own = replace(program_environment(), python=python, rendering=hosting.rendering or "")
            if isinstance(setup, str):
                setup = pickled_by_value_if_unimportable(setup)
        elif chosen := [name for name in PRIVATE if getattr(hosting, name) is not None]:
            text = "for private hubs (hub=None) only; its operator says it"
            raise errors.RequestRefused(f"{' and '.join(chosen)}: {text}")
        fields: dict[str, Any] = {"worker_setup": setup or ""}
        if not (setup is None or isinstance(setup, str)):
            code = pickled_for_workers("worker_setup", setup)
            fields = {"worker_setup_code": code, "python": make.python or own_python()}
        return replace(
            make,
            num_workers=None if isinstance(options.num_workers, str) else options.num_workers,
            autoreset_mode=options.autoreset_mode.value,
            observation_mode=options.observation_mode if isinstance(options.observation_mode, str) else "different",
            program_environment=own,
            columns=True,
            spin_us=options.spin_us,
            pin=options.pin,
            faults=options.faults.wire(),
            heartbeat_s=HEARTBEAT_MS / 1000,
            hosting=hosting.wire(),
            snapshots="unsafe" if hosting.snapshots == "unsafe" else "safe" if hosting.snapshots else "",
            **fields,
        )

    def made(self, timeout: float | None = None) -> Made:
        """Wait until the envs are built; errors as for ``Session``, and ``HubTimeout``, after which to wait again."""
        connection = self.connection
        made: Made = connection.result(timeout).message
        text, asked = "", self._make
        if isinstance(asked, Attach):
            if made.num_envs != len(made.steps):
                text = f"gave {made.num_envs} envs, and steps of {len(made.steps)}"
        elif made.num_envs != asked.num_envs:
            text = f"made {made.num_envs} envs in place of {asked.num_envs}"
        if text:
            raise errors.RemoteProtocolError(f"{errors.hub_at(connection.address)} {text}")
        connection.num_envs = made.num_envs
        return made

    def describe(self, made: Made) -> HubLane:
        """Use the session that was made; returns its lane: the shared one where both sides have it, else the wire."""
        connection = self.connection
        try:
            self.description = description = describe(made, self._make, self.options, self.values)
        except errors.EnvHubError:
            raise
        except (ValueError, TypeError) as error:
            address = connection.address
            raise errors.RemoteProtocolError(f"{errors.hub_at(address)} describes no session: {error}") from error
        log.info("%d workers for %d envs: %s", made.num_workers, made.num_envs, made.sizing)
        options, compression, leaves = self.options, self.compression, description.observation_leaves
        wire = WireLane(connection, made.num_envs, leaves, options.copy, compression, self.keeps_last)
        lane: HubLane = wire
        if options.lane == "auto" and sys.platform == "linux":
            from envhub_client.lanes.shared import shared_lane

            lane = shared_lane(wire, made.ticket, description.action_leaves, description.has_object_leaves) or wire
            self.compression = compression if lane is wire else ""
        self.adopted_s, self.sizing = time.monotonic(), Sizing(made.num_workers, made.sizing)
        return lane

    def open_connections(self) -> list[Connection]:
        if isinstance(self._make, Attach) and not hasattr(self, "description"):
            return []  # the session that was to be taken over is left as it is
        return [each for each in self._connections if each.protocol.last_seq and not each.in_use.closed]

    def end_all(self, terminate: bool = True, deadline: Deadline | None = None) -> None:
        """End the session, or what an error or an interrupt has left of its making; as ``end_sessions``."""
        self.closed = True
        end_sessions(self.open_connections(), terminate, deadline)
        for connection in self._connections:
            connection.close()
        self._connections.clear()


def program_hub() -> PrivateHub:
    if sys.platform == "linux":
        from envhub_client.private_hub.process import private_hub

        return private_hub()
    else:  # noqa: RET505  # for mypy, which leaves out what is for another system
        raise errors.HubUnreachable(errors.only_linux("a hub of the program's own"))


def begun_connection(hub: str | Secret[str] | None, timeout: float, reconnect_timeout: float) -> Connection:
    """A connection to this hub, or without one to the private hub, that is begun: ``await_hub`` follows."""
    private = program_hub() if hub is None else None
    transport = ZeroMqTransport(private.address, private.own) if private is not None else ZeroMqTransport(hub or "")
    return Connection(transport, secrets.token_bytes(16), timeout, reconnect_timeout)


def end_sessions(
    connections: Sequence[Connection],
    terminate: bool,
    deadline: Deadline | None = None,
    wait: Callable[[Connection, float | None], object] = Connection.result,
) -> None:
    """End the sessions of these connections, all at the same time, and close the connections.

    Their envs are closed, or with ``terminate`` killed. At the deadline or an interrupt those that still close are
    killed, and the hub says which.
    """
    begun = [connection for connection in connections if connection.protocol.last_seq]
    try:
        _end_all(begun, terminate, deadline, wait)
    finally:
        if not terminate:
            closing = [each for each in begun if (pending := each.protocol.pending) and pending.op is Op.CLOSE]
            _end_all(closing, True, None, wait)
    for connection in connections:
        connection.close()  # but not at an interrupt: without the connection the session could not be ended any more


def _end_all(
    connections: Sequence[Connection],
    terminate: bool,
    deadline: Deadline | None,
    wait: Callable[[Connection, float | None], object],
    why: str = "",
) -> None:
    # A hub that is out of reach ends the session by its lease.
    near = [each for each in connections if not each.protocol.trouble(time.monotonic())]
    for connection in connections:
        with _expecting_end(connection):
            connection.give_up()
            connection.send(Op.CLOSE, Close(terminate, why))
    for connection in connections:
        closes = connection in near and not terminate
        with _expecting_end(connection):
            wait(connection, KILL_TIMEOUT_S if not closes else None if deadline is None else deadline.left_s())


_left_open = weakref.WeakSet[SessionMaker]()
_exiting = threading.Event()


def end_at_exit(maker: SessionMaker) -> None:
    """Have its session ended when the program ends, unless that was done by then or it was left to another program."""
    if _exiting.is_set() and threading.current_thread() is not threading.main_thread():
        raise errors.SessionLost("the program ends")  # a daemon thread is to make nothing again
    _left_open.add(maker)
    atexit.unregister(_end_left_open)
    atexit.register(_end_left_open)  # after the end of a private hub or of a tunnel, and so it is called before that
    _end_with_child(os.getpid())


@cache
def _end_with_child(pid: int) -> None:
    if util := sys.modules.get("multiprocessing.util"):  # a child that it has forked calls nothing of ``atexit``
        util.Finalize(None, _end_left_open, exitpriority=0)


def _end_left_open() -> None:
    """End the sessions that the program leaves open: of its own hub, which ends too, once their envs are closed."""
    _exiting.set()
    # A daemon thread that uses a session goes on meanwhile. What becomes of that is no error of the program's.
    threading.excepthook = partial(_report_unless_ended, threading.excepthook)
    makers, deadline, ending = [*_left_open], Deadline(EXIT_S), list[Connection]()
    _left_open.clear()
    with ExitStack() as held:
        for maker in makers:
            for connection in maker.open_connections() if maker.hub is not None else ():
                with _expecting_end(connection):
                    ending.append(_connection_to_end(maker, connection, held, deadline))
        _end_all(ending, False, None, lambda each, _: each.result(deadline.left_s()), "its program ended")
    private = [each for maker in makers if maker.hub is None for each in maker.open_connections()]
    with suppress(errors.EnvHubError):  # a thread of the program still uses them
        end_sessions(private, terminate=False)


def _report_unless_ended(report: Callable[..., Any], raised: threading.ExceptHookArgs) -> None:
    if not issubclass(raised.exc_type, errors.EnvHubError):
        report(raised)


def _connection_to_end(maker: SessionMaker, used: Connection, held: ExitStack, deadline: Deadline) -> Connection:
    """The connection of a session, or another one where a daemon thread uses that; it is ``held`` from now on."""
    try:
        held.enter_context(used.in_use)
        return used
    except errors.ConnectionInUse:
        other = connect(maker.hub or "", used.protocol.token, deadline.left_s())
        other.protocol.last_seq = used.protocol.last_seq + SEQS_AHEAD
        return other


@contextmanager
def _expecting_end(connection: Connection) -> Iterator[None]:
    """Log errors of the block: any error of a hub says that the session is gone already, which is what was wanted."""
    try:
        yield
    except Exception as error:
        raised = errors.raised_by_env(error)
        if not isinstance(raised or error, errors.EnvHubError):
            raise  # of a signal handler
        level = logging.DEBUG if raised is None else logging.ERROR
        log.log(level, "closing a session of %s: %s", errors.hub_at(connection.address), raised or error)


def own_origin(label: str) -> ProgramOrigin:
    """This program, by its own account."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container's user may have no name
        user = ""
    program = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    texts = user, socket.gethostname(), program
    user, host, program = ("".join(filter(str.isprintable, text))[:ORIGIN_CHARS_MAX] for text in texts)
    return ProgramOrigin(user, host, os.getpid(), program, label)


def _chosen_compression(wanted: str | None, connection: Connection) -> str:
    """The method that both sides have of what was asked for; empty for none."""
    if wanted is None or (wanted == "auto" and not connection.crosses_network):
        return ""
    theirs, ours = connection.welcome.compressions, available()
    if wanted == "auto":
        return next((method for method in ours if method in theirs), "")
    for side, methods in ((errors.hub_at(connection.address), theirs), ("this client", ours)):
        if wanted not in methods:
            library = LIBRARIES[wanted]
            raise errors.RequestRefused(
                f"compression={wanted!r}: {side} lacks the library; pip install {library} there"
            )
    return wanted
