"""One session as a pure state machine: it is told what has happened by its methods, and answers by effects.

It knows no socket, process, memory or clock. ``hub.runtime`` tells it, with the time, and carries out its ``effects``.
Effects only act or enqueue: what comes of one is told after the method that called it has returned, so the machine is
never re-entered. It makes every decision about a session: which requests are executed, what a client learns of an ended
process and when it is replaced, which env hangs, how another client takes over, and when the session ends. It also
decides who drives: the hub or the client, which posts the rows' requests in the arena.

``SessionState`` keeps the phase and everything else that a session knows. ``ClientEvents`` and ``ProcessEvents`` have
the methods by which it is told; their decorators say in which phase each is allowed, and which phases may follow.
"""

from __future__ import annotations

from typing import Any

from envhub_server.ipc import control
from envhub_server.processes.worker_handle import WorkerSaid
from envhub_server.session.client_events import ClientEvents
from envhub_server.session.phases import OVER
from envhub_server.session.process_events import ProcessEvents
from envhub_server.session.requests import refusal
from envhub_server.session.transitions import HANDLERS, IllegalEvent

# Messages of a process that are handled also while it serves no slot; its other messages are ignored then.
WITHOUT_SLOT = (control.Building, control.Built, control.Mapped, control.Closing)


class SessionMachine(ClientEvents, ProcessEvents):
    """The state of a session, and all that it can be told."""

    def on_request(self, now_s: float, message: Any, quiescent: bool) -> None:
        """Handle the client's next request.

        Raises:
            IllegalEvent: it cannot come in this phase: a bug of the hub.
        """
        handler = HANDLERS.get(type(message), {}).get(self.phase)
        if handler is None:
            raise IllegalEvent(f"{type(message).__name__} in phase {self.phase.value}")
        self.requests.asked = True
        handler(self, now_s, message, quiescent)

    def on_said(self, now_s: float, said: WorkerSaid) -> None:
        """Handle a message of a process, unless it is stale or irrelevant."""
        process, kind = self.slots.process(said.process), type(said.message)
        if process is None:
            return
        slot = self.slots.of(process)
        if slot is None and kind not in WITHOUT_SLOT:
            return
        if slot is not None and not said.current and slot.loss is None:
            self.requests.report_stale(slot, said.message)  # a message about an abandoned step
        elif process.rebuild:
            pass  # the process is about to be killed, and its envs are made again
        elif kind not in HANDLERS and self.phase not in OVER:
            self.abandon(refusal(f"worker {process.place} sent a {kind.__name__}"), now_s)
        elif handler := HANDLERS.get(kind, {}).get(self.phase):
            handler(self, now_s, process, said.message)
        # Without a handler, the process sent it before it learned of this phase.
