"""The seam between a vector env and what watches its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from envhub.protocol.messages import Reset

if TYPE_CHECKING:
    from envhub_client.envs.vector_env import HubVectorEnv

StepReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[Any, Any]]


class StepObserver(Protocol):
    """Sees every reset and step of a vector env as the trainer does, in the thread that makes it.

    It may render the envs, and does not step them. An error of its own is raised to the trainer; the reset or step
    counts as broken off then. A subclass of ``HubVectorEnv`` has it in ``_observers``, as ``RecordedVectorEnv``.
    """

    def check_parts(self) -> None:
        """Check that it can follow a batch whose envs step by parts.

        Raises:
            ValueError: it cannot, and says what to do instead.
        """

    def step_begun(self, actions: Any) -> None:
        """Note that a step with these actions, which are not modified, has begun."""

    def step_ended(self, envs: HubVectorEnv, result: StepReturn) -> None:
        """Note the result of the step, as it is returned; its infos may be by env."""

    def reset_ended(self, envs: HubVectorEnv, reset: Reset, observations: Any) -> None:
        """Note what the reset shows, as it is returned."""

    def broken_off(self, error: BaseException | None) -> None:
        """Note that a reset or step that was begun has no result, by this error, or because its caller dropped it."""

    def close(self) -> None:
        """Note that nothing more comes; may be called again."""
