"""What the zygote does before it forks workers."""

from __future__ import annotations

import subprocess
import sys

REHEARSED = """
import gc, os
from envhub_server.rehearsal import rehearse
before = set(os.listdir("/proc/self/fd"))
assert rehearse()
gc.collect()
after = set(os.listdir("/proc/self/fd"))
assert after == before, [(name, os.readlink(f"/proc/self/fd/{name}")) for name in after - before]
assert len(os.listdir("/proc/self/task")) == 1
"""


def test_rehearsal_steps_an_env_and_leaves_no_descriptor_and_no_thread_behind() -> None:
    environment = {"PATH": "", "ENVHUB_WORKER": "hub:0000000000", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", REHEARSED], env=environment, check=True, timeout=60)
