"""Small parallel envs of PettingZoo, whose agents come and go."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

LENGTH = 9
JOINS, QUITS, FALLS = 3, 4, 6  # the steps after which the late agent is there, and two others are not


class Team(ParallelEnv):  # type: ignore[type-arg]
    """A team of four: the second is terminated early, the third joins late, and the fourth leaves without a flag."""

    metadata = {"name": "team", "render_modes": ["rgb_array"], "render_fps": 5}

    def __init__(
        self,
        agents: Any = ("scout", "guard", "late", "quitter"),
        quits: bool = True,
        vectors: bool = False,
        render_mode: str | None = None,
    ) -> None:
        """Make it; with ``vectors`` all observe the same, as training libraries' default networks want it."""
        self.possible_agents = list(agents)
        self.quits, self.vectors, self.render_mode = quits, vectors, render_mode
        self.dies_at = self.raises_at = -1
        box = spaces.Box(-10, 10, (3,), np.float32)
        masked = spaces.Dict({"observation": box, "action_mask": spaces.Box(0, 1, (3,), np.int8)})
        seen = [box, masked, spaces.Discrete(50), spaces.Box(0, 255, (2, 2), np.uint8)] if not vectors else [box] * 4
        acts = [
            spaces.Discrete(3),
            spaces.Discrete(3),
            spaces.Box(-1, 1, (2,), np.float32),
            spaces.MultiDiscrete([2, 4]),
        ]
        self._seen = dict(zip(self.possible_agents, seen, strict=True))
        self._acts = dict(zip(self.possible_agents, acts, strict=True))
        self.state_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def observation_space(self, agent: Any) -> Any:
        return self._seen[agent]

    def action_space(self, agent: Any) -> Any:
        return self._acts[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None or not hasattr(self, "random"):
            self.random = np.random.default_rng(seed)
        scout, guard, _, quitter = self.possible_agents
        self.agents = [] if (options or {}).get("empty") else [scout, guard, quitter]
        self.steps, self.total = 0, 0.0
        return self._observed(), {agent: {"seat": self.possible_agents.index(agent)} for agent in self.agents}

    def _observed(self) -> dict[Any, Any]:
        drawn = self.random.normal(size=3).astype(np.float32)
        scout, guard, late, quitter = self.possible_agents
        found = {
            scout: drawn,
            guard: {"observation": -drawn, "action_mask": np.array([1, self.steps % 2, 1], np.int8)},
            late: self.steps,
            quitter: np.full((2, 2), self.steps, np.uint8),
        }
        return {agent: drawn if self.vectors else found[agent] for agent in self.agents}

    def step(self, actions: dict[Any, Any]) -> Any:
        assert actions.keys() == {*self.agents}
        self.steps += 1
        if self.steps == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == self.raises_at:
            raise RuntimeError("the team is lost")
        self.total += float(sum(np.sum(actions[agent]) for agent in self.agents))
        _, guard, late, quitter = self.possible_agents
        gone = {guard: FALLS, quitter: QUITS}
        if self.steps == JOINS:
            self.agents = [*self.agents, late]
        elif self.steps == QUITS and self.quits:
            self.agents = [agent for agent in self.agents if agent != quitter]
        observations = self._observed()
        rewards = {agent: float(self.random.normal()) + self.total for agent in self.agents}
        terminations = {agent: self.steps == gone.get(agent) for agent in self.agents}
        truncations = dict.fromkeys(self.agents, self.steps == LENGTH)
        infos: dict[Any, Any] = {agent: {"total": self.total} for agent in self.agents}
        infos[self.agents[0]]["word"] = "go" * (self.steps % 2)
        self.agents = [agent for agent in self.agents if not (terminations[agent] or truncations[agent])]
        return observations, rewards, terminations, truncations, infos

    def state(self) -> Any:
        return np.array([self.steps, self.total])

    def doubled(self, number: float) -> float:
        return 2 * number

    def render(self) -> Any:
        return np.full((4, 4, 3), self.steps, np.uint8)


by_number = partial(Team, (3, 1, (2, "b"), "d"))
by_flags = partial(Team, quits=False)
by_vectors = partial(Team, vectors=True)


def duel_in_turns() -> Any:
    """An AEC env of agents that act at once."""
    from pettingzoo.classic import rps_v2

    return rps_v2.env()


def duel() -> Any:
    from pettingzoo.classic import rps_v2

    return rps_v2.parallel_env()


def tic_tac_toe() -> Any:
    """An env of agents that take turns, made parallel as the error says that refuses it."""
    from pettingzoo.classic import tictactoe_v3
    from pettingzoo.utils.conversions import turn_based_aec_to_parallel

    return turn_based_aec_to_parallel(tictactoe_v3.env())


KINDS = {
    "team": "team_envs:Team",
    "numbers": "team_envs:by_number",
    "flagged": "team_envs:by_flags",
    "zombies": "other_sims:zombies",
}
