from __future__ import annotations

from collections.abc import Mapping, Sequence

from envhub_server.hub.resources import WorkerPool
from envhub_server.ipc import control
from envhub_server.processes.interpreter import InterpreterKey


class Process:
    """A worker that notes what it is told."""

    def __init__(self, number: int) -> None:
        self.number, self.pid = number, 100 + number
        self.label: dict[str, object] = {}
        self.log_tail = ""
        self.heard: list[object] = []
        self.rings = self.kills = 0

    def send(self, message: object) -> None:
        self.heard.append(message)

    def map_arena(self, message: control.MapArena, descriptors: control.ArenaDescriptors) -> None:
        self.heard.append((message, descriptors))

    def ring(self) -> None:
        self.rings += 1

    def receive_all(self) -> None:
        pass

    def dump_stacks(self) -> None:
        pass

    def kill(self) -> None:
        self.kills += 1


class Starter:
    def __init__(self) -> None:
        self.started: list[Process] = []

    def start(
        self,
        session: int,
        numbers: Sequence[int],
        key: InterpreterKey,
        environ: Mapping[str, str] | None,
        libraries: Sequence[str],
    ) -> list[Process]:
        found = [Process(number) for number in numbers]
        self.started += found
        return found

    def orphans(self) -> Mapping[int, Sequence[int]]:
        return {}


def pool_of(workers: int, spares: int = 0) -> tuple[WorkerPool, list[Process]]:
    """A pool whose first processes serve the slots of the same numbers."""
    starter = Starter()
    pool = WorkerPool(7, "ab12", starter, InterpreterKey(), None)
    pool.start(range(workers + spares))
    for slot in range(workers):
        pool.serve(slot, slot)
    return pool, starter.started


def test_process_that_serves_the_slot_of_one_that_ended_is_rung_in_its_place() -> None:
    pool, (first, lost, spare) = pool_of(2, 1)
    pool.remove(lost.number)
    pool.serve(1, spare.number)
    pool.ring()
    pool.ring_some([1])
    assert (first.rings, lost.rings, spare.rings) == (1, 0, 2)
    pool.tell(lost.number, "nobody")
    pool.tell(spare.number, "hello")
    assert (first.heard, lost.heard, spare.heard) == ([], [], ["hello"])
    assert pool.pids == [100, 102]


def test_process_whose_slot_another_one_serves_is_not_rung() -> None:
    pool, (leaving, successor) = pool_of(1, 1)
    pool.serve(0, successor.number)
    pool.ring()
    assert (leaving.rings, successor.rings) == (0, 1)
    pool.remove(leaving.number)
    pool.ring()
    assert successor.rings == 2 and pool.pids == [successor.pid]


def test_slot_whose_process_has_ended_is_not_rung() -> None:
    pool, (ended,) = pool_of(1)
    pool.remove(ended.number)
    pool.ring()
    pool.ring_some([0])
    assert ended.rings == 0


def test_spares_are_not_rung_for_they_would_not_listen() -> None:
    pool, (worker, spare) = pool_of(1, 1)
    pool.ring()
    assert (worker.rings, spare.rings) == (1, 0)


def test_output_of_a_process_is_that_of_its_worker() -> None:
    pool, (worker, spare) = pool_of(1, 1)
    pool.label(spare.number, 1)
    pool.label(spare.number, 0)
    assert spare.label == {"session": "ab12", "worker": 0} and worker.label == {}


def test_all_are_ended_with_their_session() -> None:
    pool, processes = pool_of(2, 1)
    pool.kill_all()
    assert [process.kills for process in processes] == [1, 1, 1]
