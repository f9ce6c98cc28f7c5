"""The one ZeroMQ context of a program, which all of its connections share.

A context has an I/O thread, which wakes up for every message. With a context for each of many connections, the threads
take turns at the CPUs, and a step of 8 CartPoles costs nearly twice the CPU time.
"""

from __future__ import annotations

import os
import threading

import zmq

from envhub.transport.sockets import Context

# libzmq has room for 1023 sockets otherwise, and reserves 12 bytes for each. A connection has three: its own, its
# monitor, and the monitor's other end.
SOCKETS_MAX = 16383


class ConnectionContext(zmq.Context["zmq.Socket[bytes]"]):
    """The program's context, as one connection sees it: ``destroy`` closes only the sockets of this connection."""

    def term(self) -> None:
        """Close this view; the context itself stays, for other connections."""
        self.closed = True


class SharedContext:
    """A context that is made at its first use, and ends with the process.

    It belongs to the library alone, so a program may use and terminate ``zmq.Context.instance()`` as it likes.
    """

    def __init__(self, inherited: SharedContext | None = None) -> None:
        """``inherited`` is the one of the parent of a forked child.

        It is kept and not used, because pyzmq would warn of it if it was collected.
        """
        self._inherited = inherited
        self._lock = threading.RLock()  # a signal handler may connect while its thread holds the lock
        self._context: Context | None = None

    def view(self) -> ConnectionContext:
        """A view of it for a new connection, to be destroyed with that."""
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
