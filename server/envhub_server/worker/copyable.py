"""The parts of a process that a fork of it shares with it or lacks, by which a snapshot would silently go wrong.

A fork copies private memory exactly. Both processes use the same files at one offset, pipes, sockets and shared memory;
the fork has neither the children of the process, nor its timers, its locks of files and its other threads. Files that
are only read are opened again in the fork. Everything else is listed, and then there is no snapshot.

libc's fork runs handlers, by which OpenBLAS ends its pool of threads before the fork and starts it again when it is
needed, in both processes. GCC's OpenMP has no such handler: ``pause_openmp`` ends its pool. So threads are counted
after the fork. With a pool that is left then, the fork would wait for ever at its first parallel loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import socket
import stat
import threading
from typing import Collection, Iterator, NamedTuple

from envhub_server.ipc import process_marks

PHRASES_MAX = 8
OWN_MEMORY = "/memfd:envhub-"  # of a worker itself; how ``/proc`` names it, in mappings and descriptors
HARMLESS_DEVICES = {f"/dev/{name}" for name in ("full", "null", "random", "urandom", "zero")}
HARMLESS_THREADS = {"SDLTimer"}  # pygame leaves it, and it has nothing to do

PF_EXITING = 0x4  # linux/sched.h, in the flags of ``/proc/PID/stat``
NETLINK_KOBJECT_UEVENT = 15  # linux/netlink.h: news of devices
OMP_PAUSE_HARD = 2  # omp.h: the pool ends, and variables that are private to its threads are lost
_SHARED_AND_WRITABLE = re.compile(rb"^\S+ .w.s (?:\S+ +){3}(.*)$", re.MULTILINE)
_LIBRARY = re.compile(rb"^\S+ r-xp (?:\S+ +){3}(/.*)$", re.MULTILINE)
_OPENMP = re.compile(r"(gomp|iomp5|libomp)[^/]*$")
_TIMERS = {name: getattr(signal, name) for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")}


def what_cannot_be_copied(own: Collection[int]) -> list[str]:
    """List what a fork of this process would share with it or lack, each in words such as "the pipe 9"; at most 9.

    Threads are not among them: see ``threads_left``. Left out are ``own`` descriptors, 1, 2, and ``OWN_MEMORY``.
    """
    shared = _shared_memory(_read("/proc/self/maps"))
    phrases = [f"the child process {pid} ({_process_name(pid)})" for pid in process_marks.children(os.getpid())]
    phrases += [phrase for name, phrase in shared.items() if not name.startswith(OWN_MEMORY)]
    files = (file for file in open_files(own) if not file.path.startswith(OWN_MEMORY))
    phrases += filter(None, (_why_not(file, shared) for file in files))
    phrases += [f"the timer {name}" for name, timer in _TIMERS.items() if any(signal.getitimer(timer))]
    phrases += ["a timer of POSIX"] * bool(_read("/proc/self/timers"))
    phrases = [*dict.fromkeys(phrases)]
    more = len(phrases) - PHRASES_MAX
    return phrases if more <= 0 else [*phrases[:PHRASES_MAX], f"and {more} more"]


def pause_openmp() -> None:
    """End OpenMP's pools of threads, which start again as large as they were, so results stay the same."""
    if len(os.listdir("/proc/self/task")) == 1:
        return  # most processes have no pool, and need not read their mappings for it
    for path in _openmp_libraries(_read("/proc/self/maps")):
        with contextlib.suppress(OSError, AttributeError):  # the file was deleted, or is older than OpenMP 5.0
            ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW).omp_pause_resource_all(OMP_PAUSE_HARD)


def threads_left() -> list[str]:
    """The names of the threads of this process, without its main one and harmless ones.

    It is called in the process that has forked, after the fork: the copy has none of these threads.
    """
    # Where a thread has no name of its own for the kernel, it has the process's.
    own, names = _process_name(os.getpid()), {str(each.native_id): each.name for each in threading.enumerate()}
    threads = {each: _read(f"/proc/self/task/{each}/stat") for each in os.listdir("/proc/self/task")}
    del threads[str(os.getpid())]
    running = {each: name for each, stat in threads.items() if (name := _running_thread(stat))}
    running = {each: names.get(each, name) if name == own else name for each, name in running.items()}
    return sorted(name for name in running.values() if name not in HARMLESS_THREADS)


def reopen_files(own: Collection[int]) -> None:
    """Open the files that are only read again, in the copy, each at its offset; raises ``OSError``.

    Descriptors that were duplicated from one another share their offset afterwards, too. What the other process reads
    meanwhile moves the offset, so it waits until this has returned.
    """
    files: dict[tuple[int, int], list[list[OpenFile]]] = {}
    for file in open_files(own):
        if file.is_only_read:
            same = files.setdefault((file.status.st_dev, file.status.st_ino), [])
            duplicates = next((each for each in same if _is_duplicate(each[0].number, file.number)), None)
            if duplicates is None:
                same.append([file])
            else:
                duplicates.append(file)
    for duplicates in (each for same in files.values() for each in same):
        opened = duplicates[0].open()
        for file in duplicates:
            os.dup2(opened, file.number, inheritable=not file.flags & os.O_CLOEXEC)
        os.close(opened)


class OpenFile(NamedTuple):
    """An open descriptor, whatever it belongs to, as ``/proc`` describes it."""

    number: int
    path: str  # or a kind and a number, such as "pipe:[123]"
    status: os.stat_result
    flags: int
    offset: int
    is_locked: bool

    @property
    def is_only_read(self) -> bool:
        """True for a file or folder that was opened for reading."""
        # One that is open by O_PATH has no offset.
        mode = self.status.st_mode
        is_file = self.path.startswith("/") and (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
        return is_file and not self.flags & (os.O_ACCMODE | os.O_PATH)

    def open(self) -> int:
        """A descriptor of the same file at the same offset, which is not the other one's; also of a deleted file."""
        opened = os.open(f"/proc/self/fd/{self.number}", self.flags & ~os.O_NOFOLLOW)  # for this path is a link
        try:
            os.lseek(opened, self.offset, os.SEEK_SET)
        except OSError:
            os.close(opened)
            raise
        return opened


def open_files(own: Collection[int]) -> Iterator[OpenFile]:
    """The open descriptors of this process, without its ``own``, 1 and 2."""
    for number in sorted({*map(int, os.listdir("/proc/self/fd"))} - {1, 2, *own}):
        with contextlib.suppress(FileNotFoundError):  # the descriptor by which they were listed
            link = b"/proc/self/fd/%d" % number
            path, status = os.readlink(link).decode(errors="backslashreplace"), os.stat(link)
            yield OpenFile(number, path, status, *_parse_fdinfo(_read(f"/proc/self/fdinfo/{number}")))


def _parse_fdinfo(text: bytes) -> tuple[int, int, bool]:
    """Flags, offset and whether a lock is held."""
    offset, flags = text.split(None, 4)[1:4:2]  # the first two lines; what follows differs by kind
    return int(flags, 8), int(offset), b"\nlock:" in text


def _why_not(file: OpenFile, shared: Collection[str]) -> str:
    """The phrase for a descriptor that cannot be copied; empty if it can be."""
    kind, _, name = file.path.partition(":")
    mode = file.status.st_mode
    if file.flags & os.O_PATH or file.path in shared or file.path in HARMLESS_DEVICES:
        return ""
    if kind == "socket":
        text = _describe_socket(file.number)
        return f"the socket {file.number} ({text})" if text else ""
    if kind == "anon_inode":
        return f"the {name.strip('[]')} {file.number}"
    if kind == "pipe" or stat.S_ISFIFO(mode):
        return f"the pipe {file.number}" + (f" ({file.path})" if file.path.startswith("/") else "")
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        return f"the device {file.path}"
    if not file.path.startswith("/"):
        return f"the descriptor {file.number} ({file.path})"
    return _why_not_reopened(file)


def _why_not_reopened(file: OpenFile) -> str:
    if not file.is_only_read:
        return f"the file {file.path}, open for writing"
    if file.is_locked:
        return f"the file {file.path}, locked"
    if file.path.startswith(f"/proc/{os.getpid()}/"):
        return f"the file {file.path}, which is about this process"
    try:
        os.close(file.open())
    except OSError as error:
        return f"the file {file.path}, which cannot be opened again ({error.strerror})"
    return ""


def _is_duplicate(number: int, other: int) -> bool:
    """True if two descriptors are of one open file, as those that ``os.dup`` makes."""
    # An open file has a signal that says it is ready, which is not sent unless the file is asynchronous. By it they are
    # told apart where kcmp(2) is forbidden.
    before = fcntl.fcntl(number, fcntl.F_GETSIG)
    another = signal.SIGIO if fcntl.fcntl(other, fcntl.F_GETSIG) != signal.SIGIO else signal.SIGURG
    fcntl.fcntl(number, fcntl.F_SETSIG, another)
    is_same = fcntl.fcntl(other, fcntl.F_GETSIG) == another
    fcntl.fcntl(number, fcntl.F_SETSIG, before)
    return is_same


def _describe_socket(number: int) -> str:
    """The family and type of a socket, with its peer's address or else its own; empty for a harmless one."""
    blocks = os.get_blocking(number)
    try:
        opened = socket.socket(fileno=number)
    except OSError:  # some families of sockets have no address, as those of the kernel's ciphers
        return "of an unknown kind"
    try:
        os.set_blocking(number, blocks)  # ``socket.setdefaulttimeout`` is for new sockets
        address = opened.getsockname()
        with contextlib.suppress(OSError):  # it is not connected
            address = opened.getpeername() or address
        if opened.family == socket.AF_NETLINK and opened.proto == NETLINK_KOBJECT_UEVENT:
            return ""  # pygame has one, for joysticks
        return ", ".join(str(getattr(each, "name", each)) for each in (opened.family, opened.type, address) if each)
    finally:
        opened.detach()


def _shared_memory(maps: bytes) -> dict[str, str]:
    """The phrase for each shared and writable mapping, by its name in ``/proc/self/maps``."""
    shared = {}
    for name in (each.decode(errors="backslashreplace") for each in _SHARED_AND_WRITABLE.findall(maps)):
        text = "anonymous" if name == "/dev/zero (deleted)" else name
        if text.startswith("/dev/shm/sem."):
            shared[name] = f"the semaphore {name}"
        elif text.startswith("/dev/") and not text.startswith("/dev/shm/"):
            shared[name] = f"the device {name}"
        else:
            shared[name] = f"shared writable memory ({text})"
    return shared


def _openmp_libraries(maps: bytes) -> list[str]:
    return sorted(filter(_OPENMP.search, {os.fsdecode(path) for path in _LIBRARY.findall(maps)}))


def _running_thread(text: bytes) -> str:
    """The name of a thread, by its ``stat``; empty if it has ended."""
    # A thread that was joined ends shortly after the join has returned, and is listed until then.
    before, _, after = text.rpartition(b")")
    is_ended = not text or int(after.split()[6]) & PF_EXITING
    return "" if is_ended else before.partition(b"(")[2].decode(errors="backslashreplace")


def _process_name(pid: int) -> str:
    return _read(f"/proc/{pid}/comm").decode(errors="backslashreplace").rstrip("\n")


def _read(path: str) -> bytes:
    """The contents of a file of ``/proc``; empty if the thread or process that it describes has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path, "rb", buffering=0) as file:
        return file.read()
    return b""
