"""The workers of one session, and the hub in the place of those that have ended.

A row's words and results are its worker's from the moment that one serves until it is reaped; then they are the hub's,
until the next one serves. Meanwhile the hub hears the worker's doorbell: a step that a client or the hub itself posts
is finished here, so that whoever waits sees a completed step, on either lane.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from envhub.arena.memory import OP_RESET, STATUS_RAISED, TURN_FIRST, TURN_ROW, Arena
from envhub.arena.spin import RING
from envhub.arena.stand_in import ENDED, FRESH, REPORT_PENDING, put_info, stay, truncate, with_objects
from envhub.protocol.messages import Failure, Make
from envhub_server.ipc import control
from envhub_server.loop.poller import Watch
from envhub_server.memory.loose_parts import LooseParts
from envhub_server.memory.session_memory import Memory
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import Handlers, WorkerProcess
from envhub_server.session.failure_text import Outcome
from envhub_server.session.hang_detector import Late, Watchdog

DUMP_S = 0.2  # for a worker to write where its threads are, before it is killed

CALLS = (control.CallRows, control.SetAttrRows)


@dataclass
class _Post:
    """What is known of one worker.

    Attributes:
        rows: its rows.
        watchdog: looks at it.
        process: it, unless it has ended.
        serves: whether its rows are its own.
        built: how many envs it has made; one more once it has said so.
        under_way: what it was told for the request under way, if that is not said by the words in the arena.
        late: the env for which it is to be killed, and when.
        outcome: what its rows are told, once it has ended.
        asked_s: since when rows wait for the one that is to take its place.
        heard: whether its doorbell is heard here.
        mapped: whether it has been given an arena.
        held: what it is to be told with its rows, once what is in them has moved.
        moving: whether it was given another arena and has not said yet that it works there.
    """

    rows: np.ndarray
    watchdog: Watchdog
    process: WorkerProcess | None = None
    serves: bool = False
    built: int = 0
    under_way: Any = None
    late: tuple[Late, float] | None = None
    outcome: Outcome | None = None
    asked_s: float | None = None
    heard: bool = False
    moving: bool = False
    mapped: bool = False
    held: control.Serve | None = None


class Crew:
    """The workers of one session.

    Attributes:
        loose: of observations, what has no fixed size; None where they have no such parts.
        told: whether a worker was told something of the request under way.
    """

    def __init__(
        self,
        make: Make,
        watch: Watch,
        supervisor: Supervisor,
        handlers: Callable[[int], Handlers],
        now_s: Callable[[], float],
        log: Callable[[], Any],
    ) -> None:
        """Of this session.

        Args:
            make: what it is made of.
            watch: where to listen.
            supervisor: starts the processes.
            handlers: of a worker's messages and its end; also of what is said here in its place.
            now_s: the hub's time.
            log: the session's, by the token it has at the time.
        """
        self._num_envs = make.num_envs
        self._faults = make.faults
        self._world = make.world
        self._log = log
        self._watch = watch
        self._supervisor = supervisor
        self._handlers = handlers
        self._now_s = now_s
        self._posts: list[_Post] = []
        self._memory: Memory | None = None
        self._next: Memory | None = None  # that the workers are moving to
        self.loose: LooseParts | None = None
        self._ring_driver: Callable[[], None] = lambda: None
        self.told = False

    # --- processes --------------------------------------------------------------------------------------------------

    @property
    def _arena(self) -> Arena | None:
        return None if self._memory is None else self._memory.arena

    def settle(self, workers: int) -> None:
        """Be of so many workers, with their rows; those that run go on, and are never more than that."""
        for number in range(workers):
            rows = np.arange(number, self._num_envs, workers)
            if number < len(self._posts):
                self._posts[number].rows = rows
            else:
                self._posts.append(_Post(rows, Watchdog(self._faults)))

    def start(self, numbers: Sequence[int]) -> None:
        """Ask for the processes of these workers.

        Raises:
            OSError: there are no descriptors or processes left; none was started.
        """
        environ = None if self._world is None else self._world.environ
        started = self._supervisor.start([self._handlers(number) for number in numbers], environ)
        for number, process in zip(numbers, started, strict=True):
            post = self._posts[number]
            post.process, post.built, post.late = process, 0, None
            post.mapped = post.moving = False
            post.watchdog.rest()

    @property
    def pids(self) -> list[int]:
        """The process ids of those that run."""
        return [process.pid for process in self.processes.values() if process.pid is not None]

    def hear(self) -> None:
        """Deal with all that they have said."""
        for process in list(self.processes.values()):
            while process.hear():
                pass

    def ring(self, *numbers: int) -> None:
        """Wake these workers, or all, and see to the rows of those that have ended: something was posted."""
        all_serve = True
        for number, post in enumerate(self._posts):
            if post.process is not None and (not numbers or number in numbers):
                post.process.ring()
            all_serve = all_serve and post.serves
        if not all_serve:
            self.posted(*numbers)

    @property
    def processes(self) -> dict[int, WorkerProcess]:
        """Those that run, by their worker's number."""
        return {number: post.process for number, post in enumerate(self._posts) if post.process is not None}

    def ended(self, number: int) -> Late | None:
        """The process has been reaped; the env for which it was killed, if it was."""
        post = self._posts[number]
        late, post.process, post.late = post.late, None, None
        post.moving, post.held = False, None
        return None if late is None else late[0]

    def tell(self, number: int, message: Any) -> None:
        """Send a message; to a worker that does not serve yet, once it does."""
        post = self._posts[number]
        if isinstance(message, control.BuildRest):
            post.built = 1
        if isinstance(message, (control.ResetRows, control.StepRows, *CALLS)):
            post.under_way, self.told = message, True
            if not post.serves:
                if isinstance(message, control.ResetRows) and not message.rows and self._arena is not None:
                    post.under_way = None
                    self._stay(self._outstanding(post))
                return
        if post.process is not None:
            post.process.tell(message)

    def on_message(self, number: int, message: Any) -> bool:
        """Note what a worker's message says of where it is; False where it answers what is no longer asked for."""
        post = self._posts[number]
        if not self._is_current(post, message):
            self._log().warning("answer_dropped", worker=number, message=type(message).__name__, of=message.number)
            return False
        if isinstance(message, control.Building):
            post.built = message.built
        elif isinstance(message, (control.Built, control.FirstBuilt)):
            post.built = len(post.rows) + 1
        elif isinstance(message, control.RowInfo) and self.loose is not None:
            self.loose.note_large(message.row, message.number, message.info)
        elif isinstance(message, control.Suspicious):
            self._log().warning("env_suspicious", env=message.row, why=message.what)
        elif isinstance(message, control.Faulted):
            self._log().warning("env_made_anew", env=message.row, why=message.message[:200])
        elif isinstance(message, (control.CallResults, control.CallFailed)):
            post.under_way = None
        return True

    def _is_current(self, post: _Post, message: Any) -> bool:
        """Whether an answer has the number of the call, or of the row's step or reset, that is under way."""
        match message:
            case control.CallResults() | control.CallFailed():
                return isinstance(post.under_way, CALLS) and post.under_way.number == message.number
            case control.RowInfo(row=row) | control.RowFailed(failure=Failure(env_index=row)):
                if self._arena is None or not post.serves:
                    return True  # it could not make its envs, or this is said here in its place
                return row in post.rows and int(self._arena.request[row]) == message.number
            case _:
                return True

    # --- the arena --------------------------------------------------------------------------------------------------

    def join(self, memory: Memory, loose: bool, ring_driver: Callable[[], None]) -> None:
        """Work in this memory, beside which observations have leaves if ``loose``; ``ring_driver`` wakes its driver."""
        self._memory, self._ring_driver = memory, ring_driver
        self.loose = LooseParts() if loose else None

    def map_arena(self, number: int, message: control.MapArena, done_bell: int) -> None:
        """Hand the arena to a worker; of one that has ended, somebody was or will be told."""
        self._posts[number].mapped = True
        process, memory = self._posts[number].process, self._next or self._memory
        if process is not None:
            assert memory is not None
            client_bell, *bells = memory.bells
            process.map_arena(message, memory.descriptor, bells[number], done_bell, client_bell)

    # --- moving to other memory -------------------------------------------------------------------------------------

    def move(self, memory: Memory, message: control.MapArena, done_bell: int) -> None:
        """Begin to leave the memory for another: from when a worker has mapped that, it serves the old no more."""
        self._next = memory
        for number, post in enumerate(self._posts):
            post.moving = post.mapped and post.process is not None
            if post.moving:
                self.map_arena(number, message, done_bell)

    @property
    def moving(self) -> bool:
        """Whether a worker may still serve the memory that is being left."""
        return any(post.moving for post in self._posts)

    def moved(self, number: int) -> bool:
        """Whether the worker's word that it has mapped an arena is of the one it was to move to."""
        post = self._posts[number]
        was_moving, post.moving = post.moving, False
        return was_moving

    def settle_in(self) -> None:
        """Work in the other memory, to which nobody has to move any more, from what stands in the old."""
        old, memory = self._memory, self._next
        assert old is not None and memory is not None
        memory.arena.move_from(old.arena)
        heard = [number for number, post in enumerate(self._posts) if post.heard]
        for number in heard:
            self._deaf(number)
        self._memory, self._next = memory, None
        for number in heard:
            self._hear(number)
        for number, post in enumerate(self._posts):
            held, post.held = post.held, None
            if held is not None:
                self.hand_over(number, held)
            elif post.serves and post.process is not None:
                post.process.tell(control.Serve(moved=True))

    def stay_in(self) -> None:
        """Move nowhere: the session has ended meanwhile."""
        self._next = None

    # --- whose rows they are ----------------------------------------------------------------------------------------

    def hand_over(self, number: int, message: control.Serve) -> None:
        """Give a worker its rows, and what it missed."""
        post = self._posts[number]
        if self._next is not None:
            post.held = message
            return
        post.serves, post.outcome, post.asked_s = True, None, None
        self._deaf(number)
        assert post.process is not None
        if self.loose is not None and self._arena is not None:
            objects = [self.loose.of(self._arena, row) for row in post.rows.tolist()]
            message = replace(message, objects=objects)
        post.process.tell(message)
        if post.under_way is not None:
            post.process.tell(post.under_way)

    def take_over(self, number: int, outcome: Outcome) -> None:
        """Finish the step of a worker that has ended, and listen in its place."""
        post, arena = self._posts[number], self._arena
        post.outcome = outcome
        if arena is None or not post.serves:
            return
        post.serves = False
        self._hear(number)
        outstanding = self._outstanding(post)
        resets, stays = outstanding[:0], outstanding[:0]
        if isinstance(post.under_way, control.ResetRows) and not outcome.raises:
            begun = outstanding[arena.op[outstanding] == OP_RESET]
            resets = np.intersect1d(begun, np.array(post.under_way.rows, np.int64))
            stays = np.setdiff1d(begun, resets)
        if not resets.size:
            post.under_way = None
        if self.loose is not None:  # what the others may have left is not complete
            self.loose.keep(arena, np.setdiff1d(post.rows, outstanding).tolist())
        idle = np.setdiff1d(post.rows, np.setdiff1d(outstanding, stays))
        steps = np.setdiff1d(outstanding, np.union1d(resets, stays))
        # Rows that had completed are told by their next step, unless the one error of this step says it of all.
        lost, owed = arena.needs_reset[idle], FRESH if outcome.raises and steps.size else REPORT_PENDING
        arena.needs_reset[idle] = np.where((lost == ENDED) | (lost == FRESH), FRESH, owed)
        arena.needs_reset[resets] = FRESH
        self._finish(post, steps)
        if not resets.size:
            self._stay(stays)
        # It may have ended after its last row was done and before it rang, so the driver looks whether all are done.
        self._ring_driver()

    def _hear(self, number: int) -> None:
        if self._memory is not None and not self._posts[number].heard:
            self._posts[number].heard = True
            # Never read here: its client could make that block. By edges each ring is heard once all the same.
            self._watch.watch_edges(self._memory.bells[1 + number], lambda: self.posted(number))

    def _deaf(self, number: int) -> None:
        if self._memory is not None and self._posts[number].heard:
            self._posts[number].heard = False
            self._watch.unwatch(self._memory.bells[1 + number])

    def posted(self, *numbers: int) -> None:
        """Rows may have been posted: answer in the place of those of these workers, or all, that do not serve."""
        for number in numbers or range(len(self._posts)):
            post = self._posts[number]
            if post.serves or post.outcome is None or self._arena is None:
                continue
            steps = self._steps(post)
            self._finish(post, steps[self._arena.needs_reset[steps] == REPORT_PENDING])
            if post.asked_s is None and self._steps(post).size:
                post.asked_s = self._now_s()

    def _outstanding(self, post: _Post) -> np.ndarray:
        assert self._arena is not None
        found: np.ndarray = post.rows[self._arena.request[post.rows] != self._arena.done[post.rows]]
        return found

    def _steps(self, post: _Post) -> np.ndarray:
        """The rows that wait for a step; those that wait for a reset get one from the next worker."""
        assert self._arena is not None
        rows = self._outstanding(post)
        found: np.ndarray = rows[self._arena.op[rows] != OP_RESET]
        return found

    def _finish(self, post: _Post, rows: np.ndarray) -> None:
        """Complete these rows in the place of their worker."""
        arena, outcome = self._arena, post.outcome
        assert arena is not None and outcome is not None
        for row in rows.tolist():
            if outcome.raises:
                self._leave(row)
                self._say(row, control.RowFailed(replace(outcome.failure, env_index=row), int(arena.request[row])))
                arena.needs_reset[row] = FRESH
                arena.status[row] = STATUS_RAISED
            else:
                truncate(arena, row, self._put_info(row, outcome.info))
        self._done(rows)

    def _done(self, rows: np.ndarray) -> None:
        """Tell the driver that these rows are done, whose results are stored."""
        assert self._arena is not None
        self._arena.done[rows] = self._arena.request[rows]
        if self.loose is not None:
            self.loose.keep(self._arena, rows.tolist())
        if rows.size:
            self._ring_driver()

    def _stay(self, rows: np.ndarray) -> None:
        """Let no reset wait for envs that it leaves out."""
        assert self._arena is not None
        for row in rows.tolist():
            self._leave(row)
        self._done(rows)

    def _say(self, row: int, message: Any) -> None:
        self._handlers(row % len(self._posts)).message(message)

    def _leave(self, row: int) -> None:
        assert self._arena is not None
        stay(self._arena, row, self._put_info(row, b""))

    def _put_info(self, row: int, info: bytes) -> int:
        """Store an info with the parts of no fixed size of the observation that the row repeats; returns the length."""
        arena = self._arena
        assert arena is not None
        if self.loose is not None:
            info = with_objects(self.loose.of(arena, row), info)
        if not put_info(arena, row, info):
            self._say(row, control.RowInfo(row, info, int(arena.request[row])))
        return len(info)

    def keep_loose(self) -> None:
        """Keep the parts of no fixed size of all rows that are done: nobody may have seen them."""
        if self.loose is not None and self._arena is not None:
            self.loose.keep(self._arena, range(self._num_envs))

    def rest(self) -> None:
        """No request is under way any more."""
        self.told = False
        for post in self._posts:
            post.under_way = None

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """Look after envs that are late, and after steps that have waited long enough."""
        for number, post in enumerate(self._posts):
            if post.late is not None:
                if post.process is not None and now_s >= post.late[1]:
                    post.process.kill()
                continue
            if post.asked_s is not None and now_s >= post.asked_s + self._faults.restart_wait_s:
                post.asked_s = None
                self._finish(post, self._steps(post))
            late = None if post.process is None else self._look(number, post, now_s)
            if late is not None:
                self._on_late(post, late, now_s)

    def _on_late(self, post: _Post, late: Late, now_s: float) -> None:
        tell = self._log().error if late.over else self._log().warning
        tell("env_late", env=late.row, at=late.kind, waited_s=round(late.waited_s, 1), limit_s=late.limit_s)
        if late.over and post.process is not None:
            post.process.dump()
            post.late = (late, now_s + DUMP_S)

    def _look(self, number: int, post: _Post, now_s: float) -> Late | None:
        if not post.serves:
            if post.built > len(post.rows) and not post.mapped:
                post.watchdog.rest()  # it waits for the others
                return None
            row = int(post.rows[min(post.built, len(post.rows) - 1)])
            return post.watchdog.look(now_s, "init", row, post.built + post.mapped)
        assert self._arena is not None
        if post.moving:
            return post.watchdog.look(now_s, "init", int(post.rows[0]), -1)
        outstanding = self._outstanding(post)
        calls = isinstance(post.under_way, CALLS)
        if not outstanding.size and not calls:
            post.watchdog.rest()
            return None
        turn = int(self._arena.turn[number])
        row = turn & TURN_ROW
        if calls:
            return post.watchdog.look(now_s, "call", row if row in post.rows else int(post.rows[0]), turn)
        # A first turn is also said of an env that is made anew, though nobody has asked for that.
        if row not in outstanding and not (turn & TURN_FIRST and row in post.rows):
            row = int(outstanding[0])  # it has not begun with the one it was asked for
        kind = "reset" if self._arena.op[row] == OP_RESET else "init" if turn & TURN_FIRST else "step"
        return post.watchdog.look(now_s, kind, row, turn)

    def close(self) -> None:
        """Let go of the memory."""
        for number in range(len(self._posts)):
            self._deaf(number)
        self._memory = None


def ring(bell: int) -> None:
    """Wake whoever waits for this eventfd, unless its owner has filled it up: the hub waits for nobody."""
    poller = select.poll()
    poller.register(bell, select.POLLOUT)
    if poller.poll(0):
        os.write(bell, RING)
