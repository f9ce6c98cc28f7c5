"""A wrapper whose steps execute several actions, for a policy that plans them and a hub that is far away."""

from __future__ import annotations

from typing import Any

import numpy as np

from envhub.values.gym_api import api

K_MAX = 1024
_LEAVES = ("Box", "Discrete", "MultiDiscrete", "MultiBinary")
_Recorded: Any = getattr(api.utils, "RecordConstructorArgs", object)  # so that the env's spec has it; gym has none


class ActionChunk(api.Wrapper, _Recorded):  # type: ignore[misc]
    """A step executes ``k`` actions, one after another, until one of them ends the episode.

    Its action has an axis of ``k`` in front of each array. It returns the last observation, the sum of the rewards, and
    the info of the last action. To this it adds ``chunk_rewards``, an array of each reward, with zeros for the actions
    that were not executed, and ``chunk_steps``, the number of those that were. Rewards with axes are added by axis.

    Raises:
        ValueError: ``k`` is no number from 1 to 1024.
        TypeError: the env's action space has parts of no fixed size.
    """

    def __init__(self, env: Any, k: int) -> None:
        if type(k) is not int or not 1 <= k <= K_MAX:
            raise ValueError(f"k of ActionChunk must be a number of actions from 1 to {K_MAX}, got {k!r}")
        if others := sorted(_without_array(env.action_space)):
            raise TypeError(
                f"ActionChunk repeats actions of {', '.join(_LEAVES)}, also in Dict and Tuple; those of this env are "
                f"of {', '.join(others)}"
            )
        if _Recorded is not object:
            _Recorded.__init__(self, k=k)
        super().__init__(env)
        self.k = k
        self.action_space = api.vector.utils.batch_space(env.action_space, k)

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Execute the actions, as the class says."""
        rewards: Any = np.zeros(self.k)
        total: Any = 0.0
        for number in range(self.k):
            # Of gym before 0.26 a step has one flag, later two.
            observation, reward, *ends, info = self.env.step(_nth(actions, number))
            if not number and np.ndim(reward):  # of an env with several objectives
                rewards = np.zeros((self.k, *np.shape(reward)))
            rewards[number] = reward
            total = total + rewards[number]
            if any(ends):
                break
        info = {**info, "chunk_rewards": rewards, "chunk_steps": number + 1}
        return (observation, total if np.ndim(total) else float(total), *ends, info)


def _without_array(space: Any) -> set[str]:
    """The classes of the parts of an action space whose values are no arrays of a fixed shape."""
    if isinstance(space, api.spaces.Dict):
        return {name for each in space.spaces.values() for name in _without_array(each)}
    if isinstance(space, api.spaces.Tuple):
        return {name for each in space.spaces for name in _without_array(each)}
    fits = isinstance(space, tuple(getattr(api.spaces, name) for name in _LEAVES))
    return set() if fits else {type(space).__name__}


def _nth(actions: Any, number: int) -> Any:
    if isinstance(actions, dict):
        return {key: _nth(each, number) for key, each in actions.items()}
    if isinstance(actions, tuple):
        return tuple(_nth(each, number) for each in actions)
    return actions[number]
