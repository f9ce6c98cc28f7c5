"""Packages whose envs may share a process: they only compute, and keep no state per process."""

from __future__ import annotations

import functools
from typing import Any

# Top-level packages of envs and wrappers. Any other env may draw from the random numbers of its process, be a simulator
# of which a process can have one, stand behind a socket, on a GPU, or be a robot.
FIT = frozenset(
    [
        *("gymnasium", "gym", "ale_py", "stable_baselines3", "supersuit"),
        *("minigrid", "gymnasium_robotics", "mo_gymnasium", "highway_env", "procgen", "crafter"),
        *("nle", "minihack", "bsuite", "dm_control", "envhub_server"),
    ]
)
# Packages of parts of these envs.
_HARMLESS = frozenset(
    [
        *("builtins", "numpy", "collections", "pathlib", "types", "typing", "enum", "logging", "os", "io", "_thread"),
        *("mujoco", "Box2D", "pygame", "cv2", "PIL", "scipy", "jax", "jaxlib"),
    ]
)
# Modules of envs of which a step takes some 20 microseconds.
CHEAP = tuple(
    f"{package}.envs.{family}" for package in ("gymnasium", "gym") for family in ("classic_control", "toy_text")
)
LAYERS_MAX = 100


def may_share_process(env: Any, runner: Any) -> bool:
    """True if the env, its wrappers, the objects that they hold, and its runner's class are of known packages.

    A wrapper may hold a function of the program, and an env its task. An env with ``render_mode="human"`` does not
    count: it waits for the screen.
    """
    if getattr(env, "render_mode", None) == "human":
        return False
    layers: list[Any] = [runner]
    parts: list[Any] = []
    while env is not None and len(layers) < LAYERS_MAX:
        held = getattr(env, "__dict__", {})
        layers.append(type(env))
        parts += map(_made_by, held.values())
        env = held.get("env")
    return all(_package(each) in FIT for each in layers) and all(_package(each) in FIT | _HARMLESS for each in parts)


def is_cheap(env: Any) -> bool:
    """True if a step of the env takes less than the wake-up of a worker, and a CPU of the driver is worth more."""
    return type(getattr(env, "unwrapped", env)).__module__.startswith(CHEAP)


def _made_by(value: Any) -> Any:
    """The object whose package counts for a value: a function itself, or the function of a partial."""
    if isinstance(value, functools.partial):
        return _made_by(value.func)
    return value if callable(value) else type(value)


def _package(kind: Any) -> str:
    module = getattr(kind, "__module__", None) or type(kind).__module__
    return str(module).partition(".")[0]
