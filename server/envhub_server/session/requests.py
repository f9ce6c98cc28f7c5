"""The pending request: its messages for the slots, its failure and its answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from envhub.arena.layout import split_share, whole_shares
from envhub.protocol.messages import Failure, Make, Receive, Reset, Send, SetAttr, Templates
from envhub.values.info_columns import EXAMPLE_BYTES_MAX, TEMPLATES_MAX
from envhub_server.ipc import control
from envhub_server.ipc.control import SetAttributes
from envhub_server.session.effects import Effects, RowBlobs
from envhub_server.session.slots import Slot, SlotTable

KEPT_TEMPLATES_MAX = 2 * TEMPLATES_MAX  # of a slot: those of its process, and as many of former processes


def refusal(text: str) -> Failure:
    return Failure("refused", "request", text)


Question = control.CallRows | control.SetAttrRows
Answer = control.CallResults | control.CallFailed
QUESTIONS = (control.CallRows, control.SetAttrRows)


class Requests:
    """The requests of one session, one at a time, and what the next process of a slot is told again."""

    def __init__(self, make: Make, is_vector: bool, slots: SlotTable, effects: Effects) -> None:
        self._make, self._is_vector, self._slots, self._effects = make, is_vector, slots, effects
        self.asked = True  # True if a request waits for its answer; the first request is MAKE
        self.failure: Failure | None = None  # the failure of the pending request, or of the session
        self.has_pending = False  # True if a slot has a ``pending`` message
        self.call_number = 0  # the number of the last call, which its answers repeat
        self.attributes = SetAttributes()  # the attributes that were set on the envs
        # The last seed of each env; at first those that the envs of a lost session have left to these.
        self.seeds: list[int | None] = make.seeds or [None] * make.num_envs

    def clear_pending(self) -> None:
        """Forget the pending messages, so that the next processes do not get them."""
        self.has_pending = False
        for slot in self._slots:
            slot.pending = None

    def note_failure(self, failure: Failure) -> None:
        """Note a failure of the request; the failure of the first env is reported."""
        if self.failure is None or (failure.env_index or 0) < (self.failure.env_index or 0):
            self.failure = failure

    def tell(self, slot: Slot, message: Any) -> None:
        """Send a slot its message of the request, now or once its next process serves."""
        slot.pending, self.has_pending = message, True
        if process := slot.serving:
            self._effects.tell(process.number, message)
        elif isinstance(message, control.ResetRows) and not message.rows:
            slot.pending = None
            self._effects.keep_rows(slot.index)

    def report_stale(self, slot: Slot, message: Any) -> None:
        fields = {"worker": slot.index, "message": type(message).__name__, "of": message.number}
        # Event: A worker answered a request that has ended; it is ignored.
        self._effects.warn("stale_answer_dropped", fields)

    def forbidden(self, name: str) -> Failure | None:
        """The refusal of a name that network clients may not use, such as ``__setstate__``, which may import."""
        if not name.startswith("_") or self._make.program_environment is not None:
            return None
        text = f"{name!r} begins with an underscore: only the program of a private hub (hub=None) may use such a name"
        return Failure("not_permitted", "request", text)

    # --- resets -------------------------------------------------------------------------------------------------------

    def reset_problem(self, reset: Reset) -> Failure | None:
        num_envs, each = self._make.num_envs, reset.options_each
        seeds, mask = reset.seeds or [None] * num_envs, reset.mask or [True] * num_envs
        if len(seeds) != num_envs or len(mask) != num_envs or not any(mask):
            return refusal(f"a reset needs {num_envs} seeds and a mask of {num_envs}, some True")
        if len(each) not in (0, num_envs):
            return refusal(f"a reset needs the options of {num_envs} envs, got {len(each)}")
        if each and self._is_vector:
            return refusal("a vector env takes options for all of its envs, and not for each")
        return None

    def tell_reset(self, reset: Reset) -> None:
        num_envs = self._make.num_envs
        seeds, mask = reset.seeds or [None] * num_envs, reset.mask or [True] * num_envs
        kept = zip(self.seeds, seeds, mask, strict=True)
        self.seeds = [seed if chosen and seed is not None else last for last, seed, chosen in kept]
        for slot in self._slots:
            rows = [row for row in slot.rows if mask[row]]
            options_each = [reset.options_each[row] for row in rows] if reset.options_each else []
            self.tell(slot, control.ResetRows(rows, [seeds[row] for row in rows], reset.options, options_each))

    # --- calls --------------------------------------------------------------------------------------------------------

    def rows_problem(self, rows: Sequence[int]) -> Failure | None:
        """The reason why these rows cannot be called; None if they can. An empty list means all rows."""
        if rows and (list(rows) != sorted(set(rows)) or rows[-1] >= self._make.num_envs):
            return refusal(f"the rows of a call must ascend, and be less than {self._make.num_envs}")
        return None

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
        self.call_number += 1
        for slot in self._slots:
            if rows := [row for row in slot.rows if row in chosen]:
                slot.waiting = True
                self.tell(slot, replace(question(rows), number=self.call_number))

    def on_answered(self, slot: Slot, answer: Answer) -> bool:
        """Note the answer of a slot to the call; False if it is stale."""
        asked = slot.pending
        if not isinstance(asked, QUESTIONS) or asked.number != answer.number:
            return False
        slot.pending, slot.waiting = None, False
        if isinstance(answer, control.CallFailed):
            self.note_failure(answer.failure)
        elif len(answer.values) != len(asked.rows):
            count = f"{len(answer.values)} envs in place of {len(asked.rows)}"
            self.note_failure(refusal(f"worker {slot.index} gave the results of {count}"))
        else:
            slot.results = tuple(zip(asked.rows, answer.values, strict=True))
        if isinstance(asked, control.SetAttrRows) and slot.results and not self.attributes.note(asked):
            # Event: The values of an attribute are too large to be set on new envs again.
            self._effects.warn("attribute_not_kept", {"name": asked.name[:200]})
        return True

    def on_call_lost(self, slot: Slot, failure: Failure) -> None:
        self.failure = self.failure or replace(failure, message=f"{failure.message} during a call")
        slot.waiting, slot.pending = False, None

    def call_result(self) -> RowBlobs | Failure:
        pairs = tuple(sorted(chain.from_iterable(slot.results for slot in self._slots)))
        for slot in self._slots:
            slot.results = ()
        return pairs if self.failure is None else self.failure


class RowInfos:
    """Large infos, failures and templates, kept until the next request."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self.large: dict[int, bytes] = {}  # infos that were too large for the arena, by row
        # Of rows that the client drives, or has sent in partial batches, for COLLECT and RECEIVE.
        self.failures: dict[int, Failure] = {}

    def forget(self) -> None:
        self.large.clear()
        self.failures.clear()

    def note(self, row: int, info: bytes) -> None:
        self.large[row] = info
        self.failures.pop(row, None)

    def note_failure(self, failure: Failure, rows: Collection[int]) -> None:
        """Keep the failure of one of these rows."""
        if failure.env_index is not None and failure.env_index in rows:
            self.failures[failure.env_index] = failure
            self.large.pop(failure.env_index, None)

    def on_template(self, slot: Slot, template: control.InfoTemplate) -> None:
        templates = slot.templates
        if len(template.example) <= EXAMPLE_BYTES_MAX:
            templates.pop(template.number, None)
            templates[template.number] = template.example  # last in the order of the dict
        if len(templates) > KEPT_TEMPLATES_MAX:
            del templates[next(iter(templates))]

    def collect(self, wanted: Collection[int]) -> RowBlobs | Failure:
        """The first failure among these rows, else their infos."""
        # They are not removed, because a client that was interrupted asks again; a row's next info or failure
        # replaces them.
        rows = sorted(wanted)
        failures = [self.failures[row] for row in rows if row in self.failures]
        infos = tuple((row, self.large[row]) for row in rows if row in self.large)
        return failures[0] if failures else infos

    def templates(self, numbers: Sequence[int]) -> Templates:
        examples = {
            number: slot.templates[number] for number in numbers for slot in self._slots if number in slot.templates
        }
        return Templates([*examples], [*examples.values()])


class PartialBatches:
    """The pending partial batches."""

    def __init__(self, make: Make, is_vector: bool, slots: SlotTable, infos: RowInfos, effects: Effects) -> None:
        self._make, self._is_vector, self._slots, self._infos, self._effects = make, is_vector, slots, infos, effects
        self.rows_out = 0  # how many rows were posted and not received
        self.receiving = 0  # how many rows RECEIVE waits for; 0 without a pending RECEIVE

    def problem(self, send: Send) -> Failure | None:
        shares = self._make.num_envs, len(self._slots)
        if self._is_vector and not whole_shares(send.rows, *shares):
            return refusal(split_share(*shares))
        return None

    def on_receive(self, receive: Receive) -> Failure | None:
        """Wait for the wanted number of rows, at most for all that are out; a failure if there are none."""
        if not self.rows_out:
            return refusal("no env is under way")
        self.receiving = max(1, min(receive.min_envs, self.rows_out))
        self._effects.take_part(self.receiving)
        return None

    def end_receive(self) -> None:
        """End the pending RECEIVE, if there is one; the next RECEIVE returns its rows."""
        if self.receiving:
            self.receiving = 0
            self._effects.leave_part()

    def on_raised(self, row: int) -> Failure:
        """The answer of RECEIVE for a row that raised."""
        self.rows_out -= 1
        number = self._make.row_offset + row
        unknown = Failure("internal", "session", f"env {number} failed, and no worker said why")
        return self._infos.failures.pop(row, unknown)

    def on_done(self, rows: Collection[int], small: RowBlobs, large: Iterable[int]) -> RowBlobs:
        """The infos of these done rows for RECEIVE: those in the arena, and those that came on the channel."""
        self.rows_out -= len(rows)
        sent = [(row, self._infos.large.pop(row)) for row in large if row in self._infos.large]
        return tuple(sorted([*small, *sent]))
