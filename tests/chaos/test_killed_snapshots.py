"""Snapshots are taken, restored and dropped at random, while all kinds of processes are killed: none is wrong or left.

A client follows the history of each row, whose observation is its hash. When processes are killed it may be told so,
and nothing else. When it or its hub is killed, the next one begins.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos.test_leaks import Holdings, settled
from hubs import ServedHub, serve, wait_until
from snapshot_sims import Histories

import envhub

ROWS, KEPT_MAX, STALLED_S = 3, 12, 60.0
WORKERS = ("envhub-worker", "envhub-snapshot")
KILLED, BEGUN_S = 0.12, 0.05
LIVES = 1000  # acts of one client; of one hub 2.4 times as many
GROWTH_MAX = 8 << 20


def play(address: str, seed: int, acts: Any) -> None:
    """Take, restore and drop at random for ever; tells how many acts are done, of which kinds."""
    chance = random.Random(seed)
    mode, lane = chance.choice(["NextStep", "SameStep"]), chance.choice(["auto", "wire"])
    options: dict[str, Any] = {"restarts_max": 100_000, "autoreset_mode": mode, "lane": lane}
    if mode == "SameStep":  # with the other one an env that has ended begins at its snapshot, and nothing says so
        options["on_crash"] = chance.choice(["truncate", "restore"])
    with closing(envhub.make_vec("living", ROWS, hub=address, snapshots=True, **options)) as envs:
        histories, kept = Histories(envs, seed), list[Any]()
        while True:
            what = chance.choices(["take", "restore", "drop", "step"], [3, 5, 2, 4])[0]
            rows = sorted(chance.sample(range(ROWS), chance.randint(1, ROWS)))
            snapshot = chance.choice(kept) if kept else None
            try:
                if what == "take" and len(kept) < KEPT_MAX:
                    kept.append(histories.take(rows))
                elif what == "restore" and snapshot is not None:
                    histories.restore(snapshot, rows, [chance.choice(snapshot.env_ids) for _ in rows])
                elif what == "drop" and snapshot is not None:
                    kept.remove(snapshot)
                    envs.drop(snapshot)
                else:
                    what = "step"
                    histories.step([chance.randrange(2) for _ in range(ROWS)])
            except envhub.errors.SnapshotLost as error:
                what = "lost"
                if "was not restored from" in str(error):  # one of them has ended since; the others have changed
                    histories.forget(rows)
                elif snapshot in kept:
                    kept.remove(snapshot)
            except envhub.errors.SnapshotRefused as error:
                assert any(text in str(error) for text in ("is being started again", "is to be reset first")), error
                what = "refused"
            except envhub.errors.RestartsExhausted:  # three of a row in turn were killed before they had their env
                acts.send(("over", histories.counts["compared"]))
                return
            acts.send((what, histories.counts["compared"]))


class Round:
    """One client after another, and one hub."""

    def __init__(self, hub: ServedHub, seed: int) -> None:
        self.hub, self.chance = hub, random.Random(seed)
        self.seen: set[int] = set()  # processes that ran at the last look

    def client(self, acts_max: int, done: Counter[str], kills: Counter[str]) -> None:
        """Have a client act so often, or until its hub is lost, while processes are killed."""
        ours, theirs = multiprocessing.Pipe()
        seed = self.chance.randrange(1 << 30)
        program = multiprocessing.get_context("spawn").Process(
            target=play, args=(self.chance.choice([self.hub.ipc, self.hub.tcp]), seed, theirs)
        )
        program.start()
        theirs.close()
        acts, compared = 0, 0
        try:
            while acts < acts_max:
                if not ours.poll(STALLED_S):
                    raise TimeoutError(f"nothing has happened for {STALLED_S:g} s, with seed {seed}")
                what, compared = ours.recv()
                done[what] += 1
                if what == "over":
                    return
                acts += what in ("take", "restore", "drop", "lost")
                if self.chance.random() < KILLED:
                    time.sleep(self.chance.uniform(0, BEGUN_S))  # by then it is somewhere in its next act
                    kills[self.kill_one()] += 1
        except EOFError:
            program.join(STALLED_S)
            raise AssertionError(f"the client ended with {program.exitcode}, with seed {seed}") from None
        finally:
            program.kill()
            program.join()
            done["compared"] += compared

    def kill_one(self) -> str:
        """Kill a worker, a snapshot, or one that has just begun, as in the middle of a restore."""
        found = {}
        for each in psutil.Process(self.hub.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[each.pid] = each, each.name()
        before, self.seen = self.seen, {*found}
        new = [each for each in found if each not in before]
        pids = new if new and self.chance.random() < 0.5 else [*found]
        chosen = [found[pid] for pid in pids if found[pid][1] in WORKERS]
        if not chosen:
            return "none"
        process, name = self.chance.choice(chosen)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        return f"new {name}" if pids is new else name


def rested(hub: ServedHub, folder: Path) -> Holdings:
    """What a hub without sessions holds, but for the threads that it keeps for what is slow."""
    return replace(settled(hub, folder, None), threads=0, rss=0)


def anonymous(pid: int) -> int:
    """The memory that is no file's: a process's part of files depends on what else has mapped them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(90, marks=pytest.mark.long),
        pytest.param(10_000, marks=[pytest.mark.chaos, pytest.mark.timeout(0)]),
    ],
)
def test_whatever_is_killed_no_snapshot_is_wrong_and_nothing_is_left(
    tmp_path: Path, request: pytest.FixtureRequest, count: int
) -> None:
    chance, done, kills = random.Random(request.config.getoption("--seed")), Counter[str](), Counter[str]()
    lives = min(LIVES, count // 2)
    acts = lambda: sum(done[each] for each in ("take", "restore", "drop", "lost"))  # noqa: E731
    while acts() < count:
        with serve(tmp_path, "living=snapshot_sims:Living", "--lease", "1") as hub:
            round_ = Round(hub, chance.randrange(1 << 30))
            round_.client(lives // 5, done, kills)  # what is allocated once and kept
            kills["client"] += 1
            before, anonymous_before = rested(hub, tmp_path), anonymous(hub.process.pid)
            for _ in range(2):
                round_.client(lives, done, kills)
                kills["client"] += 1
            # The memory of a session may be in use until the hub has collected what refers to it in cycles.
            wait_until(lambda: rested(hub, tmp_path) == before)  # noqa: B023
            after, grown = rested(hub, tmp_path), anonymous(hub.process.pid) - anonymous_before
            assert after == before and grown < GROWTH_MAX, (before, after, grown)
            round_.client(lives // 5, done, kills)
            below = [each.pid for each in psutil.Process(hub.process.pid).children(recursive=True)]
            hub.process.kill()
            kills["hub"] += 1
            assert wait_until(lambda: not any(map(psutil.pid_exists, below)))  # noqa: B023
    print(f"{acts()} acts: {dict(done)}; killed: {dict(kills)}; memory of the last hub {grown / 2**20:+.1f} MiB")
    assert kills["new envhub-worker"] and kills["envhub-snapshot"] and done["compared"] > count // 10
