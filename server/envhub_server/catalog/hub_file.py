"""The file that ``envhub serve --config`` reads: the hub's options, and a table for each environment.

::

    bind = ["tcp://127.0.0.1:5555"]

    [envs.arm]
    env = "my_sims:make"

A path that is not absolute is one in the folder of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from envhub.files import read_regular_file
from envhub.options import RETIRED, HubOptions, OptionError, kinds_of, options_from
from envhub_server.catalog.env_settings import EnvSettings
from envhub_server.catalog.registry import Registry
from envhub_server.toml_text import TomlError, heading, key_text, read_toml

FILE_BYTES_MAX = 1 << 20
OPTIONS, KEYS_OF_ENVS = kinds_of(HubOptions), kinds_of(EnvSettings)


class HubFileError(ValueError):
    """A hub's file cannot be used."""


@dataclass(frozen=True)
class HubFile:
    """Content of a file.

    Attributes:
        options: of the hub, those alone that the file has, by name.
        envs: the settings of each environment, by the name under which it is offered.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    envs: Mapping[str, EnvSettings] = field(default_factory=dict)


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
    where, folder = f"{path}: ", path.absolute().parent
    try:
        options = options_from(content, HubOptions, where, folder, key_text, _hint_of_hub)
        tables = {name: _settings(name, table, f"{where}{heading(name)} ", folder) for name, table in envs.items()}
    except OptionError as error:
        raise HubFileError(str(error)) from error
    return HubFile(options, tables)


def _settings(name: str, table: Mapping[str, Any], where: str, folder: Path) -> EnvSettings:
    """Return the settings of an environment."""
    options = options_from(table, EnvSettings, where, folder, key_text, _hint_of_env)
    try:
        settings = EnvSettings(**options)
    except ValueError as error:  # values that do not go together
        raise OptionError(f"{where}{error}") from error
    try:
        Registry(tables={name: settings})
    except ValueError as error:  # the table's name or its ``env`` offers nothing
        raise OptionError(f"{where.partition(': ')[0]}: {error}") from error
    return settings


def _hint_of_hub(name: str, value: Any) -> str:
    """Describe an unknown key outside the tables of envs."""
    if name in RETIRED:
        return f"; {RETIRED[name]}."
    if get_close_matches(name, ["envs"], 1) and isinstance(value, dict):
        return ", did you mean 'envs'? An environment has a table such as [envs.NAME]."
    if isinstance(value, dict) and not get_close_matches(name, OPTIONS):
        return f"; the table of an environment is {heading(name)}."
    if name in KEYS_OF_ENVS:
        return "; it is one of an environment's table, such as [envs.NAME]."
    return ""


def _hint_of_env(name: str, value: Any) -> str:
    """Describe an unknown key in a table of an env."""
    if name in RETIRED:
        return f"; {RETIRED[name]}."
    if isinstance(value, dict) and not get_close_matches(name, KEYS_OF_ENVS):
        return "; a name with a dot is written in quotes."
    if name in OPTIONS:
        return "; it is one of the hub, and stands before the first table."
    return ""
