"""Multi-agent envs of a hub, each a ``ParallelEnv``; a worker hosts it as one env, with dicts by agent for spaces."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box
from pettingzoo import ParallelEnv
from typing_extensions import Unpack

from envhub.errors import SpaceMismatch, brief
from envhub.values import spaces
from envhub.values.gym_api import MULTI_AGENT
from envhub.values.spaces import space_mismatch
from envhub_client import make as making
from envhub_client.envs.single_env import HubEnv
from envhub_client.envs.snapshots import Snapshot
from envhub_client.frames import hiding_frames
from envhub_client.option_keywords import SessionKeywords

ByAgent = dict[Any, Any]
Spaces = dict[Any, Space[Any]]
Results = tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]
FAILURE_KEYS = ("env_failure", "invalid_transition")  # in the info of a step that a failure ended


@hiding_frames
def make(
    env: making.EnvLike,
    *,
    hub: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
    **options: Unpack[SessionKeywords],
) -> HubParallelEnv:
    """One multi-agent env in a hub, as a ``pettingzoo.ParallelEnv``.

    Args:
        env: a factory that returns a parallel env, ``"module:factory"``, or a name that the hub offers.
        hub: a running hub, as for ``envhub.make``.
        env_kwargs: arguments for the env.
        **options: as for ``envhub.make``, such as ``num_workers``, the fault options, and arguments for the env.

    Raises:
        TypeError: it is no parallel env of PettingZoo.
        Exception: as for ``envhub.make``.
    """
    hub_env = making.make(env, hub=hub, env_kwargs=env_kwargs, **options)
    try:
        return HubParallelEnv(hub_env)
    except BaseException:
        hub_env.close()
        raise


class HubParallelEnv(ParallelEnv[Any, Any, Any]):
    """One multi-agent env in a hub; ``make`` makes it.

    It does what the env itself does: the dicts of a step have the agents that the env's had, in the order of
    ``possible_agents``, rewards are floats, and flags bools. An agent may come or leave in the middle of an episode.
    Other public attributes and methods of the env are reached by their names, each time by a request to the hub;
    ``hub_env.set_wrapper_attr`` sets one.

    An episode that a failure cuts short, such as the end of the env's process, ends for every living agent: it is
    truncated, with its last observation, reward 0, and an info with ``invalid_transition`` and ``env_failure``, an
    ``envhub.EnvFailure``. The next reset is that of a new env. With ``on_crash="raise"`` the step raises.

    Attributes:
        agents: those that take the next action; empty before the first reset, after an episode's end, and after a step
            that raised what the env, its worker or an interrupt had raised: then only a reset goes on.
        possible_agents: all that may ever be in ``agents``.
    """

    def __init__(self, hub_env: HubEnv) -> None:
        self.hub_env = hub_env
        self.metadata = dict(hub_env.metadata)
        self.render_mode = hub_env.render_mode
        if not self.metadata.pop(MULTI_AGENT, False):
            seen = brief(hub_env.observation_space, 200)
            raise TypeError(f"an env with the observations {seen} is no PettingZoo parallel env")
        self._keys = {agent: str(agent) for agent in hub_env.get_wrapper_attr("possible_agents")}
        self._names = {key: agent for agent, key in self._keys.items()}
        self.possible_agents = [*self._keys]
        self.agents: list[Any] = []
        self.observation_spaces: Spaces = self._entries(hub_env.observation_space, self.possible_agents)
        self.action_spaces: Spaces = self._entries(hub_env.action_space, self.possible_agents)
        self._idle = _sampled(hub_env.action_space)
        self._was_reset = False

    def observation_space(self, agent: Any) -> Space[Any]:
        return self.observation_spaces[agent]

    def action_space(self, agent: Any) -> Space[Any]:
        return self.action_spaces[agent]

    @hiding_frames
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[ByAgent, ByAgent]:
        """Begin an episode; observations and infos by agent, of those that the env gave an observation of.

        Raises:
            ValueError: the env has no agent after its reset.
            Exception: as for ``HubVectorEnv.reset``.
        """
        self.agents = []
        return self._begun(*self.hub_env.reset(seed=seed, options=options))

    @hiding_frames
    def restore(self, snapshot: Snapshot | str, reseed: int | None = None) -> tuple[ByAgent, ByAgent]:
        """Go on from a snapshot that ``hub_env.snapshot`` took; results as of ``reset``."""
        return self._begun(*self.hub_env.restore(snapshot, reseed))

    def _begun(self, observation: Any, info: dict[str, Any]) -> tuple[ByAgent, ByAgent]:
        self.agents, self._was_reset = self._agents_of(info["alive"]), True
        observed = self._agents_of(info["observed"])
        return self._entries(observation, observed), self._infos(info, observed)

    @hiding_frames
    def step(self, actions: Mapping[Any, Any]) -> Results:
        """Step the env by the actions of the living agents; if there are none, all results are empty.

        Actions of agents that are not alive are ignored, as by PettingZoo: a loop may act for all possible agents.

        Raises:
            ResetNeeded: the env was never reset.
            SpaceMismatch: an agent of ``agents`` has no action, or one that is not in its space, or a key that is no
                agent is there; the env has not moved.
            WorkerDied: the env's process ended, where the policy is to raise.
            Exception: as for ``HubVectorEnv.step``.
        """
        self._check(actions)
        if not self.agents:
            return {}, {}, {}, {}, {}
        acting, self.agents = self.agents, []  # until the step is done
        packed = {**self._idle, **{self._keys[agent]: actions[agent] for agent in acting}}
        observation, _, _, _, info = self.hub_env.step(packed)
        if info.get("invalid_transition"):
            return self._end_all(acting, observation, info)
        self.agents = self._agents_of(info["alive"])
        reported = self._agents_of(info["reported"])
        return (
            self._entries(observation, self._agents_of(info["observed"])),
            self._entries(info["rewards"], reported),
            self._entries(info["terminations"], reported),
            self._entries(info["truncations"], reported),
            self._infos(info, reported),
        )

    def _check(self, actions: Mapping[Any, Any]) -> None:
        if not self._was_reset:
            raise ResetNeeded("step before the first reset of this env: call reset, which says which agents are alive")
        for agent in actions:
            if agent not in self._keys:
                raise SpaceMismatch(f"an action of {agent!r}, which is no agent of this env; the env has not moved")
        for agent in self.agents:
            if agent not in actions:
                raise SpaceMismatch(f"no action of agent {agent!r}, which is alive; the env has not moved")
            if why := _outside(self.action_spaces[agent], actions[agent], f"the action of agent {agent!r}"):
                raise SpaceMismatch(f"{why}; the env has not moved")

    def _end_all(self, acting: list[Any], observation: Any, info: dict[str, Any]) -> Results:
        failure = {name: info[name] for name in FAILURE_KEYS if name in info}
        return (
            self._entries(observation, acting),
            dict.fromkeys(acting, 0.0),
            dict.fromkeys(acting, False),
            dict.fromkeys(acting, True),
            {agent: dict(failure) for agent in acting},
        )

    def _agents_of(self, mask: np.ndarray) -> list[Any]:
        return [agent for agent, named in zip(self._keys, mask.tolist(), strict=True) if named]

    def _entries(self, by_key: Any, agents: list[Any]) -> ByAgent:
        return {agent: by_key[self._keys[agent]] for agent in agents}

    def _infos(self, info: dict[str, Any], agents: list[Any]) -> ByAgent:
        """The info of each agent, and those of no agent, such as ``common``, under their keys."""
        named = {self._names.get(key, key): each for key, each in info.get("agent_infos", {}).items()}
        return {**{agent: {} for agent in agents}, **named}

    @functools.cached_property
    def _ask_state(self) -> Callable[[], Any]:
        return self.hub_env.get_wrapper_attr("state")  # type: ignore[no-any-return]

    @hiding_frames
    def state(self) -> np.ndarray:
        """The env's ``state()``; its space is the attribute ``state_space``."""
        state: np.ndarray = self._ask_state()
        return state

    @functools.cached_property
    def state_space(self) -> Space[Any]:
        """The space of ``state()``, the same object each time; AttributeError where the env has none."""
        space: Space[Any] = self.hub_env.get_wrapper_attr("state_space")
        return space

    def render(self) -> Any:
        return self.hub_env.render()

    def close(self) -> None:
        self.hub_env.close()

    def __getattr__(self, name: str) -> Any:
        """A public attribute of the env in the hub: a value, or a function that calls its method there."""
        if name.startswith("_") or name == "hub_env":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.hub_env.get_wrapper_attr(name)


def _sampled(space: Space[Any]) -> dict[str, Any]:
    """Actions by key that stand for those of agents that are not alive, and are not passed on."""
    own = copy.deepcopy(space)  # the caller may have seeded it
    own.seed(0)
    sampled: dict[str, Any] = own.sample()
    return sampled


def _outside(space: Space[Any], action: Any, name: str) -> str:
    """The reason why the action is not in its space, empty if it is; numbers may have another dtype of their kind."""
    if spaces.contains(space, action):
        return ""
    if why := space_mismatch(space, action, name):
        return why
    if isinstance(space, Box) and space.contains(np.asarray(action, space.dtype)):
        return ""
    return f"{name} is {brief(action, 100)}, which is not in {brief(space, 100)}"
