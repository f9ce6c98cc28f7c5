"""The effects of a session as a list of its calls, and what it is told as values: made from the signatures.

``recorder.PostStep()`` is a call of ``effects.post_step()``, and ``events.Attached(quiescent=True)`` is one of
``session.on_attached(now_s, True)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, make_dataclass
from types import SimpleNamespace
from typing import Any

from envhub_server.session.effects import Effects
from envhub_server.session.machine import SessionMachine
from envhub_server.session.state import HANDLERS, TRANSITIONS


class Effect:
    """A call with its arguments; calls compare and match by these."""

    method: str


def _field(default: Any) -> Any:
    return field() if default is inspect.Parameter.empty else field(default_factory=lambda: default)


def _type_of(name: str, function: Callable[..., Any], first: int) -> type[Effect]:
    parameters = [*inspect.signature(function).parameters.values()][first:]
    fields = [(each.name, Any, _field(each.default)) for each in parameters]
    title = "".join(map(str.capitalize, name.split("_")))
    made = make_dataclass(title, fields, bases=(Effect,), frozen=True)
    made.method = function.__name__
    return made


EFFECTS = {name: _type_of(name, getattr(Effects, name), 1) for name in vars(Effects) if name[0] != "_"}
globals().update({kind.__name__: kind for kind in EFFECTS.values()})

_handled = {handler.__name__ for by_phase in HANDLERS.values() for handler in by_phase.values()}
_names = [name for name in TRANSITIONS if name not in _handled]
_events = [_type_of(name[3:], getattr(SessionMachine, name), 2) for name in (*_names, "on_request")]
events = SimpleNamespace(**{kind.__name__: kind for kind in _events})


class Recorder:
    """Effects that are kept in ``calls``, and shown to the ``listener`` as they happen."""

    def __init__(self) -> None:
        self.calls: list[Effect] = []
        self.listener: Callable[[Effect], None] = lambda call: None
        self.misfit = ""  # of the actions of each partial batch

    def __getattr__(self, name: str) -> Callable[..., str]:
        def called(*arguments: Any, **named: Any) -> str:
            self.calls.append(EFFECTS[name](*arguments, **named))
            self.listener(self.calls[-1])
            return self.misfit

        return called
