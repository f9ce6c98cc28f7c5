"""The same run of a vector env through a hub and in the program itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from same import assert_same


def with_masks(infos: dict[str, Any], num_envs: int) -> dict[str, Any]:
    """Infos with the masks that Gymnasium's own have; ALE and EnvPool leave them out where all envs have a key."""
    found = dict(infos)
    for key, value in infos.items():
        if not key.startswith("_"):
            found[key] = with_masks(value, num_envs) if isinstance(value, dict) else value
            found.setdefault(f"_{key}", np.ones(num_envs, bool))
    return found


def assert_step(found: Any, wanted: Any, num_envs: int, where: str) -> None:
    """The same results; a hub's rewards are float64."""
    observations, *results, infos = wanted
    assert_same(found[0], observations, f"{where}: observations")
    if results:
        rewards, terminations, truncations = map(np.asarray, results)
        assert_same(tuple(found[1:4]), (rewards.astype(np.float64), terminations, truncations), where)
    assert_same(found[-1], with_masks(infos, num_envs), f"{where}: infos")


def assert_same_run(envs: Any, direct: VectorEnv[Any, Any, Any], steps: int, seed: Any = 7, options: Any = None) -> int:
    """The same steps, with actions as arrays; returns how many episodes ended."""
    num_envs, ended = envs.num_envs, 0
    assert_step(envs.reset(seed=seed, options=options), direct.reset(seed=seed, options=options), num_envs, "reset")
    space = envs.action_space
    space.seed(3)
    for number in range(steps):
        actions = space.sample()
        found, wanted = envs.step(actions), direct.step(actions)
        assert_step(found, wanted, num_envs, f"step {number}")
        done = found[2] | found[3]
        ended += int(done.sum())
        if envs.autoreset_mode is AutoresetMode.DISABLED and done.any():
            again = {"reset_mask": done, "lift": 2}
            assert_step(envs.reset(options=again), direct.reset(options=again), num_envs, f"reset {number}")
    return ended
