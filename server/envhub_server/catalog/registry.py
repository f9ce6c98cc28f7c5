"""The environments that a hub offers: the operator's entries, matched against the names that clients ask for.

The hub itself never imports an environment: it matches names, and a worker imports.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from msgspec import structs

from envhub.errors import brief
from envhub.options import (
    Function,
    Gpu,
    Memory,
    Program,
    RecycleOptions,
    Spares,
    VariableName,
    VariableValue,
    check_distinct,
    parse_arguments,
    value_text,
)
from envhub.protocol.messages import Hosting, Make, Recycle
from envhub_server.ipc.packages import install, on_this_machine, package_of
from envhub_server.processes.interpreter import InterpreterKey

# Packages whose ids are not known to Gymnasium until the package is imported, by the namespace of their ids.
NAMESPACES = {"ALE": "ale_py", "dm_control": "shimmy"}
NEAREST_MAX = 3
NAME_CHARS_MAX = 200  # that are compared
# Ids that exist where only patterns are offered: Gymnasium's own, and one of a known namespace.
EXAMPLES = ("CartPole-v1", "ALE/Pong-v5")
VERSION = re.compile(r"-v\d+$")
WILDCARD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class EnvSettings:
    """The table ``[envs.NAME]`` of a hub's file; None and empty values are what the hub's options say.

    A field is a key of the table; its annotation says what is allowed. A recipe has the settings of its environment.

    Attributes:
        env: The env: a Gymnasium id, ``module:id``, or ``module:factory``, where a name of Python follows the colon.
            Without it the table's name, which then may be a pattern of ids.
        python: The interpreter: a program, a virtual environment or a conda prefix; without it that of the hub.
        variables: Variables of the workers' environment, in place of the hub's of these names.
        ld_library_path: The folders in which libraries are looked for, in place of the hub's ``LD_LIBRARY_PATH``.
        folder: The workers' working directory, from which they import what is not installed; without it the hub's.
        rendering: The way to draw frames without a screen: the value of ``MUJOCO_GL`` and ``PYOPENGL_PLATFORM``.
            Without it what the hub says, or the env chooses.
        vector: True for an env that steps all of its envs in one call, such as ALE's, EnvPool, or Gymnasium's own: an
            id with a ``vector_entry_point``, or a factory that takes ``num_envs``. One worker holds the batch, unless
            the client or ``--workers`` says how many have a share.
        gpus: The devices that are dealt to the workers, in place of ``--gpus``.
        memory_max: The bytes of memory that each worker may have, in place of ``--memory-max``; 0 for no limit.
        spares: The number of workers that are made ahead, in place of ``--spares``.
        recycle: When another worker takes over from one, in place of ``--recycle``.
        shared_process: True if several envs may share a process.
        one_per_process: True if each env has a process of its own in any case, for simulators of which a process can
            have only one.
        worker_setup: A function, ``module:function``, that each worker calls once before it makes its envs.
        required: True if the hub ends with status 2 where the env is not ready at its start.
    """

    env: str = ""
    python: Program = ""
    variables: dict[VariableName, VariableValue] = field(default_factory=dict)
    ld_library_path: tuple[Path, ...] = ()
    folder: Path | None = None
    rendering: Literal["egl", "osmesa"] | None = None
    vector: bool = False
    gpus: tuple[Gpu, ...] | None = None
    memory_max: Memory | None = None
    spares: Spares | None = None
    recycle: RecycleOptions | None = None
    shared_process: bool = False
    one_per_process: bool = False
    worker_setup: Function = ""
    required: bool = False

    def __post_init__(self) -> None:
        check_distinct("gpus", self.gpus)
        if self.shared_process and self.one_per_process:
            raise ValueError("shared_process and one_per_process exclude each other")
        if self.vector and self.one_per_process:
            raise ValueError(
                "vector and one_per_process exclude each other: a vector env steps all envs in one process"
            )

    @property
    def shares_process(self) -> bool | None:
        return False if self.one_per_process else self.shared_process or None

    @property
    def interpreter(self) -> InterpreterKey:
        drawn = {"MUJOCO_GL": self.rendering, "PYOPENGL_PLATFORM": self.rendering} if self.rendering else {}
        variables = tuple(sorted({**drawn, **self.variables}.items()))
        libraries = tuple(map(str, self.ld_library_path))
        return InterpreterKey(self.python, variables, libraries, "" if self.folder is None else str(self.folder))

    def hosting(self, of_hub: Hosting | None = None) -> Hosting:
        own: dict[str, Any] = {name: getattr(self, name) for name in vars(Hosting())}
        own["gpus"] = None if self.gpus is None else [*self.gpus]
        own["recycle"] = None if self.recycle is None else Recycle(**structs.asdict(self.recycle))
        return replace(of_hub or Hosting(), **{name: value for name, value in own.items() if value is not None})


NO_SETTINGS = EnvSettings()


@dataclass(frozen=True)
class Recipe:
    """Recipe of an env: made by ``name`` after importing ``modules``, or by the factory ``entry``."""

    name: str
    modules: tuple[str, ...] = ()
    entry: str = ""
    arguments: frozenset[str] = frozenset()
    settings: EnvSettings = NO_SETTINGS


@dataclass(frozen=True)
class _Entry:
    """An offer under ``name``, perhaps a pattern of ids: of ``factory``, else ``id``, else the id asked for."""

    name: str
    id: str = ""
    modules: tuple[str, ...] = ()
    factory: str = ""
    settings: EnvSettings = NO_SETTINGS

    @property
    def literal(self) -> bool:
        return bool(self.factory or self.id or not WILDCARD.search(self.name))

    def matches(self, name: str) -> bool:
        return self.name == name if self.literal else fnmatchcase(name, self.name)

    def exists(self, registered: Sequence[str]) -> bool:
        """True if there is something to offer, given the registered ids; a factory's module is not looked into."""
        return bool(self.factory) or any(fnmatchcase(name, self.id or self.name) for name in registered)


class EnvNotFound(ValueError):
    """An entry names an id or a factory that does not exist, or an env is not ready that is required."""


class Registry:
    """The entries of a hub, with a table of settings for each other env; an entry comes before a table.

    An entry is an id (``CartPole-v1``), perhaps with its module (``ale_py:ALE/Pong-v5``), a pattern (``ALE/*``), or
    ``name=module:factory``; without any, every registered id. ``arguments``, as ``name=argument,argument``, are what
    clients may pass without the right to deploy. ``vector``: the entries are vector envs. Raises ``ValueError``.
    """

    def __init__(
        self,
        entries: Sequence[str] = (),
        arguments: Sequence[str] = (),
        tables: Mapping[str, EnvSettings] = MappingProxyType({}),
        defaults: EnvSettings = NO_SETTINGS,
        vector: bool = False,
    ) -> None:
        self.offers_all = not entries and not tables
        self._defaults = defaults
        own = [_parse(entry) for entry in (("*",) if self.offers_all else entries)]
        settings = replace(self._defaults, vector=vector)
        self._entries = [replace(entry, settings=settings) for entry in own]
        for name, settings in tables.items():
            python, rendering = settings.python or defaults.python, settings.rendering or defaults.rendering
            self._entries.append(_from_table(name, replace(settings, python=python, rendering=rendering)))
        self._arguments = [parse_arguments(text) for text in arguments]

    @property
    def interpreters(self) -> list[InterpreterKey]:
        return [*dict.fromkeys(entry.settings.interpreter for entry in self._entries)]

    def modules(self, key: InterpreterKey) -> list[str]:
        return sorted({module for entry in self._of(key) for module in entry.modules})

    def factories(self, key: InterpreterKey) -> list[str]:
        return sorted({entry.factory for entry in self._of(key) if entry.factory})

    def rendering(self, key: InterpreterKey) -> str:
        return next((entry.settings.rendering for entry in self._of(key) if entry.settings.rendering), "")

    def names(self, key: InterpreterKey, factory: str = "") -> list[str]:
        return [entry.name for entry in self._of(key) if not factory or entry.factory == factory]

    def names_of_module(self, key: InterpreterKey, module: str) -> list[str]:
        """The names of the envs of this interpreter that need a module: that their factory is in, or registers ids."""
        of_each = ((entry, entry.factory.partition(":")[0]) for entry in self._of(key))
        return [entry.name for entry, own in of_each if module in (own, *entry.modules)]

    def _of(self, key: InterpreterKey) -> list[_Entry]:
        return [entry for entry in self._entries if entry.settings.interpreter == key]

    @property
    def required(self) -> set[str]:
        return {entry.name for entry in self._entries if entry.settings.required}

    def lone_factory(self) -> str:
        """The factory of the only entry, if it has one and the hub's own interpreter; else empty."""
        (entry, *others) = self._entries
        return "" if others or entry.settings.interpreter.is_other else entry.factory

    def not_found(self, factory: str, why: str) -> EnvNotFound:
        name = next(entry.name for entry in self._entries if entry.factory == factory)
        return EnvNotFound(f"{name}={factory} cannot be made: {why}")

    def factory_recipe(self, vector: bool) -> Recipe:
        return Recipe("", settings=replace(self._defaults, vector=vector))

    def find(self, name: str) -> Recipe | None:
        """The recipe of a name, which may begin with its own module, as for ``gymnasium.make``, and no other one."""
        module, _, bare = name.rpartition(":")
        if bare.startswith("EnvHub/"):
            return None  # an env of another hub, or of this one
        for entry in self._entries:
            if entry.matches(bare) and (not module or module in entry.modules):
                made = entry.id or (entry.name if entry.factory else bare)
                modules = entry.modules or namespace_modules(made)
                declared = [names for pattern, names in self._arguments if fnmatchcase(bare, pattern)]
                arguments = frozenset[str]().union(*declared)
                return Recipe(made, modules, entry.factory, arguments, entry.settings)
        return None

    def offered(self, registered: Mapping[InterpreterKey, Sequence[str]]) -> list[str]:
        named: set[str] = set()
        for entry in self._entries:
            ids = registered.get(entry.settings.interpreter)
            if entry.literal and (ids is None or entry.exists(ids)):
                named.add(entry.name)
        for key, ids in registered.items():
            recipes = ((name, self.find(name)) for name in ids)
            named.update(name for name, recipe in recipes if recipe is not None and recipe.settings.interpreter == key)
        return sorted(named)

    def nearest(self, name: str, names: Sequence[str] | None = None) -> list[str]:
        """The few names on offer that resemble this one, the most similar first; by default of literal ones."""
        candidates = self._literal_names() if names is None else names
        near: list[str] = []
        for spelling in (str.casefold, lambda each: VERSION.sub("", each.casefold().rpartition("/")[2])):
            spelled = {spelling(each): each for each in candidates}
            wanted = spelling(name.rpartition(":")[2])
            near += [spelled[each] for each in get_close_matches(wanted[:NAME_CHARS_MAX], spelled, NEAREST_MAX)]
        return [*dict.fromkeys(near)][:NEAREST_MAX]

    def example(self, ready: Sequence[str]) -> str:
        return next((name for name in (*self._literal_names(), *EXAMPLES, *ready) if name in ready), "")

    def _literal_names(self) -> list[str]:
        return [entry.name for entry in self._entries if entry.literal]

    def unmatched(self, key: InterpreterKey, registered: Sequence[str]) -> dict[str, str]:
        unknown = [entry for entry in self._of(key) if not entry.exists(registered)]
        return {entry.name: self._why_unmatched(entry, registered, key.python or sys.executable) for entry in unknown}

    def impossible(self, key: InterpreterKey, registered: Sequence[str], imported: bool) -> str:
        """The reason why an entry can never name an id; unless all is ``imported``, of one without a module."""
        unmatched = {} if key.is_other else self.unmatched(key, registered)
        sure = imported or len(self._entries) == 1
        entries = (entry for entry in self._of(key) if entry.name in unmatched)
        return next((unmatched[each.name] for each in entries if sure or not each.modules), "")

    def _why_unmatched(self, entry: _Entry, registered: Sequence[str], python: str) -> str:
        wanted = entry.id or entry.name
        text = f"no id {brief(wanted)} is registered{on_this_machine()}"
        namespace = wanted.partition("/")[0]
        if namespace in NAMESPACES and not any(name.startswith(f"{namespace}/") for name in registered):
            return f"{text}; its package is not there, run: {install(python, package_of(NAMESPACES[namespace]))}"
        near = self.nearest(wanted, registered)
        return f"{text}; did you mean {' or '.join(map(repr, near))}?" if near else text


def is_factory(name: str) -> bool:
    """True if it is ``module:factory``: what follows the colon is a name in Python, which a versioned id is not."""
    module, _, attribute = name.rpartition(":")
    return bool(module) and all(map(str.isidentifier, attribute.split(".")))


def program_recipe(make: Make) -> Recipe:
    """The recipe of an env that the program of a private hub names: an id, ``module:id`` or ``module:factory``."""
    settings = EnvSettings(vector=make.vector)
    if make.program_environment is not None:
        rendering: Any = make.program_environment.rendering
        drawn = rendering if rendering in ("egl", "osmesa") else None
        # Workers of another Python do not adopt the program's paths, and import what is in its working directory.
        folder = Path(make.program_environment.cwd) if make.program_environment.python else None
        settings = replace(settings, python=make.program_environment.python, rendering=drawn, folder=folder)
    name = make.name
    return Recipe(name, namespace_modules(name), name if is_factory(name) else "", settings=settings)


def namespace_modules(name: str) -> tuple[str, ...]:
    namespace, slash, _ = name.partition("/")
    return (NAMESPACES[namespace],) if slash and namespace in NAMESPACES else ()


def _parse(entry: str) -> _Entry:
    if not entry.isprintable():  # no module or id has such a name, and errors and logs would show it
        raise ValueError(f"{entry!r} has characters that cannot be printed")
    if "://" in entry:  # an address, whose key is not to be shown
        raise ValueError("an address was given as an environment: name the environments, and give addresses by --bind")
    name, equals, factory = entry.partition("=")
    if equals:
        module, colon, attribute = factory.partition(":")
        if not (name and module and colon and attribute) or ":" in name:
            raise ValueError(f"{entry!r} should read name=module:factory, with no colon in the name")
        return _Entry(name, factory=factory)
    module, colon, bare = entry.rpartition(":")
    if not bare or (colon and not module):
        raise ValueError(f"{entry!r} is neither an id, module:id, a pattern nor name=module:factory")
    return _Entry(bare, modules=(module,) if module else namespace_modules(bare))


def _from_table(name: str, settings: EnvSettings) -> _Entry:
    if not (settings.env + name).isprintable():
        raise ValueError(f"env = {value_text(settings.env)}: a character cannot be printed")
    if not settings.env:
        return replace(_parse(name), settings=settings)
    if ":" in name:
        raise ValueError("has an env, and should have no colon in its name")
    if is_factory(settings.env):
        return _Entry(name, factory=settings.env, settings=settings)
    made = _parse(settings.env)
    if made.factory or not made.literal:
        text = f"env = {value_text(settings.env)}: expected an id, module:id or module:factory"
        raise ValueError(text)
    return _Entry(name, made.name, made.modules, settings=settings)


ENVS_MAX = 512  # the one used longest ago is forgotten for a new one


def key(make: Make) -> str:
    """The key of a session's env; empty if the env cannot be told from others."""
    if (make.factories or make.runner) and not make.factories_digest:
        return ""
    names = [make.name, make.factories_digest, *make.wrappers]
    fields = [*(name.encode() for name in names), make.kwargs, *make.wrapper_kwargs, *make.kwargs_each]
    lengths = ",".join(str(len(field)) for field in fields)
    return hashlib.sha256(b"".join([lengths.encode(), *fields])).hexdigest()


class ForkedImports:
    """Says which envs can be made by workers that are forked with the imports of another; knows those made last."""

    def __init__(self) -> None:
        self._refused: dict[str, None] = {}  # those that cannot, in the order of their last making

    def suits(self, make: Make) -> bool:
        return key(make) not in self._refused

    def learn(self, make: Make, suits: bool) -> None:
        at = key(make)
        self._refused.pop(at, None)
        if at and not suits:
            self._refused[at] = None
            if len(self._refused) > ENVS_MAX:
                del self._refused[next(iter(self._refused))]
