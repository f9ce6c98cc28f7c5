"""An announcement: the file by which a hub tells where it is, in a folder that hubs and clients share.

A hub has one file, ``hub-NAME.json``, which it removes at its end. Every ``period_s`` seconds it sets the time of the
file to the present: that needs no space, so a full disk stops no renewal. A file that is ``PERIODS_MAX`` periods old is
stale: its hub has ended without removing it, or is stopped.

Clocks of machines differ, and so the age is by one clock alone, that of the file system: the time of a file that the
reader makes in the folder, less that of the announcement. A reader that cannot make a file there takes the time of the
newest announcement in its place, of those that are near to its own clock if there are any: a file from the future must
not make those of living hubs stale.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
import urllib.parse
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from envhub.errors import AddressError, printable
from envhub.regular_file import open_regular_file
from envhub.transport import address as addresses
from envhub.transport.folder_owners import ROOT, weakness_of

NAME_CHARS_MAX = 64
NAME = rf"\A[ -~]{{1,{NAME_CHARS_MAX}}}\Z"
FILE_BYTES_MAX = 1 << 14
FILES_MAX = 1024  # announcements in a folder
ADDRESSES_MAX = 16
PERIOD_S = 5.0
PERIODS_MAX = 3
CLOCK_ERROR_S_MAX = 60.0  # of a machine's clock, by that of a folder
KEPT_S = 86400.0  # for an operator to see that a hub was killed
_PREFIX, _SUFFIX = "hub-", ".json"
_CLOCK = ".clock-"

_Address = Annotated[str, Meta(min_length=1, max_length=512)]
_Addresses = Annotated[list[_Address], Meta(max_length=ADDRESSES_MAX)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 50)]
_Inode = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """A hub's description of itself. There is no secret in it, and a reader ignores fields that it does not know.

    Attributes:
        name: of the hub, by which a fleet knows it; no other hub in the folder has it.
        hub: the number of this run of the hub, 16 hexadecimal digits.
        addresses: for other machines, ``tcp://HOST:PORT``, the best first.
        local_addresses: for this machine alone: of ipc, and of tcp at a loopback address.
        server_key: the hub's public key, as text; empty where it has no keys.
        host: the name of its machine.
        boot_id: tells the machine, and its run since it was started, from all others; empty where it is not known.
        pid_namespace, network_namespace: in which ``pid`` and the loopback addresses count; 0 where not known.
        pid: of the hub.
        version: of the hub.
        cpus: that it may use.
        envs_max, sessions_max: that may exist in it at one time.
        period_s: the seconds from one renewal to the next. The time of the last renewal is the file's own.
    """

    name: Annotated[str, Meta(pattern=NAME)]
    hub: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    addresses: _Addresses = msgspec.field(default_factory=list)
    local_addresses: _Addresses = msgspec.field(default_factory=list)
    server_key: Annotated[str, Meta(pattern=r"\A([A-Za-z0-9_-]{43})?\Z")] = ""
    host: Annotated[str, Meta(pattern=r"\A[ -~]{0,253}\Z")] = ""
    boot_id: Annotated[str, Meta(pattern=r"\A[0-9a-f-]{0,64}\Z")] = ""
    pid_namespace: _Inode = 0
    network_namespace: _Inode = 0
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]
    version: Annotated[str, Meta(pattern=r"\A[ -~]{0,64}\Z")] = ""
    cpus: _Count = 0
    envs_max: _Count = 0
    sessions_max: _Count = 0
    period_s: Annotated[float, Meta(ge=0.1, le=3600.0)] = PERIOD_S

    @property
    def file_name(self) -> str:
        """The name of the file of a hub of this name."""
        return f"{_PREFIX}{urllib.parse.quote(self.name, safe='')}{_SUFFIX}"

    def is_of_this_machine(self) -> bool:
        """True if the hub runs on this machine, so that its sockets may be reached by their paths."""
        return bool(self.boot_id) and self.boot_id == boot_id()

    def has_ended(self) -> bool:
        """True if the hub ran on this machine and its process has ended; false also where that is not known."""
        if not self.is_of_this_machine() or self.pid_namespace not in {namespace("pid")} - {0}:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # of another user
            return False
        return False


class Skipped(NamedTuple):
    """A file that names no hub to connect to.

    Attributes:
        file: its name, in which what a terminal cannot show is escaped.
        why: the reason, in words.
        stale: what it says, where that is only too old; else None.
    """

    file: str
    why: str
    stale: Announcement | None = None


def boot_id() -> str:
    """The number of this run of this machine's kernel; empty where the kernel gives none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""


def namespace(kind: str) -> int:
    """The number of this process's namespace of this kind, such as ``pid``; 0 where the kernel gives none."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    return 0


# --- one file ---------------------------------------------------------------------------------------------------------


def encode(announcement: Announcement) -> bytes:
    """Return the content of an announcement's file."""
    return msgspec.json.format(msgspec.json.encode(announcement)) + b"\n"


def decode(content: bytes) -> Announcement:
    """Return what a file of this content says.

    Raises:
        ValueError: it is no announcement; the text says why, and has no control characters.
    """
    if len(content) > FILE_BYTES_MAX:
        raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
    try:
        announcement = msgspec.json.decode(content, type=Announcement)
        for text in (*announcement.addresses, *announcement.local_addresses):
            if addresses.parse_hub(text).keys is not None:
                raise ValueError("an address in it has keys")
    except AddressError as error:
        raise ValueError(printable(str(error))) from error
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no announcement: {printable(str(error))}") from error
    return announcement


def read(path: Path) -> tuple[Announcement, float]:
    """Return what a file says, and the time of the file by the file system's clock.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no announcement, or is not a regular file of this user or of root; the text says why.
    """
    try:
        with open_regular_file(path) as file:
            status = os.fstat(file.fileno())
            _check_owner(status)
            content = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from error
    announcement = decode(content)
    if announcement.file_name != path.name:
        raise ValueError(f"it is of a hub with another name, {announcement.name!r}")
    return announcement, status.st_mtime


def _check_owner(status: os.stat_result) -> None:
    """Refuse a file that another user has written: its address decides where actions and code go."""
    if sys.platform == "win32":  # where a mode says nothing of other users
        return
    if status.st_uid not in (ROOT, os.geteuid()):
        raise ValueError(f"it belongs to another user ({status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError("others may write to it")


# --- a folder ---------------------------------------------------------------------------------------------------------


def check_folder(folder: Path) -> None:
    """Refuse a folder into which other users could put announcements.

    Raises:
        AddressError: another user than root may write to it or replace it.
    """
    if (weakness := weakness_of(str(folder))) is not None:
        raise AddressError(
            f"announcements in {folder} would decide where actions and code go, and {weakness}: "
            "use a folder that only you can write to (chmod go-w)"
        )


def read_folder(folder: Path) -> tuple[list[Announcement], list[Skipped]]:
    """Return the hubs that are announced in a folder, by name, and the files that are skipped.

    Raises:
        AddressError: as in ``check_folder``, or there are too many files.
        OSError: the folder cannot be read.
    """
    check_folder(folder)
    now_s = _clock(folder)
    ages: list[tuple[Announcement, float]] = []
    skipped = []
    for name in _file_names(folder):
        try:
            ages.append(read(folder / name))
        except FileNotFoundError:  # its hub has ended just now
            continue
        except ValueError as error:
            skipped.append(Skipped(repr(name)[1:-1], str(error)))
    now_s = _newest(written_s for _, written_s in ages) if now_s is None else now_s
    hubs = []
    for each, written_s in ages:
        why = _staleness(each, now_s - written_s)
        skipped.append(Skipped(each.file_name, why, each)) if why else hubs.append(each)
    return sorted(hubs, key=lambda each: each.name), skipped


def announced_by(path: Path) -> Announcement | None:
    """Return what a hub announces by this file; None where it is stale, says nothing or does not exist."""
    now_s = _clock(path.parent)
    try:
        announcement, written_s = read(path)
    except (FileNotFoundError, ValueError):
        return None
    age_s = 0.0 if now_s is None else now_s - written_s
    return None if _staleness(announcement, age_s) else announcement


def remove_old(folder: Path) -> None:
    """Remove the files that killed hubs and readers have left in a folder, once they are ``KEPT_S`` old.

    Raises:
        OSError: the folder cannot be read or written.
    """
    now_s = _clock(folder)
    with os.scandir(folder) as entries:
        for entry in entries:
            if now_s is None or not entry.name.startswith((_PREFIX, f".{_PREFIX}", _CLOCK)):
                continue
            with contextlib.suppress(FileNotFoundError):  # another hub removes it at the same time
                if entry.is_file(follow_symlinks=False) and abs(now_s - entry.stat().st_mtime) > KEPT_S:
                    os.unlink(entry.path)


def _staleness(announcement: Announcement, age_s: float) -> str:
    """The reason why an announcement of this age is stale; empty if it is not."""
    if announcement.has_ended():
        return f"its hub, process {announcement.pid} of this machine, has ended"
    age_s_max = PERIODS_MAX * announcement.period_s
    if age_s > age_s_max:
        return f"it is stale: last renewed {age_s:.0f} s ago"
    if age_s < -age_s_max:  # it would not become stale for so long
        return f"it is stale: its time is {-age_s:.0f} s later than now by the folder's clock"
    return ""


def _newest(times_s: Iterable[float]) -> float:
    """The latest of these times that are near to this machine's clock, or of all if none is; 0 for none."""
    times_s, own_s = [*times_s], time.time()
    return max([each for each in times_s if abs(each - own_s) <= CLOCK_ERROR_S_MAX] or times_s, default=0.0)


def _file_names(folder: Path) -> list[str]:
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX):
                names.append(entry.name)
                if len(names) > FILES_MAX:
                    raise AddressError(f"{folder} has more than {FILES_MAX} announcements; remove the stale ones")
    return sorted(names)


def _clock(folder: Path) -> float | None:
    """The time now by the clock of a folder's file system; None where this user makes no file there.

    On NFS it is the server's clock. A new file also makes a client of NFS forget the folder's old content.
    """
    path = folder / f"{_CLOCK}{os.urandom(8).hex()}"  # of this reader alone, so no other one removes it
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            return os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)
    except OSError:  # the folder, or its file system, is for reading only
        return None
