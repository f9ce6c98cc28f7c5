"""Pickles of functions and classes by value that keep their files' names, for tracebacks and breakpoints.

Those of modules that a worker cannot import by name, such as test modules in pytest's importlib mode, also go by value.
"""

from __future__ import annotations

import io
import sys
import threading
import types
from collections import ChainMap
from typing import Any

import cloudpickle

from envhub.values.importable import is_importable

_registry = threading.RLock()  # held from the registration of modules until they are unregistered
_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]


def dumps(value: Any) -> bytes:
    """Pickle ``value`` as ``cloudpickle.dumps`` does, with the file name of each code object.

    Raises:
        Exception: a foreign object raised it while it was pickled.
    """
    buffer = io.BytesIO()
    pickler = _CodePickler(buffer)
    with _registry:
        try:
            pickler.dump(value)
        finally:
            pickler.restore_registry()
    return buffer.getvalue()


def _reduce_code_in_its_file(code: types.CodeType) -> tuple[Any, ...]:
    rebuild, arguments = _reduce_code(code)
    return rebuild, tuple(code.co_filename if part == "<dynamic-code>" else part for part in arguments)


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    # cloudpickle 3.1.3 names every file "<dynamic-code>", so that tracebacks show no line and breakpoints do not stop.
    dispatch_table = ChainMap({types.CodeType: _reduce_code_in_its_file}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._asked: set[str] = set()  # names of the modules that were looked at
        self._registered: list[types.ModuleType] = []  # modules that go by value while this pickler runs

    def reducer_override(self, obj: Any) -> Any:
        """Reduce as cloudpickle does; a module that cannot be imported by its name goes by value."""
        if isinstance(obj, (type, types.FunctionType, types.ModuleType)):
            name = obj.__name__ if isinstance(obj, types.ModuleType) else obj.__module__
            if name not in self._asked and isinstance(name, str):
                self._ask(name)
        return super().reducer_override(obj)

    def _ask(self, name: str) -> None:
        self._asked.add(name)
        if name not in cloudpickle.list_registry_pickle_by_value() and not is_importable(name):
            module = sys.modules[name]
            if module.__name__ == name:  # cloudpickle registers a module by its __name__
                cloudpickle.register_pickle_by_value(module)
                self._registered.append(module)

    def restore_registry(self) -> None:
        """Have cloudpickle pickle the modules by their names again."""
        while self._registered:
            cloudpickle.unregister_pickle_by_value(self._registered.pop())
