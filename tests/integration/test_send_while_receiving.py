"""``send`` after a ``recv`` that timed out or was interrupted, on the wire lane: each result comes exactly once."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sims
from chaos.chaos_proxy import ChaosProxy, proxy
from chaos.interrupts import Interrupt
from hubs import ServedHub, interrupted_after, stopped, wait_until
from partial_batches import received

import envhub
from envhub.protocol.prelude import PRELUDE

SLEEPS = 6  # an action of ``naughty`` that takes 0.2 s
BYTES_RECEIVED = struct.Struct("=128xQ")  # of Linux's struct tcp_info


@pytest.fixture
def wire(hub: ServedHub) -> Iterator[ChaosProxy]:
    with proxy(hub.tcp) as between:
        yield between


@pytest.fixture
def envs(wire: ChaosProxy) -> Iterator[envhub.HubVectorEnv]:
    with contextlib.closing(envhub.make_vec("naughty", 3, hub=wire.address, num_workers=3, lane="wire")) as made:
        made.reset()
        yield made


def times_out(envs: envhub.HubVectorEnv, min_envs: int | None = None) -> None:
    with pytest.raises(envhub.HubTimeout):
        envs.recv(min_envs, timeout=0.05)


def come_from_hub(wire: ChaosProxy) -> int:
    """How many bytes have come from the hub to the proxy, as the kernel says, whether it forwards them or not."""
    connections = [link.sides[1].get_extra_info("socket") for link in list(wire._links)]
    infos = [each.getsockopt(socket.SOL_TCP, socket.TCP_INFO, BYTES_RECEIVED.size) for each in connections]
    return sum(BYTES_RECEIVED.unpack(info)[0] for info in infos)


def answered_but_held(envs: envhub.HubVectorEnv, wire: ChaosProxy, action: int) -> None:
    """Have the hub answer a RECEIVE with env 0 while its client hears nothing, and then lose the reply."""
    pid = envs.call("pid")[0]
    with stopped(pid):
        envs.send([action], [0])
        times_out(envs)
        wire.hold()
        before = come_from_hub(wire)
    assert wait_until(lambda: come_from_hub(wire) >= before + PRELUDE.size)
    wire.cut()
    wire.hold(False)


@pytest.mark.parametrize("how", [{"lane": "wire"}, {}], ids=str)
def test_other_envs_are_sent_while_a_slow_one_is_waited_for(how: dict[str, Any]) -> None:
    with contextlib.closing(envhub.make_vec(sims.Naughty, 3, num_workers=3, **how)) as envs:
        envs.reset()
        with stopped(envs.call("pid")[0]):
            envs.send([7], [0])
            for action in (9, 10, 11):
                times_out(envs)
                envs.send([action], [1])
                _, rewards, *_, env_ids = envs.recv(1, timeout=20)
                assert (env_ids.tolist(), rewards.tolist()) == ([1], [action])
            times_out(envs)
            envs.send([12, 13], [2, 1])
        assert received(envs) == {0: 7, 1: 13, 2: 12}
        assert envs.get_attr("count") == (1, 4, 1)


def test_failure_of_an_env_that_was_lost_is_raised_by_the_next_recv(
    envs: envhub.HubVectorEnv, wire: ChaosProxy
) -> None:
    answered_but_held(envs, wire, 1)
    envs.send([9], [1])
    with pytest.raises(ValueError, match="one is not allowed"):
        envs.recv(2, timeout=20)
    assert received(envs) == {1: 9}


def test_interrupted_recv_may_be_followed_by_a_send(envs: envhub.HubVectorEnv) -> None:
    with stopped(envs.call("pid")[0]):
        envs.send([7], [0])
        with pytest.raises(KeyboardInterrupt), interrupted_after(0.2):
            envs.recv()
        envs.send([9], [1])
    assert received(envs) == {0: 7, 1: 9}


def test_interrupted_send_is_finished_by_the_next_wait(
    envs: envhub.HubVectorEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = envs._session.connection._transport

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with stopped(envs.call("pid")[0]):
        envs.send([7], [0])
        times_out(envs)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(transport, "send", interrupt)
            envs.send([9], [1])
        with pytest.raises(envhub.SessionBusy):
            envs.observe()
        _, rewards, *_, env_ids = envs.recv(1, timeout=20)
        assert (env_ids.tolist(), rewards.tolist()) == ([1], [9])
    assert received(envs) == {0: 7}


@pytest.mark.parametrize(
    "stride", [101, pytest.param(7, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.chaos)]
)
def test_interrupt_anywhere_in_a_send_loses_no_result_and_doubles_none(envs: envhub.HubVectorEnv, stride: int) -> None:
    pid, counts = envs.call("pid")[0], np.zeros(3, int)
    for turn in range(1, 1000):
        interrupt = Interrupt(turn * stride)
        with stopped(pid):
            envs.send([7], [0])
            times_out(envs)
            interrupt.during(lambda: envs.send([9], [1]))
            if turn % 2:
                times_out(envs)
        rewards = received(envs)
        assert rewards in ({0: 7, 1: 9}, {0: 7}), rewards
        counts[[*rewards]] += 1
        assert envs.get_attr("count") == tuple(counts)
        if not interrupt.raised:
            break
    assert not interrupt.raised and turn * stride > 100


@pytest.mark.long
def test_results_are_received_once_whatever_becomes_of_the_connection(hub: ServedHub) -> None:
    rng = np.random.default_rng(7)
    with proxy(hub.tcp) as wire:
        options: dict[str, Any] = {"num_workers": 4, "lane": "wire", "num_envs": 4}
        with contextlib.closing(envhub.make_vec("naughty", hub=wire.address, **options)) as envs:
            envs.reset()
            sent, counts, late = dict[int, int](), np.zeros(4, int), 0
            for turn in range(80):
                free = [env for env in range(4) if env not in sent]
                chosen = rng.permutation(free)[: rng.integers(0, len(free) + 1)]
                if chosen.size:
                    actions = rng.choice([0, 7, 9, 10, SLEEPS], len(chosen))
                    envs.send(actions, chosen)
                    sent.update(zip(chosen.tolist(), actions.tolist(), strict=True))
                if turn % 5 == 0:
                    wire.cut()
                try:
                    parts = [envs.recv(int(rng.integers(1, len(sent) + 1)), timeout=0.02)] if sent else []
                except envhub.HubTimeout:
                    late += 1
                    continue
                for observations, rewards, *_, env_ids in parts:
                    for place, env in enumerate(env_ids.tolist()):
                        counts[env] += 1
                        assert (observations[place, 0], rewards[place]) == (counts[env], sent.pop(env))
            assert late > 5
            assert received(envs) == sent


def test_session_is_taken_over_while_a_client_sends_and_receives(envs: envhub.HubVectorEnv, hub: ServedHub) -> None:
    with envhub.connect(hub.tcp) as client:
        with stopped(envs.call("pid")[0]):
            envs.send([7], [0])
            times_out(envs)
            envs.send([9], [1])
            times_out(envs)
        with contextlib.closing(client.attach(envs.token, lane="wire")) as taken:
            envs.send([10], [2])
            with pytest.raises(envhub.SessionLost):
                envs.recv()
            assert taken.get_attr("count") == (1, 1, 0)
            taken.send([11, 12], [0, 2])
            assert received(taken) == {0: 11, 2: 12}
