"""Calls: sent to the slots of the called rows, whose results are gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from envhub.protocol.messages import Call, Failure, Make, SetAttr
from envhub_server.ipc import control
from envhub_server.session.effects import Effects
from envhub_server.session.env_history import EnvHistory
from envhub_server.session.requests import Requests, refusal
from envhub_server.session.slots import Slot, SlotTable

Question = control.CallRows | control.SetAttrRows
Answer = control.CallResults | control.CallFailed
QUESTIONS = (control.CallRows, control.SetAttrRows)


class Calls:
    """The pending call.

    Attributes:
        number: the number of the last call, which its answers repeat.
    """

    def __init__(self, make: Make, slots: SlotTable, requests: Requests, history: EnvHistory, effects: Effects) -> None:
        self._make, self._slots, self._requests, self._history = make, slots, requests, history
        self._effects = effects
        self.number = 0

    @property
    def complete(self) -> bool:
        """True if every slot of the call has answered or has lost its process."""
        return not any(slot.waiting for slot in self._slots)

    def rows_problem(self, rows: Sequence[int]) -> Failure | None:
        """The reason why these rows cannot be called; None if they can. An empty list means all rows."""
        if rows and (list(rows) != sorted(set(rows)) or rows[-1] >= self._make.num_envs):
            return refusal(f"the rows of a call must ascend, and be less than {self._make.num_envs}")
        return None

    def question(self, call: Call) -> Callable[[list[int]], Question]:
        """The question of a call to some rows."""
        wanted = control.CallRows(
            [], call.name, call.args, call.only_kind, call.skip_unreset, call.question, reset_first=call.reset_first
        )
        return lambda rows: replace(wanted, rows=rows)

    def assignment(self, message: SetAttr) -> Callable[[list[int]], Question] | Failure:
        """The order to set an attribute of these rows; a failure if the numbers of values and rows differ."""
        name, values, rows = message.name, message.values, message.rows or range(self._make.num_envs)
        if len(values) not in (1, len(rows)):
            return refusal(f"set_attr needs 1 or {len(rows)} values, got {len(values)}")
        if len(values) == 1:
            return lambda rows: control.SetAttrRows(rows, name, values[0])
        by_row = dict(zip(rows, values, strict=True))
        return lambda rows: control.SetAttrRows(rows, name, each=[by_row[row] for row in rows])

    def ask(self, wanted: Sequence[int], question: Callable[[list[int]], Question]) -> None:
        """Send the call to each slot that has wanted rows; an empty list means all rows."""
        chosen = set(wanted or range(self._make.num_envs))
        self.number += 1
        for slot in self._slots:
            if rows := [row for row in slot.rows if row in chosen]:
                slot.waiting = True
                self._requests.tell(slot, replace(question(rows), number=self.number))

    def on_answered(self, slot: Slot, answer: Answer) -> bool:
        """Note the answer of a slot; False if it is stale."""
        asked = slot.pending
        if not isinstance(asked, QUESTIONS) or asked.number != answer.number:
            return False
        slot.pending, slot.waiting = None, False
        if isinstance(answer, control.CallFailed):
            self._requests.note_failure(answer.failure)
        elif len(answer.values) != len(asked.rows):
            count = f"{len(answer.values)} envs in place of {len(asked.rows)}"
            self._requests.note_failure(refusal(f"worker {slot.index} gave the results of {count}"))
        else:
            slot.results = tuple(zip(asked.rows, answer.values, strict=True))
        if isinstance(asked, control.SetAttrRows) and slot.results and not self._history.note_attribute(asked):
            # Event: The values of an attribute are too large to be set on new envs again.
            self._effects.warn("attribute_not_kept", {"name": asked.name[:200]})
        return True

    def on_lost(self, slot: Slot, failure: Failure) -> None:
        """Give up the results of a slot whose process ended during the call."""
        during = replace(failure, message=f"{failure.message} during a call")
        self._requests.failure = self._requests.failure or during
        slot.waiting, slot.pending = False, None

    def result(self) -> tuple[tuple[int, bytes], ...] | Failure:
        """The results of the complete call by row, or its failure."""
        pairs = tuple(sorted(chain.from_iterable(slot.results for slot in self._slots)))
        for slot in self._slots:
            slot.results = ()
        return pairs if self._requests.failure is None else self._requests.failure
