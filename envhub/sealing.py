"""Seals of memory without a name, which keep a peer from making it smaller: reading what is gone is SIGBUS."""

from __future__ import annotations

import fcntl

# From linux/fcntl.h; Python's fcntl module names them only on some builds.
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4


def seal(fd: int) -> None:
    """Keep everybody from changing the size of a memfd, which must allow that.

    Raises:
        OSError: it does not allow that.
    """
    fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW)


def check_sealed(fd: int) -> None:
    """Refuse memory that whoever gave it could make smaller.

    Raises:
        OSError: this is no memfd.
        ValueError: it is not sealed.
    """
    if not fcntl.fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK:
        raise ValueError("the memory is not sealed against shrinking")
