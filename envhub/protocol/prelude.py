"""The prelude of every message, and the protocol's constants, which both halves share.

PROTOCOL.md is the specification; ``envhub.protocol.hub`` and ``envhub.protocol.client`` are its two halves, without a
socket, a process or a clock. Time is ``now_s``, seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import Any, NamedTuple

from envhub.errors import RemoteProtocolError

MAGIC = b"EHUB"
VERSION = 1  # a peer of another version is refused
PRELUDE = struct.Struct("<4sHBBQ16sQ")  # magic, version, op, after, hub id, session token, seq
NO_SESSION = bytes(16)

pack_head = partial(PRELUDE.pack, MAGIC, VERSION)  # the bytes of a prelude, from its op on

FRAMES_MAX = 1024
FRAME_BYTES_MAX = 1 << 30  # of a reply
BEATS_MAX = 3  # missing heartbeats of a client's connection before the lease runs
RECONNECT_S = 60.0

# Requests of a session that may be without a reply at a time: MAKE's reply says how many numbers they span.
WINDOW, WINDOW_MIN = 4, 2
REPLIES_BYTES_MAX = 1 << 28  # of observations in the replies that a hub keeps of a session for a whole ``WINDOW``

Frame = Any  # bytes, or any buffer
Frames = list[Frame]


class Prelude(NamedTuple):
    """The fixed start of every first frame."""

    op: int
    hub_id: int
    token: bytes
    seq: int
    version: int = VERSION
    after: int = 0  # how far its seq is behind that of the request before it that has no reply; 0 for none

    def pack(self) -> bytes:
        return PRELUDE.pack(MAGIC, self.version, self.op, self.after, *self[1:4])

    @classmethod
    def unpack(cls, frame: Frame) -> Prelude:
        if len(frame) < PRELUDE.size:
            raise RemoteProtocolError(f"a first frame of {len(frame)} bytes is shorter than a prelude")
        magic, version, op, after, hub_id, token, seq = PRELUDE.unpack_from(frame)
        if magic != MAGIC:
            raise RemoteProtocolError("the first frame does not start with EHUB")
        return tuple.__new__(cls, (op, hub_id, token, seq, version, after))  # twice as fast as cls(...)
