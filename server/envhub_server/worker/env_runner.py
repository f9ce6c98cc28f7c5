"""How a worker runs one env: the class to extend where a step or a reset must do something else."""

from __future__ import annotations

import inspect
from typing import Any


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
        given = {"seed": seed, "options": options}
        if seed is None or options is None:
            named = _named(self.env)
            given = {name: value for name, value in given.items() if value is not None or name in named}
        found: tuple[Any, dict[str, Any]] = self.env.reset(**given)
        return found

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the env; returns what ``gymnasium.Env.step`` returns."""
        found: tuple[Any, Any, Any, Any, dict[str, Any]] = self.env.step(action)
        return found

    def autoreset(self) -> tuple[Any, dict[str, Any]]:
        """Reset the env because its episode ended and the autoreset mode is next-step or same-step."""
        found: tuple[Any, dict[str, Any]] = self.env.reset()
        return found


def _named(env: Any) -> set[str]:
    """Which of ``seed`` and ``options`` its ``reset`` takes, or those of the envs to which it hands all on."""
    wanted = {"seed", "options"}
    while env is not None:
        try:
            parameters = inspect.signature(env.reset).parameters
        except (TypeError, ValueError):  # it has no signature, as some of C
            return wanted
        inner = vars(env).get("env") if hasattr(env, "__dict__") else None
        if inner is None or not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            hands_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            return wanted if hands_on else wanted & set(parameters)
        env = inner
    return wanted
