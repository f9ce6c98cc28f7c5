"""Whether an env belongs to a package whose envs compute in their own process and never wait."""

from __future__ import annotations

from typing import Any

# Top-level packages of envs and wrappers. Any other env may be a simulator behind a socket, on a GPU, or a robot.
IN_PROCESS = frozenset(
    [
        *("gymnasium", "gym", "ale_py", "stable_baselines3", "supersuit"),
        *("minigrid", "gymnasium_robotics", "mo_gymnasium", "metaworld", "highway_env", "procgen", "crafter"),
        *("nle", "minihack", "bsuite", "dm_control", "shimmy", "envhub_server"),
    ]
)
LAYERS_MAX = 100


def computes_in_process(env: Any, runner: Any) -> bool:
    """Whether the env, each wrapper around it and the class of its runner are of known packages.

    An env with ``render_mode="human"`` does not count: it waits for the screen.
    """
    if getattr(env, "render_mode", None) == "human":
        return False
    kinds = [runner]
    while env is not None and len(kinds) < LAYERS_MAX:
        kinds.append(type(env))
        env = getattr(env, "__dict__", {}).get("env")
    return all(kind.__module__.partition(".")[0] in IN_PROCESS for kind in kinds)
