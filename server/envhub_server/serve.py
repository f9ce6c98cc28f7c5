"""``envhub serve``: runs a hub in this process, and checks its configuration first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from envhub.errors import AddressError
from envhub.files import weakness_of
from envhub.options import HubArguments, HubOptions, given, options_from
from envhub.process import prepare_hub_process
from envhub.transport import address
from envhub_server import config
from envhub_server.catalog.registry import Registry
from envhub_server.config import HubConfig
from envhub_server.hub.hub import Hub
from envhub_server.ipc.packages import remedy_of
from envhub_server.ipc.process_marks import own_folder
from envhub_server.log import Logger
from envhub_server.log import configure as configure_log
from envhub_server.processes.interpreter import InterpreterKey, UnsafeFolder, ZygoteProcess, environment_of
from envhub_server.replay import default_path

PATH = "PYTHONPATH"

log = Logger("envhub.hub")


def check_folders(registry: Registry) -> None:
    """Raise ``UnsafeFolder`` if another user may write what workers import, by its mode; warn of other folders."""
    warned: dict[str, str] = {}
    for key in registry.interpreters:
        said = environment_of(key, key.python, os.environ).get(PATH, "")
        named = [folder for folder in said.split(os.pathsep) if os.path.isdir(folder)]
        warned |= dict.fromkeys(named, f"it is in {PATH}: modules are imported from it")
        folder = key.folder or own_folder()
        if not folder or os.path.realpath(folder) in map(os.path.realpath, named):
            continue
        _check_modules(key, registry, folder)
        weakness = weakness_of(folder)
        is_open = weakness is not None and weakness.open
        warned.setdefault(folder, f"modules are {'not ' if is_open else ''}imported from it")
    for folder, note in warned.items():
        if (weakness := weakness_of(folder)) is not None:
            # Event: Another user may write to, or owns, a folder of modules.
            log.warning("folder_unsafe", folder=folder, why=str(weakness), note=note)


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
        place = spec.origin or next(iter(spec.submodule_search_locations or ()))
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


def config_of(entries: Sequence[str], arguments: HubArguments | None = None, file: Path | None = None) -> HubConfig:
    """Return the configuration that ``envhub serve`` gets: by the command line, and by the file what that has not.

    Args:
        entries: what to offer, besides the envs of the file.
        arguments: the options of the command line; None for none.
        file: with options, and a table for each env; None for no file.

    Raises:
        ValueError: the file cannot be used, or a value is out of bounds.
    """
    dashed = options_from(given(arguments or HubArguments()), HubOptions, "--", key=lambda name: name.replace("_", "-"))
    from_file, tables = config.read_hub_file(file) if file is not None else ({}, {})
    options = {"replays": default_path(os.environ), **from_file, **dashed}
    if (replays := options["replays"]) is not None and os.path.lexists(replays) and not os.path.isdir(replays):
        raise ValueError(f"replays cannot be kept in {replays}, which is no folder; name another by --replays")
    try:
        return HubConfig(envs=tuple(entries), tables=tables, **options)
    except ValueError as error:
        raise ValueError(f"{error} (the command line and {file})" if file else str(error)) from error


def check_config(config: HubConfig) -> None:
    """Refuse a configuration that offers every environment to other machines; raises ``AddressError``."""
    for bind in config.bind:
        parsed = address.parse_bind(bind)
        if config.registry().offers_all and not parsed.is_ipc and not parsed.is_loopback:
            raise AddressError(f"{bind} can be reached from other machines: name the environments to offer there")


def check_package(config: HubConfig) -> None:
    """Raise ``EnvNotFound`` if the only env is of a package that does not exist; of several, a worker sees it."""
    registry = config.registry()
    if factory := registry.lone_factory():
        package = factory.partition(":")[0].partition(".")[0]
        # A worker also imports from the working directory. Nothing is imported here.
        folders = [each.folder or os.getcwd() for each in registry.interpreters]
        if package not in sys.modules and not PathFinder.find_spec(package, folders) and not find_spec(package):
            error = ModuleNotFoundError(f"No module named {package!r}", name=package)
            raise registry.not_found(factory, f"{error}{remedy_of(error, served=True)}")


def serve(
    config: HubConfig,
    ready: Callable[[Hub], None] = lambda hub: None,
    listed: Callable[[Hub], None] = lambda hub: None,
) -> None:
    """Run a hub in this process, in its main thread, until SIGTERM or SIGINT.

    Without addresses it listens on the default address of clients. It logs one line per change of a session or worker
    to stderr.

    Args:
        config: the environments and addresses, among others.
        ready: called once the hub listens; ``hub.addresses`` are the real ones.
        listed: called once it is known which envs are ready.

    Raises:
        AddressError: an address is malformed, in use, or open to other machines without keys or ``insecure``.
        KeysError: the keys cannot be used, or let strangers in.
        DescriptorsShort: this process may open too few files to serve a client.
        EnvNotFound: the hub is to offer what can never be made, or a required env is not ready.
        UnsafeFolder: an env would be imported from a folder that others may write to.
    """
    if not config.bind:
        config = replace(config, bind=(address.default_address(),))
    check_config(config)
    configure_log()
    check_folders(config.registry())
    check_package(config)
    prepare_hub_process()
    run_hub(config, ready, listed=listed)


def run_hub(
    config: HubConfig,
    ready: Callable[[Hub], None],
    zygote: ZygoteProcess | None = None,
    listed: Callable[[Hub], None] = lambda hub: None,
) -> None:
    """Serve in this prepared process until the hub is stopped, and leave nothing behind; raises as ``serve``."""
    hub = Hub(config, zygote, listed)
    with hub.opened():
        ready(hub)
        hub.run()
