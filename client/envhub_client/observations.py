"""Batched observations and infos, put together from what a lane brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from envhub import codec, spaces
from envhub.errors import RemoteProtocolError
from envhub.layout import OBJECT

Decode = Callable[[bytes], Any]


class Observations:
    """The observations of one vector env, of which some leaves may be of no fixed size.

    Attributes:
        leaves: those of fixed size, which come as arrays.
    """

    def __init__(self, single_space: Space[Any], num_envs: int, decode: Decode) -> None:
        self._space = single_space
        self._decode = decode
        leaves = spaces.leaves(single_space)
        self.leaves = [leaf for leaf in leaves if leaf != OBJECT]
        self._is_object = [leaf == OBJECT for leaf in leaves]
        # The last ones of every row: a row that a reset leaves out keeps them.
        self._objects: list[list[Any]] = [[None] * sum(self._is_object)] * num_envs

    def take(self, rows: Sequence[tuple[int, bytes]]) -> dict[int, dict[str, Any]]:
        """Read what came by row; returns the infos that are not empty.

        Raises:
            RemoteProtocolError: a row does not hold what the space says.
        """
        if not any(self._is_object):
            return {row: self._decode(blob) for row, blob in rows}
        infos = {}
        for row, blob in rows:
            try:
                objects, info = codec.decode(blob)
                found = self._decode(objects)
            except (ValueError, TypeError) as error:
                raise RemoteProtocolError(f"row {row} of a reply cannot be read: {error}") from error
            if len(found) != len(self._objects[row]):
                raise RemoteProtocolError(f"row {row} of a reply holds {len(found)} observations of no fixed size")
            self._objects[row] = found
            if info:
                infos[row] = self._decode(info)
        return infos

    def batch(self, arrays: Sequence[np.ndarray]) -> Any:
        """The batched observation: these arrays, and of each other leaf a tuple of every env's value."""
        if not any(self._is_object):
            return spaces.assemble(self._space, iter(arrays))
        fixed, objects = iter(arrays), zip(*self._objects, strict=True)
        parts = (next(objects) if is_object else next(fixed) for is_object in self._is_object)
        return spaces.assemble(self._space, parts)
