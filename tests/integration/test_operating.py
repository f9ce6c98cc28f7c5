"""An operator of a hub with eight sessions finds those in trouble by one command, and deals with them.

``pytest -m long -n 0 -s`` of this file prints the commands, their output, and what each trainer reads.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hubs import ServedHub, serve, wait_until
from new_keys import address_of, admitted, keys_in

import envhub

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
ENVS = 2


class Run(NamedTuple):
    """A trainer's session: its user (the hub's own without a name), its lane, and the trouble of its last env."""

    user: str
    lane: str = "wire"
    trouble: str = ""


RUNS = (
    *(Run("alice"), Run("alice", trouble="stuck"), Run("bob"), Run("bob", trouble="leaking")),
    *(Run("carol"), Run("carol", trouble="slow"), Run(""), Run("", "auto", "crash-looping")),
)


class Trainer(threading.Thread):
    """Steps a session's envs until it has ended, and keeps what it reads of failures."""

    def __init__(self, run: Run, address: str, mark: str, begins: threading.Event) -> None:
        super().__init__(daemon=True)
        self.begins = begins
        self.kind, self.read, self.steps, self.has_ended = run, list[str](), 0, threading.Event()
        each = [{}] * (ENVS - 1) + [{"trouble": run.trouble, "mark": mark}]
        options: dict[str, Any] = {"lane": run.lane, "num_workers": ENVS, "env_kwargs": each, "restarts_max": 50}
        self.envs = envhub.make_vec("sim", hub=address, label=run.trouble or "healthy", **options)
        self.envs.reset()
        self.session = self.envs.token[:8]
        assert self.envs.lane == ("shared" if run.lane == "auto" else "wire")
        self.start()

    def run(self) -> None:
        self.begins.wait()
        try:
            while not self.has_ended.is_set():
                *_, infos = self.envs.step(np.zeros(ENVS, int))
                self.steps += 1
                self.read += [each.message for each in infos.get("env_failure", ()) if each is not None]
        except envhub.EnvHubError as error:
            self.read.append(f"{type(error).__name__}: {error}")
        finally:
            self.envs.close(terminate=True)

    def end(self, hub: ServedHub) -> None:
        self.has_ended.set()
        self.begins.set()
        with envhub.connect(hub.ipc) as client, suppress(envhub.SessionLost):
            client.end(self.session)
        self.join(60)


@contextmanager
def running(folder: Path, *options: str, **environ: str) -> Iterator[tuple[ServedHub, list[Trainer]]]:
    """A hub with these options, and trainers that step once the event ``begins`` of one of them is set."""
    keys, begins = keys_in(folder / "keys"), threading.Event()
    tokens = {user: admitted(keys, user) for user in sorted({run.user for run in RUNS} - {""})}
    mark = f"stuck-{secrets.token_hex(8)}"
    served = "sim=troubled:Troubled", "--keys", str(keys.path), *options
    with serve(folder, *served, environ=environ) as hub, ExitStack() as ends:
        ends.callback(Path(tempfile.gettempdir(), mark).unlink, missing_ok=True)
        addresses = {user: address_of(token, hub.tcp) for user, token in tokens.items()} | {"": hub.ipc}
        found = []
        for run in RUNS:
            found.append(Trainer(run, addresses[run.user], mark, begins))
            ends.callback(found[-1].end, hub)
        yield hub, found


def command(*arguments: str) -> str:
    """The output of this command, which is printed with its time."""
    began_s = time.monotonic()
    program = [sys.executable, "-m", "envhub", *arguments]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=120)
    print(
        f"\n$ envhub {' '.join(arguments)}\n{ran.stdout}{ran.stderr}-- {time.monotonic() - began_s:.1f} s", flush=True
    )
    assert ran.returncode == 0
    return ran.stdout


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[tuple[ServedHub, list[Trainer]]]:
    with running(tmp_path) as (hub, found):
        found[0].begins.set()
        yield hub, found


def test_each_trouble_is_found_by_one_command_and_dealt_with(trainers: tuple[ServedHub, list[Trainer]]) -> None:
    hub, every = trainers
    troubled = {each.kind.trouble: each for each in every if each.kind.trouble}

    def findings() -> dict[str, dict[str, Any]]:
        report = json.loads(command("top", hub.ipc, "--json"))
        assert {row["session"] for row in report["sessions"]} == {each.session for each in every}
        return {each["trouble"]: each for each in report["findings"]}

    found: dict[str, dict[str, Any]] = {}
    assert wait_until(lambda: bool(found.update(findings())) or found.keys() >= troubled.keys(), 120)
    assert {trouble: each["session"] for trouble, each in found.items()} == {
        trouble: each.session for trouble, each in troubled.items()
    }
    command("top", hub.ipc, "--once")
    command("stack", troubled["stuck"].session, str(ENVS - 1), "--hub", hub.ipc)

    def deals(trouble: str, verb: str, *arguments: str) -> None:
        trainer, why = troubled[trouble], f"it is {trouble}"
        before = len(trainer.read)
        command(verb, trainer.session, *arguments, "--why", why, "--hub", hub.ipc)
        assert wait_until(lambda: any(why in text for text in trainer.read[before:]))
        text = next(text for text in trainer.read[before:] if why in text)
        print(f"   its trainer reads: {text}")

    deals("stuck", "restart", str(ENVS - 1))
    steps = troubled["stuck"].steps
    assert wait_until(lambda: troubled["stuck"].steps > steps + 50)
    deals("leaking", "restart", str(ENVS - 1))
    deals("slow", "end")
    deals("crash-looping", "end")
    command("sessions", hub.ipc, "--ended")
    for each in every:
        healthy = not each.kind.trouble
        assert each.is_alive() == (healthy or each.kind.trouble in ("stuck", "leaking"))
        assert not (healthy and each.read)
