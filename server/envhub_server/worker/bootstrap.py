"""First lines of a zygote, ``python bootstrap.py CONTROL_FD START_FD HUB_PID WORKERS FOLDER NAME=FILE …``.

The zygote guards this number of ``WORKERS``. Workers import what is nowhere else from ``FOLDER``, and the package or
module of each ``NAME=FILE``. Nothing else of the hub's installation is in their ``sys.path``: an interpreter of another
version must not find the hub's NumPy. ``python bootstrap.py replay FILE STATE_FD PDB NAME=FILE …`` runs a replay in the
same environment.

By ``START_FD`` it says how far it has come, in lines of JSON that ``envhub_server.processes.interpreter.StartLine``
describes: the hub tells its operator and its clients what this interpreter lacks.
"""

import functools
import importlib
import importlib.util
import json
import os
import re
import sys
from types import ModuleType

PYTHON_MIN = (3, 8)
# A worker's imports, in this order, with their least versions; one of the last two is enough.
NEEDED = ("numpy", "msgpack")
PROCESS_MARKS = "envhub_server.ipc.process_marks"
NAME = "envhub"  # as envs see this program in ``sys.argv``, unless they are those of another program
GYMNASIUM = {"gymnasium": (0, 26), "gym": (0, 21)}


def forget_own_folder() -> None:
    """Remove this file's folder, which Python puts first, from ``sys.path``: envs must not import its modules."""
    if os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):  # not with PYTHONSAFEPATH
        del sys.path[0]


def expose(name: str, file: str) -> ModuleType:
    """Make a module, or a package by its ``__init__.py``, importable by its file, leaving ``sys.path`` as it is."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class StartReport:
    """Tells the hub the bootstrap's progress, and the packages that this interpreter does not have."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, **fields: object) -> None:
        """Write a line; without a hub do nothing, because this process is about to end."""
        try:
            os.write(self._descriptor, json.dumps(fields).encode() + b"\n")
        except BrokenPipeError:
            pass

    def give_up(self, problem: str, module: str = "", why: str = "") -> None:
        self.say(problem=problem, module=module, why=why)
        os._exit(1)

    def ready(self, folder: str) -> None:
        # Last, and only now, so that a numpy.py in the folder does not hide the package.
        if folder and folder not in sys.path:
            sys.path.append(folder)
        self.say(ready=True)
        os.close(self._descriptor)

    def imported(self, module: str) -> object:
        """Import a module; None if there is none of this name. If its import fails, end the process."""
        self.say(importing=module)
        try:
            return importlib.import_module(module)
        except Exception as error:  # a package may raise anything
            if isinstance(error, ModuleNotFoundError) and error.name == module:
                return None
            self.give_up("broken", module, f"{type(error).__name__}: {error}{_raised_in(error)}")
        return None

    def check(self) -> None:
        self.say(python=".".join(map(str, sys.version_info[:3])))
        if sys.version_info < PYTHON_MIN:
            self.give_up("old")
        for module in NEEDED:
            if self.imported(module) is None:
                self.give_up("missing", module)
        for module, least in GYMNASIUM.items():
            package = self.imported(module)
            if package is None:
                continue
            version = str(getattr(package, "__version__", ""))
            if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < least:
                self.give_up("broken", module, f"version {version} is too old, {least[0]}.{least[1]} is the first")
            return
        self.give_up("missing", "gymnasium")


def _raised_in(error: BaseException) -> str:
    """The imported file that raised: a simulator's file may hide a module that the package needs."""
    at, where = error.__traceback__, ""
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not file.startswith("<frozen ") and file not in (__file__, importlib.__file__):
            where = f", in {file}"
        at = at.tb_next
    return where


def replay(arguments: "list[str]") -> None:
    path, state, use_pdb = arguments[1:4]
    forget_own_folder()
    for each in arguments[4:]:
        expose(*each.split("=", 1))
    from envhub_server.ipc import process_marks
    from envhub_server.worker import replayer

    process_marks.unmute_warnings()
    sys.path.append(os.getcwd())
    replayer.main(path, int(state), use_pdb == "1")


if __name__ == "__main__":
    # What it needs before its packages can be imported, and its workers too.
    folder = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    process_marks = expose(PROCESS_MARKS, os.path.join(folder, "ipc", "process_marks.py"))
    process_marks.mute_warnings()
    arguments = sys.argv[1:]
    sys.argv[:] = [NAME]
    if arguments[0] == "replay":
        replay(arguments)
    process_marks.leave_terminal()
    control, start_fd, hub_pid, workers = map(int, arguments[:4])
    report = StartReport(start_fd)
    if os.getppid() != hub_pid:
        report.give_up("apart")
    if not workers:  # without workers there is nothing to guard if the hub ends early
        process_marks.die_with_hub(hub_pid)
    forget_own_folder()
    report.check()
    report.say(importing="envhub")
    for each in arguments[5:]:
        expose(*each.split("=", 1))
    from envhub_server.worker import zygote

    zygote.main(control, hub_pid, functools.partial(report.ready, arguments[4]))
