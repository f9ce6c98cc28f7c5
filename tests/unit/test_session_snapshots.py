"""A session that takes snapshots and restores rows, in whatever order its processes answer or end."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import replace
from typing import Any

import pytest
from envhub_server.ipc.control import (
    CloseEnvs,
    Closing,
    HandedOver,
    Leave,
    Mapped,
    NotRepeated,
    SnapshotTaken,
)
from envhub_server.processes.worker_handle import ExitCause, WorkerExited, WorkerMessage
from envhub_server.session.state import Phase
from recorder import (
    Answer,
    AnswerAttach,
    DropSnapshot,
    Effect,
    Fail,
    FailAttach,
    GiveArena,
    Kill,
    PostStep,
    RepeatRequests,
    StartProcesses,
    StartRestored,
    TakeSnapshot,
    Tell,
    events,
)
from sessions import KILLED, Session, built, ready

from envhub.protocol.messages import Close, Done, Faults, Hosting, Recycle, SnapshotRequest, Step, Table

ROWS = 3
STEP = Step(b"\x04")


class World:
    """Processes that do what a session has them do, each in its order, and end at any moment."""

    def __init__(self, session: Session, chance: random.Random) -> None:
        self.session, self.chance = session, chance
        # By number of a process, or the negative one of a snapshot's, the events to come.
        self.inboxes: dict[Any, deque[Any]] = defaultdict(deque)
        self.snapshots: set[int] = set()  # that live
        self.asked: Any = None
        self.seen: set[str] = set()  # what has happened
        self.drains = False

    def tell(self, event: Any, now_s: float = 0.0) -> None:
        self.follow(self.session.handle(event, now_s))

    def follow(self, calls: list[Effect]) -> None:
        for call in calls:
            match call:
                case TakeSnapshot(process, wanted):
                    problems = ["the pipe 9"] * (self.chance.random() < 0.1)
                    base = 0 if wanted.forks or problems else self.chance.choice([*wanted.kept, 0])
                    taken = SnapshotTaken(wanted.serial, problems, base=base, requests=b"")
                    self.inboxes[process].append(WorkerMessage(process, taken))
                    if wanted.forks:
                        ended = WorkerExited(-wanted.serial, KILLED)
                        born = events.SnapshotBorn(wanted.serial, private_bytes=1)
                        self.inboxes[-wanted.serial].append(ended if problems else born)
                    if wanted.forks and not problems:
                        self.snapshots.add(wanted.serial)
                case DropSnapshot(serial):
                    self.snapshots.discard(serial)
                    self.inboxes.pop(-serial, None)
                case StartProcesses(processes):
                    for process in processes:
                        self.inboxes[process].append(WorkerMessage(process, built()))
                case StartRestored(process, serial) if serial not in self.snapshots:
                    self.end(process)
                case RepeatRequests(process):
                    if self.chance.random() < 0.2:
                        self.inboxes[process].append(WorkerMessage(process, NotRepeated("does not repeat")))
                case GiveArena(process):
                    self.inboxes[process].append(WorkerMessage(process, Mapped()))
                case Tell(process, Leave()):
                    self.inboxes[process].append(WorkerMessage(process, HandedOver()))
                case Tell(process, CloseEnvs()):
                    self.inboxes[process].append(WorkerMessage(process, Closing([])))
                    self.inboxes[process].append(WorkerExited(process, ExitCause("exited")))
                case Kill(process):
                    self.end(process)
                case PostStep():
                    self.inboxes["rows"].append(events.RowsDone())
                case AnswerAttach() | FailAttach():
                    self.seen.add("taken over")
                case Answer(message):
                    self.answered(message)
                case Fail(failure):
                    self.answered(failure.code)

    def answered(self, answer: Any) -> None:
        asked, self.asked = self.asked, None
        if isinstance(asked, SnapshotRequest):
            failures = ("draining",) * self.drains + (
                "snapshot_lost",
                "snapshot_limit",
                "snapshot_refused",
                "malformed",
            )
            assert isinstance(answer, Table) or answer in failures, answer
        else:
            assert answer == Done() or self.drains, (asked, answer)
        self.seen.add(f"{getattr(asked, 'action', type(asked).__name__)}: {getattr(answer, 'tag', answer)}"[:40])

    def end(self, process: int) -> None:
        self.inboxes[process] = deque([WorkerExited(process, KILLED)])

    def deliver(self) -> bool:
        """Have one of the processes go on; False if all wait."""
        waiting = [each for each, inbox in self.inboxes.items() if inbox]
        if not waiting:
            return False
        event = self.inboxes[self.chance.choice(waiting)].popleft()
        has_ended = isinstance(event, WorkerExited) and event.process >= 0
        if not (has_ended and self.session.slots.process(event.process) is None):
            self.tell(event)
        return True

    def ask(self) -> None:
        names = [each["name"] for each in self.session.snapshots.table().rows]
        name = self.chance.choice(names) if names else "none"
        if (prepared := self.session.snapshots.restoring) is not None:
            name = prepared.name
        rows = sorted(self.chance.sample(range(ROWS), self.chance.randint(1, ROWS)))
        sources = [self.chance.randrange(ROWS) for _ in rows]
        self.asked = self.chance.choice(
            [
                STEP,
                SnapshotRequest("take", self.chance.choice(["", "again"]), rows, drop=["again"]),
                SnapshotRequest("restore", name, rows, sources),
                SnapshotRequest("restore", name, rows, drop=[name] * (self.chance.random() < 0.1)),
                SnapshotRequest("prepare", name, rows, sources),
                SnapshotRequest("commit", name),
                SnapshotRequest("list", drop=[name]),
            ]
        )
        self.follow(self.session.request(self.asked))

    def disturb(self) -> None:
        if self.snapshots and self.chance.random() < 0.5:
            serial = self.chance.choice(sorted(self.snapshots))
            self.snapshots.discard(serial)
            self.end(-serial)
        elif processes := self.session.slots.processes:
            self.end(self.chance.choice(processes).number)


def walk(seed: int, **make: Any) -> set[str]:
    chance = random.Random(seed)
    session = ready(ROWS, ROWS, snapshots="safe", **make)
    session.launcher.rules = replace(session.launcher.rules, snapshots_max=4)
    world, now_s = World(session, chance), 0.0
    for _ in range(150):
        what = chance.random()
        if what < 0.06:
            world.disturb()
        elif what < 0.08:
            world.tell(events.Attached(quiescent=True))
        elif what < 0.3 and world.asked is None and not session.takeover_pending:
            world.ask()
        elif not world.deliver():
            now_s += 1.0
            world.follow(session.elapsed(now_s))
        if session.phase is Phase.BROKEN:  # three processes in a row that never served
            break
    if chance.random() < 0.2:
        world.drains = True
        world.tell(events.Draining(by_s=now_s + 1e6, end_by_s=now_s + 1e6, quiescent=True))
    while world.deliver():
        pass
    if session.phase is Phase.ENDED:
        assert world.drains and world.asked is None
        return world.seen
    if session.phase is not Phase.BROKEN:
        assert world.asked is None and all(slot.successor is None for slot in session.slots)
        assert session.snapshots.restoring is None or session.snapshots.restoring.is_held
    world.asked = Close()
    world.follow(session.request(world.asked))
    while world.deliver():
        pass
    assert session.phase is Phase.ENDED and world.asked is None
    session.snapshots.drop([each["name"] for each in session.snapshots.table().rows])
    world.follow(session.effects.calls)
    assert not world.snapshots
    return world.seen


RECYCLING = Hosting(spares=1, recycle=Recycle(age_s=3.0))


@pytest.mark.parametrize("on_crash", ["truncate", "restore"])
@pytest.mark.parametrize("hosting", [Hosting(), RECYCLING], ids=["", "recycled"])
def test_whatever_ends_meanwhile_each_request_is_answered(on_crash: str, hosting: Hosting) -> None:
    seen = set()
    for seed in range(100):
        seen |= walk(seed, faults=Faults(restarts_max=10**6, on_crash=on_crash), hosting=hosting)
    failures = {"restore: snapshot_lost", "take: snapshot_lost", "take: snapshot_refused", "take: snapshot_limit"}
    assert failures <= seen, seen
