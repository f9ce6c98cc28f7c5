"""What the envs said at one step, laid out as ``VectorEnv._add_info`` does, where it can be a column at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import VectorEnv

from envhub.errors import RemoteProtocolError
from envhub.protocol.messages import Op, TemplatesRequest
from envhub.values import codec
from envhub.values.info_columns import Column, NotInColumns, Rows, Template, Tree
from envhub_client.connection.connection import Connection

_ADD_INFO = VectorEnv._add_info
_NUMPY_BOOLS = np.array([np.False_, np.True_], object)


class Group(NamedTuple):
    """Infos of the same form: of these rows, a record each."""

    template: Template
    rows: np.ndarray
    records: np.ndarray


class Templates:
    """The forms of one session's infos, as the hub tells them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[int, Template] = {}

    def read(self, found: Sequence[Rows]) -> list[Group]:
        """The infos in these rows; asks the hub for forms that were not seen before.

        Raises:
            RemoteProtocolError: it does not know them, or they are not what is in the rows.
            EnvHubError: it does not answer.
        """
        unknown = [rows.template for rows in found if rows.template not in self._known]
        if unknown:
            told = self._connection.ask(Op.TEMPLATES, TemplatesRequest(unknown)).message
            try:
                for number, example in zip(told.numbers, told.examples, strict=True):
                    self._known[number] = Template(codec.decode(example))
            except (ValueError, TypeError, AttributeError, NotInColumns) as error:
                raise RemoteProtocolError(f"a template of infos cannot be read: {error}") from error
        return [self._group(*rows) for rows in found]

    def _group(self, number: int, rows: np.ndarray, data: np.ndarray) -> Group:
        template = self._known.get(number)
        if template is None or data.shape[1] != template.nbytes:
            raise RemoteProtocolError(f"infos of an unknown form, {number}, or of another size: {data.shape[1]} bytes")
        return Group(template, rows, np.frombuffer(np.ascontiguousarray(data), template.dtype))


class Infos:
    """The infos of one step or reset: maps by row, and groups of rows in columns."""

    def __init__(self, maps: dict[int, dict[str, Any]], groups: Sequence[Group]) -> None:
        self._maps = maps
        self._groups = groups

    def at(self, env_ids: np.ndarray) -> Infos:
        """The same, each row by its place among ``env_ids``, which ascend and are all that there are."""
        places = {row: place for place, row in enumerate(env_ids.tolist())}
        groups = [group._replace(rows=np.searchsorted(env_ids, group.rows)) for group in self._groups]
        return Infos({places[row]: info for row, info in self._maps.items()}, groups)

    def by_env(self) -> dict[int, dict[str, Any]]:
        """The info of each env as it gave it; an empty one may be left out."""
        found = dict(self._maps)
        for template, rows, records in self._groups:
            found.update(zip(rows.tolist(), map(template.info, records), strict=True))
        return dict(sorted(found.items()))

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
        # The first env that says something decides on the form of its array, so everything is in the envs' order.
        sources: list[tuple[int, dict[str, Any] | Group]] = [*self._maps.items()]
        sources += [(int(group.rows[0]), group) for group in self._groups]
        for row, source in sorted(sources, key=lambda source: source[0]):
            if isinstance(source, dict):
                batch = envs._add_info(batch, source, row)
            elif not batch or _fits(source.template.tree, batch):
                batch = _merged(source.template.tree, batch, source.rows, source.records, envs.num_envs)
            else:
                return self._one_by_one(envs)
        return batch

    def _one_by_one(self, envs: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for row, info in self.by_env().items():
            batch = envs._add_info(batch, info, row)
        return batch


def _form(column: Column) -> np.dtype[Any]:
    """What an array of this value is of: NumPy's own truth values are objects to ``_add_info``."""
    return np.dtype(object if column.kind is np.bool_ else column.dtype)


def _fits(tree: Tree, batch: Any) -> bool:
    """Whether assigning these columns to what is there is the same as assigning their values one by one."""
    if not isinstance(batch, dict):
        return False
    for key, found in tree.items():
        there, mask = batch.get(key), batch.get(f"_{key}")
        if (there is None) != (mask is None):
            return False
        if there is None:
            continue
        if isinstance(found, dict):
            if not _fits(found, there):
                return False
        elif not isinstance(there, np.ndarray) or (there.dtype, there.shape[1:]) != (_form(found), found.shape):
            return False
    return True


def _merged(tree: Tree, batch: dict[str, Any], rows: np.ndarray, records: np.ndarray, num_envs: int) -> dict[str, Any]:
    whole = len(rows) == num_envs  # nothing is to be put between other rows then
    for key, found in tree.items():
        value, mask = batch.get(key), batch.get(f"_{key}")
        if isinstance(found, dict):
            value = _merged(found, value or {}, rows, records, num_envs)
        elif whole and value is None and found.kind is not np.bool_:
            value = records[found.name].copy()
        else:
            value = _assigned(value, found, rows, records[found.name], num_envs)
        if mask is None and whole:
            mask = np.empty(num_envs, np.bool_)
            mask.fill(True)  # ``np.ones`` takes three times as long
        else:
            mask = np.zeros(num_envs, np.bool_) if mask is None else mask
            mask[rows] = True
        batch[key], batch[f"_{key}"] = value, mask
    return batch


def _assigned(there: Any, found: Column, rows: np.ndarray, values: np.ndarray, num_envs: int) -> np.ndarray:
    """The array of this column, made where there is none, with the values of these rows."""
    if there is None:
        there = np.zeros((num_envs, *found.shape), _form(found))
        if there.dtype == object:
            there[:] = None
    there[rows] = _NUMPY_BOOLS[(values.view(np.uint8) != 0).astype(int)] if there.dtype == object else values
    array: np.ndarray = there
    return array
