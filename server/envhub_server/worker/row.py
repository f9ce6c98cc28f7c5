"""A row: one env of a worker and its place in the arena.

A worker drives one or more **row groups**: each has some of its rows, with an env that steps these. A ``Row`` is a
group of one row. The worker finds the rows of a group by ``index`` and ``arena_index``, has it ``step`` or
``reset_by``, and stores ``done``.

A ``Row`` decides what a step or a reset of its env is (autoreset, what goes into the info) and stores the result. The
autoreset rules are those of ``gymnasium.vector.AsyncVectorEnv`` (1.4).
"""

from __future__ import annotations

import copy
import time
from typing import Any, Callable, Collection, Mapping, Optional, Sequence

import numpy as np

from envhub.arena.memory import ENDED, FIRST_CALL, FRESH, ONGOING, REPORT_PENDING, Arena, repeat_observation, truncate
from envhub.env_failure import reseeded
from envhub.errors import brief
from envhub.values import codec, spaces
from envhub.values.info_columns import VECTOR_REWARD, Writer
from envhub_server.ipc import control
from envhub_server.worker.gym_compat import accepts
from envhub_server.worker.row_memory import (
    CheckPlan,
    InfoWriter,
    NotFinite,
    ObservationWriter,
    RowActions,
    Send,
    why_not_finite,
)
from envhub_server.worker.trace_writer import TraceWriter


class EnvRunner:
    """Runs one env inside of a worker.

    ``envhub.AsyncVectorEnv(env_fns, worker=Mine)``, where ``Mine`` extends this class, or is named ``"module:Mine"``.
    The worker makes one for each env. The autoreset mode, not this class, decides when an env is reset without a
    request, and in which step the results arrive.
    """

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Reset the env because its user asked for it; return the values of ``gymnasium.Env.reset``."""
        env, accepted = self.__dict__.get("_accepted", (None, ()))
        if env is not self.env:  # the signatures of an env and its wrappers take longer to read than a small env resets
            accepted = [name for name in ("seed", "options") if accepts(self.env, "reset", name)]
            self._accepted = self.env, accepted
        asked = {"seed": seed, "options": options}
        given = {name: value for name, value in asked.items() if value is not None or name in accepted}
        return self.env.reset(**given)  # type: ignore[no-any-return]

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the env; return the values of ``gymnasium.Env.step``."""
        return self.env.step(action)  # type: ignore[no-any-return]

    def autoreset(self) -> tuple[Any, dict[str, Any]]:
        """Reset the env because its episode ended and the autoreset mode is next-step or same-step."""
        return self.env.reset()  # type: ignore[no-any-return]


INVALID = codec.encode({"invalid_transition": True})  # the info of a truncation that is no transition of the env
NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"

_NUMBERS = frozenset([float, int, bool, np.float64, np.float32])  # classes of rewards without axes

RowSeeds = Mapping[int, Optional[int]]  # of envs by their rows; None for no seed


class Row:
    """One env of this worker."""

    posted = True  # whether the words of all of its rows are written, if that of the first is

    def __init__(self, index: int, runner: EnvRunner, build: control.Build) -> None:
        self._build = build
        self.move(index)
        self.env = runner.env
        self._runner = runner
        self._mode, self._finite_only = build.autoreset_mode, build.on_invalid != "pass"
        self._exact = codec.as_pickle if build.allow_pickle else codec.refuse
        self._plan = CheckPlan()
        self.first_seed: Any = None  # for the reset that a new env begins with
        self._last_seed: Any = None  # of its resets
        self._rebuilds = 0  # number of times that this worker rebuilt the env
        self._last_objects = b""  # of the last observation; empty: the client keeps those that it has
        self.trace: TraceWriter | None = None
        self._reward_shape: tuple[int, ...] = ()  # of the first reward with axes; empty before it

    def move(self, index: int) -> None:
        self.index = self.arena_index = index  # in the session; the place of the group's words
        self.indices, self._name = [index], f"env {self._build.row_offset + index}"
        self.bits = index | FIRST_CALL  # the lower bits of the worker's progress word while it is at this row

    def rebuilt(self, runner: EnvRunner) -> None:
        self.env, self._runner = runner.env, runner
        self._rebuilds += 1
        self.bits, self.first_seed = self.index | FIRST_CALL, reseeded(self._last_seed, self._rebuilds)
        if self.trace is not None:
            self.trace.made(self)

    def attach(
        self, arena: Arena, observation_space: Any, action_space: Any, send: Send, columns: Writer | None
    ) -> None:
        # The env's own observation space may have its keys in another order. ``send`` takes ``Suspicious`` for the
        # first observation that is not in its space.
        self._send = send
        self._plan.begin(not isinstance(observation_space, spaces.Anything))
        self._actions = RowActions(arena, self.index, action_space)
        self._observation = ObservationWriter(arena, self.index, observation_space, self._name)
        self._info = InfoWriter(self.index, arena, send, columns, self._build)
        self._observation_space, self._arena = observation_space, arena
        # As words, because NumPy takes ten times as long to store a single number into an array.
        self._rewards, self._terminations = arena.rewards.data, arena.terminations.data
        self._truncations = arena.truncations.data
        self._needs_reset = arena.needs_reset.data
        self._request, self._done = arena.request.data, arena.done.data

    def _check_space(self, observation: Any) -> None:
        begun_s = time.thread_time()
        try:
            contained = spaces.contains(self.env.observation_space, observation)
            problem = "" if contained else "an observation out of its space"
        except Exception as error:  # from a space of the env's own class, which the worker does not need
            problem = f"its space cannot tell whether it contains an observation: {error!r}"
        self._plan.plan_next(time.thread_time() - begun_s)
        if problem:
            self._send(control.Suspicious(self.index, problem))
            self._plan.stop()

    def _check_finite(self, observation: Any, reward: Any) -> None:
        if not np.all(np.isfinite(reward)):
            raise NotFinite(f"a reward of {reward}")
        if problem := why_not_finite(self._observation_space, observation):
            raise NotFinite(problem)

    def _checked(self, outcome: tuple[Any, Any]) -> tuple[Any, Any]:
        if self._finite_only:
            self._check_finite(outcome[0], 0.0)
        return outcome

    def take_over(self, seeds: RowSeeds, failure: Exception | None, info: bytes, objects: Mapping[int, bytes]) -> None:
        # If the row has not reported yet how the env before this one ended, its first step raises ``failure``, or
        # without one is a truncation with ``info``. ``objects`` are the object leaves of the last observations.
        self.first_seed = self._last_seed = seeds.get(self.index)
        self._pending_failure, self._pending_info = failure, info
        self._last_objects = objects.get(self.index, b"")

    def step(self, out_of_band: Sequence[Any] = ()) -> None:
        # ``out_of_band`` are the leaves of the action that are not in the arena, in the order of the leaves.
        needs_reset = self._needs_reset[self.index]
        if needs_reset > ENDED:
            self._begin(needs_reset)
            return
        self.bits = self.index
        if needs_reset and self._mode == NEXT_STEP:
            observation, info = self._autoreset()
            self._store(observation, 0.0, False, False, info)
            return
        results = self._runner.step(self._actions.read(out_of_band))
        try:
            observation, reward, terminated, truncated, info = results
        except (TypeError, ValueError) as error:
            kind = f"a {type(results).__name__}"
            returned = f"a tuple of {len(results)}" if isinstance(results, (tuple, list)) else kind
            text = f"step of {self._name} returned {returned}, and not an observation, a reward, terminated, "
            raise TypeError(f"{text}truncated and an info") from error
        axes: dict[str, Any] = {}
        if type(reward) not in _NUMBERS or self._reward_shape:
            reward, axes = self._with_axes(reward)
        plan = self._plan
        plan.steps_left -= 1
        if not plan.steps_left:
            self._check_space(observation)
        if self._finite_only:
            self._check_finite(observation, axes.get(VECTOR_REWARD, reward))
        if (terminated or truncated) and self._mode == SAME_STEP:
            # The env may write its next observation into the same array, so the final one is copied before the reset.
            final = {"final_obs": copy.deepcopy(observation), "final_info": _copied(info)}
            observation, info = self._autoreset()
            self._store(observation, reward, terminated, truncated, {**final, **_as_dict(info), **axes})
            self._needs_reset[self.index] = ONGOING
            return
        if axes:
            info = {**_as_dict(info, f"step of {self._name}"), **axes}
        self._store(observation, reward, terminated, truncated, info, "step")

    def _with_axes(self, reward: Any) -> tuple[Any, dict[str, Any]]:
        if not np.ndim(reward) and not self._reward_shape:
            return reward, {}
        terms = np.array(reward, np.float64)
        self._reward_shape = self._reward_shape or terms.shape
        if terms.shape != self._reward_shape:
            text = f"step of {self._name} returned a reward of shape {terms.shape}, and {self._reward_shape} before"
            raise ValueError(text)
        return float(terms.sum()), {VECTOR_REWARD: terms}

    def _autoreset(self) -> tuple[Any, Any]:
        if self.trace is not None:
            self.trace.autoreset(self)
        return self._checked(self._runner.autoreset())

    def _begin(self, needs_reset: int) -> None:
        if needs_reset == REPORT_PENDING:
            self._needs_reset[self.index] = FRESH
            if self._pending_failure is not None:
                raise self._pending_failure
            self.truncate(self._pending_info)
        elif self._mode == DISABLED:
            self.truncate(INVALID)
        else:
            if self.trace is not None:
                self.trace.reset(self, {self.index: self.first_seed})
            observation, info = self._checked(self._runner.reset(self.first_seed, None))
            self.first_seed = None
            self._store(observation, 0.0, False, False, info)

    @property
    def awaits_first_reset(self) -> bool:
        return bool(self._needs_reset[self.index] > ENDED)

    def reset_early(self) -> None:
        """Reset the new env so that it can be rendered; its pending first reset still follows, with the same seed."""
        self._runner.reset(self.first_seed, None)

    def truncate(self, info: bytes) -> None:
        """End the episode without a transition of the env; the env is reset before its next step."""
        blob = codec.encode_pair(self._last_objects, info) if self._observation.has_objects else info
        template, nbytes = self._info.put(blob)
        truncate(self._arena, self.index, nbytes, template)

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._last_seed = self._last_seed if seed is None else seed
        if self.trace is not None:
            self.trace.reset(self, {self.index: seed}, options)
        observation, info = self._checked(self._runner.reset(seed, options))
        self._store(observation, 0.0, False, False, info)

    def reset_by(self, seeds: RowSeeds, options_of: Callable[[int], dict[str, Any] | None]) -> None:
        if self.index not in seeds:
            self.repeat_last()
            return
        seed = seeds[self.index]
        self.reset(self.first_seed if seed is None and self.awaits_first_reset else seed, options_of(self.index))

    def targets(self, rows: Collection[int]) -> list[Row]:
        return [self] if self.index in rows else []

    def repeat_last(self) -> None:
        if self._request[self.index] != self._done[self.index]:
            repeat_observation(self._arena, self.index)
        if self._observation.has_objects:
            self._info.store_objects(self._last_objects)
        else:
            self._info.store({})

    def _store(
        self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any, method: str = "reset"
    ) -> None:
        if type(info) is not dict:
            info = _as_dict(info, f"{method} of {self._name}")
        objects = self._observation.store(observation, method)
        index = self.index
        try:
            self._rewards[index] = reward
        except (TypeError, ValueError):  # some envs return an array without axes
            self._arena.rewards[index] = reward
        self._terminations[index], self._truncations[index] = terminated, truncated
        self._needs_reset[index] = ENDED if terminated or truncated else ONGOING
        if objects:
            encoded = codec.encode(objects, self._exact)
            self._info.store(info, encoded)
            self._last_objects = encoded
        else:
            self._info.store(info)


def _as_dict(info: Any, source: str = "reset") -> dict[Any, Any]:
    """The info as a dict; Gymnasium's vector envs accept any mapping. ``source`` says what returned it."""
    try:
        items = info.items()
    except AttributeError as error:
        raise AttributeError(f"{error}: {source} returned an info that is not a dict: {brief(info, 100)}") from error
    return dict(items)


def _copied(info: Any) -> Any:
    """A deep copy; values that cannot be copied, such as a lock, are kept and travel as their ``repr``."""
    try:
        return copy.deepcopy(info)
    except RecursionError:
        return info
    except Exception:  # a foreign __reduce__ may raise anything
        pass
    # Outside the handler, so that the exceptions of nested levels are not chained.
    return {key: _copied(value) for key, value in info.items()} if isinstance(info, dict) else info
