"""``make_env``: an env of TorchRL whose envs live in a hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Dict, Space, Tuple
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Unbounded
from torchrl.envs import GymWrapper
from typing_extensions import Unpack

from envhub.env_failure import EnvFailure
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.frameworks.adapter import INVALID, refuse_decided
from envhub_client.make import EnvLike, make_vec
from envhub_client.option_keywords import MakeKeywords


def make_env(
    env: EnvLike,
    num_envs: int = 1,
    *,
    categorical_action_encoding: bool = False,
    device: torch.device | str | None = None,
    **options: Unpack[MakeKeywords],
) -> HubTorchEnv:
    """A TorchRL env of batch size ``[num_envs]``, of envs in a hub.

    Args:
        env: anything that ``envhub.make_vec`` takes.
        num_envs: how many; not needed with a list of factories.
        categorical_action_encoding: whether discrete actions are numbers, and not one-hot; as for ``GymWrapper``.
        device: where the data is; by default that of the CPU, not named in the data.
        **options: keywords of ``envhub.make_vec``, such as ``hub``, ``num_workers`` and the fault options.

    Raises:
        TypeError: for ``autoreset_mode``, ``copy`` and ``info_mode``, which TorchRL decides.
        Exception: as for ``envhub.make_vec``; and what TorchRL raises for spaces that it has no spec for.
    """
    refuse_decided(options, "TorchRL", "autoreset_mode", "copy", "info_mode")
    # The envs reset themselves within a step, which spares a second exchange with the hub.
    chosen: dict[str, Any] = {**options, "copy": True}
    envs = make_vec(env, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **chosen)
    try:
        return HubTorchEnv(envs, categorical_action_encoding=categorical_action_encoding, device=device)
    except BaseException:
        envs.close(terminate=True)
        raise


@dataclass
class _Shown:
    """Last observations of the envs, and the other results of the last step."""

    fresh: np.ndarray  # the envs that it has reset
    observations: Any = None  # of these the ones of their resets
    reset_infos: dict[int, dict[str, Any]] = field(default_factory=dict)
    cut: bool = False  # whether it cut an episode short


class HubTorchEnv(GymWrapper):
    """A ``GymWrapper`` of a vector env in a hub; ``make_env`` makes one.

    Specs are those of ``GymWrapper``, and one more observation: ``"invalid_transition"``, bool, of the shape of
    ``"done"``. At ``"next"`` it is true of a step that the end of a worker cut short: reward 0, the last observation
    once more, truncated, and no part of a replay buffer. The env is reset as after any episode.

    Rewards have the axes of the env's ``reward_space``, if it has one: their spec has the shape ``(num_envs, *axes)``.

    ``reset(snapshot=...)`` restores the envs that it is for, with ``source`` and ``reseed`` as ``HubVectorEnv.restore``
    has them, and so does ``reset`` of a ``Collector``; ``snapshot`` takes one.

    Any envs can be reset at any time, as with ``AutoresetMode.DISABLED``, and with the same results. A step raises
    ``gymnasium.error.ResetNeeded`` where an episode has ended and the env was not reset.

    Attributes:
        failures: why the last cut episode of an env was cut short, by env.
    """

    # To TorchRL a batched env is one whose resets come with its steps. Here ``_reset`` brings them.
    _is_batched = False

    def __init__(self, env: HubVectorEnv, **options: Any) -> None:
        if env.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise ValueError(f"a HubTorchEnv is of envs in the mode SAME_STEP, and these are in {env.autoreset_mode}")
        env.info_mode = "by_env"
        super().__init__(env=env, **options)
        self.failures: dict[int, EnvFailure] = {}
        self._seen = _Shown(np.zeros(env.num_envs, bool))

    def _make_specs(self, env: HubVectorEnv, batch_size: Any = None) -> None:
        super()._make_specs(env, batch_size)
        # ``GymWrapper`` takes the last axis of the rewards of a single env for its batch.
        self.reward_spec = Unbounded(shape=(env.num_envs, *(env.reward_shape or (1,))), device=self.device)
        self.observation_spec[INVALID] = Binary(shape=(env.num_envs, 1), dtype=torch.bool, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        seen = self._seen
        if seen.fresh.any():  # such as by a transform that repeats steps
            ended = np.flatnonzero(seen.fresh).tolist()
            raise ResetNeeded(f"the episodes of envs {ended} have ended: reset them before the next step")
        seen.fresh, seen.cut, seen.reset_infos = np.zeros_like(seen.fresh), False, {}
        observations, rewards, terminations, truncations, infos = self._env.step(self._actions(tensordict))
        seen.observations = observations
        dones = terminations | truncations
        invalid = np.zeros_like(dones)
        if dones.any():
            rows = np.flatnonzero(dones).tolist()
            ends = [infos[row].pop("final_obs") for row in rows]
            for row in rows:
                self._end(row, infos, invalid)
            seen.fresh, seen.cut = dones & ~invalid, bool(invalid.any())
            observations = _replaced(self._env.single_observation_space, observations, rows, ends)
        others = {
            "reward": self._rewards(rewards),
            "done": _column(dones),
            "terminated": _column(terminations),
            "truncated": _column(truncations),
            INVALID: _column(invalid),
        }
        return self._tensors(observations, infos, others)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step and reset as ``EnvBase.step_and_maybe_reset``, and faster: the envs' own resets are there already."""
        keys = tensordict.keys()
        if self.device is not None or tensordict.device is not None or "next" in keys or "_step" in keys:
            slowly: tuple[TensorDictBase, TensorDictBase] = super().step_and_maybe_reset(tensordict)
            return slowly
        tensordict.set("next", self._step(tensordict))
        root, seen = self.step_mdp(tensordict), self._seen
        if seen.cut or self.info_dict_reader:
            root = self.maybe_reset(root)
        elif seen.fresh.any():
            going_on = torch.zeros(len(seen.fresh), 1, dtype=torch.bool)
            flags = {key: going_on.clone() for key in ("done", "terminated", "truncated")}
            root.update({**self.read_obs(seen.observations), **flags})
            seen.fresh = np.zeros_like(seen.fresh)
        return tensordict, root

    def _rewards(self, rewards: np.ndarray) -> torch.Tensor:
        shape = tuple(self.reward_spec.shape)
        if rewards.shape not in (shape, shape[:1]):
            raise ValueError(
                f"rewards of shape {rewards.shape} where the reward_spec has {shape}: give the env a reward_space of "
                f"shape {rewards.shape[1:]}"
            )
        return torch.from_numpy(rewards.astype(np.float32)).reshape(shape)

    def _actions(self, tensordict: TensorDictBase) -> Any:
        # Not as ``GymWrapper`` does, which takes the action of one env out of its batch.
        return super(GymWrapper, self).read_action(tensordict[self.action_key])

    def _end(self, row: int, infos: dict[int, dict[str, Any]], invalid: np.ndarray) -> None:
        info = infos[row]
        final = info.pop("final_info")
        if INVALID in info or "env_failure" in info:
            invalid[row] = True
            if failure := info.get("env_failure"):
                self.failures[row] = failure
        else:
            self._seen.reset_infos[row], infos[row] = info, final

    def _tensors(self, observations: Any, infos: dict[int, dict[str, Any]], others: dict[str, Any]) -> TensorDict:
        tensors = TensorDict({**self.read_obs(observations), **others}, self.batch_size)
        if self.device is not None:
            tensors = tensors.to(self.device)
        if self.info_dict_reader:
            batched: dict[str, Any] = {}
            for row, info in infos.items():
                batched = self._env._add_info(batched, info, row)
            for reader in self.info_dict_reader:
                tensors = reader(batched, tensors)
        return tensors

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        wanted = None if tensordict is None else tensordict.get("_reset", None)
        mask = np.ones(self._env.num_envs, bool) if wanted is None else wanted.reshape(-1).cpu().numpy()
        # What a step has reset is not reset once more, so that a seed means the same as without autoreset.
        seen = self._seen
        to_reset = mask if kwargs else mask & ~seen.fresh
        infos = {row: info for row, info in seen.reset_infos.items() if mask[row]}
        if to_reset.any():
            begin = self._env.restore if "snapshot" in kwargs else self._env.reset
            seen.observations, reset_infos = begin(**kwargs, env_ids=np.flatnonzero(to_reset))
            infos |= reset_infos
        seen.fresh = seen.fresh & ~mask
        return self._tensors(seen.observations, infos, {INVALID: torch.zeros(len(mask), 1, dtype=torch.bool)})


def _column(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).unsqueeze(-1)


def _replaced(space: Space[Any], batch: Any, rows: list[int], values: Sequence[Any]) -> Any:
    """A copy of batched observations of ``space`` with those of some rows in their places."""
    if isinstance(space, Dict):
        return {key: _replaced(part, batch[key], rows, [value[key] for value in values]) for key, part in space.items()}
    if isinstance(space, Tuple):
        parts = enumerate(space.spaces)
        return tuple(_replaced(part, batch[at], rows, [value[at] for value in values]) for at, part in parts)
    if isinstance(batch, np.ndarray):
        batch = batch.copy()
        batch[rows] = values
        return batch
    given = dict(zip(rows, values, strict=True))  # of texts, and whatever else has no array
    return tuple(given.get(row, value) for row, value in enumerate(batch))
