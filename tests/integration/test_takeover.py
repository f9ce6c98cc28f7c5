"""A session left by one process and taken over by another, and sessions that are looked at."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
from hubs import HERE, ServedHub, signalled_in_a_wait, stopped, wait_until

import envhub

LANES = ["auto", "wire"]
ZEROS = np.zeros(3, np.int64)


@pytest.fixture
def client(hub: ServedHub, request: pytest.FixtureRequest) -> envhub.Client:
    found = envhub.connect(hub.ipc)
    request.addfinalizer(found.close)
    return found


@pytest.mark.parametrize("after", LANES)
@pytest.mark.parametrize("before", LANES)
def test_session_that_was_left_goes_on_in_the_same_episode(client: envhub.Client, before: str, after: str) -> None:
    left = client.make_vec("faulty", 3, num_workers=2, lane=before, autoreset_mode="SameStep")
    first = left.reset(seed=1)[0]
    left.step(ZEROS)
    left.call_some([1], "pid")  # which is no step
    token = left.detach()
    assert left.closed
    with pytest.raises(envhub.SessionClosed):
        left.step(ZEROS)
    assert wait_until(lambda: bool(client.sessions()[-1]["leased"]))
    envs = client.attach(token, lane=after)
    try:
        assert envs.lane == ("shared" if after == "auto" else "wire")
        assert envs.token != token and envs.num_envs == 3 and envs.num_workers == 2
        assert envs.metadata["autoreset_mode"].value == "SameStep"
        seen = envs.observe()
        assert seen.observations[:, 0].tolist() == [1, 1, 1] and seen.steps.tolist() == [2, 2, 2] and seen.given.all()
        for count in (2, 3, 4):
            found = envs.step(ZEROS)
            assert found[0][:, 0].tolist() == [count] * 3 and found[0][:, 1:].tolist() == first[:, 1:].tolist()
            assert found[4]["steps"].tolist() == [count] * 3
        envs.send(np.array([0]), [1])
        assert envs.recv()[0][:, 0].tolist() == [5]
        assert envs.call("pid") == tuple(first[:, 2].astype(int))
        assert not client.sessions()[-1]["leased"]
    finally:
        envs.close()


@pytest.mark.parametrize("lane", LANES)
def test_interrupt_of_a_wait_for_the_session_leaves_it(client: envhub.Client, lane: str) -> None:
    held = client.make_vec("counter", 2, num_workers=1, lane=lane, restart_wait=600.0)
    held.reset()
    name = held.token[:8]
    with stopped(*held.call("pid")[:1]):
        held.step_async([0, 0])
        with pytest.raises(KeyboardInterrupt), signalled_in_a_wait(signal.SIGINT):
            client.attach(held.token)
        assert name in [each["session"] for each in client.sessions()]
    with pytest.raises(envhub.SessionLost):
        held.step_wait()  # which the shared lane still finishes
        held.step([0, 0])
    with closing(client.attach(name)) as envs:
        assert envs.step([0, 0])[0][:, 0].tolist() >= [2, 2]


@pytest.mark.parametrize("lane", LANES)
def test_old_holder_is_locked_out_and_its_step_is_finished(client: envhub.Client, lane: str) -> None:
    old = client.make_vec("naughty", 3, num_workers=3, lane=lane)
    old.reset()
    with stopped(*old.call("pid")):
        old.step_async(np.array([6, 0, 0]))  # sleeps
        assert lane == "auto" or wait_until(lambda: client.sessions()[-1]["phase"] == "moving")  # the hub has it
    envs = client.attach(old.token)
    assert envs.observe().observations[:, 0].tolist() == [1, 1, 1]
    if lane == "wire":
        assert old.step_wait()[0][:, 0].tolist() == [1, 1, 1]  # it was under way, so its reply is the old holder's
        with pytest.raises(envhub.SessionLost, match="taken over"):
            old.step(ZEROS)
    else:
        with pytest.raises(envhub.SessionLost, match="taken over"):
            old.step_wait()
            old.step(ZEROS)
    for attempt in (lambda: old.call("pid"), old.reset, old.observe):
        with pytest.raises(envhub.SessionLost):
            attempt()
    assert envs.step(ZEROS)[0][:, 0].tolist() == [2, 2, 2]
    old.close()  # which ends nothing of the new holder's
    assert envs.step(ZEROS)[0][:, 0].tolist() == [3, 3, 3]
    envs.close()


def test_holder_that_steps_without_pause_is_taken_over_all_the_same(client: envhub.Client) -> None:
    old = client.make_vec("counter", 3, num_workers=2)
    old.reset()
    stepped, ended = [0], []

    def step_on() -> None:
        try:
            while True:
                old.step(ZEROS)
                stepped[0] += 1
        except envhub.SessionLost as error:
            ended.append(error)

    trainer = threading.Thread(target=step_on)
    trainer.start()
    assert wait_until(lambda: stepped[0] > 100)
    envs = client.attach(old.token)
    trainer.join(60)
    assert len(ended) == 1
    # The last step may have ended when its holder had lost it; none came after it, and none was lost.
    shown = envs.observe().observations[:, 0]
    assert len(set(shown)) == 1 and shown[0] - stepped[0] in (0, 1)
    assert (envs.step(ZEROS)[0][:, 0] == shown + 1).all()
    old.close()
    envs.close()


@pytest.mark.parametrize("how", ["attach", "detach"])
def test_what_a_former_holder_still_writes_reaches_no_session(client: envhub.Client, how: str) -> None:
    old = client.make_vec("counter", 3, num_workers=2, copy=False)
    old.reset()
    view = old.step(ZEROS)[0]
    envs = client.attach(old.token if how == "attach" else old.detach())
    assert envs.lane == "shared" and view[:, 0].tolist() == [1, 1, 1]
    for count in (2, 3):
        view[:] = 77
        shown = envs.step(ZEROS)[0]
        view[:] = 77
        assert shown[:, 0].tolist() == envs.observe().observations[:, 0].tolist() == [count] * 3
    assert (view == 77).all()  # it stays the program's own
    old.close()
    envs.close()


HOLDER = """
import sys
import envhub
envs = envhub.make_vec("counter", 3, hub={hub!r}, restart_wait=0.5)
envs.reset()
print(envs.token, flush=True)
for _ in sys.stdin:
    print(envs.step([0, 0, 0])[0][:, 0].tolist(), flush=True)
envs.close()
"""


@pytest.mark.parametrize("how", ["attach", pytest.param("detach", marks=pytest.mark.long)])
def test_holder_lets_go_though_a_child_that_it_forked_lives_on(hub: ServedHub, client: envhub.Client, how: str) -> None:
    code = f"""
import os, sys, envhub
envs = envhub.make_vec("counter", 3, hub={hub.ipc!r}, restart_wait=60)
envs.reset()
envs.step([0, 0, 0])
if (child := os.fork()) == 0:
    sys.stdin.read()
    os._exit(0)
print(envs.token if {how == "attach"} else envs.detach(), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], text=True, **dict.fromkeys(("stdin", "stdout"), -1)) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        envs = client.attach(holder.stdout.readline().strip())
        assert envs.lane == "shared" and envs.step(ZEROS)[0][:, 0].tolist() == [2, 2, 2]
        envs.close()
        holder.stdin.close()


@pytest.mark.long
def test_holder_that_is_stopped_keeps_its_session(hub: ServedHub, client: envhub.Client) -> None:
    code = HOLDER.format(hub=hub.ipc)
    with subprocess.Popen([sys.executable, "-c", code], text=True, **dict.fromkeys(("stdin", "stdout"), -1)) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        token = holder.stdout.readline().strip()
        named = f"process {holder.pid} has this session"
        with stopped(holder.pid), pytest.raises(envhub.RequestRefused, match=named):
            client.attach(token)
        for count in (1, 2):
            print(file=holder.stdin, flush=True)
            assert holder.stdout.readline().strip() == str([float(count)] * 3)
        attached: list[envhub.HubVectorEnv] = []

        def attaches() -> bool:
            with contextlib.suppress(envhub.RequestRefused):  # on a busy machine the holder takes longer to let go
                attached.append(client.attach(token))
            return bool(attached)

        assert wait_until(attaches)
        assert attached[0].step(ZEROS)[0][:, 0].tolist() == [3, 3, 3]
        attached[0].close()
        holder.kill()


def test_client_that_ends_a_session_does_not_wait_for_its_holder(hub: ServedHub, client: envhub.Client) -> None:
    code = HOLDER.format(hub=hub.ipc)
    with subprocess.Popen([sys.executable, "-c", code], text=True, **dict.fromkeys(("stdin", "stdout"), -1)) as holder:
        assert holder.stdout is not None
        token = holder.stdout.readline().strip()
        with stopped(holder.pid):
            client.end(token)
            assert wait_until(lambda: not hub.workers())
        holder.kill()


def test_of_two_that_attach_at_once_the_last_has_it(client: envhub.Client) -> None:
    first = client.make_vec("counter", 3)
    first.reset()
    token = first.detach()
    second = client.attach(token)
    with pytest.raises(envhub.SessionLost, match="no such session to take over"):
        client.attach(token)
    third = client.attach(second.token)
    with pytest.raises(envhub.SessionLost):
        second.step(ZEROS)
    assert third.step(ZEROS)[0][:, 0].tolist() == [1, 1, 1]
    second.close()
    third.close()
    assert client.sessions() == []


@pytest.mark.filterwarnings("ignore:.*while waiting for a pending call")
def test_envs_that_die_around_a_takeover_are_truncated_and_made_anew(client: envhub.Client) -> None:
    old = client.make_vec("faulty", 3, num_workers=3)
    old.reset()
    old.step_async(np.array([1, 0, 0]))  # the first is killed
    envs = client.attach(old.token)
    shown = envs.observe().observations[:, 0].tolist()
    assert shown in ([0, 1, 1], [0, 0, 0])
    old.close()
    seen, _, _, truncations, _ = envs.step(ZEROS)
    assert seen[0, 0] == 0 and not truncations[1:].any()
    envs.step(np.array([0, 0, 1]))
    assert envs.step(ZEROS)[0][2, 0] == 0
    assert envs.step(ZEROS)[0][2, 0] == 1
    assert envs.lane == "shared"
    envs.close()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*while waiting for a pending call")
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("lane", LANES)
def test_takeovers_while_workers_are_recycled_lose_no_step(client: envhub.Client, lane: str, pending: bool) -> None:
    """Episodes of five steps; a worker has ended its four episodes after some 24 batches, and a holder after six."""
    length, takeovers = 5, 30
    envs = client.make_vec("leaky", 2, num_workers=2, recycle={"episodes": 4}, lane=lane)
    last, pids, taken_over = envs.reset(seed=1)[0][:, 0], set(), 0
    while taken_over < takeovers or len(pids) < 6:  # nobody says how soon the next worker is ready
        taken_over += 1
        for _ in range(6):
            observations, rewards, _, truncations, infos = envs.step(np.ones(2, np.int64))
            assert not truncations.any() and "env_failure" not in infos
            expected = np.where(last == length, 0, last + 1)
            assert observations[:, 0].tolist() == expected.tolist()
            assert rewards.tolist() == (expected > 0).tolist()
            last = expected
            pids |= {*observations[:, 1].astype(int).tolist()}
        if pending:
            envs.step_async(np.ones(2, np.int64))
        old, envs = envs, client.attach(envs.token, lane=lane)
        old.close()
        seen = envs.observe()
        assert seen.given.all()
        shown = seen.observations[:, 0]
        stepped = np.where(last == length, 0, last + 1)
        if pending and lane == "wire":  # its step was at the hub before the takeover, and is finished, or never began
            assert shown.tolist() in (stepped.tolist(), last.tolist())
        else:
            assert shown.tolist() == (stepped if pending else last).tolist()
        last = shown
    session = client.sessions()[-1]
    assert session["restarts"] == 0 and session["recycled"] >= 4
    envs.close()


def test_session_can_be_observed_while_it_is_stepped(client: envhub.Client) -> None:
    envs = client.make_vec("counter", 3, num_workers=2)
    envs.reset()
    done = threading.Event()

    def step_on() -> None:
        while not done.is_set():
            envs.step(ZEROS)

    trainer = threading.Thread(target=step_on)
    trainer.start()
    try:
        with client.attach(envs.token, observe=True) as observer:
            assert observer.num_envs == 3 and observer.single_observation_space == envs.single_observation_space
            last, looks = 0.0, 0
            while looks < 100 or last == 0:  # nobody says how soon the trainer gets to step
                looks += 1
                seen = observer.observe()
                counts = seen.observations[:, 0][seen.given]
                assert (counts == seen.steps[seen.given] - 1).all()  # a reset is one, too
                assert counts.size == 0 or counts.min() >= last
                last = counts.min() if counts.size else last
    finally:
        done.set()
        trainer.join()
    assert client.sessions()[-1]["lane"] == "shared"
    token = envs.token
    envs.close()
    with pytest.raises(envhub.SessionLost):
        client.attach(token, observe=True)


@pytest.mark.parametrize("token", ["", "xyz", "00" * 15, 7])
def test_what_is_no_token_is_refused_here(client: envhub.Client, token: str) -> None:
    with pytest.raises(ValueError, match="32 hexadecimal digits"):
        client.attach(token)


def test_token_of_nothing_and_options_of_the_envs_are_refused(client: envhub.Client) -> None:
    for observe in (False, True):
        with pytest.raises(envhub.SessionLost):
            client.attach("00" * 15 + "01", observe=observe)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="num_workers"):
        client.attach("00" * 16, num_workers=3)


def test_envs_of_a_private_hub_cannot_be_left() -> None:
    envs = envhub.make_vec("CartPole-v1", 1)
    with pytest.raises(envhub.RequestRefused, match="end with its program"):
        envs.detach()
    envs.reset()
    envs.close()


TRAINER = """
import os
import envhub
envs = envhub.make_vec("counter", 3, hub={hub!r}, lane={lane!r})
envs.reset()
for _ in range(5):
    envs.step([0, 0, 0])
print(envs.token, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("lane", LANES)
def test_trainer_that_is_killed_is_followed_by_another_process(hub: ServedHub, lane: str) -> None:
    code = TRAINER.format(hub=hub.ipc, lane=lane)
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=HERE, text=True, check=False)
    with envhub.connect(hub.tcp) as client:
        envs = client.attach(ended.stdout.strip())
        assert envs.lane == "wire" and envs.observe().observations[:, 0].tolist() == [5, 5, 5]
        assert envs.step(ZEROS)[0][:, 0].tolist() == [6, 6, 6]
        envs.close()
        assert wait_until(lambda: not hub.workers())
