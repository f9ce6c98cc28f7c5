"""Sources of a worker's envs: factories, registrations, and the environment of their program."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pickle
import re
import sys
import warnings
from functools import partial, reduce
from typing import Any, Iterator

from envhub.errors import meant
from envhub.values import codec
from envhub.values.gym_api import api, pickled, registered
from envhub_server.ipc import process_marks
from envhub_server.ipc.factories_memory import pickle_of
from envhub_server.ipc.packages import on_this_machine
from envhub_server.worker import gym_compat
from envhub_server.worker.other_interfaces import as_gymnasium
from envhub_server.worker.row import EnvRunner

BY_NAME = (
    "a worker imports the module of a factory by its name, and what the program has under that name is not there. Put "
    "the module's folder into sys.path before the envs are made (PYTHONPATH of a hub that others use), or send it by "
    "value: cloudpickle.register_pickle_by_value(module)"
)
_IMPORTING = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")  # files of frames
SOURCE_BYTES_MAX = 1 << 20  # limit for the arguments of one factory

_known_registrations: set[bytes] = set()  # the pickled entries of this process's registry, and the pickled list of them
_adopted: list[Any] = []  # what this process has taken over of a program, or its zygote had


def adopt_environment(build: Any) -> None:
    """Take over the paths, folder and variables of the program and the session, before anything is imported."""
    wanted = [build.sys_path, build.cwd, build.environ, build.argv, build.levels, build.authkey]
    if build.sys_path and wanted != _adopted:  # else envs' code was imported with these, and may have changed them
        _adopted[:] = wanted
        sys.path[:] = build.sys_path
        variables = {**build.environ, process_marks.VARIABLE: os.environ[process_marks.VARIABLE]}
        if variables != os.environ:  # usually they are equal: a zygote starts with its program's environment
            for name in os.environ.keys() - variables.keys():
                del os.environ[name]
            os.environ.update((name, value) for name, value in variables.items() if os.environ.get(name) != value)
        os.chdir(build.cwd)
        if build.argv:
            sys.argv[:] = build.argv
        if build.levels:
            adopt_levels(codec.decode(build.levels))
        if build.authkey:
            importlib.import_module("multiprocessing.process").current_process().authkey = build.authkey
    os.environ.update(build.variables)


def factories(build: Any, memory: int = -1) -> Any:
    # This process has adopted the environment of the envs. ``memory`` is the descriptor of pickled factories.
    for module in modules_of(build):
        importlib.import_module(module)
    if build.registrations:
        _register(build.registrations)
    if build.factories:
        _check_python(build, "factories", "have the hub offer the env by name: NAME=module:factory")
        loaded = PickledFactories(memory)
        loaded[build.rows[0]]  # so that an error is raised before an env is made
        return loaded
    if not (build.batch_workers or _is_factory(build)):
        gym_compat.import_entry_point(build.name)
    return named(build)


class PickledFactories(dict):  # type: ignore[type-arg]  # Python 3.8
    """The pickled factories of a worker, by row: each is loaded when it is first used."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def __missing__(self, row: int) -> Any:
        with pickle_of(self._descriptor, row) as (pickled, is_own), _names_explained():
            loaded = pickle.loads(pickled)  # noqa: S301  only ever sent to workers, never read by the hub
        self.update({row: loaded} if is_own else enumerate(loaded))
        return self[row]


@contextlib.contextmanager
def _names_explained() -> Iterator[None]:
    """Within the context, an error about a name in a pickle that does not exist says what to do."""
    try:
        yield
    except (ModuleNotFoundError, AttributeError) as error:
        if _is_of_a_name(error):
            text = f"{error}: {BY_NAME}"
            error.args = (text,)
            if isinstance(error, ModuleNotFoundError):
                error.msg = text  # which is its text
        raise


def _is_of_a_name(error: BaseException) -> bool:
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename not in (__file__, *_IMPORTING):
            return False
        at = at.tb_next
    return True


def set_up(build: Any) -> None:
    for entry in build.setups:
        _load(entry)()
    if build.setup:
        _check_python(build, "a worker_setup", "name it: worker_setup='module:function'")
        pickle.loads(build.setup)()  # noqa: S301  as of factories


def _check_python(build: Any, what: str, instead: str) -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if build.python not in ("", own):  # bytecode of another version could fail in any way, or crash
        text = f"{what} from a trainer with Python {build.python} cannot run in Python {own} ({sys.executable}"
        raise TypeError(f"{text}{on_this_machine()}): use that Python in the trainer, or {instead}")


def modules_of(build: Any) -> list[str]:
    return [*build.modules, *([build.entry.partition(":")[0]] if build.entry else [])]


def named(build: Any) -> Any:
    if build.batch_workers:
        kwargs: dict[str, Any] = codec.decode(build.kwargs, build.allow_pickle) if build.kwargs else {}
        is_factory = _is_factory(build)
        make = partial(_load(build.entry), **kwargs) if is_factory else gym_compat.vector_factory(build.name, kwargs)
        return dict.fromkeys(build.rows, make)
    each = dict(zip(build.rows, build.kwargs_each))
    return {row: partial(_make, build, each.get(row, build.kwargs)) for row in build.rows}


def _is_factory(build: Any) -> bool:
    """True if ``entry`` is a factory, and not an id without a version that has the same form."""
    if not build.entry or build.entry != build.name:
        return bool(build.entry)
    importlib.import_module(build.entry.partition(":")[0])
    return build.entry.partition(":")[2] not in registered()


def _make(build: Any, encoded: bytes) -> Any:
    kwargs: dict[str, Any] = codec.decode(encoded, build.allow_pickle) if encoded else {}
    if _is_factory(build):
        env = as_gymnasium(_load(build.entry)(**kwargs), build.entry)
    else:
        env = gym_compat.make(build.name, kwargs)
    for entry, arguments in zip(build.wrappers, build.wrapper_kwargs):
        wrapper = _load(entry)
        if not (isinstance(wrapper, type) and issubclass(wrapper, api.Wrapper)):
            raise TypeError(f"{entry} is no wrapper")
        env = wrapper(env, **codec.decode(arguments, build.allow_pickle))
    return env


def source_of(factory: Any) -> bytes:
    """The encoded name of a pickled factory: ``[entry, kwargs]`` with an encoded map of arguments."""
    # The entry is empty, and the ``repr`` of the function in place of the arguments, if it has no name, or arguments
    # that the codec cannot carry or that are large, because the hub keeps them.
    function, args, kwargs = factory, (), {}
    if isinstance(factory, partial):
        function, args, kwargs = factory.func, factory.args, factory.keywords
    module = getattr(function, "__module__", "")
    entry = f"{module}:{getattr(function, '__qualname__', '')}"
    try:
        # Positional arguments by name, such as the id or spec of ``make``.
        named_args: dict[str, Any] = dict(zip(inspect.signature(function).parameters, args))
        # A factory of a module that is not imported came by value; importing the module may take long.
        if module in sys.modules and module != "__main__" and _load(entry) is function:
            arguments = codec.encode({**named_args, **kwargs})
            if len(arguments) <= SOURCE_BYTES_MAX:
                return codec.encode([entry, arguments])
    except Exception:  # a name that does not exist, or an argument that the codec cannot carry
        pass
    return codec.encode(["", codec.as_repr(function).data[:256]])  # the repr of all arguments may have megabytes


def why_missing(entry: str) -> Exception | None:
    """The reason why the factory ``module:factory`` does not exist; None if it exists. Imports the module."""
    module = entry.partition(":")[0]
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return error
        raise  # the module exists, but a module that it imports does not
    try:
        _load(entry)
    except AttributeError as error:
        return error
    return None


def _load(entry: str) -> Any:
    module, _, name = entry.partition(":")
    imported = importlib.import_module(module)
    try:
        return getattr(imported, name)
    except AttributeError as error:
        raise AttributeError(f"{error}{meant(name, dir(imported))}") from None


def runner_class(pickled: bytes) -> Any:
    chosen = pickle.loads(pickled) if pickled else EnvRunner  # noqa: S301  from the owner of this private hub
    loaded = _load(chosen) if isinstance(chosen, str) else chosen
    if not (isinstance(loaded, type) and issubclass(loaded, EnvRunner)):
        raise TypeError(f"worker={chosen!r} is no subclass of envhub.EnvRunner")
    return loaded


def remember_registry() -> None:
    """Record this process's registry as a program pickles it, so that workers do not load equal entries again."""
    with contextlib.suppress(Exception):  # an entry that is not recorded is loaded
        entries = [pickled(spec) for spec in api.registry.values()]
        _known_registrations.update([*entries, pickle.dumps(entries)])


def _register(registrations: bytes) -> None:
    if registrations in _known_registrations:  # compared as a whole first: most programs add none
        return
    for entry in pickle.loads(registrations):  # noqa: S301  from the owner of this private hub, read only here
        if entry in _known_registrations:
            continue
        try:
            spec, callables = pickle.loads(entry)  # noqa: S301
        except Exception as error:  # most programs never use this entry, so it must not stop the others
            api.logger.warn(f"a registration of the program cannot be loaded in a worker: {error!r}")
            continue
        for name, blob in callables.items():
            setattr(spec, name, _Unloaded(blob))
        api.registry[spec.id] = spec
    _known_registrations.add(registrations)
    # The program's imported modules are registered already; an env that imports one registers it again.
    warnings.filterwarnings("ignore", r".*Overriding environment .* already in registry", UserWarning)


class _Unloaded:
    """A callable of the program's registry, loaded on first use: it may import modules that no env here needs."""

    def __init__(self, blob: bytes) -> None:
        self._blob, self._loaded = blob, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # such as the ``metadata`` of an env's class
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._load(), name)

    def __reduce__(self) -> Any:
        return pickle.loads, (self._blob,)

    def _load(self) -> Any:
        if self._loaded is None:
            self._loaded = pickle.loads(self._blob)  # noqa: S301  from the owner of this private hub
        return self._loaded


def adopt_levels(levels: Any) -> None:
    """Set the levels and filters of the program, a map as ``message_levels`` of the client encodes it."""
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
    message, module = (re.compile(*text) if isinstance(text, list) else text for text in (message, module))
    return action, message, kinds[0] if len(kinds) == 1 else kinds, module, line


def _category(named: str) -> type:
    """The class of this name, or one that stands for it: to import its module may take long, or be impossible here."""
    module, _, name = named.partition(":")
    kind: Any = None
    with contextlib.suppress(AttributeError):
        kind = reduce(getattr, name.split("."), sys.modules.get(module))
    return kind if isinstance(kind, type) else _Named(name, (Warning,), {"named": named})


class _Named(type):
    """A class of warnings that is known by its name: every class of that name, and each that extends it, extends it."""

    named: str

    def __subclasscheck__(cls, subclass: type) -> bool:
        return any(f"{each.__module__}:{each.__qualname__}" == cls.named for each in subclass.__mro__)
