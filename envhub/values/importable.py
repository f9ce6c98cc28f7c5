"""Modules that another process of this interpreter, with the same ``sys.path``, can import by their names."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from typing import Any


def is_importable(name: str) -> bool:
    """True if an import of the name in another process gives the same module as in this one.

    It does not for a module without a file, nor for one that ``spec_from_file_location``, or pytest in its importlib
    mode, loaded from outside ``sys.path`` or under another name. A compiled module counts as importable, because it
    cannot go by value.
    """
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return True  # pickles always take the functions of these by value
    file = getattr(module, "__file__", None)
    if file is None:
        return "." in name or hasattr(module, "__path__") or _spec_of(name, None) is not None
    return not str(file).endswith(".py") or _leads_to(name, str(file), tuple(map(str, sys.path)))


@lru_cache(maxsize=1024)
def _leads_to(name: str, file: str, sys_path: tuple[str, ...]) -> bool:
    """True if an import of the name gives the module in this file. ``sys_path`` is part of the cache's key."""
    parent = name.rpartition(".")[0]
    if parent and not (is_importable(parent) and hasattr(sys.modules.get(parent), "__path__")):
        return False
    places = list(sys.modules[parent].__path__) if parent else None
    spec = _spec_of(name, places)
    if spec is None:  # such as in a folder that this process can no longer read
        last = name.rpartition(".")[2]
        return any(file in (f"{place}/{last}.py", f"{place}/{last}/__init__.py") for place in places or sys_path)
    origin: Any = getattr(spec, "origin", None)
    return origin in (file, "frozen") or (origin is not None and os.path.realpath(origin) == os.path.realpath(file))


def _spec_of(name: str, path: list[str] | None) -> Any:
    """The spec that an import would use, even if the module is imported already."""
    for finder in sys.meta_path:
        find: Any = getattr(finder, "find_spec", None)
        try:
            spec = find(name, path) if find is not None else None
        except Exception:  # a foreign finder may raise anything
            continue
        if spec is not None:
            return spec
    return None
