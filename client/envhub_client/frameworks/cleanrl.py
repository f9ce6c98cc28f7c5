"""CleanRL: infos in the layout of Gymnasium 0.28 and 0.29, which its scripts read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorWrapper

from envhub_client.envs.vector_env import HubVectorEnv, Options, StepReturn


def legacy_infos(envs: HubVectorEnv) -> LegacyInfos:
    """Give the infos of ``envs`` the layout of Gymnasium 0.28 and 0.29.

    Args:
        envs: made with ``autoreset_mode="SameStep"``, the one way of those versions. Owned by what is returned.

    Raises:
        ValueError: they have another autoreset mode.
        TypeError: ``envs`` is no ``HubVectorEnv``; other wrappers go around what is returned.
    """
    return LegacyInfos(envs)


class LegacyInfos(VectorWrapper[Any, Any, Any, Any, Any]):
    """A vector env whose infos have the layout of Gymnasium 0.28 and 0.29, see ``VectorEnv._add_info`` there.

    A number of an env stands in an array of its type, which has 0 for envs without it. Everything else stands in an
    object array, which has None: so ``final_info`` has the last info of each env whose episode ended, as that env
    gave it, and ``final_observation`` its last observation. Each key has a mask, such as ``_final_info``.

    An episode that a crash cut short has a ``final_observation``, but no ``episode`` in its ``final_info``, thus
    scripts leave it out of their statistics. ``env_failure`` and ``invalid_transition`` tell of it.

    Methods of ``HubVectorEnv`` that ``VectorWrapper`` does not have, such as ``call``, are those of the wrapped one.
    """

    env: HubVectorEnv

    def __init__(self, envs: HubVectorEnv) -> None:
        if not isinstance(envs, HubVectorEnv):
            raise TypeError(
                f"legacy_infos takes a HubVectorEnv, got a {type(envs).__name__}; wrap what it returns instead"
            )
        if envs.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise ValueError('infos of Gymnasium 0.29 need make_vec(..., autoreset_mode="SameStep")')
        envs.info_mode = "by_env"
        super().__init__(envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> tuple[Any, dict[str, Any]]:
        # Named, because Gymnasium 0.29 has no masks: a ``reset_mask`` is the envs' own.
        env_ids = None if isinstance(options, (list, tuple)) else range(self.num_envs)
        observations, infos = self.env.reset(seed=seed, options=options, env_ids=env_ids)
        return observations, self._batched(infos)

    def restore(self, *args: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
        observations, infos = self.env.restore(*args, **options)
        return observations, self._batched(infos)

    def step(self, actions: Any) -> StepReturn:
        *results, infos = self.env.step(actions)
        return (*results, self._batched(infos))

    def _batched(self, infos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for row, info in infos.items():
            for name, value in info.items():
                key = "final_observation" if name == "final_obs" else name
                if key not in batch:
                    batch[key] = self._empty(type(value))
                    batch[f"_{key}"] = np.zeros(self.num_envs, bool)
                batch[key][row] = value
                batch[f"_{key}"][row] = True
        return batch

    def _empty(self, kind: type) -> np.ndarray:
        if kind in (int, float, bool) or issubclass(kind, np.number):
            return np.zeros(self.num_envs, kind)
        return np.full(self.num_envs, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.env, name)
