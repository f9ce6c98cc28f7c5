"""A hub that goes away is told at once; with ``on_hub_loss="recreate"`` its envs were truncated and go on elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import sims
from chaos.relay import relay
from envhub_client.private_hub.process import private_hub
from gymnasium import spaces
from hubs import ServedHub, free_port, interrupted_after, lives, serve, stopped, wait_until, worker_processes

import envhub
from envhub.env_failure import reseeded

TELL_S = 9.5  # "at once", with room for a slow machine
ENVS = ("counter=sims:counter", "naughty=sims:naughty")


class Spelling(sims.Counter):
    """Observes a word, too, which is of no fixed size."""

    observation_space = spaces.Dict({"count": spaces.Discrete(10**6), "word": spaces.Text(9)})  # type: ignore[assignment]

    def observation(self) -> Any:
        return {"count": self.count, "word": "x" * self.count}


@contextlib.contextmanager
def hubs_in_turn(folder: Path, kind: str) -> Iterator[Any]:
    """The address of a hub, and a function that kills it and starts another one in its place."""
    with contextlib.ExitStack() as running:
        # At a port that nobody gets between two hubs.
        binds = [f"tcp://127.0.0.1:{free_port()}", f"ipc://{folder}/hub.sock"]
        first = running.enter_context(serve(folder, *ENVS, binds=binds))
        address = first.tcp if kind == "tcp" else first.ipc
        hubs: list[ServedHub] = [first]

        def replace(number: int = signal.SIGKILL, wait_s: float = 0.0) -> ServedHub:
            hubs[-1].stop(number)
            time.sleep(wait_s)
            hubs.append(running.enter_context(serve(folder, *ENVS, binds=[address])))
            return hubs[-1]

        yield address, replace


def kill_private_hub() -> None:
    """Kill it, and see it and its workers end: else a step may just be carried out."""
    hub = private_hub()
    workers = worker_processes(hub.pid)
    os.kill(hub.pid, signal.SIGKILL)
    assert wait_until(lambda: not hub.alive and not any(map(lives, workers)))


def truncated(outcome: Any, count: int) -> None:
    """Check that a step told the loss of the hub, after so many steps."""
    observations, rewards, terminations, truncations, infos = outcome[:5]
    rows = len(rewards)
    assert observations[:, 0].tolist() == [count] * rows
    assert rewards.tolist() == [0.0] * rows and rewards.dtype == np.float64
    assert truncations.tolist() == [True] * rows and terminations.tolist() == [False] * rows
    assert [failure.cause for failure in infos["env_failure"]] == ["hub_lost"] * rows
    assert infos["env_failure"][0].message.endswith("the env is made again")
    for key in ("_env_failure", "invalid_transition", "_invalid_transition"):
        assert infos[key].dtype == bool and infos[key].tolist() == [True] * rows


# --- told -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["auto", pytest.param("wire", marks=pytest.mark.long)])
def test_end_of_a_private_hub_is_told_at_once(lane: str) -> None:
    with closing(envhub.make_vec([sims.Naughty] * 2, lane=lane)) as envs:
        envs.reset()
        envs.step_async([8, 8])  # for ever
        begun = time.monotonic()
        os.kill(private_hub().pid, signal.SIGKILL)
        with pytest.raises(envhub.HubLost, match="has ended"):
            envs.step_wait()
        with pytest.raises(envhub.HubLost):
            envs.reset()
        assert time.monotonic() - begun < TELL_S


@pytest.mark.long
def test_end_of_a_served_hub_is_told_at_once_on_the_shared_lane(tmp_path: Path) -> None:
    with serve(tmp_path, *ENVS) as hub, closing(envhub.make_vec("naughty", 2, hub=hub.ipc)) as envs:
        envs.reset()
        envs.step_async([8, 8])  # for ever
        begun = time.monotonic()
        hub.stop(signal.SIGKILL)
        with pytest.raises(envhub.HubLost, match="side socket has ended"):
            envs.step_wait()
        assert time.monotonic() - begun < TELL_S


@pytest.mark.long
def test_hub_out_of_reach_for_the_reconnect_timeout_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serve(tmp_path, *ENVS) as hub:
        envs = envhub.make_vec("naughty", 2, hub=hub.tcp, reconnect_timeout=5.0)
        envs.reset()
        hub.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(envhub.HubLost, match="reconnect_timeout=5 s"):
                envs.step([0, 0])
        finally:
            hub.process.send_signal(signal.SIGCONT)
        assert wait_until(lambda: "within reach again" in caplog.text)
        assert envs.step([0, 0])[0][:, 0].tolist() == [2, 2]  # the one that was given up has been carried out
        envs.close()


@pytest.mark.long
def test_hub_at_the_path_of_one_that_is_stopped_is_found(tmp_path: Path) -> None:
    """The socket of a stopped hub still accepts connections, though its path is another's by now."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    address = f"ipc://{tmp_path}/hub.sock"
    with serve(folders[0], "counter=sims:counter", binds=[address]) as hub:
        options = {"lane": "wire", "on_hub_loss": "raise", "reconnect_timeout": 30.0}
        with closing(envhub.make_vec("counter", 1, hub=address, **options)) as envs:
            envs.reset()
            with stopped(hub.process.pid):
                for left in tmp_path.glob("hub.sock*"):
                    left.unlink()
                other = serve(folders[1], "counter=sims:counter", binds=[address])
                with other, pytest.raises(envhub.HubLost, match="another hub answers"):
                    envs.step([0])


@pytest.mark.long
def test_absent_hub_is_told_when_the_time_to_connect_is_over(tmp_path: Path) -> None:
    deaf = socket.socket()
    deaf.bind(("127.0.0.1", 0))  # and nobody else's
    port = deaf.getsockname()[1]
    silent = socket.create_server(("127.0.0.1", 0))  # somebody who is no hub
    mute = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    addresses = {f"tcp://127.0.0.1:{port}": "running there", mute: "running there"}
    addresses[f"ipc://{tmp_path}/nobody.sock"] = "start a hub as this user"
    for address, advice in addresses.items():
        begun = time.monotonic()
        why = rf"no hub answered at {address} within 0.5 s: .*{advice}"
        with pytest.raises(envhub.HubUnreachable, match=why):
            envhub.connect(address, timeout=0.5)
        assert 0.4 < time.monotonic() - begun < TELL_S
    silent.close()
    deaf.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tcp", pytest.param("ipc", marks=pytest.mark.long)])
def test_step_that_was_queued_for_a_dead_hub_is_not_run_by_the_next(tmp_path: Path, kind: str) -> None:
    with hubs_in_turn(tmp_path, kind) as (address, replace):
        envs = envhub.make_vec("counter", 2, hub=address, lane="wire", on_hub_loss="recreate")
        envs.reset()
        hub = psutil.Process(envhub_pid(address))
        hub.kill()
        assert wait_until(lambda: not lives(hub))
        connection = envs._session.connection
        # From then on a message waits for the next connection.
        assert wait_until(lambda: connection.check() or connection.protocol._away_since_s is not None)
        envs.step_async([5, 5])
        replace()
        truncated(envs.step_wait(), 0)
        with envhub.connect(address) as client:
            assert client.stats()["refused"] >= 1  # stale_hub
            assert len(client.sessions()) == 1
        assert envs.get_attr("count") == (0, 0) and envs.get_attr("last_action") == (None, None)
        envs.close()


def envhub_pid(address: str) -> int:
    """The process id of the hub there."""
    with envhub.connect(address) as client:
        return client._connection.welcome.pid


# --- recreated --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ("administrator", "ipc"),
        *(pytest.param(end, "tcp", marks=pytest.mark.long) for end in ("administrator", "breach")),
    ],
)
def test_session_that_ends_while_its_hub_serves_is_made_again_there(tmp_path: Path, end: str, kind: str) -> None:
    with serve(tmp_path, *ENVS) as hub, relay(hub.tcp) as between:
        address = between.address if end == "breach" else getattr(hub, kind)
        with closing(envhub.make_vec("counter", 2, hub=address, on_hub_loss="recreate")) as envs:
            envs.reset(seed=[11, 22])
            envs.step([1, 1])
            if end == "breach":
                between.cuts = True
            else:
                end_only_session(address)
            outcome = envs.step([1, 1])
            truncated(outcome, 1)
            assert address in outcome[4]["env_failure"][0].message
            assert envs.step([1, 1])[0][:, 0].tolist() == [0, 0] and envs.step([1, 1])[0][:, 0].tolist() == [1, 1]
            assert envs.np_random_seed == (reseeded(11, 0, 1), reseeded(22, 0, 1))
            end_only_session(hub.tcp)  # which is the only one that is left
            with pytest.raises(envhub.SessionLost):
                envs.call("act", 1)
            truncated(envs.step([1, 1]), 1)
            envs.reset()
            assert envs.np_random_seed == (reseeded(11, 0, 2), reseeded(22, 0, 2))


def end_only_session(address: str) -> None:
    """End the session of a hub, as an administrator."""
    with envhub.connect(address) as client:
        (session,) = client.sessions()
        client.end(session["session"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "number"), [("ipc", signal.SIGTERM), ("tcp", signal.SIGKILL), ("wire", signal.SIGKILL)]
)
def test_envs_go_on_truncated_on_the_hub_that_takes_its_place(tmp_path: Path, kind: str, number: int) -> None:
    lane = "wire" if kind == "wire" else "auto"
    with hubs_in_turn(tmp_path, kind) as (address, replace):
        envs = envhub.make_vec("counter", 2, hub=address, lane=lane, on_hub_loss="recreate", reconnect_timeout=30)
        envs.reset()
        for count in range(1, 4):
            assert envs.step([count, 0])[0][:, 0].tolist() == [count, count]
        before = envs.lane
        replace(number)
        truncated(envs.step([1, 1]), 3)
        assert envs.lane == before
        assert envs.reset()[0][:, 0].tolist() == [0, 0]
        assert envs.step([1, 1])[0][:, 0].tolist() == [1, 1]
        envs.close()


@pytest.mark.long
def test_last_observation_is_the_final_one_in_same_step_mode() -> None:
    with closing(envhub.make_vec([Spelling] * 2, autoreset_mode="SameStep", on_hub_loss="recreate")) as envs:
        envs.reset()
        for _ in range(3):
            last = envs.step([0, 0])[0]
        last["count"][:] = 77  # the caller's own
        kill_private_hub()
        observations, *_, infos = envs.step([0, 0])
        assert observations["count"].tolist() == [3, 3] and observations["word"] == ("xxx", "xxx")
        assert infos["final_obs"][1] == {"count": 3, "word": "xxx"} and infos["_final_obs"].tolist() == [True, True]
        assert envs.reset()[0]["word"] == ("", "")


@pytest.mark.long
@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_last_observation_of_a_row_under_way_at_a_drain_is_the_one_before(tmp_path: Path, lane: Any) -> None:
    options: dict[str, Any] = {"num_workers": 2, "lane": lane, "on_hub_loss": "recreate"}
    with (
        hubs_in_turn(tmp_path, "ipc") as (address, replace),
        closing(envhub.make_vec("naughty", 2, hub=address, **options)) as envs,
    ):
        envs.reset()
        envs.step([0, 0])
        envs.send(np.array([0, 8]))  # the second one never ends
        envs.recv(1)
        replace(signal.SIGTERM)
        observations, _, _, truncations, _, env_ids = envs.recv(1)
        assert (env_ids.tolist(), truncations.tolist()) == ([1], [True]) and observations[:, 0].tolist() == [1]


class Permitted(sims.Counter):
    """Is made once a file is there."""

    def __init__(self, permit: Path) -> None:
        super().__init__()
        while not permit.exists():
            time.sleep(0.01)


BEGUN: dict[str, Callable[[envhub.HubVectorEnv], Any]] = {
    "step_wait": lambda envs: envs.step_async([0, 0]),
    "reset_wait": lambda envs: envs.reset_async(),
    "call_wait": lambda envs: envs.call_async("add", 2),
}


@pytest.mark.long
@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_request_after_an_interrupted_wait_for_lost_envs_begins_at_once(tmp_path: Path, lane: Any) -> None:
    permit = tmp_path / "permit"
    permit.touch()
    with closing(
        envhub.make_vec([lambda: Permitted(permit)] * 2, num_workers=2, lane=lane, on_hub_loss="recreate")
    ) as envs:
        envs.reset()
        envs.step([0, 0])
        permit.unlink()
        kill_private_hub()
        for both in (lambda: envs.step([0, 0]), envs.reset, lambda: envs.call("add", 2)):
            for name, begin in BEGUN.items():
                with pytest.raises((KeyboardInterrupt, envhub.HubLost)), interrupted_after(0.2):
                    both()
                begun = time.monotonic()
                begin(envs)
                for _ in range(2):
                    with pytest.raises(envhub.HubTimeout, match="its envs are not made again yet: wait again"):
                        getattr(envs, name)(timeout=0.1)
                assert time.monotonic() - begun < TELL_S
                envs.drop_pending()
        envs.send([0, 0])
        truncated(envs.recv(timeout=TELL_S), 1)
        envs.send([0, 0])
        with pytest.raises(envhub.HubTimeout, match="0 of 2 envs were done"):
            envs.recv(timeout=0.1)
        permit.touch()
        assert envs.recv()[0][:, 0].tolist() == [0, 0]
        assert envs.step([0, 0])[0][:, 0].tolist() == [1, 1]


@pytest.mark.long
def test_no_hub_in_its_place_is_told_and_one_that_comes_later_is_found(tmp_path: Path) -> None:
    with serve(tmp_path, *ENVS) as first:
        address = first.ipc
        envs = envhub.make_vec("counter", 2, hub=address, on_hub_loss="recreate", reconnect_timeout=3.0)
        envs.reset()
        first.stop(signal.SIGKILL)
    for attempt in (lambda: envs.step([0, 0]), envs.reset, lambda: envs.call("pid")):
        with pytest.raises(envhub.HubLost, match="no hub made its envs again within reconnect_timeout=3 s"):
            attempt()
    with serve(tmp_path, *ENVS, binds=[address]) as second:
        truncated(envs.step([0, 0]), 0)
        envs.reset()
        assert envs.step([1, 1])[0][:, 0].tolist() == [1, 1]
        second.stop(signal.SIGKILL)
        begun = time.monotonic()
        envs.close()
        assert time.monotonic() - begun < TELL_S


@pytest.mark.long
def test_single_env_is_truncated_and_goes_on() -> None:
    env: gym.Env[Any, Any] = envhub.make(sims.Counter, on_hub_loss="recreate")
    env.reset()
    env.step(1)
    kill_private_hub()
    observation, reward, terminated, cut, info = env.step(1)
    assert (observation[0], reward, terminated, cut) == (1, 0.0, False, True)
    assert info["env_failure"].cause == "hub_lost" and info["invalid_transition"] is True
    assert env.reset()[0][0] == 0 and env.step(1)[0][0] == 1
    env.close()


def test_client_goes_on_with_a_hub_that_is_started_again_at_its_address(tmp_path: Path) -> None:
    with hubs_in_turn(tmp_path, "tcp") as (address, replace), envhub.connect(address) as client:
        first = client.health()["hub"]
        replace()
        assert client.health()["hub"] != first
        assert client.sessions() == [] and "counter" in client.envs()
