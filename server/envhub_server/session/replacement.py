"""The replacement of processes that have ended or leave their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from envhub.env_failure import EnvFailure, failure_info
from envhub.protocol.messages import Failure
from envhub_server.ipc import control
from envhub_server.ipc.replay_file import name_of_raised
from envhub_server.processes.worker_handle import WorkerExited
from envhub_server.session.launcher import Launcher
from envhub_server.session.requests import Requests
from envhub_server.session.slots import KilledFor, Ordered, Process, Slot, Stage, WorkerLoss
from envhub_server.session.supervision import (
    EnvClosing,
    env_failure_of,
    exhausted_failure,
    exit_failure,
    recycling_loss,
)

SPARE_RETRY_S = 1.0  # delay before an ended spare is replaced; it doubles with each consecutive end
SPARE_RETRY_MAX_S = 60.0
AGAIN_S = 1.0  # before the next process of a slot whose last one was ended by an order before it served


class Spares:
    """Processes that are built in advance, and serve a slot as soon as its process ends."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher, self._make, self._slots = launcher, launcher.make, launcher.slots
        self._restarts, self._deadlines = launcher.restarts, launcher.deadlines
        self.failed = 0  # spares in a row that could not make their envs

    @property
    def wanted(self) -> int:
        return self._launcher.rules.hosting.spares or 0

    @property
    def unused(self) -> int:
        """The number of spares that no process which leaves is to be replaced by."""
        spares = self._slots.spares.values()
        counted = sum(spare.stage is not Stage.LEAVING and not spare.is_restored for spare in spares)
        return counted - sum(map(_leaves, self._slots))

    def fill(self, now_s: float) -> None:
        if self._deadlines.waits_for_spares(now_s):
            return
        self._deadlines.spares_at_s = math.inf
        while self.unused < self.wanted:
            self._launcher.start([self._next_slot()], now_s, spare=True)

    def on_exited(self, now_s: float) -> None:
        retry_s = min(SPARE_RETRY_MAX_S, SPARE_RETRY_S * 2.0 ** min(self.failed, 64))
        self.failed += 1
        self._deadlines.spares_at_s = now_s + retry_s

    def _group(self, slot: Slot) -> tuple[int, int]:
        """The group of a slot; slots of a group have equal envs and the same device, and share spares."""
        if self._make.kwargs_each or (self._make.factories and not self._make.alike):
            return slot.index, 0
        envs = len(slot.rows) if self._launcher.recipe.settings.vector else 0  # a vector env has a fixed number of rows
        return slot.index % max(1, len(self._launcher.rules.hosting.gpus)), envs

    def _group_of(self, spare: Process) -> tuple[int, int]:
        return self._group(self._slots[spare.slot_index])

    def _next_slot(self) -> Slot:
        """The slot for which the next spare is made: first of the group with the fewest spares, then the most restarts.

        Within a group it is the first slot, because no slot of the group has more rows.
        """
        groups = [self._group_of(spare) for spare in self._slots.spares.values()]
        first: dict[tuple[int, int], Slot] = {self._group(slot): slot for slot in reversed(self._slots)}
        count = self._restarts.count
        return min(first.values(), key=lambda s: (groups.count(self._group(s)), -count(s.index), s.index))

    def candidates(self, slot: Slot) -> list[Process]:
        """The spares that can serve this slot at once."""
        group = self._group(slot)
        ready = [each for each in self._slots.spares.values() if each.stage is Stage.BUILT and not each.killed_for]
        return [each for each in ready if self._group_of(each) == group]

    def free_for(self, slot: Slot) -> bool:
        """True if a spare can serve this slot at once, besides those for slots whose processes leave."""
        group = self._group(slot)
        return len(self.candidates(slot)) > sum(_leaves(each) and self._group(each) == group for each in self._slots)


def _leaves(slot: Slot) -> bool:
    return slot.told_to_leave and slot.serving is not None


class Replacement:
    """Has another process serve a slot. A method returns a ``Failure`` if the session has broken.

    It also recycles processes that are old or large, or have run many episodes. A spare is made first. Then the process
    is told to leave its rows, and its slot gets the spare as if the process had ended. A process of one env leaves
    between two episodes. One of several envs, or with SAME_STEP, leaves at once, and its envs that are in an episode
    are truncated.
    """

    def __init__(self, launcher: Launcher, requests: Requests, closing: EnvClosing) -> None:
        self._make, self._slots, self._launcher = launcher.make, launcher.slots, launcher
        self._restarts, self._effects, self._requests = launcher.restarts, launcher.effects, requests
        self.spares, self._closing = Spares(launcher), closing

    # --- losses -------------------------------------------------------------------------------------------------------

    def on_lost(self, slot: Slot, exited: WorkerExited, why: KilledFor | None, now_s: float) -> Failure | None:
        """Have the hub take the rows of a slot whose process has ended, until its replacement serves."""
        rules, number = self._launcher.rules, exited.process
        failure = exit_failure(self._make, slot.index, slot.rows, exited.cause, why, rules.hide_folders)
        was_serving = slot.loss is None
        if slot.boot_failure is not None:
            failure = replace(failure, message=f"{failure.message}; before that: {slot.boot_failure.message}")
            slot.boot_failure = None
        if isinstance(why, Ordered):  # a planned end, as one for which the worker leaves: it costs no restart
            slot.recycled += 1
            slot.restart_at_s = now_s if was_serving else now_s + AGAIN_S
            info = failure_info(env_failure_of(failure, exited.cause, why, self._restarts.count(slot.index)))
            slot.loss = WorkerLoss(failure, False, info)
            self._effects.take_rows(slot.index, number, slot.loss)
            return None
        delay_s = self._restarts.ended(slot.index, now_s, exited.cause.started)
        count = self._restarts.count(slot.index)
        if was_serving and rules.replays:
            failure = replace(failure, replay=f"{rules.replays}-worker{slot.index}-{count}")
        env_failure = env_failure_of(failure, exited.cause, why, count - 1)
        if env_failure.replay:
            self._effects.keep_replay(slot.index, number, env_failure)
        if delay_s is None:
            return exhausted_failure(failure, self._restarts.count_text(slot.index))
        slot.restart_at_s = now_s + delay_s
        faults = self._make.faults
        policy = faults.on_timeout if failure.code == "env_timeout" else faults.on_crash
        slot.loss = WorkerLoss(failure, policy == "raise", failure_info(env_failure))
        self._effects.take_rows(slot.index, number, slot.loss)
        return None

    def on_faulted(self, slot: Slot, fault: control.Faulted, now_s: float) -> Failure | None:
        env_failure = EnvFailure.from_map(fault.failure)
        self.keep_replay_of(slot, fault.row, fault.number, fault.trace, env_failure)
        if self._restarts.faulted(slot.index, now_s):
            return None
        text = f"env {self._make.row_offset + fault.row} raised {fault.message}"
        failure = Failure("worker_died", "request", text, env_index=fault.row, worker=slot.index)
        return exhausted_failure(failure, self._restarts.count_text(slot.index))

    def keep_replay_of(self, slot: Slot, row: int | None, request: int, trace: bytes, failure: EnvFailure) -> str:
        """Order a replay of this row's env up to its exception in this request, if its worker sent a trace; its name.

        The name is empty if none is kept.
        """
        prefix = self._launcher.rules.replays
        if not (trace and prefix and row in slot.rows and slot.process is not None):
            return ""
        named = replace(failure, replay=name_of_raised(prefix, row or 0, request))
        self._effects.keep_replay(slot.index, slot.process.number, named, row, trace)
        return named.replay

    def finish_steps(self, now_s: float) -> None:
        for slot in self._slots:
            if now_s >= slot.finish_at_s:
                slot.finish_at_s = math.inf
                assert slot.loss is not None
                self._effects.finish_steps(slot.index, slot.loss)

    def order_restart(self, slot: Slot, text: str, now_s: float) -> None:
        """Have the slot's process ended, and started again at once; ``text`` says who wants so, and why."""
        process = slot.process
        if process is None:
            slot.restart_at_s = now_s
            return
        process.killed_for = Ordered(text)
        self._effects.kill(process.number)

    def to_restart(self, now_s: float) -> list[Slot]:
        """The slots whose next process is to be started now."""
        return [slot for slot in self._slots if now_s >= slot.restart_at_s]

    # --- the next process ---------------------------------------------------------------------------------------------

    def on_built(self, process: Process, now_s: float) -> None:
        """Hand the arena to a slot's process that has made its envs; a spare is kept, or serves a slot that waits."""
        slot = self._slots.of(process)
        if process.stage is not Stage.BUILDING:
            return
        process.stage, process.built = Stage.BUILT, len(self._slots[process.slot_index].rows)
        if slot is not None:
            self._launcher.map(process)
            return
        self.spares.failed = 0
        self.replace_lost(now_s)
        self.recycle(now_s)

    def on_mapped(self, process: Process, now_s: float) -> None:
        slot = self._slots.of(process)
        if process.stage is Stage.MAPPING and slot is not None:
            self._restarts.serves(slot.index, now_s)
            self.hand_over(slot, now_s)

    def hand_over(self, slot: Slot, now_s: float) -> None:
        """Have the slot's process serve; a restored one has its attributes, and the row nothing to report."""
        process, loss = slot.process, slot.loss
        assert process is not None
        process.stage = Stage.SERVING
        process.detector.rest()
        slot.loss, slot.boot_failure, slot.finish_at_s = None, None, math.inf
        slot.serves_since_s, slot.needs_recycling, slot.told_to_leave = now_s, False, False
        replaced = 0 if process.is_restored else self._restarts.count(slot.index) + slot.recycled
        failure, info = (loss.failure if loss.raises else None, loss.info) if loss is not None else (None, b"")
        for message in () if process.is_restored else self._requests.attributes.again(slot.rows):
            self._effects.tell(process.number, message)
        self._effects.hand_over(slot.index, process.number, control.Serve([], failure, info), replaced)

    def replace_lost(self, now_s: float) -> None:
        """Have spares serve the slots without a ready process; a process that still builds its envs becomes a spare."""
        for slot in self._slots:
            # After a crash by a snapshot, and not by a spare.
            is_restored = self._make.faults.on_crash == "restore" and slot.restart_at_s < math.inf
            if slot.loss is None or slot.stage not in (None, Stage.BUILDING) or is_restored:
                continue
            if not (candidates := self.spares.candidates(slot)):
                continue
            chosen = candidates[0]
            left = self._slots.assign(slot, chosen)
            # There is one spare too many if the spare was made to recycle a process.
            if left is not None and self.spares.unused > self.spares.wanted:
                left.stage = Stage.LEAVING
                self._effects.kill(left.number)
            self._effects.assign(slot.index, chosen.number)
            self._launcher.assign_slot(chosen)
            self._launcher.map(chosen)
        self.spares.fill(now_s)

    def on_handed_over(self, slot: Slot, now_s: float) -> None:
        """Have the hub take the rows of a slot whose process has left, until a spare serves; the process closes."""
        process = slot.process
        assert process is not None
        slot.recycled += 1
        slot.loss = recycling_loss(self._make, slot.index, slot.rows)
        self._effects.take_rows(slot.index, process.number, slot.loss, left=slot.told_to_leave)
        self._closing.ask(process, now_s)
        self._slots.vacate(slot, process)
        self.replace_lost(now_s)
        if slot.process is None:  # the spare has ended meanwhile
            self._launcher.start([slot], now_s)
        self.recycle(now_s)

    # --- recycling ----------------------------------------------------------------------------------------------------

    def next_age_s(self) -> float:
        age_s = self._launcher.rules.hosting.recycle.age_s or math.inf
        serving = (slot for slot in self._slots if slot.serving is not None and not slot.needs_recycling)
        return min((slot.serves_since_s + age_s for slot in serving), default=math.inf)

    def on_measured(self, memory: Mapping[int, int], now_s: float) -> None:
        recycle = self._launcher.rules.hosting.recycle
        for slot in self._slots:
            if slot.serving is None:
                continue
            nbytes = memory.get(slot.serving.number, 0)
            is_old = recycle.age_s and now_s >= slot.serves_since_s + recycle.age_s
            if is_old or (recycle.memory_bytes and nbytes > recycle.memory_bytes):
                slot.needs_recycling = True

    def recycle(self, now_s: float) -> None:
        """Have processes leave for which spares are ready, the oldest first, and have one more spare made."""
        # A slot waits while its last process still closes its envs, so that it never has more than two processes.
        if self._launcher.deadlines.waits_for_spares(now_s):
            return
        spares = self._slots.spares.values()
        closing = {spare.slot_index for spare in spares if spare.stage is Stage.LEAVING}
        old = [slot for slot in self._slots if slot.needs_recycling and slot.serving and slot.index not in closing]
        for slot in sorted(old, key=lambda each: each.serves_since_s):
            assert slot.process is not None
            if slot.told_to_leave:
                continue
            if self.spares.free_for(slot):
                slot.told_to_leave = True
                cut = self._launcher.make.autoreset_mode == "SameStep" or len(slot.rows) > 1
                self._launcher.effects.tell(slot.process.number, control.Leave(cut))
                self.spares.fill(now_s)
            elif not any(spare.stage is Stage.BUILDING for spare in spares):
                self._launcher.start([slot], now_s, spare=True)
