"""Settings of one environment by the operator."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from envhub.protocol.messages import Hosting, Recycle
from envhub.recording.recorder_handle import missing_packages
from envhub_server.catalog.record_settings import RecordSettings
from envhub_server.processes.interpreter import InterpreterKey

RENDERING: tuple[Literal["egl"], Literal["osmesa"]] = ("egl", "osmesa")


@dataclass(frozen=True)
class EnvSettings:
    """The table ``[envs.NAME]`` of a hub's file.

    A field is a key of the table; its annotation says what is allowed, in msgspec's terms. A recipe has the settings of
    its environment.

    Attributes:
        env: the env: a Gymnasium id, ``module:id``, or ``module:factory``, where a name of Python follows the colon.
            Without it the table's name, which then may be a pattern of ids.
        python: the interpreter: a program, a virtual environment or a conda prefix; without it that of the hub.
        variables: variables of the workers' environment, in place of the hub's of these names.
        ld_library_path: the folders in which libraries are looked for, in place of the hub's ``LD_LIBRARY_PATH``.
        folder: the workers' working directory, from which they import what is not installed; without it the hub's.
        rendering: the way to draw frames without a screen, ``"egl"`` or ``"osmesa"``, which is the value of
            ``MUJOCO_GL`` and ``PYOPENGL_PLATFORM`` then. Without it what the hub says, or the env chooses.
        vector: true for an env that steps all of its envs in one call, such as ALE's, EnvPool, or Gymnasium's own: an
            id with a ``vector_entry_point``, or a factory that takes ``num_envs``. One worker holds the batch, unless
            the client or ``--workers`` says how many have a share.
        gpus: the devices that are dealt to the workers, in place of ``--gpus``.
        memory_max: the bytes of memory that each worker may have, in place of ``--memory-max``; 0 for no limit.
        spares: the number of workers that are made ahead, in place of ``--spares``.
        recycle: when another worker takes over from one, in place of ``--recycle``.
        shared_process: true if several envs may share a process.
        one_per_process: true if each env has a process of its own in any case, for simulators of which a process can
            have only one.
        worker_setup: a function, ``module:function``, that each worker calls once before it makes its envs.
        required: true if the hub ends with status 2 where the env is not ready at its start.
        record: the episodes that are recorded on the hub's machine: a folder for all, or a table. Before the first
            table of an environment it is that of all environments whose table has none; ``""`` is none.

    None is what the hub's options say.
    """

    env: str = ""
    python: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    ld_library_path: tuple[Path, ...] = ()
    folder: Path | None = None
    rendering: Literal["", "egl", "osmesa"] = ""
    vector: bool = False
    gpus: tuple[int, ...] | None = None
    memory_max: int | None = None
    spares: int | None = None
    recycle: Recycle | None = None
    shared_process: bool = False
    one_per_process: bool = False
    record: str | RecordSettings | None = None
    worker_setup: str = ""
    required: bool = False

    def __post_init__(self) -> None:
        """Check that what is said goes together.

        Raises:
            ValueError: envs are to share a process and not to share one, or the env steps all in one process.
        """
        if self.shared_process and self.one_per_process:
            raise ValueError("shared_process and one_per_process exclude each other")
        if self.vector and self.one_per_process:
            raise ValueError(
                "vector and one_per_process exclude each other: a vector env steps all envs in one process"
            )

    @property
    def shares_process(self) -> bool | None:
        """Setting whether its envs may share a process; None without one."""
        return False if self.one_per_process else self.shared_process or None

    @property
    def recorded(self) -> RecordSettings | None:
        """Episodes of its sessions that are recorded; None for none."""
        if isinstance(self.record, str):
            return RecordSettings(Path(self.record)) if self.record else None
        return self.record

    @property
    def unrecordable(self) -> str:
        """Name what is missing to record its sessions, and what to do; empty if nothing is, or none are recorded."""
        return "" if self.recorded is None else missing_packages(bool(self.recorded.film))

    @property
    def interpreter(self) -> InterpreterKey:
        """Settings with which its interpreter starts."""
        drawn = {"MUJOCO_GL": self.rendering, "PYOPENGL_PLATFORM": self.rendering} if self.rendering else {}
        variables = tuple(sorted({**drawn, **self.variables}.items()))
        libraries = tuple(map(str, self.ld_library_path))
        return InterpreterKey(self.python, variables, libraries, "" if self.folder is None else str(self.folder))

    def hosting(self, of_hub: Hosting | None = None) -> Hosting:
        """Settings of this env's workers by the operator; where the table has none, those of all."""
        said: dict[str, Any] = {name: getattr(self, name) for name in vars(Hosting())}
        said["gpus"] = None if self.gpus is None else [*self.gpus]
        return replace(of_hub or Hosting(), **{name: value for name, value in said.items() if value is not None})


NO_SETTINGS = EnvSettings()
