"""The building of a session's envs, from the start of its first processes until all have mapped the arena."""

from __future__ import annotations

from dataclasses import replace

from envhub.protocol import messages
from envhub.protocol.messages import Failure
from envhub.values import codec
from envhub.values.leaf import ANYTHING, OBJECT
from envhub_server.catalog.registry import EnvFacts
from envhub_server.ipc import control
from envhub_server.processes.worker_handle import WorkerExited
from envhub_server.session import failure_text
from envhub_server.session.launcher import Launcher
from envhub_server.session.sizing import SECOND_FAILED, WorkerSizing
from envhub_server.session.slots import Late, Overrun, Process, Slot, Stage


class EnvBuilding:
    """Makes the envs of one session. A method returns a ``Failure`` if they cannot be made."""

    def __init__(self, launcher: Launcher, sizing: WorkerSizing, info_bytes: int) -> None:
        self._make, self._recipe, self._slots = launcher.make, launcher.recipe, launcher.slots
        self._launcher, self._sizing, self._info_bytes = launcher, sizing, info_bytes
        self._effects = launcher.effects

    @property
    def description(self) -> messages.HeartbeatReply:
        """The number of envs that are made, without the phase."""
        processes = [slot.process for slot in self._slots if slot.process is not None]
        importing = next((process.importing for process in processes if process.importing), "")
        made = sum(process.built for process in processes)
        return messages.HeartbeatReply("running", "", made, self._make.num_envs, importing)

    def _wait_for_all(self) -> None:
        for slot in self._slots:
            slot.waiting = True

    # --- envs ---------------------------------------------------------------------------------------------------------

    def on_session_made(self, now_s: float) -> None:
        self._wait_for_all()
        count = len(self._slots)
        if self._launcher.rules.libraries is None:
            # The others start once the libraries that they can share are known.
            count = min(count, self._launcher.machine.cpus)
        self._launcher.start([*self._slots][:count], now_s)
        self._sizing.notify_if_crowded()

    def on_first_built(self, process: Process, built: control.FirstBuilt, now_s: float) -> None:
        """Decide on the number of workers, once the first env of each CPU is made, and have the other envs made."""
        if self._sizing.count is not None:
            return
        process.first, process.built, process.stage = built, 1, Stage.BUILT
        self._launcher.note_libraries(process, built.libraries)
        begun = [slot.process for slot in self._slots if slot.process is not None and slot.process.first is not None]
        if len(begun) < len(self._slots):
            return
        self._sizing.decide()
        self._wait_for_all()
        for each in begun:
            each.stage = Stage.BUILDING
        self._launcher.start_missing(now_s)
        for each in begun:
            self._effects.tell(each.number, self._launcher.order_rest(self._slots[each.place]))
        self._sizing.notify_if_crowded()

    def on_imported(self, process: Process, imported: control.Imported, now_s: float) -> None:
        """Start the other workers, once each of the first has loaded the code that makes its envs."""
        libraries, wanted = imported.libraries, set(self._launcher.rules.libraries or ())
        if process.shares and (libraries is None or not wanted <= set(libraries)):
            self._rebuild(process)  # the env or its program has changed since its libraries were recorded
            return
        process.imported = True
        self._launcher.note_libraries(process, libraries)
        if all(slot.process.imported for slot in self._slots if slot.process is not None):
            self._launcher.start_missing(now_s)

    def _rebuild(self, process: Process) -> None:
        """Rebuild the envs of a process in a new one that shares no libraries; later processes share none either."""
        process.rebuild = True
        self._launcher.share(())
        self._effects.kill(process.number)

    def _separate(self, slot: Slot, now_s: float, why: str = SECOND_FAILED) -> None:
        """Give each env its own process, since those of this slot cannot share one."""
        begun = [each.process for each in self._slots if each.process is not None]
        self._sizing.separate(why)
        self._wait_for_all()
        for process in begun:
            process.rebuild = True
        # Event: A second env could not be made in a process: each env gets its own.
        self._effects.warn("envs_separated", {"worker": slot.index, "why": why})
        for process in begun:
            self._effects.kill(process.number)
        self._launcher.start_missing(now_s)

    def on_built(self, process: Process, built: control.Built, now_s: float) -> Failure | None:
        slot = self._slots[process.place]
        fits = built.fit or self._launcher.rules.hosting.shares_process
        if self._sizing.separable(slot) and not fits:
            self._separate(slot, now_s, "not all of its envs are known to share one well")
            return None
        process.made, slot.waiting = built, False
        process.stage, process.built = Stage.BUILT, len(slot.rows)
        self._launcher.sharing_tried |= process.shares
        if not process.shares:
            self._launcher.note_libraries(process, built.libraries)
        return self._make_arena() if not self._slots.waiting else None

    def _make_arena(self) -> Failure | None:
        launcher, made = self._launcher, self._made
        launcher.share(launcher.rules.libraries or ())  # an empty list means that there are none to share
        first = made[0]
        action_space, action_leaves = first.action_space, first.action_leaves
        if any(each.action_structure != first.action_structure for each in made):
            action_space, action_leaves = codec.encode(ANYTHING), [OBJECT.wire()]
        launcher.arena = control.MapArena(
            self._make.num_envs,
            first.observation_leaves,
            action_leaves,
            self._info_bytes,
            first.observation_spaces[0],
            action_space,
            self._make.observation_mode,
            self._sizing.worker_spin_us,
        )
        try:
            layout = launcher.arena.layout()
        except ValueError as error:
            return Failure("limit", "hub", f"these envs have no place in shared memory: {error}")
        self._wait_for_all()
        self._effects.make_arena(layout, first.has_object_leaves, self._recipe.settings.vector)
        for process in [slot.process for slot in self._slots if slot.process is not None]:
            launcher.map(process)
        return None

    @property
    def _made(self) -> list[control.Built]:
        """Each process's description of its envs, in the order of the slots; all envs are made."""
        made = [slot.process.made for slot in self._slots if slot.process is not None]
        return [each for each in made if each is not None]

    # --- the arena ----------------------------------------------------------------------------------------------------

    def on_mapped(self, process: Process, now_s: float) -> messages.Made | None:
        """Note that a process has mapped the arena; return the description of the session once all have."""
        slot = self._slots[process.place]
        self._launcher.restarts.serves(slot.index, now_s)
        slot.waiting, process.stage = False, Stage.MAPPED
        return self._describe() if not self._slots.waiting else None

    def _describe(self) -> messages.Made:
        made, arena = self._made, self._launcher.arena
        first = made[0]
        assert arena is not None
        spaces = first.observation_spaces
        if self._make.observation_mode == "different":
            by_slot = [each.observation_spaces for each in made]
            spaces = [by_slot[row % len(made)][row // len(made)] for row in range(self._make.num_envs)]
        return messages.Made(
            num_envs=self._make.num_envs,
            num_workers=len(self._slots),
            observation_spaces=spaces,
            action_space=arena.action_space,
            metadata=first.metadata,
            render_mode=first.render_mode,
            spec=first.spec,
            sizing="" if self._sizing.count is None else self._sizing.count.reason,
            vector=self._recipe.settings.vector,
        )

    def serve(self, now_s: float) -> None:
        for slot in self._slots:
            process = slot.process
            assert process is not None
            process.stage, process.made, slot.serves_since_s = Stage.SERVING, None, now_s
            seeds = [self._make.seeds[row] for row in slot.rows] if self._make.seeds else []
            self._effects.hand_over(slot.index, process.number, control.Serve(seeds))
        rules, count = self._launcher.rules, self._sizing.count
        # Where no process had to make two envs, what an earlier session has found holds.
        alone = (count is not None and count.alone) or (rules.alone and len(self._slots) == self._make.num_envs)
        self._effects.learn(EnvFacts(rules.libraries, alone))

    # --- failures -----------------------------------------------------------------------------------------------------

    def on_failed(self, process: Process, failure: Failure, now_s: float) -> Failure | None:
        slot, building = self._slots[process.place], self._launcher.arena is None
        if process.shares and building:
            self._rebuild(process)
        elif building and self._sizing.separable(slot) and failure.env_index in slot.rows[1:]:
            self._separate(slot, now_s)
        else:
            return failure
        return None

    def on_exited(
        self, process: Process, exited: WorkerExited, why: Late | Overrun | None, now_s: float
    ) -> Failure | None:
        """Make the envs of an ended process in another way, if that may help."""
        slot, launcher, building = self._slots[process.place], self._launcher, self._launcher.arena is None
        unshared = process.shares and (why is None or not process.imported)
        if building and (process.rebuild or unshared):
            if process.shares:
                launcher.share(())
            slot.waiting = True
            launcher.start([slot], now_s)
            return None
        # SIGKILL comes from a person, or from the kernel without memory, and says nothing about the envs.
        by_itself = isinstance(why, Late) or (why is None and exited.cause.signal != "SIGKILL")
        if building and self._sizing.separable(slot) and process.built and by_itself:
            self._separate(slot, now_s)
            return None
        hides = launcher.rules.hide_folders
        if exited.cause.unready:
            return failure_text.unready(self._make, exited.cause.unready, hides)
        failure = failure_text.failure(self._make, slot.index, slot.rows, exited.cause, why, hides)
        text = failure.message if isinstance(why, Late) else f"{failure.message} while it built its envs"
        return replace(failure, message=text)
