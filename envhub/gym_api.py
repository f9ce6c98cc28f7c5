"""Gymnasium under one name: itself, or, in an old interpreter that has none, its ancestor gym."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def _imported() -> Any:
    try:
        return import_module("gymnasium")
    except ModuleNotFoundError:
        return import_module("gym")


api = _imported()


def registered() -> list[str]:
    """Every id that can be made."""
    registry = api.envs.registration.registry
    return sorted(getattr(registry, "env_specs", registry))
