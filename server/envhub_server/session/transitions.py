"""Decorators of a session's events: the phases in which each may come, and the phases that may follow.

``PHASES.md`` has the diagram that is made of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

from envhub_server.session.phases import Phase

Method = TypeVar("Method", bound=Callable[..., None])
Event = tuple[
    Callable[..., None], tuple[Any, ...]
]  # what a session is told: a method, and its arguments after the time

# By a method's name, the phases in which it may be called, each with the other phases that may follow. In a draining
# hub, CLOSING or ENDED may follow everything that leaves the session idle.
TRANSITIONS: dict[str, dict[Phase, tuple[Phase, ...]]] = {}
# By the type of a client's request or a process's message, the method that handles it in each phase.
HANDLERS: dict[type, dict[Phase, Callable[..., None]]] = {}


class IllegalEvent(Exception):
    """An event that cannot come in its session's phase: a bug of the hub."""


def allowed_in(*phases: Phase, then: tuple[Phase, ...] = ()) -> Callable[[Method], Method]:
    """Allow a method of a session in these phases, after which one of the phases ``then`` may follow.

    The method's arguments begin with the time. A draining hub's session may end after it.
    """

    def mark(method: Method) -> Method:
        name = method.__name__
        is_first, following = name not in TRANSITIONS, TRANSITIONS.setdefault(name, {})
        following.update(dict.fromkeys(phases, then))
        return _guarded(method, name, following) if is_first else method

    return mark


def _guarded(method: Method, name: str, following: dict[Phase, tuple[Phase, ...]]) -> Method:
    @functools.wraps(method)
    def guarded(session: Any, now_s: float, *facts: Any) -> None:
        session.history.append(name)
        if session.phase not in following:
            raise IllegalEvent(f"{name} in phase {session.phase.value}")
        method(session, now_s, *facts)
        if session.deadlines.drain_by_s != math.inf:
            session.drained(now_s)

    return cast("Method", guarded)


def handles(*kinds: type) -> Callable[[Method], Method]:
    """Have an allowed method handle messages of these types in its phases."""

    def mark(method: Method) -> Method:
        for kind in kinds:
            HANDLERS.setdefault(kind, {}).update(dict.fromkeys(TRANSITIONS[method.__name__], method))
        return method

    return mark


def diagram() -> str:
    """The transitions between two phases and the methods that may cause them, as a Mermaid state diagram."""
    edges: dict[tuple[str, str], list[str]] = {}
    for name, following in TRANSITIONS.items():
        for phase, others in following.items():
            for other in others:
                edges.setdefault((phase.name, other.name), []).append(name.removeprefix("on_"))
    lines = [
        f"    {before} --> {after}: {', '.join(sorted(names))}" for (before, after), names in sorted(edges.items())
    ]
    return "\n".join(["stateDiagram-v2", "    [*] --> BUILDING", *lines, "    ENDED --> [*]"])
