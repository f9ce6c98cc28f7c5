"""Modules that another process of this interpreter, with the same ``sys.path``, finds by their names."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from typing import Any


def is_importable(name: str) -> bool:
    """True if the module of this name, which this process has, is what an import of the name gives elsewhere.

    That is not so of a module that was loaded from a file by ``spec_from_file_location``, or by pytest in its importlib
    mode, from a place or under a name of its own, nor of one that has no file. It is taken to be so of what is
    compiled: that has no other form.
    """
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return True  # pickles take the functions of those by value in any case
    file = getattr(module, "__file__", None)
    if file is None:
        return "." in name or hasattr(module, "__path__") or _found(name, None) is not None
    return not str(file).endswith(".py") or _leads_to(name, str(file), tuple(map(str, sys.path)))


@lru_cache(maxsize=1024)
def _leads_to(name: str, file: str, sys_path: tuple[str, ...]) -> bool:
    """True if an import of the name gives the module in this file; with another ``sys.path`` that is asked again."""
    parent = name.rpartition(".")[0]
    if parent and not (is_importable(parent) and hasattr(sys.modules.get(parent), "__path__")):
        return False
    places = list(sys.modules[parent].__path__) if parent else None
    spec = _found(name, places)
    if spec is None:  # such as in a folder that this process may not read any more
        last = name.rpartition(".")[2]
        return any(file in (f"{place}/{last}.py", f"{place}/{last}/__init__.py") for place in places or sys_path)
    origin: Any = getattr(spec, "origin", None)
    return origin in (file, "frozen") or (origin is not None and os.path.realpath(origin) == os.path.realpath(file))


def _found(name: str, path: list[str] | None) -> Any:
    """The spec that an import would find, also of a module that is imported already."""
    for finder in sys.meta_path:
        find: Any = getattr(finder, "find_spec", None)
        try:
            spec = find(name, path) if find is not None else None
        except Exception:  # of a foreign finder
            continue
        if spec is not None:
            return spec
    return None
