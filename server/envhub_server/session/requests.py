"""The pending request: why it is refused, and its failure; and what is kept for the next processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from envhub.arena.layout import are_whole_workers, whole_workers_text
from envhub.protocol.messages import Failure, Reset, Send, Templates
from envhub.values.info_columns import EXAMPLE_BYTES_MAX, TEMPLATES_MAX
from envhub_server.ipc import control
from envhub_server.ipc.control import SetAttributes
from envhub_server.session.effects import RowBlobs
from envhub_server.session.launcher import Launcher
from envhub_server.session.slots import Slot, SlotTable

WAITING_MAX = 2  # SENDs and RECEIVEs of a session, of which one is answered while the next one's rows step
KEPT_TEMPLATES_MAX = 2 * TEMPLATES_MAX  # of a slot: those of its process, and as many of former processes


def refusal(text: str) -> Failure:
    return Failure("refused", "request", text)


class Requests:
    """The requests of one session, one at a time, and what the next process of a slot is told again.

    SENDs and RECEIVEs may also wait for the results of rows of partial batches; they are answered in their order.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._make, self._slots, self._effects = launcher.make, launcher.slots, launcher.effects
        self._is_vector = launcher.recipe.settings.vector
        self.pending_reply = True  # True if a request waits for its answer; the first request is MAKE
        self.failure: Failure | None = None  # the failure of the pending request, or of the session
        self.attributes = SetAttributes()  # the attributes that were set on the envs
        self.rows_out = 0  # how many rows of partial batches were posted and not received
        self.waiting = 0  # how many requests wait for some of them
        self.min_envs = 0  # how many rows the next reply is to have, by the last of these requests

    def record_failure(self, failure: Failure) -> None:
        """Note a failure of the request; the failure of the first env is reported."""
        if self.failure is None or (failure.env_index or 0) < (self.failure.env_index or 0):
            self.failure = failure

    def forbidden(self, name: str) -> Failure | None:
        """The refusal of a name that network clients may not use, such as ``__setstate__``, which may import."""
        if not name.startswith("_") or self._make.program_environment is not None:
            return None
        text = f"{name!r} begins with an underscore: only the program of a private hub (hub=None) may use such a name"
        return Failure("not_permitted", "request", text)

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

    def rows_problem(self, rows: Sequence[int]) -> Failure | None:
        """The reason why these rows cannot be called; None if they can. An empty list means all rows."""
        if rows and (list(rows) != sorted(set(rows)) or rows[-1] >= self._make.num_envs):
            return refusal(f"the rows of a call must ascend, and be less than {self._make.num_envs}")
        return None

    def part_problem(self, send: Send) -> Failure | None:
        sizes = self._make.num_envs, len(self._slots)
        if self._is_vector and not are_whole_workers(send.rows, *sizes):
            return refusal(whole_workers_text(*sizes))
        return None

    def take_part(self) -> None:
        """Take the results for the oldest that waits, once there are as many as it wants, or of all rows."""
        if self.waiting:
            self._effects.take_part(min(self.min_envs, self.rows_out))

    def on_attribute_set(self, slot: Slot, message: control.SetAttrRows) -> None:
        """Keep the values for the next envs of these rows."""
        if set(message.rows) <= set(slot.rows) and not self.attributes.add(message):
            # Event: The values of an attribute are too large to be set on new envs again.
            self._effects.warn("attribute_not_kept", {"name": message.name[:200]})


class RowInfos:
    """Large infos, failures and templates, kept until the next request."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self.large: dict[int, bytes] = {}  # infos that were too large for the arena, by row
        self.numbers: dict[int, int] = {}  # those of their requests, of infos that workers have sent
        # Of rows that the client drives, or has sent in partial batches, for COLLECT and RECEIVE.
        self.failures: dict[int, Failure] = {}

    def forget(self) -> None:
        self.large.clear()
        self.numbers.clear()
        self.failures.clear()

    def add(self, row: int, info: bytes, number: int | None = None) -> None:
        self.take(row)
        self.failures.pop(row, None)
        self.large[row] = info
        if number is not None:
            self.numbers[row] = number

    def take(self, row: int) -> bytes | None:
        self.numbers.pop(row, None)
        return self.large.pop(row, None)

    def record_failure(self, failure: Failure, rows: Collection[int]) -> None:
        if failure.env_index is not None and failure.env_index in rows:
            self.failures[failure.env_index] = failure
            self.take(failure.env_index)

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
