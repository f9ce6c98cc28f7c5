"""Batched observations and infos, put together from what a lane brings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from envhub.env_failure import EnvFailure
from envhub.errors import printable
from envhub.values import codec, spaces
from envhub.values.leaf import OBJECT
from envhub_client.batch import Batch
from envhub_client.results.infos import Infos

REPRESENTED_MAX = 64  # names of info values that are kept, and warned of

log = logging.getLogger("envhub")


class UnreadableRow(ValueError):
    """A row of a reply does not hold what the space says.

    Attributes:
        row: its number.
    """

    def __init__(self, row: int, why: str) -> None:
        super().__init__(f"row {row} of a reply cannot be read: {why}")
        self.row = row


class Observations:
    """The observations of one vector env, of which some leaves may be of no fixed size, and their infos."""

    def __init__(
        self,
        single_space: Space[Any],
        num_envs: int,
        allow_pickle: bool,
        same_step: bool = False,
        hub_of: Callable[[int], str | None] = lambda env: None,
    ) -> None:
        """Prepare results of ``num_envs`` envs; with ``same_step`` infos have an episode's last observation, too.

        ``hub_of`` returns the name of an env's hub, for its failures.
        """
        self.space = single_space
        self._same_step, self._hub_of = same_step, hub_of
        self._allow_pickle = allow_pickle
        self.represented: dict[str, str] = {}  # places in the infos with a ``repr`` for a value, and the first one's
        leaves = spaces.leaves(single_space)
        self.leaves = [leaf for leaf in leaves if leaf != OBJECT]  # of fixed size, which come as arrays
        self._is_object = [leaf == OBJECT for leaf in leaves]
        self.loose = any(self._is_object)
        self.flat = spaces.is_flat(single_space) and not self.loose  # a batch is one array
        self._objects: list[list[Any]] = [[None] * sum(self._is_object)] * num_envs

    def take(self, batch: Batch) -> Infos:
        """Read the blobs of a batch: keep the observations in them, and return the infos.

        Raises:
            UnreadableRow: nothing is kept.
        """
        env_ids = None if batch.env_ids is None else batch.env_ids.tolist()
        if self.loose and len(batch.rows) != len(self._objects if env_ids is None else env_ids):
            raise UnreadableRow(0, f"there are observations of no fixed size of {len(batch.rows)} envs")
        infos, before = {}, [*self._objects] if self.loose else self._objects
        for row, blob in batch.rows:
            try:
                encoded = self._take_objects(row, blob) if self.loose else blob
                if encoded:
                    infos[row] = info = self._info(row, encoded)
                    if self._same_step and info.get("invalid_transition"):
                        info.setdefault("final_obs", self._value(batch.observations, row, env_ids))
                        info.setdefault("final_info", {})
            except (ValueError, TypeError) as error:
                self._objects = before
                raise UnreadableRow(row, str(error)) from error
        return Infos(infos, batch.groups)

    def _take_objects(self, row: int, blob: bytes) -> bytes:
        """Keep the row's observations of no fixed size, or its last ones where there are none; returns its info."""
        objects, info = codec.decode_pair(blob)
        if len(objects):
            self._objects[row] = list(codec.decode(objects, self._allow_pickle))
            if len(self._objects[row]) != sum(self._is_object):
                raise ValueError(f"{len(self._objects[row])} observations of no fixed size")
        return bytes(info)

    def _info(self, row: int, blob: bytes) -> dict[str, Any]:
        info, represented = codec.decode_leniently(blob, self._allow_pickle)
        if not isinstance(info, dict):
            raise TypeError(f"an info that is a {type(info).__name__}")
        if represented:
            for place, represented_text in _places(info, "infos"):
                text = printable(str(represented_text))
                if place not in self.represented and len(self.represented) < REPRESENTED_MAX:
                    self.represented[place] = text
                    log.warning("%s of env %d cannot be carried; its repr stands in for it: %s", place, row, text)
        failure = info.get("env_failure")
        if isinstance(failure, dict) and "cause" in failure:
            info["env_failure"] = EnvFailure.from_map(failure, self._hub_of(row))
        return info

    def _value(self, arrays: Sequence[np.ndarray], row: int, env_ids: Sequence[int] | None) -> Any:
        """The observation of one env, which is the caller's own."""
        place = row if env_ids is None else list(env_ids).index(row)
        fixed, objects = iter(arrays), iter(self._objects[row])
        parts = (next(objects) if is_object else next(fixed)[place].copy() for is_object in self._is_object)
        return spaces.assemble(self.space, parts)

    def batch(self, arrays: Sequence[np.ndarray], env_ids: Sequence[int] | None = None) -> Any:
        """The batched observation, of all envs or of ``env_ids``: these arrays, and of each other leaf a tuple."""
        if self.flat:
            return arrays[0]
        if not self.loose:
            return spaces.assemble(self.space, iter(arrays))
        rows = self._objects if env_ids is None else [self._objects[row] for row in env_ids]
        fixed, objects = iter(arrays), zip(*rows, strict=True)
        parts = (next(objects) if is_object else next(fixed) for is_object in self._is_object)
        return spaces.assemble(self.space, parts)


def _places(value: object, place: str) -> Iterator[tuple[str, codec.Represented]]:
    """Places in a value where a ``repr`` stands in for something, as one would write them in Python."""
    if isinstance(value, codec.Represented):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _places(item, f"{place}[{index}]")
    elif isinstance(value, (set, frozenset)):
        for item in value:
            yield from _places(item, place)
