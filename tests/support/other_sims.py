"""Envs of dm_control and PettingZoo, as a hub's operator offers them by name."""

from __future__ import annotations

from typing import Any

KINDS = {"swing": "other_sims:swing", "sphero": "other_sims:go_to_target", "zombies": "other_sims:zombies"}


def swing(**kwargs: Any) -> Any:
    """Of dm_control's suite, whose seed is ``task.random``."""
    from dm_control import suite

    return suite.load("cartpole", "swingup", **kwargs)


def go_to_target() -> Any:
    """Of dm_control's composer, whose seed is ``random_state``."""
    from dm_control import composer
    from dm_control.locomotion.arenas import floors
    from dm_control.locomotion.tasks import go_to_target
    from dm_control.locomotion.walkers import rescale  # noqa: F401  loads the package
    from dm_control.locomotion.walkers.ant import Ant

    task = go_to_target.GoToTarget(walker=Ant(), arena=floors.Floor())
    return composer.Environment(task, time_limit=1.0)


def zombies(**kwargs: Any) -> Any:
    from pettingzoo.butterfly import knights_archers_zombies_v11

    return knights_archers_zombies_v11.parallel_env(**{"max_cycles": 300, **kwargs})
