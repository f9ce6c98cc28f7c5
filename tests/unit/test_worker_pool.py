from __future__ import annotations

from collections.abc import Mapping, Sequence

from envhub_server.hub.worker_pool import WorkerPool
from envhub_server.ipc import control
from envhub_server.processes.exit_cause import ExitCause
from envhub_server.processes.interpreter import InterpreterKey
from envhub_server.processes.worker_events import WorkerExited, WorkerSaid


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

    def map_arena(self, message: control.MapArena, memory: int, *bells: int) -> None:
        self.heard.append((message, memory, bells))

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

    def inherited_bytes(self, pid: int) -> int:
        return 0


def pool_of(workers: int, *spares: int) -> tuple[WorkerPool, list[Process]]:
    starter = Starter()
    pool = WorkerPool(7, "ab12", starter, InterpreterKey(), None)
    pool.start(range(workers))
    pool.start(spares, spares=True)
    return pool, starter.started


def ended(process: Process) -> WorkerExited:
    return WorkerExited(process.number, ExitCause("has ended"))


def test_process_of_a_spare_is_the_workers_from_the_swap_on() -> None:
    pool, (first, lost, spare) = pool_of(2, 2)
    assert pool.of_worker(ended(lost)).worker == 1
    pool.remove(1)
    said = WorkerSaid(spare.number, "in the queue before the swap")
    assert pool.of_worker(said).worker == 2
    pool.swap(1, 2)
    assert pool.of_worker(said) == WorkerSaid(1, "in the queue before the swap")
    assert pool.of_worker(ended(spare)).worker == 1
    pool.tell(1, "hello")
    pool.tell(2, "nobody")
    assert (first.heard, lost.heard, spare.heard) == ([], [], ["hello"])
    assert pool.pids == [100, 102]


def test_process_that_is_being_made_becomes_the_spare() -> None:
    pool, (being_made, spare) = pool_of(1, 1)
    pool.swap(0, 1)
    assert pool.of_worker(ended(being_made)).worker == 1 and pool.of_worker(ended(spare)).worker == 0
    pool.ring()
    assert (being_made.rings, spare.rings) == (0, 1)
    pool.remove(1)
    assert pool.pids == [spare.pid]


def test_spares_are_not_rung_for_they_would_not_listen() -> None:
    pool, (worker, spare) = pool_of(1, 1)
    pool.ring()
    assert (worker.rings, spare.rings) == (1, 0)


def test_all_are_ended_with_their_session() -> None:
    pool, processes = pool_of(2, 2)
    pool.kill_all()
    assert [process.kills for process in processes] == [1, 1, 1]


def test_number_of_a_process_is_used_once() -> None:
    pool, (first,) = pool_of(1)
    pool.remove(0)
    pool.start([0])
    assert first.number == 0 and pool.of_worker(WorkerSaid(1, "hello")).worker == 0
