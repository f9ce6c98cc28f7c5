"""A vector env for tianshou's collectors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from tianshou.env import BaseVectorEnv
from typing_extensions import Unpack

from envhub.env_failure import EnvFailure
from envhub.values.spaces import Anything, SpacesDiffer
from envhub.vector_errors import NothingPending
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.frameworks import composed_actions
from envhub_client.frameworks.attributes import attributes, call
from envhub_client.frameworks.by_value import by_value
from envhub_client.frameworks.decided_options import refuse_decided
from envhub_client.frameworks.tianshou_steps import Ids, Part, PartialSteps, stacked
from envhub_client.make import EnvLike, make_vec
from envhub_client.option_keywords import MakeKeywords

StepReturn = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


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
            TypeError: for ``autoreset_mode`` and ``info_mode``, which tianshou decides.
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
        refuse_decided(options, "tianshou", "autoreset_mode", "info_mode")
        with by_value(env_fns, "tianshou"):
            self.envs: HubVectorEnv = _made(
                env_fns, count, autoreset_mode=AutoresetMode.NEXT_STEP, info_mode="by_env", **options
            )
        self.is_closed = False
        self.env_num = count
        self.wait_num = wait_num or count
        self.timeout = timeout
        self.failures: dict[int, EnvFailure] = {}
        self._all = np.arange(count)
        self._all_ids = list(range(count))
        self._has_parts = not isinstance(self.envs.single_action_space, Anything)
        self._flat_actions = not composed_actions.is_composed(self.envs.single_action_space)
        self._space_seeds: list[int | None] = [None] * count
        self._steps = PartialSteps(self.envs, self.wait_num, timeout, self.is_async)

    @property
    def waiting_id(self) -> list[int]:
        """The envs that are stepping, or whose results have not been returned."""
        return self._steps.waiting

    @property
    def ready_id(self) -> list[int]:
        """The others."""
        return self._steps.ready

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
        has_key = self.envs.has_attr(key, unique)
        values = dict.fromkeys(unique)
        if asked := [row for row, has in zip(unique, has_key, strict=True) if has]:
            values.update(zip(asked, attributes(self.envs, key, asked), strict=True))
        if key == "action_space":
            for row, space in values.items():
                if space is not None and self._space_seeds[row] is not None:
                    space.seed(self._space_seeds[row])
        return [values[row] for row in rows]

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
            self._steps.receive_all()
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
        by_step = seed is None and options is None and self._has_parts and self._steps.ended[rows].all()
        if by_step and (self._steps.under_way or self.envs.lane == "shared"):
            observations, by_env = self._steps.reset(rows)
        else:
            self._steps.receive_all()
            seeds = None if seed is None else [seed] * self.env_num
            unique = sorted(set(rows))
            observations, by_env = self.envs.reset(seed=seeds, options=options, env_ids=unique)
            batch = stacked(self.envs, observations)
            observations = batch if rows == self._all_ids else stacked(self.envs, batch[rows])
        self._steps.ended[rows] = False
        for row, info in by_env.items():
            self._take_failure(row, info)
        infos = np.empty(len(rows), object)
        infos[:] = [by_env.get(row, {}) for row in rows]
        return observations, infos

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
        results: list[Any] = [None] * self.env_num
        own = self.envs.has_attr("seed")
        for row in rows:
            if own[row]:
                results[row] = call(self.envs, row, "seed", seeds[row])
        if rest := [row for row in rows if not own[row]]:
            self.envs.reset(seed=seeds, env_ids=rest)
            self._steps.ended[rest] = False
        self._space_seeds = seeds
        return results

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
            ended = self._steps.ended
            ended.fill(False)  # and so it stays if the step raises
            observations, *results, by_env = self.envs.step(actions)
            np.logical_or(results[1], results[2], out=ended)
            return self._returned(ids, stacked(self.envs, observations), results, by_env)
        rows = self._rows(ids)
        return self._in_order(self._steps.step(actions, rows), ids, rows)

    def _in_order(self, part: Part, ids: Any, rows: list[int]) -> StepReturn:
        """The results of these envs in the order in which they were named; the hub's ascends."""
        places = np.searchsorted(part.rows, rows)
        arrays = (part.rewards, part.terminations, part.truncations)
        results = [array[places] for array in arrays]
        observations = stacked(self.envs, stacked(self.envs, part.observations)[places])
        return self._returned(ids, observations, results, part.infos)

    def _returned(
        self, ids: Any, observations: np.ndarray, results: Sequence[np.ndarray], by_env: dict[int, dict[str, Any]]
    ) -> StepReturn:
        each: list[dict[str, Any]] = [{"env_id": index} for index in ids]
        if by_env:
            rows = self._rows(ids)
            for place, row in enumerate(rows):
                if info := by_env.get(row):
                    self._take_failure(row, info)
                    info["env_id"] = each[place]["env_id"]
                    each[place] = info
        infos = np.empty(len(each), object)
        infos[:] = each
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

    def _step_among_others(self, action: Any, id: Ids, ids: Any) -> StepReturn:
        named: set[int] = set()
        if action is not None:
            self._assert_id(ids)
            assert len(action) == len(ids)
            self._steps.begin(self._batched(action), self._rows(ids))
        elif not self.waiting_id:
            raise NothingPending("Calling `step` without an action while no env is stepping.", "step")
        elif id is not None:
            named = set(self._rows(ids))
        part = self._steps.receive(named)
        results = part.rewards, part.terminations, part.truncations
        return self._returned(part.rows.tolist(), part.observations, results, part.infos)

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
        self._steps.settle()

    def close(self) -> None:
        """End the session.

        Raises:
            AssertionError: after ``close``.
        """
        super()._assert_is_not_closed()
        self.envs.close()
        self.is_closed = True
