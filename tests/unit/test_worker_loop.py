"""A worker's loop in a thread of this process, driven by a hub that is this test: the orders in which races hide."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel, ChannelClosed
from envhub_server.ipc.factories_memory import held
from envhub_server.worker import context
from envhub_server.worker.context import Host
from envhub_server.worker.process import Worker
from hubs import wait_until
from scripted_env import GIVE_INFO, GIVE_LARGE_INFO, GO_ON, LARGE, RAISE, TERMINATE, ScriptedEnv

from envhub.arena.layout import Layout
from envhub.arena.memory import (
    CALL_INCREMENT,
    CALL_ONE,
    DRIVER_CLIENT,
    DRIVER_HUB,
    FIRST_CALL,
    FRESH,
    OP_CALL,
    OP_OUT_OF_BAND,
    OP_PART,
    OP_RESET,
    OP_SET_ATTR,
    OP_STEP,
    ROW_BITS,
    STATUS_INFO,
    STATUS_OK,
    STATUS_RAISED,
    Arena,
    allocate,
)
from envhub.protocol import messages
from envhub.protocol.messages import Make
from envhub.values import actions, codec
from envhub.values.leaf import Leaf

ROWS, INFO_BYTES, PATIENCE_S = 4, 2048, 20.0
SMALL_INFO_BYTES = 256  # too small for LARGE
RING = (1).to_bytes(8, "little")
INT64 = actions.DTYPES.index(np.dtype(np.int64))

made: list[ScriptedEnv] = []  # by the factories of the worker, which unpickles them here


def make_env() -> ScriptedEnv:
    made.append(ScriptedEnv())
    return made[-1]


def make_envs(num_envs: int) -> gymnasium.vector.SyncVectorEnv:
    return gymnasium.vector.SyncVectorEnv([make_env] * num_envs)


class Hub:
    """The hub's part: the other end of the channel, an arena, and the eventfds by which both sides wake each other.

    Attributes:
        heard: every message of the worker.
        rows: of the session, those that are this worker's.
    """

    def __init__(self, stack: ExitStack, rows: Sequence[int]) -> None:
        self.stack, self.rows = stack, list(rows)
        ends = socket.socketpair()
        for end in ends:
            stack.callback(end.close)
        self.channel, channel = map(Channel, ends)
        self.worker = Worker(channel, Host())
        self.heard: list[Any] = []
        self.new_bells()
        self.thread: threading.Thread | None = None

    def new_bells(self) -> None:
        self.bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(4)]
        for bell in self.bells:
            self.stack.callback(os.close, bell)
        self.bell, self.client_bell, self.done_bell, self.client_done_bell = self.bells

    # --- the worker's life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.thread = threading.Thread(target=self.worker.run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        """End the worker, however far it has come."""
        if self.thread is not None:
            self.channel.shutdown()
            self.thread.join(PATIENCE_S)
            assert not self.thread.is_alive()
        self.worker.close()
        with suppress(OSError):  # where no factories came; a process of its own leaves it to its end
            os.close(self.worker._builder._memory)

    def tell(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        self.channel.send(message, descriptors)

    def hear(self, kind: type, count: int = 1) -> list[Any]:
        """The messages of this kind, once so many have come."""
        deadline_s = time.monotonic() + PATIENCE_S
        while len(found := [message for message in self.heard if isinstance(message, kind)]) < count:
            ready = select.select([self.channel.fileno()], [], [], deadline_s - time.monotonic())[0]
            assert ready, f"no {kind.__name__} came, but {self.heard}"
            self.heard += self.channel.receive() or ()
        return found

    def build(self, factory: Callable[..., Any] = make_env, **other: Any) -> Any:
        make, memory = held(Make(ROWS, factories=cloudpickle.dumps([factory] * ROWS)))
        with os.fdopen(memory, "rb") as file:
            build = control.Build(0, self.rows, "", b"", make.factories, "", [], "NextStep", True, **other)
            self.tell(build, [file.fileno()])
        return self.hear(control.Built)[0]

    def new_arena(self, info_bytes: int = INFO_BYTES) -> Arena:
        layout = Layout(ROWS, (Leaf("<f8", (2,)),), (Leaf("<i8", ()),), info_bytes)
        self.memory = os.fdopen(allocate(layout), "r+b", buffering=0)
        self.stack.callback(self.memory.close)
        arena = Arena(layout, self.memory.fileno())
        arena.format(epoch=1)
        arena.action_codes[0][:] = INT64
        return arena

    def map(self, arena: Arena, built: Any, spin_us: int = 0) -> None:
        mapped = len([message for message in self.heard if isinstance(message, control.Mapped)])
        leaves = built.observation_leaves, built.action_leaves
        described = built.observation_spaces[0], built.action_space
        message = control.MapArena(ROWS, *leaves, arena.layout.info_bytes, *described, "same", spin_us, slow_ms=1)
        self.tell(message, [self.memory.fileno(), *self.bells])
        self.hear(control.Mapped, mapped + 1)
        self.arena = arena

    # --- driving ----------------------------------------------------------------------------------------------------

    def post(self, *wanted: int, op: int = OP_STEP, ring: bool = True) -> None:
        """Hand all rows over with these actions; other workers' rows are done at once."""
        self.arena.actions[0].view(np.int64)[self.rows] = wanted or [GO_ON] * len(self.rows)
        self.arena.post(op)
        for row in set(range(ROWS)) - set(self.rows):
            self.arena.done[row] = self.arena.request[row]
        if ring:
            self.ring()

    def post_rows(self, rows: Sequence[int], action: int = GO_ON) -> None:
        found = np.array(rows)
        self.arena.actions[0].view(np.int64)[found] = action
        self.arena.post_rows(OP_PART, found)
        self.ring()

    def ring(self) -> None:
        os.write(self.bell, RING)

    def await_rows(self, rows: Sequence[int] | None = None, bell: int | None = None) -> None:
        """Wait until these rows are done, like a driver that a bell wakes."""
        found = np.array(self.rows if rows is None else rows)
        bell = self.done_bell if bell is None else bell
        deadline_s = time.monotonic() + PATIENCE_S
        while not (self.arena.done[found] == self.arena.request[found]).all():
            assert select.select([bell], [], [], deadline_s - time.monotonic())[0], "the bell was not rung"
            os.read(bell, 8)

    def rings(self, bell: int | None = None) -> int:
        """How often the worker rang since it was asked last; read after an answer, so that no ring is on its way."""
        with suppress(BlockingIOError):
            return int.from_bytes(os.read(self.done_bell if bell is None else bell, 8), "little")
        return 0

    def step(self, *wanted: int) -> None:
        self.post(*wanted)
        self.await_rows()

    def reset(self, seeds: Sequence[int | None] | None = None, rows: Sequence[int] | None = None) -> None:
        mask = [] if rows is None else [row in rows for row in range(ROWS)]
        self.arena.put_message(messages.pack(messages.Reset(list(seeds or []), mask)))
        self.post(op=OP_RESET)
        self.await_rows()

    def call(self, name: str) -> list[Any]:
        """Each env's attribute, once the worker has dealt with all messages and rings that came before.

        The worker is told something twice: epoll may return a message before a ring that came earlier, but both at the
        same time. An attribute is read where it lies, as the rows may be pending.
        """
        for _ in range(2):
            told = len([message for message in self.heard if isinstance(message, control.Suspicious)])
            self.tell(control.SetAttrRows(self.rows[:1], "no_such", [b""]))  # which cannot be read
            self.hear(control.Suspicious, told + 1)
        return [getattr(made[row], name) for row in range(len(self.rows))]

    def ask(self, message: Any, rows: Sequence[int] | None = None) -> list[Any]:
        """Have these rows called; each row's result, or None."""
        found = np.array(self.rows if rows is None else rows)
        self.arena.put_message(messages.pack(message))
        self.arena.post_rows(OP_CALL if isinstance(message, messages.Call) else OP_SET_ATTR, found, CALL_INCREMENT)
        self.ring()
        self.await_rows(found.tolist())
        blobs = [self.arena.info(row) for row in found.tolist()]
        return [None if blob is None else codec.decode(blob) for blob in blobs]

    def observed(self) -> list[list[float]]:
        arena = self.arena
        found: list[list[float]] = arena.observations[0][arena.done & 1, np.arange(ROWS)][self.rows].tolist()
        return found


@contextmanager
def serving(
    rows: Sequence[int] = range(ROWS), spin_us: int = 0, info_bytes: int = INFO_BYTES, **other: Any
) -> Iterator[Hub]:
    """A worker that serves these rows, whose envs have been reset."""
    with mapped(rows, spin_us, info_bytes, **other) as hub:
        hub.tell(control.Serve())
        hub.reset()
        hub.call("episode")
        hub.rings()
        yield hub


@contextmanager
def mapped(
    rows: Sequence[int] = range(ROWS), spin_us: int = 0, info_bytes: int = INFO_BYTES, **other: Any
) -> Iterator[Hub]:
    """A worker that has mapped the arena and is not to serve it yet."""
    with ExitStack() as stack:
        hub = Hub(stack, rows)
        stack.callback(hub.end)
        hub.start()
        built = hub.build(**other)
        hub.map(hub.new_arena(info_bytes), built, spin_us)
        yield hub


@pytest.fixture(autouse=True)
def no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)  # it would outlive the test


class Watched:
    """A row of words that calls ``before`` with the index before each store."""

    def __init__(self, words: Any, before: Callable[[int], None]) -> None:
        self._words, self._before = words, before

    def __getitem__(self, index: int) -> Any:
        return self._words[index]

    def __eq__(self, other: object) -> bool:
        return bool(self._words == other)

    def __setitem__(self, index: int, value: int) -> None:
        self._before(index)
        self._words[index] = value


# --- results and ``done`` ---------------------------------------------------------------------------------------------


def test_results_are_stored_before_done() -> None:
    with serving() as hub:
        arena, seen = hub.arena, {}

        def look(row: int) -> None:
            observation = arena.observations[0][arena.request[row] & 1, row].tolist()
            words = arena.rewards[row], arena.terminations[row], arena.needs_reset[row], arena.status[row]
            seen[row] = observation, *map(int, words), bool(arena.done[row] == arena.request[row])

        hub.worker.stepper._done = Watched(hub.worker.stepper._done, look)  # type: ignore[assignment]
        hub.step(GO_ON, TERMINATE, GIVE_INFO, GO_ON)
        assert seen == {
            0: ([1, 1], 1, 0, 0, STATUS_OK, False),
            1: ([1, 1], 1, 1, 1, STATUS_OK, False),
            2: ([1, 1], 1, 0, 0, STATUS_INFO, False),
            3: ([1, 1], 1, 0, 0, STATUS_OK, False),
        }


@pytest.mark.parametrize(("action", "kind"), [(GIVE_LARGE_INFO, control.RowInfo), (RAISE, control.RowFailed)])
def test_what_the_channel_carries_is_sent_before_done(action: int, kind: type) -> None:
    with serving([0], info_bytes=SMALL_INFO_BYTES) as hub:
        sent_at_done = []

        def look(row: int) -> None:
            sent_at_done.append(bool(select.select([hub.channel.fileno()], [], [], 0)[0]))

        hub.worker.stepper._done = Watched(hub.worker.stepper._done, look)  # type: ignore[assignment]
        hub.step(action)
        assert sent_at_done == [True]
        (found,) = hub.hear(kind)
        assert found.number == hub.arena.request[0]
        if action == GIVE_LARGE_INFO:
            assert codec.decode(found.info) == {"text": LARGE} and hub.arena.info_length[0] == len(found.info)
        else:
            assert (found.failure.env_index, found.failure.type) == (0, "builtins.RuntimeError")


def test_driver_is_rung_once_for_a_batch_and_by_the_last_worker_only() -> None:
    with serving([0, 2]) as hub:
        hub.step()
        hub.call("episode")
        hub.rings()
        hub.post(ring=False)
        hub.arena.request[1] += 1  # another worker's, which is not done
        hub.ring()
        assert hub.call("length") == [2, 2] and hub.arena.done[0] == hub.arena.request[0]
        assert hub.rings() == 0
        hub.arena.done[1] = hub.arena.request[1]
        hub.step()
        hub.call("length")
        assert hub.rings() <= 1  # which the wait may have taken


@pytest.mark.parametrize("driver", [DRIVER_HUB, DRIVER_CLIENT, 7])
def test_bell_of_the_driver_is_rung_and_the_hubs_for_an_unknown_driver(driver: int) -> None:
    with serving() as hub:
        hub.arena.set_driver(driver)
        expected = hub.client_done_bell if driver == DRIVER_CLIENT else hub.done_bell
        other = hub.done_bell if driver == DRIVER_CLIENT else hub.client_done_bell
        hub.post()
        hub.await_rows(bell=expected)
        hub.call("episode")
        assert hub.rings(other) == 0


# --- rings and posts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bell", ["bell", "client_bell"])
def test_worker_is_woken_by_the_hub_and_by_a_client(bell: str) -> None:
    with serving() as hub:
        hub.post(ring=False)
        os.write(getattr(hub, bell), RING)
        hub.await_rows()
        assert hub.observed() == [[1, 1]] * ROWS


def test_post_that_is_seen_before_its_ring_is_served_once() -> None:
    with mapped() as hub:
        hub.post(ring=False)
        hub.tell(control.Serve())  # the worker then looks for posted rows, as one that spins does
        hub.await_rows()
        hub.ring()
        assert hub.call("length") == [1] * ROWS


def test_worker_that_spins_sees_posts_with_and_without_a_ring() -> None:
    with serving(spin_us=1000) as hub:
        for number in range(1, 200):
            hub.post(ring=number % 2 == 0)
            if number % 2:  # it may have parked by now
                hub.ring()
            hub.await_rows()
        assert hub.call("length") == [199] * ROWS and hub.observed() == [[1, 199]] * ROWS


def test_post_before_the_worker_serves_waits_for_that() -> None:
    with mapped() as hub:
        hub.arena.needs_reset[:] = FRESH
        hub.post()
        assert hub.call("episode") == [0] * ROWS
        hub.tell(control.Serve(seeds=[1, 2, 3, 4]))
        hub.await_rows()
        assert [env.seeds for env in made] == [[1], [2], [3], [4]]


def test_rows_that_are_done_already_are_left_alone() -> None:
    with serving() as hub:
        hub.post(ring=False)
        hub.arena.done[1:3] = hub.arena.request[1:3]  # as by the hub, in place of another worker
        hub.ring()
        hub.await_rows()
        assert hub.call("length") == [1, 0, 0, 1]


def test_rows_that_were_left_just_now_are_left_alone() -> None:
    with serving() as hub:
        hub.step(*[TERMINATE] * ROWS)
        is_busy, goes_on = threading.Event(), threading.Event()
        hub.worker._handlers[control.SetAttrRows] = lambda _: is_busy.set() or goes_on.wait(PATIENCE_S)
        hub.tell(control.SetAttrRows([0], "length", [b""]))
        assert is_busy.wait(PATIENCE_S)
        hub.tell(control.Leave(True))  # the worker finds this and the ring of the call at once
        hub.arena.put_message(messages.pack(messages.Call("length", b"")))
        hub.post(op=OP_CALL)
        done = hub.arena.done.tolist()
        goes_on.set()
        hub.hear(control.HandedOver)
        hub.tell(control.CloseEnvs())
        assert hub.thread is not None
        hub.thread.join(PATIENCE_S)
        assert hub.arena.done.tolist() == done != hub.arena.request.tolist()


# --- requests with a message ------------------------------------------------------------------------------------------


def test_reset_of_some_rows_has_the_others_repeat_their_last_observation() -> None:
    with serving() as hub:
        hub.step()
        hub.reset(seeds=[None, 5, None, 7], rows=[1, 2])
        assert hub.observed() == [[1, 1], [2, 0], [2, 0], [1, 1]]
        assert [env.seeds for env in made] == [[None], [None, 5], [None, None], [None]]
        assert [hub.arena.last_seed(row) for row in hub.rows] == [None, 5, None, None]


@pytest.mark.parametrize("while_it_looks", [False, True])
def test_request_whose_last_words_are_not_stored_yet_waits_for_them(while_it_looks: bool) -> None:
    with serving(spin_us=1000) as hub:
        seen, stepper = len(made[0].seeds), hub.worker.stepper
        hub.arena.put_message(messages.pack(messages.Reset()))
        hub.post(op=OP_RESET)
        hub.await_rows()
        carry_out = stepper._verbs[OP_RESET]

        def look(rows: list[int]) -> bool:
            if while_it_looks and rows == [0, 1, 2]:
                hub.arena.request[3] += 1
            return carry_out(rows)

        stepper._verbs[OP_RESET] = look
        hub.arena.op[:] = OP_RESET
        hub.arena.request[:3] += 1
        hub.ring()
        if not while_it_looks:
            hub.call("episode")
            assert len(made[0].seeds) == seen + 1
            hub.arena.request[3] += 1
        hub.ring()
        hub.await_rows()
        assert [len(env.seeds) for env in made] == [seen + 2] * ROWS


def test_call_stores_results_as_infos_and_leaves_observations_and_other_rows_alone() -> None:
    with serving() as hub:
        hub.step(GO_ON, TERMINATE, GO_ON, GO_ON)
        before, begun = (hub.arena.needs_reset.tolist(), hub.observed()), hub.arena.begun.tolist()  # by the reset
        assert hub.ask(messages.Call("length", b"", rows=[1, 3]), [1, 3]) == [1, 1]
        assert hub.arena.begun.tolist() == [begun[0], hub.arena.request[1], begun[2], hub.arena.request[3]]
        assert (hub.arena.needs_reset.tolist(), hub.observed()) == before
        assert hub.ask(messages.SetAttr("length", [codec.encode(9), codec.encode(8)], [0, 2]), [0, 2]) == [None, None]
        assert [env.length for env in made] == [9, 1, 8, 1]
        (said,) = hub.hear(control.SetAttrRows)
        assert said == control.SetAttrRows([0, 2], "length", [codec.encode(9), codec.encode(8)])
        assert hub.arena.steps.tolist() == [2] * ROWS


def test_env_that_raises_in_a_call_ends_it_and_is_named() -> None:
    with serving() as hub:
        del made[2].length
        assert hub.ask(messages.Call("length", b"")) == [0, 0, None, None]
        (failed,) = hub.hear(control.RowFailed)
        assert (failed.failure.env_index, failed.failure.type) == (2, "builtins.AttributeError")
        assert hub.arena.status.tolist() == [STATUS_INFO, STATUS_INFO, STATUS_RAISED, STATUS_OK]
        nine = codec.encode(9)
        hub.ask(messages.SetAttr("length", [nine, b"\xc1"], [0, 1]), [0, 1])
        hub.ask(messages.SetAttr("length", [nine], [0]), [0])
        hub.hear(control.RowFailed, 2)
        # The env has the first value all the same, and so will the one after it.
        assert hub.hear(control.SetAttrRows) == [control.SetAttrRows([0], "length", [nine])]


@pytest.mark.parametrize("op", [OP_RESET, OP_OUT_OF_BAND, OP_CALL, OP_SET_ATTR])
def test_message_that_cannot_be_read_fails_the_rows(op: int) -> None:
    with serving() as hub:
        hub.arena.put_message(b"\xc1")
        hub.post(op=op)
        hub.await_rows()
        assert hub.arena.status.tolist() == [STATUS_RAISED] * ROWS and len(hub.hear(control.RowFailed, ROWS)) == ROWS


def test_actions_out_of_band_come_as_a_message() -> None:
    with serving() as hub:
        hub.arena.action_codes[0][:] = actions.OUT_OF_BAND
        blobs = [(row, codec.encode([TERMINATE if row == 2 else GO_ON])) for row in hub.rows]
        hub.arena.put_message(messages.pack_rows(blobs))
        hub.post(op=OP_OUT_OF_BAND)
        hub.await_rows()
        assert hub.arena.terminations.tolist() == [False, False, True, False]
        assert hub.call("length") == [1] * ROWS


def test_driver_is_rung_for_a_row_of_a_part_before_the_next_is_stepped() -> None:
    with serving() as hub:
        rung: list[int] = []
        made[1].observed = lambda: rung.append(hub.rings()) or np.zeros(2)  # type: ignore[method-assign, func-returns-value]
        hub.post_rows([0, 1])
        assert hub.call("episode") == [1] * ROWS and rung == [1]


# --- another arena ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("worker", "kwargs_each", "says_spec"), [(0, [], True), (1, [], False), (1, [b""], True)])
def test_worker_describes_the_envs_of_another_only_where_they_may_differ(
    worker: int, kwargs_each: list[bytes], says_spec: bool
) -> None:
    with ExitStack() as stack:
        hub = Hub(stack, [worker])
        stack.callback(hub.end)
        hub.start()
        build = control.Build(worker, [worker], "CartPole-v1", b"", b"", "", [], "NextStep", True)
        hub.tell(replace(build, kwargs_each=kwargs_each))
        (built,) = hub.hear(control.Built)
        assert bool(built.plain_spec) is says_spec
        assert (built.plain_spec is None) is not says_spec
        assert bool(built.metadata) is (worker == 0)


def test_arena_of_another_layout_ends_the_worker() -> None:
    with ExitStack() as stack:
        hub = Hub(stack, range(ROWS))
        stack.callback(hub.end)
        hub.new_arena().header[2] = ROWS + 1
        message = control.MapArena(ROWS, [["<f8", [2]]], [["<i8", []]], INFO_BYTES, b"", b"", "same", 0)
        hub.tell(message, [hub.memory.fileno(), *hub.bells])
        with pytest.raises(ValueError, match="not an arena"):
            hub.worker.run()


# --- envs that raise --------------------------------------------------------------------------------------------------


def test_env_is_made_again_after_the_driver_has_its_step() -> None:
    with serving(on_exception="truncate") as hub:
        waiting, go_on = threading.Event(), threading.Event()

        def close() -> None:
            waiting.set()
            assert go_on.wait(PATIENCE_S)

        made[1].close = close  # type: ignore[method-assign]
        hub.step(GO_ON, RAISE, GO_ON, GO_ON)  # which comes to an end before
        assert waiting.wait(PATIENCE_S)
        assert hub.arena.progress[0] & (ROW_BITS | FIRST_CALL) == 1 | FIRST_CALL
        assert 0 < hub.arena.since[0] <= time.monotonic_ns()
        go_on.set()
        hub.step()
        assert hub.observed()[1] == [1, 0]


def test_reset_that_raises_is_never_a_truncation() -> None:
    with serving(on_exception="truncate") as hub:
        made[0].refuses_reset = True
        hub.reset()
        assert hub.arena.status[0] == STATUS_RAISED and not hub.arena.truncations.any() and len(made) == ROWS


def test_worker_ends_as_one_that_crashed_where_an_env_cannot_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def end(status: int) -> None:
        assert status == 1
        ended.set()
        raise ChannelClosed  # in place of the end of this process

    with serving([0], on_exception="truncate") as hub:
        monkeypatch.setattr(context.os, "_exit", end)
        monkeypatch.setattr(hub.worker._builder, "_factories", [lambda: 1 / 0])
        hub.step(RAISE)
        assert ended.wait(PATIENCE_S)
        monkeypatch.undo()
        assert hub.arena.truncations[0] and hub.hear(control.Faulted)


# --- turn words -------------------------------------------------------------------------------------------------------


def test_turn_is_another_at_every_call_and_names_no_row_between_batches() -> None:
    with serving([2, 3]) as hub:
        hub.step()  # comes to an end a moment before the worker stores that it is at no row
        assert wait_until(lambda: int(hub.arena.progress[2]) & (ROW_BITS | FIRST_CALL) == 0, PATIENCE_S)
        before = int(hub.arena.progress[2])
        hub.ask(messages.Call("length", b""))
        after = int(hub.arena.progress[2])
        assert after // CALL_ONE == before // CALL_ONE + 2
        assert after & ROW_BITS == 3


@pytest.mark.parametrize("op", [OP_STEP, OP_RESET, OP_CALL])
def test_worker_stores_when_it_began_and_that_it_waits(op: int) -> None:
    with serving([2, 3]) as hub:
        hub.reset()
        inside, go_on, before_ns = threading.Event(), threading.Event(), time.monotonic_ns()

        def observed() -> np.ndarray:
            inside.set()
            assert go_on.wait(PATIENCE_S)
            return np.zeros(2)

        made[1].observed = observed  # type: ignore[method-assign]
        message = messages.Call("observed", codec.encode(((), {}))) if op == OP_CALL else messages.Reset([])
        assert op == OP_STEP or hub.arena.put_message(messages.pack(message))
        hub.post(op=op)
        assert inside.wait(PATIENCE_S)
        assert before_ns <= hub.arena.since[2] <= time.monotonic_ns()
        go_on.set()
        hub.await_rows()
        assert wait_until(lambda: int(hub.arena.since[2]) == 0, PATIENCE_S)


@pytest.mark.parametrize(
    ("vector", "slow"), [({}, {3}), ({"factory": make_envs, "batch_workers": 2}, {1, 3})], ids=["envs", "vector_env"]
)
def test_hub_is_sent_a_slow_step_with_the_envs_that_were_slow(vector: dict[str, Any], slow: set[int]) -> None:
    with serving([1, 3], **vector) as hub:
        step = made[-1].step
        made[-1].step = lambda action: (time.sleep(0.05), step(action))[1]  # type: ignore[method-assign]
        for _ in range(4):  # a slow reset may have been sent just before
            hub.step()
        hub.call("episode")
        sent = [each for each in hub.heard if isinstance(each, control.Slow) and each.verb == "step"]
        assert sent and all(slow <= {*each.rows} <= {1, 3} and each.took_ns >= 50_000_000 for each in sent)
        assert np.count_nonzero(hub.arena.worker_ns[1]) == 4 and sent[-1].took_ns in hub.arena.worker_ns[1]
        assert hub.arena.env_ns[3 if slow == {3} else 1].max() >= 50_000_000


def test_turn_goes_on_counting_where_the_worker_before_has_stopped() -> None:
    with ExitStack() as stack:
        hub = Hub(stack, range(ROWS))
        stack.callback(hub.end)
        hub.start()
        built = hub.build()
        arena = hub.new_arena()
        arena.progress[0] = 1000 * CALL_ONE + (3 | FIRST_CALL)  # of one that ended at row 3
        hub.map(arena, built)
        arena.needs_reset[:] = FRESH
        hub.tell(control.Serve())
        hub.step()
        assert wait_until(lambda: arena.progress[0] == (1000 + ROWS) * CALL_ONE, PATIENCE_S)


def test_close_after_a_step_waits_for_it() -> None:
    with serving([0]) as hub:
        stepping, go_on = threading.Event(), threading.Event()
        closed_at_its_end = []

        def observed() -> np.ndarray:
            stepping.set()
            assert go_on.wait(PATIENCE_S)
            closed_at_its_end.append(made[0].closed)
            return np.zeros(2)

        made[0].observed = observed  # type: ignore[method-assign]
        hub.post()
        assert stepping.wait(PATIENCE_S)
        hub.tell(control.CloseEnvs())
        go_on.set()
        hub.await_rows()
        assert hub.thread is not None
        hub.thread.join(PATIENCE_S)
        assert closed_at_its_end == [0] and made[0].closed == 1
