"""A hub of a fleet without Ray: it is started again, drained, and gone with its keeper."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hubs import lives

import envhub
from envhub.fleet.hub_actor import LINE_BYTES_MAX, HubFolder, KeptHub

pytestmark = pytest.mark.timeout(110)


def await_(what: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@contextmanager
def kept(hub: KeptHub) -> Iterator[KeptHub]:
    """Keep a hub in a thread until the block ends."""
    thread = threading.Thread(target=hub.run)
    thread.start()
    try:
        yield hub
    finally:
        hub.stop()
        thread.join()


@pytest.mark.long
def test_hub_that_is_killed_comes_back_at_its_port_and_is_drained_at_the_end(tmp_path: Path) -> None:
    binds = ["tcp://127.0.0.1:0", f"ipc://{tmp_path}/hub.sock"]
    with kept(KeptHub(["CartPole-v1"], binds, os.environ)) as hub:
        await_(lambda: bool(hub.addresses))
        pid, addresses = hub.pid, hub.addresses
        assert psutil.Process(pid).ppid() == os.getpid() and os.getpgid(pid) == pid
        os.kill(pid, signal.SIGKILL)
        await_(lambda: hub.pid not in (0, pid) and bool(hub.addresses))
        assert (hub.addresses, hub.starts, hub.failures) == (addresses, 2, 0)
        assert hub.why == "the hub was ended by SIGKILL"
        with envhub.connect(hub.addresses[0]) as client:
            assert client.health()["status"] == "ok"
        last = hub.pid
    assert not psutil.pid_exists(last)
    assert any('"stopping"' in line for line in hub.lines)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.long
def test_hub_that_cannot_start_is_tried_again_and_says_why() -> None:
    with kept(KeptHub(["one=no_such_sims:make"], ["tcp://127.0.0.1:0"], os.environ)) as hub:
        await_(lambda: hub.failures >= 2)
        assert hub.why == "the hub exited with status 2" and not hub.addresses
        assert any("No module named 'no_such_sims'" in line for line in hub.lines)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 20.0  # it does not wait for the next try


KEEPER = """
import os, threading
from envhub.fleet.hub_actor import HubFolder
from envhub.fleet.hub_actor import KeptHub
folder = HubFolder()
hub = KeptHub(["CartPole-v1"], [f"ipc://{folder.path}/hub.sock"], os.environ)
threading.Thread(target=hub.run, daemon=True).start()
while not hub.addresses:
    pass
print(folder.path, hub.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.long
def test_killed_keeper_takes_its_hub_along_and_the_next_one_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    folder, pid = keeper.stdout.readline().split()
    hub = psutil.Process(int(pid))
    own = HubFolder()
    assert own.path != Path(folder) and Path(folder).is_dir()  # its owner lives
    keeper.kill()
    keeper.wait()
    keeper.stdout.close()
    await_(lambda: not lives(hub))
    assert Path(folder).is_dir()
    own.remove()
    assert [*own.path.parent.iterdir()] == []


def test_hub_takes_the_priority_of_another_process_or_says_that_it_may_not() -> None:
    program = "import os; from envhub.fleet.hub_actor import take_priority_of as take; "
    program += f"print(take({os.getpid()})); print(os.getpriority(os.PRIO_PROCESS, 0))"
    ran = subprocess.run(["nice", "-n", "5", sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    assert lines == ["", str(os.getpriority(os.PRIO_PROCESS, 0))] or "RAY_worker_niceness" in lines[0]


def test_line_that_cannot_be_written_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = KeptHub([], [], {})
    with open("/dev/full", "w", buffering=1) as full, open(os.devnull, "w") as null:
        monkeypatch.setattr(sys, "stderr", full)
        hub.say("line")
        assert [*hub.lines] == ["line"]
        os.dup2(null.fileno(), full.fileno())  # which takes what is left when it is closed


def test_lines_of_its_output_are_taken_whole_and_a_long_one_in_parts() -> None:
    hub, listening = KeptHub([], ["tcp://127.0.0.1:0"], {}), list[str]()
    text = b"listening on a\nlistening on b\n" + b"x" * (LINE_BYTES_MAX + 1) + b"\n\xff\nlast"
    hub._read(io.BytesIO(text), listening)
    assert listening == ["a"]
    assert [*hub.lines] == ["listening on b", "x" * LINE_BYTES_MAX, "x", "\ufffd", "last"]
