"""The places of the actions and the results of a vector env's rows in the arena, and its infos by env."""

from __future__ import annotations

from itertools import compress
from typing import Any, Dict, NamedTuple, Sequence

import numpy as np

from envhub.arena.memory import ONGOING, STATUS_INFO, STATUS_OK, Arena
from envhub.values import actions, spaces
from envhub.values.info_columns import BatchWriter
from envhub_server.worker.row_memory import NO_INFO, InfoWriter, as_slice

# Gymnasium batches infos by key, with an array per key and a mask ``_key`` that says which envs have it. All envs have
# a key without a mask, as in the infos of ALE and EnvPool.
Infos = Dict[str, Any]


def info_columns(infos: Infos, num_envs: int) -> Infos | None:
    """The infos as nested arrays of numbers with an entry per env; None if an env does not have all of them."""
    columns_by_key: Infos = {}
    for key, value in infos.items():
        if _is_mask(key, infos):
            continue
        mask = infos.get(f"_{key}")
        if mask is not None and not np.all(mask):
            return None
        if isinstance(value, dict):
            if (nested := info_columns(value, num_envs)) is None:
                return None
            columns_by_key[key] = nested
            continue
        if isinstance(value, (list, tuple)) and len({*map(type, value)}) > 1:
            return None  # an array would give them all one type
        array = value if type(value) is np.ndarray else np.asarray(value)
        if array.dtype.kind not in "biuf" or array.ndim == 0 or len(array) != num_envs:
            return None
        columns_by_key[key] = array
    return columns_by_key


def infos_by_env(infos: Infos, num_envs: int) -> list[Infos]:
    """The info of each env. A value that is not a sequence with an entry per env belongs to every env."""
    infos_by_env: list[Infos] = [{} for _ in range(num_envs)]
    for key, value in infos.items():
        if _is_mask(key, infos):
            continue
        mask = infos.get(f"_{key}")
        entries = _entries(value, num_envs)
        for number, info in enumerate(infos_by_env):
            if mask is None or mask[number]:
                info[key] = entries[number]
    return infos_by_env


def choose_infos(infos: Infos, chosen: np.ndarray) -> Infos:
    def chosen_of(value: Any) -> Any:
        if isinstance(value, dict):
            return choose_infos(value, chosen)
        if not _is_per_env(value, len(chosen)):
            return value
        return np.asarray(value)[chosen] if hasattr(value, "__array__") else [*compress(value, chosen)]

    return {key: chosen_of(value) for key, value in infos.items()}


def _is_mask(key: Any, infos: Infos) -> bool:
    return isinstance(key, str) and key[:1] == "_" and key[1:] in infos


def _is_per_env(value: Any, num_envs: int) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) == num_envs
    return np.ndim(value) > 0 and len(value) == num_envs


def _entries(value: Any, num_envs: int) -> list[Any]:
    if isinstance(value, dict):
        return list(infos_by_env(value, num_envs))
    if not _is_per_env(value, num_envs):
        return [value] * num_envs
    if isinstance(value, (list, tuple)):
        return list(value)
    array = np.asarray(value)
    # Gymnasium makes an array of bools only from Python's bool, not from NumPy's.
    return array.tolist() if array.dtype == np.bool_ and array.ndim == 1 else list(array)


class BatchActions:
    """The rows' actions in the arena."""

    def __init__(self, arena: Arena, rows: slice, space: Any) -> None:
        self._arena, self._rows, self._space = arena, rows, space
        self._code_columns = [column[rows] for column in arena.action_codes]
        self._codes = b""
        self._actions: list[np.ndarray] = []  # views of each leaf, by these codes

    def read(self) -> Any:
        """Copies of the posted actions; raises ``TypeError``."""
        codes = b"".join([column.tobytes() for column in self._code_columns])
        if codes != self._codes:
            self._read_as(codes)
        # The env may keep its actions, so it gets copies.
        return spaces.assemble(self._space, (batch.copy() for batch in self._actions))

    def _read_as(self, codes: bytes) -> None:
        self._codes = b""
        each = [set(column.tolist()) for column in self._code_columns]
        if any(len(kinds) > 1 or actions.OUT_OF_BAND in kinds for kinds in each):
            raise TypeError("a vector env takes the actions of all its envs as arrays of one dtype")
        layout = self._arena.layout
        self._actions = []
        for buffer, leaf, (code,) in zip(self._arena.actions, layout.actions, each):
            self._actions.append(actions.batch_of(buffer, leaf, layout.rows, code)[self._rows])
        self._codes = codes


class Outcome(NamedTuple):
    """The results of a step of all rows, or of a reset of some."""

    observations: list[np.ndarray]  # an array per leaf
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    infos: Any  # batched, or a list of one per env


class BatchResults:
    """The results of these rows in the arena."""

    def __init__(
        self,
        arena: Arena,
        rows: Sequence[int],
        infos: Sequence[InfoWriter],
        columns: BatchWriter | None,
        same_step: bool,
    ) -> None:
        mine = as_slice(rows)
        self._arena, self._rows, self._same_step = arena, np.array(rows), same_step
        self._infos, self._columns = infos, columns
        self._request, self._needs_reset = arena.request[mine], arena.needs_reset[mine]
        self._result_columns = arena.rewards[mine], arena.terminations[mine], arena.truncations[mine]
        self._info_words = arena.info_template[mine], arena.info_length[mine], arena.status[mine]
        self._same_slots = [np.full(len(rows), slot).tobytes() for slot in (0, 1)]
        self._views = [[leaf[slot, mine] for leaf in arena.observations] for slot in (0, 1)]

    def store(self, outcome: Outcome, chosen: np.ndarray | None = None) -> None:
        whole = chosen is None or bool(chosen.all())
        where: Any = slice(None) if whole else chosen
        slots = self._request & 1
        count, slot = len(self._rows[where]), int(slots[0])
        if whole and slots.tobytes() == self._same_slots[slot]:
            for view, array in zip(self._views[slot], outcome.observations):
                view[...] = array
        else:
            for leaf, array in zip(self._arena.observations, outcome.observations):
                leaf[slots[where], self._rows[where]] = array
        for column, values in zip(self._result_columns, outcome[1:4]):
            if values.shape != (count,):
                raise ValueError(f"rewards or flags of shape {values.shape} of {count} envs")
            column[where] = values
        ended = ONGOING if self._same_step else np.logical_or(outcome.terminations, outcome.truncations)
        self._needs_reset[where] = ended  # ENDED is 1
        self._store_infos(outcome.infos, where, count)

    def _store_infos(self, infos: Any, where: Any, count: int) -> None:
        if count == len(self._infos) and isinstance(infos, dict):
            (template, length), columns = NO_INFO, None
            if infos and self._columns is not None and (columns := info_columns(infos, count)) is not None:
                template, length = self._columns.write(columns, lambda: infos_by_env(infos, count)[0])
            if length or not infos:
                words = template, length, STATUS_INFO if length else STATUS_OK
                for column, word in zip(self._info_words, words):
                    column[:] = word
                return
        each = infos_by_env(infos, count) if isinstance(infos, dict) else infos
        for number, info in zip(np.arange(len(self._infos))[where].tolist(), each):
            self._infos[number].store(info)
