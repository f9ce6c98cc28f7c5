"""The private hub: the process that ``hub=None`` starts for one program, and that ends with the program.

Started by ``envhub_client.private_hub.process`` as ``ADDRESS OWNER_PIDFD READY_FD``; it writes one byte to the last
once it listens.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

from envhub_server.ipc import process_marks
from envhub_server.processes import hub_process
from envhub_server.processes.interpreter import OWN, environment_of
from envhub_server.processes.zygote_process import ZygoteProcess
from envhub_server.worker.bootstrap import PR_SET_PDEATHSIG, leave_terminal

if TYPE_CHECKING:
    from envhub_server.hub.hub import Hub


def main(address: str, owner: int, ready_fd: int) -> None:
    """Serve the program behind the pidfd ``owner`` on this address until it ends."""
    leave_terminal()
    # If this process is stopped when its program ends, it must continue, to end itself.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    hub_process.prepare()
    # The zygote and this process import side by side what each needs: a program waits for its first envs half as long.
    environ = environment_of(OWN, sys.executable, os.environ)
    _serve(address, owner, ready_fd, ZygoteProcess(process_marks.new_hub(), sys.executable, environ))


def _serve(address: str, owner: int, ready_fd: int, zygote: ZygoteProcess) -> None:
    import logging

    from envhub.protocol.validation import SECONDS_MAX
    from envhub_server import log
    from envhub_server.catalog.replay_folder import default_path
    from envhub_server.catalog.step_cost_file import cache_path
    from envhub_server.config import MIB, HubConfig, Limits, Timing
    from envhub_server.serve import run_hub

    log.configure(logging.ERROR)  # the terminal is the program's: write only errors

    def ready(hub: Hub) -> None:
        try:
            os.write(ready_fd, b"1")
        except BrokenPipeError:
            hub.stop("its program ended, or was interrupted while it started the hub")
        os.close(ready_fd)

    # Its one client is the program itself, which may use the whole machine.
    limits = Limits(
        sessions_max=1024,
        envs_max=1 << 20,
        envs_per_session_max=1 << 16,
        arena_bytes_max=1 << 50,
        message_bytes_max=1024 * MIB,
        close_s_max=SECONDS_MAX,
    )
    timing = Timing(lease_s=3600.0)  # the hub ends with the program, which a debugger may stop for long
    costs = cache_path(os.environ)
    replays = default_path(os.environ)
    config = HubConfig((address,), owner=owner, limits=limits, timing=timing, step_costs=costs, replays=replays)
    run_hub(config, ready, zygote)
