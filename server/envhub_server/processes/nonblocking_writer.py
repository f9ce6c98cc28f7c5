"""A standard stream of the hub: written to as far as its reader has room, so that it can never hold the hub up."""

from __future__ import annotations

import errno
import os
import select

_NOT_THERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ESPIPE)


class NonblockingWriter:
    """Writes to a descriptor that it does not own, and never waits."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    @property
    def gone(self) -> bool:
        """Whether nobody will ever read it."""
        return any(events & ~select.POLLOUT for _, events in self._poll.poll(0))

    def write(self, raw: bytes) -> int:
        """How many bytes of ``raw`` were taken, from its start; the rest waits for a reader, or has none."""
        for start in range(0, len(raw), select.PIPE_BUF):
            piece = raw[start : start + select.PIPE_BUF]
            written = self._written(piece)
            if written < len(piece):
                return start + written
        return len(raw)

    def _written(self, piece: bytes) -> int:
        try:
            return os.pwritev(self.descriptor, [piece], -1, os.RWF_NOWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:  # where it is not closed or gone, the kernel has no such writing for its kind
            return self._written_if_ready(piece) if error.errno in _NOT_THERE else 0

    def _written_if_ready(self, piece: bytes) -> int:
        try:
            # A pipe that is ready takes as much as PIPE_BUF without waiting.
            ready = self._poll.poll(0) == [(self.descriptor, select.POLLOUT)]
            return os.write(self.descriptor, piece) if ready else 0
        except OSError:
            return 0
