"""PyTorch is imported once for all workers of envs that use it."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest

import envhub

NUM_ENVS = 4
OWN_BYTES_MAX = 50 << 20  # of a worker that has PyTorch from the first; an import of its own takes 150 MB
SIM = """
import os
import gymnasium as gym, numpy as np, pandas, sympy, torch

IMPORTED_BY = os.getpid()

class Sim(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(3)
    imported_by = IMPORTED_BY
    def reset(self, *, seed=None, options=None):
        self.drawn = torch.rand(2)
        return self.drawn.numpy(), {}
    def step(self, action): return torch.tanh(self.drawn).numpy(), 0.0, False, False, {}
    def pid(self): return os.getpid()
"""


def test_envs_that_use_torch_share_it_but_no_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_sim.py").write_text(SIM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_sim", raising=False)
    import torch_sim

    with closing(envhub.AsyncVectorEnv([torch_sim.Sim] * NUM_ENVS, num_workers=NUM_ENVS)) as envs:
        assert len(set(envs.get_attr("imported_by"))) == 1
        observations, _ = envs.reset()
        assert len({tuple(each) for each in observations.tolist()}) == NUM_ENVS
        assert np.allclose(envs.step([0] * NUM_ENVS)[0], np.tanh(observations))
        others = [psutil.Process(pid).memory_full_info().uss for pid in envs.call("pid")]
    assert max(others) < OWN_BYTES_MAX, others
