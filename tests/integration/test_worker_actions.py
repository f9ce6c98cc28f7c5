"""Operators read the stacks of workers, see frames of envs and restart workers, of sessions that others step."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from combinations import each_value
from envhub_server.hub.operations import DRAW_S
from faulty import HOLD_GIL, SLEEP
from gymnasium import spaces
from hubs import ServedHub, serve, wait_until
from new_keys import address_of, admitted, keys_in
from PIL import Image

import envhub
from envhub import cli
from envhub.protocol.messages import Op, Operate

LANES = pytest.mark.parametrize("lane", ["auto", "wire"])
STEPS = 60
ENVS = (
    "faulty=faulty:faulty",
    "sketch=test_worker_actions:Sketch",
    "pixels=test_worker_actions:Pixels",
    "pausing=test_worker_actions:Pausing",
    "replacing=test_worker_actions:Replacing",
)


class Sketch(gym.Env[np.ndarray, int]):
    """Draws random numbers in its steps, of every generator that it has, and in ``render``."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space = spaces.Box(0.0, 1.0, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def numbers(self) -> np.ndarray:
        return np.array([self.np_random.random(), np.random.random(), random.random()])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            np.random.seed(seed)
            random.seed(seed)
        return self.numbers(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        numbers = self.numbers()
        return numbers, float(numbers.sum()), bool(numbers[0] < 0.1), False, {"text": f"{numbers}"}

    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.full((6, 4, 3), self.numbers()[0] * 255, np.uint8)


class Pausing(Sketch):
    """Does not return from a step by the action 1."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(3600 * action)
        return super().step(action)


class Replacing(Sketch):
    """Has a file of its own where its worker has that for its stacks, as code that reuses descriptors."""

    def __init__(self, path: str) -> None:
        super().__init__()
        with open(path, "w") as file:
            for each in os.listdir("/proc/self/fd"):
                if "envhub-stacks" in os.path.realpath(f"/proc/self/fd/{each}"):
                    os.dup2(file.fileno(), int(each))


class Pixels(Sketch):
    """Observes four grey images, the last one of which is the newest."""

    observation_space = spaces.Box(0, 255, (4, 12, 10), np.uint8)

    def numbers(self) -> np.ndarray:
        return np.stack([np.full((12, 10), number, np.uint8) for number in (0, 1, 2, 77)])

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self.numbers(), 0.0, False, False, {}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    folder = tmp_path_factory.mktemp("hub")
    with serve(folder, *ENVS, cwd=Path(__file__).parent, environ={"PYTHONPATH": "../support"}) as served:
        yield served


@contextmanager
def session(hub: ServedHub, env: str, num_envs: int = 2, **options: Any) -> Iterator[tuple[Any, Any, str]]:
    """A vector env that was reset, a client of the hub's own user, and the session's name."""
    with envhub.connect(hub.ipc) as client, closing(client.make_vec(env, num_envs, **options)) as envs:
        envs.reset(seed=3)
        (row,) = client.sessions()
        yield envs, client, row["session"]


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(hub: ServedHub, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command of ``envhub`` in this process; its exit status, and what it printed."""

    def run(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        try:
            cli.run([*arguments, "--hub", hub.ipc])
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        return status, "".join(capsys.readouterr())

    return run


# --- stacks -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("action", "where"), [(SLEEP, "time.sleep"), (HOLD_GIL, "re.match")])
def test_stack_of_an_env_that_sleeps_or_computes_in_c(
    hub: ServedHub, command: Command, action: int, where: str
) -> None:
    with session(hub, "faulty", num_workers=2) as (envs, client, name):
        envs.step_async([0, action])
        assert wait_until(lambda: " in act\n" in client.stack(name, 1)[0]["stacks"])
        (row,) = client.stack(name, 1)
        assert (row["worker"], row["envs"], row["problem"]) == (1, [1], "")
        line = re.search(r'File "(.*faulty.py)", line (\d+) in act\n', row["stacks"])
        assert line and where in Path(line[1]).read_text().splitlines()[int(line[2]) - 1]
        idle, busy = client.stack(name)
        assert (idle["envs"], busy["pid"]) == ([0], row["pid"]) and "process.py" in idle["stacks"]
        status, printed = command("stack", name[:5], "1")
        assert status == 0 and printed.startswith(f"worker 1, env 1, process {row['pid']}:\n")
        assert " in act\n" in printed and "faulty.py" not in hub.log  # nothing of it is the worker's output
        assert client.restart(name, 1, "it hangs")["envs"] == [1]
        *_, truncations, infos = envs.step_wait()
        assert truncations.tolist() == [False, True]
        assert infos["env_failure"][1].message.endswith(": it hangs")


@pytest.mark.long
def test_stopped_worker_has_no_stack_and_says_so(hub: ServedHub) -> None:
    with session(hub, "faulty", num_workers=1) as (_, client, name):
        (row,) = client.stack(name)
        worker = psutil.Process(row["pid"])
        worker.suspend()
        (row,) = client.stack(name)
        worker.resume()
        assert row["stacks"] == "" and "stopped" in row["problem"]


@pytest.mark.long
def test_stacks_are_not_written_into_a_file_of_the_env(hub: ServedHub, tmp_path: Path) -> None:
    path = tmp_path / "own"
    with session(hub, "replacing", 1, env_kwargs={"path": str(path)}) as (envs, client, name):
        (row,) = client.stack(name)
        assert row["stacks"] == "" and row["problem"] and path.read_text() == ""
        envs.step([0])


# --- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lane", "workers"), each_value(["auto", "wire"], [1, 2], others=pytest.mark.long))
def test_frames_change_no_bit_of_what_the_program_gets(hub: ServedHub, lane: str, workers: int) -> None:
    def run(looks: bool) -> list[Any]:
        results: list[Any] = []
        made = {"num_workers": workers, "lane": lane, "env_kwargs": {"render_mode": "rgb_array"}}
        with session(hub, "sketch", 2, **made) as (envs, client, name):
            for number in range(STEPS):
                results.append(envs.step([0, 1])[:4])
                if looks and number % 5 == 0:
                    shown = client.frame(name, number // 5 % 2)
                    assert (shown.source, shown.pixels.shape) == ("render", (6, 4, 3))
            return results

    for left, right in zip(run(True), run(False), strict=True):
        for mine, other in zip(left, right, strict=True):
            np.testing.assert_array_equal(mine, other)


def test_frame_is_seen_while_the_program_steps_without_a_pause(hub: ServedHub, tmp_path: Path) -> None:
    made = {"num_workers": 1, "env_kwargs": {"render_mode": "rgb_array"}}
    with session(hub, "sketch", 1, **made) as (envs, client, name), closing(Looks(client, name)) as looks:
        while looks.has_none():
            envs.step([0])
    assert looks.frames[0].pixels.shape == (6, 4, 3)


class Looks:
    """Takes a frame in a thread of its own."""

    def __init__(self, client: Any, name: str) -> None:
        self.frames: list[Any] = []
        self._thread = threading.Thread(target=lambda: self.frames.append(client.frame(name, 0)))
        self._thread.start()

    def has_none(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._thread.join()


@pytest.mark.long
def test_frame_of_an_env_that_draws_none_is_its_observation(hub: ServedHub, command: Command, tmp_path: Path) -> None:
    with session(hub, "pixels") as (_, client, name):
        shown = client.frame(name, 1)
        assert shown.source == "observation" and shown.pixels.shape == (12, 10, 1) and (shown.pixels == 77).all()
        _, printed = command("frame", name, "1", str(tmp_path / "one.png"), "--json")
        assert json.loads(printed)["source"] == "observation"
        assert command("frame", name, "1", str(tmp_path / "no" / "one.png"))[0] == 2
        image = Image.open(tmp_path / "one.png")
        assert image.size == (10, 12) and np.asarray(image).tolist() == [[77] * 10] * 12
    with session(hub, "sketch") as (_, client, name), pytest.raises(envhub.RequestRefused, match="no observation that"):
        client.frame(name, 0)


@pytest.mark.long
def test_frame_of_a_busy_env_is_refused_with_what_it_does(hub: ServedHub, command: Command) -> None:
    made = {"num_workers": 1, "env_kwargs": {"render_mode": "rgb_array"}}
    with session(hub, "pausing", 1, **made) as (envs, client, name):
        envs.step([0])
        envs.step_async([1])
        with pytest.raises(envhub.RequestRefused, match=r"env 0 is busy: env 0 is in its step since \d"):
            client.frame(name, 0)
        session_, env, envs_, verb, _, ended = command("slow")[1].splitlines()[-1].split("\t")
        assert (session_, env, envs_, verb, ended) == (name, "pausing", "0", "step", "not yet")
        client.restart(name, 0)
        envs.step_wait()


@pytest.mark.long
def test_frame_of_a_session_that_ends_meanwhile_is_refused_with_that(hub: ServedHub) -> None:
    made = {"num_workers": 1, "env_kwargs": {"render_mode": "rgb_array"}}
    with session(hub, "pausing", 1, **made) as (envs, client, name), ThreadPoolExecutor(1) as thread:
        envs.step_async([1])
        with envhub.connect(hub.ipc) as other:
            counts = itertools.count(other.stats()["requests"] + 3)  # HEALTH, OPERATE, and each look at them
            frame = thread.submit(client.frame, name, 0)
            assert wait_until(lambda: other.stats()["requests"] >= next(counts))
            other.end(name, "enough")
        began_s = time.monotonic()
        with pytest.raises(envhub.SessionLost, match=r"was ended by user .*: enough"):
            frame.result()
        assert time.monotonic() - began_s < DRAW_S / 2  # at once


# --- restarts ---------------------------------------------------------------------------------------------------------


@LANES
def test_restart_costs_the_session_no_restart_and_is_told(hub: ServedHub, command: Command, lane: str) -> None:
    with session(hub, "faulty", 4, num_workers=2, restarts_max=1, lane=lane) as (envs, client, name):
        pids = {*envs.reset(seed=5)[0][:, 2].astype(int).tolist()}
        for count in range(3):
            printed = command("restart", name, "3", "--why", f"leak {count}")
            assert printed == (0, f"worker 1 of session {name} is started again, with envs 1, 3\n")
            *_, truncations, infos = envs.step([0] * 4)
            assert truncations.tolist() == [False, True, False, True]
            failure = infos["env_failure"][3]
            assert failure.cause == "restart" and failure.message.startswith("worker 1 (envs 1, 3) was restarted by ")
            assert failure.message.endswith(f": leak {count}")
            pids |= {*envs.step([0] * 4)[0][:, 2].astype(int).tolist()}
        assert len(pids) == 5
        (row,) = client.sessions()
        assert (row["restarts"], row["recycled"]) == (0, 3)


def test_commands_say_what_there_is_and_what_is_not(hub: ServedHub, command: Command) -> None:
    with session(hub, "faulty") as (envs, client, name):
        for act in (client.stack, client.frame, client.restart):
            with pytest.raises(envhub.RequestRefused, match="has envs 0 to 1, and no env 2"):
                act(name, 2)
        assert command("restart", name, "2")[0] == 1 and command("restart", name, "-1")[0] == 2
        assert command("stack", "zz") == (1, "envhub stack: no session of this hub begins with 'zz'\n")
        assert command("sessions")[1].split("\t")[0] == name
        # As of a variable of a shell that is not set.
        assert command("end", "", "--why", "no") == (1, "envhub end: no session of this hub begins with ''\n")
        assert command("end", name)[0] == 2  # without a reason
        ended = command("end", name[:7], "--why", "a test")
        assert ended == (0, f"session {name} has ended: 2 x faulty, 2 steps\n")
        status, text = command("stack", name)
        assert status == 1 and text.endswith(": a test (hub at " + hub.ipc + ")\n")
        with pytest.raises(envhub.SessionLost, match="a test"):
            envs.step([0, 0])
    assert command("sessions", "--ended")[1].splitlines()[-1].split("\t")[-2] == "a test"


def test_shell_completes_names_of_sessions(hub: ServedHub) -> None:
    with session(hub, "faulty") as (_, _, name):
        line = [sys.executable, "-m", "envhub", "__complete", "stack", "--hub", hub.ipc, ""]
        completed = subprocess.run(line, capture_output=True, text=True, timeout=100, check=True)
        assert f"{name}\t2 x faulty\n" in completed.stdout


def test_copy_of_an_order_is_not_carried_out_again_however_many_others_are_refused(hub: ServedHub) -> None:
    with session(hub, "faulty", num_workers=1) as (envs, client, name):

        def order(action: str, number: int) -> None:
            asked = Operate(action, number.to_bytes(16, "little"), name, 0)
            client._connection.ask(Op.OPERATE, asked, timeout=60)

        order("restart", 0)
        for number in range(1, 300):
            with pytest.raises(envhub.RequestRefused, match="knows no action"):
                order("\x1b[2J", number)
        order("restart", 0)
        assert envs.step([0, 0])[3].all()
        assert client.sessions()[0]["recycled"] == 1
    assert "[2J" not in "".join(line["op"] for line in hub.audit if line["event"] == "request_refused")


# --- rights -----------------------------------------------------------------------------------------------------------


def test_only_its_own_client_and_administrators_act_on_a_session(tmp_path: Path) -> None:
    keys = keys_in(tmp_path / "keys")
    rights = {"alice": "use", "bob": "use", "root": "admin"}
    tokens = [admitted(keys, name, may, restarts_per_minute_max=1) for name, may in rights.items()]
    with serve(tmp_path, "CartPole-v1", "--keys", str(keys.path)) as served:
        alice, bob, root = (envhub.connect(address_of(token, served.tcp)) for token in tokens)
        with alice, bob, root, closing(alice.make_vec("CartPole-v1", 2, num_workers=1)) as envs:
            envs.reset()
            (row,) = alice.sessions()
            name = row["session"]
            for act in (bob.stack, bob.frame, bob.restart):
                with pytest.raises(envhub.SessionLost, match=r"no session .* of yours"):
                    act(name, 0)
            for client in (alice, bob):
                with pytest.raises(envhub.AccessDenied, match="right admin"):
                    client.drain()
            for client in (alice, root):
                (stacks,) = client.stack(name)
                assert "/" not in re.findall(r'File "(.*?)"', stacks["stacks"])[0]  # folders of the hub's machine
            alice.restart(name, 0, "a try")
            _, _, _, truncations, infos = envs.step([0, 0])
            assert truncations.all() and "by client alice: a try" in infos["env_failure"][0].message
            envs.step([0, 0])
            with pytest.raises(envhub.RequestRefused, match="of restarts_per_minute_max=1 of its key"):
                alice.restart(name, 0)
            root.restart(name, 1)
            message = envs.step([0, 0])[4]["env_failure"][0].message
            assert message.endswith("by admin root: no reason was given")
            assert root.health()["status"] == "ok"
            assert root.drain(message="enough")["by"] == "admin root"
        assert served.process.wait(20) == 0
