"""Compression of observations for a slow link."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from envhub.values.codec import DecodeError

LEAST_BYTES = 1 << 12  # a smaller frame is sent uncompressed
WORTH = 0.9  # a compressed frame is sent if its size is less than this fraction
SKIPS_MAX = 63  # frames that are sent uncompressed after failed attempts
ZSTD_LEVEL = 1
# What saving a byte may cost without a name for the method: a byte takes 8 ns at 1 Gbit/s, and the client restores it.
BYTE_NS = 5.0


def _lz4() -> tuple[Callable[[Any], bytes], Callable[[Any, int], bytes]]:
    block = importlib.import_module("lz4.block")
    return (
        lambda frame: bytes(block.compress(frame, store_size=False)),
        lambda frame, size: bytes(block.decompress(frame, uncompressed_size=size)),
    )


def _zstd() -> tuple[Callable[[Any], bytes], Callable[[Any, int], bytes]]:
    import zstandard

    writer, reader = zstandard.ZstdCompressor(level=ZSTD_LEVEL), zstandard.ZstdDecompressor()

    def decompress(frame: Any, size: int) -> bytes:
        if zstandard.frame_content_size(frame) != size:  # the library would allocate the size that the sender claims
            raise ValueError("another size")
        return bytes(reader.decompress(frame, allow_extra_data=False))

    return lambda frame: bytes(writer.compress(frame)), decompress


_MAKERS = {"zstd": _zstd, "lz4": _lz4}  # the one with the smaller frames first
LIBRARIES = {"zstd": "zstandard", "lz4": "lz4"}  # the second is optional
METHODS = tuple(_MAKERS)


@cache
def available() -> list[str]:
    return [name for name in METHODS if importlib.util.find_spec(LIBRARIES[name]) is not None]  # an import takes longer


class Compressor:
    """Compresses frames; it tries fewer frames while compression is not worth its time. Raises ``ImportError``.

    ``byte_ns`` is the longest time in nanoseconds that saving a byte may take; 0 for any.
    """

    def __init__(self, method: str, byte_ns: float = 0.0, clock_ns: Callable[[], int] = time.thread_time_ns) -> None:
        self._compress, _ = _MAKERS[method]()
        self._byte_ns, self._clock_ns = byte_ns, clock_ns
        self._skips = self._penalty = 0

    def compress(self, frame: Any) -> Any:
        size = memoryview(frame).nbytes
        if size < LEAST_BYTES or self._skips:
            self._skips -= size >= LEAST_BYTES
            return frame
        begun_ns = self._clock_ns()
        compressed = self._compress(frame)
        took_ns, is_smaller = self._clock_ns() - begun_ns, len(compressed) < WORTH * size
        if is_smaller and (not self._byte_ns or took_ns <= self._byte_ns * (size - len(compressed))):
            self._penalty = 0
        else:  # Each failed attempt in a row doubles the number of frames that are not tried.
            self._skips = self._penalty = min(2 * self._penalty + 1, SKIPS_MAX)
        return compressed if is_smaller else frame


def decompressor(method: str) -> Callable[[Any, int], Any]:
    """A function that restores a frame to a size, or raises ``DecodeError``; itself raises ``ImportError``."""
    _, restore = _MAKERS[method]()

    def decompress(frame: Any, size: int) -> Any:
        if len(frame) == size:
            return frame
        try:
            restored = restore(frame, size)
        except Exception as error:  # each library has classes of its own
            raise DecodeError(f"a compressed frame cannot be read: {error}") from error
        if len(restored) != size:
            raise DecodeError(f"a compressed frame holds {len(restored)} bytes where {size} are expected")
        return restored

    return decompress
