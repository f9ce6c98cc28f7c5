"""The envs of tianshou's experiment builders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
from tianshou.highlevel.env import EnvFactory, EnvMode, VectorEnvType
from typing_extensions import Unpack

from envhub_client.frameworks.by_value import by_value
from envhub_client.frameworks.tianshou import TianshouVectorEnv
from envhub_client.make import make
from envhub_client.option_keywords import MakeKeywords


class HubEnvFactory(EnvFactory):
    """An ``EnvFactory`` for the experiment builders of ``tianshou.highlevel``: all envs live in a hub.

    Seeds are those of ``EnvFactoryRegistered``, and so are results.
    """

    def __init__(
        self,
        task: str | Callable[[], gymnasium.Env[Any, Any]],
        *,
        render_mode_training: str | None = None,
        render_mode_test: str | None = None,
        render_mode_watch: str | None = "human",
        **options: Unpack[MakeKeywords],
    ) -> None:
        """Say what is to be made.

        Args:
            task: an id, or a factory, which takes no render mode.
            render_mode_training: of the envs to train with.
            render_mode_test: of the envs to test with.
            render_mode_watch: of the env to watch; ``"human"`` opens a window where the hub is.
            **options: keywords of ``envhub.make_vec``, such as ``hub`` and ``num_workers``, and arguments for the env.
        """
        super().__init__(VectorEnvType.SUBPROC)  # which is not used: ``create_venv`` is our own
        self.task = task
        self.render_modes = {
            EnvMode.TRAINING: render_mode_training,
            EnvMode.TEST: render_mode_test,
            EnvMode.WATCH: render_mode_watch,
        }
        self.options = options

    def _options(self, mode: EnvMode) -> dict[str, Any]:
        render_mode = self.render_modes[mode]
        return {**self.options, **({"render_mode": render_mode} if render_mode and isinstance(self.task, str) else {})}

    def _create_env(self, mode: EnvMode) -> gymnasium.Env[Any, Any]:
        options = {name: value for name, value in self._options(mode).items() if name != "num_workers"}
        with by_value(self.task, "tianshou"):
            return make(self.task, **options)

    def create_env(self, mode: EnvMode, seed: int | None = None) -> gymnasium.Env[Any, Any]:
        """One env, reset with the seed if there is one; errors as for ``envhub.make``."""
        env = self._create_env(mode)
        if seed is not None:
            env.reset(seed=seed)
        return env

    def create_venv(self, num_envs: int, mode: EnvMode, seed: int | None = None) -> TianshouVectorEnv:
        """A vector env of ``num_envs`` envs, of one to watch; errors as for ``TianshouVectorEnv``."""
        num_envs = 1 if mode is EnvMode.WATCH else num_envs
        rng = self._create_rng(seed)
        for _ in range(num_envs):  # tianshou draws a seed for each factory, which the ones after them replace
            self._next_seed(rng)
        envs = TianshouVectorEnv(self.task, num_envs, **self._options(mode))
        envs.seed([self._next_seed(rng) for _ in range(num_envs)])
        return envs
