"""Orders to a worker to build envs, and the environment variables of its place. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envhub.protocol.messages import Hosting, Make, ProgramEnvironment
from envhub_server.catalog.registry import Recipe
from envhub_server.ipc import control
from envhub_server.processes.interpreter import ONE_THREAD, InterpreterKey

# The variables by which libraries choose a device: CUDA sees only these devices, MuJoCo and others render on this one.
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "EGL_DEVICE_ID")


@dataclass(frozen=True)
class WorkerRules:
    """Settings of every worker of a session.

    Attributes:
        memory_bytes_max: limit of a worker's own memory; 0 for none. hide_folders: True if failures sent to the client
        must not name folders of this machine. session: the session's name for its envs; empty for envs that get no
        variables. hosting: its settings besides its envs. replays: the prefix of the names of the session's replays;
        empty if none are kept. info_bytes_max: limit of an info without its observation, for a hub that is not private.
        libraries: the libraries that its workers share through their zygote; None until the first workers report
        theirs. alone: True if an earlier session could not make two of its envs in a process.
    """

    memory_bytes_max: int = 0
    hide_folders: bool = False
    session: str = ""
    hosting: Hosting = field(default_factory=Hosting)
    replays: str = ""
    libraries: tuple[str, ...] | None = ()
    alone: bool = False
    info_bytes_max: int = control.INFO_BYTES_MAX


NO_RULES = WorkerRules()


@dataclass(frozen=True)
class Place:
    """A worker's place in its session.

    Attributes:
        slot: its index.
        workers: the number of the session's workers; None until it is decided.
        rows: its rows.
        cpu: the only CPU that it runs on; None for all.
        row_offset: the index of row 0 in the vector env that the session is a part of.
        incarnation: as of ``control.Build``.
    """

    slot: int
    workers: int | None
    rows: Sequence[int]
    cpu: int | None = None
    row_offset: int = 0
    incarnation: int = 0

    @property
    def env_indices(self) -> list[int]:
        """The indices of its envs in the vector env that the session is a part of."""
        return [self.row_offset + row for row in self.rows]


def variables(rules: WorkerRules, place: Place) -> dict[str, str]:
    """The environment variables of the worker at this place; they are the same for its replacements.

    The number of workers and the envs' indices are empty until they are decided.
    """
    if not rules.session:
        return {}
    decided = place.workers is not None
    environment = {
        "ENVHUB_SESSION": rules.session,
        "ENVHUB_WORKER_INDEX": str(place.slot),
        "ENVHUB_NUM_WORKERS": str(place.workers) if decided else "",
        "ENVHUB_ENV_INDICES": ",".join(map(str, place.env_indices)) if decided else "",
    }
    if gpus := rules.hosting.gpus:
        environment.update(dict.fromkeys(DEVICE_VARIABLES, str(gpus[place.slot % len(gpus)])))
    return environment


def build(make: Make, recipe: Recipe, rules: WorkerRules, place: Place) -> control.Build:
    """The order to make the envs of this place; only the first env if the number of workers is not decided."""
    return control.Build(
        worker=place.slot,
        rows=list(place.rows),
        name=recipe.name,
        kwargs=make.kwargs,
        kwargs_each=_kwargs_each(make, place),
        factories=make.factories,
        python=make.python,
        entry=recipe.entry,
        modules=list(recipe.modules),
        autoreset_mode=make.autoreset_mode,
        observation_mode=make.observation_mode,
        runner=make.runner,
        wrappers=make.wrappers,
        wrapper_kwargs=make.wrapper_kwargs,
        allow_pickle=make.program_environment is not None and not recipe.settings.python,
        columns=make.columns,
        first_only=place.workers is None,
        says_imported=rules.libraries != (),
        cpu=place.cpu,
        on_exception=make.faults.on_exception,
        on_invalid=make.faults.on_invalid,
        memory_bytes_max=rules.memory_bytes_max,
        hide_folders=rules.hide_folders,
        variables=variables(rules, place),
        shares=(place.workers or 1) if recipe.settings.vector else 0,
        replays=rules.replays,
        episodes_max=rules.hosting.recycle.episodes,
        setups=[*dict.fromkeys(filter(None, (recipe.settings.worker_setup, make.worker_setup)))],
        setup=make.worker_setup_code,
        info_bytes_max=rules.info_bytes_max,
        row_offset=place.row_offset,
        incarnation=place.incarnation,
        **_program_environment(make.program_environment, recipe),
    )


def build_rest(make: Make, rules: WorkerRules, place: Place) -> control.BuildRest:
    """The order to make the other envs, for a worker that has made its first env, once its place is decided."""
    return control.BuildRest(list(place.rows), _kwargs_each(make, place), variables(rules, place))


def _kwargs_each(make: Make, place: Place) -> list[bytes]:
    return [make.kwargs_each[row] for row in place.rows] if make.kwargs_each else []


def interpreter_of(own: InterpreterKey, program_environment: ProgramEnvironment | None) -> InterpreterKey:
    """The interpreter of a session's workers: the env's own, with its program's options, if it has one."""
    return own if program_environment is None else replace(own, flags=tuple(program_environment.flags))


def _program_environment(program_environment: ProgramEnvironment | None, recipe: Recipe) -> dict[str, Any]:
    """The fields of Build by which a worker adopts the program's environment; none for an interpreter of its own."""
    if program_environment is None:
        return {}
    if recipe.settings.python:
        return {"generators": program_environment.generators}
    inherited = {name: value for name, value in vars(program_environment).items() if name not in _OF_INTERPRETER}
    return {
        **inherited,
        "environ": {**ONE_THREAD, **program_environment.environ, **dict(recipe.settings.interpreter.variables)},
    }


_OF_INTERPRETER = ("python", "rendering", "flags")  # set when the interpreter starts
