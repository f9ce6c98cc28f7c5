"""The file that ``envhub serve --config`` reads: the hub's options, and a table for each environment.

::

    bind = ["tcp://127.0.0.1:5555"]

    [envs.arm]
    env = "my_sims:make"

A path that is not absolute is one in the folder of the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from envhub.hub_options import HubOptions
from envhub.protocol.validation import is_function_name
from envhub.regular_file import read_regular_file
from envhub_server.catalog.env_settings import EnvSettings
from envhub_server.catalog.record_settings import RecordSettings
from envhub_server.catalog.registry import Registry
from envhub_server.table_check import Spot, TableError, checked_table, expanded
from envhub_server.toml_text import TomlError, heading, read_toml

FILE_BYTES_MAX = 1 << 20

Table = TypeVar("Table", HubOptions, EnvSettings)


class HubFileError(ValueError):
    """A hub's file cannot be used."""


@dataclass(frozen=True)
class HubFile:
    """Content of a file.

    Attributes:
        options: of the hub.
        envs: the settings of each environment, by the name under which it is offered.
        record: what is recorded of environments whose table does not say.
    """

    options: HubOptions = field(default_factory=HubOptions)
    envs: Mapping[str, EnvSettings] = field(default_factory=dict)
    record: RecordSettings | None = None


def read(path: Path) -> HubFile:
    """Read this file.

    Raises:
        HubFileError: it cannot be read, or a key or a value is not allowed; it names the file, the key, and what is.
    """
    try:
        content = read_toml(read_regular_file(path, FILE_BYTES_MAX).decode())
    except OSError as error:
        raise HubFileError(f"{path} cannot be read: {error.strerror}") from error
    except TomlError as error:
        raise HubFileError(f"{path} {error}") from error
    except UnicodeDecodeError as error:
        raise HubFileError(f"{path} is no TOML: {error}") from error
    envs = content.pop("envs", {})
    if not isinstance(envs, dict) or not all(isinstance(table, dict) for table in envs.values()):
        raise HubFileError(f"{path}: envs has a table for each environment, such as [envs.NAME]")
    try:
        said = {"record": content.pop("record")} if "record" in content else {}  # which the command line cannot say
        record = _converted(path, Spot(f"{path}: "), said, EnvSettings, _hint_of_env).recorded
        options = _converted(path, Spot(f"{path}: "), content, HubOptions, _hint_of_hub)
        tables = {name: _converted(path, _spot(path, name), envs[name], EnvSettings, _hint_of_env) for name in envs}
        for name, settings in tables.items():
            _check_variables(_spot(path, name).of_key("variables"), settings.variables)
            _check_setup(_spot(path, name).of_key("worker_setup"), settings.worker_setup)
            _check_entry(path, name, settings)
    except TableError as error:
        raise HubFileError(str(error)) from error
    return HubFile(options, tables, record)


def _spot(path: Path, name: str) -> Spot:
    return Spot(f"{path}: {heading(name)} ")


def over(options: HubOptions, file: HubOptions) -> HubOptions:
    """The options of the command line; the file's values replace options that the command line does not have."""
    return replace(file, **{name: value for name, value in vars(options).items() if value is not None})


def _converted(
    path: Path, spot: Spot, table: dict[str, Any], kind: type[Table], hint: Callable[[str, Any], str]
) -> Table:
    """The table as one of this kind, with the paths in it made absolute."""
    table = checked_table(table, kind, spot, hint)
    if isinstance(record := table.get("record"), dict):
        _check_record(spot.of_key("record"), record)

    def convert(wanted: type, value: str) -> Path:
        return path.absolute().parent / expanded(value)

    if isinstance(record, str) and record:
        table = {**table, "record": {"folder": record}}
    settings = msgspec.convert(table, kind, dec_hook=convert)
    program = settings.python or ""
    absolute = str(convert(Path, program))
    # Any other is a command.
    return replace(settings, python=absolute) if "/" in program or (program and os.path.exists(absolute)) else settings


def _hint_of_hub(name: str, value: Any) -> str:
    """Describe an unknown key outside the tables of envs."""
    if get_close_matches(name, ["record", *vars(HubOptions())], 1) == ["record"]:
        return ", did you mean 'record'?"
    if get_close_matches(name, ["envs"], 1) and isinstance(value, dict):
        return ", did you mean 'envs'? An environment has a table such as [envs.NAME]."
    if isinstance(value, dict) and not get_close_matches(name, vars(HubOptions())):
        return f"; the table of an environment is {heading(name)}."
    if name in vars(EnvSettings()):
        return "; it is one of an environment's table, such as [envs.NAME]."
    return ""


def _hint_of_env(name: str, value: Any) -> str:
    """Describe an unknown key in a table of an env."""
    if isinstance(value, dict) and not get_close_matches(name, vars(EnvSettings())):
        return "; a name with a dot is written in quotes."
    if name in vars(HubOptions()):
        return "; it is one of the hub, and stands before the first table."
    return ""


def _check_variables(spot: Spot, variables: Mapping[str, str]) -> None:
    """Refuse variables that no process can have."""
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            text = "a name is not empty and has no '=', and neither it nor its value has a null character"
            raise spot.of_key(name).refuse(value, text)


def _check_setup(spot: Spot, named: str) -> None:
    """Refuse a text that does not name a function."""
    if named and not is_function_name(named):
        raise spot.refuse(named, "expected module:function")


def _check_record(spot: Spot, record: Mapping[str, Any]) -> None:
    """Refuse a recording without a folder, or with films of envs that it leaves out."""
    if not record.get("folder"):
        keys = ", ".join(each.name for each in fields(RecordSettings))
        raise TableError(f"{spot.table}{spot.key}: folder is missing. Keys here are: {keys}")
    if strange := {*record.get("film", ())} - {*record.get("env_ids", record.get("film", ()))}:
        raise spot.of_key("film").refuse(record["film"], f"{min(strange)} is not among env_ids, which are recorded")


def _check_entry(path: Path, name: str, settings: EnvSettings) -> None:
    """Refuse a table whose name or ``env`` offers nothing."""
    try:
        Registry(tables={name: settings})
    except ValueError as error:
        raise TableError(f"{path}: {error}") from error
