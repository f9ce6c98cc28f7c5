"""The configuration of a hub: frozen, and checked once."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from envhub.arena.spin import configured_spin_us
from envhub.protocol import validation
from envhub.protocol.messages import Hosting
from envhub_server.catalog.env_settings import EnvSettings
from envhub_server.catalog.record_settings import RecordSettings
from envhub_server.catalog.registry import Registry
from envhub_server.catalog.replay_folder import ReplayFolder
from envhub_server.operator_bounds import BOUNDS
from envhub_server.processes.interpreter import INTERPRETERS_MAX

MIB = 1 << 20
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CGROUP_1_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
CGROUP_1_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
LOADAVG = Path("/proc/loadavg")
_PARTS = ("limits", "timing", "hosting")  # of ``HubConfig``, whose fields are told by their own names


@dataclass(frozen=True)
class Limits:
    """The most that a hub gives to its clients."""

    sessions_max: int = 64
    envs_max: int = 4096
    envs_per_session_max: int = 1024
    arena_bytes_max: int = 2048 * MIB  # of all sessions together
    message_bytes_max: int = 64 * MIB  # one frame from a client; fixed once a socket is bound
    worker_memory_bytes_max: int = 0  # of each worker (RLIMIT_DATA), besides arenas and files; 0 for no limit
    close_s_max: float = 60.0  # that a client may give its envs to close
    spares_max: int = 8  # of one session, unless its operator says more
    replays_max: int = 200  # files in the folder of replays; 0 keeps none
    replays_bytes_max: int = 256 * MIB  # of them together
    recordings_memory_bytes_max: int = 16384 * MIB  # of all recordings together
    info_bytes: int = 2048  # room for an info in the arena, per row; it grows where an env shows more
    info_bytes_max: int = 1 * MIB  # of an info, besides the observation in it; a larger one loses entries


@dataclass(frozen=True)
class Timing:
    """The times that a hub waits, in seconds."""

    lease_s: float = 60.0  # for a client that lost its connection
    drain_s: float = 5.0  # for running requests to end, once the hub is stopping
    close_after_drain_s: float = 2.0  # for envs to close after that; `docker stop` kills after 10


@dataclass(frozen=True)
class HubConfig:
    """All settings of a hub; numbers of the operator's are within ``operator_bounds``, which ``table_check`` checks.

    Attributes:
        binds: addresses to listen on, ``tcp://host:port`` or ``ipc://path``.
        envs: what may be made, in the forms of ``envhub_server.catalog.registry``.
        tables: what else may be made, with its settings, by the name under which it is offered.
        workers: the number of workers of a session that asks for no number; None is a number that suits its envs.
        insecure: allow an address that other machines can reach, and other users of this one, without a key.
        keys: the folder of keys, see ``envhub_server.network.key_folder``; every tcp address then wants one. None for
            no keys.
        rendering: by what envs draw frames whose table says nothing: ``"egl"`` or ``"osmesa"``; empty for no choice.
        vector: whether ``envs`` are vector envs.
        python: the interpreter of envs whose table names none: Python 3.8 or later with NumPy, msgpack and Gymnasium
            (0.26 or later) or gym (0.21 or later), by its program or its virtual environment; empty for the hub's own.
        replays: the folder for what envs were asked that failed, for ``envhub replay``; None keeps none.
        record: which episodes of the sessions of envs whose table says nothing are recorded; None for none.
        step_costs: the file that keeps the costs of steps for later hubs; None for no file.
        audit: a file to which who connects, is refused, and has sessions is written; None for none.
        allow_factories: make envs also by factories that clients send, for the hub's own user and clients that may
            deploy; they run in workers.
        allow_arguments: which arguments of envs any client may give any value, see ``envhub_server.catalog.registry``.
        verbose_errors: tell all clients, not only the hub's own user, the folders in errors of envs.
        worker_variables: names of variables of the hub's environment that workers get, besides those that
            ``envhub_server.processes.interpreter`` lists. A private hub's workers get all of its program's.
        hosting: what workers get besides their envs: the default of sessions, and the most that a client may ask for.
            The table of an env may say otherwise.
        owner: a pidfd of the program that this private hub belongs to; None for a public hub.
    """

    binds: tuple[str, ...] = ()
    envs: tuple[str, ...] = ()
    workers: int | None = None
    insecure: bool = False
    keys: Path | None = None
    audit: Path | None = None
    allow_factories: bool = False
    allow_arguments: tuple[str, ...] = ()
    verbose_errors: bool = False
    worker_variables: tuple[str, ...] = ()
    hosting: Hosting = field(default_factory=Hosting)
    owner: int | None = None
    python: str = ""
    rendering: Literal["", "egl", "osmesa"] = ""
    vector: bool = False
    step_costs: Path | None = None
    replays: Path | None = None
    record: RecordSettings | None = None
    limits: Limits = Limits()
    timing: Timing = Timing()
    tables: Mapping[str, EnvSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        configured_spin_us()
        interpreters = len(self.registry().interpreters)
        if interpreters > INTERPRETERS_MAX:
            text = f"{interpreters} interpreters, counting each with other settings; at most {INTERPRETERS_MAX} can be"
            raise ValueError(f"{text} used by one hub")
        for said in (self.hosting, *(table.hosting() for table in self.tables.values())):
            validation.check(said)
            if said.spares is not None and not BOUNDS["spares"].admits(said.spares):
                raise ValueError(f"spares must be {BOUNDS['spares']} of a session, got {said.spares}")
            if len(set(said.gpus)) < len(said.gpus):
                raise ValueError(f"a device is given twice: gpus={said.gpus}")

    def registry(self) -> Registry:
        """Offers of the hub."""
        defaults = EnvSettings(python=self.python, rendering=self.rendering, record=self.record)
        return Registry(self.envs, self.allow_arguments, self.tables, defaults, self.vector)

    def said(self) -> dict[str, Any]:
        """Settings that differ from the defaults, by name, of types that JSON has; of tables their names."""
        usual = HubConfig()
        pairs = [(self, usual), *((getattr(self, part), getattr(usual, part)) for part in _PARTS)]
        told = {
            name: value
            for own, default in pairs
            for name, value in vars(own).items()
            if name not in _PARTS and value != getattr(default, name)
        }
        if self.tables:
            told["tables"] = list(self.tables)
        said: dict[str, Any] = msgspec.to_builtins(told, enc_hook=str)
        return said

    def replay_folder(self) -> ReplayFolder | None:
        """Folder of replays; None where none are kept."""
        limits = self.limits
        if self.replays is None or not limits.replays_max:
            return None
        return ReplayFolder(self.replays, limits.replays_max, limits.replays_bytes_max)

    @property
    def private(self) -> bool:
        """True if this hub belongs to one program, whose code its workers may run."""
        return self.owner is not None


def usable_cpus() -> int:
    """The number of CPUs that this process may use: by its affinity, and the quota of its cgroup, rounded up."""
    cpus = len(os.sched_getaffinity(0))
    quota, period = _quota()
    return max(1, min(cpus, -(-quota // period))) if quota > 0 else cpus


def has_quota() -> bool:
    """True if a cgroup limits the CPU time of this process."""
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
    """The bytes of memory that are left: on the machine, and in the cgroup of a container."""
    limits = [1 << 50]
    if (available := counter(MEMINFO, "MemAvailable:")) is not None:
        limits.append(available * 1024)
    cached = counter(CGROUP / "memory.stat", "inactive_file") or 0  # by files not read lately; can be reclaimed
    limits += [left + cached for left in _left_in_cgroup("memory.max", "memory.current")]
    limits += _left_in_cgroup("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")  # of cgroup v1
    return max(0, min(limits))


def processes_left() -> int:
    """The processes that may still be started, at least: by the user's limit, and in the cgroup of a container."""
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


def counter(file: Path, name: str) -> int | None:
    """The number after ``name`` in a file of the kernel with a name and a number per line; None if it has none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = file.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)
    return None
