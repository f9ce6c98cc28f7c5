"""The frames of a reply: arrays, then what is said by row, then what is said in columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from envhub.protocol import messages
from envhub.values.compression import Compressor
from envhub.values.info_columns import Rows, pack_columns
from envhub_server.memory.session_memory import SessionMemory


class Sender:
    """Makes frames of observations, compressed where that is wanted and worth it."""

    def __init__(self, method: str) -> None:
        """By this method of ``envhub.values.compression``."""
        self._method = method
        self._compressors: list[Compressor] = []  # per leaf: some leaves may be worth it, and others not

    def sendable(self, observations: list[np.ndarray]) -> list[Any]:
        """A frame of each leaf."""
        self._compressors = self._compressors or [Compressor(self._method) for _ in observations]
        return [each.compress(leaf) for each, leaf in zip(self._compressors, observations, strict=True)]


Sendable = Callable[[list[np.ndarray]], list[Any]]  # makes frames of observations, in a list of its own
Said = tuple[int, Any]  # a row, and the blob that it has


def batch_frames(memory: SessionMemory, sendable: Sendable, results: bool, infos: dict[int, bytes] | None) -> list[Any]:
    """The whole batch, with its results; and infos, if there are any, of which these do not stand in the arena."""
    arena = memory.arena
    found = sendable(memory.driver.observations())
    if results:
        found.append(arena.results.tobytes())
    if infos is not None:
        # A worker may have sent one and then ended, so that the row's outcome is another.
        limit, lengths = arena.layout.info_bytes, arena.info_length
        large = [(row, info) for row, info in infos.items() if lengths[row] > limit]
        said = sorted([*arena.small_infos(), *large], key=itemgetter(0)) if large else arena.small_infos()
        found += row_frames(said, arena.columns())
    return found


def part_frames(memory: SessionMemory, sendable: Sendable, rows: np.ndarray, said: Sequence[Said]) -> list[Any]:
    """These rows, which were posted as a part of the batch, with their results and with what is said of them."""
    columns = memory.arena.columns(rows)
    seen, rewards, terminations, truncations = memory.driver.results(rows)
    results = rewards.tobytes() + terminations.tobytes() + truncations.tobytes()
    arrays = sendable([np.ascontiguousarray(leaf) for leaf in seen])
    return [rows.tobytes(), *arrays, results, *row_frames(said, columns)]


def row_frames(said: Sequence[Said], columns: Sequence[Rows] = ()) -> list[Any]:
    """What is said by row, and what is said in columns: each is one frame, and the second never comes alone."""
    if columns:
        return [messages.pack_rows(said), pack_columns(columns)]
    return [messages.pack_rows(said)] if said else []
