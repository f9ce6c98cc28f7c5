"""What the zygote does before it forks workers."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, os
from envhub_server.worker.zygote import warm_up
before = set(os.listdir("/proc/self/fd"))
assert warm_up()
gc.collect()
after = set(os.listdir("/proc/self/fd"))
assert after == before, [(name, os.readlink(f"/proc/self/fd/{name}")) for name in after - before]
assert len(os.listdir("/proc/self/task")) == 1
"""


def test_warm_up_steps_an_env_and_leaves_no_descriptor_and_no_thread_behind() -> None:
    environment = {"PATH": "", "ENVHUB_WORKER": "hub:0000000000", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=60)
