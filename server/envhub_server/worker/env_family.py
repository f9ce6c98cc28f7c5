"""Whether an env is of a package whose envs may share a process: they compute there, and keep nothing per process."""

from __future__ import annotations

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
LAYERS_MAX = 100


def may_share_process(env: Any, runner: Any) -> bool:
    """Whether the env, each wrapper around it and the class of its runner are of known packages.

    An env with ``render_mode="human"`` does not count: it waits for the screen.
    """
    if getattr(env, "render_mode", None) == "human":
        return False
    kinds = [runner]
    while env is not None and len(kinds) < LAYERS_MAX:
        kinds.append(type(env))
        env = getattr(env, "__dict__", {}).get("env")
    return all(kind.__module__.partition(".")[0] in FIT for kind in kinds)
