"""How a worker runs one env: the class to extend where a step or a reset must do something else."""

from __future__ import annotations

import inspect
from typing import Any, Callable


class EnvRunner:
    """Runs one env inside of a worker.

    ``envhub.AsyncVectorEnv(env_fns, worker=Mine)``, where ``Mine`` extends this class, or is named ``"module:Mine"``.
    The worker makes one for each env. The autoreset mode, not this class, decides when an env is reset without a
    request, and in which step the results arrive.

    Attributes:
        env: the env.
    """

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Reset the env because its user asked for it; returns what ``gymnasium.Env.reset`` returns."""
        found: tuple[Any, dict[str, Any]] = self.env.reset(**_taken(self.env.reset, seed=seed, options=options))
        return found

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the env; returns what ``gymnasium.Env.step`` returns."""
        found: tuple[Any, Any, Any, Any, dict[str, Any]] = self.env.step(action)
        return found

    def autoreset(self) -> tuple[Any, dict[str, Any]]:
        """Reset the env because its episode ended and the autoreset mode is next-step or same-step."""
        found: tuple[Any, dict[str, Any]] = self.env.reset()
        return found


def _taken(reset: Callable[..., Any], **given: Any) -> dict[str, Any]:
    """The arguments without those that are None and that the function does not name."""
    try:
        named = inspect.signature(reset).parameters
    except (TypeError, ValueError):  # it has no signature, as some of C
        return given
    return {name: value for name, value in given.items() if value is not None or name in named}
