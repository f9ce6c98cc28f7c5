"""The first lines of a zygote, ``python bootstrap.py CONTROL_FD SAID_FD HUB_PID WORKERS LIBRARIES FOLDER NAME=FILE …``.

``WORKERS`` is the number of running workers that the zygote guards, and ``LIBRARIES`` are the shared libraries that it
imports for its own, with commas between them. From ``FOLDER``, if it is not empty, workers import what is nowhere
else; the zygote itself imports nothing from there. ``python bootstrap.py replay FILE REPORT_FD UNTIL
PDB VIDEO NAME=FILE …`` runs a replay in the same environment. Each file is that of a package or module that the
workers import. Nothing else of the hub's installation comes into the envs' ``sys.path``, because an interpreter of
another version must not find the hub's NumPy.

By ``SAID_FD`` it says how far it has come, in lines of JSON that ``envhub_server.processes.interpreter.Said``
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
# What a worker imports, in this order; of the last two one is enough, in this version or later.
NEEDED = ("numpy", "msgpack")
OWN_PROCESS = "envhub_server.worker.own_process"
NAME = "envhub"  # as envs see this program in ``sys.argv``, unless they are those of another program
GYMNASIUM = {"gymnasium": (0, 26), "gym": (0, 21)}


def forget_own_folder() -> None:
    """Take this file's folder, which Python puts first, out of ``sys.path``: envs must not find its modules' names."""
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
    """Tells the hub how far the bootstrap has come, and what this interpreter lacks."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, **fields: object) -> None:
        """Write a line; if the hub is gone, this process is about to end."""
        try:
            os.write(self._descriptor, json.dumps(fields).encode() + b"\n")
        except BrokenPipeError:
            pass

    def give_up(self, problem: str, module: str = "", why: str = "") -> None:
        """Say what is wrong, and end."""
        self.say(problem=problem, module=module, why=why)
        os._exit(1)

    def ready(self, folder: str) -> None:
        """Say that workers can be forked, which also import from this folder; close the pipe, which none may have."""
        # Last, and only now: a numpy.py there is no more than any other file of its owner.
        if folder and folder not in sys.path:
            sys.path.append(folder)
        self.say(ready=True)
        os.close(self._descriptor)

    def imported(self, module: str) -> object:
        """The module, or None if there is none of this name; ends the process if it cannot be imported."""
        self.say(importing=module)
        try:
            return importlib.import_module(module)
        except Exception as error:  # a package may raise anything
            if isinstance(error, ModuleNotFoundError) and error.name == module:
                return None
            self.give_up("broken", module, f"{type(error).__name__}: {error}{_raised_in(error)}")
        return None

    def check(self) -> None:
        """Import what workers need; ends the process if something is missing."""
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
    """In which imported file this was raised: a simulator's file may hide a module that the package needs."""
    at, found = error.__traceback__, ""
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not file.startswith("<frozen ") and file not in (__file__, importlib.__file__):
            found = f", in {file}"
        at = at.tb_next
    return found


def replay(arguments: "list[str]") -> None:
    """Run a replay; never returns."""
    path, report, until, use_pdb, video = arguments[1:6]
    forget_own_folder()
    for place in arguments[6:]:
        expose(*place.split("=", 1))
    from envhub_server.worker import own_process, replayer

    own_process.unmute_warnings()
    sys.path.append(os.getcwd())
    replayer.main(path, int(report), until, use_pdb == "1", video == "1")


if __name__ == "__main__":
    # What it needs before its packages can be imported, and its workers too.
    own_process = expose(OWN_PROCESS, os.path.join(os.path.dirname(os.path.realpath(__file__)), "own_process.py"))
    own_process.mute_warnings()
    arguments = sys.argv[1:]
    sys.argv[:] = [NAME]
    if arguments[0] == "replay":
        replay(arguments)
    own_process.leave_terminal()
    control, said, hub_pid, workers = map(int, arguments[:4])
    report = StartReport(said)
    if os.getppid() != hub_pid:
        report.give_up("apart")
    if not workers:  # without workers it has nothing to do if the hub ends before it is ready
        own_process.die_with_hub(hub_pid)
    forget_own_folder()
    report.check()
    report.say(importing="envhub")
    for place in arguments[6:]:
        expose(*place.split("=", 1))
    from envhub_server.worker import shared_imports, zygote

    for library in filter(None, arguments[4].split(",")):
        report.say(importing=library)
        shared_imports.load(library)
    zygote.main(control, hub_pid, functools.partial(report.ready, arguments[5]))
