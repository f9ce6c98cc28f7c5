"""TorchRL's collector over a hub, beside its own ``GymEnv`` of Gymnasium's worker processes.

``pytest -m benchmark -n 0 -s tests/benchmarks/test_frameworks_torchrl.py`` needs ``torchrl``. The ratios are printed
with their targets; they fail no test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hubs import serve
from turns import tell_ratios

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

NUM_ENVS, STEPS = 16, 200
TARGETS = {"private hub": 6.0, "private hub, one worker": 6.0, "tcp": 4.0, "tcp, one worker": 4.0}


def collection(env: Any, closing: list[Any]) -> Callable[[], float]:
    """A function that collects one batch, of random actions, and returns the env-steps per second."""
    from torchrl.collectors import Collector

    collector = Collector(env, None, frames_per_batch=STEPS * NUM_ENVS, total_frames=-1)
    closing.append(collector)
    batches = iter(collector)
    next(batches)

    def collect() -> float:
        start_s = time.perf_counter()
        next(batches)
        return STEPS * NUM_ENVS / (time.perf_counter() - start_s)

    return collect


def test_torchrl_collection(tmp_path: Path) -> None:
    envs = pytest.importorskip("torchrl.envs")
    import torch

    from envhub.torchrl import make_env

    torch.set_num_threads(1)
    collectors: list[Any] = []
    with serve(tmp_path, "CartPole-v1") as hub:
        places: dict[str, dict[str, Any]] = {"private hub": {}, "tcp": {"hub": hub.tcp, "lane": "wire"}}
        collections = {"GymEnv": collection(envs.GymEnv("CartPole-v1", num_envs=NUM_ENVS), collectors)}
        for way, options in places.items():
            for workers, count in {"": None, ", one worker": 1}.items():
                env = make_env("CartPole-v1", NUM_ENVS, num_workers=count, **options)
                collections[way + workers] = collection(env, collectors)
        tell_ratios(f"TorchRL collector, CartPole-v1, {NUM_ENVS} envs", collections, "GymEnv", TARGETS)
        for collector in collectors:
            collector.shutdown()
