"""Frames into and out of the arena: of a client's steps, checked against it, and of the replies to them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from envhub.arena.memory import Arena, ArenaDriver
from envhub.protocol import messages
from envhub.protocol.prelude import Frame, Frames
from envhub.values import actions, codec
from envhub.values.compression import Compressor
from envhub.values.info_columns import Rows, pack_columns

Blob = tuple[int, Frame]  # a row, and what the reply has for this row


class LeafCompressors:
    """Compresses observations, where that saves bytes."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._compressors: list[Compressor] = []  # one for each leaf, since one leaf may save bytes and another not

    def compress(self, observations: Sequence[Frame]) -> Frames:
        self._compressors = self._compressors or [Compressor(self._method) for _ in observations]
        return [each.compress(leaf) for each, leaf in zip(self._compressors, observations, strict=True)]


class StepFrames:
    """Reads the frames of one session's steps, and makes those of the replies."""

    # Most steps have actions of the same codes, so the sizes that follow from them are computed when the codes change.

    def __init__(self, arena: Arena, driver: ArenaDriver) -> None:
        self._arena = arena
        self._driver = driver
        self._sized_codes: bytes | None = None
        self._sizes: list[int] = []
        self.codes = b""  # of the last step, as ``ArenaDriver.post`` takes them, and so are ``arrays``
        self.arrays: Sequence[Frame] = ()
        self.out_of_band = False
        self._out_of_band: list[tuple[int, bytes]] = []

    # --- steps --------------------------------------------------------------------------------------------------------

    def load(self, codes: bytes, frames: Sequence[Frame]) -> str:
        """Take the frames of a step; returns why they do not fit the arena, or an empty text."""
        if codes != self._sized_codes and (problem := self._size(codes)):
            return f"{problem}; no env has moved"
        lengths = [*map(len, frames)]
        if lengths[: len(self._sizes)] != self._sizes or len(lengths) != len(self._sizes) + self.out_of_band:
            return f"action frames of {lengths} bytes where {self._sizes} are due; no env has moved"
        if self.out_of_band and (problem := self._load_out_of_band(frames[-1])):
            return problem
        self.codes, self.arrays = codes, frames  # the frame of actions out of band is the last, and has no buffer
        return ""

    def _size(self, codes: bytes) -> str:
        layout = self._arena.layout
        if len(codes) != len(layout.actions):
            return f"{len(codes)} codes for {len(layout.actions)} action leaves"
        try:
            sizes = actions.sizes(codes, layout.actions, layout.rows)
        except ValueError as error:
            return str(error)
        self._sized_codes, self._sizes, self.out_of_band = codes, sizes, actions.OUT_OF_BAND in codes
        return ""

    def _load_out_of_band(self, frame: Frame) -> str:
        rows = self._arena.layout.rows
        try:
            self._out_of_band = messages.unpack_rows(frame, rows)
        except codec.DecodeError as error:
            return f"{error}; no env has moved"
        complete = [row for row, _ in self._out_of_band] == list(range(rows))
        return "" if complete else "the actions out of band are not one for each row; no env has moved"

    def out_of_band_of(self, rows: Sequence[int]) -> bytes:
        """The actions of these rows that travel out of band, in one frame."""
        return messages.pack_rows(self._out_of_band[row] for row in rows)

    def part(self, rows: Sequence[int], codes: bytes, frames: Sequence[Frame]) -> tuple[np.ndarray, list[np.ndarray]]:
        """The rows of a partial batch, and their actions, one array per leaf; raises ``ValueError``."""
        layout = self._arena.layout
        wanted = {row for row in rows if 0 <= row < layout.rows}
        if not wanted or len(wanted) < len(rows):
            raise ValueError(f"the rows are not different ones of {layout.rows}")
        sizes = actions.sizes(codes, layout.actions, len(rows))
        if len(sizes) != len(layout.actions) or [len(frame) for frame in frames] != sizes:
            raise ValueError(f"action frames of other than {sizes} bytes")
        dtypes = [actions.DTYPES[code & ~actions.PYTHON] for code in codes]
        arrays = [
            np.frombuffer(frame, dtype).reshape(len(rows), *leaf.shape)
            for frame, dtype, leaf in zip(frames, dtypes, layout.actions, strict=True)
        ]
        return np.array(rows, np.int64), arrays

    # --- replies ------------------------------------------------------------------------------------------------------

    def batch(self, results: bool, large_infos: dict[int, bytes] | None) -> Frames:
        """The whole batch: observations, ``results`` if wanted, and infos unless ``large_infos`` is None."""
        arena = self._arena
        frames: Frames = [*self._driver.observations()]
        if results:
            frames.append(arena.results.tobytes())
        if large_infos is not None:
            # A worker may have sent an info and then ended, so that the row's result is another.
            limit, lengths = arena.layout.info_bytes, arena.info_length
            templates = arena.info_template
            large = [(row, info) for row, info in large_infos.items() if lengths[row] > limit and not templates[row]]
            small, columns = arena.all_infos()
            frames += row_frames(sorted([*small, *large], key=itemgetter(0)) if large else small, columns)
        return frames

    def rows(self, rows: np.ndarray, infos: Sequence[Blob]) -> Frames:
        columns = self._arena.columns(rows)
        observations, rewards, terminations, truncations = self._driver.results(rows)
        results = rewards.tobytes() + terminations.tobytes() + truncations.tobytes()
        arrays = [np.ascontiguousarray(leaf) for leaf in observations]
        return [rows.tobytes(), *arrays, results, *row_frames(infos, columns)]


def row_frames(blobs: Sequence[Blob], columns: Sequence[Rows] = ()) -> Frames:
    """One frame of blobs by row, then one of infos in columns; the second never comes alone."""
    if columns:
        return [messages.pack_rows(blobs), pack_columns(columns)]
    return [messages.pack_rows(blobs)] if blobs else []
