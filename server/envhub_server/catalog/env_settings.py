"""Settings of one environment by the operator."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, structs

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
    """

    env: Annotated[
        str,
        Meta(
            description="The env: a Gymnasium id, ``module:id``, or ``module:factory``, where a name of Python "
            "follows the colon. Without it the table's name, which then may be a pattern of ids."
        ),
    ] = ""
    python: Annotated[
        Program,
        Meta(
            description="The interpreter: a program, a virtual environment or a conda prefix; without it that of "
            "the hub."
        ),
    ] = ""
    variables: Annotated[
        dict[VariableName, VariableValue],
        Meta(description="Variables of the workers' environment, in place of the hub's of these names."),
    ] = field(default_factory=dict)
    ld_library_path: Annotated[
        tuple[Path, ...],
        Meta(description="The folders in which libraries are looked for, in place of the hub's ``LD_LIBRARY_PATH``."),
    ] = ()
    folder: Annotated[
        Path | None,
        Meta(
            description="The workers' working directory, from which they import what is not installed; without it the "
            "hub's."
        ),
    ] = None
    rendering: Annotated[
        Literal["egl", "osmesa"] | None,
        Meta(
            description="The way to draw frames without a screen: the value of ``MUJOCO_GL`` and "
            "``PYOPENGL_PLATFORM``. Without it what the hub says, or the env chooses."
        ),
    ] = None
    vector: Annotated[
        bool,
        Meta(
            description="True for an env that steps all of its envs in one call, such as ALE's, EnvPool, or "
            "Gymnasium's own: an id with a ``vector_entry_point``, or a factory that takes ``num_envs``. "
            "One worker holds the batch, unless the client or ``--workers`` says how many have a share."
        ),
    ] = False
    gpus: Annotated[
        tuple[Gpu, ...] | None,
        Meta(description="The devices that are dealt to the workers, in place of ``--gpus``."),
    ] = None
    memory_max: Annotated[
        Memory | None,
        Meta(
            description="The bytes of memory that each worker may have, in place of ``--memory-max``; 0 for no limit."
        ),
    ] = None
    spares: Annotated[
        Spares | None, Meta(description="The number of workers that are made ahead, in place of ``--spares``.")
    ] = None
    recycle: Annotated[
        RecycleOptions | None,
        Meta(description="When another worker takes over from one, in place of ``--recycle``."),
    ] = None
    shared_process: Annotated[bool, Meta(description="True if several envs may share a process.")] = False
    one_per_process: Annotated[
        bool,
        Meta(
            description="True if each env has a process of its own in any case, for simulators of which a process can "
            "have only one."
        ),
    ] = False
    worker_setup: Annotated[
        Function,
        Meta(description="A function, ``module:function``, that each worker calls once before it makes its envs."),
    ] = ""
    required: Annotated[
        bool, Meta(description="True if the hub ends with status 2 where the env is not ready at its start.")
    ] = False

    def __post_init__(self) -> None:
        """Check that what is said goes together; raises ``ValueError``."""
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
        """Settings of this env's workers by the operator; where the table has none, those of all."""
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
