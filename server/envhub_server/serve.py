"""``envhub serve``: runs a hub in this process, and checks its configuration first."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from envhub.errors import hide_secrets_in
from envhub.files import weakness_of
from envhub.options import (
    HubArguments,
    HubOptions,
    OptionError,
    RecycleOptions,
    given,
    kinds_of,
    options_from,
    options_of_variables,
    variable_of,
)
from envhub.process import prepare_hub_process
from envhub.transport import address
from envhub_server import config
from envhub_server.catalog.registry import Registry
from envhub_server.config import HubConfig, check_config, key_text, settings_of_table
from envhub_server.hub.hub import Hub
from envhub_server.ipc.packages import remedy_of
from envhub_server.ipc.process_marks import own_folder
from envhub_server.log import configure as configure_log
from envhub_server.log import log
from envhub_server.processes.interpreter import InterpreterKey, UnsafeFolder, environment_of
from envhub_server.replay import ENVIRONMENT_VARIABLE as REPLAYS
from envhub_server.replay import default_path
from envhub_server.systemd import ServiceManager

PATH = "PYTHONPATH"


def check_folders(registry: Registry) -> None:
    """Raise ``UnsafeFolder`` if another user may write what workers import, by its mode; warn of other folders."""
    warned: dict[str, str] = {}
    for key in registry.interpreters:
        search_path = environment_of(key, key.python, os.environ).get(PATH, "")
        named = [folder for folder in search_path.split(os.pathsep) if os.path.isdir(folder)]
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
        path = spec.origin or next(iter(spec.submodule_search_locations or ()))
        # In a sticky folder other users cannot replace the module, but can add one that it imports.
        weakness = next((each for each in map(weakness_of, (folder, path)) if each is not None and each.open), None)
        if weakness is not None:
            raise UnsafeFolder(
                f"workers would import {package!r} from {path}, but {weakness}, whose code would run as the hub's "
                f"user: run `chmod go-w {weakness.path}`, or, if that is meant to be, name {folder} in {PATH}"
            )


def _installed(package: str, folder: str) -> str:
    """The path of a module that hides one in the folder, because it comes first; empty if there is none."""
    if package in sys.builtin_module_names:
        return "Python"
    own = os.path.realpath(folder)
    spec = PathFinder.find_spec(package, [each for each in sys.path if os.path.realpath(each) != own])
    return "" if spec is None or spec.origin is None else spec.origin


class Configuration(NamedTuple):
    """A configuration as it was read, the origin of each of its options, and what is odd about its sources."""

    config: HubConfig
    origins: Mapping[str, str]  # by option; a table's options are named as ``recycle.episodes``
    warnings: Sequence[str]


def read_configuration(
    entries: Sequence[str],
    arguments: HubArguments | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Configuration:
    """Read the configuration of ``envhub serve``: the command line comes before variables, these before the file.

    ``entries`` are offered besides the envs of the file. Raises ``ValueError`` if a source cannot be used.
    """
    written = given(arguments or HubArguments())
    by_options = options_from(written, HubOptions, "--", key=lambda name: name.replace("_", "-"))
    by_variables, warnings = options_of_variables(environ)
    if environ.get(REPLAYS):
        by_variables["replays"] = default_path(environ)
    by_file, tables = config.read_hub_file(file) if file is not None else ({}, {})
    origins: dict[str, str] = {}
    options: dict[str, Any] = {"replays": default_path(environ)}
    layers: tuple[tuple[dict[str, Any], Callable[[str], str]], ...] = (
        (_flat(by_file, set()), lambda name: f"file {file}"),
        (by_variables, lambda name: f"variable {variable_of(name)}"),
        (_flat(by_options, written.get("recycle", {}).keys()), lambda name: f"option --{name.replace('_', '-')}"),
    )
    for layer, source in layers:
        options |= layer
        origins |= {name: source(name) for name in layer}
    bounds = [name for name in options if name.startswith("recycle.")]
    options["recycle"] = RecycleOptions(**{name.partition(".")[2]: options.pop(name) for name in bounds})
    if (replays := options["replays"]) is not None and os.path.lexists(replays) and not os.path.isdir(replays):
        raise ValueError(f"replays cannot be kept in {replays}, which is no folder; name another by --replays")
    try:
        return Configuration(HubConfig(envs=tuple(entries), tables=tables, **options), origins, warnings)
    except ValueError as error:
        raise ValueError(f"{error} (the command line, variables and {file})" if file else str(error)) from error


def _flat(options: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The options with each bound of ``recycle`` by itself that is not the default, or is among these names."""
    bounds = msgspec.structs.asdict(options.pop("recycle", RecycleOptions()))
    usual = RecycleOptions()
    kept = {name: value for name, value in bounds.items() if name in names or value != getattr(usual, name)}
    return options | {f"recycle.{name}": value for name, value in kept.items()}


def settings_of(read: Configuration, file: Path | None) -> list[tuple[str, Any, str]]:
    """The name, the value and the origin of each setting, of types that JSON has and without what may be a secret."""
    config, origins = read.config, read.origins
    effective = replace(config, bind=config.bind or (address.default_address(),), name=config.name_of_hub)
    values = msgspec.to_builtins({name: getattr(effective, name) for name in kinds_of(HubOptions)}, enc_hook=str)
    values |= {f"recycle.{key}": value for key, value in values.pop("recycle").items()}
    rows = [(name, value, origins.get(name, "default")) for name, value in values.items()]
    rows += [("envs", list(config.envs), "arguments")] if config.envs else []
    for name, table in config.tables.items():
        values = {"env": name, **settings_of_table(table)}
        rows += [(f"envs.{key_text(name)}.{key}", value, f"file {file}") for key, value in values.items()]
    hidden: list[tuple[str, Any, str]] = hide_secrets_in(rows)
    return hidden


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


def checked(config: HubConfig) -> HubConfig:
    """The configuration with an address, if it can be served; raises as ``serve`` for what is found before its start.

    Another user's folder of modules, and a module that is not used, are logged.
    """
    if not config.bind:
        config = replace(config, bind=(address.default_address(),))
    check_config(config)
    check_folders(config.registry())
    check_package(config)
    return config


def serve(
    config: HubConfig,
    ready: Callable[[Hub, str], None],
    listed: Callable[[Hub], None],
    reread: Callable[[], HubConfig],
) -> None:
    """Run a hub in this process, in its main thread, until SIGTERM or SIGINT.

    Without addresses it listens on the default address of clients. It logs one line per change of a session or worker
    to stderr, or to the file of ``log``.

    Args:
        config: the environments and addresses, among others.
        ready: called once the hub listens, with the URL of its page, which may have a token; empty if it has none.
        listed: called once it is known which envs are ready.
        reread: reads the configuration again, after SIGHUP or by an operator's order.

    Raises:
        DescriptorsShort: this process may open too few files to serve a client.
        EnvNotFound: the hub is to offer what can never be made, or a required env is not ready.
        OptionError: the log cannot be written, or the page cannot be served.
        UnsafeFolder: an env would be imported from a folder that others may write to.
        AddressError, KeysError: as of ``Hub.opened``.
    """
    manager = ServiceManager(os.environ)
    try:
        configure_log(config.log_level, config.log)
    except OSError as error:
        raise OptionError(f"log = {config.log}: {error.strerror}; name a file that the hub's user may write") from error
    config = checked(config)
    prepare_hub_process()
    with contextlib.ExitStack() as until_end:
        web = None
        if config.web is not None:
            from envhub_server.web.process import WebProcess

            web = until_end.enter_context(contextlib.closing(WebProcess(config)))

        def reached(config: HubConfig) -> HubConfig:
            return config if web is None else web.reached(config)

        hub = Hub(reached(config), None, listed, manager, lambda: reached(checked(reread())))
        with hub.opened():
            if web is not None:
                web.start(next(each for each in hub.addresses if each.startswith("ipc:")), hub.supervisor)
            ready(hub, "" if web is None else web.url)
            hub.run()
