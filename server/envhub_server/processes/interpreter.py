"""The interpreters of workers: their program, their environment, and the reasons why one cannot serve.

The hub runs on one interpreter; an environment may have another, with its own packages. The bootstrap in it says line
by line how far it has come (``StartLine``), over its own pipe, so that the interpreter's output does not matter.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from envhub.errors import hidden, shortened
from envhub.files import weakness_of
from envhub.process import blocked
from envhub.transport.address import environment
from envhub_server.ipc import process_marks
from envhub_server.ipc.packages import install, on_this_machine, package_of

Environment = Mapping[str, str]  # variables, by name

START_BYTES_MAX = 1 << 16  # of all lines of a bootstrap
WHY_CHARS_MAX = 300  # of what an interpreter printed last, or of an exception of an import
INTERPRETERS_MAX = 64  # of a hub: each has a waiting process

# Variables that are read when a process starts, or by the modules that the zygote imports: these cannot be changed in a
# fork. Each worker sets the other variables of a program's environment itself.
START_VARIABLES = (
    *("LD_", "GLIBC_", "MALLOC_", "LANG", "LC_", "PYTHON"),
    *("NPY_", "NUMPY_", "OMP_", "KMP_", "GOMP_", "OPENBLAS_", "GOTO_", "MKL_", "BLIS_", "VECLIB_", "NUMEXPR_"),
)
# Further variables for workers of a public hub, for the programs and libraries that envs use. Others may be secrets.
KEPT_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TZ", "TERM", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV"),
    *("LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LD_BIND_NOW", "NVIDIA_VISIBLE_DEVICES"),
    *("NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE", "TF_FORCE_GPU_ALLOW_GROWTH", "TF_ENABLE_ONEDNN_OPTS"),
    *("CONDA_PREFIX", "DISPLAY", "XAUTHORITY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"),
)
KEPT_PREFIXES = (
    *(each for each in START_VARIABLES if each not in ("LD_", "LANG")),
    *("CUDA_", "ROCR_", "HIP_", "JAX_PLATFORM", "XLA_", "TORCH_", "TF_CPP_", "TF_XLA_", "TF_NUM_"),
    *("MUJOCO_", "PYOPENGL_", "EGL_", "MESA_", "LIBGL_", "GALLIUM_", "SDL_", "PYGAME_", "QT_"),
    *("VK_ICD_", "VK_DRIVER_", "VK_LAYER_", "VK_LOADER_"),
)
# If each worker started a thread per core, all workers would be slower. So each gets one thread, where neither the
# program nor the operator has set another number.
_THREADS = "OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS NUMEXPR_NUM_THREADS BLIS_NUM_THREADS"
ONE_THREAD = dict.fromkeys([*_THREADS.split(), "VECLIB_MAXIMUM_THREADS"], "1")
# Variables for the hub's own interpreter, which would break another one.
OF_THE_HUB = ("PYTHON", "VIRTUAL_ENV", "CONDA_")
NEW_FLAGS = frozenset(["-P"])  # which Python 3.8 refuses


@dataclass(frozen=True)
class InterpreterKey:
    """Settings with which the process of an environment's interpreter starts; equal keys share a zygote."""

    # The interpreter's program, or the folder of a virtual environment or conda prefix; empty for the hub's.
    python: str = ""
    variables: tuple[tuple[str, str], ...] = ()  # of its environment, besides those of the hub
    # Where its libraries are looked for, in place of the hub's ``LD_LIBRARY_PATH``.
    ld_library_path: tuple[str, ...] = ()
    folder: str = ""  # its working directory; empty for the hub's
    flags: tuple[str, ...] = ()  # options of the interpreter, those of the program whose private hub this is

    @property
    def is_other(self) -> bool:
        return bool(self.python) and os.path.abspath(self.python) != sys.executable


OWN = InterpreterKey()


class InterpreterUnusable(Exception):
    """An interpreter cannot serve; the message is one line for users."""


class StartLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a bootstrap, in JSON."""

    python: str = ""  # the interpreter's version, in the first line
    importing: str = ""  # the module that it imports now
    problem: str = ""  # ``old``, ``missing``, ``broken`` or ``apart``, after which it exits
    module: str = ""  # that is missing or cannot be imported
    why: str = ""  # the exception, or the version that is too old
    ready: bool = False  # it forks workers from now on


@dataclass
class Start:
    """Progress of an interpreter's start, by the messages of its bootstrap."""

    program: str
    last: StartLine = field(default_factory=StartLine)  # the last that it said; an empty one before the first
    python: str = ""  # its version, if it has said that
    _unread: bytes = b""
    _bytes: int = 0

    def feed(self, chunk: bytes) -> None:
        """Read the bytes from the pipe; other text than a bootstrap's lines is ignored."""
        self._bytes += len(chunk)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        if self._bytes > START_BYTES_MAX:
            self._unread = b""
            return
        for line in lines:
            try:
                self.last = msgspec.json.decode(line, type=StartLine)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            self.python = self.last.python or self.python

    @property
    def name(self) -> str:
        return f"{self.program}{on_this_machine()}{f' (Python {self.python})' if self.python else ''}"

    @property
    def progress(self) -> str:
        at = f"it imports {self.last.importing}" if self.last.importing else "it has not run a line of Python"
        return f"{self.name} still starts: {at}"

    @property
    def at(self) -> str:
        return f"while it imports {self.last.importing}" if self.last.importing else "before its first line of Python"

    @property
    def why_ended(self) -> str:
        """The reason why an interpreter that waits for something is ended."""
        return f"{self.name} hangs {self.at}: run it by hand to see what it waits for"

    def what_is_wrong(self, end: str, output: str) -> str:
        """The reason why the interpreter that has ended so, and printed this, cannot serve."""
        last = self.last
        why = shortened(" ".join(last.why.split()), WHY_CHARS_MAX)
        if last.problem == "old":
            version = f"is Python {self.python}, and EnvHub needs 3.8 or later: name a newer interpreter"
            return f"{self.program}{on_this_machine()} {version}"
        if last.problem == "apart":
            return f"{self.name} starts Python as another process: name that Python, or have the script `exec` it"
        if last.problem == "missing":
            also = " (or gym, 0.21 or later)" if last.module == "gymnasium" else ""
            package = package_of(last.module)
            return f"{self.name} has no package {package!r}{also}; run: {install(self.program, package)}"
        if last.problem == "broken":
            again = install(self.program, package_of(last.module), "--force-reinstall")
            return f"{self.name} cannot import {last.module!r}: {why}; run: {again}"
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        # After a fatal error, Python prints the stacks of its threads.
        printed = next((line for line in lines if "Fatal Python error" in line), lines[-1] if lines else "")
        printed = shortened(printed, WHY_CHARS_MAX)
        if not self.python and "SyntaxError" in printed:
            return f"{self.name} is too old: EnvHub needs Python 3.8 or later: name a newer interpreter"
        output = f", and printed last: {printed}" if printed else ""
        if self.python:
            return f"{self.name} {end} {self.at}{output}"
        return f"{self.name} {end} and did not run as Python does{output}; name an interpreter of Python 3.8 or later"


def find(python: str) -> str:
    """The program of an interpreter, a virtual environment or a conda prefix; the hub's own for an empty text."""
    if not python:
        return sys.executable
    if os.sep not in python and not os.path.exists(python):
        path_of_command = shutil.which(python)
        if path_of_command is None:
            text = f"{hidden(python)}{on_this_machine()}: no such file, and no such command on the PATH"
            raise InterpreterUnusable(text)
        return path_of_command
    path = Path(os.path.abspath(os.path.expanduser(python)))
    if path.is_dir():
        programs = [path / "bin" / name for name in ("python", "python3")]
        path = next((each for each in programs if os.path.lexists(each)), path)
    if path.is_dir():
        problem = " is a folder without bin/python: name an interpreter, a virtual environment or a conda prefix"
    elif not path.exists() and path.is_symlink():
        base = os.path.realpath(path)
        problem = f" leads to {base}, which is gone: install that Python again, or make this virtual environment again"
    elif not path.exists():
        problem = ": no such file"
    elif not os.access(path, os.X_OK):
        problem = f" is not executable; if it is an interpreter: chmod +x {path}"
    else:
        return str(path)
    raise InterpreterUnusable(f"{path}{on_this_machine()}{problem}")


def clean_environment(environ: Environment, names: Collection[str]) -> Environment:
    kept = {*KEPT_VARIABLES, *names}
    return {name: value for name, value in environ.items() if name in kept or name.startswith(KEPT_PREFIXES)}


def environment_of(key: InterpreterKey, program: str, environ: Environment) -> Environment:
    variables = {**ONE_THREAD, **environment(environ)}
    if key.is_other:
        variables = {name: value for name, value in variables.items() if not name.startswith(OF_THE_HUB)}
        bin_folder = Path(program).parent
        variables["PATH"] = os.pathsep.join([str(bin_folder), *filter(None, [variables.get("PATH")])])
        for variable, mark in (("VIRTUAL_ENV", "pyvenv.cfg"), ("CONDA_PREFIX", "conda-meta")):
            if (bin_folder.parent / mark).exists():
                variables[variable] = str(bin_folder.parent)
    # An empty part is the working directory, and would come before what is installed.
    if "PYTHONPATH" in variables:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, variables["PYTHONPATH"].split(os.pathsep)))
    if key.ld_library_path:
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(key.ld_library_path)
    return {**variables, **dict(key.variables)}


def not_executed(program: str, error: OSError) -> str:
    if error.errno == errno.ENOEXEC:
        with open(program, "rb") as file:
            elf = file.read(4) == b"\x7fELF"
        why = f"is built for another processor than this {platform.machine()}" if elf else "is no program"
    elif error.errno == errno.ENOENT:
        why = "cannot be executed: the interpreter in its first line, or its loader, is missing"
    elif error.errno == errno.EACCES:
        why = "may not be executed by this user"
    else:
        why = f"cannot be executed: {error.strerror}"
    return f"{program}{on_this_machine()} {why}"


class UnsafeFolder(ValueError):
    """An env would be imported from a folder that others may write to."""


def trusted(folder: str) -> str:
    weakness = weakness_of(folder) if folder else None
    return "" if weakness is not None and weakness.open else folder


BOOTSTRAP = str(Path(__file__).parents[1] / "worker" / "bootstrap.py")


def execute(
    program: str, key: InterpreterKey, environ: Environment, arguments: Sequence[str], mark: Environment, **options: Any
) -> subprocess.Popen[bytes]:
    """Execute the bootstrap in the environment of the key; raises ``OSError`` or ``InterpreterUnusable``."""
    flags = [each for each in key.flags if not (key.is_other and each in NEW_FLAGS)]
    command = [program, *flags, BOOTSTRAP, *arguments, *exposed()]
    try:
        return subprocess.Popen(command, env={**environment_of(key, program, environ), **mark}, **options)
    except OSError as error:
        if error.filename is None:  # no process or descriptor is left; of a program the error has the name
            raise
        raise InterpreterUnusable(not_executed(program, error)) from error


class ZygoteProcess:
    """A process that executes the bootstrap of workers."""

    def __init__(
        self, hub: str, key: InterpreterKey, environ: Environment, guarded: int = 0, is_private: bool = True
    ) -> None:
        """Start the process. Raises ``OSError`` or ``InterpreterUnusable``, and leaves nothing behind."""
        # ``environ`` is that of its program, before what the key says. It guards this number of running workers.
        self.hub, self.key, self.environ = hub, key, environ  # ``hub`` is in the marks of its processes
        self.start = Start(find(key.python))
        if key.folder and not os.path.isdir(key.folder):
            text = f"the folder {key.folder}{on_this_machine()}, which its environment wants, does not exist"
            raise InterpreterUnusable(text)
        # The folder from which workers import what is nowhere else; empty for none. Those of a private hub have the
        # paths of its program, unless they have a Python of their own.
        imports = "" if is_private and not key.python else trusted(key.folder or process_marks.own_folder())
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as far_ends:
            self.control, control = socket.socketpair()  # for control messages
            undo.callback(self.control.close)
            far_ends.callback(control.close)
            self.control.setblocking(False)
            pipes = []
            for _ in ("start", "stdout", "stderr"):
                near, far = os.pipe()
                undo.callback(os.close, near)
                far_ends.callback(os.close, far)
                os.set_blocking(near, False)
                pipes.append((near, far))
            # By ``start_pipe`` the bootstrap reports its progress; ``WorkerOutput`` has the outputs once it reads them.
            (self.start_pipe, *self.outputs), (start, stdout, stderr) = zip(*pipes, strict=True)
            numbers = map(str, (control.fileno(), start, os.getpid(), guarded))
            with blocked():
                self.process = execute(
                    self.start.program,
                    key,
                    environ,
                    [*numbers, imports],
                    {process_marks.VARIABLE: process_marks.mark(hub, process_marks.NO_WORKER)},
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=key.folder or None,
                    pass_fds=[control.fileno(), start],
                )
            undo.callback(self.process.wait)
            undo.callback(self.process.kill)
            self.pidfd = os.pidfd_open(self.process.pid)  # readable once the process has ended
            undo.pop_all()

    def discard(self) -> None:
        self.process.kill()
        self.process.wait()
        self.control.close()
        os.close(self.start_pipe)
        os.close(self.pidfd)


def exposed() -> list[str]:
    """The modules that a bootstrap makes importable, as its last arguments; imports none of them."""
    specs = map(find_spec, ("envhub", "envhub_server", "msgpack_numpy"))
    return [f"{spec.name}={spec.origin}" for spec in specs if spec is not None]
