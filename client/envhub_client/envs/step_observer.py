"""The interface of what watches a vector env's steps in the trainer's program."""

from __future__ import annotations

from typing import Any

import numpy as np

from envhub.protocol.messages import Reset
from envhub_client.envs.callable_vector_env import CallableVectorEnv

StepReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any]]


class StepObserver:
    """Sees every reset and step of a vector env as the trainer does, in the thread that makes it.

    ``HubVectorEnv.add_observer`` attaches one. Each method does nothing unless a subclass defines it. It may call and
    render the envs, and does not step them. An error of its own is raised to the trainer; the reset or step counts as
    broken off then.
    """

    def check_partial_batches(self) -> None:
        """Check that it can follow ``send``, ``recv`` and ``async_reset``, whose steps and results it does not see.

        Raises:
            ValueError: it cannot, and says what to do instead.
        """

    def step_begun(self, actions: Any) -> None:
        """Note that a step with these actions, which are not modified, has begun."""

    def step_ended(self, envs: CallableVectorEnv, result: StepReturn) -> None:
        """Note the result of the step, as it is returned; its infos may be by env."""

    def reset_ended(self, envs: CallableVectorEnv, reset: Reset, observations: Any) -> None:
        """Note what the reset shows, as it is returned; ``reset.mask`` has the envs that were reset, empty for all."""

    def broken_off(self, error: BaseException | None) -> None:
        """Note that a reset or step that was begun has no result, by this error, or because its caller dropped it."""

    def close(self) -> None:
        """Note that nothing more comes; may be called again."""
