"""What a worker is told to build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envhub.protocol.messages import Make, World
from envhub_server.catalog.registry import Recipe
from envhub_server.ipc import control


@dataclass(frozen=True)
class WorkerRules:
    """What holds for every worker of a session.

    Attributes:
        memory_bytes_max: of a worker's own memory; 0 for no limit.
        hide_folders: whether what the client is told of failures may name no folder of this machine.
    """

    memory_bytes_max: int = 0
    hide_folders: bool = False


NO_RULES = WorkerRules()


def build(
    make: Make,
    recipe: Recipe,
    rules: WorkerRules,
    worker: int,
    rows: Sequence[int],
    cpu: int | None,
    first_only: bool = False,
) -> control.Build:
    """The message for this worker: to make the envs of these rows, or first of all only the first one."""
    return control.Build(
        worker=worker,
        rows=list(rows),
        name=recipe.name,
        kwargs=make.kwargs,
        factories=make.factories,
        entry=recipe.entry,
        modules=list(recipe.modules),
        autoreset_mode=make.autoreset_mode,
        observation_mode=make.observation_mode,
        runner=make.runner,
        wrappers=make.wrappers,
        wrapper_kwargs=make.wrapper_kwargs,
        allow_pickle=make.world is not None,
        columns=make.columns,
        first_only=first_only,
        cpu=cpu,
        on_exception=make.faults.on_exception,
        on_invalid=make.faults.on_invalid,
        memory_bytes_max=rules.memory_bytes_max,
        hide_folders=rules.hide_folders,
        **_program_environment(make.world),
    )


def _program_environment(world: World | None) -> dict[str, Any]:
    if world is None:
        return {}
    return {
        "sys_path": world.sys_path,
        "registrations": world.registrations,
        "environ": {**world.environ, **control.ONE_THREAD},
        "cwd": world.cwd,
        "authkey": world.authkey,
    }
