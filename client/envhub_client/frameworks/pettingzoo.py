"""Multi-agent envs of a hub: a ``ParallelEnv`` of PettingZoo, and a batched one.

A worker hosts a parallel env as one env of Gymnasium, with dicts by agent for spaces (server/docs/serve.md, Envs of
dm_env and PettingZoo). Here its parts are given back to the agents, under their own keys.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from gymnasium import Space
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode
from pettingzoo import ParallelEnv
from typing_extensions import Unpack

from envhub.errors import RequestRefused, SpaceMismatch, shown
from envhub.values import spaces
from envhub.values.misfit import misfit
from envhub_client import make as making
from envhub_client.envs.single_env import HubEnv
from envhub_client.envs.vector_env import HubVectorEnv, Options
from envhub_client.frames import hiding_frames
from envhub_client.frameworks.decided_options import refuse_decided
from envhub_client.option_keywords import MakeKeywords, SessionKeywords

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


@hiding_frames
def make_vec(
    env: making.EnvLike,
    num_envs: int = 1,
    *,
    autoreset_mode: Literal["NextStep", "SameStep", "Disabled"] | AutoresetMode = AutoresetMode.NEXT_STEP,
    **options: Unpack[MakeKeywords],
) -> HubParallelVectorEnv:
    """``num_envs`` multi-agent envs in a hub, batched by agent.

    Args:
        env: a factory that returns a parallel env, or a list of one per env, ``"module:factory"``, or a name that the
            hub offers.
        num_envs: how many; all have the same possible agents and spaces.
        autoreset_mode: when an env is reset in whose episode no agent is alive any more, as in Gymnasium.
        **options: as for ``envhub.make_vec``.

    Raises:
        TypeError: they are no parallel envs of PettingZoo, or ``info_mode`` is given: their infos are batched.
        ValueError: the name of an agent is that of another after an underscore.
        Exception: as for ``envhub.make_vec``.
    """
    refuse_decided(options, "a vector env of multi-agent envs", "info_mode")
    envs = making.make_vec(env, num_envs, autoreset_mode=autoreset_mode, **options)
    try:
        return HubParallelVectorEnv(envs)
    except BaseException:
        envs.close(terminate=True)
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
        observation_spaces: the space of each agent's observations.
        action_spaces: the space of each agent's actions.
        hub_env: the ``HubEnv`` behind it.
    """

    def __init__(self, hub_env: HubEnv) -> None:
        self.hub_env = hub_env
        self.metadata = hub_env.metadata
        self.render_mode = hub_env.render_mode
        self._keys = _keys_of(hub_env.observation_space, hub_env.get_wrapper_attr)
        self._names = {key: agent for agent, key in self._keys.items()}
        self.possible_agents = [*self._keys]
        self.agents: list[Any] = []
        self.observation_spaces: Spaces = _by_agent(self._keys, hub_env.observation_space)
        self.action_spaces: Spaces = _by_agent(self._keys, hub_env.action_space)
        self._idle = _sampled(hub_env.action_space)
        self._was_reset = False

    def observation_space(self, agent: Any) -> Space[Any]:
        """The space of this agent's observations, the same object each time."""
        return self.observation_spaces[agent]

    def action_space(self, agent: Any) -> Space[Any]:
        """The space of this agent's actions, the same object each time."""
        return self.action_spaces[agent]

    @hiding_frames
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[ByAgent, ByAgent]:
        """Begin an episode; observations and infos by agent, of those that the env gave an observation of.

        Raises:
            ValueError: the env has no agent after its reset.
            RequestRefused: the infos do not say which agents are alive; the hub is too old.
            Exception: as for ``HubVectorEnv.reset``.
        """
        self.agents = []
        observation, info = self.hub_env.reset(seed=seed, options=options)
        _check_tells(info)
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
        """The results of a step that a failure ended."""
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

    def _entries(self, by_key: Mapping[str, Any], agents: list[Any]) -> ByAgent:
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
        """The env's ``state()``; its space is the attribute ``state_space``.

        Raises:
            AttributeError, NotImplementedError: the env has none.
            Exception: as for ``HubVectorEnv.call``.
        """
        state: np.ndarray = self._ask_state()
        return state

    @functools.cached_property
    def state_space(self) -> Space[Any]:
        """The space of ``state()``, the same object each time; AttributeError where the env has none."""
        space: Space[Any] = self.hub_env.get_wrapper_attr("state_space")
        return space

    def render(self) -> Any:
        """The env's frame, or whatever its ``render`` returns."""
        return self.hub_env.render()

    def close(self) -> None:
        """End the session."""
        self.hub_env.close()

    def __getattr__(self, name: str) -> Any:
        """A public attribute of the env in the hub: a value, or a function that calls its method there."""
        if name.startswith("_") or name == "hub_env":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.hub_env.get_wrapper_attr(name)


class HubParallelVectorEnv:
    """Multi-agent envs in a hub, stepped together; ``make_vec`` makes it.

    It is for a policy per agent: what goes in and comes out is a dict with an entry for every possible agent, and an
    entry is a batch with a row per env. ``alive`` says which rows count. An observation is for an agent's next action
    where ``alive[agent]`` is True after the step. A reward and flags are for its last action where ``alive[agent]`` was
    True before the step. An agent that is not alive has zeros, or what its space has nearest to them.

    Attributes:
        alive: by agent, bool ``(num_envs,)``: where the agent takes the next action. New arrays after each reset and
            step.
        ended: bool ``(num_envs,)``: whose episode ended in the last step, because no agent was alive any more, or by a
            failure; False after a reset.
        envs: the ``HubVectorEnv`` behind it, for ``call``, ``get_attr``, ``set_attr`` and what else it has.
        num_envs: how many envs there are.
        possible_agents: the agents of each env.
        autoreset_mode: as in Gymnasium. The next step resets an env of ``ended`` (NEXT_STEP), or the last step has done
            so (SAME_STEP), or the caller does so by ``reset(options={"reset_mask": envs.ended})`` (DISABLED).
    """

    def __init__(self, envs: HubVectorEnv) -> None:
        self.envs = envs
        self.num_envs, self.autoreset_mode = envs.num_envs, envs.autoreset_mode
        self.metadata, self.render_mode = envs.metadata, envs.render_mode
        self._keys = _keys_of(envs.single_observation_space, lambda name: envs.call_some([0], name)[0])
        keys = {*self._keys.values()}
        if hidden := [key for key in keys if f"_{key}" in keys]:  # in infos, "_a" says which envs have "a"
            raise ValueError(f"agents {hidden[0]!r} and '_{hidden[0]}' have one place in infos; rename one of them")
        self._names = {key: agent for agent, key in self._keys.items()}
        self.possible_agents = [*self._keys]
        self._single_observations: Spaces = _by_agent(self._keys, envs.single_observation_space)
        self._single_actions: Spaces = _by_agent(self._keys, envs.single_action_space)
        self._batched_observations: Spaces = _by_agent(self._keys, envs.observation_space)
        self._batched_actions: Spaces = _by_agent(self._keys, envs.action_space)
        self._idle = _sampled(envs.action_space)
        self._note_alive(np.zeros((self.num_envs, len(self._keys)), np.bool_))
        self.ended = np.zeros(self.num_envs, np.bool_)

    def single_observation_space(self, agent: Any) -> Space[Any]:
        """The space of this agent's observations in one env."""
        return self._single_observations[agent]

    def single_action_space(self, agent: Any) -> Space[Any]:
        """The space of this agent's actions in one env."""
        return self._single_actions[agent]

    def observation_space(self, agent: Any) -> Space[Any]:
        """The space of this agent's observations in all envs."""
        return self._batched_observations[agent]

    def action_space(self, agent: Any) -> Space[Any]:
        """The space of this agent's actions in all envs."""
        return self._batched_actions[agent]

    @hiding_frames
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> tuple[ByAgent, dict[str, Any]]:
        """Reset every env, or those of ``options["reset_mask"]``.

        Args:
            seed: as for ``HubVectorEnv.reset``.
            options: as for ``HubVectorEnv.reset``.

        Returns:
            Observations by agent, of shape ``(num_envs, *shape)``; of envs left out, their last ones, and they keep
            their ``alive``. Infos as of ``step``.

        Raises:
            RequestRefused: the infos do not say which agents are alive; the hub is too old.
            Exception: as for ``HubVectorEnv.reset``.
        """
        observations, infos = self.envs.reset(seed=seed, options=options)
        _check_tells(infos)
        mask = options.get("reset_mask") if isinstance(options, dict) else None
        reset = np.ones(self.num_envs, np.bool_) if mask is None else mask
        self._note_alive(np.where(reset[:, np.newaxis], self._taken(infos, "alive"), self._alive))
        self.ended = self.ended & ~reset
        return _by_agent(self._keys, observations), self._rest(infos)

    @hiding_frames
    def step(self, actions: Mapping[Any, Any]) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, dict[str, Any]]:
        """Step every env once and wait for all of them.

        Args:
            actions: by agent, a batch of ``action_space(agent)``. What is in rows where the agent is not alive is
                ignored, and so is an agent that is alive nowhere, which may be left out. Not checked against bounds.

        Returns:
            By agent: observations of shape ``(num_envs, *shape)``, rewards float64, terminations and truncations bool,
            all ``(num_envs,)``. A flag is True in the step in which the agent ends.

            Infos are Gymnasium's, without what is returned otherwise: ``agent_infos`` by agent, ``final_obs`` of ended
            envs with SAME_STEP (an object array of dicts by agent), ``final_info``. Where a failure cut an episode
            short, ``invalid_transition`` is True and ``env_failure`` an ``envhub.EnvFailure``; agents that were alive
            are truncated, with their last observation and reward 0.

        Raises:
            SpaceMismatch: an agent that is alive in an env has no actions, they do not fit its space in shape, or
                another key has some; no env has moved.
            Exception: as for ``HubVectorEnv.step``.
        """
        packed = self._packed(actions)
        try:
            observations, _, terminations, truncations, infos = self.envs.step(packed)
        except SpaceMismatch as error:
            named = ((f"the actions of agent {agent!r}", agent) for agent in actions)
            why = [misfit(self.action_space(agent), actions[agent], name) for name, agent in named]
            raise SpaceMismatch(f"{next(filter(None, why), error)}; no env has moved") from error
        failed = infos.get("invalid_transition", np.False_) & self._alive.T
        reported = self._taken(infos, "reported").T  # the worker's flags stay until the reset
        rewards = self._of_agents(infos, "rewards", np.float64)
        terminated = self._of_agents(infos, "terminations", np.bool_)
        truncated = self._of_agents(infos, "truncations", np.bool_)
        for agent, has_flags, lost in zip(self._keys, reported, failed, strict=True):
            terminated[agent] &= has_flags
            truncated[agent] = truncated[agent] & has_flags | lost
        self._note_alive(self._taken(infos, "alive"))
        self.ended = terminations | truncations
        return _by_agent(self._keys, observations), rewards, terminated, truncated, self._rest(infos)

    def _packed(self, actions: Mapping[Any, Any]) -> dict[str, Any]:
        if strangers := [agent for agent in actions if agent not in self._keys]:
            raise SpaceMismatch(f"actions of {strangers[0]!r}, which is no agent of these envs; no env has moved")
        for agent in self._keys:
            if agent not in actions and self.alive[agent].any():
                rows = np.flatnonzero(self.alive[agent]).tolist()
                raise SpaceMismatch(
                    f"no actions of agent {agent!r}, which is alive in envs {shown(rows, 60)}; no env has moved"
                )
        return {**self._idle, **{self._keys[agent]: batch for agent, batch in actions.items()}}

    def _note_alive(self, alive: np.ndarray) -> None:
        self._alive = alive
        self.alive = dict(zip(self._keys, np.ascontiguousarray(alive.T), strict=True))

    def _taken(self, infos: dict[str, Any], name: str) -> np.ndarray:
        """These masks, with a row per env and a column per agent."""
        return _sum(_parts(infos, name), (self.num_envs, len(self._keys)), np.bool_)

    def _of_agents(self, infos: dict[str, Any], name: str, dtype: Any) -> ByAgent:
        """These numbers by agent, each ``(num_envs,)``."""
        parts = _parts(infos, name)
        return {agent: _sum([part[key] for part in parts], self.num_envs, dtype) for agent, key in self._keys.items()}

    def _rest(self, infos: dict[str, Any]) -> dict[str, Any]:
        """The infos without what is returned otherwise, with the agents' own keys."""
        _parts(infos, "observed")
        for part in (infos, infos.get("final_info", {})):
            if each := part.get("agent_infos"):
                part["agent_infos"] = {self._names.get(key, key): info for key, info in each.items()}
        for row in np.flatnonzero(infos.get("_final_obs", ())).tolist():
            infos["final_obs"][row] = _by_agent(self._keys, infos["final_obs"][row])
        return infos

    def render(self) -> tuple[Any, ...]:
        """The frame of every env; as ``HubVectorEnv.render``."""
        return self.envs.render()

    def close(self, **kwargs: Any) -> None:
        """End the session; as ``HubVectorEnv.close``."""
        self.envs.close(**kwargs)


def _keys_of(space: Space[Any], ask: Callable[[str], Any]) -> dict[Any, str]:
    """The key in the spaces of each possible agent, in their order; ``ask`` reads an attribute of the env.

    Raises:
        TypeError: the env is no parallel env of PettingZoo.
    """
    try:
        agents = ask("possible_agents")
    except AttributeError as error:
        raise TypeError(f"an env with the observations {shown(space, 200)} is no PettingZoo parallel env") from error
    keys = [str(agent) for agent in agents]
    if not isinstance(space, Dict) or [*space.spaces] != keys:
        text = f"an env with the agents {shown(keys, 200)} has the observations {shown(space, 200)}"
        raise TypeError(f"{text}, which are not by agent")
    return dict(zip(agents, keys, strict=True))


def _by_agent(keys: Mapping[Any, str], by_key: Any) -> ByAgent:
    """These entries under the agents' own keys."""
    return {agent: by_key[key] for agent, key in keys.items()}


def _check_tells(infos: Mapping[str, Any]) -> None:
    if "alive" not in infos:
        raise RequestRefused(
            "the infos of a reset do not say which agents are alive: the hub is older than this client (upgrade EnvHub "
            "there), or the env is no PettingZoo parallel env"
        )


def _parts(infos: dict[str, Any], name: str) -> list[Any]:
    """Take these entries out of infos: those of envs that go on, and those of envs that ended with SAME_STEP."""
    parts = []
    for part in (infos, infos.get("final_info", {})):
        part.pop(f"_{name}", None)
        parts.append(part.pop(name, None))
    return [part for part in parts if part is not None]


def _sum(parts: Sequence[np.ndarray], shape: Any, dtype: Any) -> np.ndarray:
    """The rows of these parts together: a row has its values in one of them, and zeros in the other."""
    return functools.reduce(np.add, parts) if parts else np.zeros(shape, dtype)


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
    if why := misfit(space, action, name):
        return why
    if isinstance(space, Box) and space.contains(np.asarray(action, space.dtype)):
        return ""
    return f"{name} is {shown(action, 100)}, which is not in {shown(space, 100)}"
