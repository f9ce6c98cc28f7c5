"""The process that records, as the program has it that starts it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from envhub.job_signals import blocked
from envhub.recording.options import RecordOptions
from envhub.transport.address import environment
from envhub.values import codec
from envhub.values.leaf import OBJECT, Leaf

MESSAGE_BYTES_MAX = 1 << 16
ORDER_BYTES_MAX = 1 << 17  # of what the process is told in one message
ORDERS_WAITING_MAX = 4096  # that the socket has no room for

# The empty entry comes first in its path: the process must not find a minari.py of the folder in which it starts.
_BOOT = "import sys; sys.path[:] = filter(None, sys.path); from envhub.recording.process import main; main({})"


class RecorderHandle:
    """A process of ``envhub.recording.process``; it ends once it is closed, or its program has ended.

    Where ``control`` does not block, orders that it has no room for wait until ``flush``.

    Attributes:
        control: the socket to it; ``answer`` reads what comes by it.
        process: it; the caller waits for its end.
    """

    def __init__(self) -> None:
        """Start it.

        Raises:
            OSError: there is no process or descriptor left.
        """
        self._waiting: deque[tuple[bytes, list[int]]] = deque()  # orders, each with descriptors that are sent with it
        self.control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with other, blocked():  # it ends once its program has, and everything is written
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT.format(other.fileno())],
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**environment(os.environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        except BaseException:
            self.control.close()
            raise

    def set_up(self, setup: Mapping[str, Any]) -> None:
        """Say what is recorded, as ``setup_of`` makes it.

        Raises:
            OSError: the process has ended, or too much waits for it.
        """
        described = os.memfd_create("envhub-recording-setup")
        try:
            with open(described, "wb", closefd=False) as file:
                file.write(codec.encode(dict(setup)))
        except BaseException:
            os.close(described)
            raise
        self._say({"say": "setup"}, [described])

    def add_line(self, number: int, env_ids: Sequence[int], film: Sequence[int], queue_bytes: int) -> socket.socket:
        """A line for the envs of these numbers, of which some are filmed: the end of who writes the tape.

        The tape has up to ``queue_bytes``, or one step in each block.

        Raises:
            OSError: the process has ended, or too much waits for it, or there is no descriptor left, or these are too
                many envs for one message.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            about = {"env_ids": [*env_ids], "film": [*film], "queue_bytes": queue_bytes}
            order = {"say": "line", "number": number, **about}
            self._say(order, [theirs.detach()])
        except BaseException:
            ours.close()
            raise
        return ours

    def line_next(self, number: int) -> None:
        """Say that the other end of a line has its envs from now on, after all others that had them.

        Raises:
            OSError: as of ``set_up``.
        """
        self._say({"say": "next", "number": number})

    def line_ended(self, number: int, why: str) -> None:
        """Say that the other end of a line has ended; its episodes under way failed so, or are cut if it is empty.

        Raises:
            OSError: as of ``set_up``.
        """
        self._say({"say": "ended", "number": number, "why": why})

    def close(self) -> None:
        """Have everything written; the last answer, which is ``closed``, follows, and the end of the process.

        Raises:
            OSError: the process has ended.
        """
        self._waiting.append((codec.encode({"say": "close"}), []))
        self.flush()
        self._hurry()

    @property
    def is_waiting(self) -> bool:
        """True if there are orders that the socket has no room for."""
        return bool(self._waiting)

    def flush(self) -> None:
        """Send the orders that wait, as far as the socket has room for them.

        Raises:
            OSError: the process has ended.
        """
        while self._waiting:
            message, descriptors = self._waiting[0]
            try:
                socket.send_fds(self.control, [message], descriptors)
            except BlockingIOError:
                return
            self._waiting.popleft()
            _close_all(descriptors)

    def give_up(self) -> None:
        """Forget the orders that wait, and have the process write what it has, and end."""
        while self._waiting:
            _close_all(self._waiting.popleft()[1])
        with contextlib.suppress(OSError):  # it has ended
            self.control.shutdown(socket.SHUT_WR)
        self._hurry()

    def _hurry(self) -> None:
        if self.process.poll() is None:
            share_cpu(self.process.pid)

    def _say(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send an order with descriptors, which are owned from now on, after those that wait."""
        message = codec.encode(dict(order))
        try:
            if len(message) > ORDER_BYTES_MAX:
                raise OSError(errno.EMSGSIZE, "its workers have too many envs each")
            if len(self._waiting) >= ORDERS_WAITING_MAX:
                raise OSError(errno.ENOBUFS, f"the process that records leaves {ORDERS_WAITING_MAX} orders unread")
        except OSError:
            _close_all(descriptors)
            raise
        self._waiting.append((message, [*descriptors]))
        self.flush()

    def answer(self) -> Any:
        """Receive its next message (folder, counts, its end, refused envs); None once it has ended.

        Raises:
            BlockingIOError, TimeoutError: it says nothing, as of any socket.
        """
        try:
            message = self.control.recv(MESSAGE_BYTES_MAX)
        except ConnectionResetError:
            return None
        return codec.decode(message) if message else None


def share_cpu(pid: int) -> None:
    """Let a process that records run at normal priority: no step waits for a CPU then, and it may take minutes else."""
    for thread in os.listdir(f"/proc/{pid}/task"):  # those of encoders, too
        with contextlib.suppress(OSError):  # of a user who may not do that, or of a thread that has ended
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def why_unrecordable(leaves: Iterable[Leaf]) -> str:
    """The reason why envs whose spaces have these leaves cannot be recorded; empty if they can."""
    for leaf in leaves:
        if leaf == OBJECT:
            return "a space has parts that are no arrays of a fixed size"
        if not leaf.items:
            return "a space has parts without elements, which Minari cannot store"
    return ""


def setup_of(
    options: RecordOptions, folder: str, claimed: bool, spaces_of_one: Sequence[bytes], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Description of a session for the process that writes.

    Args:
        options: of the recording.
        folder: of the recording; if it is not ``claimed``, the one in which that is made.
        claimed: whether ``folder`` is the recording's own.
        spaces_of_one: the encoded descriptions of the spaces of an env.
        about: what is written next to the episodes.
    """
    return {
        "folder": folder,
        "claimed": claimed,
        "spaces": [*spaces_of_one],
        "spec": "",
        "plain_spec": b"",
        "metadata": b"",
        "only": options.only,
        "about": codec.encode({**about, "every": options.every, "only": options.only}, codec.as_repr),
        "blobs": {},
        "limits": {
            "episodes_max": options.episodes_max,
            "bytes_max": options.bytes_max,
            "folder_bytes_max": options.folder_bytes_max,
            "held_bytes": options.queue_bytes,
        },
    }


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def missing_packages(films: bool) -> str:
    """Name the packages that recording lacks, and how to install them; empty if none."""
    packages = {"minari": "minari", "pyarrow": "pyarrow", "PIL": "Pillow", **({"av": "av"} if films else {})}
    missing = [name for module, name in packages.items() if find_spec(module) is None]
    return f'recording needs {" and ".join(missing)}: pip install "envhub-rl[record]"' if missing else ""
