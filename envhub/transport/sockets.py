"""The ZeroMQ sockets of both sides, with the limits and the heartbeats that they share."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import zmq
from zmq.utils import z85

from envhub.secret import Secret
from envhub.transport.address import Address
from envhub.transport.keys import HubKeys

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

ZERO_COPY_BYTES = 1 << 16  # from here on, keeping track of when libzmq is done with a frame is cheaper than a copy

# Plain numbers: joining zmq's own costs more than sending a small frame.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

# The ``send`` of ``zmq.Socket`` is written in Python, and calls this one for each frame.
_send_frame = zmq.backend.Socket.send

SEND_QUEUE_MESSAGES_MAX = 16
ZERO_COPY_TIMEOUT_S = 10.0  # it takes a millisecond
HANDSHAKE_MS = 3000

LIBZMQ_MIN = 4, 3, 5  # how it behaves at the limits and options of this module was measured with this version

if zmq.zmq_version_info() < LIBZMQ_MIN:
    raise ImportError(f"EnvHub needs libzmq {'.'.join(map(str, LIBZMQ_MIN))} or later, this is {zmq.zmq_version()}")

_monitors = itertools.count()
_MONITOR_EVENT = struct.Struct("=Hi")  # of zmq_socket_monitor(3)


def open_socket(context: Context, kind: int, message_bytes_max: int, receive_queue_messages_max: int) -> Socket:
    """A socket of this kind that takes no larger message, and queues no more of them per connection."""
    opened = _new_socket(context, kind)
    opened.setsockopt(zmq.MAXMSGSIZE, message_bytes_max)
    opened.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES_MAX)
    opened.setsockopt(zmq.RCVHWM, receive_queue_messages_max)
    opened.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    return opened


def _new_socket(context: Context, kind: int) -> Socket:
    """A socket that the context knows before it is opened, and so closes whenever it is destroyed.

    ``Context.socket`` notes an open socket last. An interrupt before that leaves a socket that the context does not
    know and that the interrupt's traceback keeps: while it is handled, ``Context.destroy`` waits for that socket's end.
    """
    opened = zmq.Socket.__new__(zmq.Socket)
    context._add_socket(opened)
    opened.__init__(context, kind)  # type: ignore[misc]
    return opened


def begin_zero_copy(context: Context) -> None:
    """Send a frame without a copy, now: at the first one pyzmq makes sockets and starts threads.

    libzmq ends a process that has no memory or descriptors for these, as one may not have later.
    """
    with context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
        ours.bind("inproc://zero-copy")
        theirs.connect("inproc://zero-copy")
        sent = ours.send(bytes(ZERO_COPY_BYTES), copy=False, track=True)
        theirs.recv()
        sent.wait(ZERO_COPY_TIMEOUT_S)


def choose_family(socket: Socket, address: Address) -> None:
    """Have the next bind or connect speak IPv6 where the address is one; names go on meaning IPv4."""
    socket.setsockopt(zmq.IPV6, int(address.is_ipv6))


def new_key_pair() -> tuple[bytes, Secret[bytes]]:
    """A new public key and its secret one."""
    public, secret = zmq.curve_keypair()
    return z85.decode(public), Secret(z85.decode(secret))


def public_key(secret: Secret[bytes]) -> bytes:
    """The public key of a secret one."""
    return z85.decode(zmq.curve_public(z85.encode(secret.reveal_secret())))


def ask_before_admitting(socket: Socket, secret: Secret[bytes] | None, domain: bytes) -> None:
    """Have the addresses bound from now on admit only clients whom the handler of this domain admits.

    With ``secret``, the hub's key, clients must present keys, and all is encrypted. Without a handler nobody is
    admitted. Addresses bound before stay as they are.
    """
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    if secret is not None:
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret.reveal_secret())
        socket.setsockopt(zmq.CURVE_SERVER, 1)


def present_keys(socket: Socket, keys: HubKeys) -> None:
    """Have the next connect present this client's key to the hub of that public key, and encrypt all."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key(keys.secret))
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.reveal_secret())


def open_monitor(socket: Socket, events: int) -> Socket:
    """A socket that reports ``events`` of ``socket``, and queues them without a limit.

    With a limit, as in ``get_monitor_socket``, libzmq's own thread would wait until they are read, and closing the
    socket would wait for that thread. No address is used twice: libzmq frees one some time after its socket was closed.
    """
    address = f"inproc://monitor-{next(_monitors)}"
    socket.monitor(address, events)
    monitor = _new_socket(socket.context, zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)
    monitor.setsockopt(zmq.LINGER, 0)
    monitor.connect(address)
    return monitor


def read_monitor(monitor: Socket, flags: int = 0) -> tuple[int, int]:
    """The next event of a monitor, and its value.

    ``zmq.utils.monitor`` reads it, too, and imports asyncio, which takes each program 30 ms.

    Raises:
        zmq.Again: there is none, and ``flags`` are ``zmq.NOBLOCK``.
    """
    event, value = _MONITOR_EVENT.unpack(monitor.recv_multipart(flags)[0])
    return event, value


def send(socket: Socket, frames: Sequence[Any]) -> None:
    """Send one message without waiting; large frames are not copied and must not change until the peer has them.

    Raises:
        zmq.Again: no connection takes it now; nothing was sent.
        zmq.ZMQError: a ROUTER knows no such peer.
    """
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags = _MORE if number < last else _NOBLOCK
        _send_frame(socket, frame, flags, copy=memoryview(frame).nbytes < ZERO_COPY_BYTES)


def receive(socket: Socket, frames_max: int) -> list[zmq.Frame]:
    """One message, whole, or its first ``frames_max`` frames.

    Where the last frame says ``more``, either ``discard`` the rest, or close the socket.

    Raises:
        zmq.Again: there is none.
    """
    frame = socket.recv(_NOBLOCK, copy=False)
    frames = [frame]
    while frame.more and len(frames) < frames_max:
        frame = socket.recv(_NOBLOCK, copy=False)
        frames.append(frame)
    return frames


def receive_peer(socket: Socket) -> bytes:
    """From whom a ROUTER's next message is; ``receive`` it then.

    Raises:
        zmq.Again: there is none.
    """
    return socket.recv(_NOBLOCK)


def discard(socket: Socket, frames_max: int) -> bool:
    """Throw away up to ``frames_max`` more frames of the message that is being received; whether it has ended."""
    return not all(socket.recv(_NOBLOCK, copy=False).more for _ in range(frames_max))


def user_of(frames: Sequence[zmq.Frame]) -> str:
    """The name that the handler gave the peer when it admitted it; empty where its address has no handler."""
    return str(_known(frames, "User-Id", ""))


def origin_of(frames: Sequence[zmq.Frame]) -> str:
    """Origin of the peer: its IP address, or ``localhost:UID:GID:PID`` by ipc; empty where libzmq does not know."""
    return str(_known(frames, "Peer-Address", ""))


def connection_of(frames: Sequence[zmq.Frame]) -> int:
    """The descriptor that a message came by, or -1: libzmq knows none for peers of its oldest protocol."""
    return int(_known(frames, zmq.SRCFD, -1))


def _known(frames: Sequence[zmq.Frame], what: str | int, otherwise: str | int) -> str | int:
    """Get a property that libzmq knows of this message's peer."""
    try:
        return frames[0].get(what) if frames else otherwise
    except zmq.ZMQError:
        return otherwise
