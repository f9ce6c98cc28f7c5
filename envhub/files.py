"""Files and folders that other users of this machine may control."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

# Opening a pipe waits for a writer without the first flag, which has no effect on a regular file. Windows has others.
_FLAGS = ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")


def open_regular_file(path: str | os.PathLike[str], flags: int = 0) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | flags | sum(getattr(os, flag, 0) for flag in _FLAGS))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "this is no regular file", os.fspath(path))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular_file(path: str | os.PathLike[str], bytes_max: int) -> bytes:
    with open_regular_file(path) as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"it has more than {bytes_max} bytes", os.fspath(path))
    return content


ROOT = 0
_LINKS_MAX = 40  # in one path, as for Linux


@dataclass(frozen=True)
class Weakness:
    """The reason why another user can write modules into a folder."""

    path: str  # the folder, one above it, or a file
    why: str  # who may write to it, in words
    # Whether its mode says so, which is an oversight; else it belongs to another user, as a volume of a container does.
    open: bool

    def __str__(self) -> str:
        return f"{self.path} {self.why}"


if sys.platform == "win32":  # where a mode says nothing of other users

    def weakness_of(path: str) -> Weakness | None:
        return None

else:
    import grp
    import pwd

    def weakness_of(path: str) -> Weakness | None:
        """Find another user who can write to a file or folder, or replace it; None if there is none."""
        weakness, way = None, [*_way(path)]
        # Where root has another id, as in a container without privileges, the first folder is its own.
        trusted = {ROOT, os.geteuid(), os.stat("/").st_uid, *_unmapped()}
        for path in reversed(way):
            try:
                status = os.lstat(path)
            except OSError:  # it has gone, or is in a folder that this user may not look into
                continue
            # In a sticky folder, such as /tmp, only the owner of an entry may replace it. But any user adds entries.
            sticky = bool(status.st_mode & stat.S_ISVTX) and path is not way[-1]
            is_link = stat.S_ISLNK(status.st_mode)  # whose mode means nothing
            if not sticky and not is_link and (who := _writers(status)):
                return Weakness(path, f"can be written to by {who} (mode {stat.S_IMODE(status.st_mode):o})", True)
            if weakness is None and status.st_uid not in trusted:
                weakness = Weakness(path, f"belongs to the user {_name(pwd.getpwuid, status.st_uid)}", False)
        return weakness

    def _unmapped() -> list[int]:
        """The id that Linux shows in place of root's in a container with a first folder of its own, as Apptainer's."""
        with contextlib.suppress(OSError), open("/proc/sys/kernel/overflowuid") as file, open(
            "/proc/self/uid_map"
        ) as maps:
            overflow = int(file.read())
            ranges = [(int(first), int(count)) for first, _, count in map(str.split, maps)]
            if not any(first <= overflow < first + count for first, count in ranges):
                return [overflow]
        return []

    def _way(path: str) -> Iterator[str]:
        """Each folder and link that leads to a path, from the first folder on; the last one is what the path names."""
        at, links = "/", 0
        left = (path if os.path.isabs(path) else os.path.join(os.getcwd(), path)).split("/")[::-1]
        yield at
        while left:
            name = left.pop()
            if name == "..":
                at = os.path.dirname(at)
                yield at
            elif name not in ("", "."):
                at = os.path.join(at, name)
                yield at
                with contextlib.suppress(OSError):  # it is no link
                    target = os.readlink(at)
                    links += 1
                    left += target.split("/")[::-1] if links <= _LINKS_MAX else ()
                    at = "/" if target.startswith("/") else os.path.dirname(at)

    def _writers(status: os.stat_result) -> str:
        if status.st_mode & stat.S_IWOTH:
            return "every user"
        if status.st_mode & stat.S_IWGRP and not any(
            _is_private(status.st_gid, user) for user in (status.st_uid, os.geteuid())
        ):
            return f"the group {_name(grp.getgrgid, status.st_gid)}"
        return ""

    def _is_private(group: int, user: int) -> bool:
        """True if a group is that of root, or has no other member than this user, by the name of both."""
        if group == ROOT:
            return True
        try:
            owner = pwd.getpwuid(user)
        except KeyError:  # of another machine, as a container's volume is
            return group == user
        if owner.pw_gid != group:
            return False
        try:
            entry = grp.getgrgid(group)
        except KeyError:
            return group == user
        return entry.gr_name == owner.pw_name and {*entry.gr_mem} <= {owner.pw_name}

    def _name(entry_of: Callable[[int], Any], number: int) -> str:
        with contextlib.suppress(KeyError):
            return str(entry_of(number)[0])
        return str(number)


def user_text(user: int) -> str:
    """A user of this machine for a message, such as ``user 1000 (alice)``."""
    if sys.platform != "win32":
        with contextlib.suppress(KeyError):
            return f"user {user} ({pwd.getpwuid(user).pw_name})"
    return f"user {user}"
