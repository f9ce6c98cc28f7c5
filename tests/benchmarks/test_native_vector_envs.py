"""How fast a vector env is stepped through a hub, beside the same one in the program itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hubs import serve
from turns import tell_ratios

import envhub

SECONDS = 1.0
POOL = {"task_id": "Pong-v5"}

pytestmark = pytest.mark.benchmark


def steps_of(envs: Any) -> Callable[[], float]:
    """Measures the steps of all envs, per second."""
    envs.reset()
    actions = np.zeros(envs.num_envs, np.int64)

    def rate() -> float:
        steps, began_s = 0, time.perf_counter()
        while (spent_s := time.perf_counter() - began_s) < SECONDS:
            envs.step(actions)
            steps += envs.num_envs
        return steps / spent_s

    return rate


def by_id(name: str, num_envs: int) -> Any:
    return gymnasium.make_vec(name, num_envs, vectorization_mode="vector_entry_point")


def pool(num_envs: int) -> Any:
    return pytest.importorskip("envpool").make_gymnasium(num_envs=num_envs, **POOL)


@pytest.mark.parametrize(
    ("name", "num_envs", "direct", "table", "arguments"),
    [
        ("ale_py:ALE/Pong-v5", 16, partial(by_id, "ale_py:ALE/Pong-v5"), '[envs."ale_py:ALE/Pong-v5"]', {}),
        ("pong", 16, pool, '[envs.pong]\nenv = "envpool:make_gymnasium"', POOL),
        ("CartPole-v1", 64, partial(by_id, "CartPole-v1"), '[envs."CartPole-v1"]', {}),
    ],
)
def test_vector_env_beside_direct_use(
    name: str, num_envs: int, direct: Any, table: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "hub.toml").write_text(f"{table}\nvector = true\n")
    options = ("--config", str(tmp_path / "hub.toml"))
    with ExitStack() as stack:
        hub = stack.enter_context(serve(tmp_path, *options, binds=["tcp://127.0.0.1:0", f"ipc://{tmp_path}/hub"]))
        ways = {"direct use": direct(num_envs)}
        for way, address, lane in (("shared lane", hub.ipc, "auto"), ("tcp", hub.tcp, "auto")):
            made = envhub.make_vec(name, num_envs, hub=address, lane=lane, env_kwargs=arguments)
            ways[way] = stack.enter_context(closing(made))
        assert ways["shared lane"].lane == "shared"
        rates = {way: steps_of(envs) for way, envs in ways.items()}
        targets = {"shared lane": 0.9, "tcp": 0.6} if num_envs == 16 else {"shared lane": 0.0, "tcp": 0.0}  # only told
        tell_ratios(f"vector env, {name}, {num_envs} envs", rates, "direct use", targets)
