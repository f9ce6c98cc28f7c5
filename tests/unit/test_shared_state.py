"""What envs of one process change of what they share."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
from envhub_server.ipc.control import SHARED
from envhub_server.worker.shared_process import SharedState


def test_each_change_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changes = [
        lambda: np.random.random(),
        lambda: random.random(),
        lambda: monkeypatch.setenv("ENVHUB_TEST_SHARED", "1"),
        lambda: monkeypatch.chdir(tmp_path),
    ]
    for name, change in zip(SHARED, changes, strict=True):
        state = SharedState()
        assert state.changed() == []
        change()
        assert state.changed() == [name]
    np.random.default_rng(3).random()
    random.Random(3).random()
    assert SharedState().changed() == [] and os.getcwd() == str(tmp_path)


def test_program_may_have_another_generator() -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        state = SharedState()
        assert state.changed() == []
        np.random.random()
        assert state.changed() == [SHARED[0]]
    finally:
        np.random.set_bit_generator(own)
