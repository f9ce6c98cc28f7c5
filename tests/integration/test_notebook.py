"""A private hub in a Jupyter notebook, by the kernel that notebooks run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hubs import lives, wait_until, worker_processes

pytest.importorskip("ipykernel")

from jupyter_client.manager import KernelManager, start_new_kernel

CELL_S = 60

IMPORTS = """
import os, sys, time
import gymnasium as gym
import envhub

class Talking(gym.Env):
    observation_space = gym.spaces.Discrete(5)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        print("an env resets")
        return 0, {}

    def step(self, action):
        print("an env steps", file=sys.stderr)
        if action:
            open(ENTERED, "w").close()
            end_s = time.monotonic() + 30
            while not os.path.exists(ENTERED + "-left") and time.monotonic() < end_s:
                time.sleep(0.01)
        return 1, 0.0, False, False, {}
"""
MAKE = """
envs = envhub.make_vec(Talking, 2, num_workers=2)
envs.reset()[0].tolist(), envs.step([0, 0])[0].tolist()
"""


class Cell:
    """What a notebook shows below a cell that was run."""

    def __init__(self, status: str) -> None:
        self.status = status
        self.text: dict[str, str] = {"stdout": "", "stderr": "", "result": "", "error": ""}

    def show(self, message: dict[str, Any]) -> None:
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                self.text[content["name"]] += content["text"]
            case "execute_result":
                self.text["result"] += content["data"]["text/plain"]
            case "error":
                self.text["error"] += f"{content['ename']}: {content['evalue']}"


class Notebook:
    def __init__(self, manager: KernelManager, client: Any) -> None:
        self._manager, self._client = manager, client
        self.kernel = psutil.Process(manager.provisioner.pid)  # type: ignore[union-attr]

    def run(self, code: str) -> Cell:
        cell = Cell("")
        reply = self._client.execute_interactive(code, output_hook=cell.show, timeout=CELL_S)
        cell.status = reply["content"]["status"]
        return cell

    def run_interrupted(self, code: str, when: Callable[[], bool]) -> Cell:
        def interrupt() -> None:
            if wait_until(when, CELL_S):
                self._manager.interrupt_kernel()

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            return self.run(code)
        finally:
            interrupting.join()

    def show_more(self, cell: Cell) -> None:
        """Wait for what the notebook shows next, below whichever cell: prints of envs come after their cell, too."""
        cell.show(self._client.get_iopub_msg(timeout=CELL_S))

    def workers(self) -> list[psutil.Process]:
        return worker_processes(self.kernel.pid)


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel does not read what other processes print
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    manager, client = start_new_kernel(kernel_name="python3", env=dict(os.environ))
    try:
        notebook = Notebook(manager, client)
        assert notebook.run(f"ENTERED = {str(tmp_path / 'entered')!r}\n{IMPORTS}").status == "ok"
        yield notebook
        started = notebook.kernel.children(recursive=True)
        assert started
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    assert wait_until(lambda: not any(map(lives, started))), started


@pytest.mark.long
def test_cell_that_is_run_again_without_close_frees_what_it_made(notebook: Notebook) -> None:
    first = notebook.run(MAKE)
    assert first.text["result"] == "([0, 0], [1, 1])", first.text
    before = notebook.workers()
    assert len(before) == 2
    assert notebook.run(MAKE).text["result"] == "([0, 0], [1, 1])"
    assert wait_until(lambda: not any(map(lives, before))) and len(notebook.workers()) == 2


@pytest.mark.long
def test_prints_of_envs_are_shown_below_cells(notebook: Notebook) -> None:
    cell = notebook.run(MAKE)
    for name, line in (("stdout", "an env resets\n"), ("stderr", "an env steps\n")):
        while line not in cell.text[name]:
            notebook.show_more(cell)


@pytest.mark.long
def test_interrupted_step_is_followed_by_a_reset(notebook: Notebook, tmp_path: Path) -> None:
    assert notebook.run(MAKE).status == "ok"
    before = notebook.workers()
    cell = notebook.run_interrupted("envs.step([1, 1])", (tmp_path / "entered").exists)
    assert cell.status == "error" and cell.text["error"].startswith("KeyboardInterrupt"), cell.text
    (tmp_path / "entered-left").touch()
    assert notebook.run("envs.reset()[0].tolist(), envs.step([0, 0])[0].tolist()").text["result"] == "([0, 0], [1, 1])"
    assert {each.pid for each in notebook.workers()} == {each.pid for each in before}
    assert notebook.run("envs.close()").status == "ok"
    assert wait_until(lambda: not any(map(lives, before)))
