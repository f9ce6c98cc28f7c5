"""Gymnasium's vector contract as checks that a client can make without having the env itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from multiprocessing import TimeoutError as VectorTimeoutError
from typing import Any

import numpy as np
from gymnasium import error
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from envhub.errors import EnvRaised
from envhub.protocol.messages import Made, pack_rows
from envhub.values import codec, spaces
from envhub.values.actions import pack
from envhub.values.leaf import OBJECT
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.make import make_vec

NUM_ENVS = 3
STEPS = 20
EPISODE_STEPS_MAX = 3000


class Broken(AssertionError):
    """A promise that the hub does not keep."""


class NotChecked(Exception):
    """The reason why a promise could not be put to the test."""


def require(condition: bool, why: str) -> None:
    """Raise ``Broken`` with this reason unless the condition holds."""
    if not condition:
        raise Broken(why)


def sampled(made: Made) -> tuple[bytes, list[bytes], list[int]]:
    """Codes and frames of a random step of this session, and the bytes of each observation frame of its replies."""
    action_space, space = (spaces.build(codec.decode(blob)) for blob in (made.action_space, made.observation_spaces[0]))
    batch = batch_space(action_space, made.num_envs).sample()
    packed = pack(spaces.flatten(action_space, batch), spaces.leaves(action_space), made.num_envs)
    frames = [array.tobytes() for array in packed.arrays]
    if packed.out_of_band:
        rows = enumerate(zip(*packed.out_of_band, strict=True))
        frames.append(pack_rows((row, codec.encode(list(parts))) for row, parts in rows))
    fixed = [leaf for leaf in spaces.leaves(space) if leaf != OBJECT]
    return packed.codes, frames, [made.num_envs * leaf.nbytes for leaf in fixed]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(np.array_equal(left, right, equal_nan=np.asarray(left).dtype.kind == "f"))


def _check_results(envs: HubVectorEnv) -> None:
    require(envs.action_space == batch_space(envs.single_action_space, NUM_ENVS), "action_space is not the batched one")
    require(envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP, "metadata does not hold the autoreset mode")
    observations, infos = envs.reset(seed=1)
    for _ in range(STEPS):
        require(envs.observation_space.contains(observations), "an observation is not in its space")
        _check_infos(infos)
        observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
        require(rewards.dtype == np.float64 and rewards.shape == (NUM_ENVS,), "rewards are not n float64")
        for flags in (terminations, truncations):
            require(flags.dtype == np.bool_ and flags.shape == (NUM_ENVS,), "flags are not n bool")


def _check_infos(infos: dict[str, Any]) -> None:
    for key, value in infos.items():
        if isinstance(value, dict):
            _check_infos(value)
        else:
            require(isinstance(value, np.ndarray) and len(value) == NUM_ENVS, f"info {key!r} is not an array of n")
        require(key.startswith("_") or infos[f"_{key}"].dtype == np.bool_, f"info {key!r} has no mask")


def _check_seeds(envs: HubVectorEnv) -> None:
    envs.action_space.seed(3)
    actions = [envs.action_space.sample() for _ in range(STEPS)]
    runs = [[envs.reset(seed=5)[0], *(envs.step(batch)[0] for batch in actions)] for _ in range(2)]
    require(all(map(_same, *runs)), "the same seed and actions give other observations")
    require(_same(envs.reset(seed=[5, 6, 7])[0], runs[0][0]), "a seed is not counted up by env")


def _check_copies(envs: HubVectorEnv) -> None:
    first, _ = envs.reset(seed=1)
    kept = copy.deepcopy(first)
    for _ in range(3):
        envs.step(envs.action_space.sample())
    require(_same(kept, first), "a returned observation changed later")


def _check_masks(envs: HubVectorEnv) -> None:
    envs.reset(seed=1)
    before = envs.step(envs.action_space.sample())[0]
    options = {"reset_mask": np.array([True, False, True])}
    after, _ = envs.reset(seed=9, options=options)
    require(set(options) == {"reset_mask"}, "the caller's options were changed")
    parts = (spaces.flatten(envs.single_observation_space, batch) for batch in (before, after))
    for left, right in zip(*parts, strict=True):
        require(_same(left[1], right[1]), "an env left out of the mask has another observation")
    _raises(lambda: envs.reset(options={"reset_mask": [True] * NUM_ENVS}), TypeError, "a mask that is no array")
    _raises(lambda: envs.reset(options={"reset_mask": np.zeros(NUM_ENVS, bool)}), ValueError, "a mask of nothing")
    _raises(lambda: envs.reset(seed=[1]), ValueError, "too few seeds")


def _raises(call: Callable[[], Any], kind: type[BaseException], what: str) -> None:
    try:
        call()
    except kind:
        return
    except Exception as found:
        raise Broken(f"{what} raises {type(found).__name__}, not {kind.__name__}") from found
    raise Broken(f"{what} raises nothing, not {kind.__name__}")


def _check_states(envs: HubVectorEnv) -> None:
    _raises(envs.step_wait, error.NoAsyncCallError, "step_wait without step_async")
    envs.reset(seed=1)
    envs.step_async(envs.action_space.sample())
    _raises(lambda: envs.step_async(envs.action_space.sample()), error.AlreadyPendingCallError, "a second step_async")
    try:
        envs.step_wait(timeout=0)
    except VectorTimeoutError:
        envs.step_wait()
    _raises(lambda: envs.get_attr("no_such_attribute"), AttributeError, "an attribute that is not there")
    _raises(lambda: envs.call("reset"), ValueError, "a call of `reset`")
    envs.step(envs.action_space.sample())
    envs.close()
    envs.close()
    _raises(envs.reset, error.ClosedEnvironmentError, "a reset after close")


def _check_next_step(envs: HubVectorEnv) -> None:
    done, _ = _until_done(envs)
    observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())
    quiet = rewards[done].any() or terminations[done].any() or truncations[done].any()
    require(not quiet, "the step after an episode's end has a reward or a flag")
    require("final_obs" not in infos, "next-step mode gives final_obs")
    require(envs.observation_space.contains(observations), "the observation after an episode's end is not in its space")


def _check_same_step(envs: HubVectorEnv) -> None:
    done, infos = _until_done(envs)
    require(bool((infos["_final_obs"] == done).all()), "_final_obs does not say whose episode ended")
    require("_final_info" in infos, "there is no final_info")
    for final, ended in zip(infos["final_obs"], done, strict=True):
        fits = envs.single_observation_space.contains(final) if ended else final is None
        require(fits, "final_obs does not hold the last observation of each env whose episode ended, and of no other")


def _until_done(envs: HubVectorEnv) -> tuple[np.ndarray, dict[str, Any]]:
    """Step to the first end of an episode; returns whose it was, and the infos of that step."""
    envs.reset(seed=1)
    for _ in range(EPISODE_STEPS_MAX):
        _, _, terminations, truncations, infos = envs.step(envs.action_space.sample())
        if (done := terminations | truncations).any():
            return done, infos
    raise NotChecked(f"no episode ended within {EPISODE_STEPS_MAX} steps")


def run(check: Callable[[HubVectorEnv], None], address: str, env: str) -> None:
    """Make a check on envs of this hub."""
    mode = AutoresetMode.SAME_STEP if check is _check_same_step else AutoresetMode.NEXT_STEP
    try:
        with contextlib.closing(make_vec(env, NUM_ENVS, hub=address, autoreset_mode=mode)) as envs:
            envs.action_space.seed(1)
            check(envs)
    except ValueError as error:
        # A vector env need not heed masks, of which other autoreset modes than its own are made.
        if (
            check in (_check_masks, _check_same_step)
            and isinstance(error.__cause__, EnvRaised)
            and _is_vector(address, env)
        ):
            raise NotChecked(str(error)) from error
        raise


def _is_vector(address: str, env: str) -> bool:
    with contextlib.closing(make_vec(env, NUM_ENVS, hub=address)) as envs:
        return envs.vector


CHECKS: dict[str, Callable[[HubVectorEnv], None]] = {
    "results have the dtypes and shapes of the spaces": _check_results,
    "the same seeds and actions give the same observations": _check_seeds,
    "a returned observation stays as it is": _check_copies,
    "resets can be masked": _check_masks,
    "calls out of order are refused, and a timed-out wait can be repeated": _check_states,
    "next-step autoreset": _check_next_step,
    "same-step autoreset": _check_same_step,
}
