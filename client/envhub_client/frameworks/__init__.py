"""Envs of a hub as training frameworks want them: a module for each, which imports its framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str, module: str = "") -> Iterator[None]:
    """Import in the block what needs this extra; ``module`` is the one that is imported, ``envhub.EXTRA`` without it.

    Raises:
        ModuleNotFoundError: a module is missing; its text names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        importer = module or f"envhub.{extra}"
        text = f'{error}; {importer} needs `pip install "envhub-rl[{extra}]"`'
        raise ModuleNotFoundError(text, name=error.name) from error
