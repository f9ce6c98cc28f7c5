"""Settings of this process: its end with the hub's, its terminal, and its warnings.

The bootstrap executes this file before it can import a package, on Python 3.8 and later.
"""

import ctypes
import fcntl
import os
import signal
import sys
import termios
import warnings

PR_SET_PDEATHSIG = 1
_MUTE = ("ignore", None, Warning, None, 0)

prctl = ctypes.CDLL(None).prctl  # made once in the zygote, so that workers do not each make it on pages of their own


def die_with_hub(hub: int) -> None:
    """Let the kernel end this process, a child of the hub's main thread, when that thread ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != hub:
        os._exit(1)  # the hub ended before the line above


def leave_terminal() -> None:
    """Make this process a group of its own without a terminal: Ctrl-C is for the program that started it.

    It stays in that program's session. Linux shares the CPUs among sessions first (autogroups), so that on a busy
    machine every wake-up from one session to another waits for the time slices of other programs.
    """
    os.setpgid(0, 0)
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # there is none
        return
    # To read it, or to write to it, could stop this process.
    fcntl.ioctl(terminal, termios.TIOCNOTTY)
    os.close(terminal)


def mute_warnings() -> None:
    """Ignore warnings until workers begin, if the interpreter was started with -W: they may not end its start."""
    if sys.warnoptions:
        warnings.filters.insert(0, _MUTE)  # type: ignore[attr-defined]  # simplefilter removes an equal one of -W


def unmute_warnings() -> None:
    """Undo ``mute_warnings``, in a worker."""
    if _MUTE in warnings.filters:
        warnings.filters.remove(_MUTE)  # type: ignore[attr-defined]
