"""Whether an env is of a family that is known to compute in its own process, and to wait for nobody."""

from __future__ import annotations

from typing import Any

# Top-level packages of envs and wrappers. What is not among them may be a simulator behind a socket, on a GPU, a robot.
IN_PROCESS = frozenset(
    [
        *("gymnasium", "gym", "ale_py", "stable_baselines3", "supersuit"),
        *("minigrid", "gymnasium_robotics", "mo_gymnasium", "metaworld", "highway_env", "procgen", "crafter"),
        *("nle", "minihack", "bsuite", "envhub_server"),
    ]
)


LAYERS_MAX = 100


def computes_in_process(env: Any, runner: Any) -> bool:
    """Whether all that makes a step is of known packages: the env, each wrapper around it, and the class of its runner.

    Whether it shows itself to a person counts, too: it keeps to their pace then.
    """
    if getattr(env, "render_mode", None) == "human":
        return False
    kinds = [runner]
    while env is not None and len(kinds) < LAYERS_MAX:
        kinds.append(type(env))
        env = getattr(env, "__dict__", {}).get("env")
    return all(kind.__module__.partition(".")[0] in IN_PROCESS for kind in kinds)
