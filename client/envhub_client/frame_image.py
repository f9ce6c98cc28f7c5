"""A frame of an env for an operator, and its PNG."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from envhub.errors import RemoteProtocolError

_COLOURS = {1: 0, 3: 2, 4: 6}  # by the number of channels, what PNG calls grey, RGB and RGBA


class Frame(NamedTuple):
    """A picture of an env."""

    pixels: np.ndarray  # bytes of shape (height, width, channels), of 1, 3 or 4 channels
    source: str  # "render", or "observation" of an env that draws no frames

    @classmethod
    def of_row(cls, row: dict[str, Any], frames: Sequence[Any]) -> Frame:
        """The frame in a hub's answer; raises ``RemoteProtocolError``."""
        try:
            pixels = np.frombuffer(frames[0], np.uint8).reshape(row["shape"])
            if pixels.ndim != 3 or pixels.shape[2] not in _COLOURS or not pixels.size:
                raise ValueError(f"a frame of shape {pixels.shape}")
            return cls(pixels, str(row["source"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"the hub sent what is no frame: {error}") from error

    def png(self) -> bytes:
        """The frame as a PNG file."""
        height, width, channels = self.pixels.shape
        lines = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter: none
        lines[:, 1:] = self.pixels.reshape(height, -1)
        header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 1)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
