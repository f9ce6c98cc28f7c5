"""Grant with which a client drives: the arena and the bells, which come through the hub's side socket.

The end of the side socket tells the hub that this client has let go of the arena: nothing that its program still holds
reaches the session, which another client may have now.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import weakref
from typing import Any

from envhub.arena.layout import Layout
from envhub.arena.memory import Arena
from envhub.protocol import messages, validation
from envhub.protocol.messages import Shared
from envhub.transport.descriptors import DescriptorReader, above_stdio
from envhub_client.connection.local_sockets import LocalSockets
from envhub_client.deadline import Deadline

_MAP_NORESERVE, _MREMAP_MAYMOVE, _MREMAP_FIXED = 0x4000, 1, 2  # from linux/mman.h
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_size = ctypes.c_size_t
_libc.mmap.argtypes = [ctypes.c_void_p, _size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, _size, _size, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, _size]
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p

ATTACH_TIMEOUT_S = 5.0
HEAD_BYTES = 1 << 16  # of what comes before and with the first descriptors


class Attachment:
    """Everything that came through a hub's side socket."""

    shared: Shared  # what the hub says of them

    def __init__(self) -> None:
        self.side = socket.socket(socket.AF_UNIX)  # the hub shuts it down when the session has ended
        self._reader = DescriptorReader(self.side)
        self._memory: weakref.ref[Any] | None = None
        self._nbytes = 0  # of the fields in it

    def open(self, sockets: LocalSockets | None, ticket: bytes) -> None:
        """Show the ticket to the hub that has these sockets, and receive what it gives, or raise why not."""
        if sockets is None or not ticket:
            raise OSError("there is no side socket")
        deadline = Deadline(ATTACH_TIMEOUT_S)
        self.side.settimeout(ATTACH_TIMEOUT_S)
        sockets.connect_side(self.side)
        self.side.sendall(ticket)
        self.shared = messages.unpack(Shared, self._read()[4:])
        validation.check(self.shared, validation.REPLY_BOUNDS)
        while len(self._reader.descriptors) < 2 + self.shared.workers:
            self.side.settimeout(max(deadline.left_s(), 0.001))  # 0 would not wait, and fail, too
            self._read()
        self.side.setblocking(False)
        self._reader.descriptors[:] = map(above_stdio, self._reader.descriptors)
        for bell in self._reader.descriptors[1:]:
            os.set_blocking(bell, False)
            os.write(bell, bytes(8))  # wakes no worker, and fails where a ring would

    def _read(self) -> bytes:
        if not (data := self._reader.read(HEAD_BYTES)):
            raise OSError("the hub closed its side socket")
        if self._reader.truncated:
            raise OSError("this process may have no more descriptors")
        return data

    @property
    def bells(self) -> list[int]:
        return self._reader.descriptors

    def arena(self, layout: Layout) -> Arena:
        """The memory, mapped; its descriptor is closed. Raises ``OSError`` or ``ValueError`` for another layout."""
        arena = Arena(layout, self._reader.descriptors[0], in_children=True)  # views of it may be read there
        arena.check()
        self._memory, self._nbytes = arena.memory_ref(), layout.nbytes() + layout.rooms_bytes()
        os.close(self._reader.descriptors.pop(0))
        return arena

    def let_go(self) -> None:
        """Let go of the memory: what still refers to it has a copy of its fields. Then tell the hub."""
        memory = None if self._memory is None else self._memory()
        if memory is not None:
            replace_by_copy(memory, self._nbytes)
        self._memory = None
        with contextlib.suppress(OSError):  # it never was connected, or the hub has gone
            self.side.shutdown(socket.SHUT_RDWR)  # a child that was forked keeps it open, and is no holder
        self.side.close()

    def close(self) -> None:
        """Close all of it; once more, should an interrupt have come in between."""
        self._reader.close()
        self.let_go()


def replace_by_copy(memory: mmap.mmap, nbytes: int) -> None:
    """Put private memory in the place of a mapped file, at once: a copy of its first bytes, and zeros."""
    size = len(memory)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    copy = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)
    if copy == _FAILED:
        raise OSError(ctypes.get_errno(), "no memory for a copy of the arena")
    ctypes.memmove(copy, at, nbytes)
    if _libc.mremap(copy, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, ctypes.c_void_p(at)) == _FAILED:
        error = ctypes.get_errno()
        _libc.munmap(ctypes.c_void_p(copy), size)
        raise OSError(error, "the arena cannot be replaced by a copy")
