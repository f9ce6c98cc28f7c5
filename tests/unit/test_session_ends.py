"""The page of a session's ends, compared with its state machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import logged_events
import pytest
from envhub_server.ipc.control import CloseEnvs, RowFailed
from envhub_server.session.state import OVER, TRANSITIONS
from pages import section
from recorder import Effect, Fail, Kill, Tell, events
from sessions import Session, begun, every, ready

from envhub.protocol.hub import SHUTTING_DOWN
from envhub.protocol.messages import Close, Failure, Faults, Step

ROOT = Path(__file__).parents[2]
PAGE = section(ROOT / "envhub/docs/architecture.md", "How a session ends")
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line.startswith("| ")]
ENDS = {end: (told, envs, seen, event) for end, told, envs, seen, event in ROWS[1:]}
CLOSED = [Tell(0, CloseEnvs()), Tell(1, CloseEnvs())]
KILLED = [Kill(0), Kill(1)]
LOST = Failure("session_lost", "session", "why")


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def late(session: Session) -> list[Effect]:
    session.request(Close())
    return session.elapsed(session.make.faults.close_s)


def at_work(session: Session) -> Session:
    session.request(Step(b"\x04"))
    return session


def failed_making() -> list[Effect]:
    session = begun()
    return session.said(0, RowFailed(Failure("factory_failed", "env", "no", env_index=0)))


def broken() -> list[Effect]:
    session = at_work(ready(faults=Faults(restarts_max=0)))
    ended = session.exited(0)
    assert every(Fail, session.request(Step(b"\x04"))) == every(Fail, ended)  # as every later request
    return [*ended, *session.request(Close())]


def drained(session: Session, now_s: float = 0.0) -> list[Effect]:
    draining = events.Draining(by_s=10.0, end_by_s=20.0, quiescent=True)
    return session.handle(draining, now_s)


# By end: what it begins with, the orders to the processes, and the code of the failure that a client sees.
SHOWN: dict[str, tuple[Callable[[], list[Effect]], list[Effect], str]] = {
    "the client closes it": (lambda: ready().request(Close()), CLOSED, ""),
    "the client terminates it": (lambda: ready().request(Close(terminate=True)), KILLED, ""),
    "its envs do not close within `close_timeout`": (lambda: late(ready()), KILLED, ""),
    "its lease runs out": (lambda: ready().handle(events.LeaseExpired()), CLOSED, ""),
    "its envs cannot be made": (failed_making, KILLED, "factory_failed"),
    "a worker fails too often": (broken, [Tell(1, CloseEnvs())], "restarts_exhausted"),
    "a bug of the hub, or a damaged arena": (
        lambda: at_work(ready()).handle(events.Abandoned(Failure("internal", "session", "a bug"))),
        KILLED,
        "internal",
    ),
    "the hub drains": (lambda: drained(ready()), CLOSED, ""),
    "the hub stops at once": (lambda: at_work(ready()).handle(events.Abandoned(SHUTTING_DOWN)), KILLED, "draining"),
    "an administrator removes the client's key": (
        lambda: at_work(ready()).handle(events.Abandoned(LOST)),
        KILLED,
        "session_lost",
    ),
}


def test_every_end_is_shown_and_every_event_is_known() -> None:
    assert ENDS.keys() == SHOWN.keys()
    for *_, event in ENDS.values():
        assert event == "none" or {*names(event)} <= logged_events.events().keys()


def test_page_has_every_event_that_may_end_a_session() -> None:
    ending = {name for name, following in TRANSITIONS.items() if {*OVER} & {*chain.from_iterable(following.values())}}
    # The session is over already when its close timeout ends.
    assert {f"on_{name}" for told, *_ in ENDS.values() for name in names(told)} == ending | {"on_elapsed"}


@pytest.mark.parametrize("end", SHOWN)
def test_end_treats_its_envs_and_its_client_as_the_page_says(end: str) -> None:
    begin, orders, code = SHOWN[end]
    instructions = begin()
    assert [each for each in instructions if isinstance(each, (Tell, Kill))] == orders
    assert [each.failure.code for each in every(Fail, instructions)] == ([code] if code else [])
    _, envs, seen, _ = ENDS[end]
    kept = "kept, until the client closes" in envs
    assert kept or envs.startswith("killed" if isinstance(orders[0], Kill) else "closed")
    assert not code or f"`{code}`" in seen or code == "factory_failed"
