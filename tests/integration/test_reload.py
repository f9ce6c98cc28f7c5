"""A hub that runs gets another configuration, by SIGHUP and by an operator's order."""

from __future__ import annotations

import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from hubs import ServedHub, serve, wait_until, worker_pids
from new_keys import admitted, keys_in

import envhub

RELOADS = 20


class Reloading:
    """A served hub and its file."""

    def __init__(self, hub: ServedHub, file: Path) -> None:
        self.hub, self.file = hub, file

    def events(self, *names: str) -> list[dict[str, Any]]:
        lines = self.hub.log.splitlines()[: self.hub.log.count("\n")]
        return [line for line in map(json.loads, lines) if line["event"] in names]

    def reload(self, text: str) -> dict[str, Any]:
        """Have the hub read this file; returns what its log says of it."""
        self.file.write_text(text)
        before = len(self.events("reloaded", "reload_refused"))
        self.hub.process.send_signal(signal.SIGHUP)
        assert wait_until(lambda: len(self.events("reloaded", "reload_refused")) > before)
        return self.events("reloaded", "reload_refused")[-1]


@pytest.fixture
def reloading(tmp_path: Path) -> Iterator[Reloading]:
    file = tmp_path / "hub.toml"
    file.write_text('[envs."CartPole-v1"]\n')
    keys = keys_in(tmp_path / "keys")
    admitted(keys, "alice")
    with serve(tmp_path, "--config", str(file), "--keys", str(keys.path), environ={"ENVHUB_SPARES_MAX": "3"}) as hub:
        yield Reloading(hub, file)


def test_offers_limits_quotas_and_the_level_of_the_log_change_and_sessions_keep_theirs(reloading: Reloading) -> None:
    hub = reloading.hub
    with envhub.connect(hub.ipc) as client, closing(client.make_vec("CartPole-v1", 2)) as envs:
        envs.reset(seed=1)
        quota = "[quotas]\nsessions_max = 1\n"
        alice = reloading.file.parent / "keys/clients/alice.toml"
        alice.write_text(f"{alice.read_text()}\n{quota}")
        offers = '[envs.pendulum]\nenv = "Pendulum-v1"\n'
        said = reloading.reload(f'max_envs = 3\nlease = 5\nspares_max = 9\nlog_level = "warning"\n{offers}')
        assert (said["by"], said["needs_restart"]) == ("SIGHUP", [])
        # The option of a variable still comes before the file.
        changed = {"max_envs", "lease", "log_level", 'envs."CartPole-v1"', "envs.pendulum"}
        assert {*said["changed"]} - {"key alice"} == changed
        assert reloading.events("keys_read")[-1]["why"] == "other quotas"
        assert client.envs() == ["pendulum"] and client.stats()["capacity"]["envs_free"] == 1
        with pytest.raises(envhub.RequestRefused, match="more envs would exceed the hub's max_envs=3"):
            client.make_vec("pendulum", 2)
        with pytest.raises(envhub.RequestRefused, match="this hub does not offer 'CartPole-v1'"):
            client.make_vec("CartPole-v1")
        client.make_vec("pendulum").close()
        assert len(reloading.events("session_made")) == 1  # the second one's line is less than a warning
        envs.step(envs.action_space.sample())


def test_bad_file_is_refused_whole_and_what_waits_for_a_restart_is_named(reloading: Reloading) -> None:
    with envhub.connect(reloading.hub.ipc) as client:
        for text, why in (
            ("max_envs = 1\nlease = -1\n", "lease = -1: expected `float` >= 0.0; allowed: 0 to 604800"),
            ("max_envs = ", "is no TOML"),
            ('max_envs = 1\n[envs.sim]\nenv = "no_such:make"\n', "sim=no_such:make cannot be made"),
        ):
            refused = reloading.reload(text)
            assert refused["event"] == "reload_refused" and why in refused["why"] and "\n" not in refused["why"]
        assert client.envs() == ["CartPole-v1"] and client.stats()["capacity"]["envs_free"] == 4096
        text = 'max_envs = 7\nbind = ["tcp://127.0.0.1:1"]\npython = "python9"\nmessage_bytes_max = "1MB"\n'
        said = reloading.reload(f'{text}worker_env = ["A"]\n[envs."CartPole-v1"]\n')
        assert (said["changed"], said["level"]) == (["max_envs"], "warning")
        # Of the addresses the command line decides.
        assert said["needs_restart"] == ["python", "worker_env", "message_bytes_max"]
        client.make_vec("CartPole-v1").close()


@pytest.mark.long
def test_hub_whose_working_directory_was_removed_goes_on(tmp_path: Path) -> None:
    (file, folder) = tmp_path / "hub.toml", tmp_path / "removed"
    file.write_text('[envs."CartPole-v1"]\n')
    folder.mkdir()
    with serve(tmp_path, "--config", str(file), cwd=folder) as hub, envhub.connect(hub.ipc) as client:
        client.envs()
        folder.rmdir()
        refused = Reloading(hub, file).reload('[envs.sim]\nenv = "no_such:make"\n')
        assert refused["event"] == "reload_refused" and "No such file" in refused["why"]
        assert client.health()["status"] == "ok"


def test_order_of_an_operator_is_answered_with_what_has_changed_or_why_not(reloading: Reloading) -> None:
    with envhub.connect(reloading.hub.ipc) as client:
        reloading.file.write_text('max_envs = 7\nname = "box"\nlog = "hub.log"\n[envs."CartPole-v1"]\nspares = 1\n')
        answer = client.reload()
        changed = {"max_envs": [4096, 7], "name": ["", "box"], 'envs."CartPole-v1"': [{}, {"spares": 1}]}
        assert answer["changed"] == changed
        assert [*answer["needs_restart"]] == ["log"]
        reloading.file.write_text("max_envs = many\n")
        with pytest.raises(envhub.RequestRefused, match=r"hub.toml is no TOML.*goes on with the configuration that it"):
            client.reload()
        printed = subprocess.run(
            [sys.executable, "-m", "envhub", "reload", reloading.hub.ipc], capture_output=True, text=True, timeout=60
        )
        assert printed.returncode == 1 and "hub.toml is no TOML" in printed.stderr
    assert reloading.events("reloaded")[-1]["by"].startswith("user ")


def trajectory(envs: Any, seed: int) -> Iterator[Any]:
    """The observations of a reset, and what each step returns."""
    yield envs.reset(seed=seed)[0]
    draw = np.random.default_rng(seed)
    while True:
        yield envs.step(draw.integers(0, 2, 4))[:4]


def test_reloads_under_load_are_noticed_by_no_session(reloading: Reloading) -> None:
    begun, over = threading.Barrier(3), threading.Event()
    found: dict[str, list[Any]] = {"wire": [], "auto": []}

    def step(seed: int, lane: str, results: list[Any]) -> None:
        try:
            with closing(envhub.make_vec("CartPole-v1", 4, hub=reloading.hub.ipc, lane=lane)) as envs:
                assert envs.lane == ("shared" if lane == "auto" else "wire")
                begun.wait(60)
                for result in trajectory(envs, seed):
                    results.append(result)
                    if over.is_set() and len(results) > RELOADS:
                        break
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=step, args=(seed, *each)) for seed, each in enumerate(found.items())]
    for thread in threads:
        thread.start()
    begun.wait(60)
    for number in range(RELOADS):
        offers = '[envs."CartPole-v1"]\n' if number % 2 else '[envs.pendulum]\nenv = "Pendulum-v1"\n'
        broken = "lease = nothing\n" if number % 5 == 4 else f"lease = {number}\n"
        reloading.reload(f"max_envs = {8 + number % 3}\nsessions_max = {1 + number % 2}\n{broken}{offers}")
    over.set()
    for thread in threads:
        thread.join()
    for seed, results in enumerate(found.values()):
        assert not isinstance(results[-1], BaseException), results[-1]
        with closing(gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4)) as local:
            wanted = [*itertools.islice(trajectory(local, seed), len(results))]
        assert all(all(map(np.array_equal, *each)) for each in zip(results, wanted, strict=True))
    assert not reloading.events("client_lost", "request_failed", "env_rebuilt", "env_late", "session_expired")


def test_sighup_of_a_terminal_that_is_closed_ends_its_hub(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "envhub", "serve", "CartPole-v1", "--bind", f"ipc://{tmp_path}/hub.sock"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        try:
            assert process.stdout is not None and process.stdout.readline().startswith(b"listening")
            process.send_signal(signal.SIGHUP)  # while the terminal is there
            with envhub.connect(f"ipc://{tmp_path}/hub.sock") as client:
                assert client.health()["status"] == "ok"
            os.close(ours)
            process.send_signal(signal.SIGHUP)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_private_hub_is_not_touched_by_sighup() -> None:
    with closing(envhub.make_vec("CartPole-v1", 1)) as envs:
        envs.reset(seed=1)
        (worker,) = worker_pids()
        hub = psutil.Process(worker).parent()
        assert hub is not None
        hub.send_signal(signal.SIGHUP)
        envs.step(np.zeros(1, int))
        assert worker_pids() == {worker}
