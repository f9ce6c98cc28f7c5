"""The place of a row's observation in the arena."""

from __future__ import annotations

from typing import Any

import numpy as np

from envhub.arena.layout import SLOTS
from envhub.arena.memory import Arena
from envhub.values import spaces
from envhub.values.leaf import OBJECT
from envhub.values.misfit import misfit


class ObservationPlace:
    """Stores the observations of one row.

    Attributes:
        has_objects: whether an observation has leaves of no fixed size, which have no place in the arena.
    """

    def __init__(self, arena: Arena, index: int, space: Any, name: str) -> None:
        """Use this row of the arena for observations of ``space``; errors have the ``name`` of the env."""
        self._name = name
        self._index, self._space, self._request = index, space, arena.request.data
        self._objects = [leaf == OBJECT for leaf in spaces.leaves(space)]
        self.has_objects = any(self._objects)
        self._batches = [[leaf[slot] for leaf in arena.observations] for slot in range(SLOTS)]
        self._is_flat = spaces.is_flat(space) and not self.has_objects
        self._shapes = [leaf.shape for leaf in arena.layout.observations]

    def store(self, observation: Any, method: str) -> list[Any]:
        """Store what a method of the env has returned, but for its object leaves, which are returned.

        Raises:
            TypeError, ValueError: it does not fit; the text names the method, the env and the part.
        """
        index = self._index
        batches = self._batches[self._request[index] & 1]
        objects: list[Any] = []
        try:
            if self._is_flat:
                batch = batches[0]
                if (
                    type(observation) is np.ndarray
                    and observation.dtype == batch.dtype
                    and observation.shape == self._shapes[0]
                ):
                    batch[index] = observation
                else:
                    _store_leaf(batch, index, observation)
            else:
                remaining = iter(batches)
                for is_object, part in zip(self._objects, spaces.flatten(self._space, observation)):
                    if is_object:
                        objects.append(part)
                    else:
                        _store_leaf(next(remaining), index, part)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if why := misfit(self._space, observation, "observation"):
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(
                    f"{method} of {self._name} returned an observation that does not fit: {why}; correct the space "
                    "or make the envs with observation_mode='any'"
                ) from error
            raise
        return objects


def _store_leaf(batch: np.ndarray, index: int, value: Any) -> None:
    """Put one leaf of an observation into its row.

    ``AsyncVectorEnv`` silently casts floats into an integer space and spreads a single number over a whole row. Here
    both are errors, because both are always a mistake in the env. ``SyncVectorEnv`` refuses such a cast too.
    """
    if type(value) is not np.ndarray or value.dtype != batch.dtype or value.shape != batch.shape[1:]:
        array = np.asarray(value)
        if array.shape != batch.shape[1:]:
            raise ValueError(f"an observation part of shape {array.shape} where its space has {batch.shape[1:]}")
        if not np.can_cast(array.dtype, batch.dtype, "same_kind"):
            raise TypeError(f"an observation part of dtype {array.dtype} where its space has {batch.dtype}")
    batch[index] = value
