"""Regular files at paths that others control, opened without waiting for a pipe or a device."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

# Opening a pipe waits for a writer without the first flag, which has no effect on a regular file. Windows has others.
_FLAGS = ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")


def open_regular_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open the file for reading.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in _FLAGS))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "this is no regular file", os.fspath(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular_file(path: str | os.PathLike[str], bytes_max: int) -> bytes:
    """Read the file.

    Raises:
        OSError: as in ``open_regular_file``, or the file has more than ``bytes_max`` bytes.
    """
    with open_regular_file(path) as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes", os.fspath(path))
    return content
