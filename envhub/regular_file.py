"""Opens files that a user names or others may have put there, without waiting for a pipe or a device."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


def open_regular_file(path: str | os.PathLike[str]) -> BinaryIO:
    """The file, to be read.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    # To open a pipe that has no writer waits for one; of a regular file the flag changes nothing.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
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
        OSError: as of ``open_regular_file``, or there is more in it than this.
    """
    with open_regular_file(path) as file:
        found = file.read(bytes_max + 1)
    if len(found) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes", os.fspath(path))
    return found
