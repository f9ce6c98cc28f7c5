"""Writes the episodes of a worker's envs into a tape, if the operator records them.

What the driver overwrites is copied before the driver is woken, everything else afterwards.
"""

from __future__ import annotations

import functools
import mmap
import os
import socket
import traceback
from typing import Any, Callable, ContextManager, Mapping, Sequence, TypeVar, cast

import numpy as np

from envhub.arena.memory import OP_PART, Arena
from envhub.arena.stand_in import FRESH, ONGOING, REPORT_PENDING
from envhub.errors import shortened
from envhub.protocol.messages import Failure
from envhub.recording.recorder import EpisodeRecorder, Moves, Selection
from envhub.values import actions, codec
from envhub.values.leaf import OBJECT
from envhub_server.ipc.control import ArenaDescriptors, Build
from envhub_server.worker.batch_observer import BatchObserver, Seeds
from envhub_server.worker.env_batch import RowGroup
from envhub_server.worker.row import DISABLED, NEXT_STEP, SAME_STEP, Row
from envhub_server.worker.slots import SlotOrSlots, Slots, as_slice

INVALID = {"invalid_transition": True}

TEXT_CHARS_MAX = 1024  # of an exception, in the note of an episode that it ended

Rendering = Callable[[Any], ContextManager[None]]  # of what a call on an env goes to
_Method = TypeVar("_Method", bound=Callable[..., None])


def _or_give_up(method: _Method) -> _Method:
    """Make a method of an ``EpisodeWriter`` that gives up where it raises: the envs go on unrecorded."""

    @functools.wraps(method)
    def tried(self: EpisodeWriter, *arguments: Any) -> None:
        try:
            method(self, *arguments)
        except BaseException as error:  # such as a full memory, or whatever an env raises when it is rendered
            traceback.print_exc()  # into the worker's log
            self.close()
            self._gave_up(error)

    return cast(_Method, tried)


class EpisodeWriter(BatchObserver):
    """Records the envs of a worker."""

    def __init__(
        self,
        descriptors: ArenaDescriptors,
        wanted: Mapping[str, Any],
        groups: Sequence[RowGroup],
        spaces_of_one: tuple[Any, Any],
        build: Build,
        rendering: Rendering,
        gave_up: Callable[[BaseException], None],
    ) -> None:
        """Record what these groups show, as ``wanted`` by ``MapArena.recording``; ``attach`` has to follow.

        Args:
            descriptors: those of the recording are owned from now on.
            wanted: see above.
            groups: all groups of this worker.
            spaces_of_one: of observations and of actions.
            build: what the envs were built by.
            rendering: the context in which an env is rendered between its steps.
            gave_up: called once the writer has closed itself, with what was raised.
        """
        line, counted = descriptors.recording_line, descriptors.recording_counts
        begun = np.frombuffer(mmap.mmap(counted, 0), np.int64)
        os.close(counted)
        self._groups, self._mode, self._allow_pickle = groups, build.autoreset_mode, build.allow_pickle
        self._rendering, self._gave_up = rendering, gave_up
        self._rows = [(group, number) for group in groups for number in range(len(group.indices))]
        self._positions = {group.indices[number]: position for position, (group, number) in enumerate(self._rows)}
        filmed = wanted["filmed"]
        selection = Selection(len(self._rows), wanted["recorded"], filmed, wanted["every"], wanted["env_ids"])
        ends = socket.socket(fileno=line)
        self._recorder = EpisodeRecorder(ends, selection, spaces_of_one, self._mode, wanted["queue_bytes"], begun)
        self._filmed, self._wait_s = filmed, wanted["wait_s"]
        self._frame: tuple[int, ...] = ()
        self._chosen: np.ndarray | None = None  # rows of a batch that has not all of them
        self._slots: SlotOrSlots = 0
        self._reset: list[int] | None = None  # positions
        self._seeds: dict[int, int | None] = {}  # of these resets
        self._infos: dict[int, Any] = {}
        self._failed: dict[int, str] = {}
        self._out_of_band: Mapping[int, Sequence[Any]] = {}  # leaves of the actions of this step, by position

    @_or_give_up
    def attach(self, arena: Arena) -> None:
        """Use these rows of ``arena`` from now on, which has the layout of the one before."""
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

    @_or_give_up
    def begin(self, groups: Sequence[RowGroup], out_of_band: Mapping[int, bytes]) -> None:
        """Keep the actions of these groups."""
        if self._recorder.closed:
            return
        whole = len(groups) == len(self._groups) and self._ops[self._first] != OP_PART
        self._note_slots(None if whole else [self._positions[index] for group in groups for index in group.indices])
        self._infos, self._failed, self._reset, self._seeds = {}, {}, None, {}
        needs = self._needs_reset.tolist()
        if any(needs):
            self._note_resets(needs)
        self._out_of_band = {
            self._positions[row]: codec.decode(blob, self._allow_pickle)
            for row, blob in out_of_band.items()
            if row in self._positions
        }
        if self._recorder.records:
            self._recorder.acted(self._actions())

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
                    group, number = self._rows[position]
                    self._seeds[position] = group.first_seeds[number]

    @_or_give_up
    def end(self) -> None:
        """Record the results."""
        if self._recorder.closed or not self._is_open(self._reset):
            return
        if axes := next((group.reward_shape for group in self._groups if group.reward_shape), ()):
            # A data set of Minari has one number for each step.
            raise ValueError(f"rewards of shape {axes}: in a recording a reward is one number")
        _, terminations, truncations = self._flags
        if self._mode == SAME_STEP and b"\1" in (terminations | truncations).tobytes():
            for position in np.flatnonzero(terminations | truncations).tolist():
                if position not in self._infos:
                    group, number = self._rows[position]
                    self._infos[position] = {"final_obs": group.final_observations[number]}
        moves = None
        if self._reset is not None or self._failed or self._chosen is not None:
            moves = self._moves()
        self._recorder.stepped(self._leaves(), self._flags, self._infos, moves)
        self._film()

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

    def _actions(self) -> list[Any]:
        """A batch for each leaf of the actions."""
        codes = b"".join([column.tobytes() for column in self._code_columns])
        if codes != self._codes:
            self._codes, self._batches = codes, self._read_as()
        return self._one_by_one() if self._batches is None else self._batches

    def _read_as(self) -> list[np.ndarray] | None:
        """Views of the actions by the rows' codes; None where they have several, or are out of band."""
        layout, batches = self._arena.layout, []
        for buffer, leaf, column in zip(self._arena.actions, layout.actions, self._code_columns):
            kinds = set(column.tolist())
            if len(kinds) > 1 or actions.OUT_OF_BAND in kinds or leaf == OBJECT:
                return None
            batches.append(actions.batch_of(buffer, leaf, layout.rows, kinds.pop())[self._mine])
        return batches

    def _one_by_one(self) -> list[Any]:
        layout, batches = self._arena.layout, []
        leaves = {position: iter(values) for position, values in self._out_of_band.items()}
        for buffer, leaf, column in zip(self._arena.actions, layout.actions, self._code_columns):
            batch = np.zeros((len(self._rows), *leaf.shape), leaf.dtype)
            for position, code in enumerate(column.tolist()):
                if code != actions.OUT_OF_BAND:
                    batch[position] = actions.reader(buffer, leaf, layout.rows, int(self._indices[position]), code)()
                elif position in leaves:
                    batch[position] = next(leaves[position])
            batches.append(batch)
        return batches

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    def truncated(self, group: RowGroup, failure: Mapping[str, Any]) -> None:
        """Keep the failure, which is part of the info."""
        for index in group.indices:
            self._infos[self._positions[index]] = {**INVALID, "env_failure": failure}

    def raised(self, index: int, failure: Failure) -> None:
        """Keep what was raised, which ends the episode."""
        text = f"exception: {failure.type}: {shortened(failure.message, TEXT_CHARS_MAX)}"
        self._failed[self._positions[index]] = text

    @_or_give_up
    def left(self, row: Row) -> None:
        """Record the last step of the row's episode."""
        if not self._recorder.closed:
            infos = {self._positions[row.index]: {"final_obs": row.final_observations[0]}}
            self._recorder.stepped(self._leaves(), self._flags, infos, last=True)

    # --- resets -------------------------------------------------------------------------------------------------------

    @_or_give_up
    def begin_reset(self, seeds: Seeds, options_of: Callable[[int], bytes]) -> None:
        """Note where the results of a reset by request will be."""
        self._infos, self._failed = {}, {}
        self._note_slots(range(len(self._rows)))

    @_or_give_up
    def end_reset(self, seeds: Seeds) -> None:
        """Record the resets of the rows of ``seeds``."""
        mask = np.array([row in seeds and position not in self._failed for row, position in self._positions.items()])
        if self._recorder.closed or not self._is_open(np.flatnonzero(mask).tolist()):
            return
        self._recorder.failed(self._failed)
        self._recorder.reset(mask, [seeds.get(row) for row in self._positions], self._leaves())
        self._film()

    # --- films --------------------------------------------------------------------------------------------------------

    def _is_open(self, reset: Sequence[int] | None) -> bool:
        """True if there is a tape; where films are wanted one is made once an env of these was reset and shows frames.

        The envs of a worker have frames of one shape.
        """
        if not self._recorder.opened and reset is not None:
            shown = [each for each in reset if each not in self._failed and each not in self._infos]
            if shown:
                first = next((position for position in shown if position in self._filmed), shown[0])
                self._frame = self._rendered([first])[0].shape
                self._recorder.open(self._frame, self._wait_s)
        return self._recorder.opened

    def _film(self) -> None:
        if self._recorder.frames_due:
            frames = self._rendered(self._recorder.frames_due)
            black = np.zeros(self._frame, np.uint8)
            self._recorder.add_frames([frame if frame.shape == black.shape else black for frame in frames])

    def _rendered(self, positions: Sequence[int]) -> list[np.ndarray]:
        """Frames of the envs at these positions, ascending; an empty array for one that cannot be rendered."""
        frames, indices = [], self._indices[list(positions)].tolist()
        for target in [target for group in self._groups for target in group.targets(indices)]:
            with self._rendering(target):
                try:
                    frames.append(np.asarray(target.env.get_wrapper_attr("render")()))
                except BaseException:  # the env may have raised in this step
                    traceback.print_exc()  # into the worker's log
                    frames.append(np.zeros(0))
        return frames

    def close(self) -> None:
        """Hand over the complete episodes, and end the recording."""
        self._recorder.close()
