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
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from envhub.arena.spin import configured_spin_us
from envhub.files import read_regular_file
from envhub.options import (
    CPUS_MAX,
    RETIRED,
    HubOptions,
    OptionError,
    check_distinct,
    check_options,
    kinds_of,
    options_from,
)
from envhub.protocol.messages import Hosting, Recycle
from envhub_server.catalog.registry import EnvSettings, Registry
from envhub_server.processes.interpreter import INTERPRETERS_MAX
from envhub_server.processes.worker_handle import counter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CGROUP_1_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
CGROUP_1_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
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
        check_options(self, HubOptions)
        check_distinct("bind", self.bind)
        check_distinct("gpus", self.gpus)
        for table in self.tables.values():
            check_options(table, EnvSettings)
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

    def said(self) -> dict[str, Any]:
        """Settings that differ from the defaults, by name, of types that JSON has; of tables their names."""
        usual = HubConfig()
        changed = {name: value for name, value in vars(self).items() if value != getattr(usual, name)}
        if self.tables:
            changed["tables"] = list(self.tables)
        said: dict[str, Any] = msgspec.to_builtins(changed, enc_hook=str)
        return said

    @property
    def name_of_hub(self) -> str:
        return self.name or socket.gethostname()

    @property
    def private(self) -> bool:
        """True if this hub belongs to one program, whose code its workers may run."""
        return self.program is not None


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
        quota, period = CGROUP_QUOTA.read_text().split()
        return (0 if quota == "max" else int(quota)), int(period)
    with contextlib.suppress(OSError, ValueError):
        return int(CGROUP_1_QUOTA.read_text()), int(CGROUP_1_PERIOD.read_text())
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


_DIGITS = re.compile(r"[0-9][0-9_]*")
_KEY = re.compile(r"^[ \t]*([^\s=#\[][^=\n#]*?)[ \t]*=", re.MULTILINE)
BARE_KEY = re.compile(r"[A-Za-z0-9_]+")  # with dashes TOML allows more, but most write quotes


class TomlError(ValueError):
    """A text is not valid TOML; the message is what follows the file's name."""


def read_toml(text: str) -> dict[str, Any]:
    """Raises ``TomlError``, which says the problem and its place."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
        return table
    except RecursionError as error:
        raise TomlError("cannot be read: its values are nested too deeply") from error
    except tomllib.TOMLDecodeError as error:
        quotes = " (a name such as ALE/* is written in quotes)" if "table declaration" in str(error) else ""
        raise TomlError(f"is no TOML: {error}{quotes}") from error
    except ValueError as error:  # of ``int``, which knows no place
        longest = max(_DIGITS.finditer(text), key=lambda table: len(table[0]))
        keys = _KEY.findall(text[: longest.start()])
        line = text.count("\n", 0, longest.start()) + 1
        why = f"a number has {len(longest[0])} digits, more than Python reads"
        raise TomlError(f"cannot be read: {keys[-1] if keys else 'a key'} (at line {line}): {why}") from error


def key_text(name: str) -> str:
    return name if BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def heading(name: str) -> str:
    return f"[envs.{key_text(name)}]"


FILE_BYTES_MAX = 1 << 20
OPTIONS, KEYS_OF_ENVS = kinds_of(HubOptions), kinds_of(EnvSettings)


def read_hub_file(path: Path) -> tuple[dict[str, Any], dict[str, EnvSettings]]:
    """A file's options, and each env's settings by the name under which it is offered; raises ``OptionError``."""
    try:
        content = read_toml(read_regular_file(path, FILE_BYTES_MAX).decode())
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from error
    except TomlError as error:
        raise OptionError(f"{path} {error}") from error
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
    except ValueError as error:  # values that do not go together
        raise OptionError(f"{where}{error}") from error
    try:
        Registry(tables={name: settings})
    except ValueError as error:  # the table's name or its ``env`` offers nothing
        raise OptionError(f"{where}{error}") from error
    return settings


def _hint_of_hub(name: str, value: Any) -> str:
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
    if name in RETIRED:
        return f"; {RETIRED[name]}."
    if isinstance(value, dict) and not get_close_matches(name, KEYS_OF_ENVS):
        return "; a name with a dot is written in quotes."
    if name in OPTIONS:
        return "; it is one of the hub, and stands before the first table."
    return ""
