"""Steps envs by seeded actions, by a private hub and over tcp, each in two sessions, and compares them.

    python tests/frameworks/simulators minigrid:MiniGrid-DoorKey-5x5-v0    # by its id
    python tests/frameworks/simulators crafter_env                         # by a function of factories.py
    python tests/frameworks/simulators nle_score --python ~/nle            # in a Python of its own

The packages are those of server/docs/simulators.md, which says what to install. Envs of Gymnasium's interface are also
compared with ``SyncVectorEnv``, with ``--plain``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import factories
import gymnasium
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import SyncVectorEnv

import envhub

NUM_ENVS, STEPS, SEED = 2, 40, 7
# Of libraries that would draw on a screen.
VARIABLES = {
    "SDL_VIDEODRIVER": "dummy",
    "SDL_AUDIODRIVER": "dummy",
    "JAX_PLATFORMS": "cpu",
    "PYGLET_HEADLESS": "true",
    "MUJOCO_GL": "egl",
    "PYOPENGL_PLATFORM": "egl",
}


def stepped(envs: Any) -> list[Any]:
    """What a vector env gives, without infos; it is closed."""
    with contextlib.closing(envs):
        envs.action_space.seed(3)
        actions = [envs.action_space.sample() for _ in range(STEPS)]
        return [envs.reset(seed=SEED)[0], *(envs.step(action)[:4] for action in actions)]


def attempt(env: str, python: str | None, vector: bool, plain: bool) -> str:
    """The first way whose results differ from those of the first session; ``equal`` if none do."""
    by_id = ":" in env
    entry = env if by_id else f"tried=factories:{env}"
    options = ["--bind", "tcp://127.0.0.1:0", *(["--vector"] if vector else [])]
    options += ["--python", python] if python else []
    options += [part for name in VARIABLES for part in ("--worker-env", name)]
    private = partial(
        envhub.make_vec, env if by_id else f"factories:{env}", NUM_ENVS, python=python, vector=vector, copy=True
    )
    wanted = stepped(private())
    with subprocess.Popen(
        [sys.executable, "-m", "envhub", "serve", entry, *options], stdout=subprocess.PIPE, text=True
    ) as hub:
        try:
            assert hub.stdout is not None
            address = hub.stdout.readline().split()[-1]
            served = partial(envhub.make_vec, env.partition(":")[2] if by_id else "tried", NUM_ENVS, hub=address)
            ways = {"private again": private, "tcp": served, "tcp again": served}
            if plain:
                make = partial(gymnasium.make, env) if by_id else getattr(factories, env)
                ways["plain loop"] = partial(SyncVectorEnv, [make] * NUM_ENVS)
            differing = [way for way, make in ways.items() if not data_equivalence(stepped(make()), wanted, exact=True)]
        finally:
            hub.terminate()
    return f"differs: {', '.join(differing)}" if differing else "equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("envs", nargs="+", help="ids with their modules, module:Id-v0, or functions of factories.py")
    parser.add_argument("--python", help="the Python that the package needs, in which EnvHub is not installed")
    parser.add_argument("--vector", action="store_true", help="these are vector envs")
    parser.add_argument("--plain", action="store_true", help="compare with SyncVectorEnv, too")
    told = parser.parse_args()
    os.environ.update(VARIABLES)
    os.chdir(Path(__file__).parent)  # where the hub and its workers find the factories
    for env in told.envs:
        try:
            print(f"{env}: {attempt(env, told.python, told.vector, told.plain)}", flush=True)
        except Exception as error:
            print(f"{env}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)


if __name__ == "__main__":
    main()
