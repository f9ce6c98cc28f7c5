"""Proof that a hub with keys has another key than this client was given.

Such a hub cannot read the first message of a client, and can say nothing that the client could read: it ends the
connection at once. libzmq then reports the handshake as failed, without a reason, as it does where a hub is silent.

========================================  ================================  ============================================
what is at the address                    how a handshake ends              what that proves
========================================  ================================  ============================================
a hub that does not know this key         with its answer, 400              that, at once
a hub without keys, or one with keys and  by its greeting                   that, at once
a client without
a hub with another key                    by the hub, at once               that, if three in a row do, and a connection
                                                                            on which no hello follows stays open, twice
another user's hub without keys, on this  by the hub, at once               that, if three in a row do, and a greeting
machine                                                                     begins at that user's socket
a hub that is stopped, overloaded or      by the time-out on this side      nothing
full, or a network that loses all
a hub whose program is stalled: only      by the time-out on either side    nothing, for it takes so long
libzmq's thread answers
a hub that ends, or is started again      by the hub, or it is refused      nothing: three in a row do not, or the last
                                                                            connection does not stay open
a forwarder whose hub is gone, or does    by the forwarder, early or late   nothing: no greeting comes
not answer
========================================  ================================  ============================================
"""

from __future__ import annotations

import errno
import math

BROKEN_MAX = 3  # in a row: a hub that ends, or a bad network, may break one or two
_ENDED = (errno.EPIPE, errno.ECONNRESET)  # by the other side; a handshake that has timed out has another number


class BrokenHandshakes:
    """Counts the handshakes in a row that were ended at once by the other side, by the events of a monitor.

    A monitor says no times, and may be read late. So a handshake counts as having begun when the monitor was read
    before its beginning was read there.

    Attributes:
        any: whether the last handshake failed, for whatever reason.
    """

    def __init__(self, at_once_s: float) -> None:
        """Count those that took less than ``at_once_s`` seconds."""
        self.any = False
        self._at_once_s = at_once_s
        self._count = 0
        self._read_s = self._begun_s = -math.inf

    def read(self, now_s: float) -> None:
        """Note that the monitor has no more events."""
        self._read_s = now_s

    def begun(self) -> None:
        """Note that a connection was made."""
        self._begun_s = self._read_s

    def failed(self, number: int, now_s: float) -> bool:
        """Note that the handshake failed, with this error number; whether it ends such a row."""
        self.any = True
        at_once = number in _ENDED and now_s - self._begun_s < self._at_once_s
        self._count = (self._count + 1) % BROKEN_MAX if at_once else 0
        return at_once and not self._count

    def interrupted(self) -> None:
        """Note that something else happened: the row is over."""
        self._count = 0

    def succeeded(self) -> None:
        """Note that a handshake succeeded."""
        self.any, self._count = False, 0
