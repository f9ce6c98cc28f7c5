"""Films of episodes: MP4 files, by PyAV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class Film:
    """An MP4 file (H.264) that grows frame by frame, until it is finished."""

    def __init__(self, path: Path, fps: float) -> None:
        import av

        self._path = path
        self._make_frame = av.VideoFrame.from_ndarray
        self._container = av.open(str(path), "w", format="mp4")
        self._stream: Any = self._container.add_stream("libx264", rate=max(1, round(fps)))
        self._stream.pix_fmt = "yuv420p"
        self._empty = True

    def add(self, frames: np.ndarray) -> None:
        """Add frames, uint8 ``(n, height, width, 3)``; H.264 wants even sides, so an odd one is repeated once."""
        height, width = frames.shape[1:3]
        frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), "edge")
        if self._empty:
            self._stream.height, self._stream.width = frames.shape[1:3]
            self._empty = False
        for frame in frames:
            self._container.mux(self._stream.encode(self._make_frame(np.ascontiguousarray(frame), format="rgb24")))

    def finish(self) -> Path:
        self._container.mux(self._stream.encode())
        self._container.close()
        return self._path

    def discard(self) -> None:
        self._container.close()
        self._path.unlink(missing_ok=True)
