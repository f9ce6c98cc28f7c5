"""Whoever is killed, in whatever it does: neither a process nor memory is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from hubs import HERE, ServedHub, below, lives, serve, wait_until
from launchers import KINDS

import envhub

GONE_S = 30.0  # promised within 1 s; this machine may be slow, and what is left stays for minutes
READY_S = 30.0
LEASE_S = 0.5  # where its end is waited for; else a client that stalls keeps its session
CLOSE_S = 5.0  # for envs, of which those that hang need all
FUNCTIONS = ["init", "reset", "step", "idle"]
OFFERED = [f"{name.lower()}=launchers:{name}" for name in ("Launcher", "Passing")]


def in_(*quick: str) -> pytest.MarkDecorator:
    """While an env is in any of its functions: the quick ones always, in a step where there is time, or all of them."""
    longer = {"step": pytest.mark.long}
    return pytest.mark.parametrize(
        "hangs",
        [pytest.param(name, marks=() if name in quick else longer.get(name, pytest.mark.chaos)) for name in FUNCTIONS],
    )


CLIENT = """
import time, envhub, launchers
place, hangs, hub = {place!r}, {hangs!r}, {hub!r}
if hub is None:
    envs = envhub.make_vec([lambda: launchers.Launcher(place, hangs)] * 2, num_workers=2)
else:
    envs = envhub.make_vec("launcher", 2, hub=hub, num_workers=2, place=place, hangs=hangs)
envs.reset()
envs.step([0, 0])
open(place + "/stepped", "w").close()
time.sleep(600)
"""


class Scene:
    """A client whose two workers started processes, and then hang where they are told to, or are idle."""

    def __init__(self, place: Path, hangs: str, hub: ServedHub | None) -> None:
        place.mkdir()
        address = None if hub is None else hub.ipc
        code = CLIENT.format(place=str(place), hangs=hangs, hub=address)
        self.client = subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stderr=subprocess.DEVNULL)
        self.place = place
        try:
            assert wait_until(lambda: len(self.noted()) == 2, READY_S)
            there = "stepped" if hangs == "idle" else "*.hangs"
            assert wait_until(lambda: len(list(place.glob(there))) == (1 if hangs == "idle" else 2), READY_S)
            hub_process = psutil.Process(self.client.pid).children()[0] if hub is None else hub.process
            self.hub = psutil.Process(hub_process.pid)
            self.workers = [psutil.Process(pid) for pid in self.noted()]
            self.launched = {
                pid: [psutil.Process(int(number)) for number in text.split()] for pid, text in self.noted().items()
            }
            assert all(len(processes) == len(KINDS) for processes in self.launched.values())
            self.zygotes = [child for child in self.hub.children() if child.name() == "envhub-zygote"]
            self.arenas = {inode for worker in self.workers for inode in arenas(worker.pid)}
        except BaseException:
            self.client.kill()
            raise

    def noted(self) -> dict[int, str]:
        return {int(path.name): path.read_text() for path in self.place.iterdir() if path.name.isdigit()}

    @property
    def everything(self) -> list[psutil.Process]:
        """All processes but the client."""
        launched = [process for processes in self.launched.values() for process in processes]
        return [self.hub, *self.zygotes, *self.workers, *launched]

    def end(self) -> None:
        self.client.kill()
        self.client.wait()


def arenas(pid: int) -> set[int]:
    """The inodes of the arenas that a process maps or holds open."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:envhub-arena" in line:
                found.add(int(line.split()[4]))
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if "memfd:envhub-arena" in os.readlink(descriptor):
                found.add(descriptor.stat().st_ino)
    return found


def gone(processes: list[psutil.Process]) -> bool:
    return wait_until(lambda: not any(map(lives, processes)), GONE_S)


@contextlib.contextmanager
def scene(folder: Path, hangs: str, private: bool = False, lease_s: float = 60.0) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        hub = None if private else stack.enter_context(serve(folder, *OFFERED, "--lease", str(lease_s)))
        made = Scene(folder / "launched", hangs, hub)
        stack.callback(made.end)
        yield made
    gone(made.everything)
    left = [process for process in made.everything if lives(process)]
    for process in left:
        process.kill()
    assert left == []


def holds_nothing(found: Scene) -> bool:
    """Whether no process but the client has the session's memory."""
    others = [pid for pid in psutil.pids() if pid != found.client.pid]
    return not found.arenas & {inode for pid in others for inode in arenas(pid)}


@pytest.mark.long
@in_("idle")
def test_killed_worker_takes_what_its_envs_started_along(tmp_path: Path, hangs: str) -> None:
    with scene(tmp_path, hangs) as found:
        killed, other = found.workers
        killed.kill()
        assert gone(found.launched[killed.pid])
        assert all(map(lives, found.launched[other.pid])) or gone([other])
        assert wait_until(lambda: not any(process.is_running() for process in found.launched[killed.pid]))  # reaped


@in_("step")
def test_killed_hub_leaves_neither_process_nor_memory(tmp_path: Path, hangs: str) -> None:
    with scene(tmp_path, hangs) as found:
        found.hub.kill()
        assert gone(found.everything) and holds_nothing(found)
        left = {path.name for path in tmp_path.iterdir() if path.suffix != ".log"} - {"launched"}
        assert left == {"hub.sock", "hub.sock.lock", "hub.sock.side"}
        with serve(tmp_path, "CartPole-v1") as again, envhub.connect(again.ipc) as client:
            assert client.health()["status"] == "ok"


@pytest.mark.long
def test_hub_that_is_killed_while_its_zygote_starts_leaves_none(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1") as hub:
        below_it = psutil.Process(hub.process.pid).children(recursive=True)
        assert below_it
        hub.stop(signal.SIGKILL)
        assert gone(below_it)


@pytest.mark.long
@in_("idle")
def test_killed_zygote_is_replaced_by_one_that_guards_the_workers(tmp_path: Path, hangs: str) -> None:
    with scene(tmp_path, hangs) as found:
        (killed,) = found.zygotes
        killed.kill()
        assert wait_until(lambda: [child for child in below(found.hub) if child[0] != killed.pid] != [])
        assert all(map(lives, found.everything[2:]))
        found.hub.kill()
        assert gone(found.everything) and holds_nothing(found)


@pytest.mark.long
@in_("idle")
def test_killed_client_leaves_nothing_after_its_lease(tmp_path: Path, hangs: str) -> None:
    with scene(tmp_path, hangs, lease_s=LEASE_S) as found:
        found.end()
        ended = [process for process in found.everything if process not in (found.hub, *found.zygotes)]
        closing_s = 0.0 if hangs == "idle" else CLOSE_S
        assert wait_until(lambda: not any(map(lives, ended)), LEASE_S + closing_s + GONE_S)
        assert wait_until(lambda: holds_nothing(found), GONE_S)  # the hub frees it once it knows of their end


@pytest.mark.long
@in_("idle")
def test_private_hub_that_was_stopped_ends_with_its_program(tmp_path: Path, hangs: str) -> None:
    with scene(tmp_path, hangs, private=True) as found:
        found.hub.suspend()
        found.end()
        assert gone(found.everything)


@pytest.mark.long
@in_("step")
def test_killed_program_takes_all_of_its_private_hub_along(tmp_path: Path, hangs: str) -> None:
    with scene(tmp_path, hangs, private=True) as found:
        found.end()
        assert gone(found.everything) and holds_nothing(found)


@in_()
def test_killed_private_hub_leaves_neither_process_nor_memory(tmp_path: Path, hangs: str) -> None:
    with scene(tmp_path, hangs, private=True) as found:
        found.hub.kill()
        assert gone(found.everything) and holds_nothing(found)


@pytest.mark.long
def test_closed_session_leaves_nothing_of_its_envs(tmp_path: Path) -> None:
    with serve(tmp_path, *OFFERED) as hub:
        place = tmp_path / "launched"
        place.mkdir()
        with closing(envhub.make_vec("launcher", 2, hub=hub.ipc, num_workers=2, place=str(place))) as envs:
            envs.reset()
            started = [psutil.Process(int(pid)) for path in place.iterdir() for pid in path.read_text().split()]
            assert len(started) == 2 * len(KINDS) and all(map(lives, started))
        assert gone(started)


@pytest.mark.long
def test_zygote_that_was_stopped_ends_what_a_killed_hub_leaves(tmp_path: Path) -> None:
    with scene(tmp_path, "idle") as found:
        found.zygotes[0].suspend()
        found.hub.kill()
        assert gone(found.everything)


def guards(hub: psutil.Process) -> bool:
    """Whether the hub's zygote has said that it is ready, and waits: it has its name a moment before."""
    found = [psutil.Process(pid) for pid, _ in below(hub)]
    return [process.status() for process in found] == [psutil.STATUS_SLEEPING]


@pytest.mark.long
def test_zygote_that_is_killed_again_and_again_is_not_replaced_for_ever(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter") as hub:
        with closing(envhub.make_vec("counter", 1, hub=hub.ipc)) as envs:
            envs.reset()
            process = psutil.Process(hub.process.pid)
            for told in ("zygote_replaced", "zygote_replaced", "zygote_replaced", "zygote_ended"):
                before = hub.log.count(told)
                assert wait_until(lambda: guards(process))
                os.kill(below(process)[0][0], signal.SIGKILL)
                assert wait_until(lambda told=told, before=before: hub.log.count(told) > before)  # type: ignore[misc]
            assert envs.step([1])[0][:, 0].tolist() == [1]
            with closing(envhub.make_vec("counter", 1, hub=hub.ipc)) as others:
                others.reset()
        assert hub.stop() == 0


@pytest.mark.long
def test_hub_that_is_init_reaps_what_envs_leave_behind(tmp_path: Path) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("a namespace of process numbers is not possible here")
    address = f"ipc://{tmp_path}/hub.sock"
    command = [*apart, sys.executable, "-m", "envhub", "serve", *OFFERED, "--bind", address]
    outside = subprocess.Popen(command, cwd=HERE, stdout=subprocess.DEVNULL)
    try:
        assert wait_until((tmp_path / "hub.sock").exists, READY_S)
        (hub,) = psutil.Process(outside.pid).children()
        with closing(envhub.make_vec("passing", 2, hub=address, num_workers=2)) as envs:
            envs.reset()
            for _ in range(5):
                envs.step([0, 0])
        assert wait_until(lambda: [name for _, name in below(hub, "")] == ["envhub-zygote"])
    finally:
        hub.send_signal(signal.SIGTERM)
        assert outside.wait(15) == 0
