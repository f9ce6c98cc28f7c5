"""The check of the files from which workers will import an operator's modules, before a hub serves. Imports none."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

from envhub.files import weakness_of
from envhub_server.catalog.registry import Registry
from envhub_server.log import Logger
from envhub_server.processes.import_folder import UnsafeFolder, import_folder
from envhub_server.processes.interpreter import InterpreterKey, environment_of

PATH = "PYTHONPATH"

log = Logger("envhub.hub")


def check_folders(registry: Registry) -> None:
    """Check by folders' modes that only the hub's user and root can write the modules that workers import.

    Warns of folders of other users, of those in ``PYTHONPATH``, and of those from which nothing has to be imported.

    Raises:
        UnsafeFolder: an env would be imported from a folder that others may write to.
    """
    warned: dict[str, str] = {}
    for key in registry.interpreters:
        named = _named_by_operator(key)
        warned |= dict.fromkeys(named, f"it is in {PATH}: modules are imported from it")
        folder = import_folder(key.folder)
        if not folder or os.path.realpath(folder) in map(os.path.realpath, named):
            continue
        _check_modules(key, registry, folder)
        weakness = weakness_of(folder)
        is_open = weakness is not None and weakness.open
        warned.setdefault(folder, f"modules are {'not ' if is_open else ''}imported from it")
    for folder, note in warned.items():
        if (weakness := weakness_of(folder)) is not None:
            # Event: Another user may write to, or owns, a folder from which modules are imported, or would be.
            log.warning("folder_unsafe", folder=folder, why=str(weakness), note=note)


def _named_by_operator(key: InterpreterKey) -> list[str]:
    """The folders of ``PYTHONPATH``, as workers of this interpreter have it."""
    said = environment_of(key, key.python, os.environ).get(PATH, "")
    return [folder for folder in said.split(os.pathsep) if os.path.isdir(folder)]


def _check_modules(key: InterpreterKey, registry: Registry, folder: str) -> None:
    named = [*registry.modules(key), *(factory.partition(":")[0] for factory in registry.factories(key))]
    for package in sorted({module.partition(".")[0] for module in named}):
        spec = PathFinder.find_spec(package, [folder])
        if spec is None:
            continue
        if not key.is_other and (used := _installed(package, folder)):
            if spec.origin is not None:
                text = "what is installed comes first: give the file another name, or put its folder into PYTHONPATH"
                # Event: A module of the hub's folder is not imported, since an installed one has its name.
                log.warning("module_shadowed", module=package, file=spec.origin, used=used, note=text)
            continue
        place = _place(spec)
        # In a sticky folder other users cannot replace the module, but can add one that it imports.
        weakness = next((each for each in map(weakness_of, (folder, place)) if each is not None and each.open), None)
        if weakness is not None:
            raise UnsafeFolder(
                f"workers would import {package!r} from {place}, but {weakness}, whose code would run as the hub's "
                f"user: run `chmod go-w {weakness.place}`, or, if that is meant to be, name {folder} in {PATH}"
            )


def _installed(package: str, folder: str) -> str:
    """The place of a module that hides one in the folder, because it comes first; empty if there is none."""
    if package in sys.builtin_module_names:
        return "Python"
    own = os.path.realpath(folder)
    spec = PathFinder.find_spec(package, [place for place in sys.path if os.path.realpath(place) != own])
    return "" if spec is None or spec.origin is None else spec.origin


def _place(spec: ModuleSpec) -> str:
    folders: Sequence[str] = spec.submodule_search_locations or ()
    return spec.origin or next(iter(folders))
