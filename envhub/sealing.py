"""Seals of memory without a name, which keep a peer from making it smaller: reading what is gone is SIGBUS."""

from __future__ import annotations

import fcntl
import os

# From linux/fcntl.h; Python's fcntl module names them only on some builds.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4


def new_memory(name: str, nbytes: int, reserved: int = 0) -> int:
    """A memfd of zeros whose size nobody can change; the caller owns the descriptor.

    Its pages are taken as they are written, those of its first ``reserved`` bytes at once.

    Raises:
        OSError: the memory cannot be had (ENOSPC, ENOMEM); nothing is left behind.
    """
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
    """Refuse memory that whoever gave it could make smaller.

    Raises:
        OSError: this is no memfd.
        ValueError: it is not sealed.
    """
    if not fcntl.fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK:
        raise ValueError("the memory is not sealed against shrinking")
