"""Partial batches: some envs step while others are under way."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faulty
import gymnasium as gym
import numpy as np
import psutil
import pytest
import sims
from envhub_client.private_hub.process import private_hub
from gymnasium.vector import SyncVectorEnv
from hubs import ServedHub, lives, stopped, wait_until

import envhub

Make = Callable[..., envhub.HubVectorEnv]


@pytest.fixture(params=["embedded", pytest.param("ipc", marks=pytest.mark.long), "tcp", "embedded by wire"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes vector envs on one lane of one hub."""
    where, _, by_wire = request.param.partition(" ")
    hub: ServedHub = request.getfixturevalue("hub")

    def made(name: str, factory: Any, num_envs: int, held_by: str = "", **kwargs: Any) -> envhub.HubVectorEnv:
        address = None if where == "embedded" else getattr(hub, where)
        lane = "wire" if by_wire else "auto"
        if held_by and address is None:
            factory = functools.partial(factory, held_by=held_by)
        elif held_by:
            kwargs["held_by"] = held_by
        envs = envhub.make_vec(name if address else factory, num_envs, hub=address, lane=lane, **kwargs)
        assert envs.lane == ("wire" if by_wire or where == "tcp" else "shared")
        return envs

    return made


def test_each_env_gets_what_it_gets_alone(make: Make) -> None:
    """Random parts of the batch, in any order: every env's own history is as in a ``SyncVectorEnv`` of one."""
    num_envs, rng = 6, np.random.default_rng(5)
    envs = make("CartPole-v1", "CartPole-v1", num_envs, num_workers=3)
    alone = [SyncVectorEnv([lambda: gym.make("CartPole-v1")]) for _ in range(num_envs)]
    envs.async_reset(seed=3)
    observations, rewards, terminations, truncations, _, env_ids = envs.recv()
    assert env_ids.tolist() == list(range(num_envs)) and not (rewards.any() or (terminations | truncations).any())
    for env, one in enumerate(alone):
        assert (one.reset(seed=3 + env)[0][0] == observations[env]).all()
    actions: dict[int, int] = {}
    free = set(range(num_envs))
    counts = np.zeros(num_envs, int)
    for _ in range(200):
        chosen = rng.permutation(sorted(free))[: rng.integers(1, len(free) + 1)]
        batch = rng.integers(0, 2, len(chosen))
        envs.send(batch, chosen)
        actions.update(zip(chosen.tolist(), batch.tolist(), strict=True))
        free -= set(chosen.tolist())
        observations, rewards, terminations, truncations, infos, env_ids = envs.recv(min_envs=int(rng.integers(1, 4)))
        assert infos == {} and observations.shape == (len(env_ids), 4)
        for place, env in enumerate(env_ids.tolist()):
            wanted = alone[env].step([actions.pop(env)])
            found = observations[place], rewards[place], terminations[place], truncations[place]
            assert all((left == right[0]).all() for left, right in zip(found, wanted[:4], strict=True))
            counts[env] += 1
        free |= set(env_ids.tolist())
    while actions:
        for env in envs.recv(min_envs=1)[-1].tolist():
            actions.pop(env)
    assert counts.min() > 15
    envs.step(np.zeros(num_envs, int))  # whole batches go on from there
    envs.close()


def test_slow_env_stalls_no_other_env(make: Make) -> None:
    envs = make("naughty", sims.Naughty, 4, num_workers=4)
    envs.reset()
    with stopped(envs.call("pid")[0]):
        envs.send([0, 0, 0, 0])
        with pytest.raises(envhub.HubTimeout):
            envs.recv(4, timeout=0.05)  # the next wait may want fewer
        for _ in range(10):
            env_ids = envs.recv(min_envs=1, timeout=20)[-1]
            assert 0 not in env_ids
            envs.send(np.zeros(len(env_ids), int), env_ids)
    late: list[int] = []
    while len(late) < 4:
        late += envs.recv(timeout=20)[-1].tolist()
    assert sorted(late) == [0, 1, 2, 3]
    with pytest.raises(envhub.NothingPending):
        envs.recv()
    envs.close()


def test_misuse_moves_no_env(make: Make) -> None:
    envs = make("naughty", sims.Naughty, 3)
    envs.reset()
    for wrong in ([0, 0], [3], [-1], [], [0.5], [[0]], "x"):
        with pytest.raises(ValueError):
            envs.send([0] * np.size(wrong), wrong)
    with pytest.raises(envhub.SpaceMismatch):
        envs.send([0, 0], [1])
    with stopped(*{*envs.call("pid")}):
        envs.send([6], [1])
        with pytest.raises(ValueError, match="under way"):
            envs.send([0, 0], [0, 1])
        with pytest.raises(ValueError, match="dtype"):
            envs.send(np.array([0], np.int8), [0])
        for call in (lambda: envs.step([0, 0, 0]), envs.reset, lambda: envs.get_attr("count")):
            with pytest.raises(envhub.SessionBusy, match="recv"):
                call()
        with pytest.raises(envhub.HubTimeout):
            envs.recv(timeout=0.01)
        with pytest.raises(ValueError, match="min_envs"):
            envs.recv(0)
        with pytest.raises(TypeError, match="integer"):
            envs.recv(min_envs=1.5)  # type: ignore[arg-type]
    observations, rewards, *_, env_ids = envs.recv(min_envs=np.int64(1))  # type: ignore[arg-type]
    assert env_ids.tolist() == [1] and rewards.tolist() == [6] and observations[0, 0] == 1
    assert envs.get_attr("count") == (0, 1, 0)
    envs.close()


def test_exception_of_one_env_is_raised_and_the_others_go_on(make: Make) -> None:
    envs = make("naughty", sims.Naughty, 3, num_workers=3)
    envs.reset()
    with stopped(envs.call("pid")[2]):
        envs.send([1, 6], [0, 2])
        with pytest.raises(ValueError, match="one is not allowed"):
            envs.recv(min_envs=1)
    assert envs.recv()[-1].tolist() == [2]
    envs.send([0], [0])
    assert envs.recv()[-1].tolist() == [0]
    envs.close()


@pytest.mark.long
@pytest.mark.parametrize("how", [{"lane": "wire"}, {}], ids=str)
def test_interrupted_send_costs_no_result_of_others_and_is_done_once_or_never(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(envhub.make_vec(sims.Counter, 3, **how)) as envs:
        envs.reset()
        envs.send([5, 6], [0, 1])

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        lane = envs._session.lane
        target = (lane._driver, "post_rows") if lane.name == "shared" else (lane.connection._transport, "send")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(*target, interrupt)
            envs.send([7], [2])
        _, rewards, *_, env_ids = envs.recv(timeout=20)
        received = dict(zip(env_ids.tolist(), rewards.tolist(), strict=True))
        assert received in ({0: 5, 1: 6}, {0: 5, 1: 6, 2: 7})
        assert envs.get_attr("count") == (1, 1, len(received) - 2)


@pytest.mark.parametrize("how", [{"lane": "wire"}, {}], ids=str)
def test_observations_of_a_reset_that_is_received_are_the_callers_own(how: dict[str, Any]) -> None:
    with contextlib.closing(envhub.make_vec(sims.Counter, 3, copy=False, **how)) as envs:
        envs.async_reset()
        kept = envs.recv()[0]
        for _ in range(3):
            envs.step([0, 0, 0])
        assert kept[:, 0].tolist() == [0, 0, 0]


def test_views_hold_where_parts_come_in_between() -> None:
    envs = envhub.AsyncVectorEnv([sims.Counter] * 3, copy=False)
    envs.reset()
    first = envs.step([0, 0, 0])[0]
    envs.send([0], [0])
    assert envs.recv()[0][:, 0].tolist() == [2]
    second = envs.step([0, 0, 0])[0]  # of the others, the next step after the first
    assert first[1:, 0].tolist() == [1, 1] and second[:, 0].tolist() == [3, 2, 2]
    for number in range(3, 9):
        assert envs.step([0, 0, 0])[0][:, 0].tolist() == [number + 1, number, number]
    assert envs.reset()[0][:, 0].tolist() == [0, 0, 0]
    assert envs.step([0, 0, 0])[0][:, 0].tolist() == [1, 1, 1]
    envs.close()


# --- envs that die, where that is an error ----------------------------------------------------------------------------


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Have this process stopped; it may end meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def received(envs: envhub.HubVectorEnv) -> dict[int, Any]:
    """What every env that is under way gives: the steps that it has observed, or of which of its rows its death is."""
    found: dict[int, list[Any]] = defaultdict(list)
    while True:
        try:
            seen, _, _, truncations, _, env_ids = envs.recv(timeout=60)
            assert not truncations.any()
            for env, steps in zip(env_ids.tolist(), seen[:, 0].tolist(), strict=True):
                found[env].append(steps)
        except envhub.NothingPending:
            return dict(found)
        except envhub.WorkerDied as error:
            assert error.env_index is not None and "worker 0 (envs 0, 2) was ended by SIGKILL" in str(error)
            found[error.env_index].append("died")


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    ["embedded", "tcp", *(pytest.param(lane, marks=pytest.mark.chaos) for lane in ("ipc", "embedded by wire"))],
    indirect=True,
)
@pytest.mark.parametrize("before", [0, faulty.END], ids=["in an episode", "between episodes"])
def test_env_that_is_sent_around_the_end_of_its_worker_raises_once_whenever_that_is(
    make: Make, hub: ServedHub, tmp_path: Path, before: int
) -> None:
    held_by = tmp_path / "held"
    how = {"num_workers": 2, "on_crash": "raise", "restarts_max": 100, "held_by": str(held_by)}
    with contextlib.closing(make("faulty", faulty.Faulty, 4, **how)) as envs:
        for sent in ("before the end", "before the hub knows", "before it is made again", "afterwards"):
            envs.reset()
            envs.step(np.full(4, before))
            first = 0 if before == faulty.END else 2  # of the steps that an env has made after its next one
            worker = psutil.Process(envs.call("pid")[0])
            held_by.touch()
            found = _death(envs, hub, worker, held_by, sent)
            assert found == {0: ["died"], 1: [first], 2: ["died"]}, sent
            held_by.unlink(missing_ok=True)
            envs.send([0, 0, 0, 0])
            assert received(envs) == {0: [0], 1: [first + 1], 2: [0], 3: [first]}, sent
            assert envs.step(np.zeros(4, int))[0][:, 0].tolist() == [1, first + 2, 1, first + 1]


def _death(
    envs: envhub.HubVectorEnv, hub: ServedHub, worker: psutil.Process, held_by: Path, sent: str
) -> dict[int, list[Any]]:
    """End the worker of envs 0 and 2 while 0 is under way; what these give, of which 2 is sent when this says, and 1.

    As long as there is the file ``held_by``, no other worker takes its place.
    """
    sending = threading.Thread(target=envs.send, args=([0], [2]))
    with held(worker.pid):
        envs.send([0, 0], [0, 1])
        if sent == "before the end":
            envs.send([0], [2])
        if sent == "before the hub knows":
            with held(private_hub().pid if envs.address is None else hub.process.pid):
                worker.kill()
                assert wait_until(lambda: not lives(worker))
                sending.start()
                if envs.lane == "shared":  # where nothing waits for the hub
                    sending.join()
            sending.join()
        else:
            worker.kill()
            assert wait_until(lambda: not worker.is_running())  # its hub has reaped it, and so knows
    found: dict[int, list[Any]] = {}
    if sent == "before it is made again":
        envs.send([0], [2])
    if sent == "afterwards":
        found = received(envs)
        held_by.unlink()
        assert envs.call("pid")[0] != worker.pid
        envs.send([0], [2])
    for env, results in received(envs).items():
        found[env] = [*found.get(env, []), *results]
    return found
