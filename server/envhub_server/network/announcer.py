"""A hub's announcement, see ``envhub.transport.announcement``: written, renewed and removed.

Files may be on a network, and the hub's loop must not wait for them. So a thread writes them, each time that the loop
asks it to: the announcement of a hub whose loop is stuck or stopped becomes stale.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

import envhub
from envhub.errors import AddressError
from envhub.transport import address as addresses
from envhub.transport import announcement as announcements
from envhub.transport.announcement import ADDRESSES_MAX, NAME_CHARS_MAX, PERIOD_S, Announcement
from envhub.transport.keys import text_of
from envhub_server.log import Logger
from envhub_server.loop.loop import Loop

REMOVE_S = 2.0  # for the file to be removed at the hub's end
UNNAMED_PERIOD_S = 1.0  # from one look at the hub that has the name to the next
_WILDCARDS = ("*", "0.0.0.0", "[::]")
_ANYWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))  # for documentation: nothing is sent

_FileState = tuple[int, int]

log = Logger("envhub.hub")


class Announcer:
    """The announcement of one hub. It owns the file and the thread.

    Clients know a hub by its name, so that does not change while the hub runs. If another hub has the name at the
    start, this one is not announced until that hub has renewed its file, and so lives, or its file is stale.

    Attributes:
        announcement: its content, with the name that the hub has or waits for.
    """

    def __init__(self, folder: Path, announcement: Announcement, loop: Loop, on_name: Callable[[str], None]) -> None:
        """Announce it in this folder, once it is opened; the loop calls ``on_name`` with the name that it has."""
        self.announcement = announcement
        self._on_name = on_name
        self._folder, self._loop = folder.absolute(), loop
        self._due, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="envhub-announcer", daemon=True)
        self._failure = ""  # of the last renewal
        ports = [addresses.parse(each).port for each in (*announcement.addresses, *announcement.local_addresses)]
        suffix = f"-{next((port for port in ports if port > 0), announcement.pid)}"
        self._names = announcement.name, announcement.name[: NAME_CHARS_MAX - len(suffix)] + suffix
        self._holder: _FileState | None = None  # file of the first name at this hub's start
        self._has_name = False
        self._logged = ""  # name that was logged last

    def open(self) -> None:
        """Write the announcement, and renew it from now on.

        Raises:
            AddressError: the folder cannot be used, or other hubs have all names that this one may have.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            announcements.check_folder(self._folder)
            announcements.remove_old(self._folder)
            self._holder = _state(self._path(self.announcement))
            if not self._take_name(self._names[0]):
                self._check_second_name()
                log.info("announcement_waits", path=str(self._path(self.announcement)))
        except OSError as error:
            raise AddressError(f"this hub cannot be announced in {self._folder}: {error.strerror}") from error
        self._log_name()
        self._thread.start()
        self._plan()

    def renew(self) -> None:
        """Have the file renewed by the thread; called by the loop."""
        if self._failure:
            log.warning("announcement_failed", path=str(self._path(self.announcement)), why=self._failure)
        self._log_name()
        self._due.set()
        self._plan()

    def _log_name(self) -> None:
        """Log the name under which the hub is announced, if it is a new one."""
        written = self.announcement
        if self._has_name and written.name != self._logged:
            log.info("announced", folder=str(self._folder), name=written.name, addresses=written.addresses)
            self._logged = written.name
            self._on_name(written.name)

    def _plan(self) -> None:
        self._loop.schedule.set(self.renew, self._loop.clock.now_s() + (PERIOD_S if self._logged else UNNAMED_PERIOD_S))

    def withdraw(self) -> None:
        """Have the file removed by the thread: the hub takes no new sessions any more."""
        self._ended = True
        self._due.set()

    def close(self) -> None:
        """Wait until the file is removed."""
        self.withdraw()
        if self._thread.ident is not None:
            self._thread.join(REMOVE_S)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._due.wait()
            self._due.clear()
            if self._ended:
                break
            try:
                self._renew()
                self._failure = ""
            except (OSError, AddressError) as error:
                self._failure = str(error)
        with contextlib.suppress(OSError):
            path = self._path(self.announcement)
            if _hub_of(path) == self.announcement.hub:
                path.unlink()

    def _renew(self) -> None:
        path = self._path(self.announcement)
        hub = _hub_of(path)
        if hub == self.announcement.hub:
            os.utime(path)  # which a full disk allows
        elif hub is None or _state(path) == self._holder:
            self._take_name(self.announcement.name)
        elif not self._take_name(self._names[1]):  # the hub that has the name lives
            self._check_second_name()

    def _take_name(self, name: str) -> bool:
        """Write the file under this name; false if another hub has it.

        Raises:
            OSError: the file cannot be written.
        """
        named = self._named(name)
        path = self._path(named)
        with self._written(named) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                if self._is_taken(path):
                    return False
                os.rename(temporary, path)
        self.announcement, self._has_name = named, True
        return True

    def _check_second_name(self) -> None:
        """Check that the name with this hub's port is free.

        Raises:
            AddressError: another hub has it.
        """
        name = self._names[1]
        if self._is_taken(self._path(self._named(name))):
            raise AddressError(f"other hubs are announced in {self._folder} as {name}: give this one another --name")

    def _named(self, name: str) -> Announcement:
        return msgspec.structs.replace(self.announcement, name=name)

    def _is_taken(self, path: Path) -> bool:
        """True if another hub announces itself by this file, and is not bound where this one is."""
        other = announcements.announced_by(path)
        return other is not None and not {*other.addresses} & {*self.announcement.addresses}

    def _path(self, announcement: Announcement) -> Path:
        return self._folder / announcement.file_name

    @contextlib.contextmanager
    def _written(self, announcement: Announcement) -> Iterator[Path]:
        """Write an announcement into a hidden file, which is removed afterwards unless it was renamed."""
        path = self._folder / f".{announcement.file_name}.{announcement.hub}"
        # Another user may read it: its owner is what a client checks.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(path, flags, 0o644), "wb") as file:
                file.write(announcements.encode(announcement))
            yield path
        finally:
            path.unlink(missing_ok=True)


def _hub_of(path: Path) -> str | None:
    """The number of the hub that has written a file; None where it does not exist or is no announcement."""
    try:
        return announcements.read(path)[0].hub
    except (FileNotFoundError, ValueError):
        return None


def _state(path: Path) -> _FileState | None:
    """The inode and the time of a file, which each renewal changes; None where it does not exist."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def announcement_of(name: str, bound: Sequence[str], hub_id: int, server_key: bytes, **capacity: int) -> Announcement:
    """Return the announcement of the hub of this process, which has this name and is bound to these addresses.

    ``server_key`` is its public key, or empty; ``capacity`` has ``cpus``, ``envs_max`` and ``sessions_max``.
    """
    for_others, local = _places(bound)
    return Announcement(
        name=_printable(name) or "hub",
        hub=f"{hub_id:016x}",
        addresses=for_others,
        local_addresses=local,
        server_key=text_of(server_key),
        host=_printable(socket.gethostname()),
        boot_id=announcements.boot_id(),
        pid_namespace=announcements.namespace("pid"),
        network_namespace=announcements.namespace("net"),
        pid=os.getpid(),
        version=envhub.__version__,
        **capacity,
    )


def _printable(name: str) -> str:
    return re.sub("[^ -~]", "?", name)[:NAME_CHARS_MAX]


def _places(bound: Sequence[str]) -> tuple[list[str], list[str]]:
    """Addresses for other machines, and for this one alone, of a hub that is bound to these addresses."""
    for_others: list[str] = []
    local: list[str] = []
    for text in bound:
        parsed = addresses.parse(text)
        if parsed.is_ipc:
            local.insert(0, f"ipc://{os.path.abspath(parsed.path)}")
        elif parsed.is_loopback:
            local.append(text)
        elif parsed.host in _WILDCARDS:
            local.append(f"tcp://127.0.0.1:{parsed.port}")
            for_others += [f"tcp://{host}:{parsed.port}" for host in _hosts(parsed.is_ipv6)]
        else:
            for_others.append(text)
    return for_others[:ADDRESSES_MAX], local[:ADDRESSES_MAX]


def _hosts(is_ipv6: bool) -> list[str]:
    """The name of this machine, if it resolves here, and the IP address by which it reaches others."""
    hosts = []
    with contextlib.suppress(OSError, UnicodeError):
        socket.getaddrinfo(socket.gethostname(), None)
        hosts.append(socket.gethostname())
    for family, anywhere in _ANYWHERE[: 1 + is_ipv6]:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))
            host = probe.getsockname()[0]
            hosts.append(f"[{host}]" if family == socket.AF_INET6 else host)
    return hosts
