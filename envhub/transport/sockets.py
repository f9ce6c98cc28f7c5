"""The ZeroMQ sockets of both sides, with their common limits and heartbeats."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import zmq
from zmq.utils import z85

from envhub.secret import Secret
from envhub.transport.address import Address, HubKeys

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

ZERO_COPY_BYTES = 1 << 16  # for larger frames libzmq's notice that a frame was sent is cheaper than a copy

# Plain numbers: combining zmq's enums costs more than sending a small frame.
NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

# The ``send`` of ``zmq.Socket`` is written in Python, and calls this function for each frame.
_send_frame = zmq.backend.Socket.send
_receive_frame = zmq.backend.Socket.recv  # to look up ``socket.recv`` each time takes a fifth longer

view: Any = memoryview  # of a received frame: its ``buffer`` is the same, and takes twice as long

SEND_QUEUE_MESSAGES_MAX = 16
ZERO_COPY_TIMEOUT_S = 10.0  # it takes a millisecond
HANDSHAKE_MS = 3000

LIBZMQ_MIN = 4, 3, 5  # the limits and options of this module were tested with this version

if zmq.zmq_version_info() < LIBZMQ_MIN:
    raise ImportError(f"EnvHub needs libzmq {'.'.join(map(str, LIBZMQ_MIN))} or later, this is {zmq.zmq_version()}")

_monitors = itertools.count()
_MONITOR_EVENT = struct.Struct("=Hi")  # of zmq_socket_monitor(3)


def open_socket(context: Context, kind: int, message_bytes_max: int, receive_queue_messages_max: int) -> Socket:
    opened = _new_socket(context, kind)
    opened.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)
    opened.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES_MAX)
    opened.setsockopt(zmq.RCVHWM, receive_queue_messages_max)
    opened.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    return opened


def _new_socket(context: Context, kind: int) -> Socket:
    """A socket that the context knows before it opens: an interrupt leaves none for which ``destroy`` would wait."""
    opened = zmq.Socket.__new__(zmq.Socket)
    context._add_socket(opened)
    opened.__init__(context, kind)  # type: ignore[misc]
    return opened


def begin_zero_copy(context: Context) -> None:
    """Send a frame without a copy: pyzmq then starts threads, for which libzmq later might lack memory, and abort."""
    with context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://zero-copy")
        theirs.connect("inproc://zero-copy")
        sent = ours.send(bytes(ZERO_COPY_BYTES), copy=False, track=True)
        theirs.recv()
        sent.wait(ZERO_COPY_TIMEOUT_S)


def choose_family(socket: Socket, address: Address) -> None:
    """Have the next bind or connect use IPv6 for an IPv6 address; host names still resolve to IPv4."""
    socket.setsockopt(zmq.IPV6, int(address.is_ipv6))


def new_key_pair() -> tuple[bytes, Secret[bytes]]:
    public, secret = zmq.curve_keypair()
    return z85.decode(public), Secret(z85.decode(secret))


def public_key(secret: Secret[bytes]) -> bytes:
    return z85.decode(zmq.curve_public(z85.encode(secret.reveal_secret())))


def ask_before_admitting(socket: Socket, secret: Secret[bytes] | None, domain: bytes) -> None:
    """Have addresses bound from now on admit whom this ZAP domain's handler admits; with ``secret`` only by keys."""
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    if secret is not None:
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret.reveal_secret())
        socket.setsockopt(zmq.CURVE_SERVER, 1)


def present_keys(socket: Socket, keys: HubKeys) -> None:
    """Have the next connect present this client's key to the hub with this public key, and encrypt the connection."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key(keys.secret))
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.reveal_secret())


def open_monitor(socket: Socket, events: int) -> Socket:
    """A socket that reports ``events``, queued without a limit: libzmq's thread would wait for a reader."""
    address = f"inproc://monitor-{next(_monitors)}"  # a new one: libzmq frees an address some time after the close
    socket.monitor(address, events)
    monitor = _new_socket(socket.context, zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


def read_monitor(monitor: Socket, flags: int = 0) -> tuple[int, int]:
    """A monitor's next event and its value; ``zmq.utils.monitor`` imports asyncio for it. Raises ``zmq.Again``."""
    event, value = _MONITOR_EVENT.unpack(monitor.recv_multipart(flags)[0])
    return event, value


def send(socket: Socket, frames: Sequence[Any]) -> None:
    """Send one message without waiting; large frames are not copied and must not change until the peer has them."""
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags = _MORE if number < last else NOBLOCK
        _send_frame(socket, frame, flags, copy=memoryview(frame).nbytes < ZERO_COPY_BYTES)


def receive(socket: Socket, frames_max: int) -> list[zmq.Frame]:
    """Receive one whole message, or its first ``frames_max`` frames. Raises ``zmq.Again``."""
    frame = _receive_frame(socket, NOBLOCK, False)
    frames = [frame]
    while frame.more and len(frames) < frames_max:
        frame = _receive_frame(socket, NOBLOCK, False)
        frames.append(frame)
    return frames


def discard(socket: Socket, frames_max: int) -> bool:
    """Drop up to ``frames_max`` more frames of the current message; return True if the message has ended."""
    return not all(socket.recv(NOBLOCK, copy=False).more for _ in range(frames_max))


def connection_of(frames: Sequence[zmq.Frame]) -> int:
    """The descriptor of the message's connection; -1 for peers of libzmq's oldest protocol."""
    return int(property_of(frames, zmq.SRCFD, -1))


def property_of(frames: Sequence[zmq.Frame], what: str | int, otherwise: Any = "") -> Any:
    """``Peer-Address``: the peer's IP address, or ``localhost:UID:GID:PID`` for ipc; ``User-Id``: its user, if any."""
    try:
        return frames[0].get(what) if frames else otherwise
    except zmq.ZMQError:
        return otherwise


def seed_routing_ids() -> None:
    """Make routing ids begin at a random number: libzmq (4.3.5) aborts if a peer has chosen the next one as its own."""
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))


RECEIVE_QUEUE_MESSAGES_MAX = 16  # of one client, which sends a request at a time
LINGER_MS = 2000

_MONITORED = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class Router:
    """The ROUTER of one hub, its monitor and their context; a descriptor is readable if there may be a message."""

    def __init__(self) -> None:
        self.context: Any = None  # of libzmq
        self.socket: Any = None  # the ROUTER
        self._monitor: Any = None
        self.descriptor = self.monitor_descriptor = -1
        # Called without arguments, returns a true value if a message can be read. ``getsockopt(zmq.EVENTS)`` would take
        # twice the time to say it: pyzmq makes an enum of the option.
        self.is_readable: Callable[[], Sequence[Any]] = lambda: ()

    def open(self, message_bytes_max: int) -> None:
        if sys.platform == "win32":
            raise OSError("no hub runs on Windows")
        self.context = zmq.Context()
        begin_zero_copy(self.context)
        seed_routing_ids()
        router = open_socket(self.context, zmq.ROUTER, message_bytes_max, RECEIVE_QUEUE_MESSAGES_MAX)
        self.socket = router
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.LINGER, LINGER_MS)
        # No heartbeats of its own: libzmq (4.3.5) aborts at one of a connection that ended while its queue was full.
        # Those of the clients say for how long they may be silent; the kernel asks after a client that sends none.
        router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
        router.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
        router.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        router.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        self._monitor = open_monitor(router, _MONITORED)
        self.descriptor, self.monitor_descriptor = router.FD, self._monitor.FD
        # ``POLLIN`` as a plain number, as above.
        self.is_readable = functools.partial(zmq.zmq_poll, [(router, int(zmq.POLLIN))], 0)

    @property
    def is_open(self) -> bool:
        return self.socket is not None

    def events(self) -> Iterator[tuple[int, int]]:
        while self._monitor.poll(0):
            yield read_monitor(self._monitor, zmq.NOBLOCK)

    def reaches(self, peer: bytes, frame: bytes) -> bool:
        try:
            send(self.socket, [peer, frame])
        except zmq.ZMQError as error:
            return isinstance(error, zmq.Again)  # its queue is full
        return True

    def close(self) -> None:
        """Close the sockets; what was sent goes on its way."""
        self.socket.monitor(None, 0)
        self._monitor.close()
        self.socket.close()
