"""A vector env tells its observers of every step."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import sims
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.session.factories import make_of_factories
from envhub_client.session.options import SessionOptions
from envhub_client.session.session import Session

import envhub
from envhub.protocol.messages import Reset

NUM_ENVS = 3


def session(**options: Any) -> Session:
    """A session of a private hub."""
    make = make_of_factories([lambda: sims.Counter(4)] * NUM_ENVS)
    return Session("HubVectorEnv", None, make, SessionOptions(num_workers=1, **options))


class Watcher(envhub.StepObserver):
    """An observer that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.fails = False
        self.error: BaseException = OSError("no disk")

    def check_partial_batches(self) -> None:
        raise ValueError("no parts")

    def step_begun(self, actions: Any) -> None:
        self.told.append(("begun", list(actions)))

    def step_ended(self, envs: HubVectorEnv, result: Any) -> None:
        self.told.append(("ended", result[1].tolist(), envs.get_attr("count")))
        if self.fails:
            raise self.error

    def reset_ended(self, envs: HubVectorEnv, reset: Reset, observations: Any) -> None:
        self.told.append(("reset", reset.seeds, observations.shape))

    def broken_off(self, error: BaseException | None) -> None:
        self.told.append(("broken off", error))

    def close(self) -> None:
        self.told.append("closed")


@pytest.fixture
def watched() -> Iterator[tuple[HubVectorEnv, Watcher]]:
    watcher = Watcher()
    with contextlib.closing(HubVectorEnv(session())) as envs:
        envs.add_observer(watcher)
        yield envs, watcher


def test_observer_is_told_of_every_reset_and_step_in_order(watched: tuple[HubVectorEnv, Watcher]) -> None:
    envs, watcher = watched
    envs.reset(seed=5)
    envs.reset()
    envs.step([1, 2, 3])
    envs.drop_pending()  # nothing is
    envs.info_mode = "by_env"
    envs.step([3, 2, 1])
    envs.step_async([1, 1, 1])
    envs.drop_pending()
    envs.close()
    first, again, *steps, dropped, closed = watcher.told
    assert first[:2] == ("reset", [5, 6, 7]) and again[:2] == ("reset", [])
    assert steps == [
        ("begun", [1, 2, 3]),
        ("ended", [1, 2, 3], (1, 1, 1)),
        ("begun", [3, 2, 1]),
        ("ended", [3, 2, 1], (2, 2, 2)),
        ("begun", [1, 1, 1]),
    ]
    assert dropped == ("broken off", None) and closed == "closed"


def test_observer_is_told_of_what_broke_off_and_not_of_what_can_be_waited_for(
    watched: tuple[HubVectorEnv, Watcher],
) -> None:
    envs, watcher = watched
    envs.reset()
    with pytest.raises(envhub.NothingPending):
        envs.step_wait()
    with pytest.raises(envhub.SpaceMismatch):
        envs.step([1])
    with pytest.raises(ValueError, match="no parts"):
        envs.send([1, 2, 3])
    with pytest.raises(ValueError, match="no parts"):
        envs.async_reset()
    assert len(watcher.told) == 1
    watcher.fails = True
    with pytest.raises(OSError, match="no disk") as caught:
        envs.step([1, 2, 3])
    assert watcher.told[-1] == ("broken off", caught.value)
    watcher.fails = False
    assert envs.step([4, 5, 6])[1].tolist() == [4, 5, 6]
    assert operator.countOf([entry[0] for entry in watcher.told], "broken off") == 1


def test_interrupt_in_an_observer_leaves_the_result_to_be_waited_for(watched: tuple[HubVectorEnv, Watcher]) -> None:
    envs, watcher = watched
    later = Watcher()
    envs.add_observer(later)
    envs.reset()
    envs.step_async([1, 2, 3])
    watcher.fails, watcher.error = True, KeyboardInterrupt("Ctrl-C")
    with pytest.raises(KeyboardInterrupt):
        envs.step_wait()
    assert envs.step_wait()[1].tolist() == [1, 2, 3]
    assert watcher.told[-1][0] == "broken off" and [entry[0] for entry in later.told] == ["reset", "begun", "ended"]
    with pytest.raises(envhub.NothingPending):
        envs.step_wait()


def test_observer_is_added_and_removed_between_two_requests(watched: tuple[HubVectorEnv, Watcher]) -> None:
    envs, watcher = watched
    later = Watcher()
    envs.reset()
    envs.step_async([1, 2, 3])
    for change in (envs.add_observer, envs.remove_observer):
        with pytest.raises(envhub.SessionBusy):
            change(watcher)
    envs.step_wait()
    envs.add_observer(later)
    envs.step([1, 2, 3])
    envs.remove_observer(watcher)
    assert watcher.told[-1] == "closed" and watcher.told[-3:-1] == later.told
    with pytest.raises(ValueError, match="no observer of these envs"):
        envs.remove_observer(watcher)
    seen = len(watcher.told)
    envs.step([1, 2, 3])
    assert len(later.told) == 4 and len(watcher.told) == seen
    envs.close()
    with pytest.raises(envhub.SessionClosed):
        envs.add_observer(watcher)
