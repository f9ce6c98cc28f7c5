"""The actor of Ray that keeps a hub of a fleet: its ``envhub serve`` process and the folder of its files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from envhub.process import write_no_core_file
from envhub.transport import sockets
from envhub.transport.address import HubKeys, check_private, runtime_folder, token_of

_ACTOR = re.compile(r"envhub:([^:]*):([0-9]+)")
FAILURES_MAX = 3  # in a row, after which a hub that never listened is taken for one that cannot
POLL_S = 0.1
LINES_MAX = 20  # of its log that are kept, for an error
LINE_BYTES_MAX = 1 << 14
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.5, 30.0
STABLE_S = 10.0  # a process that ran for so long is started again at once
STOP_TIMEOUT_S = 30.0  # for the hub to drain
READ_TIMEOUT_S = 1.0  # for its last lines: a process that an env has left may hold the pipe
LISTENING = "listening on "

# The kernel kills the hub when the thread that started it ends, and the hub is an ``envhub serve`` as any other. It has
# a process group of its own, and no session of its own: Linux shares the CPUs among sessions first.
_BOOT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.setpgid(0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.executable, [sys.executable, "-m", "envhub", "serve", *sys.argv[2:]])
"""


def actor_name(fleet: str, index: int) -> str:
    return f"envhub:{fleet}:{index}"


def hub_of(actor: str) -> tuple[str, int] | None:
    """The fleet and the number of the hub that this actor keeps; None if it keeps none."""
    match = _ACTOR.fullmatch(actor)
    return None if match is None else (match[1], int(match[2]))


@dataclass(frozen=True)
class HubSettings:
    """Settings of each hub of a fleet; none is secret, for Ray keeps them; ``config`` is the text of a file."""

    envs: tuple[str, ...] = ()
    config: str = ""
    cpus: float = 1.0
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FleetHub:
    """State of a hub of a fleet.

    Attributes:
        index: number of the hub in its fleet.
        state: ``placing`` while Ray has no place for it, ``starting``, or ``serving`` if clients can connect.
        address: where it listens, without keys; empty if it does not.
        pid: of its process; 0 without one.
        starts: number of times that its process was started, since its actor was.
        why: how its process ended the last time; empty if it has not.
    """

    index: int
    state: str = "placing"
    address: str = ""
    pid: int = 0
    starts: int = 0
    why: str = ""


class HubAccess(NamedTuple):
    """Addresses of a hub that serves: ``tcp`` has the secret key of the fleet's clients, ``ipc`` is its socket."""

    tcp: str
    ipc: str

    def __repr__(self) -> str:
        return f"HubAccess(ipc={self.ipc!r})"


class HubActor:
    """Keeps a hub on its node with new keys at each start, of which the clients' secret is in its memory only."""

    def __init__(self, fleet: str, index: int, settings: HubSettings) -> None:
        write_no_core_file()
        self._name, self._index, self._settings = f"{fleet}/{index}", index, settings
        self._folder = HubFolder()
        # The hub has the descriptor, too: its keys and its configuration are those of this folder at each start.
        inside = Path(f"/proc/self/fd/{self._folder.descriptor}")
        self._keys = _make_keys(inside / "keys")
        binds = f"tcp://{_node_address()}:0", f"ipc://{self._folder.path / 'hub.sock'}"
        self._hub = KeptHub(self._arguments(inside), binds, _environment(), [self._folder.descriptor])
        # A hub ends with the thread that started it, so that is none of Ray's, which may end before the actor.
        threading.Thread(target=self._keep, name="hub", daemon=True).start()

    def report(self) -> FleetHub:
        hub, addresses = self._hub, self._hub.addresses
        state, address = ("serving", addresses[0]) if addresses else ("starting", "")
        return FleetHub(self._index, state, address, hub.pid, hub.starts, hub.why)

    def await_serving(self) -> str:
        """Wait until the hub serves; returns why it cannot, with the end of its log, if it ends again and again."""
        while not self._hub.addresses:
            if self._hub.failures >= FAILURES_MAX:
                return "\n".join([f"{self._hub.why}; its log ends with:", *self._hub.lines])
            time.sleep(POLL_S)
        return ""

    def access(self) -> HubAccess | None:
        if not (addresses := self._hub.addresses):
            return None
        tcp, ipc = addresses
        return HubAccess(f"envhub://{token_of(self._keys).reveal_secret()}@{tcp.removeprefix('tcp://')}", ipc)

    def settings(self) -> HubSettings:
        return self._settings

    def drain(self) -> None:
        self._hub.stop()
        self._folder.remove()

    def _arguments(self, folder: Path) -> list[str]:
        settings = self._settings
        arguments = ["--name", self._name, "--keys", str(folder / "keys"), "--cpus", str(max(1, int(settings.cpus)))]
        if settings.config:
            (folder / "hub.toml").write_text(settings.config)
            arguments += ["--config", str(folder / "hub.toml")]
        return [*settings.envs, *arguments]

    def _keep(self) -> None:
        try:
            if why := take_priority_of(os.getppid()):
                self._hub.say(why)
            self._hub.run()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # Ray starts the actor again


def take_priority_of(pid: int) -> str:
    """Give this thread and its children the niceness and the OOM score of another process; returns why not, if so.

    Ray's workers have a niceness of 15, and are the first that the kernel ends when memory is short.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))
        Path("/proc/self/oom_score_adj").write_text(Path(f"/proc/{pid}/oom_score_adj").read_text())
    except PermissionError:
        return "the hub runs behind other processes: start Ray with RAY_worker_niceness=0, or raise `ulimit -e`"
    return ""


def _node_address() -> str:
    import ray

    node = ray.get_runtime_context().get_node_id()
    host = str(next(each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node))
    return f"[{host}]" if ":" in host else host


def _make_keys(folder: Path) -> HubKeys:
    """Make the hub's keys and a client's, which has the rights of the hub's own user: programs of Ray run as that."""
    from envhub_server.network.key_folder import KeyFolder

    keys = KeyFolder(folder)
    public, secret = sockets.new_key_pair()
    hub = sockets.public_key(keys.make_secret())
    keys.add("fleet", public, "admin")
    return HubKeys(hub, secret)


def _environment() -> dict[str, str]:
    import ray

    own: Mapping[str, Any] = dict(ray.get_runtime_context().runtime_env).get("env_vars", {})
    added = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
    kept = {name: value for name, value in os.environ.items() if name not in added and not name.startswith("RAY_")}
    return {**kept, **{name: str(value) for name, value in own.items()}}


class KeptHub:
    """A hub that ``run`` keeps; ``failures`` counts how often in a row it ended without listening."""

    def __init__(
        self, arguments: Sequence[str], binds: Sequence[str], environ: Mapping[str, str], files: Sequence[int] = ()
    ) -> None:
        """The first of ``binds`` may be on port 0, and then stays on the port that it got."""
        self.pid = self.starts = self.failures = 0
        self.why = ""  # how it ended the last time; empty if it has not
        self.lines: deque[str] = deque(maxlen=LINES_MAX)  # the last ones of its log
        self._arguments, self._binds, self._environ, self._files = arguments, binds, environ, files
        self._listening: list[str] = []
        self._lock = threading.Lock()  # while it is held, ``pid`` is the number of no other process
        self._stopping, self._stopped = threading.Event(), threading.Event()

    @property
    def addresses(self) -> tuple[str, ...]:
        listening = tuple(self._listening)
        return listening if len(listening) == len(self._binds) else ()

    def say(self, line: str) -> None:
        self.lines.append(line)
        with contextlib.suppress(OSError):  # such as of a full disk, which ends no hub
            print(line, file=sys.stderr, flush=True)

    def stop(self) -> None:
        self._stopping.set()
        self._signal(signal.SIGTERM)
        if not self._stopped.wait(STOP_TIMEOUT_S):
            self._signal(signal.SIGKILL)
            self._stopped.wait()

    def _signal(self, number: int) -> None:
        with self._lock:
            if self.pid:
                os.kill(self.pid, number)

    def run(self) -> None:
        """Keep the hub until ``stop`` is called; the process ends with the thread that calls this."""
        binds, backoff_s = self._binds, 0.0
        while not self._stopping.wait(backoff_s):
            started_s = time.monotonic()
            addresses = self._run_once(binds)
            # It comes back where it was, unless another process has taken that port meanwhile.
            binds = [*addresses[:1], *self._binds[1:]] if addresses else self._binds
            is_stable = time.monotonic() - started_s > STABLE_S
            backoff_s = 0.0 if is_stable else min(max(2 * backoff_s, BACKOFF_MIN_S), BACKOFF_MAX_S)
        self._stopped.set()

    def _run_once(self, binds: Sequence[str]) -> tuple[str, ...]:
        with self._lock:
            if self._stopping.is_set():
                return ()
            process = self._started(binds)
            self.pid = process.pid
        self.starts += 1
        reader = threading.Thread(target=self._read, args=(process.stdout, self._listening), daemon=True)
        reader.start()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # before it is reaped, after which another may have its number
            status, self.pid = process.wait(), 0
        reader.join(READ_TIMEOUT_S)
        addresses, self._listening = self.addresses, []
        if not self._stopping.is_set():
            how = f"exited with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
            self.why = f"the hub {how}"
            self.failures = 0 if addresses else self.failures + 1
            self.say(f"{self.why} and is started again")
        return addresses

    def _started(self, binds: Sequence[str]) -> subprocess.Popen[bytes]:
        options = [part for bind in binds for part in ("--bind", bind)]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, str(os.getpid()), *self._arguments, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**self._environ, "PYTHONUNBUFFERED": "1"},
            pass_fds=self._files,
        )

    def _read(self, output: IO[bytes], listening: list[str]) -> None:
        """Take the addresses from the lines that the hub prints first; the others are its log."""
        with output:
            while line := output.readline(LINE_BYTES_MAX):
                text = line.decode(errors="replace").rstrip("\n")
                if text.startswith(LISTENING) and len(listening) < len(self._binds):
                    listening.append(text.removeprefix(LISTENING))
                else:
                    self.say(text)


class HubFolder:
    """A new folder of this process, with its lock; ``descriptor`` leads there also where the folder is replaced."""

    def __init__(self) -> None:
        name = secrets.token_hex(5)  # the path of a socket is limited
        with _all_folders() as parent:
            remove_unowned(parent)
            os.mkdir(name, 0o700, dir_fd=parent)
            self.descriptor = _opened(name, parent)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self.path = Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
        self._is_removed = False

    def remove(self) -> None:
        """Remove the folder, unless it is removed, and the folders of processes that have ended."""
        if self._is_removed:
            return
        self._is_removed = True
        os.close(self.descriptor)
        with _all_folders() as parent:
            remove_unowned(parent)


def remove_unowned(parent: int) -> None:
    for name in os.listdir(parent):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
            lock = _opened(name, parent)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(f"/proc/self/fd/{parent}/{name}", ignore_errors=True)
            finally:
                os.close(lock)


def _opened(folder: str, parent: int | None = None) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


@contextlib.contextmanager
def _all_folders() -> Iterator[int]:
    """Let no other process make or remove a folder meanwhile; gives a descriptor of the folder of all of them."""
    parent = runtime_folder() / "fleets"
    for folder in (parent.parent, parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder)
    lock = _opened(str(parent))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)
