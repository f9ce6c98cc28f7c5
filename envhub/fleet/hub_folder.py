"""Folder of a hub: its keys, its socket and its configuration, of its user alone.

A lock on the folder says that its owner lives. The kernel drops it however the owner ends. So a folder that was left
behind is one without a lock, and the next owner on the machine removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from envhub.transport.address import check_private, runtime_folder


class HubFolder:
    """A new folder of this process; folders of processes that have ended are removed first.

    Raises:
        AddressError: another user could put something into the folder of all of them.
        OSError: the folder cannot be made.
    """

    def __init__(self) -> None:
        with _all_folders() as parent:
            remove_unowned(parent)
            self.path = Path(tempfile.mkdtemp(dir=parent))
            self._lock = _lock_of(self.path)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._is_removed = False

    def remove(self) -> None:
        """Remove the folder, unless it is removed, and the folders of processes that have ended."""
        if self._is_removed:
            return
        self._is_removed = True
        shutil.rmtree(self.path, ignore_errors=True)
        with _all_folders() as parent:
            os.close(self._lock)
            remove_unowned(parent)


def remove_unowned(parent: Path) -> None:
    """Remove the folders in this one whose owners have ended."""
    for folder in parent.iterdir():
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            lock = _lock_of(folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _lock_of(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


@contextlib.contextmanager
def _all_folders() -> Iterator[Path]:
    """Let no other process make or remove a folder meanwhile."""
    parent = runtime_folder() / "fleets"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(parent)
    lock = _lock_of(parent)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield parent
    finally:
        os.close(lock)
