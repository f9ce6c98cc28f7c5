"""A trainer over several hubs of which one after the other is disturbed, and what that costs the rows of the others.

The first hub is behind a relay, which has a key of its own and can break the protocol, the second behind a proxy.
"""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from chaos.chaos_proxy import FAIR, ChaosProxy, Weather, proxy
from chaos.checker import Batch, Checker
from chaos.relay import Relay, relay
from chaos.trainer import Task, Trainer
from envhub_client.connection.connection import Connection
from envhub_server.network.access import KEYS_S
from envhub_server.network.key_folder import KeyFolder
from hubs import wait_until
from new_keys import address_of, admitted
from several_hubs import SeveralHubs, several_hubs

from envhub.transport.keys import keys_of

TESTS = Path(__file__).parent.parent
NAMES = ("a", "b", "c", "d")
RELAYED, PROXIED = 0, 1  # the others by their sockets, in shared memory
ROWS_EACH = 2
SILENCE_S = 2.5  # the least for which a hub is silent before it counts as lost
SLACK_S = 4.0  # of a machine with other work
AGAIN_S = 60.0  # for all rows to step, once all hubs serve
FAULTS = ("kill", "stop", "hold", "drain", "cut", "end", "breach", "lower")
OF_ONE = {"hold": PROXIED, "cut": PROXIED, "breach": RELAYED, "lower": RELAYED}  # faults of this hub only


class Truncation(NamedTuple):
    """A truncated row: when, and the name of the hub that was lost."""

    at_s: float
    row: int
    hub: str | None


class Steps(Checker):
    """A checker that also keeps the times of steps.

    Attributes:
        truncations: all truncations by a failure.
        slowest_s: the longest time between two steps.
        all_step_s: when all rows stepped, last.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.truncations: list[Truncation] = []
        self.slowest_s = 0.0
        self.all_step_s = self._last_s = time.monotonic()

    def step(self, numbers: Sequence[int], batch: Batch) -> None:
        """A step with the actions ``[row, numbers[row]]`` returned this."""
        super().step(numbers, batch)
        now_s = time.monotonic()
        self.slowest_s, self._last_s = max(self.slowest_s, now_s - self._last_s), now_s
        failures = [*enumerate(batch.infos.get("env_failure", ()))]
        lost = [Truncation(now_s, row, failure.hub) for row, failure in failures if failure is not None]
        self.truncations += lost
        if not lost:
            self.all_step_s = now_s


@dataclass
class Disturbed:
    """The times at which hubs were disturbed, by name; an end of None is to come."""

    times: dict[str, list[list[float | None]]] = field(default_factory=lambda: {name: [] for name in NAMES})

    def begin(self, hub: int) -> None:
        self.times[NAMES[hub]].append([time.monotonic(), None])

    def end(self, hub: int) -> None:
        self.times[NAMES[hub]][-1][1] = time.monotonic()

    def explains(self, truncation: Truncation) -> bool:
        """True if the hub was disturbed then, or its rows had not been made again."""
        return any(
            begin is not None and begin <= truncation.at_s <= (end or truncation.at_s) + AGAIN_S
            for begin, end in self.times.get(truncation.hub or "", ())
        )


class Outcome(NamedTuple):
    """What a run showed, for people in ``text``."""

    trainer: Trainer
    steps: Steps
    unexplained: list[Truncation]
    faults: Counter[str]
    again_s: list[float]
    connections_left: int

    @property
    def text(self) -> str:
        tally, again = self.steps.tally, sorted(self.again_s)
        lines = [
            f"{tally.acknowledged:,} steps in {tally.batches:,} batches, {len(self.steps.truncations)} truncations",
            f"faults: {dict(self.faults)}; slowest step {self.steps.slowest_s:.2f} s",
            f"all rows stepped again after {again[0]:.1f} to {again[-1]:.1f} s, median {again[len(again) // 2]:.1f} s",
            f"sessions that ended: {dict(self.trainer.endings)}; wrong: {dict(tally.wrong)}",
            *(f"  {each.kind.value}, row {each.row}, {each.text}" for each in tally.findings),
        ]
        return "\n".join(lines)


class Nemesis:
    """Disturbs hubs."""

    def __init__(
        self, hubs: SeveralHubs, between: ChaosProxy, relayed: Relay, right: Path, chance: random.Random
    ) -> None:
        """Disturb these hubs, the proxy and the relay; ``right`` is the file of the relay's key."""
        self.done: Counter[str] = Counter()
        self.disturbed = Disturbed()
        self._hubs, self._between, self._relayed, self._right, self._chance = hubs, between, relayed, right, chance

    def act(self, fault: str) -> None:
        """Disturb a hub for some time by this fault."""
        hub = OF_ONE.get(fault, self._chance.randrange(len(self._hubs.hubs)))
        self.done[fault] += 1
        self.disturbed.begin(hub)
        try:
            getattr(self, f"_{fault}")(hub, 4.0 * self._chance.random())
        finally:
            self.disturbed.end(hub)

    def _kill(self, hub: int, seconds: float) -> None:
        self._hubs.kill(hub)
        time.sleep(seconds / 2)
        self._hubs.start(hub)

    def _drain(self, hub: int, seconds: float) -> None:
        self._hubs.hubs[hub].stop(signal.SIGTERM, 30)
        time.sleep(seconds / 2)
        self._hubs.start(hub)

    def _stop(self, hub: int, seconds: float) -> None:
        self._hubs.stop(hub)
        time.sleep(SILENCE_S + seconds - 1)
        self._hubs.resume(hub)

    def _hold(self, hub: int, seconds: float) -> None:
        self._between.weather(Weather(held=True))
        time.sleep(SILENCE_S + seconds - 1)
        self._between.weather(FAIR)

    def _cut(self, hub: int, seconds: float) -> None:
        self._between.cut()

    def _end(self, hub: int, seconds: float) -> None:
        self._hubs.end_sessions(hub)

    def _breach(self, hub: int, seconds: float) -> None:
        self._relayed.cuts = True
        wait_until(lambda: not self._relayed.cuts, seconds)  # where that hub has rows
        self._relayed.cuts = False

    def _lower(self, hub: int, seconds: float) -> None:
        right = self._right.read_text()
        self._right.write_text(right.replace('may = "use"', 'may = "observe"'))
        time.sleep(KEYS_S + seconds / 2)
        self._right.write_text(right)


@contextlib.contextmanager
def training(trainer: Trainer) -> Iterator[threading.Thread]:
    """Have it train, in a thread, until the block ends."""
    thread = threading.Thread(target=trainer.run)
    thread.start()
    try:
        yield thread
    finally:
        trainer.stopped = True
        thread.join(AGAIN_S)


def run(
    folder: Path, seed: int, faults: Sequence[str], policy: str, mode: str, restart_wait: float, count: int
) -> Outcome:
    """Train over so many hubs by several lanes while these faults come, each when all rows step again, or before."""
    chance = random.Random(seed)
    keys = KeyFolder(folder / "keys")
    keys.make_secret()
    relays, own = (admitted(keys, name) for name in ("relay", "trainer"))
    offered = ("chain=chaos.chain_env:ChainEnv", "--lease", "10", "--keys", str(keys.path))
    with (
        several_hubs(folder, count, *offered, names=NAMES[:count], cwd=TESTS) as hubs,
        relay(hubs.hubs[RELAYED].tcp, seed, keys_of(relays)) as relayed,
        proxy(hubs.hubs[PROXIED].tcp) as between,
    ):
        split, rows = [ROWS_EACH] * count, ROWS_EACH * count
        options = {"on_hub_loss": policy, "restart_wait": restart_wait, "split": split, "restarts_max": 10**6}
        others = [hub.ipc for hub in hubs.hubs[2:]]
        addresses: Any = [relayed.address, address_of(own, between.address), *others]
        task = Task(seed, 1 << 60, addresses, rows, rows, options=options, mode=mode, parts=0.2, pause_s=0.005)
        hubs.await_no_sessions()
        trainer = Trainer(task)
        trainer.checker = steps = Steps(rows, mode, task.length)
        nemesis, again_s = Nemesis(hubs, between, relayed, keys.path / "clients/relay.toml", chance), []
        with training(trainer) as thread:
            assert wait_until(lambda: steps.tally.batches > 10, AGAIN_S), trainer.endings
            for fault in faults:
                nemesis.act(fault)
                over_s = time.monotonic()
                if chance.random() < 0.25:  # the next one comes before the rows are made again
                    continue
                assert wait_until(lambda: steps.all_step_s > over_s or not thread.is_alive(), AGAIN_S)  # noqa: B023
                again_s.append(max(0.0, time.monotonic() - over_s))
                if not thread.is_alive():
                    break
        assert not thread.is_alive()
        hubs.await_no_sessions(15)
        wait_until(lambda: not _open_connections(), 10)
        left = _open_connections()
    unexplained = [each for each in steps.truncations if not nemesis.disturbed.explains(each)]
    return Outcome(trainer, steps, unexplained, nemesis.done, again_s, left)


def _open_connections() -> int:
    """Number of connections of this process that are not closed; descriptors are also those of the proxy."""
    return sum(type(each) is Connection and not each.in_use.closed for each in gc.get_objects())
