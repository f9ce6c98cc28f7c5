"""The places of the actions and the results of a vector env's rows in the arena."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

from envhub.arena.memory import ONGOING, STATUS_INFO, STATUS_OK, Arena
from envhub.values import actions, spaces
from envhub.values.info_columns import BatchWriter
from envhub_server.worker import batch_infos
from envhub_server.worker.row_places import NO_INFO, InfoPlace
from envhub_server.worker.slots import as_slice


class BatchActions:
    """The place of the rows' actions in the arena."""

    def __init__(self, arena: Arena, place: slice, space: Any) -> None:
        self._arena, self._place, self._space = arena, place, space
        self._code_columns = [column[place] for column in arena.action_codes]
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
        """Read the actions by the rows' codes from now on; ``codes`` has the bytes of the codes.

        Raises ``TypeError``.
        """
        self._codes = b""
        each = [set(column.tolist()) for column in self._code_columns]
        if any(len(kinds) > 1 or actions.OUT_OF_BAND in kinds for kinds in each):
            raise TypeError("a vector env takes the actions of all its envs as arrays of one dtype")
        layout = self._arena.layout
        self._actions = []
        for buffer, leaf, (code,) in zip(self._arena.actions, layout.actions, each):
            self._actions.append(actions.batch_of(buffer, leaf, layout.rows, code)[self._place])
        self._codes = codes


class Outcome(NamedTuple):
    """The results of a step of all rows, or of a reset of some: an array per observation leaf, and the other results.

    ``infos`` is batched, or a list of one per env.
    """

    observations: list[np.ndarray]
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    infos: Any


class BatchResults:
    """The place of the results of these rows."""

    def __init__(
        self,
        arena: Arena,
        rows: Sequence[int],
        infos: Sequence[InfoPlace],
        columns: BatchWriter | None,
        same_step: bool,
    ) -> None:
        """Store in ``arena``; ``infos`` are the places of the rows' infos, ``columns`` writes all of them at once."""
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
            template, length = self._write_columns(infos, count) if infos else NO_INFO
            if length or not infos:
                words = template, length, STATUS_INFO if length else STATUS_OK
                for column, word in zip(self._info_words, words):
                    column[:] = word
                return
        each = batch_infos.by_env(infos, count) if isinstance(infos, dict) else infos
        for number, info in zip(np.arange(len(self._infos))[where].tolist(), each):
            self._infos[number].store(info)

    def _write_columns(self, infos: dict[str, Any], count: int) -> tuple[int, int]:
        columns = None if self._columns is None else batch_infos.columns(infos, count)
        if columns is None or self._columns is None:
            return NO_INFO
        return self._columns.write(columns, lambda: batch_infos.by_env(infos, count)[0])
