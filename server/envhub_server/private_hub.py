"""The private hub: the process that ``hub=None`` starts for one program, and that ends with the program.

``envhub_client.private_hub.process`` starts it with ``OWNER_PIDFD PROGRAM_FD FOLDER FLAGS``. The hub binds its sockets
in the folder, sends their files through the second descriptor, a Unix socket, and removes the folder. The program
connects by the files, and writes to that socket when the hub is to stop. The flags are those of the program's
interpreter, for its workers.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from envhub.process import prepare_hub_process
from envhub_server.ipc import process_marks
from envhub_server.ipc.process_marks import PR_SET_PDEATHSIG, leave_terminal
from envhub_server.processes.interpreter import ONE_THREAD, InterpreterKey, ZygoteProcess


def main(program: int, line_end: int, folder: str, flags: Sequence[str]) -> None:
    """Serve the program behind the pidfd ``program`` until it ends; ``line_end`` is a socket to it."""
    leave_terminal()
    # If this process is stopped when its program ends, it must continue, to end itself.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    prepare_hub_process()
    # The zygote and this process import their modules in parallel, which halves a program's wait for its first envs.
    zygote = ZygoteProcess(process_marks.new_hub(), InterpreterKey(flags=tuple(flags)), os.environ)
    _serve(program, line_end, Path(folder), zygote)


def _serve(program: int, line_end: int, folder: Path, zygote: ZygoteProcess) -> None:
    # The hub computes nothing: threads of NumPy's libraries would take a third of the time of its import.
    absent = ONE_THREAD.keys() - os.environ.keys()
    os.environ.update(dict.fromkeys(absent, "1"))
    importlib.import_module("numpy")
    for name in absent:
        del os.environ[name]

    from envhub.protocol.validation import SECONDS_MAX
    from envhub.transport.address import side_path
    from envhub_server import log
    from envhub_server.config import HubConfig
    from envhub_server.hub.hub import Hub
    from envhub_server.network.descriptor_guard import DescriptorsShort
    from envhub_server.replay import default_path

    log.configure("error")  # the terminal is the program's: write only errors

    # The path of a socket is limited; the path of the folder is not.
    path = f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}/hub.sock"

    def ready(hub: Hub) -> None:
        files = [os.open(name, os.O_PATH) for name in (path, side_path(path) or "")]
        shutil.rmtree(folder, ignore_errors=True)  # which the program removes, too, if it is there
        # A copy: the program takes the end of the line for the end of this process.
        with socket.socket(fileno=os.dup(line_end)) as line:
            try:
                socket.send_fds(line, [b"1"], files)
            except BrokenPipeError:
                hub.stop("its program ended, or was interrupted while it started the hub")
        for file in files:
            os.close(file)

    # Its one client is the program itself, which may use the whole machine.
    config = HubConfig(
        bind=(f"ipc://{path}",),
        program=(program, line_end),
        sessions_max=1024,
        max_envs=1 << 20,
        envs_per_session_max=1 << 16,
        arena_bytes_max=1 << 50,
        message_bytes_max=1 << 30,
        close_timeout_max=SECONDS_MAX,
        lease=3600.0,  # the hub ends with the program, which a debugger may stop for long
        replays=default_path(os.environ),
    )
    try:
        hub = Hub(config, zygote)
        with hub.opened():
            ready(hub)
            hub.run()
    except DescriptorsShort as error:
        sys.exit(f"envhub: the private hub cannot start: {error}")
