"""Whoever comes and goes, and whoever dies: afterwards the hub holds what it held before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from chaos.trainer import Trainer
from hubs import ServedHub, serve, wait_until

import envhub

TESTS = Path(__file__).parent.parent
KILLED = 10  # workers at a time
REST_S = 1.0
WARM_UP = 20  # what is allocated once and kept
RSS_GROWTH_MAX = 4 << 20  # two are allowed for a thousand; an allocator does as it likes


@dataclass(frozen=True)
class Holdings:
    """What a hub holds."""

    descriptors: int
    threads: int
    processes: int
    files: int
    arenas: int
    rss: int

    @classmethod
    def of(cls, hub: ServedHub, folder: Path) -> Holdings:
        process = psutil.Process(hub.process.pid)
        return cls(
            process.num_fds(),
            process.num_threads(),
            len(process.children(recursive=True)),
            len([path for path in folder.iterdir() if path.suffix != ".log"]),
            Path(f"/proc/{process.pid}/maps").read_text().count("memfd:"),
            process.memory_info().rss,
        )

    @property
    def counted(self) -> tuple[int, ...]:
        """All but the memory, which is never quite the same."""
        return self.descriptors, self.threads, self.processes, self.files, self.arenas


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ServedHub]:
    """A hub of the test's own, which knows no other sessions."""
    with serve(tmp_path, "chain=chaos.chain_env:ChainEnv", cwd=TESTS) as served:
        yield served


def make_and_close(hub: ServedHub, count: int) -> None:
    """Sessions on both lanes in turn; some are closed at once, some in the middle of a step."""
    for number in range(count):
        address = hub.ipc if number % 2 else hub.tcp
        envs = envhub.make_vec("chain", 2, hub=address, num_workers=2, elements=1000)
        envs.reset()
        if number % 3 == 0:
            envs.step_async([[0, number], [1, number]])
        envs.close(terminate=number % 5 == 0)


def kill_workers(hub: ServedHub, count: int) -> None:
    """Worker after worker, each once its session has been stepped again."""
    killed = 0
    trainer = Trainer(1, hub.ipc, rows=KILLED, workers=KILLED, restarts_max=100_000)
    trainer.start()
    try:
        while killed < count and trainer.is_alive():
            seen = trainer.tally.acknowledged
            for worker in hub.workers():
                killed += 1
                worker.kill()
            # Who has served for a second is started again at once.
            assert wait_until(lambda: len(hub.workers()) == KILLED and trainer.tally.acknowledged > seen)  # noqa: B023
            time.sleep(1.1)
    finally:
        trainer.stopped.set()
        trainer.join(60)
    assert killed >= count and not trainer.tally.wrong, trainer.tally


def settled(hub: ServedHub, folder: Path, wanted: tuple[int, ...] | None) -> Holdings:
    """What it holds once it has come to rest: for a while the same, or what is wanted."""

    def rests() -> bool:
        before = Holdings.of(hub, folder).counted if wanted is None else wanted
        time.sleep(REST_S if wanted is None else 0.0)
        return not hub.workers() and Holdings.of(hub, folder).counted == before

    wait_until(rests)
    return Holdings.of(hub, folder)


@pytest.mark.filterwarnings("ignore:.*while waiting for a pending call")
@pytest.mark.parametrize(
    ("act", "count"),
    [
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((make_and_close, 40), (kill_workers, 20))),
        *(
            pytest.param(each, 1000, marks=[pytest.mark.chaos, pytest.mark.timeout(7200)])
            for each in (make_and_close, kill_workers)
        ),
    ],
)
def test_sessions_and_killed_workers_leave_nothing(
    hub: ServedHub, tmp_path: Path, act: Callable[[ServedHub, int], None], count: int
) -> None:
    act(hub, min(WARM_UP, count // 2))
    before = settled(hub, tmp_path, None)
    act(hub, count)
    after = settled(hub, tmp_path, before.counted)
    print(f"{act.__name__}, {count}: before {before}, after {after}, rss {(after.rss - before.rss) / 2**20:+.1f} MiB")
    assert after.counted == before.counted
    assert after.rss - before.rss <= RSS_GROWTH_MAX
