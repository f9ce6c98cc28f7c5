"""A vector env for tianshou's collectors, its high-level factory, and what leaves out what a crash cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Dict, Tuple
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import create_empty_array, iterate
from tianshou.data import AsyncCollector as TianshouAsyncCollector
from tianshou.data import CollectStats, VectorReplayBuffer
from tianshou.env import BaseVectorEnv, VectorEnvWrapper
from tianshou.highlevel.env import EnvFactory, EnvMode, VectorEnvType
from typing_extensions import Unpack

from envhub.env_failure import EnvFailure
from envhub.errors import HubTimeout
from envhub.values.spaces import Anything, SpacesDiffer
from envhub.vector_errors import NothingPending, SessionBusy
from envhub_client.deadline import Deadline
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.frameworks import composed_actions
from envhub_client.frameworks.attributes import attributes, call
from envhub_client.frameworks.by_value import by_value
from envhub_client.frameworks.decided_options import refuse_decided
from envhub_client.make import EnvLike, make, make_vec
from envhub_client.option_keywords import MakeKeywords

StepReturn = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Ids = int | Sequence[int] | np.ndarray | None

INVALID = "invalid_transition"  # in the info of a step that is none of the env's
DRAWS_MAX = 100


class _Part(NamedTuple):
    """Results of some envs, with the infos by env."""

    observations: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    infos: dict[int, dict[str, Any]]
    rows: np.ndarray


def _made(env_fns: EnvLike, num_envs: int, **options: Any) -> HubVectorEnv:
    """These envs, whose spaces may differ: tianshou asks each env for its own.

    Where the spaces have one structure, observations are batched in shared memory. Only the envs show whether they
    have; if not, they are made again, and each env's observations travel as they are.
    """
    try:
        return make_vec(env_fns, num_envs, **{"observation_mode": "first", **options})
    except SpacesDiffer:
        if "observation_mode" in options:
            raise
        return make_vec(env_fns, num_envs, observation_mode="any", **options)


class TianshouVectorEnv(BaseVectorEnv):
    """``envhub.tianshou.HubVectorEnv``: a vector env for tianshou's ``Collector`` and ``AsyncCollector``.

    Results are those of ``SubprocVectorEnv``. Rewards are float64 even where envs return integers, which tianshou's
    buffers turn into floats; observations have the dtype of their space.

    Envs may differ in their spaces. Envs that differ in shapes or keys are made twice, unless the option
    ``observation_mode="any"`` is given. It also takes observations that do not fit their space, such as of another
    dtype. Where actions differ in shape, all envs have to be stepped together.

    An episode that the end of a worker cut short ends with ``truncated``, its last observation once more, reward 0,
    and ``invalid_transition`` in the info of that step. So the buffer's ``info.invalid_transition`` marks such steps;
    ``failures`` says why. (The ``envhub.EnvFailure`` itself is in no info: where other infos have none, tianshou takes
    the gap for NaN.) The next ``reset`` of the env finds it working. ``WholeEpisodeStats``, ``AsyncCollector`` and
    ``ValidReplayBuffer`` leave such episodes and steps out.

    An env that is stepped after its episode's end, without a ``reset``, is reset instead. The envs of a process step
    one after the other: with ``wait_num`` or ``timeout`` and ``num_workers=num_envs`` a slow one delays no other. Over
    a network, a step after one that timed out begins when one more env is done.

    Attributes:
        envs: the ``envhub.HubVectorEnv`` behind it.
        failures: the last failure of each env that had one, by its number.
        env_num, wait_num, timeout, is_async, waiting_id, ready_id, is_closed: as in ``BaseVectorEnv``.
    """

    # ``BaseVectorEnv``'s own looks each name up in a list first; the names of that list are properties here.
    __getattribute__ = object.__getattribute__

    def __init__(  # BaseVectorEnv's would start a worker for each env
        self,
        env_fns: EnvLike,
        num_envs: int | None = None,
        *,
        wait_num: int | None = None,
        timeout: float | None = None,
        **options: Unpack[MakeKeywords],
    ) -> None:
        """Make the envs.

        Args:
            env_fns: a list of factories, as tianshou takes, or anything else that ``envhub.make_vec`` takes.
            num_envs: how many; not needed with a list.
            wait_num: how many envs a step waits for; None is all.
            timeout: for how many seconds a step waits, unless none is done.
            **options: keywords of ``envhub.make_vec``, such as ``hub``, ``num_workers`` and the fault options.

        Raises:
            AssertionError: ``wait_num`` or ``timeout`` is out of range.
            TypeError: for ``autoreset_mode``, which tianshou decides.
            ValueError: a list of factories of another length than ``num_envs``.
            Exception: as for ``envhub.make_vec``.
        """
        count = num_envs or 1
        if isinstance(env_fns, Iterable) and not isinstance(env_fns, str):
            env_fns = list(env_fns)
            count = len(env_fns)
            if num_envs not in (None, count):
                raise ValueError(f"num_envs={num_envs} and {count} factories; wait_num is a keyword")
        assert wait_num is None or 1 <= wait_num <= count, f"wait_num should be in [1, {count}], but got {wait_num}"
        assert timeout is None or timeout > 0, f"timeout is {timeout}, it should be positive if provided!"
        self.is_closed = True
        self.is_async = wait_num not in (None, count) or timeout is not None
        refuse_decided(options, "tianshou", "autoreset_mode")
        with by_value(env_fns, "tianshou"):
            self.envs: HubVectorEnv = _made(env_fns, count, autoreset_mode=AutoresetMode.NEXT_STEP, **options)
        self.is_closed = False
        self.env_num = count
        self.wait_num = wait_num or count
        self.timeout = timeout
        self.waiting_id: list[int] = []
        self.ready_id = list(range(count))
        self.failures: dict[int, EnvFailure] = {}
        self._all = np.arange(count)
        self._all_ids = list(range(count))
        self._steps_parts = not isinstance(self.envs.single_action_space, Anything)
        self._flat_actions = not composed_actions.is_composed(self.envs.single_action_space)
        self._space_seeds: list[int | None] = [None] * count
        self._sent: Any = None  # the last actions that were sent by parts
        self._held: list[_Part] = []  # results that came while other envs were waited for
        self._ended = np.zeros(count, bool)  # envs whose episode has ended since their last reset
        self._interrupted = False  # by Ctrl-C, in a step whose results nobody asks for again

    # --- attributes ---------------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> list[Any]:
        """The ``metadata`` of each env."""
        return self.get_env_attr("metadata")

    @property
    def reward_range(self) -> list[Any]:
        """The ``reward_range`` of each env, or None."""
        return self.get_env_attr("reward_range")

    @property
    def spec(self) -> list[Any]:
        """The ``spec`` of each env."""
        return self.get_env_attr("spec")

    @property
    def action_space(self) -> list[Any]:
        """A copy of the action space of each env, seeded by ``seed``."""
        return self.get_env_attr("action_space")

    @property
    def observation_space(self) -> list[Any]:
        """A copy of the observation space of each env."""
        return self.get_env_attr("observation_space")

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """The attribute of each env, None where it has none; of a method a function that calls it in the hub.

        Raises:
            AssertionError: after ``close``, or for envs that are stepping.
            IndexError: there is no such env.
            Exception: as for ``HubVectorEnv.call_some``.
        """
        rows = self._free_rows(id)
        if not rows:
            return []
        unique = sorted(set(rows))
        there = self.envs.has_attr(key, unique)
        found = dict.fromkeys(unique)
        if asked := [row for row, has in zip(unique, there, strict=True) if has]:
            found.update(zip(asked, attributes(self.envs, key, asked), strict=True))
        if key == "action_space":
            for row, space in found.items():
                if space is not None and self._space_seeds[row] is not None:
                    space.seed(self._space_seeds[row])
        return [found[row] for row in rows]

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """Set an attribute of each env: where it is, on a wrapper or the env; a new one on the outermost wrapper.

        Errors as for ``get_env_attr``.
        """
        if rows := sorted(set(self._free_rows(id))):
            self.envs.set_attr(key, [value] * len(rows), rows)

    def _free_rows(self, id: Ids) -> list[int]:
        """The rows of envs that are to be asked something, when no env is under way any more."""
        self._assert_is_not_closed()
        ids = self._wrap_id(id)
        if self.is_async:
            self._assert_id(ids)
            self._receive_all()
        return self._rows(ids)

    def _rows(self, ids: Any) -> list[int]:
        return [range(self.env_num)[index] for index in ids]

    # --- reset --------------------------------------------------------------------------------------------------------

    def reset(
        self, env_id: Ids = None, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Reset every env, or these, each with this seed and these options.

        Returns:
            Observations and infos, an entry for each of ``env_id``; an env that comes twice is reset once.

        Raises:
            AssertionError: after ``close``, or for envs that are stepping.
            IndexError: there is no such env.
            TypeError: observations are tuples, which tianshou does not support.
            ValueError: no env is named.
            Exception: as for ``HubVectorEnv.reset``.
        """
        self._assert_is_not_closed()
        ids = self._all_ids if env_id is None else self._wrap_id(env_id)
        if self.is_async:
            self._assert_id(ids)
        rows = self._rows(ids)
        if not rows:
            raise ValueError("reset needs the number of an env")
        by_step = seed is None and options is None and self._steps_parts and self._ended[rows].all()
        if by_step and (self._under_way() or self.envs.lane == "shared"):
            with _Draining(self):
                observations, by_env = self._reset_by_step(rows)
        else:
            self._receive_all()
            seeds = None if seed is None else [seed] * self.env_num
            unique = sorted(set(rows))
            observations, by_env = self.envs.reset_each(seeds, options, env_ids=unique)
            stacked = self._stacked(observations)
            observations = stacked if rows == self._all_ids else self._stacked(stacked[rows])
        self._ended[rows] = False
        for row, info in by_env.items():
            self._take_failure(row, info)
        infos = np.empty(len(rows), object)
        infos[:] = [by_env.get(row, {}) for row in rows]
        return observations, infos

    def _reset_by_step(self, rows: list[int]) -> tuple[np.ndarray, dict[int, dict[str, Any]]]:
        """Reset envs that have ended, as a step of theirs does, and hold what other envs return meanwhile.

        Unlike a reset proper it does not wait for all envs under way, and on the shared lane does not go by the hub.
        """
        observations: dict[int, Any] = {}
        infos: dict[int, dict[str, Any]] = {}
        # An env whose worker takes its time to come back is truncated once more.
        while asked := [row for row in dict.fromkeys(rows) if row not in observations or INVALID in infos[row]]:
            self._send(self._ignored_actions(len(asked)), asked)
            missing = set(asked)
            while missing:
                part = _Part(*self.envs.recv_each(min_envs=1))
                own = np.isin(part.rows, asked)
                if not own.all():
                    self._held.append(self._some_of(part, ~own))
                each = self._stacked(part.observations)
                for place in np.flatnonzero(own).tolist():
                    row = int(part.rows[place])
                    observations[row], infos[row] = each[place], part.infos.get(row, {})
                    missing.discard(row)
        return self._stacked([observations[row] for row in rows]), infos

    def _ignored_actions(self, count: int) -> Any:
        """Actions for envs whose step is a reset, of the dtype of those under way: by parts there is but one."""
        if isinstance(self._sent, np.ndarray):
            return np.repeat(self._sent[:1], count, axis=0)
        if self._flat_actions and self._sent is not None:
            return [self._sent[0]] * count
        return create_empty_array(self.envs.single_action_space, count)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[Any]:
        """Seed every env, and what is returned as its action space; ``i`` is ``[i, i + 1, ...]``.

        Returns:
            What each env's ``seed`` returned; None for one without that method, which is reset with the seed.

        Raises:
            AssertionError: after ``close``, or while envs are stepping.
            ValueError: seeds for another number of envs.
        """
        rows = self._free_rows(None)
        if seed is None or isinstance(seed, (int, np.integer)):
            seeds = [None if seed is None else int(seed) + row for row in rows]
        else:
            seeds = list(seed)
        if len(seeds) != self.env_num:
            raise ValueError(f"{len(seeds)} seeds for {self.env_num} envs")
        found: list[Any] = [None] * self.env_num
        own = self.envs.has_attr("seed")
        for row in rows:
            if own[row]:
                found[row] = call(self.envs, row, "seed", seeds[row])
        if rest := [row for row in rows if not own[row]]:
            self.envs.reset_each(seeds, None, env_ids=rest)
            self._ended[rest] = False
        self._space_seeds = seeds
        return found

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, action: Any, id: Ids = None) -> StepReturn:
        """Step every env, or these, and wait for them; with ``wait_num`` or ``timeout`` for some of those under way.

        Args:
            action: an action for each of ``id``, in an array, a tensor or a list. If ``is_async``, None only waits.
            id: the envs. Where ``action`` is None, all of these are waited for.

        Returns:
            Observations, rewards, terminations, truncations and infos, with an entry for each env. An info's
            ``env_id`` says which env it is of.

        Raises:
            AssertionError: after ``close``, for another number of actions, or for envs that are stepping.
            IndexError: there is no such env.
            ValueError: ``action`` is None although not ``is_async``, or an env comes twice.
            NothingPending: ``action`` is None, and no env is stepping.
            Exception: as for ``HubVectorEnv.step``. The results of the other envs are lost then; ``reset`` goes on.
        """
        self._assert_is_not_closed()
        ids = self._all_ids if id is None else self._wrap_id(id)
        if self.is_async:
            return self._step_among_others(action, id, ids)
        if action is None:
            raise ValueError("action must be not-None for non-async")
        assert len(action) == len(ids)
        actions = self._batched(action)
        if ids is self._all_ids or (len(ids) == self.env_num and np.array_equal(ids, self._all)):
            self._ended.fill(False)  # and so it stays if the step raises
            observations, *results, by_env = self.envs.step_each(actions)
            np.logical_or(results[1], results[2], out=self._ended)
            return self._returned(ids, self._stacked(observations), results, by_env)
        rows = self._rows(ids)
        self._ended[rows] = False
        with _Draining(self):
            self.envs.send(actions, rows)
            part = _Part(*self.envs.recv_each())
        return self._in_order(part, ids, rows)

    def _in_order(self, part: _Part, ids: Any, rows: list[int]) -> StepReturn:
        """The results of these envs in the order in which they were named; the hub's ascends."""
        places = np.searchsorted(part.rows, rows)
        arrays = (part.rewards, part.terminations, part.truncations)
        results = [array[places] for array in arrays]
        self._ended[part.rows] = part.terminations | part.truncations
        observations = self._stacked(self._stacked(part.observations)[places])
        return self._returned(ids, observations, results, part.infos)

    def _returned(
        self, ids: Any, observations: np.ndarray, results: Sequence[np.ndarray], by_env: dict[int, dict[str, Any]]
    ) -> StepReturn:
        found: list[dict[str, Any]] = [{"env_id": index} for index in ids]
        if by_env:
            rows = self._rows(ids)
            for place, row in enumerate(rows):
                if info := by_env.get(row):
                    self._take_failure(row, info)
                    info["env_id"] = found[place]["env_id"]
                    found[place] = info
        infos = np.empty(len(found), object)
        infos[:] = found
        rewards, terminations, truncations = results
        return observations, rewards, terminations, truncations, infos

    def _take_failure(self, row: int, info: dict[str, Any]) -> None:
        """Keep a failure out of the infos: of an object in some of them, tianshou's buffers make NaN in the others."""
        if failure := info.pop("env_failure", None):
            self.failures[row] = failure

    def _batched(self, action: Any) -> Any:
        if type(action) is np.ndarray and self._flat_actions:
            return action
        if hasattr(action, "detach"):  # a tensor
            return action.detach().cpu().numpy()
        if self._flat_actions:
            return action
        return composed_actions.batched(self.envs.single_action_space, action)

    # --- observations -------------------------------------------------------------------------------------------------

    def _stacked(self, observations: Any) -> np.ndarray:
        """Observations in an array, of objects where tianshou has objects."""
        if isinstance(observations, np.ndarray) and observations.dtype != object:
            return observations
        if isinstance(self.envs.single_observation_space, (Dict, Tuple)) and isinstance(observations, (dict, tuple)):
            observations = iterate(self.envs.observation_space, observations)
        each = list(observations)
        if isinstance(each[0], tuple):
            raise TypeError("Tuple observation space is not supported. ", "Please change it to array or dict space")
        try:
            return np.stack(each)
        except ValueError:  # of several shapes
            stacked = np.empty(len(each), object)
            stacked[:] = each
            return stacked

    # --- steps of some envs while others are under way ----------------------------------------------------------------

    def _step_among_others(self, action: Any, id: Ids, ids: Any) -> StepReturn:
        named: set[int] = set()
        if action is not None:
            self._assert_id(ids)
            assert len(action) == len(ids)
            rows = self._rows(ids)
            self._send(self._batched(action), rows)
            self.waiting_id.extend(rows)
            self.ready_id = [row for row in self.ready_id if row not in set(rows)]
        elif not self.waiting_id:
            raise NothingPending("Calling `step` without an action while no env is stepping.", "step")
        elif id is not None:
            named = set(self._rows(ids))
        with _Draining(self):
            self._receive(named)
        parts, self._held = self._held, []
        done = np.concatenate([part.rows for part in parts])
        results = [np.concatenate([part[field] for part in parts]) for field in (1, 2, 3)]
        by_env = {row: info for part in parts for row, info in part.infos.items()}
        stacked = [self._stacked(part.observations) for part in parts]
        observations = stacked[0] if len(stacked) == 1 else self._stacked([each for part in stacked for each in part])
        self._ended[done] = results[1] | results[2]
        returned = done.tolist()
        self.waiting_id = [row for row in self.waiting_id if row not in set(returned)]
        self.ready_id.extend(returned)
        return self._returned(returned, observations, results, by_env)

    def _send(self, actions: Any, rows: list[int]) -> None:
        self._sent = actions
        while True:
            try:
                self.envs.send(actions, rows)
                return
            except SessionBusy:  # over the network, a wait that timed out has to end first
                if not self._under_way():
                    raise
            with _Draining(self):
                self._hold(None)

    def _under_way(self) -> int:
        """How many envs are under way in the hub."""
        return len(self.waiting_id) - sum(len(part.rows) for part in self._held)

    def _receive(self, named: set[int]) -> None:
        """Hold the results of as many envs as a step waits for, and of all that are named."""
        deadline = None if self.timeout is None or named else Deadline(self.timeout)
        wanted = min(self.wait_num, len(self.waiting_id))
        named = named & set(self.waiting_id)
        while self._under_way():
            held = {row for part in self._held for row in part.rows.tolist()}
            if named <= held and (named or len(held) >= wanted):
                return
            try:
                self._hold(None if deadline is None else deadline.left_s(), 1 if named else wanted - len(held))
            except HubTimeout:
                if self._held:
                    return
                self._hold(None)

    def _hold(self, timeout: float | None, min_envs: int = 1) -> None:
        self._held.append(_Part(*self.envs.recv_each(min_envs, timeout)))

    def _receive_all(self) -> None:
        """Hold the results of all envs under way: nothing but steps is possible before."""
        if left := self._under_way():
            with _Draining(self):
                self._hold(None, left)

    def _some_of(self, part: _Part, mask: np.ndarray) -> _Part:
        rows = part.rows[mask]
        infos = {row: info for row, info in part.infos.items() if row in set(rows.tolist())}
        observations = self._stacked(part.observations)[mask]
        return _Part(observations, part.rewards[mask], part.terminations[mask], part.truncations[mask], infos, rows)

    # --- the rest -----------------------------------------------------------------------------------------------------

    def render(self, **kwargs: Any) -> list[Any]:
        """Every env's rendered frame; keywords are its ``render``'s.

        Raises:
            AssertionError: after ``close``.
            RuntimeError: some envs are stepping.
            Exception: as for ``HubVectorEnv.render``.
        """
        self._assert_is_not_closed()
        if self.waiting_id:
            raise RuntimeError(f"Environments {self.waiting_id} are still stepping, cannot render them now.")
        return list(self.envs.call("render", **kwargs) if kwargs else self.envs.render())

    def _assert_is_not_closed(self) -> None:
        super()._assert_is_not_closed()
        if self._interrupted:
            self._drop_under_way()
            self._interrupted = False

    def _drop_under_way(self) -> None:
        """Wait until no env is under way; results that have not reached the caller are dropped."""
        self._held, self.waiting_id, self.ready_id = [], [], list(self._all_ids)
        self._ended.fill(False)
        while True:
            try:
                self.envs.recv()
            except NothingPending:
                return
            except Exception:  # of another env, or the session is over
                if self.envs.closed:
                    return

    def close(self) -> None:
        """End the session.

        Raises:
            AssertionError: after ``close``.
        """
        super()._assert_is_not_closed()
        self.envs.close()
        self.is_closed = True


class _Draining:
    """If the block raises, nothing is under way after it; results that have not reached the caller are dropped.

    After Ctrl-C the next method does that, so that Ctrl-C does not wait for envs; only if ``is_async`` are they still
    under way, and a step without an action returns their results.
    """

    def __init__(self, owner: TianshouVectorEnv) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            return
        if issubclass(kind, Exception):
            self._owner._drop_under_way()
        else:
            self._owner._interrupted = not self._owner.is_async


# --- what a crash cut short -------------------------------------------------------------------------------------------


def _was_cut(infos: Any) -> bool:
    """Whether the last of these infos, a ``Batch`` of an episode, is that of an episode cut short."""
    invalid = infos.get(INVALID)
    return invalid is not None and bool(invalid[-1])


@dataclass(kw_only=True)
class WholeEpisodeStats(CollectStats):
    """``Collector(..., collect_stats_class=WholeEpisodeStats)`` leaves out episodes that a worker's end cut short.

    They are in none of ``returns``, ``lens`` and ``n_collected_episodes``, unless a collection has no whole episode:
    tianshou's trainers need a result of each test. For ``collect(n_episode=...)`` a cut episode is one of them.

    Attributes:
        n_cut_episodes: how many were cut.
        cut_returns, cut_lens: of those that were left out.
    """

    n_cut_episodes: int = 0
    cut_returns: np.ndarray = field(default_factory=lambda: np.array([], dtype=float))
    cut_lens: np.ndarray = field(default_factory=lambda: np.array([], dtype=int))

    def update_at_episode_done(
        self, episode_batch: Any, episode_return: float, refresh_sequence_stats: bool = False
    ) -> None:
        """Count an episode."""
        if not _was_cut(episode_batch.info):
            super().update_at_episode_done(episode_batch, episode_return, refresh_sequence_stats)
            return
        self.n_cut_episodes += 1
        self.cut_returns = np.append(self.cut_returns, episode_return)
        self.cut_lens = np.append(self.cut_lens, len(episode_batch))

    def refresh_all_sequence_stats(self) -> None:
        """Sum up at the end of a collection."""
        if self.n_cut_episodes and not self.n_collected_episodes:
            self.returns, self.lens = self.cut_returns, self.cut_lens
            self.n_collected_episodes: int = self.n_cut_episodes
        super().refresh_all_sequence_stats()


class _Watched(VectorEnvWrapper):
    """Notes of each episode that ends whether it was cut short."""

    def __init__(self, venv: Any) -> None:
        super().__init__(venv)
        self.cut: list[bool] = []

    @property
    def waiting_id(self) -> list[int]:
        waiting: list[int] = self.venv.waiting_id
        return waiting

    def step(self, action: Any, id: Ids = None) -> Any:
        result = self.venv.step(action, id)
        self.cut.extend(INVALID in info for info in result[4][result[2] | result[3]])
        return result


class AsyncCollector(TianshouAsyncCollector):
    """tianshou's ``AsyncCollector``, with ``WholeEpisodeStats``: it takes no ``collect_stats_class`` itself."""

    def __init__(self, policy: Any, env: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(policy, _Watched(env), *args, **kwargs)

    def _collect(self, *args: Any, **kwargs: Any) -> Any:
        self.env.cut.clear()
        stats = super()._collect(*args, **kwargs)
        cut = np.array(self.env.cut, bool)
        return WholeEpisodeStats(
            n_collected_episodes=int((~cut).sum()),
            n_collected_steps=stats.n_collected_steps,
            returns=stats.returns[~cut],
            lens=stats.lens[~cut],
            n_cut_episodes=int(cut.sum()),
            cut_returns=stats.returns[cut],
            cut_lens=stats.lens[cut],
        )


class ValidReplayBuffer(VectorReplayBuffer):
    """A ``VectorReplayBuffer`` that draws no step with which an episode was cut short.

    They stay in it, as the ends of their episodes, and so in what is read as a whole, by ``sample(0)``.
    """

    def sample_indices(self, batch_size: int | None) -> np.ndarray:
        """Indices of steps, drawn with replacement; of all steps for 0 or None."""
        indices: np.ndarray = super().sample_indices(batch_size)
        invalid = self.info.get(INVALID) if batch_size and batch_size > 0 and len(self) else None
        if invalid is None:
            return indices
        for _ in range(DRAWS_MAX):
            drawn_invalid = invalid[indices]
            if not drawn_invalid.any():
                break
            indices[drawn_invalid] = super().sample_indices(int(drawn_invalid.sum()))
        return indices


# --- the high-level interface -----------------------------------------------------------------------------------------


class HubEnvFactory(EnvFactory):
    """An ``EnvFactory`` for the experiment builders of ``tianshou.highlevel``: all envs live in a hub.

    Seeds are those of ``EnvFactoryRegistered``, and so are results.
    """

    def __init__(
        self,
        task: str | Callable[[], gymnasium.Env[Any, Any]],
        *,
        render_mode_training: str | None = None,
        render_mode_test: str | None = None,
        render_mode_watch: str | None = "human",
        **options: Unpack[MakeKeywords],
    ) -> None:
        """Say what is to be made.

        Args:
            task: an id, or a factory, which takes no render mode.
            render_mode_training: of the envs to train with.
            render_mode_test: of the envs to test with.
            render_mode_watch: of the env to watch; ``"human"`` opens a window where the hub is.
            **options: keywords of ``envhub.make_vec``, such as ``hub`` and ``num_workers``, and arguments for the env.
        """
        super().__init__(VectorEnvType.SUBPROC)  # which is not used: ``create_venv`` is our own
        self.task = task
        self.render_modes = {
            EnvMode.TRAINING: render_mode_training,
            EnvMode.TEST: render_mode_test,
            EnvMode.WATCH: render_mode_watch,
        }
        self.options = options

    def _options(self, mode: EnvMode) -> dict[str, Any]:
        render_mode = self.render_modes[mode]
        return {**self.options, **({"render_mode": render_mode} if render_mode and isinstance(self.task, str) else {})}

    def _create_env(self, mode: EnvMode) -> gymnasium.Env[Any, Any]:
        options = {name: value for name, value in self._options(mode).items() if name != "num_workers"}
        with by_value(self.task, "tianshou"):
            return make(self.task, **options)

    def create_env(self, mode: EnvMode, seed: int | None = None) -> gymnasium.Env[Any, Any]:
        """One env, reset with the seed if there is one; errors as for ``envhub.make``."""
        env = self._create_env(mode)
        if seed is not None:
            env.reset(seed=seed)
        return env

    def create_venv(self, num_envs: int, mode: EnvMode, seed: int | None = None) -> TianshouVectorEnv:
        """A vector env of ``num_envs`` envs, of one to watch; errors as for ``TianshouVectorEnv``."""
        num_envs = 1 if mode is EnvMode.WATCH else num_envs
        rng = self._create_rng(seed)
        for _ in range(num_envs):  # tianshou draws a seed for each factory, which the ones after them replace
            self._next_seed(rng)
        envs = TianshouVectorEnv(self.task, num_envs, **self._options(mode))
        envs.seed([self._next_seed(rng) for _ in range(num_envs)])
        return envs
