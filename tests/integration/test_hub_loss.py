"""A hub that goes away is told at once; with ``on_hub_loss="recreate"`` its envs were truncated and go on elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
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


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong in ({"on_hub_loss": "ignore"}, {"reconnect_timeout": -1.0}, {"reconnect_timeout": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            envhub.make_vec("CartPole-v1", 1, **wrong)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("end", "kind"),
    [pytest.param("administrator", "tcp", marks=pytest.mark.long), ("administrator", "ipc"), ("breach", "tcp")],
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
    ("kind", "number"),
    [("ipc", signal.SIGTERM), ("tcp", signal.SIGKILL), ("wire", signal.SIGKILL)],
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
def test_last_observation_of_a_row_whose_result_was_not_received_is_the_one_before() -> None:
    with closing(envhub.make_vec([sims.Naughty] * 4, num_workers=4, lane="wire", on_hub_loss="recreate")) as envs:
        envs.reset()
        envs.step([0, 0, 0, 0])
        for _ in range(2):
            envs.send(np.array([0]), [0])
            envs.recv()
        envs.send(np.array([0, 8, 0, 8]))  # the second and the last never end
        with pytest.raises(envhub.HubTimeout):
            envs.recv(4, timeout=1.0)
        kill_private_hub()
        observations, _, _, truncations, _, env_ids = envs.recv()
        assert env_ids.tolist() == [0, 1, 2, 3] and truncations.all()
        assert observations[:, 0].tolist() == [3, 1, 1, 1]


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


@pytest.mark.long
def test_last_observation_is_one_that_was_returned_after_steps_that_raised() -> None:
    with closing(envhub.make_vec([sims.Naughty] * 2, on_hub_loss="recreate")) as envs:
        envs.reset()
        envs.step([0, 0])
        for _ in range(2):
            with pytest.raises(ValueError, match="not allowed"):
                envs.step([1, 0])
        kill_private_hub()
        truncated(envs.step([0, 0]), 1)
        envs.reset()
        with pytest.raises(ValueError, match="not allowed"):
            envs.step([1, 0])
        envs.reset()
        kill_private_hub()
        truncated(envs.step([0, 0]), 0)


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


@pytest.mark.parametrize("lane", ["auto", pytest.param("wire", marks=pytest.mark.long)])
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
def test_close_while_the_envs_are_made_again_ends_that(tmp_path: Path) -> None:
    permit = tmp_path / "permit"
    permit.touch()
    with closing(envhub.make_vec([lambda: Permitted(permit)] * 2, on_hub_loss="recreate")) as envs:
        envs.reset()
        permit.unlink()
        kill_private_hub()
        envs.step_async([0, 0])
        with pytest.raises(envhub.HubTimeout):
            envs.step_wait(timeout=0.2)
        envs.drop_pending()
    assert wait_until(lambda: not [each for each in threading.enumerate() if each.name == "envhub-rebuild"])
    assert wait_until(lambda: not worker_processes(os.getpid()))


# --- what it means, for every kind of request and every autoreset mode ------------------------------------------------

ROWS = 3
MASK = np.array([True, False, False])
LAST = 2  # steps before the loss, which is what every env showed last
UNTOLD, TOLD = -2, -1  # of an env: its truncation is outstanding; it was truncated, and has shown nothing since

Request = Callable[[envhub.HubVectorEnv], list[int]]  # returns each env's count, or UNTOLD or TOLD


def reset_all(envs: envhub.HubVectorEnv) -> list[int]:
    observations, infos = envs.reset()
    assert observations[:, 0].tolist() == [0] * ROWS and infos == {}
    return [0] * ROWS


def reset_first(envs: envhub.HubVectorEnv) -> list[int]:
    observations, infos = envs.reset(options={"reset_mask": MASK})
    assert observations[:, 0].tolist() == [0, LAST, LAST] and infos == {}
    return [0, UNTOLD, UNTOLD]


def step_all(envs: envhub.HubVectorEnv) -> list[int]:
    truncated(envs.step([1] * ROWS), LAST)
    return [TOLD] * ROWS


def step_all_and_reset_first(envs: envhub.HubVectorEnv) -> list[int]:
    step_all(envs)
    observations, infos = envs.reset(options={"reset_mask": MASK})
    assert observations[:, 0].tolist() == [0, LAST, LAST] and infos == {}
    return [0, TOLD, TOLD]


def step_parts(envs: envhub.HubVectorEnv) -> list[int]:
    envs.send([1, 1], [0, 2])
    outcome = envs.recv()
    assert outcome[5].tolist() == [0, 2]
    truncated(outcome, LAST)
    return [TOLD, UNTOLD, TOLD]


def raises(ask: Callable[[envhub.HubVectorEnv], Any]) -> Request:
    def request(envs: envhub.HubVectorEnv) -> list[int]:
        with pytest.raises(envhub.HubLost):
            ask(envs)
        assert not envs.closed
        return [UNTOLD] * ROWS

    return request


def detach(envs: envhub.HubVectorEnv) -> str:
    protocol = envs._session.connection.protocol

    def proved() -> bool:
        """A hub that refuses connections for some seconds is within reach again when another one has started."""
        loss = protocol.loss(time.monotonic())
        return bool(loss) and "refused" not in loss

    assert wait_until(proved, 30)
    return envs.detach()


REQUESTS: dict[str, Request] = {
    "reset": reset_all,
    "masked reset": reset_first,
    "step": step_all,
    "step, masked reset": step_all_and_reset_first,
    "send and recv": step_parts,
    "call": raises(lambda envs: envs.call("pid")),
    "set_attr": raises(lambda envs: envs.set_attr("note", 1)),
    "render": raises(lambda envs: envs.render()),
    "observe": raises(lambda envs: envs.observe()),
    "detach": raises(detach),
}
MODES = ["NextStep", "SameStep", "Disabled"]


def step_on(envs: envhub.HubVectorEnv, states: list[int], mode: str) -> None:
    """Step each env, and see that it does what it is to do in its state."""
    observations, rewards, terminations, truncations, infos = envs.step([1] * ROWS)
    failures = infos.get("env_failure", [None] * ROWS)
    invalid = infos.get("invalid_transition", np.zeros(ROWS, bool))
    for row, state in enumerate(states):
        repeats = state == UNTOLD or (state == TOLD and mode == "Disabled")
        shown = LAST if repeats else state + 1
        found = (observations[row, 0], rewards[row], truncations[row], invalid[row], failures[row] is not None)
        assert found == (shown, float(state >= 0), repeats, repeats, state == UNTOLD), (row, state)
        if repeats and mode == "SameStep":
            assert infos["final_obs"][row][0] == LAST
        states[row] = TOLD if repeats else shown
    assert not terminations.any()


WHERES = ["private", "private, wire", "ipc", "ipc, stopped", "tcp", "tcp, stopped"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "where",
    [pytest.param(each, marks=() if each == "private" else pytest.mark.chaos) for each in WHERES],
)
@pytest.mark.parametrize(
    "turn", [pytest.param(turn, marks=pytest.mark.chaos if turn else pytest.mark.long) for turn in range(len(MODES))]
)
def test_hub_loss_before_every_request(tmp_path: Path, where: str, turn: int) -> None:
    """One hub after the other is lost; each turn has each request in one mode, and each place has all modes."""
    kind, _, how = where.partition(", ")
    options = {"on_hub_loss": "recreate", "num_workers": 2, "lane": "wire" if how == "wire" else "auto"}
    with contextlib.ExitStack() as held:
        if kind == "private":
            make: Callable[..., Any] = partial(envhub.make_vec, [sims.Counter] * ROWS)
            lose: Callable[[], Any] = kill_private_hub
        else:
            address, replace = held.enter_context(hubs_in_turn(tmp_path, kind))
            make = partial(envhub.make_vec, "counter", ROWS, hub=address)
            lose = partial(replace, signal.SIGTERM if how == "stopped" else signal.SIGKILL)
        for number, request in enumerate(REQUESTS):
            if kind == "private" and request == "detach":
                continue  # only sessions of served hubs can be detached
            mode = MODES[(number + WHERES.index(where) + turn) % len(MODES)]
            with closing(make(autoreset_mode=mode, **options)) as envs:
                lose_before(REQUESTS[request], envs, mode, lose)


def lose_before(request: Request, envs: envhub.HubVectorEnv, mode: str, lose: Callable[[], Any]) -> None:
    envs.reset()
    for _ in range(LAST):
        envs.step([0] * ROWS)
    lose()
    states = request(envs)
    for _ in range(3):
        step_on(envs, states, mode)
    assert envs.reset()[0][:, 0].tolist() == [0] * ROWS
    step_on(envs, [0] * ROWS, mode)


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
