"""The start of processes, and the orders by which each learns its place, its envs and the arena."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from envhub.protocol.messages import Make
from envhub_server.catalog.registry import Recipe
from envhub_server.ipc import control
from envhub_server.ipc.packages import shared
from envhub_server.session.build_order import Place, WorkerRules, build, build_rest, variables
from envhub_server.session.deadlines import Deadlines
from envhub_server.session.effects import Effects
from envhub_server.session.restarts import Restarts
from envhub_server.session.slots import Process, Slot, SlotTable, Stage
from envhub_server.session.worker_count import Machine

SPARE_INCARNATION = 1 << 20  # more than a worker has restarts


class Launcher:
    """Starts the processes of a session.

    Attributes:
        effects: the session's.
        rules: the settings of all of its workers.
        decided: True if the number of workers is decided.
        arena: the order to map the arena; None until all envs are made.
        sharing_tried: True if a process that shares libraries has made its envs.
    """

    def __init__(
        self,
        make: Make,
        recipe: Recipe,
        rules: WorkerRules,
        machine: Machine,
        slots: SlotTable,
        deadlines: Deadlines,
        restarts: Restarts,
        effects: Effects,
        decided: bool,
    ) -> None:
        self._make, self._recipe, self._machine = make, recipe, machine
        self._slots, self._deadlines, self._restarts, self.effects = slots, deadlines, restarts, effects
        self._spares = 0  # that were started
        self.rules = rules
        self.decided = decided
        self.arena: control.MapArena | None = None
        self.sharing_tried = False

    def start(self, slots: Collection[Slot], now_s: float) -> None:
        """Start a process for each of these slots, which must have none."""
        if not slots:
            return
        self._deadlines.plan_sample(now_s)
        libraries = self._libraries
        started = [self._slots.begin(slot) for slot in slots]
        for process in started:
            process.shares = bool(libraries)
        self.effects.start_processes(tuple(process.number for process in started), libraries=libraries)
        for process in started:
            self.effects.tell(process.number, self.order(self._slots[process.place]))

    def start_missing(self, now_s: float) -> None:
        """Start a process for each slot that has none."""
        self.start([slot for slot in self._slots if slot.process is None], now_s)

    def start_spare(self, slot: Slot, now_s: float) -> None:
        """Start a spare whose envs are like those of this slot."""
        self._deadlines.plan_sample(now_s)
        process = self._slots.begin_spare(slot.index)
        self._spares += 1
        order = replace(self.order(slot), incarnation=SPARE_INCARNATION + self._spares)
        self.effects.start_processes((process.number,), True, self._libraries)
        self.effects.tell(process.number, order)

    def order(self, slot: Slot) -> control.Build:
        """The order to make the envs of this slot."""
        return build(self._make, self._recipe, self.rules, self._place(slot))

    def order_rest(self, slot: Slot) -> control.BuildRest:
        """The order to make the other envs of this slot, whose process has made the first."""
        return build_rest(self._make, self.rules, self._place(slot))

    def _place(self, slot: Slot) -> Place:
        cpu = self._machine.cpu(slot.index) if self._make.pin else None
        workers = len(self._slots) if self.decided else None
        incarnation = self._restarts.count(slot.index) + slot.recycled
        return Place(slot.index, workers, slot.rows, cpu, self._make.row_offset, incarnation)

    # --- a process in its place ---------------------------------------------------------------------------------------

    def tell_place(self, process: Process) -> None:
        """Tell a spare the slot that it serves now or will serve."""
        slot = self._slots[process.place]
        place = self._place(slot)
        order = control.TakePlace(slot.index, slot.rows, variables(self.rules, place), place.cpu)
        self.effects.tell(process.number, order)

    def map(self, process: Process) -> None:
        """Hand the arena to a process that has made its envs."""
        process.stage = Stage.MAPPING
        assert self.arena is not None
        self.effects.give_arena(process.number, process.place, self.arena)

    # --- libraries ----------------------------------------------------------------------------------------------------

    @property
    def _libraries(self) -> tuple[str, ...]:
        """The libraries that new processes share through their zygote.

        Once the session is made, these are the libraries that its other workers had imported to make their envs. With
        GPUs there are none: a library may read the variables at its import, and each worker's differ.
        """
        tried = self.arena is None or self.sharing_tried
        return self.rules.libraries or () if tried and not self.rules.hosting.gpus else ()

    def note_libraries(self, process: Process, libraries: Sequence[str] | None) -> None:
        """Have new processes also share the libraries that this one has imported; share none if they must not."""
        if libraries is None:
            self.share(())
        elif libraries and self.rules.libraries != () and not process.shares:
            self.share(shared([*(self.rules.libraries or ()), *libraries]))

    def share(self, libraries: Iterable[str]) -> None:
        """Have new processes share these libraries."""
        self.rules = replace(self.rules, libraries=tuple(libraries))
