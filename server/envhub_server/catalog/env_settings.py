"""Settings of one environment by the operator."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from envhub.options import (
    Function,
    Gpu,
    Memory,
    Program,
    RecycleOptions,
    Spares,
    VariableName,
    VariableValue,
    check_distinct,
)
from envhub.protocol.messages import Hosting, Recycle
from envhub_server.processes.interpreter import InterpreterKey

RENDERING: tuple[Literal["egl"], Literal["osmesa"]] = ("egl", "osmesa")


@dataclass(frozen=True)
class EnvSettings:
    """The table ``[envs.NAME]`` of a hub's file; None and empty values are what the hub's options say.

    A field is a key of the table; its annotation says what is allowed. A recipe has the settings of its environment.

    Attributes:
        env: The env: a Gymnasium id, ``module:id``, or ``module:factory``, where a name of Python follows the colon.
            Without it the table's name, which then may be a pattern of ids.
        python: The interpreter: a program, a virtual environment or a conda prefix; without it that of the hub.
        variables: Variables of the workers' environment, in place of the hub's of these names.
        ld_library_path: The folders in which libraries are looked for, in place of the hub's ``LD_LIBRARY_PATH``.
        folder: The workers' working directory, from which they import what is not installed; without it the hub's.
        rendering: The way to draw frames without a screen: the value of ``MUJOCO_GL`` and ``PYOPENGL_PLATFORM``.
            Without it what the hub says, or the env chooses.
        vector: True for an env that steps all of its envs in one call, such as ALE's, EnvPool, or Gymnasium's own: an
            id with a ``vector_entry_point``, or a factory that takes ``num_envs``. One worker holds the batch, unless
            the client or ``--workers`` says how many have a share.
        gpus: The devices that are dealt to the workers, in place of ``--gpus``.
        memory_max: The bytes of memory that each worker may have, in place of ``--memory-max``; 0 for no limit.
        spares: The number of workers that are made ahead, in place of ``--spares``.
        recycle: When another worker takes over from one, in place of ``--recycle``.
        shared_process: True if several envs may share a process.
        one_per_process: True if each env has a process of its own in any case, for simulators of which a process can
            have only one.
        worker_setup: A function, ``module:function``, that each worker calls once before it makes its envs.
        required: True if the hub ends with status 2 where the env is not ready at its start.
    """

    env: str = ""
    python: Program = ""
    variables: dict[VariableName, VariableValue] = field(default_factory=dict)
    ld_library_path: tuple[Path, ...] = ()
    folder: Path | None = None
    rendering: Literal["egl", "osmesa"] | None = None
    vector: bool = False
    gpus: tuple[Gpu, ...] | None = None
    memory_max: Memory | None = None
    spares: Spares | None = None
    recycle: RecycleOptions | None = None
    shared_process: bool = False
    one_per_process: bool = False
    worker_setup: Function = ""
    required: bool = False

    def __post_init__(self) -> None:
        check_distinct("gpus", self.gpus)
        if self.shared_process and self.one_per_process:
            raise ValueError("shared_process and one_per_process exclude each other")
        if self.vector and self.one_per_process:
            raise ValueError(
                "vector and one_per_process exclude each other: a vector env steps all envs in one process"
            )

    @property
    def shares_process(self) -> bool | None:
        return False if self.one_per_process else self.shared_process or None

    @property
    def interpreter(self) -> InterpreterKey:
        drawn = {"MUJOCO_GL": self.rendering, "PYOPENGL_PLATFORM": self.rendering} if self.rendering else {}
        variables = tuple(sorted({**drawn, **self.variables}.items()))
        libraries = tuple(map(str, self.ld_library_path))
        return InterpreterKey(self.python, variables, libraries, "" if self.folder is None else str(self.folder))

    def hosting(self, of_hub: Hosting | None = None) -> Hosting:
        said: dict[str, Any] = {name: getattr(self, name) for name in vars(Hosting())}
        said["gpus"] = None if self.gpus is None else [*self.gpus]
        said["recycle"] = None if self.recycle is None else Recycle(**structs.asdict(self.recycle))
        return replace(of_hub or Hosting(), **{name: value for name, value in said.items() if value is not None})


NO_SETTINGS = EnvSettings()


def excess(wanted: Hosting, allowed: Hosting, spares_max: int) -> str:
    """Describe the settings of a shared hub's client that the operator does not allow; empty if there are none."""
    if (wanted.spares or 0) > max(spares_max, allowed.spares or 0):
        return f"spares={wanted.spares}: this hub makes at most spares_max={spares_max} of a session ahead"
    if wanted.shares_process and allowed.shares_process is False:
        return "shared_process=True: this hub's operator says that each of these envs has a process of its own"
    if foreign := sorted(set(wanted.gpus) - set(allowed.gpus)):
        dealt = ", ".join(map(str, allowed.gpus)) or "no devices"
        return f"gpus={foreign}: this hub deals {dealt} to its workers; its operator names others by --gpus"
    if allowed.memory_max and wanted.memory_max is not None and not 0 < wanted.memory_max <= allowed.memory_max:
        return (
            f"memory_max={wanted.memory_max}: this hub's operator allows up to {allowed.memory_max} bytes of a worker"
        )
    return ""


def hosting_of_session(wanted: Hosting, allowed: Hosting, session: int) -> Hosting:
    """The workers' settings in the session of this number.

    Each session begins with the next one of the operator's devices, so that sessions of one worker share them all.
    A worker is recycled by what comes first, the operator's limits or the client's.
    """
    first = session % max(1, len(allowed.gpus))
    asked = {name: value for name, value in vars(wanted).items() if value is not None}
    asked["gpus"] = wanted.gpus or allowed.gpus[first:] + allowed.gpus[:first]
    both = zip(astuple(wanted.recycle), astuple(allowed.recycle), strict=True)
    asked["recycle"] = Recycle(*(min(filter(None, limits), default=0) for limits in both))
    hosting = replace(allowed, **asked)
    if hosting.spares is None and hosting.recycle != Recycle():
        return replace(hosting, spares=1)  # the next worker then takes over without a delay
    return hosting
