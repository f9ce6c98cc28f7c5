"""Messages of processes about single rows: large infos, templates of infos, and failures."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from envhub.protocol.messages import Failure, Templates
from envhub.values.info_columns import EXAMPLE_BYTES_MAX, TEMPLATES_MAX
from envhub_server.ipc import control
from envhub_server.session.slots import Slot, SlotTable

KEPT_TEMPLATES_MAX = 2 * TEMPLATES_MAX  # of a slot: those of its process, and as many of former processes


class RowInfos:
    """Large infos, failures and templates, kept until the next request.

    Attributes:
        large: infos that were too large for the arena, by row.
        failures: failures of rows that the client drives, or has sent in partial batches, for COLLECT and RECEIVE.
    """

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self.large: dict[int, bytes] = {}
        self.failures: dict[int, Failure] = {}

    def forget(self) -> None:
        """Forget the infos and failures of the last request."""
        self.large.clear()
        self.failures.clear()

    def note(self, row: int, info: bytes) -> None:
        """Keep the info of a row."""
        self.large[row] = info
        self.failures.pop(row, None)

    def note_failure(self, failure: Failure, rows: Collection[int]) -> None:
        """Keep the failure of one of these rows."""
        if failure.env_index is not None and failure.env_index in rows:
            self.failures[failure.env_index] = failure
            self.large.pop(failure.env_index, None)

    def on_template(self, slot: Slot, template: control.InfoTemplate) -> None:
        """Keep the example of a template."""
        templates = slot.templates
        if len(template.example) <= EXAMPLE_BYTES_MAX:
            templates.pop(template.number, None)
            templates[template.number] = template.example  # last in the order of the dict
        if len(templates) > KEPT_TEMPLATES_MAX:
            del templates[next(iter(templates))]

    def collect(self, wanted: Collection[int]) -> tuple[tuple[int, bytes], ...] | Failure:
        """The first failure among these rows, else their infos.

        They are not removed, because a client that was interrupted asks again; a row's next info or failure
        replaces them.
        """
        rows = sorted(wanted)
        failures = [self.failures[row] for row in rows if row in self.failures]
        infos = tuple((row, self.large[row]) for row in rows if row in self.large)
        return failures[0] if failures else infos

    def templates(self, numbers: Sequence[int]) -> Templates:
        """The examples of these numbers, as far as they are kept."""
        examples = {
            number: slot.templates[number] for number in numbers for slot in self._slots if number in slot.templates
        }
        return Templates([*examples], [*examples.values()])
