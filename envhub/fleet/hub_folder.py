"""Folder of a hub: its keys, its socket and its configuration, of its user alone.

A lock on the folder says that its owner lives. The kernel drops it however the owner ends. So a folder that was left
behind is one without a lock, and the next owner on the machine removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from envhub.transport.address import check_private, runtime_folder


class HubFolder:
    """A new folder of this process; folders of processes that have ended are removed first.

    Attributes:
        path: of the folder.
        descriptor: of the folder, with its lock. A path through it leads there also where the folder is replaced.

    Raises:
        AddressError: another user could put something into the folder of all of them, or replace it.
        OSError: the folder cannot be made.
    """

    def __init__(self) -> None:
        name = secrets.token_hex(5)  # the path of a socket is limited
        with _all_folders() as parent:
            remove_unowned(parent)
            os.mkdir(name, 0o700, dir_fd=parent)
            self.descriptor = _opened(name, parent)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self.path = Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
        self._is_removed = False

    def remove(self) -> None:
        """Remove the folder, unless it is removed, and the folders of processes that have ended."""
        if self._is_removed:
            return
        self._is_removed = True
        os.close(self.descriptor)
        with _all_folders() as parent:
            remove_unowned(parent)


def remove_unowned(parent: int) -> None:
    """Remove the folders in this one, given by a descriptor, whose owners have ended."""
    for name in os.listdir(parent):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
            lock = _opened(name, parent)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(f"/proc/self/fd/{parent}/{name}", ignore_errors=True)
            finally:
                os.close(lock)


def _opened(folder: str, parent: int | None = None) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


@contextlib.contextmanager
def _all_folders() -> Iterator[int]:
    """Let no other process make or remove a folder meanwhile; gives a descriptor of the folder of all of them."""
    parent = runtime_folder() / "fleets"
    for folder in (parent.parent, parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)
    lock = _opened(str(parent))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)
