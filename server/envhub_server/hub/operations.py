"""Actions of operators on sessions, their workers and the hub: who may carry them out, and one answer to each.

What acts on workers is no request of the session: its program's steps, and what they return, stay as they are.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from envhub.errors import brief, hide_folders_in, shortened
from envhub.protocol.hub import Incoming
from envhub.protocol.messages import Failure, HeartbeatReply, Op, Operate, Table
from envhub.protocol.prelude import Frame
from envhub_server.hub.biography import KILLED, TEXT_CHARS_MAX, Ending, in_one_line
from envhub_server.hub.directory import ClientUsage, Directory
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.hub.status import Row, SessionTable
from envhub_server.ipc import control
from envhub_server.log import log
from envhub_server.loop import Loop
from envhub_server.memory.session_memory import UnreadObservations
from envhub_server.network.connections import Holder
from envhub_server.processes.worker_handle import WorkerHandle
from envhub_server.session.machine import SessionMachine
from envhub_server.session.slots import Slot
from envhub_server.session.state import SERVING

ORDERS_MAX = 32  # of one client, whose copies are known
LOOKS = frozenset(["stack", "frame"])  # change nothing
AT_END = "drain_wait"  # a drain that is answered when the hub has ended
HUB_ACTIONS = frozenset(["drain", AT_END, "reload"])  # on the hub itself, for its own user and for administrators
STACKS_S = 2.0  # for workers to write their stacks on a busy machine
LOOK_S = 0.02  # between two looks at what they have written
DRAW_S = 5.0  # for an env to end its step and draw
LOOKS_MAX = 4  # stacks and frames of one session at the same time
NO_STACKS = f"it has written no stacks within {STACKS_S:g} s: it is stopped, waits for its disk, or has just begun"


class Order(NamedTuple):
    """An order of a client, which may act on the session."""

    request: Incoming
    message: Operate  # of the request
    holder: Holder
    runtime: SessionRuntime | None  # None for an action on the hub

    @property
    def why(self) -> str:
        return in_one_line(self.message.why)

    @property
    def session(self) -> SessionRuntime:
        assert self.runtime is not None
        return self.runtime


Answer = list[Row] | Failure
Action = Callable[[Order], Answer | None]  # None: ``Operations.answer`` is called later


class Operations:
    """The actions of one hub, by name; ``actions`` may be added to."""

    def __init__(
        self,
        directory: Directory,
        table: SessionTable,
        usage: ClientUsage,
        observations: UnreadObservations,
        loop: Loop,
        hides_folders: Callable[[Holder], bool],
    ) -> None:
        self._directory, self._protocol, self._access = directory, directory.protocol, directory.access
        self._table, self._usage, self._observations = table, usage, observations
        self._loop, self._hides_folders = loop, hides_folders
        self.actions: dict[str, Action] = {"end": self._end, "restart": self._restart}
        self.actions |= {"stack": self._stack, "frame": self._frame}
        self._orders: dict[tuple[str, bytes], tuple[Incoming, Answer | None]] = {}  # the last ones, and their answers
        self._ending: dict[int, list[Order]] = {}  # by the number of a session, those that wait for its end
        self._looks = Counter[int]()  # by the number of a session, the stacks and frames that are not there yet
        self._numbers = itertools.count(1)
        self._drawing: dict[int, Order] = {}  # whose frame is not there yet, by a number

    # --- orders -------------------------------------------------------------------------------------------------------

    def handle(self, request: Incoming, holder: Holder) -> None:
        """Carry an order out, unless it is a copy; its client sends it again each second until it is answered."""
        key = holder.name, request.message.id
        if key in self._orders:
            _, answer = self._orders[key]
            self._orders[key] = request, answer
            self._send(request, answer)
            return
        order = self._admit(request, holder)
        if isinstance(order, Failure):  # and so are its copies
            self._send(request, order)
            return
        own = [each for each in self._orders if each[0] == holder.name]
        if len(own) >= ORDERS_MAX:
            del self._orders[own[0]]
        self._orders[key] = request, None
        if (answer := self.actions[request.message.action](order)) is not None:
            self.answer(order, answer)

    def answer(self, order: Order, answer: Answer, frames: Sequence[Frame] = ()) -> None:
        """Answer an order, also after its action has returned None; ``frames`` come with an answer that is not kept."""
        key = order.holder.name, order.message.id
        last, _ = self._orders.get(key, (order.request, None))  # its client may have connected again
        self._orders[key] = last, answer
        if order.message.action in LOOKS:  # which may be large, and may be done again
            del self._orders[key]
        self._send(last, answer, frames)

    def _send(self, request: Incoming, answer: Answer | None, frames: Sequence[Frame] = ()) -> None:
        if isinstance(answer, Failure):
            self._protocol.fail(request, answer)
        elif answer is not None:
            self._protocol.answer(request, Table(answer), frames)
        else:  # so that its client knows that it was not lost
            self._protocol.answer(request._replace(op=Op.HEARTBEAT), HeartbeatReply("running"))

    # --- rights -------------------------------------------------------------------------------------------------------

    def _admit(self, request: Incoming, holder: Holder) -> Order | Failure:
        """The order, if there is such an action and this client may do it; else why not. The only check of rights."""
        message: Operate = request.message
        runtime, refusal = None, None
        if message.action not in self.actions:
            text = f"this hub knows no action {brief(message.action)}; it has {', '.join(sorted(self.actions))}"
            refusal = Failure("refused", "request", text)
        elif not holder.may(Op.OPERATE):
            refusal = Failure("not_permitted", "hub", "this key lets its client observe, not use, the hub")
        elif message.action in HUB_ACTIONS and not holder.administers:
            text = f"{message.action} takes the hub's own user, by ipc, or a key with the right admin"
            refusal = Failure("not_permitted", "hub", text)
        elif message.action not in HUB_ACTIONS:
            runtime = self._directory.operated(message.session, holder)
            refusal = self._missing(message, holder) if runtime is None else None
        if refusal is None:
            return Order(request, message, holder, runtime)
        who, op = self._access.who(holder, request.peer), message.action if message.action in self.actions else ""
        fields = {"op": op, "session": message.session[:8], "why": refusal.message}
        log.warning("request_refused", **who, **fields, audit=True)
        return refusal

    def _missing(self, message: Operate, holder: Holder) -> Failure:
        """The refusal of a session that is not there for this client, which learns nothing of others' sessions."""
        name = message.session[:8]
        text = f"this hub has no session {brief(name)} of yours; sessions() shows those that it has"
        for row in self._table.ended_rows(holder, name):
            text = f"session {name} has ended {row['ended_s']:.0f} s ago, by {row['by']}: {row['why']}"
        return Failure("session_lost", "session", text)

    # --- actions ------------------------------------------------------------------------------------------------------

    def _end(self, order: Order) -> None:
        """End a session at once, whatever it is at; it is answered when the session has ended."""
        runtime = order.session
        self._ending.setdefault(runtime.number, []).append(order)
        runtime.abandon(Ending(order.holder.actor, order.why or "no reason was given", KILLED))

    def ended(self, runtime: SessionRuntime, row: Row) -> None:
        """Answer those who have ended this session, and those who wait for a frame of it."""
        for order in self._ending.pop(runtime.number, ()):
            self.answer(order, [row])
        for number in [number for number, order in self._drawing.items() if order.session is runtime]:
            self._end_look(self._drawing.pop(number), runtime.ended.failure(runtime.name))

    def hub_ended(self, row: Row) -> None:
        """Answer those who wait for the end of the hub."""
        for request, answer in self._orders.values():
            if answer is None and request.message.action == AT_END:
                self._send(request, [row])

    # --- workers ------------------------------------------------------------------------------------------------------

    def _begin_look(self, order: Order) -> Failure | None:
        number = order.session.number
        if self._looks[number] >= LOOKS_MAX:
            return Failure("limit", "hub", f"{LOOKS_MAX} stacks and frames of this session are on their way")
        self._looks[number] += 1
        return None

    def _end_look(self, order: Order, answer: Answer, frames: Sequence[np.ndarray] = ()) -> None:
        self._looks[order.session.number] -= 1
        self._looks += Counter()  # without those that are 0
        self.answer(order, hide_folders_in(answer) if self._hides_folders(order.holder) else answer, frames)

    def _stack(self, order: Order) -> Answer | None:
        if problem := _no_env(order, -1):
            return problem
        runtime, env = order.session, order.message.env
        slots = runtime.state.slots if env < 0 else [runtime.state.slots.of_row(env)]
        workers = [(row, worker) for row, worker in (_worker_of(runtime, slot) for slot in slots) if worker is not None]
        if not workers:
            return _refused(f"session {runtime.name} has no worker there now; it is being started")
        if problem := self._begin_look(order):
            return problem
        for _, worker in workers:
            worker.write_stacks()
        self._read_stacks(order, workers, self._loop.clock.now_s() + STACKS_S, [])
        return None

    def _read_stacks(
        self, order: Order, workers: Sequence[tuple[Row, WorkerHandle]], until_s: float, last: Sequence[str]
    ) -> None:
        """Answer once all have written, and no more has come since the last look."""
        texts, now_s = [worker.stacks for _, worker in workers], self._loop.clock.now_s()
        if now_s < until_s and (texts != last or not all(texts)):
            self._loop.schedule.set(partial(self._read_stacks, order, workers, until_s, texts), now_s + LOOK_S)
            return
        rows = [{**row, "stacks": text} for (row, _), text in zip(workers, texts, strict=True)]
        self._end_look(order, [{**row, "problem": "" if row["stacks"] else NO_STACKS} for row in rows])

    def _restart(self, order: Order) -> Answer:
        runtime, row = order.session, order.message.env
        if problem := _no_env(order) or _not_serving(runtime):
            return problem
        if why := self._usage.count("restarts", order.holder, self._loop.clock.now_s()):
            return Failure("limit", "hub", why)
        worker, _ = _worker_of(runtime, runtime.state.slots.of_row(row))
        text = f"was restarted by {order.holder.actor}: {order.why or 'no reason was given'}"
        runtime.report(SessionMachine.on_restart_ordered, row, text)
        return [{"session": runtime.name, **worker}]

    # --- frames -------------------------------------------------------------------------------------------------------

    def _frame(self, order: Order) -> Answer | None:
        """Have the worker draw the env between two steps; of an env that draws no frames show the observation."""
        runtime, row = order.session, order.message.env
        if problem := _no_env(order) or _not_serving(runtime):
            return problem
        state = runtime.state
        worker = runtime.serving.get(state.slots.of_row(row).index)
        draws = state.made is not None and state.made.render_mode == "rgb_array"
        if draws and worker is None:
            return _refused(f"env {row} has no worker now; it is made again")
        if problem := self._begin_look(order):
            return problem
        if not draws or worker is None:
            self._answer_frame(order, _observed(order), "observation")
            return None
        number = next(self._numbers)
        self._drawing[number] = order
        runtime.on_drawn = self._on_drawn
        worker.send(control.Draw(number, row, time.monotonic() + DRAW_S))
        self._loop.schedule.set(partial(self._give_up, number), self._loop.clock.now_s() + DRAW_S)
        return None

    def _answer_frame(self, order: Order, frame: np.ndarray | Failure, source: str) -> None:
        client: object = order.request.peer if order.holder.quotas is None else order.holder.name
        if not isinstance(frame, Failure) and (why := self._observations.refusal(client, frame.nbytes)):
            frame = Failure("limit", "hub", why)
        if isinstance(frame, Failure):
            self._end_look(order, frame)
            return
        self._observations.add(client, [frame])
        env = {"session": order.session.name, "env": order.message.env}
        self._end_look(order, [{**env, "source": source, "shape": [*frame.shape]}], [frame])

    def _on_drawn(self, runtime: SessionRuntime, drawn: control.Drawn) -> None:
        order = self._drawing.get(drawn.number)
        if order is None or order.session is not runtime:
            return  # it came too late, or an env has sent it
        del self._drawing[drawn.number]
        if drawn.problem or len(drawn.shape) != 3 or math.prod(drawn.shape) != len(drawn.pixels):
            why = shortened(drawn.problem, TEXT_CHARS_MAX) or "its worker sent none"
            self._answer_frame(order, _refused(f"env {order.message.env} drew no frame: {why}"), "render")
        else:
            self._answer_frame(order, np.frombuffer(drawn.pixels, np.uint8).reshape(drawn.shape), "render")

    def _give_up(self, number: int) -> None:
        if (order := self._drawing.pop(number, None)) is None:
            return  # it was drawn, or its session has ended
        runtime, row = order.session, order.message.env
        assert runtime.memory is not None
        slot = runtime.state.slots.of_row(row)
        at, work_s = runtime.memory.progress(slot.index), runtime.memory.at_work_ns(slot.index) / 1e9
        text = f"env {at.row} is in its {at.verb} since {work_s:.0f} s" if at.kind else "its worker does not answer"
        self._answer_frame(order, _refused(f"env {row} is busy: {text}; `envhub stack` shows where"), "render")


def _worker_of(runtime: SessionRuntime, slot: Slot) -> tuple[Row, WorkerHandle | None]:
    """The worker of a slot as an operator reads of it, and as the hub has it if it has a process."""
    worker = None if slot.process is None else runtime.workers.get(slot.process.number)
    return {"worker": slot.index, "pid": worker and worker.pid, "envs": slot.rows}, worker


def _refused(text: str) -> Failure:
    return Failure("refused", "request", text)


def _no_env(order: Order, least: int = 0) -> Failure | None:
    num_envs = order.session.state.make.num_envs
    if least <= order.message.env < num_envs:
        return None
    return _refused(f"session {order.session.name} has envs 0 to {num_envs - 1}, and no env {order.message.env}")


def _not_serving(runtime: SessionRuntime) -> Failure | None:
    phase = runtime.state.phase
    return None if phase in SERVING else _refused(f"session {runtime.name} does not serve now: it is {phase.value}")


# --- observations as images -------------------------------------------------------------------------------------------


def _observed(order: Order) -> np.ndarray | Failure:
    memory, row = order.session.memory, order.message.env
    assert memory is not None
    if not memory.arena.done[row]:
        return _refused(f"env {row} was not reset yet")
    for leaf in memory.arena.last_observations(row)[2]:
        if leaf.dtype == np.uint8 and (image := as_image(leaf[row])) is not None:
            return image
    return _refused(f"env {row} has no render_mode='rgb_array', and no observation that is an image")


def as_image(observation: np.ndarray) -> np.ndarray | None:
    """An observation of bytes as an image, with its height, width and channels; None if it does not look like one."""
    if observation.ndim == 2:
        observation = observation[:, :, None]
    if observation.ndim != 3 or not observation.size:
        return None
    # The channels, or the stacked grey images, are the shortest axis, the first one or the last one.
    image = observation if observation.shape[2] <= observation.shape[0] else np.moveaxis(observation, 0, 2)
    if image.shape[2] not in (1, 3):
        image = image[:, :, -1:]
    height, width, _ = image.shape
    return np.ascontiguousarray(image) if min(height, width) > observation.size // (height * width) else None
