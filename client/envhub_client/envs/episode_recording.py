"""The recording of a vector env's episodes in this program."""

from __future__ import annotations

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from envhub.errors import raised_by_env
from envhub.protocol.messages import Reset
from envhub.recording.options import Recorded, RecordOptions
from envhub.recording.program_recorder import ProgramRecorder
from envhub.values import spaces
from envhub_client.envs.batch_reader import StepReturn
from envhub_client.envs.origin import Origin
from envhub_client.envs.recoverable import environment
from envhub_client.envs.vector_env import HubVectorEnv, StepObserver

PACKAGES = ("envhub-rl", "gymnasium", "numpy", "minari")


class EpisodeRecording(StepObserver):
    """Writes the episodes of a vector env to disk."""

    def __init__(self, envs: HubVectorEnv, options: RecordOptions, origin: Origin) -> None:
        """Begin to record these envs, and have them refuse rewards with axes.

        Raises:
            UnsupportedSpace: a space has parts that are no arrays.
            ValueError: the options do not fit the envs, or these have a ``reward_space`` with axes.
            OSError: the folder cannot be written.
        """
        envs.refuse_reward_axes("a recording")
        if options.film and envs.render_mode != "rgb_array":
            raise ValueError(f'films need render_mode="rgb_array"; these envs have {envs.render_mode!r}')
        mode = envs.autoreset_mode.value
        env, arguments = origin.described()
        about = {
            "env": env,
            "kwargs": arguments,
            "hub": envs.address,
            "num_envs": envs.num_envs,
            "autoreset_mode": mode,
            "versions": _versions(),
        }
        self._options = options
        self._observation_space, self._action_space = envs.single_observation_space, envs.single_action_space
        self._flat_observations, self._flat_actions = map(spaces.is_flat, (self._observation_space, self._action_space))
        spaces_of_one = self._observation_space, self._action_space
        self._recorder = ProgramRecorder(options, envs.num_envs, spaces_of_one, mode, about, _spec(envs), envs.metadata)

    @property
    def recorded(self) -> Recorded:
        """Counts of what is recorded so far, and what was dropped."""
        return self._recorder.recorded

    def check_partial_batches(self) -> None:
        """Refuse partial batches.

        Raises:
            ValueError: always.
        """
        raise ValueError("parts of a batch are not recorded: step all envs, or make the envs without record=")

    def step_begun(self, actions: Any) -> None:
        """Record the actions."""
        self._recorder.acted([actions] if self._flat_actions else spaces.flatten(self._action_space, actions))

    def step_ended(self, envs: HubVectorEnv, result: StepReturn) -> None:
        """Record the result of a step."""
        observations, rewards, *flags, infos = result
        leaves = [observations] if self._flat_observations else spaces.flatten(self._observation_space, observations)
        self._recorder.stepped(leaves, [rewards, *flags], infos)
        if self._options.film:
            self._add_frames(envs)

    def reset_ended(self, envs: HubVectorEnv, reset: Reset, observations: Any) -> None:
        """Record the first observations of episodes."""
        frame: tuple[int, ...] = ()
        if self._options.film and not self._recorder.opened:
            frame = np.shape(envs.render([*self._options.film][:1])[0])
        mask = np.array(reset.mask) if reset.mask else None
        self._recorder.reset(mask, reset.seeds, spaces.flatten(self._observation_space, observations), frame)
        self._add_frames(envs)

    def _add_frames(self, envs: HubVectorEnv) -> None:
        if due := self._recorder.frames_due:
            self._recorder.add_frames(envs.render(due))

    def broken_off(self, error: BaseException | None) -> None:
        """End the episodes: the envs may have moved unseen."""
        raised = None if error is None else raised_by_env(error)
        why = "" if error is None else f"exception: {error!r}"
        self._recorder.broke_off(None if raised is None else raised.env_index, why)

    def close(self) -> None:
        """Write everything that is complete."""
        self._recorder.close()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # of a source tree that is not installed
            versions[name] = version(name)
    return versions


def _spec(envs: HubVectorEnv) -> str:
    """The spec that makes one of the envs again, in JSON; empty if nothing that can be written down makes it."""
    try:
        spec = environment(envs)
        return "" if spec is None else str(spec.to_json())
    except (TypeError, ValueError):
        return ""
