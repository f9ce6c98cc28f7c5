"""The addresses that a hub binds, and the files that an ipc address has while it is bound."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import zmq

from envhub.errors import AddressError
from envhub.transport import address, sockets
from envhub.transport.address import TICKET_BYTES, Address, parse, side_path
from envhub.transport.sockets import Router
from envhub.transport.tcp import listening
from envhub_server.log import log
from envhub_server.loop import Poller
from envhub_server.network import descriptor_guard
from envhub_server.network.connections import peer_of

# The most connections that wait for libzmq to accept them, which it does even when the address is shut. An ipc client
# that finds the queue full tries again at once, a tcp client after a second; ipc must not run out of descriptors.
IPC_BACKLOG, TCP_BACKLOG = 16, 100
SHUT, FULL = ".aside", ".full"  # of the names of a socket while its address is shut, and of the one in its place
PROXIED_BACKLOG, PROXY_BACKLOG = 64, 32  # of the addresses of the proxy, and of the hub's socket for it


class Listener:
    """The addresses of one ROUTER and of its proxy; a lock file guards a path, which libzmq would steal from a hub."""

    def __init__(self, router: Router, open_to_all: bool) -> None:
        self._router = router  # which is opened before the first address is bound
        self._open_to_all = open_to_all
        self._paths: list[Path] = []
        self._locks: list[tuple[Path, int]] = []
        self.proxied: list[socket.socket] = []  # the sockets that listen for the proxy
        # By path, for when the address is shut: a socket in place of the ROUTER's, and a client that fills its queue.
        self._blockers: dict[Path, tuple[socket.socket, socket.socket]] = {}

    def bind(self, text: str) -> str:
        wanted = address.parse_bind(text)
        if wanted.is_ipc:
            self._prepare(wanted)
        elif self._open_to_all:
            return self._listen_for_proxy(wanted)
        elif not wanted.is_loopback:
            raise AddressError(
                f"{text} can be reached from other machines and nothing guards it; make keys (`envhub keys add NAME "
                "--keys DIR`) and serve with --keys DIR, or bind tcp://127.0.0.1 or ipc, or say --insecure"
            )
        sockets.choose_family(self._router.socket, wanted)
        self._router.socket.setsockopt(zmq.BACKLOG, IPC_BACKLOG if wanted.is_ipc else TCP_BACKLOG)
        try:
            self._router.socket.bind(text.replace("://localhost:", "://127.0.0.1:"))
        except zmq.ZMQError as error:
            raise _not_bound(text, error) from error
        bound = self._router.socket.get(zmq.LAST_ENDPOINT)
        return bound.rstrip(b"\0").decode() if isinstance(bound, bytes) else text

    def _listen_for_proxy(self, wanted: Address) -> str:
        try:
            opened = listening(wanted, PROXIED_BACKLOG)
        except OSError as error:
            raise _not_bound(wanted.text, error) from error
        self.proxied.append(opened)
        host, port = opened.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if wanted.is_ipv6 else f"tcp://{host}:{port}"

    def bind_unnamed(self) -> int:
        """Bind a Unix socket that has no name; the proxy connects to it by the descriptor that this returns."""
        with tempfile.TemporaryDirectory(prefix="envhub-") as folder:
            path = os.path.join(folder, "hub")
            opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._router.socket.setsockopt(zmq.BACKLOG, PROXY_BACKLOG)
            try:
                self._router.socket.bind(f"ipc:///proc/self/fd/{opened}/hub")  # however long the name of the folder is
                return os.open(path, os.O_PATH | os.O_CLOEXEC)
            except (OSError, zmq.ZMQError) as error:
                raise AddressError(f"no socket for the proxy of tcp addresses in {folder}: {error}") from error
            finally:
                os.close(opened)

    def _prepare(self, wanted: Address) -> None:
        path = Path(wanted.path)
        if path.parent == address.runtime_folder():
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise AddressError(f"{wanted.text}: the folder {path.parent} cannot be made: {error}") from error
            address.check_private(path.parent)
        if not path.parent.is_dir():
            raise AddressError(f"{wanted.text}: the folder {path.parent} does not exist")
        side = address.side_path(str(path))
        sockets_there = [path, _beside(path, SHUT), _beside(path, FULL), *([Path(side)] if side else [])]
        for there in sockets_there:
            if os.path.lexists(there) and not stat.S_ISSOCK(there.lstat().st_mode):
                raise AddressError(f"{wanted.text}: {there} exists and is no socket; choose another path")
        self._lock(path)
        for left_over in sockets_there:
            if _is_open(left_over):  # by no hub, which would hold the lock
                raise AddressError(f"{wanted.text}: another program has {left_over} open; choose another path")
            try:
                left_over.unlink(missing_ok=True)  # of a killed hub
            except OSError as error:
                raise AddressError(f"{wanted.text}: {left_over} cannot be removed: {error.strerror}") from error
        self._paths.append(path)
        self._make_blockers()

    def _lock(self, path: Path) -> None:
        lock = _beside(path, ".lock")
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise AddressError(f"{lock} cannot be made: {error.strerror}; bind a path in a folder of yours") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size:  # and no hub's, which are empty
            os.close(descriptor)
            raise AddressError(f"{lock} exists and is no hub's lock; choose another path for the socket")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise AddressError(f"another hub already listens on ipc://{path}; end it, or bind another path") from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(lock.stat(), status):
                self._locks.append((lock, descriptor))
                return
        os.close(descriptor)  # its last holder removed it in between, so the lock has no effect
        self._lock(path)

    def shut(self) -> None:
        """Accept no new ipc connections until ``open``: a full socket takes the path, so that clients wait there."""
        for path, (blocker, client) in self._blockers.items():
            temporary = _beside(path, FULL)
            try:
                os.link(path, _beside(path, SHUT))
            except OSError as error:  # somebody has removed the socket, or the file system has no links
                # Event: The socket at an ipc address could not be replaced by one that lets clients wait.
                log.warning("socket_swap_failed", path=str(path), why=str(error))
                continue
            try:
                if temporary.is_socket():  # an earlier attempt has left it
                    temporary.unlink()
                blocker.bind(str(temporary))
                blocker.listen(0)
                client.connect(str(temporary))
                os.rename(temporary, path)
            except OSError as error:  # the name is too long
                log.warning("socket_swap_failed", path=str(path), why=str(error))
                path.unlink(missing_ok=True)

    def open(self) -> None:
        for path in self._blockers:
            try:
                os.rename(_beside(path, SHUT), path)
            except OSError as error:
                log.warning("socket_swap_failed", path=str(path), why=str(error))
        self._make_blockers()

    def _make_blockers(self) -> None:
        self._close_blockers()
        self._blockers = {path: (socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)) for path in self._paths}

    def _close_blockers(self) -> None:
        for ends in self._blockers.values():
            for end in ends:
                end.close()
        self._blockers.clear()

    def close(self) -> None:
        """Remove the files of the ipc addresses; the ROUTER must be closed before."""
        self._close_blockers()
        for each in self.proxied:
            each.close()
        for path in [*self._paths, *(_beside(path, SHUT) for path in self._paths)]:
            path.unlink(missing_ok=True)
        for lock, descriptor in self._locks:
            with contextlib.suppress(OSError):
                lock.unlink(missing_ok=True)
            os.close(descriptor)
        self._paths.clear()
        self._locks.clear()


def _not_bound(text: str, error: OSError | zmq.ZMQError) -> AddressError:
    if error.errno == errno.EADDRINUSE:
        return AddressError(f"{text} is in use; end the other server, or choose another port")
    return AddressError(f"{text} cannot be bound: {error}")


def _is_open(path: Path) -> bool:
    try:
        opened = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"/proc/self/fd/{opened}")  # however long the path is
        except ConnectionRefusedError:
            return False
        except OSError:  # it is full, or takes datagrams
            pass
        finally:
            os.close(opened)
    return True


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


PENDING_MAX = 64  # connections without a ticket so far; the oldest is closed for a new one
BACKLOG = 64


class SideSocket:
    """The side sockets of one hub."""

    def __init__(self, poller: Poller, admit: Callable[[bytes, socket.socket], None]) -> None:
        """Hand the connection of each client to ``admit``, with the ticket that it shows."""
        self._poller, self._admit = poller, admit
        self._listeners: list[tuple[socket.socket, str]] = []
        self._pending: OrderedDict[int, socket.socket] = OrderedDict()

    @property
    def open(self) -> bool:
        return bool(self._listeners)

    def listen(self, address: str) -> None:
        """Open the side socket of this address, if that is ipc; on failure its clients use the wire."""
        bound = parse(address)
        path = side_path(bound.path) if bound.is_ipc else None
        if path is None:
            return
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.setblocking(False)
            listener.bind(path)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            # Event: The side socket of an ipc address cannot be opened: clients step by messages.
            log.warning("side_socket_missing", path=path, why=str(error))
            return
        self._listeners.append((listener, path))
        self._poller.register(listener.fileno(), partial(self._on_connection, listener))

    def _on_connection(self, listener: socket.socket, _: int) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the client has gone
            return
        if descriptor_guard.is_high(connection.fileno()):  # the client uses the wire
            connection.close()
            return
        connection.setblocking(False)
        pid, uid = peer_of(connection)
        if uid != os.getuid():
            # Event: A process of another user came to the side socket, and was refused.
            log.warning("side_socket_refused", once_per=("uid",), pid=pid, uid=uid)
            connection.close()
            return
        while len(self._pending) >= PENDING_MAX:
            self._drop(next(iter(self._pending)))
        descriptor = connection.fileno()
        self._pending[descriptor] = connection
        self._poller.register(descriptor, self._on_ticket)

    def _on_ticket(self, descriptor: int) -> None:
        connection = self._pending[descriptor]
        try:
            ticket = connection.recv(TICKET_BYTES)
        except OSError:
            ticket = b""
        if len(ticket) != TICKET_BYTES:
            self._drop(descriptor)
            return
        del self._pending[descriptor]
        self._poller.unregister(descriptor)
        self._admit(ticket, connection)

    def _drop(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)
        self._pending.pop(descriptor).close()

    def close(self) -> None:
        for descriptor in list(self._pending):
            self._drop(descriptor)
        for listener, path in self._listeners:
            self._poller.unregister(listener.fileno())
            listener.close()
            Path(path).unlink(missing_ok=True)
        self._listeners.clear()
