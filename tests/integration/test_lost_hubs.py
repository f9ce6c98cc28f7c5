"""The loss of one of several hubs: its rows are truncated and made again, and the rows of the others go on."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.relay import relay
from envhub_client.connection import known_hubs
from hubs import serve, wait_until
from partial_batches import outstanding
from several_hubs import SeveralHubs, fixtures

import envhub
from envhub.env_failure import reseeded

ENVS = ("counter=sims:counter", "sleeper=odd_sims:Sleeper")
LEASE_S = 5.0
SILENCE_S = 2.5  # the least for which a hub must be silent before it counts as lost
WAIT_S = 0.5  # restart_wait
LOOK_S = 0.05
ROWS = 4
SEEDS = [11, 22, 33, 44]
SLACK_S = 20.0  # of a slow machine, which may stall for some seconds
AGAIN_S = 60.0  # for envs that are made again, on a slow machine


running, hubs = fixtures(3, *ENVS, "--lease", str(LEASE_S))


def made(hubs: SeveralHubs, *lanes: str, env: str = "counter", second: str = "", **options: Any) -> envhub.HubVectorEnv:
    """Two rows on each of two hubs, whose loss does not end the vector env; by default the third has none.

    ``second`` is another address of the second hub.
    """
    options = {"split": [2, 2, 0], "on_hub_loss": "recreate", "restart_wait": WAIT_S, **options}
    addresses = hubs.addresses(*lanes)
    addresses[1] = second or addresses[1]
    return envhub.make_vec(env, ROWS, hub=addresses, **options)


class Steps:
    """Steps of a vector env of counters, by which rows that stepped are told from rows that were truncated.

    Attributes:
        truncations: the number of truncated steps of each row.
        took_s: the seconds that each step took.
    """

    def __init__(self, envs: envhub.HubVectorEnv) -> None:
        self.envs = envs
        self.counts = envs.reset(seed=SEEDS)[0][:, 0]
        self.truncations = np.zeros(ROWS, int)
        self.took_s: list[float] = []

    def step(self) -> Any:
        """Step once. A row counts on, or is truncated by the loss of its hub, or begins an episode after that."""
        begun_s = time.monotonic()
        outcome = self.envs.step(np.ones(ROWS, int))
        self.took_s.append(time.monotonic() - begun_s)
        observations, rewards, _, truncations, infos = outcome
        counts = observations[:, 0]
        begins = (self.truncations > 0) & (counts == 0)
        assert (truncations | begins | (counts == self.counts + 1)).all(), (self.counts, outcome)
        assert (counts == self.counts)[truncations].all() and not rewards[truncations].any()
        lost = [failure is not None and failure.cause == "hub_lost" for failure in infos.get("env_failure", [None] * 4)]
        assert lost == truncations.tolist()
        self.counts = counts
        self.truncations += truncations
        return outcome

    def until_lost(self) -> None:
        """Step until a row was truncated."""
        assert wait_until(lambda: self.step()[3].any(), AGAIN_S)

    def until_all_step(self) -> float:
        """Step until no row is truncated; returns the seconds that this took."""
        begun_s = time.monotonic()
        while self.step()[3].any():
            assert time.monotonic() < begun_s + AGAIN_S
            time.sleep(LOOK_S)
        return time.monotonic() - begun_s


@pytest.mark.parametrize("lane", ["tcp", pytest.param("ipc", marks=pytest.mark.long)])
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.long)])
def test_rows_of_a_killed_hub_are_truncated_and_go_on_when_it_is_back(hubs: SeveralHubs, lane: str, lost: int) -> None:
    with closing(made(hubs, lane)) as envs:
        steps = Steps(envs)
        steps.step()
        hubs.kill(lost)
        steps.until_lost()
        hubs.start(lost)
        steps.until_all_step()
        others = slice(2, 4) if lost == 0 else slice(0, 2)
        assert not steps.truncations[others].any() and steps.truncations.any()
        assert steps.counts[others].min() > steps.counts.min()  # which began again


@pytest.mark.long
def test_stopped_hub_costs_the_others_no_more_than_the_silence_that_proves_it(hubs: SeveralHubs) -> None:
    with closing(made(hubs, "tcp")) as envs:
        steps = Steps(envs)
        steps.step()
        hubs.stop(1)
        steps.until_lost()
        assert SILENCE_S < max(steps.took_s) < SILENCE_S + SLACK_S
        steps.took_s.clear()
        for _ in range(20):
            steps.step()
        assert max(steps.took_s) < WAIT_S + SLACK_S and sorted(steps.took_s)[10] < WAIT_S  # which one step waits
        hubs.resume(1)
        steps.until_all_step()
        assert not steps.truncations[:2].any()
        assert wait_until(lambda: hubs.sessions(1) == 1)  # the other one was ended


@pytest.mark.long
def test_rows_of_other_hubs_are_sent_and_received_while_a_hub_is_stopped(hubs: SeveralHubs) -> None:
    with closing(made(hubs, "tcp", env="sleeper")) as envs:
        envs.reset()
        envs.send([0, 0, 10, 10])  # tenths of a second
        hubs.stop(1)
        begun_s = time.monotonic()
        received = dict.fromkeys(range(ROWS), 0)
        truncated: list[int] = []
        while len(truncated) < 2:
            assert time.monotonic() < begun_s + SILENCE_S + SLACK_S
            _, _, _, truncations, _, env_ids = envs.recv(1)
            truncated += env_ids[truncations].tolist()
            again = env_ids[~truncations]
            for row in again.tolist():
                received[row] += 1
            if again.size and not truncated:
                envs.send(np.zeros(len(again), int), again)
        assert sorted(truncated) == [2, 3] and received[2] == received[3] == 0
        assert min(received[0], received[1]) > 10  # which waited for no other hub


@pytest.mark.long
def test_other_rows_are_reset_called_and_closed_while_a_hub_is_stopped(
    hubs: SeveralHubs, caplog: pytest.LogCaptureFixture
) -> None:
    envs = made(hubs, "tcp")
    with closing(envs):
        steps = Steps(envs)
        last = steps.step()[0]
        hubs.stop(1)
        observations, _ = envs.reset(options={"reset_mask": np.array([True, True, False, False])})
        assert observations[:2, 0].tolist() == [0, 0] and (observations[2:] == last[2:]).all()
        steps.counts[:2] = 0
        assert envs.call_some([1, 0], "add", 3) == (3, 3)
        envs.set_attr("note", ["a", "b"], [0, 1])
        assert "made again" not in caplog.text  # a wait for the hub would end with its loss
        begun_s = time.monotonic()
        with pytest.raises(envhub.HubLost) as caught:
            envs.call("add", 1)
        assert time.monotonic() - begun_s < SILENCE_S + SLACK_S and caught.value.hub
        assert "made again" in caplog.text
        assert steps.step()[3].tolist() == [False, False, True, True]
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < SILENCE_S + SLACK_S


@pytest.mark.long
@pytest.mark.parametrize("state", ["idle", "pending", "lost"])
def test_close_does_not_wait_for_a_hub_that_was_stopped(hubs: SeveralHubs, state: str) -> None:
    envs = made(hubs, "tcp")
    steps = Steps(envs)
    hubs.stop(0)
    if state == "pending":
        envs.step_async(np.ones(ROWS, int))
    elif state == "lost":
        steps.until_lost()
    begun_s = time.monotonic()
    envs.close()
    assert time.monotonic() - begun_s < 2 * SILENCE_S + SLACK_S
    assert not [each for each in threading.enumerate() if each.name == "envhub-rebuild"]


@pytest.mark.long
def test_loss_of_all_hubs_truncates_all_rows_until_the_hubs_are_back(hubs: SeveralHubs) -> None:
    with closing(made(hubs, "ipc", "tcp")) as envs:
        steps = Steps(envs)
        hubs.kill(0)
        hubs.kill(1)
        assert wait_until(lambda: bool(steps.step()[3].all()), AGAIN_S)
        hubs.start(1)
        assert wait_until(lambda: steps.step()[3].tolist() == [True, True, False, False], AGAIN_S)
        hubs.start(0)
        steps.until_all_step()


@pytest.mark.long
@pytest.mark.parametrize("lane", ["tcp", "ipc"])
def test_call_that_finds_a_hub_lost_raises_and_the_next_step_truncates(hubs: SeveralHubs, lane: str) -> None:
    with closing(made(hubs, lane)) as envs:
        steps = Steps(envs)
        envs.set_attr("note", list("abcd"))
        hubs.kill(1)
        with pytest.raises(envhub.HubLost):
            envs.get_attr("note")
        assert envs.call_some([0], "add", 2) == (2,)
        assert steps.step()[3].tolist() == [False, False, True, True]
        hubs.start(1)
        assert envs.get_attr("note") == tuple("abcd")  # which waits for the envs, and has the attributes set again
        steps.until_all_step()
        assert steps.counts[2:].max() <= 1


@pytest.mark.long
def test_rows_of_a_lost_hub_are_divided_among_two_others(hubs: SeveralHubs) -> None:
    with closing(made(hubs, "tcp", split=[0, 4, 0], on_hub_loss="redistribute")) as envs:
        steps = Steps(envs)
        envs.set_attr("note", list("abcd"))
        hubs.kill(1)
        steps.until_lost()
        steps.until_all_step()
        assert [hubs.sessions(0), hubs.sessions(2)] in ([1, 1], [1, 0], [0, 1])
        assert envs.get_attr("note") == tuple("abcd") and steps.truncations.all()
        envs.send([1, 1], [3, 0])
        received: list[int] = []
        while outstanding(envs):  # one receive may return both
            received += envs.recv(1)[-1].tolist()
        assert sorted(received) == [0, 3]


@pytest.mark.long
def test_hub_of_a_fleet_comes_back_at_another_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: dict[int, str] = {}  # as Ray's actors tell them
    monkeypatch.setattr(known_hubs, "ray_hubs", lambda fleet: dict(places))
    with ExitStack() as stack:
        first, second = (stack.enter_context(serve(tmp_path, *ENVS, binds=["tcp://127.0.0.1:0"])) for _ in range(2))
        places.update(enumerate((first.tcp, second.tcp)))
        options = {"split": [2, 2], "on_hub_loss": "recreate", "restart_wait": WAIT_S}
        envs = stack.enter_context(closing(envhub.make_vec("counter", ROWS, hub="ray://sims", **options)))
        steps = Steps(envs)
        second.stop(signal.SIGKILL)
        del places[1]
        steps.until_lost()
        places[1] = stack.enter_context(serve(tmp_path, *ENVS, binds=["tcp://127.0.0.1:0"])).tcp
        assert places[1] != second.tcp and first.process.poll() is None
        steps.until_all_step()
        assert steps.truncations[:2].tolist() == [0, 0]


# --- sessions that end while their hub goes on ------------------------------------------------------------------------


ENDS = [("administrator", "ipc"), ("breach", "tcp"), pytest.param("administrator", "tcp", marks=pytest.mark.long)]
EndedPart = tuple[envhub.HubVectorEnv, Callable[[], object], str]


@contextlib.contextmanager
def one_that_ends(hubs: SeveralHubs, end: str, lane: str, **options: Any) -> Iterator[EndedPart]:
    """A vector env, what ends its part on the second hub, and that hub's address."""
    with relay(hubs.hubs[1].tcp) as between:
        address = between.address if end == "breach" else hubs.addresses(lane)[1]
        with closing(made(hubs, lane, second=address, **options)) as envs:
            breach = partial(setattr, between, "cuts", True)
            yield envs, breach if end == "breach" else partial(hubs.end_sessions, 1), address


@pytest.mark.parametrize("policy", ["recreate", pytest.param("redistribute", marks=pytest.mark.long)])
@pytest.mark.parametrize(("end", "lane"), ENDS)
def test_rows_of_a_session_that_ends_are_truncated_and_go_on(
    hubs: SeveralHubs, end: str, lane: str, policy: str
) -> None:
    with one_that_ends(hubs, end, lane, on_hub_loss=policy, restart_wait=AGAIN_S) as (envs, end_part, address):
        steps = Steps(envs)
        steps.step()
        end_part()
        while not (outcome := steps.step())[3].any():
            pass
        failure = outcome[4]["env_failure"][2]
        assert failure.hub and address in failure.message
        steps.until_all_step()
        assert envs.np_random_seed == (*SEEDS[:2], *(reseeded(seed, 0, 1) for seed in SEEDS[2:]))
        assert steps.truncations.tolist() == [0, 0, 1, 1]  # a step waits until they are made again


@pytest.mark.parametrize(("end", "lane"), ENDS)
def test_session_that_ends_raises_at_once_with_its_hub_where_that_is_asked_for(
    hubs: SeveralHubs, end: str, lane: str
) -> None:
    kind = envhub.RemoteProtocolError if end == "breach" else envhub.SessionLost
    with one_that_ends(hubs, end, lane, on_hub_loss="raise") as (envs, end_part, address):
        envs.reset()
        for _ in range(3):
            envs.step(np.ones(ROWS, int))
        end_part()
        with pytest.raises(kind, match=address) as caught:
            while True:
                envs.step(np.ones(ROWS, int))
        assert caught.value.hub
        if end == "administrator":
            count = envs.get_attr("count", [0, 1])
            for again in (envs.reset, lambda: envs.step(np.ones(ROWS, int))):
                with pytest.raises(kind):
                    again()
            assert envs.get_attr("count", [0, 1]) == count  # no other hub was asked


@pytest.mark.long
def test_reset_that_waits_in_vain_for_a_lost_hub_has_reset_no_env_of_another(hubs: SeveralHubs) -> None:
    with closing(made(hubs, "tcp", reconnect_timeout=2.0)) as envs:
        steps = Steps(envs)
        hubs.kill(1)
        steps.until_lost()
        counts = steps.counts[:2].tolist()
        with pytest.raises(envhub.HubLost, match="within reconnect_timeout=2 s"):
            envs.reset()
        assert list(envs.get_attr("count", [0, 1])) == counts
        hubs.start(1)
        steps.until_all_step()
        assert envs.reset()[0][:, 0].tolist() == [0] * ROWS
        steps.counts[:] = 0
        steps.step()
        assert steps.counts.tolist() == [1] * ROWS
