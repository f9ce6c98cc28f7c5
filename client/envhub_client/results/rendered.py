"""The frames of envs that are rendered; where an env cannot show one, its last frame or a blank one takes the place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

NOT_RESET = object()  # in place of the frame of an env that was made again after a failure and not yet reset

# Of frames where no frame of the envs was ever seen, by render mode.
_BLANK_SHAPES = {"rgb_array": (64, 64, 3), "depth_array": (64, 64)}


class Frames:
    """The last frame of every env of a session. One frame per env is kept, once it was rendered."""

    def __init__(self, num_envs: int, render_mode: str | None) -> None:
        self._last: list[Any] = [None] * num_envs
        shape = _BLANK_SHAPES.get(render_mode or "")
        self._blank = None if shape is None else np.zeros(shape, np.uint8)
        self._unknown = render_mode not in (None, "human")  # how large frames are

    def lacks_one(self, rendered: Sequence[Any]) -> bool:
        """True if neither these nor earlier frames tell how large a blank one should be."""
        return self._unknown and all(frame is NOT_RESET for frame in rendered)

    def give_up(self) -> None:
        """Lack no frame from now on: an env died when it was reset to show one."""
        self._unknown = False

    def complete(self, rendered: Sequence[Any], rows: Sequence[int]) -> tuple[Any, ...]:
        """These frames of ``rows``, with the env's last frame, or a blank one, for each that is ``NOT_RESET``."""
        self._unknown = False
        for row, frame in zip(rows, rendered, strict=True):
            if isinstance(frame, np.ndarray):
                self._last[row] = frame.copy()  # the caller may draw into the one returned
        shown = next((frame for frame in rendered if frame is not NOT_RESET and frame is not None), None)
        self._blank = self._blank if shown is None else _blank_like(shown)
        both = zip(rows, rendered, strict=True)
        return tuple(self._stand_in(row) if frame is NOT_RESET else frame for row, frame in both)

    def _stand_in(self, row: int) -> Any:
        frame = self._blank if self._last[row] is None else self._last[row]
        return copy.copy(frame)  # the caller may draw into it


def _blank_like(frame: Any) -> Any:
    """A frame of the same kind that shows nothing: black, no frames, or no text."""
    if isinstance(frame, np.ndarray):
        return np.zeros_like(frame)
    return type(frame)() if isinstance(frame, (list, str)) else None
