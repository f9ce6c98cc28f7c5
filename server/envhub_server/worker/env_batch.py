"""A vector env of a worker and its rows' places in the arena: it steps all of its rows in one call.

An ``EnvBatch`` is a row group, as a ``Row`` is (see ``row``), of several rows, and stores the results of all of them at
once. Its rows begin, step and end together. Only a masked reset, if the env supports it, treats them separately, and
only once all rows were reset: while the env is new, the ``needs_reset`` of all rows is the same.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any, Callable, Collection, Mapping, Sequence, Union

import numpy as np

from envhub.arena.memory import ENDED, FIRST_CALL, FRESH, REPORT_PENDING, Arena, truncate
from envhub.env_failure import reseeded
from envhub.values import spaces
from envhub.values.info_columns import VECTOR_REWARD, BatchWriter, Writer
from envhub.values.leaf import OBJECT
from envhub_server.ipc import control
from envhub_server.worker.batch_memory import BatchActions, BatchResults, Outcome, infos_by_env
from envhub_server.worker.native_env import NativeEnv, Options, Seeds, SharedCall, SubEnv
from envhub_server.worker.row import DISABLED, INVALID, SAME_STEP, Row, RowSeeds
from envhub_server.worker.row_memory import CheckPlan, InfoWriter, NotFinite, Send, as_slice, why_not_finite
from envhub_server.worker.trace_writer import TraceWriter


class EnvBatch:
    """A vector env of this worker, with its rows."""

    def __init__(self, rows: Sequence[int], env: NativeEnv, build: control.Build) -> None:
        self.env, self._build = env, build
        self._be(rows)
        self._mode, self._finite_only = build.autoreset_mode, build.on_invalid != "pass"
        self._new = True  # True until its first reset, which is of all rows
        self._none: list[int | None] = [None] * len(rows)  # no seed for any of them
        self._seeds = self._none  # the last seeds from the program
        self._first_seeds = self._seeds  # of the reset that a new env begins with
        self._rebuilds = 0
        self._plan = CheckPlan()
        self.trace: TraceWriter | None = None

    def _be(self, rows: Sequence[int]) -> None:
        self.indices, self.index = list(rows), rows[0]
        self.arena_index = as_slice(rows)
        self.bits = self.index | FIRST_CALL
        self._rows = np.array(self.indices)

    def move(self, index: int) -> None:
        self._be([row + index - self.index for row in self.indices])
        self.env.rows = self.indices

    def rebuilt(self, env: NativeEnv) -> None:
        self.env, self._new = env, True
        self._rebuilds += 1
        self.bits = self.index | FIRST_CALL
        self._first_seeds = [reseeded(seed, self._rebuilds) for seed in self._seeds]
        if self.trace is not None:
            self.trace.made(self)

    def attach(
        self, arena: Arena, observation_space: Any, action_space: Any, send: Send, columns: Writer | None
    ) -> None:
        if OBJECT in spaces.leaves(observation_space):
            raise TypeError(f"a vector env whose observations have parts of no fixed size: {observation_space}")
        self._arena, self._send = arena, send
        self._observation_space = observation_space
        same_step = self._mode == SAME_STEP
        self._infos = [InfoWriter(row, arena, send, columns, self._build) for row in self.indices]
        mine = self.arena_index
        batch_columns = None if columns is None else BatchWriter(columns, partial(arena.infos_of, mine), mine)
        self._results = BatchResults(arena, self.indices, self._infos, batch_columns, same_step)
        self._request, self._done = arena.request[mine], arena.done[mine]
        self._needs_reset = arena.needs_reset[mine]
        self._actions = BatchActions(arena, mine, action_space)
        self._plan.begin()

    @property
    def posted(self) -> bool:
        """True if every row is posted for a step; the driver stores the words one after the other."""
        return bool((self._request != self._done).all())  # each op is stored before its row's request

    def take_over(self, seeds: RowSeeds, failure: Exception | None, info: bytes, objects: Mapping[int, bytes]) -> None:
        self._seeds = [seeds.get(row) for row in self.indices]
        self._first_seeds = self._seeds
        self._pending_failure, self._pending_info = failure, info
        if self._needs_reset.max() > ENDED:
            self._needs_reset[:] = self._needs_reset.max()  # a row without a failure to report waits for the others

    def targets(self, rows: Collection[int]) -> list[SubEnv]:
        wanted = [number for number, row in enumerate(self.indices) if row in rows]
        shared = SharedCall(self.env, len(wanted) == len(self.indices), self._reset_early)
        return [SubEnv(self.indices[number], number, shared, bool(self._needs_reset[0] > ENDED)) for number in wanted]

    def step(self, out_of_band: Sequence[Any] = ()) -> None:
        if out_of_band:
            raise TypeError("a vector env takes actions of numbers in arrays only")
        if self._needs_reset[0] > ENDED:
            self._begin()
            return
        self.bits = self.index
        outcome = self._stepped()
        self._plan.steps_left -= 1
        if not self._plan.steps_left:
            self._check_space(outcome.observations)
        self._results.store(outcome)

    def _begin(self) -> None:
        if self._needs_reset[0] == REPORT_PENDING:
            self._needs_reset[:] = FRESH
            if self._pending_failure is not None:
                raise self._pending_failure
            self.truncate(self._pending_info)
        elif self._mode == DISABLED:
            self.truncate(INVALID)
        else:
            self._results.store(self._first_reset(self._first_seeds, None, rebuilt=True))

    def _first_reset(self, seeds: Seeds, options: Options, rebuilt: bool) -> Outcome:
        self._trace_reset(seeds, options)
        outcome = self._of_reset(*self.env.reset(seeds, self._arena.layout.rows, options, rebuilt), self._rows)
        self._new, self._first_seeds = False, self._none
        return outcome

    def _trace_reset(self, seeds: Seeds, options: Options, rows: Sequence[bool] | None = None) -> None:
        if self.trace is not None:
            named = zip(self.indices, seeds, rows or [True] * len(self.indices))
            self.trace.reset(self, {row: seed for row, seed, is_named in named if is_named}, options)

    def _reset_early(self) -> None:
        if self._new:  # an older env's rows were all reset with the first one
            self.env.reset(self._first_seeds, self._arena.layout.rows, None, rebuilt=True)

    def _stepped(self) -> Outcome:
        if self._mode == DISABLED and self._needs_reset.any():
            ended = self._numbers(self._rows[self._needs_reset == ENDED])
            raise ValueError(f"the episodes of envs {ended} have ended: reset them by options={{'reset_mask': ...}}")
        observation, rewards, terminations, truncations, infos = self.env.step(self._actions.read())
        arrays = self._checked(observation, len(self.indices))
        rewards, axes = np.asarray(rewards), None
        if rewards.ndim > 1 and len(rewards) == len(self.indices):
            axes = np.array(rewards, np.float64)
            rewards = axes.reshape(len(axes), -1).sum(axis=1)
        outcome = Outcome(arrays, rewards, np.asarray(terminations), np.asarray(truncations), infos)
        if self._finite_only:
            self._check_finite(outcome, self._rows)
        if self._mode == SAME_STEP:
            ended = np.logical_or(outcome.terminations, outcome.truncations)
            if self.env.autoreset_mode == SAME_STEP:
                outcome = outcome._replace(infos=_final(infos, ended))
            elif ended.any():
                outcome = self._same_step(outcome, ended)
            if self._finite_only and ended.any():
                self._check_final(outcome.infos)
        return outcome if axes is None else outcome._replace(infos=_with_rewards(outcome.infos, axes))

    def _same_step(self, outcome: Outcome, ended: np.ndarray) -> Outcome:
        """Reset the envs whose episode has ended, and add the final observations and infos of Gymnasium's SAME_STEP."""
        # Copied, because the env may write into the arrays that it returned.
        observations = [np.array(array) for array in outcome.observations]
        infos = infos_by_env(copy.deepcopy(outcome.infos), len(self.indices))
        where = np.flatnonzero(ended).tolist()
        first_observations, infos_of_resets = self.env.reset_some(ended, self._none, None)
        for row, of_reset in zip(where, infos_by_env(infos_of_resets, len(where))):
            arrays = iter([array[row].copy() for array in observations])
            final = {"final_obs": spaces.assemble(self._observation_space, arrays), "final_info": infos[row]}
            infos[row] = {**final, **of_reset}
        first = self._of_reset(first_observations, infos_of_resets, self._rows[ended])
        for array, first_array in zip(observations, first.observations):
            array[ended] = first_array
        return outcome._replace(observations=observations, infos=infos)

    def reset_by(self, seeds: RowSeeds, options_of: Callable[[int], dict[str, Any] | None]) -> None:
        # A reset of some rows of a new env whose failure is not reported yet waits: the next step reports it for all.
        chosen = np.array([row in seeds for row in self.indices])
        if not chosen.any() or (not chosen.all() and self._needs_reset[0] == REPORT_PENDING):
            self.repeat_last()
            return
        given, options = [seeds.get(row) for row in self.indices], options_of(self.index)
        if chosen.all():
            own = bool(self._needs_reset[0] > ENDED) and given == self._none
            self._results.store(self._first_reset(self._first_seeds if own else given, options, rebuilt=own))
        elif self._new:
            raise ValueError(f"a new vector env: its first reset has to name all of envs {self._numbers(self._rows)}")
        else:
            self._trace_reset(given, options, chosen.tolist())
            reset = self.env.reset_some(chosen, given, options)
            self._results.store(self._of_reset(*reset, self._rows[chosen]), chosen)
            self._repeat(~chosen)
        self._seeds = [last if seed is None else seed for last, seed in zip(self._seeds, given)]

    def _of_reset(self, observation: Any, infos: Any, rows: np.ndarray) -> Outcome:
        count = len(rows)
        none = np.zeros(count, bool)
        outcome = Outcome(self._checked(observation, count), np.zeros(count), none, none, infos)
        if self._finite_only:
            self._check_finite(outcome, rows)
        return outcome

    def repeat_last(self) -> None:
        self._repeat(np.ones(len(self.indices), bool))

    def _repeat(self, chosen: np.ndarray) -> None:
        pending = chosen & (self._request != self._done)
        if pending.any():
            rows, slots = self._rows[pending], self._request[pending] & 1
            for leaf in self._arena.observations:
                leaf[slots, rows] = leaf[1 - slots, rows]
        for number in np.flatnonzero(chosen).tolist():
            self._infos[number].store({})

    def truncate(self, info: bytes) -> None:
        for row, writer in zip(self.indices, self._infos):
            template, nbytes = writer.put(info)
            truncate(self._arena, row, nbytes, template)

    def _checked(self, observation: Any, count: int) -> list[np.ndarray]:
        arrays = []
        for values, leaf in zip(spaces.flatten(self._observation_space, observation), self._arena.layout.observations):
            array = values if type(values) is np.ndarray else np.asarray(values)
            if array.shape != (count, *leaf.shape):
                raise ValueError(f"observations of shape {array.shape} of {count} envs whose space has {leaf.shape}")
            if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
                raise TypeError(f"observations of dtype {array.dtype} where the space has {leaf.dtype}")
            arrays.append(array)
        return arrays

    def _numbers(self, rows: Sequence[int] | np.ndarray) -> list[int]:
        return [self._build.row_offset + int(row) for row in rows]

    def _check_finite(self, outcome: Outcome, rows: np.ndarray) -> None:
        wrong = ~np.isfinite(outcome.rewards)
        for array in outcome.observations:
            if array.dtype.kind in "fc":
                wrong = wrong | ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
        if wrong.any():
            raise NotFinite(f"the observation or the reward of envs {self._numbers(rows[wrong])} is not finite")

    def _check_final(self, infos: Any) -> None:
        if isinstance(infos, dict):
            named = {key: infos[key] for key in ("final_obs", "_final_obs") if key in infos}
            infos = infos_by_env(named, len(self.indices))
        finals = [
            (row, info["final_obs"]) for row, info in zip(self.indices, infos) if info.get("final_obs") is not None
        ]
        if wrong := [row for row, final in finals if why_not_finite(self._observation_space, final)]:
            raise NotFinite(f"the final observation of envs {self._numbers(wrong)} is not finite")

    def _check_space(self, arrays: Sequence[np.ndarray]) -> None:
        begun_s = time.thread_time()
        for number, row in enumerate(self.indices):
            observation = spaces.assemble(self._observation_space, iter([array[number] for array in arrays]))
            if not spaces.contains(self._observation_space, observation):
                self._send(control.Suspicious(row, "an observation out of its space"))
                self._plan.stop()
                return
        self._plan.plan_next(time.thread_time() - begun_s)


RowGroup = Union[Row, EnvBatch]


def _with_rewards(infos: Any, axes: np.ndarray) -> Any:
    if isinstance(infos, dict):
        return {**infos, VECTOR_REWARD: axes, f"_{VECTOR_REWARD}": np.ones(len(axes), bool)}
    return [{**info, VECTOR_REWARD: each} for info, each in zip(infos, axes)]


def _final(infos: dict[str, Any], ended: np.ndarray) -> dict[str, Any]:
    """The infos of a step of an env that resets in the same step; only envs that ended have the two final keys."""
    # Some envs return ``final_obs`` without a mask or not at all, and no ``final_info``.
    if not ended.any():
        return {key: value for key, value in infos.items() if key.lstrip("_") not in ("final_obs", "final_info")}
    final_info = {"final_info": {}, "_final_info": ended} if "final_info" not in infos else {}
    mask = {"_final_obs": ended} if "final_obs" in infos else {}
    return {**mask, **infos, **final_info}
