"""RLMesh's remote vector env as one of the ways: its server over loopback tcp, in a process of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import cloudpickle
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import batch_space

from side_by_side.echo import announce, peer


def lanes(makes: list[Callable[[], Any]]) -> list[Any]:
    """Envs that the server steps by itself, each on its own; none of them is reset when its episode has ended."""
    return [make() for make in makes]


class RemoteEnvs:
    """Envs behind RLMesh's server, which steps them by a ``SyncVectorEnv``, an ``AsyncVectorEnv``, or as ``lanes``."""

    def __init__(self, make: Callable[[], Any], num_envs: int, vector: Callable[..., Any] = SyncVectorEnv) -> None:
        self.num_envs, self.num_workers = num_envs, num_envs if vector is AsyncVectorEnv else 1
        with closing(make()) as env:
            self.action_space = batch_space(env.action_space, num_envs)
        served = cloudpickle.dumps((make, num_envs, vector)).hex()
        with ExitStack() as stack:
            address = stack.enter_context(peer(f"from {__name__} import serve; serve({served!r})", quiet=True))
            client: Any = importlib.import_module("rlmesh.numpy")
            self._remote = (client.RemoteVectorEnv if num_envs > 1 else client.RemoteEnv)(address)
            stack.callback(self._remote.close)
            self.close = stack.pop_all().close

    def reset(self, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        if options and "reset_mask" in options:
            raise NotImplementedError("RLMesh sends no mask as an array")
        seeds = [seed + number for number in range(self.num_envs)] if isinstance(seed, int) else seed
        return self._remote.reset(seed=seeds if self.num_envs > 1 or not seeds else seeds[0], options=options)

    def step(self, actions: Any) -> Any:
        if self.num_envs > 1:
            return self._remote.step(actions)
        results = self._remote.step(actions[0])
        if results[2] or results[3]:  # a single env is not reset by itself
            self._remote.reset()
        return results

    def render(self) -> list[Any]:
        return [self._remote.render(env_index=number) for number in range(self.num_envs)]


def serve(served: str) -> None:
    make, num_envs, vector = cloudpickle.loads(bytes.fromhex(served))
    package: Any = importlib.import_module("rlmesh")
    server = package.EnvServer(vector([make] * num_envs) if num_envs > 1 else make(), "127.0.0.1:0")
    announce(server.address)
    server.serve()
