"""Environments of dm_env, and parallel envs of PettingZoo, with the interface of Gymnasium.

An object's methods say which interface it has, so nothing of dm_env or PettingZoo is imported here, but for an env of
PettingZoo that it can convert itself. This is also why shimmy does not convert them: it knows dm_control's own two
classes only, and needs Gymnasium 1.0.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Collection, Mapping

import numpy as np

from envhub.errors import brief
from envhub.values import spaces
from envhub.values.gym_api import DM_ENV, MULTI_AGENT, PARALLEL, api, interface, takes_turns, why_not_env
from envhub.values.leaf import OBJECT

# The parts of a converted env that are not those of the object it was made of.
_OWN = frozenset(
    [
        *("observation_space", "action_space", "reset", "step", "render", "close"),
        *("metadata", "render_mode", "spec", "np_random_seed", "unwrapped"),
    ]
)


def as_gymnasium(made: Any, source: str) -> Any:
    if takes_turns(made) and (getattr(made, "metadata", None) or {}).get("is_parallelizable"):
        made = import_module("pettingzoo.utils.conversions").aec_to_parallel(made)
    if problem := why_not_env(made):
        raise TypeError(f"{source} returned {problem}")
    kind = interface(made)
    if kind == DM_ENV:
        return DmEnv(made)
    return ParallelEnv(made) if kind == PARALLEL else made


class Converted(api.Env):  # type: ignore[misc]
    """An env of Gymnasium made of an object with another interface."""

    def __init__(self, env: Any, observation_space: Any, action_space: Any) -> None:
        self.env = env  # the object, which calls and attributes that Gymnasium does not define reach
        self.observation_space, self.action_space = observation_space, action_space
        self.spec = None
        self._seed = -1

    @property
    def np_random_seed(self) -> int:
        return self._seed

    def has_wrapper_attr(self, name: str) -> bool:
        return hasattr(self._owner(name), name)

    def get_wrapper_attr(self, name: str) -> Any:
        return getattr(self._owner(name), name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        owner = self._owner(name)
        if not force and not hasattr(owner, name):
            return False
        setattr(owner, name, value)
        return True

    def _owner(self, name: str) -> Any:
        return self if name in _OWN or (hasattr(type(self), name) and not hasattr(self.env, name)) else self.env

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


class DmEnv(Converted):
    """A ``dm_env.Environment``, such as one of dm_control; raises ``TypeError``."""

    # An episode that ends with discount 0 is terminated, one that ends with another discount is truncated. Infos have
    # the discount as ``timestep.discount``, which is its name in shimmy, too.

    def __init__(self, env: Any) -> None:
        rewards = env.reward_spec() if hasattr(env, "reward_spec") else None
        if getattr(rewards, "shape", None if rewards is not None else ()) != ():
            raise TypeError(f"{brief(env, 100)} has rewards of {brief(rewards, 200)}; a reward of an env is one number")
        self._observation_spec = env.observation_spec()
        super().__init__(env, _space(self._observation_spec), _space(env.action_spec()))
        if hasattr(env, "physics"):  # of dm_control, which renders without having been made for it
            self.render_mode = "rgb_array"
            self.metadata = {"render_modes": ["rgb_array"], "render_fps": round(1 / env.control_timestep())}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        # Such an env takes no options, and only those of dm_control take seeds.
        if seed is not None:
            random = self._random_state()
            if random is None:
                text = f"{brief(self.env, 100)} takes no seed, as it has neither `task.random` nor `random_state`"
                api.logger.warn(f"{text}: its factory has to seed it")
            else:
                random.seed(seed)
            self._seed = seed
        return _arrays(self.env.reset().observation, self._observation_spec), {}

    def _random_state(self) -> Any:
        """The ``numpy.random.RandomState`` of an env of dm_control: of its suite, or of its composer; else None."""
        for owner in (getattr(self.env, "task", None), self.env):
            for name in ("random", "random_state"):
                random = getattr(owner, name, None)
                if isinstance(random, np.random.RandomState):
                    return random
        return None

    @property
    def np_random(self) -> np.random.Generator:
        random = self._random_state()
        if random is None:
            raise AttributeError(f"{brief(self.env, 100)} has no `np_random`")
        return np.random.Generator(random._bit_generator)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        timestep = self.env.step(action)
        ended = bool(timestep.last())
        terminated = ended and timestep.discount == 0
        reward = 0.0 if timestep.reward is None else timestep.reward
        # The first step of an episode, which an ended env begins if it is stepped, has neither reward nor discount.
        info = {} if timestep.discount is None else {"timestep.discount": float(timestep.discount)}
        observation = _arrays(timestep.observation, self._observation_spec)
        return observation, reward, terminated, ended and not terminated, info

    def render(self, **kwargs: Any) -> Any:
        """The frame of dm_control's ``physics.render``, which also takes ``height``, ``width`` and ``camera_id``."""
        return self.env.physics.render(**kwargs)


def _space(spec: Any) -> Any:
    if isinstance(spec, Mapping):
        return api.spaces.Dict([(key, _space(part)) for key, part in spec.items()])
    if isinstance(spec, (list, tuple)):
        return api.spaces.Tuple([_space(part) for part in spec])
    if hasattr(spec, "num_values"):
        return api.spaces.Discrete(int(spec.num_values))
    dtype = np.dtype(spec.dtype)
    if hasattr(spec, "minimum"):
        low, high = spec.minimum, spec.maximum
    elif dtype.kind in "fb":
        low, high = (-np.inf, np.inf) if dtype.kind == "f" else (0, 1)
    elif dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    else:
        raise TypeError(f"{brief(spec, 200)} has no space in Gymnasium: only specs of numbers have one")
    bounds = (np.broadcast_to(bound, spec.shape).astype(dtype) for bound in (low, high))
    return api.spaces.Box(*bounds, tuple(spec.shape), dtype.type)


def _arrays(observation: Any, spec: Any) -> Any:
    """An observation of dm_env, whose lists are tuples, and whose numbers are arrays of the spec's dtype."""
    # Where the spec has keys, the observation may have attributes of these names, as named tuples and dataclasses do.
    if isinstance(spec, Mapping) and not isinstance(observation, Mapping):
        return {key: _arrays(getattr(observation, key), part) for key, part in spec.items()}
    if isinstance(observation, Mapping):
        return {key: _arrays(part, spec[key]) for key, part in observation.items()}
    if isinstance(observation, (list, tuple)):
        return tuple(map(_arrays, observation, spec))
    return observation if isinstance(observation, np.ndarray) else np.asarray(observation, spec.dtype)


class ParallelEnv(Converted):
    """A parallel env of PettingZoo as one env: its observations and actions are dicts with a key for each agent.

    The keys are all possible agents, as text. An agent that is not alive has an observation of zeros (or of what its
    space has nearest to them), and its action is left out. The reward is the sum of the agents' rewards. The episode
    ends when no agent is alive: it is terminated if every agent was terminated, else truncated.

    Infos of a step have ``rewards``, ``terminations`` and ``truncations`` by agent; the flags of an agent stay until
    the reset. Infos of steps and resets have ``agent_infos`` where agents have infos, and arrays of bool with an entry
    for each possible agent: ``alive``, those that take the next action, and ``observed``, those that the env gave an
    observation of; those of steps have ``reported``, the agents that the env gave anything else of. Raises
    ``TypeError``.
    """

    def __init__(self, env: Any) -> None:
        self._keys = {agent: str(agent) for agent in env.possible_agents}
        if len({*self._keys.values()}) < len(self._keys):
            raise TypeError(f"{brief(env, 100)} has two agents of one text: {brief([*self._keys], 200)}")
        each = [(key, spaces.native(env.observation_space(agent))) for agent, key in self._keys.items()]
        self._absent = {key: _zeros(space, key) for key, space in each}
        acts = [(key, spaces.native(env.action_space(agent))) for agent, key in self._keys.items()]
        super().__init__(env, api.spaces.Dict(each), api.spaces.Dict(acts))
        self.metadata = {**(getattr(env, "metadata", None) or {}), MULTI_AGENT: True}
        self.render_mode = getattr(env, "render_mode", None)
        self._terminations: dict[str, bool] = {}
        self._truncations: dict[str, bool] = {}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._seed = self._seed if seed is None else seed
        observations, infos = self.env.reset(seed=seed, options=options)
        if not self.env.agents:
            raise ValueError(f"{brief(self.env, 100)} has no agent after its reset: an episode begins with one or more")
        self._terminations, self._truncations = {}, {}
        self._update_ended((), {}, {})
        present = {"alive": self._among(self.env.agents), "observed": self._among(observations)}
        return self._joined(observations), {**present, **self._agent_infos(infos)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        acting = {agent: action[self._keys[agent]] for agent in self.env.agents}
        results = self.env.step(acting)
        try:
            observations, rewards, terminations, truncations, infos = results
        except (TypeError, ValueError) as error:
            kind = f"a {type(results).__name__}"
            returned = f"a tuple of {len(results)}" if isinstance(results, tuple) else kind
            text = f"step of {brief(self.env, 100)} returned {returned}, and not observations, rewards, terminations, "
            raise TypeError(f"{text}truncations and infos by agent") from error
        self._update_ended(acting, terminations, truncations)
        keys = [self._keys[agent] for agent in self.env.agents]
        ended = all(self._terminations.get(key) or self._truncations.get(key) for key in keys)
        terminated = ended and all(self._terminations.values())
        by_agent = {
            "rewards": {key: self._reward(agent, rewards) for agent, key in self._keys.items()},
            "terminations": {key: self._terminations.get(key, False) for key in self._keys.values()},
            "truncations": {key: self._truncations.get(key, False) for key in self._keys.values()},
            "alive": self._among(() if ended else self.env.agents),
            "observed": self._among(observations),
            "reported": self._among({*rewards, *terminations, *truncations, *infos}),
        }
        total = float(sum(rewards.values()))
        by_agent.update(self._agent_infos(infos))
        return self._joined(observations), total, terminated, ended and not terminated, by_agent

    def _reward(self, agent: Any, rewards: Any) -> float:
        try:
            return float(rewards.get(agent, 0))
        except (TypeError, ValueError) as error:
            text = f"step of {brief(self.env, 100)} returned {brief(rewards[agent], 100)} as the reward of {agent!r}"
            raise TypeError(f"{text}: an agent's reward is one number, such as a weighted sum") from error

    def _update_ended(self, acting: Collection[Any], terminations: Any, truncations: Any) -> None:
        """Note which agents have ended; an agent without an entry has not been in this episode."""
        # An agent that is there and was not among the ``acting`` ones has come, or come back after its end.
        for agent in (*self.env.agents, *terminations, *truncations):
            if agent not in self._keys:
                raise ValueError(f"{brief(self.env, 100)} has agent {agent!r}, which is not in its possible_agents")
        for agent in self.env.agents:
            if agent not in acting:
                self._terminations[self._keys[agent]] = self._truncations[self._keys[agent]] = False
        self._terminations.update({self._keys[agent]: bool(ended) for agent, ended in terminations.items()})
        self._truncations.update({self._keys[agent]: bool(ended) for agent, ended in truncations.items()})

    def _among(self, agents: Collection[Any]) -> np.ndarray:
        present = {*agents}
        return np.array([agent in present for agent in self._keys])

    def _joined(self, observations: Any) -> dict[str, Any]:
        return {key: observations.get(agent, self._absent[key]) for agent, key in self._keys.items()}

    def _agent_infos(self, infos: Any) -> dict[str, Any]:
        """The infos that are not empty; one may be of no agent, such as PettingZoo's ``common``."""
        each = {str(agent): info for agent, info in infos.items() if info}
        return {"agent_infos": each} if each else {}

    def render(self) -> Any:
        return self.env.render()


def _zeros(space: Any, agent: str) -> Any:
    if isinstance(space, api.spaces.Dict):
        return {key: _zeros(part, agent) for key, part in space.spaces.items()}
    if isinstance(space, api.spaces.Tuple):
        return tuple(_zeros(part, agent) for part in space.spaces)
    if OBJECT in spaces.leaves(space):
        raise TypeError(f"the observations of agent {agent} have a {type(space).__name__}, which has no zero")
    zeros = np.zeros(space.shape, space.dtype)
    if isinstance(space, api.spaces.Box):
        return np.clip(zeros, space.low, space.high)
    return np.asarray(zeros + getattr(space, "start", 0), space.dtype)
