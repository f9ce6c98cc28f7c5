"""Observations and infos of a reset or a step, put together from what a lane brings and laid out as Gymnasium does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import VectorEnv

from envhub.env_failure import EnvFailure
from envhub.errors import printable
from envhub.values import codec, spaces
from envhub.values.info_columns import UNBATCHED, VECTOR_REWARD, Column, Tree
from envhub.values.leaf import OBJECT
from envhub_client.lanes.base import Batch, InfoGroup

REPRS_MAX = 64  # names of info values that are kept, and warned of
log = logging.getLogger("envhub")
_ADD_INFO = VectorEnv._add_info
_NUMPY_BOOLS = np.array([np.False_, np.True_], object)


class Infos:
    """The infos of one step or reset: maps by row, and groups of rows in columns."""

    def __init__(self, maps: dict[int, dict[str, Any]], groups: Sequence[InfoGroup]) -> None:
        self._maps = maps
        self._groups = list(groups)

    def take_rewards(self) -> list[tuple[list[int], np.ndarray]]:
        """Take the rewards with axes out of the infos: rows, and a reward of each."""
        rewards = []
        for row, info in self._maps.items():
            if VECTOR_REWARD in info:
                rewards.append(([row], np.asarray(info.pop(VECTOR_REWARD))[np.newaxis]))
        for number, (template, rows, records) in enumerate(self._groups):
            if isinstance(column := template.tree.get(VECTOR_REWARD), Column):
                rewards.append((rows.tolist(), records[column.name].copy()))
                self._groups[number] = InfoGroup(template.drop_reward(), rows, records)
        return rewards

    def batched_of(self, env_ids: np.ndarray) -> dict[str, Any]:
        """All of them as one, with a place for each of ``env_ids``, which ascend."""
        positions = {row: index for index, row in enumerate(env_ids.tolist())}
        groups = [group._replace(rows=np.searchsorted(env_ids, group.rows)) for group in self._groups]
        maps = {positions[row]: info for row, info in self._maps.items()}
        envs: VectorEnv[Any, Any, Any] = VectorEnv()
        envs.num_envs = len(env_ids)
        return Infos(maps, groups).batched(envs)

    def by_env(self) -> dict[int, dict[str, Any]]:
        """The info of each env; an empty one may be left out."""
        infos = dict(self._maps)
        for template, rows, records in self._groups:
            infos.update(zip(rows.tolist(), template.infos(records), strict=True))
        return infos if len(self._groups) == 1 and not self._maps else dict(sorted(infos.items()))

    def batched(self, envs: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
        """All of them as one, laid out by ``envs._add_info``, or as if it had."""
        batch: dict[str, Any] = {}
        if not self._maps and not self._groups:
            return batch
        if getattr(envs._add_info, "__func__", None) is not _ADD_INFO:
            return self._one_by_one(envs)
        if len(self._groups) == 1 and not self._maps:
            ((template, rows, records),) = self._groups
            return _merged(template.tree, batch, rows, records, envs.num_envs)
        # The first env that has a key decides on the form of its array, so everything is in the envs' order.
        sources: list[tuple[int, dict[str, Any] | InfoGroup]] = [*self._maps.items()]
        sources += [(int(group.rows[0]), group) for group in self._groups]
        for row, source in sorted(sources, key=lambda source: source[0]):
            if isinstance(source, dict):
                batch = _added(envs, batch, source, row)
            elif not batch or _matches(source.template.tree, batch):
                batch = _merged(source.template.tree, batch, source.rows, source.records, envs.num_envs)
            else:
                return self._one_by_one(envs)
        return batch

    def _one_by_one(self, envs: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for row, info in self.by_env().items():
            batch = _added(envs, batch, info, row)
        return batch


def _added(envs: VectorEnv[Any, Any, Any], batch: dict[str, Any], info: dict[str, Any], row: int) -> dict[str, Any]:
    """The batch with the info of one more env; where a value does not fit, the error names its key and env."""
    try:
        return envs._add_info(batch, info, row)
    except (OverflowError, TypeError, ValueError) as error:
        for key, value in info.items():
            before = {name: batch[name] for name in (key, f"_{key}") if name in batch}
            try:
                envs._add_info(before, {key: value}, row)
            except type(error) as cause:
                raise type(error)(f"infos[{key!r}] of env {row} is not batched with the others: {cause}") from error
        raise


def _form(column: Column) -> np.dtype[Any]:
    """Type of an array of this value: NumPy's own truth values are objects to ``_add_info``."""
    return np.dtype(object if column.kind is np.bool_ else column.dtype)


def _matches(tree: Tree, batch: object) -> bool:
    """True if assigning these columns to what is there is the same as assigning their values one by one."""
    if not isinstance(batch, dict):
        return False
    for key, column in tree.items():
        array, mask = batch.get(key), batch.get(f"_{key}")
        if (array is None) != (mask is None) or isinstance(mask, dict):  # an env has an info of this name
            return False
        if array is None:
            continue
        if isinstance(column, dict):
            if not _matches(column, array):
                return False
        elif key in UNBATCHED:
            continue
        elif not isinstance(array, np.ndarray) or (array.dtype, array.shape[1:]) != (_form(column), column.shape):
            return False
    return True


def _merged(tree: Tree, batch: dict[str, Any], rows: np.ndarray, records: np.ndarray, num_envs: int) -> dict[str, Any]:
    whole = len(rows) == num_envs  # nothing is to be put between other rows then
    for key, column in tree.items():
        value, mask = batch.get(key), batch.get(f"_{key}")
        if isinstance(column, dict):
            value = _merged(column, value or {}, rows, records, num_envs)
        elif key in UNBATCHED:
            value = np.full(num_envs, None) if value is None else value
            for row, each in zip(rows.tolist(), column.values(records), strict=True):
                value[row] = each
        elif whole and value is None and column.kind is not np.bool_:
            value = records[column.name].copy()
        else:
            value = _assigned(value, column, rows, records[column.name], num_envs)
        if mask is None and whole:
            mask = np.empty(num_envs, np.bool_)
            mask.fill(True)  # ``np.ones`` takes three times as long
        else:
            mask = np.zeros(num_envs, np.bool_) if mask is None else mask
            mask[rows] = True
        batch[key], batch[f"_{key}"] = value, mask
    return batch


def _assigned(
    array: np.ndarray | None, column: Column, rows: np.ndarray, values: np.ndarray, num_envs: int
) -> np.ndarray:
    if array is None:
        array = np.zeros((num_envs, *column.shape), _form(column))
        if array.dtype == object:
            array[:] = None
    array[rows] = _NUMPY_BOOLS[(values.view(np.uint8) != 0).astype(int)] if array.dtype == object else values
    return array


class UnreadableRow(ValueError):
    """A row of a reply does not hold what the space says."""

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
        """With ``same_step`` infos have an episode's last observation, too; ``hub_of`` an env is its hub's name."""
        self.space = single_space
        self._same_step, self._hub_of = same_step, hub_of
        self._allow_pickle = allow_pickle
        self.represented: dict[str, str] = {}  # places in the infos with a ``repr`` for a value, and the first one's
        leaves = spaces.leaves(single_space)
        self.leaves = [leaf for leaf in leaves if leaf != OBJECT]  # of fixed size, which come as arrays
        self._is_object = [leaf == OBJECT for leaf in leaves]
        self.has_object_leaves = any(self._is_object)
        self.flat = spaces.is_flat(single_space) and not self.has_object_leaves  # a batch is one array
        self._object_count = sum(self._is_object)
        self._objects: list[list[Any]] = [[None] * self._object_count] * num_envs

    def take(self, batch: Batch) -> Infos:
        """The infos of a batch; observations of no fixed size, which are in the same blobs, are kept."""
        env_ids = None if batch.env_ids is None else batch.env_ids.tolist()
        if self.has_object_leaves and len(batch.rows) != len(self._objects if env_ids is None else env_ids):
            raise UnreadableRow(0, f"there are observations of no fixed size of {len(batch.rows)} envs")
        infos, before = {}, [*self._objects] if self.has_object_leaves else self._objects
        for row, blob in batch.rows:
            try:
                encoded = self._take_objects(row, blob) if self.has_object_leaves else blob
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
            if len(self._objects[row]) != self._object_count:
                raise ValueError(f"{len(self._objects[row])} observations of no fixed size")
        return bytes(info)

    def _info(self, row: int, blob: bytes) -> dict[str, Any]:
        info, represented = codec.decode_leniently(blob, self._allow_pickle)
        if not isinstance(info, dict):
            raise TypeError(f"an info that is a {type(info).__name__}")
        if represented:
            for path, represented_text in _reprs_in(info, "infos"):
                text = printable(str(represented_text))
                if path not in self.represented and len(self.represented) < REPRS_MAX:
                    self.represented[path] = text
                    log.warning("%s of env %d cannot be carried; its repr stands in for it: %s", path, row, text)
        failure = info.get("env_failure")
        if isinstance(failure, dict) and "cause" in failure:
            info["env_failure"] = EnvFailure.from_map(failure, self._hub_of(row))
        return info

    def _value(self, arrays: Sequence[np.ndarray], row: int, env_ids: Sequence[int] | None) -> Any:
        index = row if env_ids is None else list(env_ids).index(row)
        fixed, objects = iter(arrays), iter(self._objects[row])
        parts = (next(objects) if is_object else next(fixed)[index].copy() for is_object in self._is_object)
        return spaces.assemble(self.space, parts)

    def batch(self, arrays: Sequence[np.ndarray], env_ids: Sequence[int] | None = None) -> Any:
        """The batched observation, of all envs or of ``env_ids``: these arrays, and of each other leaf a tuple."""
        if self.flat:
            return arrays[0]
        if not self.has_object_leaves:
            return spaces.assemble(self.space, iter(arrays))
        rows = self._objects if env_ids is None else [self._objects[row] for row in env_ids]
        fixed, objects = iter(arrays), zip(*rows, strict=True)
        parts = (next(objects) if is_object else next(fixed) for is_object in self._is_object)
        return spaces.assemble(self.space, parts)


def _reprs_in(value: object, path: str) -> Iterator[tuple[str, codec.Repr]]:
    if isinstance(value, codec.Repr):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _reprs_in(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _reprs_in(item, f"{path}[{index}]")
    elif isinstance(value, (set, frozenset)):
        for item in value:
            yield from _reprs_in(item, path)


class Rewards:
    """The rewards of one vector env, which may have axes."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()  # empty until an env has given one with axes
        self.refused_for = ""  # the name of what takes no rewards with axes

    def check(self, shape: Sequence[int]) -> None:
        if shape and self.refused_for:
            raise ValueError(
                f"rewards of shape {tuple(shape)}, and for {self.refused_for} a reward is one number: wrap the envs so "
                "that it is, such as by a weighted sum"
            )

    def of(self, rewards: np.ndarray, infos: Infos | None, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """The rewards of all envs or of ``env_ids``: as they are, or ``(envs, *shape)`` where an env gave axes.

        An env that was reset or truncated by the hub has zeros.
        """
        with_axes = [] if infos is None else infos.take_rewards()
        if not with_axes and not self.shape:
            return rewards
        shape = self.shape or with_axes[0][1].shape[1:]
        self.check(shape)
        positions = None if env_ids is None else {row: index for index, row in enumerate(env_ids)}
        filled = np.zeros((len(rewards), *shape))
        for rows, values in with_axes:
            if values.dtype != np.float64:
                raise UnreadableRow(rows[0], f"a reward of {values.dtype}")
            if values.shape[1:] != shape:
                text = f"envs {rows} have rewards of shape {values.shape[1:]}, others of {shape}"
                raise ValueError(f"{text}: envs that step together have rewards of one shape")
            filled[rows if positions is None else [positions[row] for row in rows]] = values
        self.shape = shape
        return filled
