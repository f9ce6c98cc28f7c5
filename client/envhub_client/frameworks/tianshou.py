"""A vector env for tianshou's collectors, and a buffer without the steps that are none of the envs' own."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Dict, Tuple
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate
from tianshou.data import VectorReplayBuffer
from tianshou.env import BaseVectorEnv
from typing_extensions import Unpack

from envhub.env_failure import EnvFailure
from envhub.errors import env_of
from envhub.values.spaces import SpacesDiffer
from envhub.vector_errors import NothingPending
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.frameworks.adapter import INVALID, attributes, batched, call, is_composed, pickle_all, refuse_decided
from envhub_client.make import EnvLike, make_vec
from envhub_client.option_keywords import MakeKeywords

Ids = int | Sequence[int] | np.ndarray | None
StepReturn = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
DRAWS_MAX = 100


def _attribute(name: str) -> property:
    return property(lambda envs: envs.get_env_attr(name))


class TianshouVectorEnv(BaseVectorEnv):
    """``envhub.tianshou.HubVectorEnv``: a vector env for tianshou's ``Collector``.

    Results are those of ``SubprocVectorEnv``. Rewards are float64 even where envs return integers, which tianshou's
    buffers turn into floats; observations have the dtype of their space. All arrays are the caller's own.

    Envs may differ in their spaces. Envs that differ in shapes or keys are made twice, unless the option
    ``observation_mode="any"`` is given. It also takes observations that do not fit their space, such as of another
    dtype. Where actions differ in shape, all envs have to be stepped together.

    An episode that the end of a worker cut short ends with ``truncated``, its last observation once more, reward 0,
    and ``invalid_transition`` in the info of that step. So the buffer's ``info.invalid_transition`` marks such steps;
    ``failures`` says why. (The ``envhub.EnvFailure`` itself is in no info: where other infos have none, tianshou takes
    the gap for NaN.) The next ``reset`` of the env finds it working. ``ValidReplayBuffer`` draws no such step.

    An env is reset in the step that ends its episode, and the next ``reset`` returns its results. So an env
    that is stepped after its episode's end, without a ``reset``, is in its next episode.

    Attributes:
        envs: the ``envhub.HubVectorEnv`` behind it.
        failures: the last failure of each env that had one, by its number.
        metadata, reward_range, spec, observation_space, action_space: of each env, the spaces as copies; None where it
            has none.
        env_num, wait_num, timeout, is_async, waiting_id, ready_id, is_closed: as in ``BaseVectorEnv``.
    """

    # ``BaseVectorEnv``'s own looks each name up in a list first; the names of that list are properties here.
    __getattribute__ = object.__getattribute__
    metadata, reward_range, spec = map(_attribute, ("metadata", "reward_range", "spec"))
    observation_space, action_space = map(_attribute, ("observation_space", "action_space"))

    def __init__(  # BaseVectorEnv's would start a worker for each env
        self, env_fns: EnvLike, num_envs: int | None = None, **options: Unpack[MakeKeywords]
    ) -> None:
        """Make the envs.

        Args:
            env_fns: a list of factories, as tianshou takes, or anything else that ``envhub.make_vec`` takes.
            num_envs: how many; not needed with a list.
            **options: keywords of ``envhub.make_vec``, such as ``hub``, ``num_workers`` and the fault options.

        Raises:
            TypeError: for ``autoreset_mode`` and ``info_mode``, which tianshou decides; for ``wait_num`` and
                ``timeout`` of tianshou's own vector envs.
            ValueError: a list of factories of another length than ``num_envs``.
            Exception: as for ``envhub.make_vec``.
        """
        for name in ("wait_num", "timeout"):
            if name in options:
                raise TypeError(
                    f"{name} is not taken: a step waits for all of its envs. In a loop of your own, send and recv of "
                    "envhub.make_vec step some envs while others are under way"
                )
        refuse_decided(options, "tianshou", "autoreset_mode", "info_mode")
        count = num_envs or 1
        if isinstance(env_fns, Iterable) and not isinstance(env_fns, str):
            env_fns = list(env_fns)
            count = len(env_fns)
            if num_envs not in (None, count):
                raise ValueError(f"num_envs={num_envs} and {count} factories")
        self.is_closed = True
        with pickle_all(env_fns, "tianshou"):
            self.envs = _made(env_fns, count, options)
        self.is_closed = False
        self.env_num = self.wait_num = count
        self.timeout, self.is_async = None, False
        self.waiting_id: list[int] = []
        self.ready_id = list(range(count))
        self.failures: dict[int, EnvFailure] = {}
        self._flat_actions = not is_composed(self.envs.single_action_space)
        self._space_seeds: list[int | None] = [None] * count
        # Results of the resets of envs whose episodes have ended since: observations and infos, by env.
        self._reset_results: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._under_way = False  # whether an error or Ctrl-C may have left a step of some envs

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """The attribute of each env, None where it has none; of a method a function that calls it in the hub."""
        rows = self._rows(id)
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
        if rows := sorted(set(self._rows(id))):
            self.envs.set_attr(key, [value] * len(rows), rows)

    def _rows(self, id: Ids) -> list[int]:
        """The rows of these envs, none of which is under way any more."""
        self._assert_is_not_closed()
        self._settle()
        return self.ready_id if id is None else [range(self.env_num)[index] for index in self._wrap_id(id)]

    def reset(
        self, env_id: Ids = None, *, seed: int | None = None, options: dict[str, Any] | None = None, **restore: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Reset every env, or these, each with this seed and these options; one that comes twice is reset once.

        With ``snapshot``, and the other arguments of ``HubVectorEnv.restore``, they are restored.
        """
        rows = self._rows(env_id)
        if not rows:
            raise ValueError("reset needs the number of an env")
        if seed is not None or options is not None or restore:
            self._forget(rows)
        if to_reset := sorted({row for row in rows if row not in self._reset_results}):
            seeds = None if seed is None else [seed] * self.env_num
            begin = self.envs.restore if restore else functools.partial(self.envs.reset, seed=seeds, options=options)
            observations, by_env = begin(**restore, env_ids=to_reset)
            batch = _stacked(self.envs, observations)
            for row in to_reset:
                self._take_failure(row, info := by_env.get(row, {}))
                self._reset_results[row] = batch[row], info
        results = [self._reset_results[row] for row in rows]
        self._forget(rows)
        infos = np.empty(len(rows), object)
        infos[:] = [info for _, info in results]
        return _stacked(self.envs, [observation for observation, _ in results]), infos

    def _forget(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._reset_results.pop(row, None)

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[Any]:
        """Seed every env, and what is returned as its action space; ``i`` is ``[i, i + 1, ...]``."""
        rows = self._rows(None)
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
            self._forget(rest)
        self._space_seeds = seeds
        return results

    def step(self, action: Any, id: Ids = None) -> StepReturn:
        """Step every env, or these, and wait. Where one raises, the others' results are lost; ``reset`` goes on."""
        if action is None:
            raise ValueError("action must be not-None for non-async")
        rows = self._rows(id)
        assert len(action) == len(rows)
        actions = self._batched(action)
        self._forget(rows)
        if rows == self.ready_id:
            observations, *flags, by_env = self.envs.step(actions)
            observations = _stacked(self.envs, observations)
        else:
            self._under_way = True
            self.envs.send(actions, rows)
            observations, *flags, by_env, ascending = self.envs.recv()
            self._under_way = False
            places = np.searchsorted(ascending, rows)  # in the order in which they were named
            flags = [each[places] for each in flags]
            observations = _stacked(self.envs, _stacked(self.envs, observations)[places])
        for row, info in by_env.items():
            self._take_failure(row, info)
        infos = np.empty(len(rows), object)
        infos[:] = [by_env.get(row, {}) for row in rows]
        rewards, terminations, truncations = flags
        if (ended := np.flatnonzero(terminations | truncations)).size:
            each = list(observations)
            for index in ended.tolist():
                row, info = rows[index], infos[index]
                last, final = info.pop("final_obs"), info.pop("final_info")
                if INVALID not in info:  # else the next reset makes sure that the env is there again
                    self._reset_results[row], infos[index] = (each[index], info), final
                each[index] = last
            observations = _stacked(self.envs, each)
        for index, info in zip(rows if id is None else self._wrap_id(id), infos, strict=True):
            info["env_id"] = index
        return observations, rewards, terminations, truncations, infos

    def _take_failure(self, row: int, info: dict[str, Any]) -> None:
        """Keep a failure out of the infos: of an object in some of them, tianshou's buffers make NaN in the others."""
        if failure := info.pop("env_failure", None):
            self.failures[row] = failure

    def _batched(self, action: Any) -> Any:
        if hasattr(action, "detach"):  # a tensor
            return action.detach().cpu().numpy()
        return action if self._flat_actions else batched(self.envs.single_action_space, action)

    def _settle(self) -> None:
        """Drop what a step of some envs has left under way that an error or Ctrl-C ended."""
        while self._under_way:
            try:
                self.envs.recv()
            except NothingPending:
                self._under_way = False
            except Exception as error:  # of one env, else no env returns any more
                self._under_way = env_of(error) is not None

    def render(self, **kwargs: Any) -> list[Any]:
        self._rows(None)
        return list(self.envs.call("render", **kwargs) if kwargs else self.envs.render())

    def close(self) -> None:
        self._assert_is_not_closed()
        self.envs.close()
        self.is_closed = True


def _made(env_fns: EnvLike, num_envs: int, options: Mapping[str, Any]) -> HubVectorEnv:
    """These envs; made again where they show that their spaces have not one structure, for which batches need it."""
    # Results of resets are returned later, so it is no view.
    decided = {**options, "autoreset_mode": AutoresetMode.SAME_STEP, "info_mode": "by_env", "copy": True}
    try:
        return make_vec(env_fns, num_envs, **{"observation_mode": "first", **decided})
    except SpacesDiffer:
        if "observation_mode" in options:
            raise
        return make_vec(env_fns, num_envs, observation_mode="any", **decided)


def _stacked(envs: HubVectorEnv, observations: Any) -> np.ndarray:
    """Observations in an array, of objects where tianshou has objects."""
    if isinstance(observations, np.ndarray) and observations.dtype != object:
        return observations
    if isinstance(envs.single_observation_space, (Dict, Tuple)) and isinstance(observations, (dict, tuple)):
        observations = iterate(envs.observation_space, observations)
    each = list(observations)
    if isinstance(each[0], tuple):
        raise TypeError("Tuple observation space is not supported. ", "Please change it to array or dict space")
    try:
        return np.stack(each)
    except ValueError:  # of several shapes
        array = np.empty(len(each), object)
        array[:] = each
        return array


class ValidReplayBuffer(VectorReplayBuffer):
    """A ``VectorReplayBuffer`` that draws no step with which an episode was cut short.

    They stay in it, as the ends of their episodes, and so in what is read as a whole, by ``sample(0)``.
    """

    def sample_indices(self, batch_size: int | None) -> np.ndarray:
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
