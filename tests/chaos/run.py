"""A run of the nemesis against trainers on every lane, and what is said of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from chaos.checker import DISABLED, NEXT_STEP, SAME_STEP, Tally
from chaos.nemesis import EMBEDDED, IPC, LANES, RELAY, TCP, acts
from chaos.scene import Scene, scene
from chaos.trainer import Task

REPORT_S = 10.0
MODES = {EMBEDDED: NEXT_STEP, IPC: SAME_STEP, TCP: DISABLED, RELAY: NEXT_STEP}
# The rows, the workers, whether the envs are noted, and their elements, of a trainer's sessions in turn.
SHAPES = [
    (8, 1, True, 150_000),
    (6, 1, False, 60),
    (3, 3, True, 60),
    (14, 2, False, 60),
    (4, 2, True, 60),
    (10, 2, True, 60),
    (1, 1, False, 60),
    (12, 4, False, 60),
]
# By looking it sees what the hub does in their common memory while the hub does it, which takes a while for large rows.
POLL_S = {EMBEDDED: 0.002}
PAUSE_S = {IPC: 0.001}  # with it, workers end while nothing is under way, too
OPTIONS: dict[str, dict[str, Any]] = {
    EMBEDDED: {"on_exception": "truncate", "on_hub_loss": "recreate"},
    IPC: {"restart_wait": 0.05, "step_timeout": 1.0, "on_hub_loss": "recreate"},
    TCP: {"step_timeout": 2.0, "on_exception": "truncate", "on_hub_loss": "recreate"},
    RELAY: {},
}
PARTS = 0.2  # share of a trainer's steps
RESTARTS_MAX = 100_000
UNBOUNDED = 1 << 60


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        by_lane: what each lane's trainers saw.
        endings: how their sessions ended.
        acts: what the nemesis did.
        relayed: what the relay did.
    """

    seed: int
    seconds: float
    by_lane: dict[str, Tally]
    endings: Counter[str]
    acts: Counter[str]
    relayed: Counter[str]

    @property
    def total(self) -> Tally:
        """What was seen on all lanes."""
        found = Tally()
        for tally in self.by_lane.values():
            found.add(tally)
        return found

    def text(self) -> str:
        """All of it, for people."""
        total = self.total
        lines = [
            f"seed {self.seed}: {total.acknowledged:,} steps acknowledged in {total.batches:,} batches"
            f" and {self.seconds:.0f} s",
            f"incarnations {total.incarnations}, sessions taken over {total.inherited}",
            f"resets {total.resets}, truncations {_counts(total.truncations)}, while down {total.standins}",
            f"nemesis: {_counts(self.acts)}",
            f"relay: {_counts(self.relayed)}",
            f"sessions that ended: {_counts(self.endings)}",
            "by lane: " + ", ".join(f"{lane} {tally.acknowledged:,}" for lane, tally in self.by_lane.items()),
            ", ".join(f"{kind} {total.wrong[kind]}" for kind in ("lost", "doubled", "reordered", "torn", "crossed"))
            + f", broken {total.wrong['broken']}, hung {total.wrong['hung']}",
            *(f"  {each.kind.value}, row {each.row}, {each.text}" for each in total.findings),
        ]
        return "\n".join(lines)


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items())) or "none"


def run(
    folder: Path,
    seed: int,
    steps: int,
    lanes: Sequence[str] = LANES,
    pace_s: float = 1.0,
    seconds: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
    first: Sequence[tuple[str, str]] = (),
) -> Outcome:
    """Let the nemesis of this seed loose for so many acknowledged steps, and seconds, at least.

    It begins with the acts, each on its lane, that are to come ``first``.
    """
    tasks = {lane: _task(seed + number, lane) for number, lane in enumerate(lanes)}
    with scene(folder, seed, tasks) as found:
        found.await_trainers()
        said_s = begun_s = time.monotonic()
        schedule = chain(((pace_s, act) for act in first), acts(seed, lanes, pace_s))
        for number, (pause_s, act) in enumerate(schedule):
            found.pass_time(time.monotonic() + pause_s)
            found.check()
            total = _total(found)
            enough = total.acknowledged >= steps and time.monotonic() >= begun_s + seconds and number >= len(first)
            if enough or total.wrong:
                break
            if time.monotonic() > said_s + REPORT_S:
                said_s = time.monotonic()
                say(f"{total.acknowledged:,} steps after {said_s - begun_s:.0f} s; {_counts(found.done)}")
            found.act(act)
            if number < len(first):
                found.pass_time(time.monotonic() + act.seconds)
        found.end()
        endings: Counter[str] = sum((trainer.endings for trainer in found.trainers.values()), Counter())
        tallies = {lane: trainer.tally for lane, trainer in found.trainers.items()}
        return Outcome(seed, time.monotonic() - begun_s, tallies, endings, found.done, found.relayed())


def _task(seed: int, lane: str) -> Task:
    """What a trainer on this lane does."""
    number = LANES.index(lane)
    shapes = (*SHAPES[2 * number :], *SHAPES[: 2 * number])
    options = {"restarts_max": RESTARTS_MAX, **OPTIONS[lane]}
    paces = {"pause_s": PAUSE_S.get(lane, 0.0), "poll_s": POLL_S.get(lane, 0.0)}
    return Task(seed, UNBOUNDED, shapes=shapes, mode=MODES[lane], options=options, parts=PARTS, **paces)


def _total(found: Scene) -> Tally:
    total = Tally()
    for trainer in found.trainers.values():
        total.add(trainer.tally)
    return total
