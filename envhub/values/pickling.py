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
from typing import Any, Iterator, Mapping, Tuple

import cloudpickle


def is_importable(name: str) -> bool:
    """True if an import of the name in another process gives the same module; a compiled one cannot go by value."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return True  # pickles always take the functions of these by value
    file = getattr(module, "__file__", None)
    if file is None:
        return "." in name or hasattr(module, "__path__") or _spec_of(name, None) is not None
    return not str(file).endswith(".py") or _leads_to(name, str(file), tuple(map(str, sys.path)))


@lru_cache(maxsize=1024)
def _leads_to(name: str, file: str, sys_path: tuple[str, ...]) -> bool:
    """True if an import of the name gives the module in this file. ``sys_path`` is part of the key of the cache."""
    parent = name.rpartition(".")[0]
    if parent and not (is_importable(parent) and hasattr(sys.modules.get(parent), "__path__")):
        return False
    folders = list(sys.modules[parent].__path__) if parent else None
    spec = _spec_of(name, folders)
    if spec is None:  # such as in a folder that this process can no longer read
        last = name.rpartition(".")[2]
        return any(file in (f"{folder}/{last}.py", f"{folder}/{last}/__init__.py") for folder in folders or sys_path)
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
_PROXIED = "Queue", "JoinableQueue", "Lock", "RLock", "Semaphore", "Event", "Condition", "Barrier"
_MANAGED = dict(zip(_PROXIED, _PROXIED))
_MANAGED.update(SimpleQueue="Queue", Connection="Queue", SynchronizedArray="Array", SynchronizedString="Array")
_MANAGED.update(Synchronized="Value")


class Unsendable:
    """Entry of a worker's registry for an env whose spec cannot be sent; making the env raises the reason."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(self.why)


def why_unpicklable(named: str, value: Any, error: BaseException) -> str:
    """A sentence with the path from ``value``, ``named`` so, to the part that cannot be pickled, and a remedy."""
    steps = _path_below(value, DEPTH_MAX, {id(value): value}, iter(range(PICKLES_MAX))) or []
    culprit = steps[-1][1] if steps else value
    why = (_failure(culprit) if steps else None) or error
    text = " ".join(str(why).split())[:ERROR_CHARS_MAX]
    if not steps:
        return f"{named} cannot be pickled: {text}; {_remedy(culprit)}"
    path = " > ".join(_text_of(how, part) for how, part in [(named, value), *steps[:-1]])
    return f"{path} > {steps[-1][0]} is {_kind(culprit)}, which cannot be pickled: {text}; {_remedy(culprit)}"


def _path_below(value: Any, depth: int, failing: dict[int, Any], tries: Iterator[int]) -> list[Step] | None:
    """The path to the part that fails; empty for the value itself, None if only parts visited before fail."""
    # Depth first, and each part once, so that cycles end. What fails is kept alive, so that no new object gets its id.
    to_blame = True
    for how, part in _parts(value) if depth else ():
        if id(part) in failing:
            to_blame = False
        elif next(tries, None) is None:
            break
        elif _failure(part) is not None:
            to_blame = False
            failing[id(part)] = part
            path = _path_below(part, depth - 1, failing, tries)
            if path is not None:
                return [(how, part), *path]
    return [] if to_blame else None


def _failure(value: Any) -> BaseException | None:
    try:
        dumps(value)
    except Exception as error:  # a foreign object may raise anything
        return error
    return None


def _parts(value: Any) -> list[Step]:
    try:
        return list(islice(_of(value), PARTS_MAX))
    except Exception:  # such as a lock itself
        return []


def _of(value: Any) -> Iterator[Step]:
    if type(value).__module__.startswith("multiprocessing."):
        return
    if isinstance(value, functools.partial):
        yield "its function", value.func
        yield from _named("argument", {**dict(enumerate(value.args)), **value.keywords})
    elif isinstance(value, types.MethodType):
        yield "its object", value.__self__
        yield "its function", value.__func__
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or ())
        yield from _named("variable", {name: cell.cell_contents for name, cell in cells if cell != types.CellType()})
        names = [name for name in _globals_of(value.__code__) if name in value.__globals__]
        yield from _named("global", {name: value.__globals__[name] for name in names})
        yield from _named("default", {**dict(enumerate(value.__defaults__ or ())), **(value.__kwdefaults__ or {})})
    elif isinstance(value, (staticmethod, classmethod, property)):
        yield from (("its function", getattr(value, name, None)) for name in ("__func__", "fget", "fset", "fdel"))
    elif isinstance(value, types.ModuleType):
        yield from _named("global", {name: each for name, each in vars(value).items() if name != "__builtins__"})
    elif isinstance(value, type):
        members = {name: each for name, each in vars(value).items() if not name.startswith("_abc_")}
        yield from _named("class attribute", {name: each for name, each in members.items() if name not in _NOT_SENT})
        yield from ((f"base class {base.__name__}", base) for base in value.__bases__)
    elif isinstance(value, Mapping):
        yield from _named("item", value)
        yield from ((f"key {key!r:.60}", key) for key in value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"item {number}", each) for number, each in enumerate(value))
    else:
        yield f"class {type(value).__name__}", type(value)
        yield from _reduced_steps(*value.__reduce_ex__(4))


def _reduced_steps(
    made_of: Any, arguments: Any, state: Any = None, items: Any = None, pairs: Any = None, *_: Any
) -> Iterator[Step]:
    for each in state if isinstance(state, tuple) and len(state) == 2 else (state,):  # of __dict__, and of __slots__
        yield from _named("attribute", each) if isinstance(each, Mapping) else [("its state", each)]
    yield from _named("part", dict(enumerate([*arguments, made_of])))
    yield from _named("item", {**dict(enumerate(items or ())), **dict(pairs or ())})


def _named(kind: str, parts: Mapping[Any, Any]) -> Iterator[Step]:
    return ((f"{kind} {name!r:.60}", part) for name, part in parts.items())


def _globals_of(code: types.CodeType) -> list[str]:
    names = {each.argval: None for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")}
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            names.update(dict.fromkeys(_globals_of(part)))
    return [*names]


def _text_of(how: str, part: Any) -> str:
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
