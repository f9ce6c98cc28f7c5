"""Envs of a hub as training frameworks want them: a module for each, which imports its framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_COUNT = "leave infos with invalid_transition out of what you count, as client/docs/frameworks.md shows"
RETIRED = {
    "envhub.pettingzoo.make_vec": "make a ParallelEnv for each env by envhub.pettingzoo.make",
    "envhub.sb3.WholeEpisodeMonitor": "use VecMonitor, and " + _COUNT,
    "envhub.tianshou.AsyncCollector": "use tianshou's Collector: a step waits for all of its envs",
    "envhub.tianshou.HubEnvFactory": "give an envhub.tianshou.HubVectorEnv to tianshou's Collector and trainers",
    "envhub.tianshou.WholeEpisodeStats": "use CollectStats, and " + _COUNT,
}


@contextmanager
def needs(extra: str, module: str = "") -> Iterator[None]:
    """Import in the block what needs this extra, which the error of a missing module names."""
    try:
        yield
    except ModuleNotFoundError as error:
        importer = module or f"envhub.{extra}"
        text = f'{error}; {importer} needs `pip install "envhub-rl[{extra}]"`'
        raise ModuleNotFoundError(text, name=error.name) from error


def raise_missing(module: str, name: str) -> NoReturn:
    """Raise for a name that this module lacks, as its ``__getattr__``; ``ImportError`` says what is left of one."""
    if way_left := RETIRED.get(f"{module}.{name}"):
        # ``from module import name`` shows the text of no AttributeError.
        raise ImportError(f"{module}.{name} is retired: {way_left}", name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
