"""RLlib: an env creator, and callbacks that keep what a crash cut short apart. Known to work with Ray 2.60."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium.vector import AutoresetMode
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.tune.registry import register_env

from envhub_client import make as making
from envhub_client.envs.single_env import HubEnv
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.frameworks.decided_options import refuse_decided

RESTART_WAIT_S = 30.0
SMOOTHED_EPISODES = 100


def env_creator(env_config: Mapping[str, Any]) -> HubEnv | HubVectorEnv:
    """Make what one of RLlib's env runners steps: one env, or with ``num_envs`` all of its envs as one vector env.

    RLlib adds ``num_envs`` by itself with ``gym_env_vectorize_mode="vector_entry_point"``, by which an env runner has
    one session. In its other modes each env is a session of its own, and the envs are stepped one after the other.

    Args:
        env_config: ``env``, and what else ``envhub.make_vec`` takes, such as ``hub``, ``num_workers``, ``step_timeout``
            and arguments for the env. ``autoreset_mode`` is not among them, for RLlib needs ``NEXT_STEP``.
            ``restart_wait`` is 30 s if it is not given: RLlib takes the row after a truncation for a reset, also
            where the env was truncated once more, because its restart took longer.

    Raises:
        TypeError: ``env_config`` has no ``env``, or has ``autoreset_mode``, or what neither ``envhub.make_vec`` nor the
            env takes.
        Exception: as for ``envhub.make_vec``.
    """
    refuse_decided(env_config, "RLlib", "autoreset_mode")
    arguments = {"restart_wait": RESTART_WAIT_S, **env_config}
    if "env" not in arguments:
        raise TypeError("env_config needs 'env', the id of the env to make, such as {'env': 'CartPole-v1'}")
    if "num_envs" not in arguments:
        return making.make(**arguments)
    return making.make_vec(autoreset_mode=AutoresetMode.NEXT_STEP, **arguments)


def register(name: str = "EnvHub") -> str:
    """Make ``env_creator`` known to every process of the Ray cluster; returns the name, for ``config.environment``."""
    register_env(name, env_creator)
    return name


class CutEpisodes(RLlibCallback):  # Ray has no types
    """Keeps episodes that a crash cut short apart; for ``config.callbacks(CutEpisodes)``.

    The row that reports the crash is no transition of the env's, and is taken out of the samples. RLlib itself counts
    every episode in ``episode_return_mean``. Beside it, in ``result["env_runners"]``, there are:

    - ``whole_episode_return_mean``, of the last 100 episodes of each env runner that no crash cut short;
    - ``num_cut_episodes``, how many were cut short between two results.
    """

    def on_episode_end(
        self,
        *,
        episode: SingleAgentEpisode,
        prev_episode_chunks: list[SingleAgentEpisode] | None = None,
        metrics_logger: Any = None,
        **kwargs: Any,
    ) -> None:
        """Count the episode where it belongs."""
        cut = _is_cut(episode)
        metrics_logger.log_value("num_cut_episodes", int(cut), reduce="sum")
        if not cut:
            whole = sum(chunk.get_return() for chunk in [*(prev_episode_chunks or ()), episode])
            metrics_logger.log_value("whole_episode_return_mean", whole, window=SMOOTHED_EPISODES)

    def on_sample_end(self, *, samples: list[SingleAgentEpisode], **kwargs: Any) -> None:
        """Take rows that are no transitions out of the samples."""
        samples[:] = [whole for episode in samples if (whole := _without_cut(episode)) is not None]


def _is_cut(episode: SingleAgentEpisode) -> bool:
    return bool(episode.is_truncated and episode.get_infos(-1).get("invalid_transition"))


def _without_cut(episode: SingleAgentEpisode) -> SingleAgentEpisode | None:
    """The episode without the row that reports a crash, None if nothing is left."""
    if not _is_cut(episode):
        return episode
    if len(episode) == 1:
        return None
    whole: SingleAgentEpisode = episode[:-1]
    whole.is_truncated = True  # it ends here, and its last observation has a value
    return whole.to_numpy() if episode.is_numpy else whole
