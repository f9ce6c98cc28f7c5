"""The runner of one env in a worker: the class to extend to change a step or a reset."""

from __future__ import annotations

from typing import Any

from envhub_server.worker.gym_compat import accepts


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
        """Reset the env because its user asked for it; return the values of ``gymnasium.Env.reset``."""
        asked = {"seed": seed, "options": options}
        given = {name: value for name, value in asked.items() if value is not None or accepts(self.env, "reset", name)}
        outcome: tuple[Any, dict[str, Any]] = self.env.reset(**given)
        return outcome

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step the env; return the values of ``gymnasium.Env.step``."""
        outcome: tuple[Any, Any, Any, Any, dict[str, Any]] = self.env.step(action)
        return outcome

    def autoreset(self) -> tuple[Any, dict[str, Any]]:
        """Reset the env because its episode ended and the autoreset mode is next-step or same-step."""
        outcome: tuple[Any, dict[str, Any]] = self.env.reset()
        return outcome
