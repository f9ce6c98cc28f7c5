"""OpenEnv as a rival: a web server in one process that hosts the envs, and a websocket to each of them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np

from side_by_side.arrays import only_arrays
from side_by_side.entrant import SEED, Entrant, Task, cycled, factory
from side_by_side.peer import announce, peer


@contextlib.contextmanager
def clients(task: Task) -> Iterator[Entrant]:
    """A client for each env, all of which step at the same time."""
    generic_client: Any = importlib.import_module("openenv.core.generic_client")
    only_arrays(task)
    with (
        peer(__name__, "serve", task.entry, task.num_envs) as address,
        contextlib.closing(asyncio.new_event_loop()) as loop,
    ):
        opened = [generic_client.GenericEnvClient(address) for _ in range(task.num_envs)]
        try:
            loop.run_until_complete(_reset(opened))
            step = cycled(lambda actions: loop.run_until_complete(_step(opened, actions)), task.batches)
            yield Entrant(step, task.num_envs, 1)
        finally:
            loop.run_until_complete(_close(opened))


async def _reset(opened: list[Any]) -> None:
    for row, client in enumerate(opened):  # one by one: the server makes an env for each
        await client.connect()
        await client.reset(seed=SEED + row)


async def _step(opened: list[Any], actions: Any) -> tuple[np.ndarray, np.ndarray]:
    """The envs' observations and rewards; an env whose episode has ended is reset."""
    steps = zip(opened, actions.tolist(), strict=True)
    results = await asyncio.gather(*(client.step({"value": action}) for client, action in steps))
    observations = np.array([result.observation["value"] for result in results])
    await asyncio.gather(*(client.reset() for client, result in zip(opened, results, strict=True) if result.done))
    return observations, np.array([result.reward for result in results])


async def _close(opened: list[Any]) -> None:
    await asyncio.gather(*(client.close() for client in opened))


def serve(env: str, num_envs: int) -> None:
    """Be the server: print its address, then host an env for each of up to ``num_envs`` clients, until stdin ends."""
    http_server: Any = importlib.import_module("openenv.core.env_server.http_server")
    uvicorn: Any = importlib.import_module("uvicorn")
    hosted, action, observation = _hosted(env)
    app = http_server.create_fastapi_app(hosted, action, observation, max_concurrent_envs=num_envs)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0), backlog=num_envs) as listener:
        announce(f"http://127.0.0.1:{listener.getsockname()[1]}")
        server.run([listener])


def _hosted(name: str) -> tuple[Any, Any, Any]:
    """OpenEnv's classes for this env: the environment, its action, its observation."""
    pydantic: Any = importlib.import_module("pydantic")
    interfaces: Any = importlib.import_module("openenv.core.env_server.interfaces")
    types: Any = importlib.import_module("openenv.core.env_server.types")
    action = pydantic.create_model("EnvAction", __base__=types.Action, value=(Any, ...))
    observation = pydantic.create_model("EnvObservation", __base__=types.Observation, value=(Any, ...))

    class Hosted(interfaces.Environment):  # type: ignore[misc]
        """One env."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._env = factory(name)()
            self._dtype = self._env.action_space.dtype

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
            observed, _ = self._env.reset(seed=seed)
            return observation(value=np.asarray(observed).tolist())

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            observed, reward, terminated, truncated, _ = self._env.step(np.asarray(action.value, self._dtype))
            done = bool(terminated or truncated)
            return observation(value=np.asarray(observed).tolist(), reward=float(reward), done=done)

        @property
        def state(self) -> Any:
            return types.State()

        def close(self) -> None:
            self._env.close()

    return Hosted, action, observation
