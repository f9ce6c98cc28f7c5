"""PyTorch and what builds on it are imported once for all workers of envs that use them."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import traces
from envhub_server.config import usable_cpus

import envhub

CPUS = usable_cpus()
NUM_ENVS = 2 * CPUS + 1
OWN_BYTES_MAX = 50 << 20  # of a worker that has PyTorch from the zygote; an import of its own takes 150 MB
SIM = """
import os, sys
import gymnasium as gym, numpy as np
SHARED = "torch" in sys.modules
import torch

class Sim(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(3)
    shared = SHARED
    def reset(self, *, seed=None, options=None):
        self.drawn = torch.rand(2)
        return self.drawn.numpy(), {}
    def step(self, action): return torch.tanh(self.drawn).numpy(), 0.0, False, False, {}
    def pid(self): return os.getpid()
"""


def test_importing_a_shared_library_leaves_nothing_that_envs_must_not_share() -> None:
    found = traces.of_shared_libraries()
    assert {"torch", "sympy", "pandas"} <= found.keys() and not any(found.values()), found


def test_envs_that_use_torch_share_it_but_no_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_sim.py").write_text(SIM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_sim", raising=False)
    import torch_sim

    with closing(envhub.AsyncVectorEnv([torch_sim.Sim] * NUM_ENVS)) as envs:
        assert list(envs.get_attr("shared")) == [row >= CPUS for row in range(NUM_ENVS)]
        observations, _ = envs.reset()
        assert len({tuple(each) for each in observations.tolist()}) == NUM_ENVS
        assert np.allclose(envs.step([0] * NUM_ENVS)[0], np.tanh(observations))
        others = [psutil.Process(pid).memory_full_info().uss for pid in envs.call("pid")[CPUS:]]
    assert max(others) < OWN_BYTES_MAX, others
