"""Writes the episodes of a worker's envs into a tape, where the operator has them recorded.

The worker calls it around each batch of steps or resets. What the driver overwrites is copied before the driver is
woken, everything else afterwards.
"""

from __future__ import annotations

import mmap
import os
import socket
import traceback
from typing import Any, Callable, ContextManager, Mapping, Sequence

import numpy as np

from envhub.arena.memory import OP_PART, Arena
from envhub.arena.stand_in import FRESH, ONGOING, REPORT_PENDING
from envhub.recording.recorder import EpisodeRecorder, Moves, Selection
from envhub.values import actions
from envhub.values.leaf import OBJECT
from envhub_server.worker.env_batch import Part
from envhub_server.worker.row import DISABLED, NEXT_STEP, SAME_STEP, Row
from envhub_server.worker.slots import SlotOrSlots, Slots, as_slice

INVALID = {"invalid_transition": True}

Rendering = Callable[[Any], ContextManager[None]]  # of what a call on an env goes to


class EpisodeWriter:
    """Records the envs of a worker."""

    def __init__(
        self,
        descriptors: Sequence[int],
        wanted: Mapping[str, Any],
        parts: Sequence[Part],
        spaces_of_one: tuple[Any, Any],
        mode: str,
    ) -> None:
        """Record what these parts show, as ``wanted`` by ``MapArena.recording``; ``attach`` has to follow.

        Args:
            descriptors: the line to the process that writes, and the memory that counts episodes; owned from now on.
            wanted: see above.
            parts: all parts of this worker.
            spaces_of_one: of observations and of actions.
            mode: the autoreset mode.
        """
        line, counted = descriptors
        begun = np.frombuffer(mmap.mmap(counted, 0), np.int64)
        os.close(counted)
        self._parts, self._mode = parts, mode
        self._rows = [(part, number) for part in parts for number in range(len(part.indices))]
        self._positions = {part.indices[number]: position for position, (part, number) in enumerate(self._rows)}
        filmed = wanted["filmed"]
        selection = Selection(len(self._rows), wanted["recorded"], filmed, wanted["every"], wanted["env_ids"])
        ends = socket.socket(fileno=line)
        self._recorder = EpisodeRecorder(ends, selection, spaces_of_one, mode, wanted["queue_bytes"], begun)
        self._filmed, self._wait_s = filmed, wanted["wait_s"]
        self._frame: tuple[int, ...] = ()
        self._chosen: np.ndarray | None = None  # rows of a batch that has not all of them
        self._slots: SlotOrSlots = 0
        self._reset: list[int] | None = None  # positions
        self._seeds: dict[int, int | None] = {}  # of these resets
        self._infos: dict[int, Any] = {}
        self._failed: dict[int, str] = {}
        self._beside: Mapping[int, Sequence[Any]] = {}

    def attach(self, arena: Arena) -> None:
        """Use these rows of ``arena`` from now on, which has the layout of the one before.

        Raises:
            OSError: there is no memory for a tape.
        """
        indices = [*self._positions]
        mine = as_slice(indices)
        self._arena, self._mine, self._first = arena, mine, indices[0]
        self._indices = np.array(indices)
        self._where, self._needs_reset = Slots(arena, mine), arena.needs_reset[mine]
        self._ops = arena.op.data
        self._flags = arena.rewards[mine], arena.terminations[mine], arena.truncations[mine]
        self._views = [[leaf[slot, mine] for leaf in arena.observations] for slot in (0, 1)]
        self._code_columns = [column[mine] for column in arena.action_codes]
        self._codes = b""
        self._batches: list[np.ndarray] | None = None  # of each action leaf, by these codes
        if not self._filmed and not self._recorder.opened:  # else ``_is_open`` does it
            self._recorder.open((), self._wait_s)

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin(self, parts: Sequence[Part]) -> None:
        """Keep what these parts are about to be asked."""
        if self._recorder.closed:
            return
        whole = len(parts) == len(self._parts) and self._ops[self._first] != OP_PART
        self._note_slots(None if whole else [self._positions[index] for part in parts for index in part.indices])
        self._infos, self._failed, self._reset, self._seeds = {}, {}, None, {}
        needs = self._needs_reset.tolist()
        if any(needs):
            self._note_resets(needs)
        if self._recorder.records:
            self._recorder.acted(self._actions())
        self._beside = {}

    def _note_slots(self, positions: Sequence[int] | None) -> None:
        self._chosen, self._slots = None, self._where.posted(whole=positions is None)
        if positions is not None:
            self._chosen = np.zeros(len(self._rows), bool)
            self._chosen[list(positions)] = True

    def _note_resets(self, needs: Sequence[int]) -> None:
        """Know which of the rows are reset in this step, and which only report that their env is another."""
        self._reset = []
        for position, need in enumerate(needs):
            if need == ONGOING or (self._chosen is not None and not self._chosen[position]):
                continue
            if need == REPORT_PENDING or (need == FRESH and self._mode == DISABLED):
                self._infos[position] = INVALID
            elif need == FRESH or self._mode == NEXT_STEP:
                self._reset.append(position)
                if need == FRESH:
                    part, number = self._rows[position]
                    self._seeds[position] = part.first_seeds[number]

    def end(self, rendering: Rendering) -> None:
        """Record what they brought; a row is rendered within ``rendering``.

        Raises:
            ValueError: a reward has axes: a data set of Minari has one number for each step.
        """
        if self._recorder.closed or not self._is_open(self._reset, rendering):
            return
        if axes := next((part.reward_shape for part in self._parts if part.reward_shape), ()):
            raise ValueError(f"rewards of shape {axes}: in a recording a reward is one number")
        _, terminations, truncations = self._flags
        if self._mode == SAME_STEP and b"\1" in (terminations | truncations).tobytes():
            for position in np.flatnonzero(terminations | truncations).tolist():
                if position not in self._infos:
                    part, number = self._rows[position]
                    self._infos[position] = {"final_obs": part.final_observations[number]}
        moves = None
        if self._reset is not None or self._failed or self._chosen is not None:
            moves = self._moves()
        self._recorder.stepped(self._leaves(), self._flags, self._infos, moves)
        self._film(rendering)

    def _moves(self) -> Moves:
        stepped, reset = self._chosen, self._reset
        if self._failed:
            others = np.ones(len(self._rows), bool)
            others[list(self._failed)] = False
            stepped = others if stepped is None else stepped & others
            reset = None if reset is None else [position for position in reset if position not in self._failed]
        return Moves(stepped, reset, self._failed, self._seeds)

    def _leaves(self) -> list[np.ndarray]:
        if isinstance(self._slots, int):
            return self._views[self._slots]
        return [leaf[self._slots, self._indices] for leaf in self._arena.observations]

    def out_of_band(self, values: Mapping[int, Sequence[Any]]) -> None:
        """Know, by row, the parts of the actions of the next step that are not in the arena."""
        self._beside = {self._positions[row]: parts for row, parts in values.items() if row in self._positions}

    def _actions(self) -> list[Any]:
        """A batch for each leaf of the actions."""
        codes = b"".join([column.tobytes() for column in self._code_columns])
        if codes != self._codes:
            self._codes, self._batches = codes, self._read_as()
        return self._one_by_one() if self._batches is None else self._batches

    def _read_as(self) -> list[np.ndarray] | None:
        """Views of the actions by the rows' codes; None where they have several, or are out of band."""
        layout, found = self._arena.layout, []
        for buffer, leaf, column in zip(self._arena.actions, layout.actions, self._code_columns):
            kinds = set(column.tolist())
            if len(kinds) > 1 or actions.BESIDE in kinds or leaf == OBJECT:
                return None
            found.append(actions.batch_of(buffer, leaf, layout.rows, kinds.pop())[self._mine])
        return found

    def _one_by_one(self) -> list[Any]:
        layout, found = self._arena.layout, []
        parts = {position: iter(values) for position, values in self._beside.items()}
        for buffer, leaf, column in zip(self._arena.actions, layout.actions, self._code_columns):
            batch = np.zeros((len(self._rows), *leaf.shape), leaf.dtype)
            for position, code in enumerate(column.tolist()):
                if code != actions.BESIDE:
                    batch[position] = actions.reader(buffer, leaf, layout.rows, int(self._indices[position]), code)()
                elif position in parts:
                    batch[position] = next(parts[position])
            found.append(batch)
        return found

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def truncated(self, part: Part, failure: Any) -> None:
        """The part was truncated in this step, since its env failed so."""
        for index in part.indices:
            self._infos[self._positions[index]] = {**INVALID, "env_failure": failure}

    def raised(self, index: int, text: str) -> None:
        """The row has no result, since its env raised."""
        self._failed[self._positions[index]] = text

    def left(self, row: Row, ending: Mapping[str, Any]) -> None:
        """The row's episode ended so in this step, which another worker completes."""
        if self._recorder.closed:
            return
        position = self._positions[row.index]
        rewards, terminations, truncations = (np.array(column) for column in self._flags)
        rewards[position] = ending["reward"]
        terminations[position], truncations[position] = ending["terminated"], ending["truncated"]
        infos = {position: {"final_obs": ending["final"]["final_obs"]}}
        self._recorder.stepped(self._leaves(), (rewards, terminations, truncations), infos, last=True)

    # --- resets -------------------------------------------------------------------------------------------------------

    def begin_reset(self) -> None:
        """Know where the results of a reset by request will be."""
        self._infos, self._failed = {}, {}
        self._note_slots(range(len(self._rows)))

    def end_reset(self, seeds: Mapping[int, int | None], rendering: Rendering) -> None:
        """Record the resets of the rows of ``seeds``; ``rendering`` as of ``end``."""
        mask = np.array([row in seeds and position not in self._failed for row, position in self._positions.items()])
        if self._recorder.closed or not self._is_open(np.flatnonzero(mask).tolist(), rendering):
            return
        self._recorder.failed(self._failed)
        self._recorder.reset(mask, [seeds.get(row) for row in self._positions], self._leaves())
        self._film(rendering)

    # --- films --------------------------------------------------------------------------------------------------------

    def _is_open(self, reset: Sequence[int] | None, rendering: Rendering) -> bool:
        """Whether there is a tape; where films are wanted one is made once an env of these was reset and shows frames.

        The envs of a worker have frames of one shape.
        """
        if not self._recorder.opened and reset is not None:
            shown = [each for each in reset if each not in self._failed and each not in self._infos]
            if shown:
                first = next((position for position in shown if position in self._filmed), shown[0])
                self._frame = self._rendered([first], rendering)[0].shape
                self._recorder.open(self._frame, self._wait_s)
        return self._recorder.opened

    def _film(self, rendering: Rendering) -> None:
        if self._recorder.frames_due:
            frames = self._rendered(self._recorder.frames_due, rendering)
            black = np.zeros(self._frame, np.uint8)
            self._recorder.add_frames([frame if frame.shape == black.shape else black for frame in frames])

    def _rendered(self, positions: Sequence[int], rendering: Rendering) -> list[np.ndarray]:
        """What the envs at these positions, ascending, show; an empty array of one that cannot be rendered."""
        frames, indices = [], self._indices[list(positions)].tolist()
        for target in [target for part in self._parts for target in part.targets(indices)]:
            with rendering(target):
                try:
                    frames.append(np.asarray(target.env.get_wrapper_attr("render")()))
                except BaseException:  # the env may have raised in this step
                    traceback.print_exc()  # into the worker's log
                    frames.append(np.zeros(0))
        return frames

    def close(self) -> None:
        """Hand over what is complete; nothing is recorded any more."""
        self._recorder.close()
