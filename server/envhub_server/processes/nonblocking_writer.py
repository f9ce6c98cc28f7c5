"""Writing to a standard stream of the hub without waiting for its reader."""

from __future__ import annotations

import errno
import os
import select

_NOT_THERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE)


class NonblockingWriter:
    """Writes to a descriptor without waiting; does not own the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    @property
    def gone(self) -> bool:
        """True if the descriptor has no reader any more."""
        return any(events & ~select.POLLOUT for _, events in self._poll.poll(0))

    def write(self, raw: bytes) -> int:
        """Write as much of ``raw`` as fits now; returns the number of bytes written, from its start.

        Lines of up to ``PIPE_BUF`` bytes, with which ``raw`` begins, reach a pipe whole or not at all.
        """
        start = 0
        while start < len(raw):
            most = start + select.PIPE_BUF
            piece = raw[start : most if len(raw) <= most else raw.rfind(b"\n", start, most) + 1 or most]
            written = self._written(piece)
            start += written
            if written < len(piece):
                break
        return start

    def _written(self, piece: bytes) -> int:
        try:
            return os.pwritev(self.descriptor, [piece], -1, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:  # closed or gone, or of a kind that has no such flag
            return self._written_if_ready(piece) if error.errno in _NOT_THERE else 0

    def _written_if_ready(self, piece: bytes) -> int:
        try:
            # A pipe that is ready takes PIPE_BUF bytes without waiting.
            ready = self._poll.poll(0) == [(self.descriptor, select.POLLOUT)]
            return os.write(self.descriptor, piece) if ready else 0
        except OSError:
            return 0
