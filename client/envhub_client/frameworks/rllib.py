"""RLlib: env creators, and callbacks that keep what a crash cut short apart. Known to work with Ray 2.60."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gymnasium.spaces import Dict
from gymnasium.vector import AutoresetMode
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.tune.registry import register_env

from envhub.transport import address as addresses
from envhub_client import make as making
from envhub_client.connection.known_hubs import stands_for_several
from envhub_client.envs.single_env import HubEnv
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.frameworks import needs
from envhub_client.frameworks.adapter import refuse_decided

if TYPE_CHECKING:
    from envhub_client.frameworks.pettingzoo import HubParallelEnv

RESTART_WAIT_S = 30.0
SMOOTHED_EPISODES = 100


def env_creator(env_config: Mapping[str, Any]) -> HubEnv | HubVectorEnv:
    """Make what one of RLlib's env runners steps: one env, or with ``num_envs`` all of its envs as one vector env.

    RLlib adds ``num_envs`` by itself with ``gym_env_vectorize_mode="vector_entry_point"``, by which an env runner has
    one session. In its other modes each env is a session of its own, and the envs are stepped one after the other.

    Args:
        env_config: ``env``, and what else ``envhub.make_vec`` takes, such as ``hub``, ``num_workers``, ``step_timeout``
            and arguments for the env. ``autoreset_mode`` and ``info_mode`` are not among them: RLlib needs
            ``NEXT_STEP`` and batched infos. ``restart_wait`` is 30 s if it is not given: RLlib takes the row after a
            truncation for a reset, also where the env was truncated once more, because its restart took longer.
            Where ``hub`` stands for several hubs, ``hub_index`` is the number of the env runner, and ``on_hub_loss`` is
            ``"redistribute"``, if they and ``split`` are not given. RLlib's mode ``vector_entry_point`` does not say
            the number; ``FleetEnvRunner`` does.

    Raises:
        TypeError: ``env_config`` has no ``env``, or has ``autoreset_mode`` or ``info_mode``, or what neither
            ``envhub.make_vec`` nor the env takes.
        ValueError: the envs have a ``reward_space`` with axes: RLlib learns from one number.
        Exception: as for ``envhub.make_vec``.
    """
    refuse_decided(env_config, "RLlib", "autoreset_mode", "info_mode")
    _check_names_env(env_config)
    arguments = {"restart_wait": RESTART_WAIT_S, **_on_one_hub(env_config, getattr(env_config, "worker_index", None))}
    if "num_envs" in arguments:
        envs: HubEnv | HubVectorEnv = making.make_vec(autoreset_mode=AutoresetMode.NEXT_STEP, **arguments)
    else:
        envs = making.make(**arguments)
    try:
        envs.refuse_reward_axes("RLlib")
    except BaseException:
        envs.close()
        raise
    return envs


def multi_agent_env_creator(env_config: Mapping[str, Any]) -> HubMultiAgentEnv:
    """Make one multi-agent env, of which RLlib's env runners step one after the other.

    Args:
        env_config: ``env``, and what else ``envhub.pettingzoo.make`` takes, such as ``hub``, ``step_timeout`` and
            arguments for the env.

    Raises:
        ModuleNotFoundError: PettingZoo is missing; the text names the extra.
        TypeError: ``env_config`` has no ``env``.
        Exception: as for ``envhub.pettingzoo.make``.
    """
    with needs("pettingzoo"):
        from envhub_client.frameworks import pettingzoo
    _check_names_env(env_config)
    arguments = _on_one_hub(env_config, getattr(env_config, "worker_index", None))
    return HubMultiAgentEnv(pettingzoo.make(**arguments))


def register(name: str = "", *, multi_agent: bool = False) -> str:
    """Make an env creator known to every process of the Ray cluster; returns its name, for ``config.environment``.

    Args:
        name: under which it is known; ``"EnvHub"`` if it is empty, or ``"EnvHubMultiAgent"``.
        multi_agent: whether it is ``multi_agent_env_creator``, else ``env_creator``.
    """
    name = name or ("EnvHubMultiAgent" if multi_agent else "EnvHub")
    register_env(name, multi_agent_env_creator if multi_agent else env_creator)
    return name


def _check_names_env(env_config: Mapping[str, Any]) -> None:
    if "env" not in env_config:
        raise TypeError("env_config needs 'env', the id of the env to make, such as {'env': 'CartPole-v1'}")


def _on_one_hub(env_config: Mapping[str, Any], worker_index: int | None) -> dict[str, Any]:
    """The arguments, by which of several hubs the one of the env runner's number gets all envs."""
    hubs = env_config.get("hub")
    if hubs is None and isinstance(env_config.get("env", ""), str):
        hubs = addresses.address_of_environment()
    if worker_index is None or "split" in env_config or hubs is None or not stands_for_several(hubs):
        return dict(env_config)
    return {"hub_index": worker_index, "on_hub_loss": "redistribute", **env_config}


class FleetEnvRunner(SingleAgentEnvRunner):  # Ray has no types
    """An env runner whose envs are on one hub of a fleet; for ``config.env_runners(env_runner_cls=FleetEnvRunner)``.

    Runner ``i`` takes hub ``i`` modulo how many there are, in their order. RLlib's own runner does not say its number
    in the vectorize mode ``vector_entry_point``.
    """

    def make_env(self) -> None:
        self.config.env_config = _on_one_hub(self.config.env_config, self.worker_index or 0)
        super().make_env()


class HubMultiAgentEnv(MultiAgentEnv):  # Ray has no types
    """A ``MultiAgentEnv`` over an ``envhub.pettingzoo.HubParallelEnv``.

    RLlib's own wrapper takes the agents of the first reset for all agents, and never ends an episode whose last agents
    end differently. Here an episode ends when no agent is alive: truncated if an agent was truncated in its last step,
    else terminated. An agent that leaves without a flag is terminated: it gets no further reward.
    """

    def __init__(self, par_env: HubParallelEnv) -> None:
        super().__init__()
        self.par_env = par_env
        self.metadata, self.render_mode = dict(par_env.metadata), par_env.render_mode
        self.possible_agents, self.agents = par_env.possible_agents, par_env.agents
        self.observation_spaces, self.action_spaces = par_env.observation_spaces, par_env.action_spaces
        self.observation_space, self.action_space = Dict(self.observation_spaces), Dict(self.action_spaces)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        result = self.par_env.reset(seed=seed, options=options)
        self.agents = self.par_env.agents
        return result

    def step(self, action_dict: Mapping[Any, Any]) -> tuple[Any, Any, Any, Any, Any]:
        acting = self.agents
        observations, rewards, terminations, truncations, infos = self.par_env.step(action_dict)
        self.agents = self.par_env.agents
        left = dict.fromkeys((agent for agent in acting if agent not in {*self.agents, *terminations}), True)
        terminations = {**terminations, **left, "__all__": False}
        truncations = {**truncations, "__all__": False}
        if not self.agents:
            truncated = any(truncations.values())
            terminations["__all__"] = not truncated
            # An episode in which each agent has a flag of its own is a terminated one to RLlib.
            truncations = {"__all__": truncated}
        return observations, rewards, terminations, truncations, infos

    def render(self) -> Any:
        return self.par_env.render()

    def close(self) -> None:
        self.par_env.close()


class CutEpisodes(RLlibCallback):  # Ray has no types
    """Keeps episodes that a crash cut short apart; for ``config.callbacks(CutEpisodes)``.

    The row that reports the crash is no transition of the env's, and is taken out of the samples, with several agents
    out of each one's. RLlib itself counts every episode in ``episode_return_mean``. ``result["env_runners"]`` also has:

    - ``whole_episode_return_mean``, of the last 100 episodes of each env runner that no crash cut short;
    - ``num_cut_episodes``, how many were cut short between two results.
    """

    def on_episode_end(
        self,
        *,
        episode: SingleAgentEpisode | MultiAgentEpisode,
        prev_episode_chunks: list[SingleAgentEpisode] | list[MultiAgentEpisode] | None = None,
        metrics_logger: Any = None,
        **kwargs: Any,
    ) -> None:
        each = [*episode.agent_episodes.values()] if isinstance(episode, MultiAgentEpisode) else [episode]
        failed = any(map(_is_cut, each))
        metrics_logger.log_value("num_cut_episodes", int(failed), reduce="sum")
        if not failed:
            whole = sum(chunk.get_return() for chunk in [*(prev_episode_chunks or ()), episode])
            metrics_logger.log_value("whole_episode_return_mean", whole, window=SMOOTHED_EPISODES)

    def on_sample_end(self, *, samples: list[Any], **kwargs: Any) -> None:
        samples[:] = [whole for episode in samples if (whole := _drop_cut(episode)) is not None]


def _is_cut(episode: SingleAgentEpisode) -> bool:
    return bool(episode.is_truncated and episode.get_infos(-1).get("invalid_transition"))


def _drop_cut(episode: Any) -> Any:
    """The episode without the row that reports a crash, None if nothing is left."""
    if isinstance(episode, MultiAgentEpisode):
        whole = {agent: _drop_cut(own) for agent, own in episode.agent_episodes.items()}
        episode.agent_episodes = {agent: own for agent, own in whole.items() if own is not None}
        return episode if episode.agent_episodes else None
    if not _is_cut(episode):
        return episode
    if len(episode) == 1:
        return None
    whole = episode[:-1]
    for name in ("agent_id", "module_id", "multi_agent_episode_id"):  # which Ray's slices lack
        setattr(whole, name, getattr(episode, name))
    whole.is_truncated = True  # it ends here, and its last observation has a value
    return whole.to_numpy() if episode.is_numpy else whole
