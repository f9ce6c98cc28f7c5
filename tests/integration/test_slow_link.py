"""Observations that come compressed are those of the same envs uncompressed."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hubs import ServedHub
from same import assert_same

import envhub
from envhub.values import compression as methods


@pytest.mark.long
@pytest.mark.parametrize("compression", methods.METHODS)
@pytest.mark.parametrize("copy", [True, False])
def test_compressed_observations_are_the_same(hub: ServedHub, compression: str, copy: bool) -> None:
    kwargs: dict[str, Any] = {"hub": hub.tcp, "copy": copy}
    with (
        closing(envhub.make_vec("ALE/Pong-v5", 2, compression=compression, **kwargs)) as envs,
        closing(envhub.make_vec("ALE/Pong-v5", 2, **kwargs)) as others,
    ):
        assert_same(envs.reset(seed=3), others.reset(seed=3), "reset")
        others.action_space.seed(1)
        for number in range(20):
            actions = others.action_space.sample()
            assert_same(envs.step(actions), others.step(actions), f"step {number}")
        for each in (envs, others):
            each.send(np.array([1]), [1])
        assert_same(envs.recv(), others.recv(), "part")


def test_auto_leaves_this_machine_alone(hub: ServedHub) -> None:
    with closing(envhub.make_vec("counter", 2, hub=hub.tcp, compression="auto")) as envs:
        envs.reset()
        assert envs.compression == ""


def test_auto_takes_what_both_sides_have(hub: ServedHub, monkeypatch: pytest.MonkeyPatch) -> None:
    address = hub.tcp.replace("127.0.0.1", "0.0.0.0")  # not known to be this machine
    with closing(envhub.make_vec("counter", 2, hub=address, compression="auto")) as envs:
        assert envs.compression == "lz4"
        envs.reset()
        assert envs.step([1, 1])[0][:, 0].tolist() == [1, 1]


def test_library_that_is_missing_here_is_named(hub: ServedHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lz4.block", None)
    with pytest.raises(envhub.RequestRefused, match=r"this client lacks .*envhub-rl\[compression\]"):
        envhub.make_vec("counter", 2, hub=hub.tcp, compression="lz4")


def test_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="compression must be"):
        envhub.make_vec("CartPole-v1", 2, compression="zip")
