"""Seals of anonymous memory: they keep a peer from truncating it, after which a read would raise SIGBUS."""

from __future__ import annotations

import fcntl
import os

# From linux/fcntl.h; Python's fcntl module names them only on some builds.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4


def new_memory(name: str, nbytes: int, reserved: int = 0) -> int:
    """A memfd of zeros whose size is sealed; the caller owns the descriptor.

    The pages of its first ``reserved`` bytes are allocated at once, other pages when they are written.

    Raises:
        OSError: there is not enough memory (ENOSPC, ENOMEM); nothing is left behind.
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
    """Raise if a peer could truncate the memory.

    Raises:
        OSError: the descriptor is not a memfd.
        ValueError: it is not sealed.
    """
    if not fcntl.fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK:
        raise ValueError("the memory is not sealed against shrinking")
