"""The configuration of a hub: frozen, and checked once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from envhub.arena.spin import configured_spin_us
from envhub.errors import AddressError, hide_secrets_in
from envhub.files import read_regular_file
from envhub.options import CPUS_MAX, HubOptions, OptionError, check_distinct, kinds_of, options_from
from envhub.protocol.messages import Hosting, Recycle
from envhub.secret import SHOWN
from envhub.transport import address
from envhub_server.catalog.registry import NO_SETTINGS, EnvSettings, Registry
from envhub_server.processes.interpreter import INTERPRETERS_MAX
from envhub_server.processes.worker_handle import counter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
LOADAVG = Path("/proc/loadavg")


@dataclass(frozen=True, kw_only=True)
class HubConfig(HubOptions):
    """All settings of a hub: its operator's options, and what only a program says.

    Attributes:
        envs: what may be made, in the forms of ``envhub_server.catalog.registry``.
        tables: what else may be made, with its settings, by the name under which it is offered.
        program: a pidfd of the program that this private hub belongs to, and a socket, by which the program says that
            the hub is to stop; None for a public hub.
    """

    envs: tuple[str, ...] = ()
    tables: Mapping[str, EnvSettings] = field(default_factory=dict)
    program: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_distinct("bind", self.bind)
        check_distinct("gpus", self.gpus)
        configured_spin_us()
        interpreters = len(self.registry().interpreters)
        if interpreters > INTERPRETERS_MAX:
            text = f"{interpreters} interpreters, counting each with other settings; at most {INTERPRETERS_MAX} can be"
            raise ValueError(f"{text} used by one hub")

    @property
    def hosting(self) -> Hosting:
        """Settings of workers besides their envs: the default of sessions, and the most that a client may ask for."""
        return Hosting([*self.gpus], self.memory_max, self.spares, Recycle(**msgspec.structs.asdict(self.recycle)))

    def registry(self) -> Registry:
        defaults = EnvSettings(python=self.python, rendering=self.rendering)
        return Registry(self.envs, self.allow_arguments, self.tables, defaults, self.vector)

    def to_builtins(self) -> dict[str, Any]:
        """Settings that differ from the defaults, by name, of types that JSON has; of tables their names."""
        usual = HubConfig()
        changed = {name: value for name, value in vars(self).items() if value != getattr(usual, name)}
        if self.tables:
            changed["tables"] = list(self.tables)
        given: dict[str, Any] = msgspec.to_builtins(changed, enc_hook=str)
        return given

    @property
    def name_of_hub(self) -> str:
        return self.name or socket.gethostname()

    @property
    def private(self) -> bool:
        """True if this hub belongs to one program, whose code its workers may run."""
        return self.program is not None


# What is read once, when a hub starts, and what decides on the envs that it offers.
AT_START = (
    *("bind", "python", "worker_env", "keys", "insecure", "message_bytes_max", "replays", "log"),
    *("web", "web_password_file", "web_proxy", "web_films"),
)
OFFERS = ("envs", "tables", "vector", "rendering", "allow_arguments")
SECRET = re.compile("key|token|secret|pass|auth|cred", re.IGNORECASE)  # in the name of a variable


def check_config(config: HubConfig) -> None:
    """Refuse a configuration that offers every environment to other machines; raises ``AddressError``."""
    for bind in config.bind:
        parsed = address.parse_bind(bind)
        if config.registry().offers_all and not parsed.is_ipc and not parsed.is_loopback:
            raise AddressError(f"{bind} can be reached from other machines: name the environments to offer there")


Changes = dict[str, list[Any]]  # by name of a setting, its values before and after, of types that JSON has


def reloaded(current: HubConfig, read: HubConfig) -> tuple[HubConfig, Changes, Changes]:
    """The configuration with which a hub goes on, what changes by it, and what a restart would change, too.

    Raises ``ValueError`` if the configuration cannot be used.
    """
    config = replace(read, program=current.program, **{name: getattr(current, name) for name in AT_START})
    check_config(config)
    return config, _changes(current, config), _changes(config, replace(read, program=current.program))


def _changes(before: HubConfig, after: HubConfig) -> Changes:
    old, new = (
        {**vars(each), **{f"envs.{key_text(n)}": t for n, t in each.tables.items()}} for each in (before, after)
    )
    changes = {}
    for name in dict.fromkeys([*old, *new]):
        values = old.get(name), new.get(name)
        if values[0] != values[1] and name != "tables":
            tables = [settings_of_table(each) if isinstance(each, EnvSettings) else each for each in values]
            changes[name] = msgspec.json.decode(msgspec.json.encode(tables, enc_hook=str))
    hidden: Changes = hide_secrets_in(changes)
    return hidden


def settings_of_table(settings: EnvSettings) -> dict[str, Any]:
    """The settings that are not the default, of types that JSON has and without the values of secret variables."""
    changed = {name: value for name, value in vars(settings).items() if value != getattr(NO_SETTINGS, name)}
    values: dict[str, Any] = msgspec.to_builtins(changed, enc_hook=str)
    if "variables" in values:
        values["variables"] = {
            name: SHOWN if SECRET.search(name) else text for name, text in values["variables"].items()
        }
    return values


def usable_cpus(cpus_max: int | None = None) -> int:
    """The number of CPUs that this process may use: by its affinity, its cgroup's quota rounded up, and this bound."""
    cpus = min(len(os.sched_getaffinity(0)), cpus_max or CPUS_MAX)
    quota, period = _quota()
    return max(1, min(cpus, -(-quota // period))) if quota > 0 else cpus


def has_quota() -> bool:
    return _quota()[0] > 0


def _quota() -> tuple[int, int]:
    """The cgroup's microseconds of CPU time per period, of cgroup v2 or v1; not positive where there is no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return (0 if quota == "max" else int(quota)), int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((CGROUP / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota), int(period)
    return 0, 1


def memory_available_bytes() -> int:
    limits = [1 << 50]
    if (available := counter(MEMINFO, "MemAvailable:")) is not None:
        limits.append(available * 1024)
    cached = counter(CGROUP / "memory.stat", "inactive_file") or 0  # by files not read lately; can be reclaimed
    limits += [left + cached for left in _left_in_cgroup("memory.max", "memory.current")]
    limits += _left_in_cgroup("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")  # of cgroup v1
    return max(0, min(limits))


def processes_left() -> int:
    limit, limits = resource.getrlimit(resource.RLIMIT_NPROC)[0], [1 << 20]
    if limit != resource.RLIM_INFINITY:
        # It counts the machine's processes, also those of other users.
        with contextlib.suppress(OSError, ValueError, IndexError):
            limits.append(limit - int(LOADAVG.read_text().split()[3].partition("/")[2]))
    limits += _left_in_cgroup("pids.max", "pids.current")
    limits += _left_in_cgroup("pids/pids.max", "pids/pids.current")
    return max(0, min(limits))


def _left_in_cgroup(limit: str, used: str) -> list[int]:
    """The rest of a limit of the cgroup that is a container's root; empty where there is no limit."""
    try:
        at_most = (CGROUP / limit).read_text().strip()
        return [] if at_most == "max" else [int(at_most) - int((CGROUP / used).read_text())]
    except (OSError, ValueError):
        return []


BARE_KEY = re.compile(r"[A-Za-z0-9_]+")  # with dashes TOML allows more, but most write quotes


def read_toml(path: Path, text: str) -> dict[str, Any]:
    """Read the text of this file; raises ``OptionError``, which says the problem and its place."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
        return table
    except tomllib.TOMLDecodeError as error:
        quotes = " (a name such as ALE/* is written in quotes)" if "table declaration" in str(error) else ""
        raise OptionError(f"{path} is no TOML: {error}{quotes}") from error
    except (RecursionError, ValueError) as error:  # of values that are nested too deeply, of a number of many digits
        raise OptionError(f"{path} cannot be read: {error}") from error


def key_text(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def heading(name: str) -> str:
    return f"[envs.{key_text(name)}]"


FILE_BYTES_MAX = 1 << 20
OPTIONS, KEYS_OF_ENVS = kinds_of(HubOptions), kinds_of(EnvSettings)


def read_hub_file(path: Path) -> tuple[dict[str, Any], dict[str, EnvSettings]]:
    """A file's options, and each env's settings by the name under which it is offered; raises ``OptionError``."""
    try:
        content = read_toml(path, read_regular_file(path, FILE_BYTES_MAX).decode())
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is no TOML: {error}") from error
    envs = content.pop("envs", {})
    if not isinstance(envs, dict) or not all(isinstance(table, dict) for table in envs.values()):
        raise OptionError(f"{path}: envs has a table for each environment, such as [envs.NAME]")
    where, folder = f"{path}: ", path.absolute().parent
    options = options_from(content, HubOptions, where, folder, key_text, _hint_of_hub)
    return options, {name: _settings(name, table, f"{where}{heading(name)} ", folder) for name, table in envs.items()}


def _settings(name: str, table: Mapping[str, Any], where: str, folder: Path) -> EnvSettings:
    options = options_from(table, EnvSettings, where, folder, key_text, _hint_of_env)
    try:
        settings = EnvSettings(**options)
        Registry(tables={name: settings})
    except ValueError as error:  # values do not go together, or the table's name or its ``env`` offers nothing
        raise OptionError(f"{where}{error}") from error
    return settings


def _hint_of_hub(name: str, value: Any) -> str:
    if get_close_matches(name, ["envs"], 1) and isinstance(value, dict):
        return ", did you mean 'envs'? An environment has a table such as [envs.NAME]."
    if isinstance(value, dict) and not get_close_matches(name, OPTIONS):
        return f"; the table of an environment is {heading(name)}."
    if name in KEYS_OF_ENVS:
        return "; it is one of an environment's table, such as [envs.NAME]."
    return ""


def _hint_of_env(name: str, value: Any) -> str:
    if isinstance(value, dict) and not get_close_matches(name, KEYS_OF_ENVS):
        return "; a name with a dot is written in quotes."
    if name in OPTIONS:
        return "; it is one of the hub, and stands before the first table."
    return ""
