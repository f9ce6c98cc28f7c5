"""``envhub doctor``: what a hub needs of its machine, and the line to run where something is wrong."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from envhub.transport.descriptors import new_memory
from envhub_server.config import has_quota, memory_available_bytes, processes_left, usable_cpus
from envhub_server.network import descriptor_guard
from envhub_server.processes.interpreter import ONE_THREAD

MIB = 1 << 20
PROCESSES_MIN, MEMORY_MIN, LOCKED_MIN = 64, 512 * MIB, 8 * MIB
SHM_MIN = 256 * MIB  # of /dev/shm, which data loaders of PyTorch use
LAG_S = 0.1  # as of ``envhub health``
TRY_S = 20.0  # for a process that tries a way to draw, or an interpreter
TIME_ERROR = 5  # of adjtimex(2): the clock is not synchronized
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")  # a read takes a microsecond, and a step has several
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
PYTHONS = [f"python3.{minor}" for minor in range(8, 15) if minor != sys.version_info.minor]
_LACKS = "import importlib.util as u; print(*[n for n in ('numpy', 'msgpack', 'gymnasium') if not u.find_spec(n)])"
_DRAWS = "import sys; from envhub_server.worker.name_lister import why_not; print(why_not(sys.argv[1]))"


class Judgement(NamedTuple):
    """A line for people: its subject, such as an env; whether it is well; and a text, with what to run if it is not."""

    subject: str
    verdict: Literal["ok", "note", "wrong"]
    text: str


def judged(subject: str, problem: str, fine: str, verdict: Literal["note", "wrong"] = "note") -> Judgement:
    """A line with this verdict for a problem; with an empty one, a line that says that all is well."""
    return Judgement(subject, verdict if problem else "ok", problem or fine)


def of_machine() -> Iterator[Judgement]:
    """Look at this machine as this process and its children may use it."""
    for look in (_limits, _memory, _system, _programs):
        yield from look()


def of_hub(stats: Mapping[str, Any]) -> Iterator[Judgement]:
    """Judge what a hub says of itself, as ``stats()`` of a client returns it."""
    text = f"{stats['status']}, {stats['sessions']} sessions, up for {stats['uptime_s']:.0f} s"
    yield judged("hub", "" if stats["status"] == "ok" else text, text)
    yield from (Judgement(f"env {name}", "wrong", why) for name, why in stats["unready"].items())
    if stats["loop_lag_s"] >= LAG_S:
        yield Judgement("loop", "note", f"busy for up to {stats['loop_lag_s']:.1f} s at a time: use several hubs")
    for what, option in (("sessions", "sessions_max"), ("envs", "max_envs")):
        if not stats["capacity"][f"{what}_free"]:
            yield Judgement(what, "wrong", f"none is free: raise {option} in its file and run: envhub reload")
    if failed := stats["failures"].get("internal"):
        yield Judgement("bugs", "wrong", f"{failed} requests failed by a bug: report lines internal_error of its log")
    if stats["restarts"]:
        yield Judgement("restarts", "note", f"{stats['restarts']} of workers; run: envhub sessions")
    if stats["handshakes_refused"]:
        yield Judgement("clients", "note", f"{stats['handshakes_refused']} had no known key; run: envhub keys list")


def _limits() -> Iterator[Judgement]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # as a hub does
    text = f"{hard}, for {descriptor_guard.workers_left()} workers"
    few = f"{text}; run: ulimit -Hn 65536 as root (docker run --ulimit nofile=65536, LimitNOFILE=65536 of a unit)"
    yield judged("open files", few if hard < descriptor_guard.LIMIT_ADVISED else "", text, "wrong")
    left = processes_left()
    few = f"{left} more; run: ulimit -u unlimited (docker run --pids-limit 4096, TasksMax=infinity of a unit)"
    yield judged("processes", few if left < PROCESSES_MIN else "", f"{left} more", "wrong")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "no limit" if locked < 0 else f"{locked / MIB:.3g} MiB"
    few = f"{text}; a hub locks none, but a simulator on a GPU may: run: ulimit -l unlimited"
    yield judged("locked memory", few if 0 <= locked < LOCKED_MIN else "", text)


def _memory() -> Iterator[Judgement]:
    available, problem = memory_available_bytes(), ""
    text = f"{available / MIB:,.0f} MiB available"
    few = f"{text}; end other programs, or give this cgroup more (docker run --memory, MemoryMax= of a unit)"
    yield judged("memory", few if available < MEMORY_MIN else "", text, "wrong")
    try:
        os.close(new_memory("envhub-doctor", MIB, MIB))
    except OSError as error:
        problem = f"no file in memory can be made ({error.strerror}): allow memfd_create and fallocate here"
    yield judged("shared memory", problem, "files in memory (memfd) can be made", "wrong")
    size = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    text = f"{size / MIB:,.0f} MiB"
    few = f"{text}; a hub uses none, but PyTorch may: run: mount -o remount,size=1G /dev/shm (docker run --shm-size 1g)"
    yield judged("/dev/shm", few if size < SHM_MIN else "", text)


def _system() -> Iterator[Judgement]:
    cpus, load = usable_cpus(), os.getloadavg()[0]
    text = f"{cpus} of {os.cpu_count()}, load {load:.1f}"
    quota = f"{text}; a cgroup has a quota of CPU time, so that no process spins: a step takes longer"
    yield judged("CPUs", quota if has_quota() else text if load > 2 * cpus else "", text)
    threads = {name: value for name in ONE_THREAD if (value := os.environ.get(name, "1")) != "1"}
    text = " ".join(f"{name}={value}" for name, value in threads.items())
    many = f"{text}: each worker starts that number; run: unset {' '.join(threads)}"
    yield judged("BLAS threads", many if threads else "", "one in each worker")
    text = "the kernel divides CPUs among terminals and services first, so that trainer and hub in two of them wait"
    grouped = f"{text}; run: sysctl -w kernel.sched_autogroup_enabled=0"
    yield judged("autogroup", grouped if _read(AUTOGROUP) == "1" else "", "off")
    source, problem = _read(CLOCK_SOURCE), ""
    if ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) == TIME_ERROR:
        problem = "not synchronized, so that the times of logs differ among machines; run: timedatectl set-ntp true"
    if source in SLOW_CLOCKS:
        problem = f"{source} is slow to read; where the CPU has it, run: echo tsc > {CLOCK_SOURCE}"
    yield judged("clock", problem, source)


def _programs() -> Iterator[Judgement]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("envhub-rl", "gymnasium", "numpy", "pyzmq"))
    kernel = platform.release()
    is_old = [*map(int, re.findall(r"\d+", kernel)[:2])] < [5, 10]
    old = f"Linux {kernel} is too old; EnvHub needs 5.10" if is_old else ""
    yield judged("versions", old, f"{packages}, Python {platform.python_version()}, Linux {kernel}", "wrong")
    for way in ("egl", "osmesa"):
        ran = _run(sys.executable, _DRAWS, way)
        failed = f"the process that tried it ended with {ran.returncode}" if ran.returncode else ran.stdout.strip()
        yield judged(f"rendering by {way}", failed, "draws without a screen")
    for program in (sys.executable, *filter(None, map(shutil.which, PYTHONS))):
        if (ran := _run(program, _LACKS)).returncode == 0:
            text = f"lacks {', '.join(ran.stdout.split())}" if ran.stdout.split() else "can run workers"
            yield Judgement("interpreter", "ok", f"{program} {text}")


def _run(program: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # In another folder, since Python imports modules of the working directory first; its end is that of ``timeout``.
    command = "timeout", f"{TRY_S:g}", program, "-c", code, *arguments
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
