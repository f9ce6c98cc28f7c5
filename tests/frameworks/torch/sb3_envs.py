"""Envs that a hub serves to SB3."""

from __future__ import annotations

from typing import Any

import gymnasium
from stable_baselines3.common.monitor import Monitor


def monitored() -> gymnasium.Env[Any, Any]:
    return Monitor(gymnasium.make("CartPole-v1"))
