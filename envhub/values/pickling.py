"""Pickles from a program to its own workers: code by value, and a description of what cannot be pickled."""

from __future__ import annotations

import dis
import functools
import io
import os
import sys
import threading
import types
from collections import ChainMap
from functools import lru_cache
from itertools import islice
from typing import Any, Callable, Iterable, Iterator, Mapping, Tuple

import cloudpickle


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


_registry = threading.RLock()  # held from the registration of modules until they are unregistered
_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]


def dumps(value: Any) -> bytes:
    """Pickle ``value`` as ``cloudpickle.dumps`` does, with the file name of each code object. Raises ``Exception``."""
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


DEPTH_MAX = 16  # parts within parts
PARTS_MAX = 200  # of one value
PICKLES_MAX = 1000  # of parts, to find the path
ERROR_CHARS_MAX = 300

Step = Tuple[str, Any]  # the text of the access to a part, and the part

# Members that a class's pickle does not have.
_NOT_SENT = frozenset(["__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__abstractmethods__"])
# The proxies that a Manager makes for the classes of multiprocessing.
_MANAGED = {
    **{
        name: name for name in ("Queue", "JoinableQueue", "Lock", "RLock", "Semaphore", "Event", "Condition", "Barrier")
    },
    **dict.fromkeys(("SimpleQueue", "Connection"), "Queue"),
    **dict.fromkeys(("SynchronizedArray", "SynchronizedString"), "Array"),
    "Synchronized": "Value",
}


class Unsendable:
    """Entry of a worker's registry for an env whose spec cannot be sent; making the env raises the reason."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(self.why)


def why_unpicklable(named: str, value: Any, dumps: Callable[[Any], Any], error: BaseException) -> str:
    """A sentence with the path from a value to its part that cannot be pickled, the error and the remedy.

    Args:
        named: the name of the value in the sentence.
        value: the value that cannot be pickled.
        dumps: pickles a value; any error means that it cannot be pickled.
        error: the error of pickling ``value``, for a path without parts.
    """
    steps = _Search(dumps).path(value)
    culprit = steps[-1][1] if steps else value
    why = (_failure(culprit, dumps) if steps else None) or error
    text = " ".join(str(why).split())[:ERROR_CHARS_MAX]
    if not steps:
        return f"{named} cannot be pickled: {text}; {_remedy(culprit)}"
    path = " > ".join(_shown(how, part) for how, part in [(named, value), *steps[:-1]])
    return f"{path} > {steps[-1][0]} is {_kind(culprit)}, which cannot be pickled: {text}; {_remedy(culprit)}"


class _Search:
    """A depth-first search that visits each part once, so that cycles end."""

    def __init__(self, dumps: Callable[[Any], Any]) -> None:
        self._dumps = dumps
        self._left = PICKLES_MAX
        self._failing: set[int] = set()
        self._kept: list[Any] = []  # keeps visited objects alive, so that no new object gets the id of one

    def path(self, value: Any) -> list[Step]:
        self._failing.add(id(value))
        return self._below(value, DEPTH_MAX) or []

    def _below(self, value: Any, depth: int) -> list[Step] | None:
        """The path to the part that fails; empty for the value itself, None if only parts visited before fail."""
        if not depth:
            return []
        to_blame = True
        for how, part in islice(_parts(value), PARTS_MAX):
            if id(part) in self._failing:
                to_blame = False
                continue
            if not self._left:
                break
            self._left -= 1
            if _failure(part, self._dumps) is None:
                continue
            to_blame = False
            self._failing.add(id(part))
            self._kept.append(part)
            path = self._below(part, depth - 1)
            if path is not None:
                return [(how, part), *path]
        return [] if to_blame else None


def _failure(value: Any, dumps: Callable[[Any], Any]) -> BaseException | None:
    try:
        dumps(value)
    except Exception as error:  # a foreign object may raise anything
        return error
    return None


def _parts(value: Any) -> Iterable[Step]:
    """The parts of a value that are pickled with it, as far as they can be determined."""
    try:
        return list(islice(_of(value), PARTS_MAX))
    except Exception:  # such as a lock itself
        return []


def _of(value: Any) -> Iterator[Step]:
    if type(value).__module__.startswith("multiprocessing."):
        return
    if isinstance(value, functools.partial):
        yield "its function", value.func
        yield from ((f"argument {number}", each) for number, each in enumerate(value.args))
        yield from ((f"argument {name!r}", each) for name, each in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield "its object", value.__self__
        yield "its function", value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, (staticmethod, classmethod)):
        yield "its function", value.__func__
    elif isinstance(value, property):
        yield from ((f"its {name}", getattr(value, name)) for name in ("fget", "fset", "fdel"))
    elif isinstance(value, type):
        yield from _of_class(value)
    elif isinstance(value, types.ModuleType):
        yield from ((f"global {name!r}", each) for name, each in vars(value).items() if name != "__builtins__")
    elif isinstance(value, Mapping):
        yield from _of_mapping(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item {number}", each) for number, each in enumerate(value))
    else:
        yield from _of_object(value)


def _of_function(function: types.FunctionType) -> Iterator[Step]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield f"variable {name!r}", cell.cell_contents
        except ValueError:  # an empty cell
            pass
    names = _globals_of(function.__code__)
    yield from ((f"global {name!r}", function.__globals__[name]) for name in names if name in function.__globals__)
    yield from ((f"default {number}", each) for number, each in enumerate(function.__defaults__ or ()))
    yield from ((f"default of {name!r}", each) for name, each in (function.__kwdefaults__ or {}).items())
    yield from ((f"attribute {name!r}", each) for name, each in vars(function).items())


def _globals_of(code: types.CodeType) -> list[str]:
    """The globals that a function and its nested functions use."""
    names = {each.argval: None for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")}
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            names.update(dict.fromkeys(_globals_of(part)))
    return [*names]


def _of_class(kind: type) -> Iterator[Step]:
    for name, each in vars(kind).items():
        if name not in _NOT_SENT and not name.startswith("_abc_") and not isinstance(each, types.MemberDescriptorType):
            yield f"{'method' if isinstance(each, types.FunctionType) else 'class attribute'} {name!r}", each
    yield from ((f"base class {base.__name__}", base) for base in kind.__bases__)


def _of_mapping(mapping: Mapping[Any, Any]) -> Iterator[Step]:
    for key, each in mapping.items():
        yield f"item {key!r:.60}", each
        yield f"key {key!r:.60}", key


def _of_object(value: Any) -> Iterator[Step]:
    yield f"class {type(value).__name__}", type(value)
    reduced = value.__reduce_ex__(4)
    if not isinstance(reduced, tuple):
        return
    made_of, arguments, state, *items = (*reduced, None, None, None)[:5]
    states = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for each in states:  # the states of its __dict__ and of its __slots__
        if isinstance(each, Mapping):
            yield from ((f"attribute {name!r}", part) for name, part in each.items())
        elif each is not None:
            yield "its state", each
    yield from ((f"part {number}", part) for number, part in enumerate(arguments or ()) if part is not type(value))
    yield "what makes it", made_of
    yield from ((f"item {number}", part) for number, part in enumerate(items[0] or ()))
    yield from ((f"item {key!r:.60}", part) for key, part in items[1] or ())


def _shown(how: str, part: Any) -> str:
    name = part.__qualname__ if isinstance(part, (type, types.FunctionType)) else ""
    return f"{how} ({name})" if name and name.rpartition(".")[2] not in how else how


def _kind(value: Any) -> str:
    if isinstance(value, (type, types.FunctionType)):
        return f"{'the class' if isinstance(value, type) else 'the function'} {value.__module__}.{value.__qualname__}"
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _remedy(culprit: Any) -> str:
    kinds = [each for each in type(culprit).__mro__ if str(each.__module__).startswith("multiprocessing.")]
    if kinds:
        made = next((_MANAGED[each.__name__] for each in kinds if each.__name__ in _MANAGED), "")
        call = f"multiprocessing.Manager().{made}()" if made else "what multiprocessing.Manager() makes"
        return f"only children of multiprocessing inherit such an object; use {call}, of which envs get a proxy"
    return (
        "make it in the factory or in the env's __init__, which run in the worker; or move what uses it into a module "
        "that workers can import, which is sent by its name only"
    )
