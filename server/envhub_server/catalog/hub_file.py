"""The file that ``envhub serve --config`` reads: the hub's options, and a table for each environment.

::

    bind = ["tcp://127.0.0.1:5555"]

    [envs.arm]
    env = "my_sims:make"

A path that is not absolute is one in the folder of the file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from envhub.hub_options import HubOptions
from envhub.protocol.messages import Recycle
from envhub_server.catalog.env_settings import EnvSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_BYTES_MAX = 1 << 20

Table = TypeVar("Table", HubOptions, EnvSettings)


class HubFileError(ValueError):
    """A hub's file cannot be used."""


@dataclass(frozen=True)
class HubFile:
    """What a file says.

    Attributes:
        options: of the hub.
        envs: the settings of each environment, by the name under which it is offered.
    """

    options: HubOptions = field(default_factory=HubOptions)
    envs: Mapping[str, EnvSettings] = field(default_factory=dict)


def read(path: Path) -> HubFile:
    """What this file says.

    Raises:
        HubFileError: it cannot be read, or a key or a value is not allowed; it names the file, the key, and what is.
    """
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise HubFileError(f"{path} has more than {FILE_BYTES_MAX} bytes")
        found = tomllib.loads(text.decode())
    except OSError as error:
        raise HubFileError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HubFileError(f"{path} is no TOML: {error}") from error
    envs = found.pop("envs", {})
    if not isinstance(envs, dict) or not all(isinstance(table, dict) for table in envs.values()):
        raise HubFileError(f"{path}: envs has a table for each environment, such as [envs.NAME]")
    options = _converted(path, "", found, HubOptions)
    tables = {name: _converted(path, f"[envs.{name}] ", envs[name], EnvSettings) for name in envs}
    for name, settings in tables.items():
        _check_variables(path, f"[envs.{name}] ", settings.variables)
    return HubFile(options, tables)


def over(options: HubOptions, file: HubOptions) -> HubOptions:
    """The options of the command line, and those of the file where the command line says nothing."""
    return replace(file, **{name: value for name, value in vars(options).items() if value is not None})


def _converted(path: Path, where: str, table: dict[str, Any], kind: type[Table]) -> Table:
    """The table as one of this kind, with the paths in it made absolute."""
    _check_keys(path, where, table, kind)
    if isinstance(recycle := table.get("recycle"), dict):
        _check_keys(path, f"{where}recycle: ", recycle, Recycle)

    def convert(wanted: type, value: object) -> Path:
        if wanted is not Path or not isinstance(value, str):
            raise ValueError(f"Expected `str`, got `{type(value).__name__}`")
        return path.absolute().parent / Path(value).expanduser()

    try:
        found = msgspec.convert(table, kind, dec_hook=convert)
        program = found.python or ""
        beside = convert(Path, program)
        # Any other is a command.
        return replace(found, python=str(beside)) if "/" in program or (program and beside.exists()) else found
    except msgspec.ValidationError as error:
        what, _, key = str(error).replace(" | null", "").partition(" - at `$.")
        raise HubFileError(f"{path}: {where}{key.rstrip('`')}: {what}") from error


def _check_keys(path: Path, where: str, table: dict[str, Any], kind: type) -> None:
    """Refuse keys that are no fields of this dataclass."""
    allowed = [each.name for each in fields(kind)]
    for key in table:
        if key not in allowed:
            near = get_close_matches(key, allowed, 1)
            question = f", did you mean {near[0]!r}?" if near else "."
            raise HubFileError(f"{path}: {where}unknown key {key!r}{question} Keys here are: {', '.join(allowed)}")


def _check_variables(path: Path, where: str, variables: Mapping[str, str]) -> None:
    """Refuse variables that no process can have."""
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            why = f"{name!r}: a name is not empty and has no '=', and neither it nor its value has a null character"
            raise HubFileError(f"{path}: {where}variables: {why}")
