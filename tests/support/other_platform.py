"""A process that finds nothing of what other systems lack: as near as Linux comes to macOS and Windows.

Only this process is changed. A hub that it starts is one of Linux. ``os.name`` stays, because ``pathlib`` and others
could not run with another one; so does what tests use to end processes.
"""

from __future__ import annotations

import fcntl
import importlib
import mmap
import os
import resource
import select
import selectors
import signal
import socket
import sys
import sysconfig
import tempfile

# Libraries that read the name of the platform when they are imported, and cannot run as those of another one.
_LIBRARIES = ["asyncio", "multiprocessing.connection", "multiprocessing.spawn", "numpy", "psutil", "subprocess", "zmq"]
_LIBRARIES += ["gymnasium.envs.classic_control", "gymnasium.wrappers", "rich.console", "cyclopts", "hypothesis"]

ONLY_LINUX = {
    fcntl: ["F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE"],
    os: ["memfd_create", "eventfd", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "sched_setscheduler"]
    + ["sched_param", "O_PATH", "O_TMPFILE", "posix_fallocate", "pipe2", "prctl", "RWF_NOWAIT"],
    mmap: ["MADV_DONTFORK", "MADV_DONTDUMP"],  # and ``madvise``, which Windows lacks, cannot be hidden
    resource: ["RUSAGE_THREAD", "RLIMIT_RTTIME", "prlimit"],
    select: ["epoll", "EPOLLIN", "EPOLLOUT", "EPOLLET"],
    signal: ["pidfd_send_signal", "sigtimedwait", "SIGRTMIN", "SIGRTMAX"],
    socket: ["AF_NETLINK", "AF_VSOCK", "SO_PEERCRED", "MSG_CMSG_CLOEXEC", "SOCK_CLOEXEC", "SOCK_NONBLOCK"],
}
ONLY_UNIX = {
    os: ["fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "setpgid", "getpgid", "killpg", "getloadavg"]
    + ["register_at_fork", "set_blocking", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "uname", "fchmod"]
    + ["waitid", "sysconf", "mkfifo", "statvfs", "sendfile", "posix_spawn", "pread", "pwrite", "pwritev"],
    select: ["poll", "POLLOUT", "PIPE_BUF"],
    signal: ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "setitimer", "pthread_sigmask", "SIGPIPE"],
    socket: ["AF_UNIX", "socketpair", "send_fds", "recv_fds", "SCM_RIGHTS", "CMSG_SPACE"],
}
MODULES_OF_UNIX = ["fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog"]


def hide_proc() -> None:
    """Hide the files of ``/proc`` from now on; not in a process that uses psutil."""

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith("/proc"):
            raise FileNotFoundError(arguments[0])

    sys.addaudithook(refuse)


def become(platform: str) -> None:
    """Hide from now on what ``darwin`` or ``win32`` lacks; what was imported before has it still."""
    assert not {"envhub", "envhub_client"} & sys.modules.keys()
    for name in _LIBRARIES:
        importlib.import_module(name)
    tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]  # it has looked when it was imported
    selectors.DefaultSelector = selectors.SelectSelector  # type: ignore[assignment,misc]  # not that of epoll
    sysconfig.get_config_vars()  # it keeps those of the platform on which it is first called
    hidden = [ONLY_LINUX, ONLY_UNIX] if platform == "win32" else [ONLY_LINUX]
    for names in hidden:
        for module, attributes in names.items():
            for attribute in attributes:
                if hasattr(module, attribute):
                    delattr(module, attribute)
    if platform == "win32":
        sys.modules.update(dict.fromkeys(MODULES_OF_UNIX))  # type: ignore[arg-type]  # their import fails
    sys.platform = platform
