"""The owners of a folder: which other users can write to it, or replace it.

A folder whose files decide which code runs, or where actions go, is checked as OpenSSH checks the folder of its keys
(``StrictModes``): itself, without links, and each folder above it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = 0


@dataclass(frozen=True)
class Weakness:
    """The reason why another user can write modules into a folder.

    Attributes:
        place: the folder, one above it, or a file.
        why: who may write to it, in words.
        open: whether its mode says so, which is an oversight; else it belongs to another user, as a volume of a
            container does.
    """

    place: str
    why: str
    open: bool

    def __str__(self) -> str:
        return f"{self.place} {self.why}"


def weakness_of(path: str) -> Weakness | None:
    """Find another user who can write to a file or folder, or replace it; None if there is none.

    None also on Windows, where a mode says nothing of other users.
    """
    if sys.platform == "win32":
        return None
    real, weakness = Path(os.path.realpath(path)), None
    for place in (real, *real.parents):
        try:
            status = place.stat()
        except OSError:  # it has gone, or is in a folder that this user may not look into
            continue
        # In a sticky folder, such as /tmp, only the owner of an entry may replace it. But any user adds entries.
        sticky = bool(status.st_mode & stat.S_ISVTX) and place is not real
        if not sticky and (who := _writers(status)):
            return Weakness(str(place), f"can be written to by {who} (mode {stat.S_IMODE(status.st_mode):o})", True)
        if weakness is None and status.st_uid not in (ROOT, os.geteuid()):
            weakness = Weakness(str(place), f"belongs to {_user(status.st_uid)}", False)
    return weakness


def _writers(status: os.stat_result) -> str:
    if status.st_mode & stat.S_IWOTH:
        return "every user"
    if sys.platform == "win32":
        return ""
    if status.st_mode & stat.S_IWGRP and not any(
        _is_private(status.st_gid, user) for user in (status.st_uid, os.geteuid())
    ):
        return f"the group {_group(status.st_gid)}"
    return ""


def _is_private(group: int, user: int) -> bool:
    """True if a group is that of root, or has no other member than this user, by the name of both."""
    if sys.platform == "win32":
        return True
    import grp
    import pwd

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


def _user(number: int) -> str:
    if sys.platform == "win32":
        return str(number)
    import pwd  # which Windows has not

    with contextlib.suppress(KeyError):
        return f"the user {pwd.getpwuid(number).pw_name}"
    return f"the user {number}"


def _group(number: int) -> str:
    if sys.platform == "win32":
        return str(number)
    import grp

    with contextlib.suppress(KeyError):
        return grp.getgrgid(number).gr_name
    return str(number)
