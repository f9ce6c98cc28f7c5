"""Random programs on a private hub or over one to four hubs, of which the model must allow each result.

``python -m chaos.programs --row-steps 1000000``, in ``tests``. ``--one`` runs only the program of the seed that a
report names. ``--verbs 20`` has resets, calls, attributes and frames as often as steps, ``--hubs 1`` one hub only.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "support")]

from chaos.chaos_proxy import FAIR, ChaosProxy, Weather, proxy  # noqa: E402
from chaos.model import DISABLED, DOWN, LIVE, MODES, NEW, Outcome, Rows, Wrong  # noqa: E402
from chaos.model_env import CRASH, GO, HANG, KINDS, RAISE, RESET_RAISES, ModelEnv, heads  # noqa: E402
from envhub_client.private_hub.process import private_hub  # noqa: E402
from gymnasium.error import NoAsyncCallError  # noqa: E402
from hubs import wait_until, worker_processes  # noqa: E402
from several_hubs import SeveralHubs, several_hubs  # noqa: E402

import envhub  # noqa: E402

HUBS = 4
REQUESTS = 300  # of a program
ROWS = (4, 16, 64, 256, 1024)  # at most, of a program
PATIENCE_S = 120.0  # for one request; who waits longer hangs
LATE_S = 3.0  # by which a timeout may be missed on a machine with other work
GRACE_S = 8.0  # for the loss of a hub to be noticed that serves again
TIMEOUTS_S = (None, 0.0, 0.001, 0.05, 0.5)
LOST = (envhub.HubUnreachable, envhub.SessionLost)
OF_ENVS = (ArithmeticError, envhub.WorkerDied, envhub.EnvTimeout)
FAULTS = ("kill", "stop", "drain", "end")
CUTS = ("cut", "half_close", "truncate")  # which are mended without a loss
WEATHERS = {
    "hold": Weather(held=True),
    "lag": Weather(latency_s=0.01, jitter_s=0.05),
    "trickle": Weather(piece_bytes=1),
    "narrow": Weather(bytes_per_s=100_000),
}
REPORT_CHARS = 900


class Hung(Exception):
    """A request took longer than the patience."""


class Report:
    """What was counted."""

    def __init__(self) -> None:
        self.row_steps = self.row_calls = self.programs = self.hung = 0
        self.wrong: list[str] = []
        self.late: list[str] = []
        self.lanes, self.verbs, self.ends = Counter[str](), Counter[str](), Counter[str]()

    @property
    def text(self) -> str:
        counts = f"{len(self.wrong)} wrong, {self.hung} hung, {len(self.late)} late"
        rows = f"{self.row_steps:,} row-steps, {self.row_calls:,} of other requests"
        lines = [f"{rows}, {self.programs} programs, {counts}"]
        lines += [f"{name}: {dict(sorted(getattr(self, name).items()))}" for name in ("lanes", "verbs", "ends")]
        return "\n".join(lines)


class Fleet:
    """Hubs, a network before each, and the faults that befall them."""

    def __init__(self, hubs: SeveralHubs, ways: Sequence[ChaosProxy]) -> None:
        self.hubs, self.ways = hubs, ways
        self.over_s: dict[int, float] = {}  # when the fault of a hub was over
        self._faults: list[threading.Thread] = []

    def disturb(self, hub: int, fault: str, seconds: float) -> None:
        """Begin a fault of this hub, which comes in the middle of what is done next and lasts so long."""
        self.over_s[hub] = float("inf")
        self._faults.append(threading.Thread(target=self._disturb, args=(hub, fault, seconds)))
        self._faults[-1].start()

    def _disturb(self, hub: int, fault: str, seconds: float) -> None:
        time.sleep(seconds / 100)
        if fault == "stop":
            self.hubs.stop(hub)
            time.sleep(seconds * 3)
            self.hubs.resume(hub)
        elif fault in CUTS:
            getattr(self.ways[hub], fault)()
        elif fault in WEATHERS:
            self.ways[hub].weather(WEATHERS[fault])
            time.sleep(seconds * 3)
            self.ways[hub].weather(FAIR)
        elif fault == "end":  # by an administrator
            with envhub.connect(self.hubs.hubs[hub].ipc) as client:
                for session in client.sessions():
                    with contextlib.suppress(envhub.SessionLost):
                        client.end(session["session"])
        else:
            self.hubs.hubs[hub].stop(signal.SIGKILL if fault == "kill" else signal.SIGTERM, 60)
            time.sleep(seconds)
            self.hubs.start(hub)
        self.over_s[hub] = time.monotonic()

    def calm(self) -> None:
        """Wait until all hubs serve."""
        for thread in self._faults:
            thread.join()
        self._faults, self.over_s = [], {}


class Program:
    """One vector env, and what is done with it."""

    def __init__(
        self, seed: int, fleet: Fleet, report: Report, rows_max: int, hubs: int | None = None, verbs: float = 1
    ) -> None:
        self.seed, self.fleet, self.report, self.chance = seed, fleet, report, random.Random(seed)
        self.verbs, chance = verbs, self.chance
        hubs = chance.choice((0, 1, 1, 2, 3, 4)) if hubs is None else hubs
        self.count = chance.randint(max(1, hubs), chance.choice([each for each in ROWS if each <= rows_max]))
        self.mode, self.kind, self.by_env = chance.choice(MODES), chance.choice(KINDS), chance.random() < 0.2
        policies = {key: chance.choice(("truncate", "raise")) for key in ("on_crash", "on_timeout", "on_exception")}
        self.hangs, self.faulty = chance.random() < 0.05, chance.random() < 0.5
        self.copy, self.loss = (
            chance.random() < 0.5,
            chance.choice(("raise", "recreate", "redistribute")[: 2 + (hubs > 1)]),
        )
        self.hubs = chance.sample(range(HUBS), hubs)
        self.options: dict[str, Any] = {
            "autoreset_mode": self.mode,
            "info_mode": "by_env" if self.by_env else "batched",
            "copy": self.copy,
            "num_workers": chance.randint(max(1, hubs), min(8, self.count)),
            "lane": chance.choice(("auto", "auto", "wire")),
            "on_hub_loss": self.loss,
            "restarts_max": 10**6,
            "step_timeout": 3.0 if self.hangs else 60.0,
            **policies,
        }
        cuts = [0, *sorted(chance.sample(range(1, self.count), max(0, hubs - 1))), self.count]
        self.parts = {hub: range(*cuts[place : place + 2]) for place, hub in enumerate(self.hubs or [-1])}
        if hubs:
            served = [(fleet.hubs.hubs[hub], fleet.ways[hub].address) for hub in self.hubs]
            self.addresses = [chance.choice((hub.ipc, hub.ipc, hub.tcp, way)) for hub, way in served]
            split = {"split": [len(rows) for rows in self.parts.values()]} if hubs > 1 else {}
            self.options |= {"hub": self.addresses if hubs > 1 else self.addresses[0], **split}
        self.rows = Rows(self.kind, self.count, self.mode, policies)
        self.moved: set[int] = set()  # rows that may be on any hub
        self.held: deque[Any] = deque(maxlen=4 if self.copy else 2)
        self.sent: dict[int, tuple[int, int]] = {}  # rows under way, with their actions
        self.resetting: dict[int, tuple[int | None, int]] = {}  # rows of an ``async_reset``, with seeds and options
        self.trail = deque[str](maxlen=30)
        self.envs: Any = None

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self, requests: int) -> None:
        """Do so much, or end by an error that the model allows."""
        report, kwargs = self.report, [{"kind": self.kind, "row": row} for row in range(self.count)]
        report.programs += 1
        try:
            env = "model" if self.hubs else ModelEnv
            self.envs = self.timed("make_vec", envhub.make_vec, env, self.count, env_kwargs=kwargs, **self.options)
            self.rows.mates = [set(each) for each in self.timed("call", self.envs.call, "mates")]
            self.reset(range(self.count))
            for _ in range(requests):
                self.request()
            while self.sent or self.resetting:
                self.receive()
        except LOST as error:
            report.ends[type(error).__name__] += 1
            if not self.rows.lossy:
                self.found(f"{type(error).__name__}: {error}")
        except Exception as error:
            report.hung += isinstance(error, Hung)
            lines = [f"{Path(each.filename).name}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)]
            self.found(str(error) if isinstance(error, Wrong) else f"{error!r} at {' '.join(lines[-6:])}")
        finally:
            self.fleet.calm()
            if self.envs is not None:
                self.timed("close", self.envs.close, terminate=True)

    def found(self, text: str) -> None:
        """Report it, as short as it can be."""
        text = re.sub(r"State|Place|Outcome|\b\w+=(?=[^=])|replay='.*?'|traceback='.*?',", "", text)
        trail = " | ".join(self.trail)[-REPORT_CHARS:]
        lane = None if self.envs is None else self.envs.lane
        self.report.wrong.append(f"--seed {self.seed} --one: {text[:REPORT_CHARS]}\n  {lane} {self.options}\n  {trail}")
        print(self.report.wrong[-1], flush=True)

    def timed(self, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it, within the patience; and if it times out, in time."""

        def hung(*_: Any) -> None:
            raise Hung(verb)

        self.report.verbs[verb] += 1
        signal.signal(signal.SIGALRM, hung)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
        begun_s, timeout = time.monotonic(), kwargs.get("timeout")
        try:
            return call(*args, **kwargs)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            took_s = time.monotonic() - begun_s
            if timeout is not None and took_s > timeout + LATE_S:
                text = f"--seed {self.seed} --one: {verb}({timeout}) took {took_s:.1f} s, {[*self.trail][-4:]}"
                self.report.late.append(f"{text} {self.options}")
                print(self.report.late[-1], flush=True)

    def waited(self, verb: str, wait: Callable[..., Any]) -> Any:
        """Wait again and again, for any time each, until it is done."""
        until_s = time.monotonic() + PATIENCE_S
        while True:
            timeout = self.chance.choice(TIMEOUTS_S)
            try:
                return self.timed(verb, wait, timeout=timeout)
            except envhub.HubTimeout as error:
                if timeout is None or time.monotonic() > until_s:
                    raise Hung(f"{verb}: {error}") from error

    def request(self) -> None:
        """A random request; before it perhaps the end of a fault, or a new one."""
        chance = self.chance
        self.settle()
        if self.faulty and chance.random() < 0.006:
            self.fault()
        if self.sent or self.resetting:
            (self.send if self.sent and chance.random() < 0.4 else self.receive)()
            return
        ended = [row for row in range(self.count) if any(place.state.ended for place in self.rows.places[row])]
        if self.mode == DISABLED and ended:
            self.reset(ended)
            return
        verbs = {self.begin_reset: 1, self.call: 4, self.set_attr: 1, self.render: 1, self.probe: 1, self.reset: 3}
        weights = {self.step: 60, self.send: 30, **{verb: self.verbs * each for verb, each in verbs.items()}}
        weights |= {self.misuse: 1, self.move: 0.5 * (len(self.hubs) == 1 and not self.rows.lossy)}
        weights |= {self.signal_worker: 0.5 * self.faulty}
        chance.choices([*weights], [*weights.values()])[0]()

    # --- faults -------------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        """Let a hub be lost, or a part of its time."""
        (hub, rows), seconds = self.chance.choice([*self.parts.items()]), self.chance.random()
        if hub in self.fleet.over_s:
            return
        by_way = hub >= 0 and self.fleet.ways[hub].address in self.addresses
        fault = self.chance.choice((*FAULTS, *CUTS, *WEATHERS) if by_way else FAULTS)
        if fault not in CUTS:
            self.rows.lossy |= {*rows, *self.moved}
        if self.loss == "redistribute":
            self.moved |= {*rows}
            for row in rows:  # which worker has which of them then is not said
                self.rows.mates[row] = self.rows.mates[row] | {*rows}
        if hub >= 0:
            self.trail.append(f"{fault} hub {hub} of {rows}")
            self.fleet.disturb(hub, fault, seconds)
            return
        self.trail.append("kill the private hub")
        self.fleet.over_s[hub] = time.monotonic()
        threading.Timer(seconds / 100, psutil.Process(private_hub().pid).kill).start()

    def signal_worker(self) -> None:
        """Kill a worker in the middle of a step, or stop it for a moment."""
        hub, rows = self.chance.choice([*self.parts.items()])
        process = private_hub().pid if hub < 0 else self.fleet.hubs.hubs[hub].process.pid
        workers, seconds = worker_processes(process), self.chance.random() / 50
        if not workers:
            return
        worker = self.chance.choice(workers)

        def send() -> None:
            time.sleep(seconds)
            with contextlib.suppress(psutil.NoSuchProcess):
                if not kills:
                    worker.suspend()
                    time.sleep(10 * seconds)
                    worker.resume()
                else:
                    worker.kill()

        if kills := self.chance.random() < 0.7:
            for row in {*rows, *self.moved}:
                self.rows.dying.setdefault(row, set()).add("crash")
        self.trail.append(f"{'kill' if kills else 'stop'} a worker of {rows}")
        sending = threading.Thread(target=send)
        sending.start()
        self.step()
        sending.join()
        if kills:  # until its hub knows
            wait_until(lambda: not worker.is_running())

    def settle(self) -> None:
        """A hub that serves again, and whose rows all step, is lost no more."""
        for hub, rows in self.parts.items() if self.rows.lossy else ():
            live = all(place.kind == LIVE for row in rows for place in self.rows.places[row])
            if live and not self.sent and time.monotonic() > self.fleet.over_s.get(hub, float("inf")) + GRACE_S:
                self.rows.lossy -= {*rows}
                del self.fleet.over_s[hub]

    @contextlib.contextmanager
    def lossy(self) -> Iterator[list[BaseException]]:
        """A call may raise the loss of a hub, whose envs are made again; the list has the error then."""
        errors: list[BaseException] = []
        try:
            yield errors
        except LOST as error:
            if not self.rows.lossy or self.loss == "raise":
                raise
            errors.append(error)

    # --- steps and resets ---------------------------------------------------------------------------------------------

    def actions(self, rows: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Actions for these rows, of which some end processes."""
        commands, weights = (
            (GO, RAISE, CRASH, RESET_RAISES, HANG),
            (max(2000, 40 * self.count), 2, 1, 1, 0.3 * self.hangs),
        )
        chosen = self.chance.choices(commands, weights, k=len(rows))
        found = {row: (command, self.chance.getrandbits(20)) for row, command in zip(rows, chosen, strict=True)}
        for row, (command, _) in found.items():
            if command in (CRASH, HANG) and any(
                each.kind == LIVE and not each.state.ended for each in self.rows.possible(row)
            ):
                for mate in self.rows.mates[row] - {row}:
                    self.rows.dying.setdefault(mate, set()).add("crash" if command == CRASH else "timeout")
        unusual = {row: action for row, action in found.items() if action[0]}
        self.trail.append(f"{unusual} of {len(rows)}")
        return found

    def outcomes(self, actions: dict[int, tuple[int, int]]) -> dict[int, list[Outcome]]:
        rows = self.rows
        return {
            row: [each for at in rows.possible(row) for each in rows.stepped(row, at, *action)]
            for row, action in actions.items()
        }

    def died(self) -> None:
        """What could end processes is over; they may have ended after the results."""
        self.rows.places = [self.rows.possible(row) for row in range(self.count)]
        self.rows.dying = {}

    def step(self) -> None:
        actions = self.actions(range(self.count))
        options, array = self.outcomes(actions), np.array([*actions.values()], np.int64)
        self.trail.append("step")
        try:
            if self.chance.random() < 0.5:
                result = self.timed("step", self.envs.step, array)
            else:
                self.timed("step_async", self.envs.step_async, array)
                result = self.waited("step_wait", self.envs.step_wait)
        except OF_ENVS as error:
            self.raised(error, options)
        else:
            self.rows.batch(range(self.count), options, result, self.by_env)
            self.hold(result[0])
            self.took(self.count)
        self.died()

    def raised(self, error: Exception, options: dict[int, list[Outcome]], alone: bool = False) -> int:
        self.trail.append(f"{type(error).__name__}: {error}"[:60])
        self.held.append(None)
        return self.rows.raised(error, options, alone)

    def took(self, rows: int) -> None:
        self.report.row_steps += rows
        self.report.lanes[f"{self.envs.lane}, {len(self.hubs) or 'private'}"] += rows

    def hold(self, observations: Any) -> None:
        """See that what was returned before holds as long as it should."""
        self.held.append((observations, heads(self.kind, observations)))
        for kept, said in filter(None, self.held):
            changed = [pair for pair in zip(said, heads(self.kind, kept), strict=True) if pair[0] != pair[1]]
            if changed:
                raise Wrong(f"what was returned before has changed: {changed}")

    def reset_options(self, rows: Sequence[int]) -> tuple[dict[str, Any], dict[int, tuple[int | None, int]]]:
        """Arguments of a reset of these rows, and each one's seed and option; seeds are one number, or a list."""
        chance, first = self.chance, self.chance.getrandbits(30)
        several = [chance.choice((None, chance.getrandbits(30))) for _ in range(self.count)]
        seeds: Any = chance.choice((None, first, several))
        option = chance.choice((0, chance.randint(1, 99)))
        each = {row: seeds[row] if isinstance(seeds, list) else seeds and seeds + row for row in rows}
        for row, seed in each.items():
            self.rows.seeds[row] |= set() if seed is None else {seed}
        self.trail.append(f"reset of {[*rows]}, seed {seeds}"[:200])
        self.report.row_calls += len(rows)
        arguments = {"seed": seeds, "options": {"option": option} if option else None}
        return arguments, {row: (seed, option) for row, seed in each.items()}

    def reset_outcomes(self, told: dict[int, tuple[int | None, int]]) -> dict[int, list[Outcome]]:
        model = self.rows
        return {
            row: [each for at in model.possible(row) for each in model.reset(row, at, *how)]
            for row, how in told.items()
        }

    def reset(self, rows: Sequence[int] = ()) -> None:
        """Reset these rows, or any."""
        chance, everything = self.chance, range(self.count)
        rows = rows or (
            everything if chance.random() < 0.4 else sorted(chance.sample(everything, chance.randint(1, self.count)))
        )
        arguments, told = self.reset_options(rows)
        options = self.reset_outcomes(told)
        if len(rows) < self.count and chance.random() < 0.5:
            arguments["env_ids"] = [*rows]
        elif len(rows) < self.count:
            arguments["options"] = {**(arguments["options"] or {}), "reset_mask": np.isin(everything, rows)}
        try:
            if chance.random() < 0.5:
                result = self.timed("reset", self.envs.reset, **arguments)
            else:
                self.timed("reset_async", self.envs.reset_async, **arguments)
                result = self.waited("reset_wait", self.envs.reset_wait)
        except ArithmeticError as error:  # then all are to be reset
            before = [self.rows.possible(row) for row in everything]
            self.raised(error, options)
            self.rows.places = [each | self.rows.possible(row) for row, each in enumerate(before)]
            self.reset(everything)
            return
        self.rows.reset_batch(everything, options, result, self.by_env)
        self.died()
        self.hold(result[0])

    # --- parts --------------------------------------------------------------------------------------------------------

    def send(self) -> None:
        idle = [row for row in range(self.count) if row not in self.sent]
        if self.mode == DISABLED:
            idle = [row for row in idle if not any(place.state.ended for place in self.rows.places[row])]
        if not idle:
            return
        rows = self.chance.sample(idle, self.chance.randint(1, len(idle)))
        actions = self.actions(rows)
        self.held.append(None)
        self.trail.append(f"send {rows}"[:100])
        self.timed("send", self.envs.send, np.array([*actions.values()], np.int64), rows)
        self.sent |= actions

    def begin_reset(self) -> None:
        arguments, told = self.reset_options(range(self.count))
        self.held.append(None)
        self.timed("async_reset", self.envs.async_reset, **arguments)
        self.resetting = told

    def receive(self) -> None:
        chance, under_way = self.chance, {*self.sent, *self.resetting}
        least = chance.choice((None, 1, chance.randint(1, len(under_way))))
        timeout = chance.choice(TIMEOUTS_S)
        self.trail.append(f"recv({least}, {timeout})")
        options = self.reset_outcomes(self.resetting) if self.resetting else self.outcomes(self.sent)
        try:
            result = self.timed("recv", self.envs.recv, least, timeout=timeout)
        except envhub.HubTimeout as error:
            if timeout is None:
                raise Wrong(f"no timeout was given: {error}") from error
            return
        except OF_ENVS as error:
            row = self.raised(error, options, alone=True)
            if self.resetting:  # the others were reset, and that is not shown
                for other in under_way - {row}:
                    self.rows.unseen(other, options[other])
                self.resetting = {}
            self.sent.pop(row, None)
        else:
            rows = result[5].tolist()
            self.trail.append(f"-> {rows}"[:100])
            if rows != sorted({*rows}) or not {*rows} <= under_way or len(rows) < (least or len(under_way)):
                raise Wrong(f"recv({least}) returned {rows} of {sorted(under_way)}")
            if self.resetting:
                self.rows.reset_batch(rows, options, (result[0], result[4]), self.by_env)
            else:
                self.rows.batch(rows, options, result, self.by_env)
                self.took(len(rows))
            for row in rows:
                self.sent.pop(row, None)
                self.resetting.pop(row, None)
                self.rows.places[row] = self.rows.possible(row)
        if not self.sent and not self.resetting:
            self.died()

    # --- calls --------------------------------------------------------------------------------------------------------

    def some(self) -> list[int]:
        return self.chance.sample(range(self.count), self.chance.randint(1, self.count))

    def call(self) -> None:
        chance, token, rows = self.chance, self.chance.getrandbits(20), [*range(self.count)]
        some = chance.random() < 0.5
        if some:
            token, rows = (chance.choice((-1, -2)), self.some()[:1]) if chance.random() < 0.2 else (token, self.some())
        self.trail.append(f"call {token} of {rows}"[:100])
        self.report.row_calls += len(rows)
        with self.lossy() as losses:
            try:
                if some:
                    results = self.timed("call_some", self.envs.call_some, rows, "poke", token)
                elif chance.random() < 0.5:
                    results = self.timed("call", self.envs.call, "poke", token)
                else:
                    self.timed("call_async", self.envs.call_async, "poke", token)
                    results = self.waited("call_wait", self.envs.call_wait)
            except (KeyError, envhub.WorkerDied) as error:
                wanted = envhub.WorkerDied if token == -2 else KeyError
                index = getattr(error, "env_index", getattr(error.__cause__, "env_index", None))
                if token >= 0 or not isinstance(error, wanted) or index not in self.rows.mates[rows[0]]:
                    raise
                for row in self.rows.mates[rows[0]] if token == -2 else ():
                    before = self.rows.possible(row)
                    lost = {each for at in before for each in self.rows.lost(at, {"crash"})}
                    if row == rows[0]:
                        lost |= {each._replace(kind=DOWN) for each in lost}
                    elif row in self.moved:  # it may have another process now
                        lost |= before
                    self.rows.places[row] = lost
                return
            if token < 0:
                raise Wrong(f"a call with {token} returned {results}")
            self.rows.called(rows, results, token)
        if losses:
            for row in rows:
                self.rows.places[row] |= {at._replace(state=at.state.told(token)) for at in self.rows.places[row]}

    def set_attr(self) -> None:
        chance, rows = self.chance, self.some()
        values = [chance.randint(1, 1000)] * len(rows)
        if one := chance.random() < 0.5:
            values = [chance.randint(1, 1000) for _ in rows]
        self.trail.append(f"set_attr {dict(zip(rows, values, strict=True))}"[:100])
        self.report.row_calls += len(rows)
        for row, value in zip(rows, values, strict=True):
            self.rows.attrs[row] |= {value}
            self.rows.places[row] |= {at._replace(state=at.state._replace(attr=value)) for at in self.rows.places[row]}
        with self.lossy() as losses:
            self.timed("set_attr", self.envs.set_attr, "attr", values if one else values[0], rows)
        for row, value in zip(rows, values, strict=True) if not losses else ():
            self.rows.attrs[row] = {value}
            self.rows.places[row] = {at for at in self.rows.places[row] if at.state.attr == value}

    def probe(self) -> None:
        """Look at the envs without a change."""
        self.report.row_calls += self.count
        with self.lossy():
            self.rows.called(range(self.count), self.timed("get_attr", self.envs.get_attr, "head"))
            has = self.timed("has_attr", self.envs.has_attr, "attr") + self.timed("has_attr", self.envs.has_attr, "atr")
            if has != (True,) * self.count + (False,) * self.count:
                raise Wrong(f"has_attr: {has}")

    def render(self) -> None:
        rows = self.some()
        self.trail.append(f"render {rows}"[:100])
        self.report.row_calls += len(rows)
        with self.lossy():
            for row, frame in zip(rows, self.timed("render", self.envs.render, rows), strict=True):
                places = self.rows.possible(row)
                known = {at.kind for at in places} == {LIVE} and all(at.state.life != NEW for at in places)
                if known and not any((frame == at.state.frame()).all() for at in places):
                    raise Wrong(f"the frame of row {row} is not that of {places}")
                # A life that was not reset yet may be, to be drawn.
                self.rows.places[row] |= {at._replace(state=at.state.reset(-2)) for at in places if at.kind != LIVE}

    def misuse(self) -> None:
        """What is refused changes nothing."""
        envs, wide = self.envs, np.zeros((self.count + 1, 2), np.int64)
        refused: dict[Callable[[], Any], Any] = {
            partial(envs.step_wait, 0): NoAsyncCallError,
            partial(envs.recv, 1, 0): NoAsyncCallError,
            partial(envs.step, wide): ValueError,
            partial(envs.send, wide[:1], [self.count]): ValueError,
            partial(envs.reset, seed=[1] * (self.count + 1)): ValueError,
            partial(envs.call, "step"): ValueError,
            partial(envs.call, "no_such"): AttributeError,
        }
        for call, error in refused.items():
            with self.lossy() as losses, contextlib.suppress(error):
                self.timed("refused", call)
                raise Wrong(f"{call} was not refused")
            if losses:
                break

    def move(self) -> None:
        """Detach and attach, or take over in the middle of a step, as another process would."""
        chance, old = self.chance, self.envs
        options = {"copy": self.copy, "lane": chance.choice(("auto", "wire"))}
        with envhub.connect(self.options["hub"], PATIENCE_S) as client:
            if chance.random() < 0.5:
                self.trail.append("detach")
                self.envs = self.timed("attach", client.attach, self.timed("detach", old.detach), **options)
            else:
                self.trail.append("take over")
                actions = {row: (GO, chance.getrandbits(20)) for row in range(self.count)}
                outcomes = self.outcomes(actions)
                self.timed("step_async", old.step_async, np.array([*actions.values()], np.int64))
                self.envs = self.timed("take over", client.attach, old.token, **options)
                for row, each in outcomes.items():
                    self.rows.unseen(row, each)
                with contextlib.suppress(envhub.SessionLost, *OF_ENVS):  # the result may have come before
                    result = old.step_wait()
                    if self.loss == "raise":  # else its envs may have been made again, in a session of its own
                        self.rows.batch(range(self.count), outcomes, result, self.by_env)
                with contextlib.suppress(envhub.SessionLost):
                    if self.loss == "raise":  # else it goes on in a session of its own
                        old.step(np.zeros((self.count, 2), np.int64))
                        raise Wrong("a session that was taken over goes on")
                old.close(terminate=True)
        self.held.clear()
        self.loss, self.by_env = "raise", False  # which are options of ``make_vec``


def run(
    folder: Path, seed: int, row_steps: int, requests: int = REQUESTS, rows_max: int = ROWS[-1], **weights: Any
) -> Report:
    """Programs, from this seed on, until there are so many row-steps."""
    report, said_s = Report(), time.monotonic()
    logging.getLogger("envhub").setLevel(logging.CRITICAL)
    with contextlib.ExitStack() as stack:
        offered = ("model=chaos.model_env:ModelEnv", "--lease", "20")
        hubs = stack.enter_context(several_hubs(folder, HUBS, *offered, cwd=TESTS))
        fleet = Fleet(hubs, [stack.enter_context(proxy(hub.tcp, seed)) for hub in hubs.hubs])
        while report.row_steps < row_steps:
            Program(seed + report.programs, fleet, report, rows_max, **weights).run(requests)
            if time.monotonic() > said_s + 30:
                said_s = time.monotonic()
                print(report.text.splitlines()[0], flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m chaos.programs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--row-steps", type=int, default=100_000)
    parser.add_argument("--one", action="store_true", help="only the program of this seed")
    parser.add_argument("--hubs", type=int, help="of every program; 0 is a private hub")
    parser.add_argument("--verbs", type=float, default=1, help="weight of all requests but steps")
    told = parser.parse_args()
    weights = {"hubs": told.hubs, "verbs": told.verbs}
    with tempfile.TemporaryDirectory(prefix="envhub-model-") as folder:
        report = run(Path(folder), told.seed, 1 if told.one else told.row_steps, **weights)
    print(report.text)
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
