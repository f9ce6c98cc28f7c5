"""Plan with an env in a hub by the methods that planners know from other libraries.

    python client/examples/planner.py                     # a private hub starts and ends with the program
    python client/examples/planner.py --hub ipc://PATH    # a hub that `envhub serve CartPole-v1 FrozenLake-v1` runs

``CloneState`` has ALE's ``cloneState`` and ``restoreState``, ``GetState`` the ``get_state`` and ``set_state`` of
RLlib's AlphaZero and of dm_control's physics. A state is a snapshot here, so a planner that keeps states keeps them on,
and one that drops them frees their processes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections import deque
from typing import Any

import gymnasium
import numpy as np

import envhub


class CloneState(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env with ALE's methods."""

    def cloneState(self) -> envhub.Snapshot:
        return self.env.snapshot()

    def restoreState(self, state: envhub.Snapshot) -> None:
        self.env.restore(state)


class GetState(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env with the methods of RLlib's AlphaZero and of dm_control."""

    def get_state(self) -> envhub.Snapshot:
        return self.env.snapshot()

    def set_state(self, state: envhub.Snapshot) -> Any:
        return self.env.restore(state)[0]


def balance(env: Any, steps: int, tries: int = 4, length: int = 12) -> int:
    """Steps for which a planner keeps the pole up that tries random actions before each step."""
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    for step in range(steps):
        state, lasted = env.cloneState(), np.zeros(2)
        for _ in range(tries):
            for first in (0, 1):
                ends = (env.step(action)[2] for action in (first, *rng.integers(2, size=length - 1)))
                lasted[first] += sum(itertools.takewhile(bool, (not ended for ended in ends)))
                env.restoreState(state)
        if env.step(int(lasted.argmax()))[2]:
            return step
    return steps


def path_to_goal(env: Any) -> list[int]:
    """The fewest actions that lead to a reward, by search in breadth from the start."""
    place, _ = env.reset(seed=0)
    waiting, seen = deque([(env.get_state(), [])]), {place}
    while waiting:
        state, path = waiting.popleft()
        for action in range(env.action_space.n):
            env.set_state(state)
            place, reward, ended, *_ = env.step(action)
            if reward:
                return [*path, action]
            if not ended and place not in seen:
                seen.add(place)
                waiting.append((env.get_state(), [*path, action]))
    return []


def main() -> None:
    """Plan in two envs, each by one of the two interfaces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hub", help="a hub's address; without it a private hub is started")
    parser.add_argument("--steps", type=int, default=100, help="for which the pole is to be kept up")
    arguments = parser.parse_args()
    options = {"hub": arguments.hub, "snapshots": True}
    with contextlib.closing(CloneState(envhub.make("CartPole-v1", **options))) as env:
        print(f"the pole was up for {balance(env, arguments.steps)} of {arguments.steps} steps")
    with contextlib.closing(
        GetState(envhub.make("FrozenLake-v1", env_kwargs={"is_slippery": False}, **options))
    ) as env:
        moves = ["left", "down", "right", "up"]
        print("across the lake:", *(moves[action] for action in path_to_goal(env)))


if __name__ == "__main__":
    main()
