"""Minari: the episodes of a vector env as a data set. Known to work with Minari 0.5.4."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import iterate
from minari import MinariDataset, create_dataset_from_buffers
from minari.data_collector import EpisodeBuffer

from envhub.values.spaces import assemble, flatten
from envhub_client.envs.arguments import seeds_of
from envhub_client.envs.batch_reader import StepReturn
from envhub_client.envs.recoverable import environment
from envhub_client.envs.vector_env import HubVectorEnv, Options
from envhub_client.frameworks.cleanrl import LegacyInfos


def record(envs: HubVectorEnv | VectorWrapper[Any, Any, Any, Any, Any], dataset_id: str, **kwargs: Any) -> Recorder:
    """Record the episodes of ``envs`` into a new Minari data set.

        with envhub.minari.record(envhub.make_vec("CartPole-v1", 8), "cartpole/random-v0") as envs:
            observations, infos = envs.reset(seed=1)
            ...
        dataset = envs.dataset

    Args:
        envs: a ``HubVectorEnv``, or wrappers around it, what they show being what is recorded. Owned by the recorder.
        dataset_id: the data set's name, ``(namespace/)name-vN``; there is none of this name yet.
        **kwargs: for ``minari.create_dataset_from_buffers``, such as ``algorithm_name``, ``author`` and
            ``description``. Without ``env``, the data set recovers what ``environment`` says. Without
            ``jpeg_encoding``, images are kept bit for bit.

    Raises:
        TypeError: it is another vector env.
        ValueError: there is a data set of this name, or the infos of ``envs`` are by env.
        Exception: what ``create_dataset_from_buffers`` raises.
    """
    return Recorder(envs, dataset_id, **kwargs)


class Recorder(VectorWrapper[Any, Any, Any, Any, Any]):
    """A vector env whose episodes are recorded; a context manager, whose end closes the envs.

    Each episode is written when it has ended, so that no more is held in memory than the episodes under way. One that a
    ``reset``, or the end, cuts short is marked as truncated, as Minari's ``DataCollector`` does it, and so is one that
    an error or Ctrl-C cuts short, after which the next whole episode is recorded. One that a crash cuts
    short is left out, and counted in ``left_out``. Infos are not recorded. Parts of a batch (``send``, ``recv``)
    are not offered.

    Attributes:
        dataset: the ``MinariDataset``, with the episodes that have been written.
        left_out: how many episodes were left out, because a crash cut them short.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], dataset_id: str, **kwargs: Any) -> None:
        """Make an empty data set; arguments and errors as for ``record``."""
        super().__init__(envs)
        if not isinstance(envs.unwrapped, HubVectorEnv):
            raise TypeError(f"what is recorded is a HubVectorEnv, or wrappers around one, and not {envs!r}")
        if _info_mode(envs) != "batched":
            raise ValueError('a recorder reads batched infos, and these envs have info_mode="by_env"')
        self.left_out = 0
        self._mode = envs.metadata["autoreset_mode"]
        self._episodes: list[_Episode | None] = [None] * envs.num_envs
        self._missed = np.zeros(envs.num_envs, bool)  # envs of whose episode a step is missing
        spaces = {"observation_space": envs.single_observation_space, "action_space": envs.single_action_space}
        settings = {"env": environment(envs), "jpeg_encoding": False, **spaces, **kwargs}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"`\w+` is set to None", category=UserWarning)
            self.dataset: MinariDataset = create_dataset_from_buffers(dataset_id, [], **settings)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset every env, or those of ``options["reset_mask"]``; as ``HubVectorEnv.reset``."""
        mask = options.get("reset_mask") if isinstance(options, dict) else None
        try:
            observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        except BaseException:
            self._break_off()
            raise
        rows = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        seeds = seeds_of(seed, self.num_envs)
        self._write(self._take(row) for row in rows)
        shown = [*iterate(self.observation_space, observations)]
        for row in rows:
            self._missed[row] = False
            self._episodes[row] = _Episode(shown[row], seeds[row] if seeds else None)
        return observations, infos

    def step(self, actions: Any) -> StepReturn:
        """Step every env; as ``HubVectorEnv.step``."""
        taken = [
            copy.deepcopy(action) for action in iterate(self.action_space, actions)
        ]  # before an env can change them
        try:
            result: StepReturn = self.env.step(actions)
        except BaseException:
            self._break_off()
            raise
        observations, rewards, terminations, truncations, infos = result
        shown = [*iterate(self.observation_space, observations)]
        invalid, ended = infos.get("invalid_transition", np.zeros(self.num_envs, bool)), terminations | truncations
        finals: Any = infos.get("final_obs", infos.get("final_observation"))  # the second of ``legacy_infos``
        whole: list[_Episode | None] = []
        for row, episode in enumerate(self._episodes):
            if invalid[row]:
                self.left_out += episode is not None and len(episode.rewards) > 0
                self._episodes[row], self._missed[row] = None, False
                # The next step that is no truncation shows the reset.
            elif self._missed[row]:
                self._missed[row] = not ended[row]
                if ended[row] and self._mode is AutoresetMode.SAME_STEP:
                    self._episodes[row] = _Episode(shown[row])
            elif episode is None:
                if self._mode is not AutoresetMode.DISABLED:
                    self._episodes[row] = _Episode(shown[row])
            else:
                same_step = ended[row] and self._mode is AutoresetMode.SAME_STEP
                last = finals[row] if same_step else shown[row]
                episode.add(taken[row], last, rewards[row], terminations[row], truncations[row])
                if ended[row]:
                    whole.append(episode)
                    self._episodes[row] = _Episode(shown[row]) if same_step else None
        self._write(whole)
        return result

    def close(self, **kwargs: Any) -> None:
        """Write the episodes under way, and close the envs."""
        self._write(self._take(row) for row in range(self.num_envs))
        super().close(**kwargs)

    def __enter__(self) -> Recorder:
        """Give the recorder itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""
        self.close()

    def _break_off(self) -> None:
        """End every episode here: after an error, or Ctrl-C, envs may have moved unseen."""
        self._write(self._take(row) for row in range(self.num_envs))
        self._missed.fill(True)

    def _take(self, row: int) -> _Episode | None:
        episode, self._episodes[row] = self._episodes[row], None
        return episode

    def _write(self, episodes: Iterable[_Episode | None]) -> None:
        spaces = self.single_observation_space, self.single_action_space
        buffers = [episode.buffer(*spaces) for episode in episodes if episode is not None and episode.rewards]
        if buffers:
            self.dataset.update_dataset_from_buffer(buffers)


def _info_mode(envs: VectorEnv[Any, Any, Any]) -> str:
    """The form of the infos that ``envs`` return."""
    while isinstance(envs, VectorWrapper) and not isinstance(envs, LegacyInfos):
        envs = envs.env
    return envs.info_mode if isinstance(envs, HubVectorEnv) else "batched"


class _Episode:
    """One episode so far."""

    def __init__(self, observation: Any, seed: int | None = None) -> None:
        self.seed = seed
        self.observations = [copy.deepcopy(observation)]  # a view would keep the whole batch
        self.actions: list[Any] = []
        self.rewards: list[float] = []
        self.terminations: list[bool] = []
        self.truncations: list[bool] = []

    def add(self, action: Any, observation: Any, reward: float, terminated: bool, truncated: bool) -> None:
        self.actions.append(action)
        self.observations.append(copy.deepcopy(observation))
        self.rewards.append(reward)
        self.terminations.append(terminated)
        self.truncations.append(truncated)

    def buffer(self, observation_space: Space[Any], action_space: Space[Any]) -> EpisodeBuffer:
        self.truncations[-1] |= not self.terminations[-1]
        return EpisodeBuffer(
            seed=self.seed,
            observations=_columns(observation_space, self.observations),
            actions=_columns(action_space, self.actions),
            rewards=self.rewards,
            terminations=self.terminations,
            truncations=self.truncations,
        )


def _columns(space: Space[Any], elements: list[Any]) -> Any:
    """Elements of ``space``, one at least, as Minari keeps them: a list for each leaf."""
    return assemble(space, map(list, zip(*(flatten(space, each) for each in elements), strict=True)))
