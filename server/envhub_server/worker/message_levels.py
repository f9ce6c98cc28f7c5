"""Levels of loggers and filters of warnings of the program that a worker belongs to. Python 3.8 and later."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from functools import reduce
from typing import Any

from envhub.values.gym_api import api


def adopt_levels(levels: Any) -> None:
    """Set the levels and filters of the program, a map that PROTOCOL.md describes (World)."""
    if levels["logging"] or levels["disabled"]:
        logging = importlib.import_module("logging")
        for name, level in levels["logging"].items():
            logging.getLogger(name or None).setLevel(level)
        logging.disable(levels["disabled"])
    if levels["gymnasium"] is not None:
        for name in ("min_level", "MIN_LEVEL"):  # the second is old gym's
            if hasattr(api.logger, name):
                setattr(api.logger, name, levels["gymnasium"])
    filters = [_filter(*fields) for fields in levels["warnings"]]
    warnings.resetwarnings()  # which also makes Python forget what it has decided by other filters
    warnings.filters.extend(filters)  # type: ignore[attr-defined]


def _filter(action: str, message: Any, categories: Any, module: Any, line: int) -> tuple[Any, ...]:
    kinds = tuple(map(_category, categories))
    return action, _matched(message), kinds[0] if len(kinds) == 1 else kinds, _matched(module), line


def _matched(text: Any) -> Any:
    return re.compile(*text) if isinstance(text, list) else text


def _category(named: str) -> type:
    """The class of this name, or one that stands for it: to import its module may take long, or be impossible here."""
    module, _, name = named.partition(":")
    loaded: Any = sys.modules.get(module)
    try:
        kind = reduce(getattr, name.split("."), loaded)
    except AttributeError:
        kind = None
    return kind if isinstance(kind, type) else _Named(name, (Warning,), {"named": named})


class _Named(type):
    """A class of warnings that is known by its name: every class of that name, and each that extends it, extends it."""

    named: str

    def __subclasscheck__(cls, subclass: type) -> bool:
        return any(f"{each.__module__}:{each.__qualname__}" == cls.named for each in subclass.__mro__)
