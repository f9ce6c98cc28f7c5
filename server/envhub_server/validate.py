"""``envhub serve --check`` and ``envhub validate``: envs are made and tried by a hub's workers, without a hub.

Each env has a worker of its own, of the env's interpreter, with a time limit; as many run as there are CPUs.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envhub.errors import raised_text, shortened
from envhub.process import prepare_hub_process
from envhub.protocol.messages import Failure
from envhub_server import log
from envhub_server.catalog.listing import LISTING, Listing
from envhub_server.catalog.registry import Recipe, is_factory
from envhub_server.config import HubConfig, memory_available_bytes, usable_cpus
from envhub_server.doctor import Judgement, judged
from envhub_server.ipc import control
from envhub_server.loop import Loop
from envhub_server.network.key_folder import KeyFolder
from envhub_server.processes.interpreter import clean_environment
from envhub_server.processes.supervisor import Supervisor
from envhub_server.processes.worker_handle import Events, ExitCause, WorkerExited, WorkerHandle, WorkerMessage
from envhub_server.processes.worker_output import OutputStream
from envhub_server.serve import checked, read_configuration
from envhub_server.session.building import count_workers
from envhub_server.session.launcher import DEVICE_VARIABLES, Machine

TRIALS = 0  # in place of a session's number, in events of workers that try envs
STACKS_S = 0.5  # for a worker to write its stacks, before it is killed
WHY_CHARS_MAX = 500
ENVS = 64  # for which a number of workers is advised
WAITS, WAITS_MS = 1.5, 0.5  # times of its CPU time, and ms, from which on a step waits for something
MAKING, CORRECT = "its making", "; correct the env, or what its table says"
_NEEDS_ARGUMENTS = re.compile(r"missing \d+ required (positional|keyword-only) argument")


@dataclass
class _Trial:
    name: str
    worker: WorkerHandle
    until_s: float
    at: str = MAKING
    late: bool = False
    failure: Failure | None = None
    facts: dict[str, Any] | None = None
    cause: ExitCause | None = None  # of the worker's end

    @property
    def why(self) -> str:
        """The reason why the env is not what it should be, in one line; empty if it is."""
        if self.facts is not None or self.cause is None:
            return ""
        # The innermost call is the first of a stack that a process writes, and the last of a traceback.
        tail, failure = self.cause.log_tail, self.failure
        at = re.search(r'File "(.+)", line (\d+) in (.+)', tail)
        executed = f"; it executed {at[3]} ({at[1]}, line {at[2]})" if at else ""
        if self.late:
            text = f"it was not done in time{executed}; correct that, or allow it more time"
        elif failure is not None:
            frames = re.findall(r'File "(/.+)", line (\d+)', failure.traceback)
            raised = raised_text(failure.type, failure.message)
            text = f"{raised} ({frames[-1][0]}, line {frames[-1][1]})" if frames else raised
            text += "" if "; " in raised else CORRECT
        else:
            printed = "".join(f", and printed last: {line}" for line in tail.strip().splitlines()[-1:] if not at)
            text = f"its process {self.cause.how}{executed}{printed}{CORRECT}"
        return self.cause.unready or shortened(" ".join(f"in {self.at}: {text}".split()), WHY_CHARS_MAX)


class Trials:
    """The workers that try the envs of one configuration."""

    def __init__(self, config: HubConfig, limit_s: float) -> None:
        """Make none yet; each env has ``limit_s`` seconds."""
        log.configure("critical")  # what is wrong is returned
        prepare_hub_process()
        self._config, self._limit_s, self._loop, self._events = config, limit_s, Loop(), Events()
        self._supervisor = Supervisor(self._loop, self._events, clean_environment(os.environ, config.worker_env))
        for stream in self._supervisor.streams:
            stream.close()
        # All that envs print goes to stderr: stdout is for the results.
        self._supervisor.streams = OutputStream(self._loop, 2, False), OutputStream(self._loop, 2, False)
        self._running: dict[int, _Trial] = {}
        self.listing = Listing(self._supervisor, config.registry())

    def close(self) -> None:
        for trial in self._running.values():
            trial.worker.kill()
        self._supervisor.close()

    def list(self) -> None:
        """Find what is on offer, and why some of it cannot be made."""
        self.listing.start()
        until_s = time.monotonic() + self._limit_s
        while not self.listing.done and time.monotonic() < until_s:
            self._wait(until_s)
        for now_s in (-math.inf, until_s):  # what still starts
            self.listing.look(now_s)

    def run(self, wanted: Sequence[tuple[str, Recipe]], thorough: bool = False) -> Iterator[_Trial]:
        """Try each of these envs, and yield it when its worker has ended."""
        waiting = deque(enumerate(wanted))
        while waiting or self._running:
            while waiting and len(self._running) < usable_cpus(self._config.cpus):
                number, (name, recipe) = waiting.popleft()
                worker = self._started(number, recipe, thorough)
                self._running[number] = _Trial(name, worker, time.monotonic() + self._limit_s)
            self._wait(min(trial.until_s for trial in self._running.values()))
            for number, trial in [*self._running.items()]:
                if trial.cause is not None:
                    yield self._running.pop(number)
                elif time.monotonic() >= trial.until_s:
                    (trial.worker.kill if trial.late else trial.worker.dump_stacks)()
                    trial.late, trial.until_s = True, time.monotonic() + STACKS_S

    def _started(self, number: int, recipe: Recipe, thorough: bool) -> WorkerHandle:
        settings = recipe.settings
        gpus = settings.hosting(self._config.hosting).gpus
        build = replace(
            control.Build(0, [0], recipe.name, b"", b"", recipe.entry, [*recipe.modules], "NextStep", False),
            memory_bytes_max=self._config.worker_memory,
            variables=dict.fromkeys(DEVICE_VARIABLES, str(gpus[number % len(gpus)])) if gpus else {},
            batch_workers=int(settings.vector),
            setups=[*filter(None, [settings.worker_setup])],
        )
        (worker,) = self._supervisor.start(TRIALS, [number], settings.interpreter)
        worker.send(control.Try(build, thorough))
        return worker

    def _wait(self, until_s: float) -> None:
        poller, schedule = self._loop.poller, self._loop.schedule
        poller.handle(poller.wait(max(0.0, min(until_s, schedule.wake_s) - time.monotonic())))
        schedule.call_expired(time.monotonic())
        while self._events:
            session, event = self._events.popleft()
            if session == LISTING:
                self.listing.handle(event)
            elif (trial := self._running.get(event.process)) is not None:
                match event:
                    case WorkerMessage(message=control.Trying(what)):
                        trial.at = what
                    case WorkerMessage(message=control.RowFailed(failure)):
                        trial.failure = failure
                    case WorkerMessage(message=control.Tried(facts)):
                        trial.facts = facts
                    case WorkerExited(cause=cause):
                        trial.cause = cause


def check(config: HubConfig, limit_s: float) -> Iterator[Judgement]:
    """Make, reset and step every env once; yield a line for each, in the order in which they end."""
    try:
        config = checked(config)
        if config.keys is not None:
            KeyFolder(config.keys).load()
    except ValueError as error:
        yield Judgement("configuration", "wrong", str(error))
        return
    with contextlib.closing(Trials(config, limit_s)) as trials:
        trials.list()
        unready, registry = {**trials.listing.starting, **trials.listing.unready}, config.registry()
        yield from (Judgement(name, "wrong", why) for name, why in unready.items())
        recipes = {name: registry.find(name) for name in trials.listing.names or () if name not in unready}
        for trial in trials.run([(name, recipe) for name, recipe in recipes.items() if recipe is not None]):
            failure = trial.failure
            if trial.at == MAKING and failure is not None and _NEEDS_ARGUMENTS.search(failure.message):
                text = f"it takes arguments of its clients, and was not tried: {failure.message}"
                yield Judgement(trial.name, "note", text)
            else:
                yield judged(trial.name, trial.why, "made, reset and stepped", "wrong")


def validate(env: str, limit_s: float, file: Path | None) -> tuple[list[Judgement], dict[str, Any]]:
    """Find what an env does that it should not, and what it costs: an id, ``module:function``, or a name of a file.

    Raises:
        ValueError: there is no such env, or the file cannot be used.
    """
    is_named = file is not None or not is_factory(env)
    config = read_configuration([] if file else [env if is_named else f"env={env}"], None, file).config
    recipe = config.registry().find(env if is_named else "env")
    if recipe is None:
        raise ValueError(f"{env!r} is not on offer")
    with contextlib.closing(Trials(config, limit_s)) as trials:
        (trial,) = trials.run([(env, recipe)], thorough=True)
    facts, lines = trial.facts or {}, [judged("makes, resets and steps", trial.why, "done", "wrong")]
    return (lines + lines_of(facts, usable_cpus(), memory_available_bytes()) if facts else lines), facts


def lines_of(facts: Mapping[str, Any], cpus: int, memory_bytes: int) -> list[Judgement]:
    """The lines that say what these facts of ``worker.trial`` mean on a machine with these CPUs and this memory."""
    refused, differs, error = facts["refused"], facts["differs"], facts["second_error"]
    runs = f"two runs of {facts['steps']} steps with the same seed and actions"
    unlike = f"{runs} differ in result {differs}: draw from self.np_random, which reset(seed=...) seeds"
    times = facts["step_ms"] / max(facts["cpu_ms"], 1e-6)
    ratio, waits = f"a step takes {times:.1f} times its CPU time", times >= WAITS and facts["step_ms"] >= WAITS_MS
    odd = f"{ratio}: it waits, as for another process or a sleep" if waits else ""
    if times <= 1 / WAITS:
        odd = f"{ratio}: it computes in several threads, which delay other workers; set OMP_NUM_THREADS=1 or the like"
    first, further = (f"{facts[name] / 1e6:.1f} MB" for name in ("memory_bytes", "further_bytes"))
    own = f"it changes {' and '.join(facts['shared'])}, which all envs of a process have" if facts["shared"] else ""
    own = f"a second env cannot be made in a process ({error})" if error else own
    may_share = "yes, its package is known" if facts["may_share"] else "it seems so; shared_process=True says it"
    uncopied = "; ".join(facts["not_copied"])
    left = f"left after close: {', '.join(facts['left'])}; end them in close" if facts["left"] else ""
    built = control.FirstBuilt(facts["may_share"], facts["memory_bytes"], facts["cheap"])
    machine = Machine((), cpus, memory_bytes=memory_bytes)
    count = count_workers(ENVS, [built], machine, not (own or facts["may_share"]))
    workers, reason = count.workers, count.reason
    if waits and workers == cpus:
        workers, reason = min(ENVS, math.ceil(cpus * times)), "more than CPUs, since a step waits"
    return [
        judged("Gymnasium's checker", refused and f"{refused}: correct the env", "passed", "wrong"),
        *(Judgement("Gymnasium's remark", "note", each) for each in facts["remarks"]),
        judged("determinism", "" if differs is None else unlike, f"{runs} are equal", "wrong"),
        Judgement("cost", "ok", "make {made_s:.1f} s, reset {reset_ms:.3g} ms, step {step_ms:.3g} ms".format(**facts)),
        judged("wall over CPU", odd, ratio),
        Judgement("memory", "ok", f"{first} for an env with its imports, {further} for another one in its process"),
        judged("threads", left, "{threads} threads, {processes} processes, none after close".format(**facts)),
        judged("snapshots", uncopied and f"none, because of {uncopied}", "allowed"),
        judged("may share a process", own and f"no: {own}; say one_per_process", may_share),
        Judgement("workers", "ok", f"num_workers={workers} for {ENVS} envs on {cpus} CPUs: {reason}"),
    ]
