"""Compression of observations for a slow link, by optional libraries."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from envhub.values.codec import DecodeError

LEAST_BYTES = 1 << 12  # a smaller frame is sent uncompressed
WORTH = 0.9  # a compressed frame is sent if its size is less than this fraction
SKIPS_MAX = 63  # frames that are sent uncompressed after failed attempts
ZSTD_LEVEL = 1


def _lz4() -> tuple[Callable[[Any], bytes], Callable[[Any, int], bytes]]:
    block = importlib.import_module("lz4.block")
    return (
        lambda frame: bytes(block.compress(frame, store_size=False)),
        lambda frame, size: bytes(block.decompress(frame, uncompressed_size=size)),
    )


def _zstd() -> tuple[Callable[[Any], bytes], Callable[[Any, int], bytes]]:
    library = importlib.import_module("zstandard")
    writer, reader = library.ZstdCompressor(level=ZSTD_LEVEL), library.ZstdDecompressor()

    def decompress(frame: Any, size: int) -> bytes:
        if library.frame_content_size(frame) != size:  # the library would allocate the size that the sender claims
            raise ValueError("another size")
        return bytes(reader.decompress(frame, allow_extra_data=False))

    return lambda frame: bytes(writer.compress(frame)), decompress


_MAKERS = {"lz4": _lz4, "zstd": _zstd}  # the faster first
METHODS = tuple(_MAKERS)


def available() -> list[str]:
    installed = []
    for name in METHODS:
        with contextlib.suppress(ImportError):
            _MAKERS[name]()
            installed.append(name)
    return installed


class Compressor:
    """Compresses frames; it tries fewer frames while compression saves nothing. Raises ``ImportError``."""

    def __init__(self, method: str) -> None:
        self._compress, _ = _MAKERS[method]()
        self._skips = self._penalty = 0

    def compress(self, frame: Any) -> Any:
        size = memoryview(frame).nbytes
        if size < LEAST_BYTES or self._skips:
            self._skips -= size >= LEAST_BYTES
            return frame
        smaller = self._compress(frame)
        if len(smaller) < WORTH * size:
            self._penalty = 0
            return smaller
        # Each failed attempt in a row doubles the number of frames that are not tried.
        self._skips = self._penalty = min(2 * self._penalty + 1, SKIPS_MAX)
        return frame


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
