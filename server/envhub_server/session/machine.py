"""One session as a pure state machine: stimuli in, instructions out.

It knows no socket, process, memory or clock. ``hub.runtime`` carries out the instructions in their order and reports
what came of them as further stimuli, after the machine has returned: it is never re-entered. It makes every
decision about a session: which requests are executed, what a client learns of an ended process and when it is
replaced, which env hangs, how another client takes over, and when the session ends. It also decides who drives: the hub
or the client, which posts the rows' requests in the arena.

``SessionState`` keeps the phase and everything else that a session knows. The handlers decide about a stimulus;
``table.TABLE`` says which of them handles it in which phase, and which phases may follow.
"""

from __future__ import annotations

import math

from envhub_server.ipc import control
from envhub_server.processes.worker_events import WorkerSaid
from envhub_server.session.instructions import Instructions
from envhub_server.session.phases import OVER
from envhub_server.session.requests import refusal, stale
from envhub_server.session.state import SessionState
from envhub_server.session.stimuli import Requested, Stimulus
from envhub_server.session.table import TABLE

# Messages of a process that are handled also while it serves no slot; its other messages are ignored then.
_WITHOUT_SLOT = (control.Building, control.Built, control.Mapped, control.Closing)


class SessionMachine(SessionState):
    """The state of a session, and the dispatch of stimuli to their handlers."""

    def handle(self, stimulus: Stimulus, now_s: float) -> Instructions:
        """Return the instructions that follow from the stimulus.

        Raises:
            IllegalStimulus: it cannot come in this phase: a bug of the hub.
        """
        if isinstance(stimulus, WorkerSaid):
            self.history.append(type(stimulus.message))
            instructions = self._hear(stimulus, now_s)
        else:
            kind = type(stimulus.message if isinstance(stimulus, Requested) else stimulus)
            self.history.append(kind)
            try:
                handler = TABLE[kind][self.phase].handler
            except KeyError:
                raise IllegalStimulus(f"{kind.__name__} in phase {self.phase.value}") from None
            if isinstance(stimulus, Requested):
                self.requests.asked = True
                instructions = handler(self, stimulus.message, stimulus.quiescent, now_s)
            else:
                instructions = handler(self, stimulus, now_s)
        if self.deadlines.drain_by_s != math.inf:
            instructions = [*instructions, *self.drained(now_s)]
        return instructions

    def _hear(self, said: WorkerSaid, now_s: float) -> Instructions:
        """Handle a message of a process, unless it is stale or irrelevant."""
        process, kind = self.slots.process(said.process), type(said.message)
        if process is None:
            return []
        slot = self.slots.of(process)
        if slot is None and kind not in _WITHOUT_SLOT:
            return []
        if slot is not None and not said.current and slot.loss is None:
            return [stale(slot, said.message)]  # a message about an abandoned step
        if process.rebuild:
            return []  # the process is about to be killed, and its envs are made again
        if kind not in TABLE and self.phase not in OVER:
            return self.abandon(refusal(f"worker {process.place} sent a {kind.__name__}"), now_s)
        rule = TABLE.get(kind, {}).get(self.phase)
        if rule is None:
            return []  # sent before the process learned of this phase
        return rule.handler(self, process, said.message, now_s)


class IllegalStimulus(Exception):
    """A stimulus that cannot come in its session's phase."""
