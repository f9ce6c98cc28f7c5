"""Descriptors received over a Unix socket, and sealed memory that is passed as one. Python 3.8 and later."""

from __future__ import annotations

import array
import fcntl
import os
import socket
from typing import Any

DESCRIPTORS_MAX = 250  # per message; the kernel passes up to 253

_ITEM_BYTES = array.array("i").itemsize


class DescriptorReader:
    """Reads bytes and up to ``descriptors_max`` descriptors at a time; owns the descriptors until they are taken."""

    def __init__(self, connection: socket.socket, descriptors_max: int = DESCRIPTORS_MAX) -> None:
        self._socket = connection
        self._ancillary_bytes = socket.CMSG_SPACE(descriptors_max * _ITEM_BYTES) if descriptors_max else 0
        self._received: list[Any] = []  # results of recvmsg that were not unpacked yet
        self.descriptors: list[int] = []  # received, and not taken yet
        self.truncated = False  # whether descriptors were lost to this process's limit of open files

    def read(self, size: int) -> bytes:
        # One call into C receives and stores them: an interrupt in between would leak descriptors.
        arguments = (size,), (self._ancillary_bytes,), (socket.MSG_CMSG_CLOEXEC,)
        self._received.extend(map(self._socket.recvmsg, *arguments))
        data, _, flags, _ = self._received[-1]
        self.truncated = self.truncated or bool(flags & socket.MSG_CTRUNC)
        self._unpack()
        return bytes(data)

    def _unpack(self) -> None:
        descriptors = array.array("i")
        for _, ancillary, _, _ in self._received:
            for level, kind, raw in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(raw[: len(raw) - len(raw) % _ITEM_BYTES])
        self.descriptors, self._received = [*self.descriptors, *descriptors], []

    def take(self, count: int) -> list[int]:
        taken, self.descriptors = self.descriptors[:count], self.descriptors[count:]
        return taken

    def close(self) -> None:
        """Close the descriptors that were not taken; after an interrupt it may be called again."""
        self._unpack()
        while self.descriptors:
            os.close(self.descriptors.pop())


def above_stdio(descriptor: int) -> int:
    if descriptor > 2:
        return descriptor
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return copy


# From linux/fcntl.h; Python's fcntl module names them only on some builds.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4


def new_memory(name: str, nbytes: int, reserved: int = 0) -> int:
    """A memfd of zeros whose size is sealed; the caller owns the descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if reserved:
            os.posix_fallocate(fd, 0, reserved)
        if nbytes > reserved:
            os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_sealed(fd: int) -> None:
    """Raise if a peer could truncate the memory; raises ``OSError`` or ``ValueError``."""
    if not fcntl.fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK:
        raise ValueError("the memory is not sealed against shrinking")
