"""The framing of ZMTP 3 (RFC 23), as far as a proxy has to read it to bound what libzmq keeps of a client: pure.

libzmq limits the size of a frame, and neither the number of a message's frames nor their sum. It hands a message over
once the message is whole. So a proxy counts the frames and bytes that a client has sent and that the hub has not read.
Where CURVE encrypts, the sizes of frames are plain, but not which frame ends a message or is a heartbeat.
"""

from __future__ import annotations

GREETING_BYTES = 64
MAJOR_AT, MAJOR_MIN = 10, 3  # of the version, in the greeting
LONG, COMMAND = 2, 4  # flags of a frame
CURVE_BYTES = 33  # that CURVE adds to a frame's body: a name, a nonce, a code and flags
HEARTBEAT_BYTES = range(5, 24)  # of the body of a PING or PONG: its name, a time to live, up to 16 bytes of context
FORGIVEN_MAX = 256  # frames like heartbeats, at each message that the hub reads: libzmq may leave out a PONG
READY, ERROR = b"\x05READY", b"\x05ERROR"  # commands of a hub's handshake: the client is let in, or is not
WELCOME = b"\x07WELCOME"[: len(READY)]  # the command by which a hub accepts that a client knows its public key
HANDSHAKE_BYTES_MAX = 4096  # that a client may send before the hub's READY; libzmq's have 500

# Why no more bytes of a client may pass.
FRAMES, BYTES, HANDSHAKE, FOREIGN = "frames", "bytes", "handshake", "foreign"


class ClientFrames:
    """Counts what one client sends, and says how much of it may pass to the hub.

    ``unread_frames`` and ``unread_bytes`` have passed and are not read; ``left`` bytes of a frame are still to come;
    ``full`` says why no more may pass.
    """

    def __init__(self, frames_max: int, bytes_max: int, curve: bool) -> None:
        self._frames_max, self._bytes_max = frames_max, bytes_max
        self._curve_bytes = CURVE_BYTES if curve else 0
        self._greeting = 0  # bytes of it that have passed
        self._handshake_left = HANDSHAKE_BYTES_MAX
        self._ready = False
        self._heartbeats = 0  # of the unread frames, those that may be some
        self._frames_read = self._bytes_read = 0
        self.unread_frames = self.unread_bytes = self.left = 0
        self.full = ""

    @property
    def partial(self) -> bool:
        return self.left > 0 or self.unread_frames > self._heartbeats

    def ready(self) -> None:
        self._ready = True
        if self.full == HANDSHAKE:
            self.full = ""

    def answered(self, pongs: int) -> None:
        count = min(pongs, self._heartbeats)
        self._heartbeats -= count
        self._less(count, 0)

    def read(self, frames: int, nbytes: int) -> None:
        if frames == self._frames_read and nbytes == self._bytes_read:
            return
        self._less(frames - self._frames_read, nbytes - self._bytes_read)
        self._frames_read, self._bytes_read = frames, nbytes
        self._heartbeats = min(self._heartbeats, self.unread_frames)
        forgiven = min(self._heartbeats, FORGIVEN_MAX)
        self._heartbeats -= forgiven
        self._less(forgiven, 0)

    def _less(self, frames: int, nbytes: int) -> None:
        self.unread_frames = max(0, self.unread_frames - frames)
        self.unread_bytes = max(0, self.unread_bytes - nbytes) if self.unread_frames else 0
        if self.full in (FRAMES, BYTES):
            self.full = ""

    def admit(self, data: memoryview) -> int:
        """Count what comes next; returns how many of these bytes may pass now, and the others are to be shown again."""
        at, end = 0, len(data)
        if self._greeting < GREETING_BYTES:
            at = self._admit_greeting(data)
        while not self.full:
            if self.left:
                step = min(self.left, end - at)
                at += step
                self.left -= step
            if end - at < 2:
                break
            flags = data[at]
            if not flags & LONG:
                head, size = 2, data[at + 1]
            elif end - at >= 9:
                head, size = 9, int.from_bytes(data[at + 1 : at + 9], "big")
            else:
                break
            self.full = self._count(flags, head, size)
            if not self.full:
                self.left = head + size
        return at

    def _admit_greeting(self, data: memoryview) -> int:
        """An older version has another framing. libzmq ends such a client by itself, which needs no more of it."""
        seen = self._greeting
        passed = min(GREETING_BYTES - seen, len(data))
        self._greeting += passed
        signed = (seen or not passed or data[0] == 0xFF) and (not seen <= 9 < seen + passed or data[9 - seen] & 1)
        if not signed or (seen <= MAJOR_AT < seen + passed and data[MAJOR_AT - seen] < MAJOR_MIN):
            self._greeting, self.full = GREETING_BYTES, FOREIGN
        return passed

    def _count(self, flags: int, head: int, size: int) -> str:
        if not self._ready:
            if head + size > self._handshake_left:
                return HANDSHAKE
            self._handshake_left -= head + size
            return ""
        body = max(0, size - self._curve_bytes)
        if self.unread_frames >= self._frames_max:
            return FRAMES
        if self.unread_bytes + body > self._bytes_max:
            return BYTES
        self.unread_frames += 1
        self.unread_bytes += body
        if body in HEARTBEAT_BYTES and (self._curve_bytes or flags & COMMAND):
            self._heartbeats += 1
        return ""


class HubFrames:
    """Finds in what the hub sends a client whether it knows the hub's key (``welcomed``), is let in, or is not."""

    def __init__(self, curve: bool) -> None:
        self._curve_bytes = CURVE_BYTES if curve else 0
        self._left = GREETING_BYTES
        self._head = b""  # of a frame, whose other bytes have not come yet
        self.welcomed = self.ready = self.denied = False

    def scan(self, data: memoryview) -> int:
        """Look at what comes next; returns how many answers to heartbeats may be in it."""
        if self._left >= len(data):
            self._left -= len(data)
            return 0
        if self._head:
            data, self._head = memoryview(self._head + data), b""
        at, end, pongs = self._left, len(data), 0
        while at < end:
            flags = data[at]
            head = 9 if flags & LONG else 2
            if end - at < head:
                break
            size = int.from_bytes(data[at + 1 : at + 9], "big") if flags & LONG else data[at + 1]
            if self.ready:
                may_be = self._curve_bytes or flags & COMMAND
                pongs += bool(may_be) and size - self._curve_bytes in HEARTBEAT_BYTES
            elif flags & COMMAND:
                name = bytes(data[at + head : at + head + len(READY)])
                if len(name) < min(size, len(READY)):
                    break
                self.welcomed = self.welcomed or name == WELCOME
                self.ready, self.denied = name == READY, self.denied or name == ERROR
            at += head + size
        self._left = max(0, at - end)
        self._head = bytes(data[at:])
        return pongs
