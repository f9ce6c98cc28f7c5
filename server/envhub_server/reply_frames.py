"""The frames of a reply that brings the outcome of a reset or step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envhub import messages
from envhub.columns import Rows, pack_columns
from envhub.compression import Compressor
from envhub_server.memory import Memory


class Sender:
    """Makes frames of observations, compressed where that is wanted and worth it."""

    def __init__(self, method: str) -> None:
        """By this method of ``envhub.compression``, or none."""
        self._method = method
        self._compressors: list[Compressor] = []  # per leaf: some leaves may be worth it, and others not

    def sendable(self, observations: list[np.ndarray]) -> list[Any]:
        """A frame of each leaf."""
        if not self._method:
            return observations
        self._compressors = self._compressors or [Compressor(self._method) for _ in observations]
        return [each.compress(leaf) for each, leaf in zip(self._compressors, observations, strict=True)]


Sendable = Callable[[list[np.ndarray]], list[Any]]


class ReplyFrames:
    """One reply's frames: arrays, then what is said by row, then what is said in columns.

    Attributes:
        rows: row and blob of each that has one.
    """

    def __init__(self, memory: Memory, sendable: Sendable) -> None:
        """From this memory; ``sendable`` makes frames of observations."""
        self.rows: list[tuple[int, Any]] = []
        self._memory = memory
        self._arena = memory.arena
        self._sendable = sendable
        self._arrays: list[Any] = []
        self._columns: list[Rows] = []

    def batch(self, results: bool, infos: dict[int, bytes] | None) -> None:
        """The whole batch, with its results; and infos, if there are any, of which these do not stand in the arena."""
        self._arrays += self._sendable(self._memory.slots.observations())
        if results:
            self._arrays.append(self._arena.results.tobytes())
        if infos is not None:
            self.rows = sorted([*self._arena.small_infos(), *infos.items()], key=lambda pair: pair[0])
            self._columns = self._arena.columns()

    def part(self, rows: np.ndarray) -> None:
        """These rows, which were posted as a part of the batch, with their results."""
        assert self._memory.parts is not None
        self._columns = self._arena.columns(rows)
        seen, rewards, terminations, truncations = self._memory.parts.outcome(rows)
        results = rewards.tobytes() + terminations.tobytes() + truncations.tobytes()
        self._arrays += [rows.tobytes(), *self._sendable([np.ascontiguousarray(leaf) for leaf in seen]), results]

    def frames(self) -> list[Any]:
        """All of them."""
        found = list(self._arrays)
        if self.rows or self._columns:
            found.append(messages.pack_rows(self.rows))
        if self._columns:
            found.append(pack_columns(self._columns))
        return found
