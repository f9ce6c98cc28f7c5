"""Settings of this process: its core files, its freed memory, and the signals of its job. Python 3.8 and later.

A terminal, a batch system or a service manager sends a signal to every process of a job, and means the program. Its
hub, workers and recorder end with it, and no signal but SIGKILL ends them before. They start with these signals
blocked. A worker unblocks them, since a mask would also hold for the processes that its envs start, and has handlers
that do nothing, which no executed program inherits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import Any, Iterator

if sys.platform != "win32":
    import resource


# Those that cannot be blocked, those of a fault, and those that end nothing.
_OTHERS = "KILL", "STOP", "CONT", "CHLD", "SEGV", "BUS", "FPE", "ILL", "ABRT", "TRAP", "SYS"
JOB_SIGNALS = {each for each in signal.valid_signals() if getattr(each, "name", "")[3:] not in _OTHERS}
TERMINAL_SIGNALS = {each for each in JOB_SIGNALS if getattr(each, "name", "")[3:] in ("INT", "QUIT", "TSTP")}
STACKS = FILE_STACKS = 0
if sys.platform == "linux":
    # Make a worker write its stacks, to its stderr and into a file for the hub: real-time signals, which neither batch
    # systems nor simulators use.
    STACKS, FILE_STACKS = signal.SIGRTMAX - 4, signal.SIGRTMAX - 5


@contextlib.contextmanager
def blocked(numbers: set[Any] = JOB_SIGNALS) -> Iterator[None]:
    """Within the context, block these signals in this thread and in the processes that it starts."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if sys.platform == "linux":
    _libc = ctypes.CDLL(None)
    _libc.signal.argtypes, _libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    # A function of C that has no effect. A handler of Python's own would use the small stack that ``faulthandler`` has
    # for crashes, where several signals at once overflow it.
    _NOTHING = ctypes.cast(_libc.abs, ctypes.c_void_p)

    def handle_job_signals() -> None:
        """Give the signals handlers that do nothing, except those that this process ignores or handles otherwise."""
        # Not Python's own handler of SIGINT: after each use asyncio would put that in the place of the one below.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in JOB_SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                _libc.signal(number, _NOTHING)

    def unblock_job_signals() -> None:
        """Let the handlers be called, in a worker; in a process that it forks the signals have their usual effects."""
        # A signal to a new process waits until that has its handlers.
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_restore)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)

    _masks: list[set[Any]] = []

    def _before_fork() -> None:
        _masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS))

    def _after_fork() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())

    def _restore() -> None:
        for number in JOB_SIGNALS:
            now = (ctypes.c_void_p * 64)()  # a ``struct sigaction``, which begins with the handler
            _libc.sigaction(number, None, now)
            if now[0] == _NOTHING.value:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        _after_fork()


# The largest values that glibc reaches by itself are 32 MiB and 64 MiB, but only after it has freed such blocks.
MAPPED_FROM_BYTES = 32 << 20  # a larger block has its own mapping, and is returned when it is freed
KEPT_BYTES_MAX = 32 << 20  # at the end of the heap

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4


def keep_freed_memory() -> None:
    """Keep freed memory, in forks too: to clear a new page at its first access takes ten times as long as a copy."""
    _set_malloc({_M_MMAP_THRESHOLD: MAPPED_FROM_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES_MAX})


def keep_large_blocks(kept_bytes: int) -> None:
    """Keep blocks of any size, up to ``kept_bytes`` or ``KEPT_BYTES_MAX``, whichever is more."""
    _set_malloc({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: max(kept_bytes, KEPT_BYTES_MAX)})


def _set_malloc(options: dict[int, int]) -> None:
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in options.items():
            mallopt(option, value)


def write_no_core_file() -> None:
    """Have the kernel write no core file of this process and its children, unless a child allows its own."""
    if sys.platform != "win32":  # which writes none
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if sys.platform == "linux":

    def prepare_hub_process() -> None:
        """Make this process one in which a hub can run; called before anything is opened or started."""
        # Closed standard streams are opened: else a socket would get the number of one, and prints would go into it.
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(descriptor, True)
        os.close(descriptor)
        # As many descriptors as the system allows: libzmq ends the process when it cannot accept a connection.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        write_no_core_file()
        keep_freed_memory()
