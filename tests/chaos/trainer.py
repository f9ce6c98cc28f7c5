"""One trainer under chaos: it steps chains, checks all that it sees, and says from time to time how far it is.

A process of its own, so that it can be killed: ``python -m chaos.trainer TASK``, a JSON map of the fields of ``Task``.
Each line it prints is a JSON map, of which the last one counts.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from chaos.chain_env import MISSTEP, ChainEnv
from chaos.checker import DISABLED, NEXT_STEP, Batch, Checker, Finding, Kind, Tally
from chaos.journal import Journal
from gymnasium.spaces import Box

import envhub

REPORT_S = 0.2
RETRY_S = 0.05
PART_WAITS_S = (0.0, 0.0, 0.002, 0.05)
UNSEEN_S = 1.0  # within which a hub sees that a client is back
RESET_EVERY = 700  # steps, on average: the trainer's own resets
MISSTEP_EVERY = 5000  # of one env, where that is not the end
# What a faultless hub may say while it or its workers are being killed; anything else is a finding.
ENDINGS = (envhub.HubUnreachable, envhub.SessionLost, envhub.RestartsExhausted, envhub.RequestRefused)


@dataclass(frozen=True)
class Task:
    """What a trainer is to do.

    Attributes:
        hub: the address; None for a private hub.
        steps: of single envs, all sessions together.
        shapes: rows, workers, whether envs are noted, and their elements, of its sessions in turn; if empty, ``rows``,
            ``workers`` and ``elements``.
        poll_s: how often it looks whether an answer is there; 0 to wait until it is woken.
        pause_s: on average between two steps, so that workers end while nothing is under way, too.
        lease_s: of the hub; within it no session that was answered may be lost. 0 if that is not known.
        patience_s: for any one answer; who waits longer hangs.
        options: of ``make_vec``.
        parts: the share of steps that it makes by ``send`` and ``recv``, of envs that are not noted.
        waits: whether it begins only when its standard input ends.
        journal: a file by which the next trainer takes over the session of one that was killed; none if empty.
    """

    seed: int
    steps: int
    hub: str | None = None
    rows: int = 4
    workers: int = 2
    shapes: tuple[tuple[int, int, bool, int], ...] = ()
    poll_s: float = 0.0
    pause_s: float = 0.0
    lease_s: float = 0.0
    mode: str = NEXT_STEP
    elements: int = 60
    length: int = 50
    patience_s: float = 60.0
    options: dict[str, Any] = field(default_factory=dict)
    journal: str = ""
    parts: float = 0.0
    waits: bool = False


class Hung(Exception):
    """An answer took longer than the trainer's patience."""


class Trainer:
    """Goes from session to session until its steps are made.

    Attributes:
        checker: of all that it saw.
        endings: by which errors its sessions ended.
    """

    def __init__(self, task: Task, report: Callable[[Trainer], None] = lambda trainer: None) -> None:
        self.task = task
        shapes = task.shapes or [(task.rows, task.workers, False, task.elements)]
        self._shapes = itertools.cycle(shapes)
        self.checker = Checker(shapes[0][0], task.mode, task.length)
        self._answered_s = -math.inf  # when the last request was made that got an answer
        self._back_s = -math.inf  # when it last went on after a pause that was longer than the lease, or nearly so
        self.endings: Counter[str] = Counter()
        self.stopped = False
        self._chance = random.Random(task.seed)
        self._report = report
        self._reported_s = 0.0
        self._journal = Journal(Path(task.journal)) if task.journal else None
        self._missteps = task.options.get("on_exception") == "truncate"

    @property
    def done(self) -> bool:
        """Whether it has nothing left to do."""
        return self.stopped or self.checker.tally.acknowledged >= self.task.steps

    def run(self) -> None:
        """Train to the end; what was wrong is in the checker's tally."""
        try:
            while not self.done:
                self._session()
        except Hung as error:
            self.checker.hung(str(error))
        except Exception as error:
            self.checker.broke(f"{type(error).__name__}: {error}")

    def _session(self) -> None:
        envs = self._inherit()
        try:
            if envs is None:
                envs = self._make()
                self.checker.session(envs.num_envs)
                self._reset(envs)
            while not self.done:
                self._step(envs)
                if self._chance.random() < 1 / RESET_EVERY:
                    self._reset(envs)
            envs.close()
        except ENDINGS as error:
            self.endings[type(error).__name__] += 1
            self._check_lease(error, "" if envs is None else envs.lane)
        finally:
            if envs is not None:
                envs.close(terminate=True)

    def _check_lease(self, error: Exception, lane: str) -> None:
        """See that the hub has not ended a session whose client it has just answered, unless another one has it.

        Of a step on the shared lane the hub does not hear: that its client is back it sees when it looks.
        """
        now_s = time.monotonic()
        lost_s = now_s - self._answered_s
        unseen = lane == "shared" and now_s - self._back_s < UNSEEN_S
        if type(error) is envhub.SessionLost and not self.stopped and not unseen and lost_s < self.task.lease_s:
            self.checker.broke(f"the session was lost {lost_s:.2f} s after a request that was answered: {error}")

    def _inherit(self) -> Any:
        """The session of a trainer that was killed, if there is one and the hub still has it."""
        if self._journal is None or self.checker.tally.batches or self.checker.tally.inherited:
            return None
        entry = self._journal.read()
        if entry is None:
            return None
        token, memory, numbers = entry
        self.checker.recall(memory)
        try:
            with envhub.connect(self.task.hub, self.task.patience_s) as client:
                envs = client.attach(token)
        except ENDINGS as error:
            self.endings[f"{type(error).__name__} of attach"] += 1
            return None
        self._answered_s = time.monotonic()
        self.checker.inherited(numbers)
        if self.task.mode == DISABLED:
            self._reset(envs)  # which envs the other one was about to reset, nobody knows
        return envs

    def _note(self, envs: Any, numbers: list[int] | list[None]) -> None:
        """Keep what is about to be asked for."""
        if self._journal is not None:
            self._journal.write((envs.token, self.checker.memory, numbers))

    def _make(self) -> Any:
        """A session; while the hub is being started again there is nobody to make one."""
        task, until_s = self.task, time.monotonic() + self.task.patience_s
        rows, workers, noted, elements = next(self._shapes)
        arguments = {"elements": elements, "length": task.length, "noted": noted}
        options = {"num_workers": workers, "autoreset_mode": task.mode, **task.options}
        while True:
            try:
                if task.hub is None:
                    return envhub.make_vec(partial(ChainEnv, **arguments), rows, **options)
                return envhub.make_vec("chain", rows, hub=task.hub, env_kwargs=arguments, **options)
            except (*ENDINGS, envhub.WorkerDied) as error:
                self.endings[f"{type(error).__name__} of make"] += 1
                if time.monotonic() > until_s:
                    raise Hung(f"no session within {task.patience_s:g} s: {error}") from error
                self._tell()
                time.sleep(RETRY_S)

    def _reset(self, envs: Any, mask: np.ndarray | None = None) -> None:
        self._note(envs, [None] * envs.num_envs)
        envs.reset_async(options=None if mask is None else {"reset_mask": mask})
        observations, infos = self._waited(envs.reset_wait, "reset")
        self.checker.reset(observations, infos, None if mask is None else mask.tolist())

    def _step(self, envs: Any) -> None:
        rows = envs.num_envs
        if self.task.pause_s:
            time.sleep(self._chance.uniform(0, 2 * self.task.pause_s))
        numbers = [self._chance.getrandbits(30) for _ in range(rows)]
        if self._missteps and self._chance.random() < rows / MISSTEP_EVERY:
            numbers[self._chance.randrange(rows)] = MISSTEP
        self._note(envs, numbers)
        actions = np.array(list(enumerate(numbers)), np.int64)
        if isinstance(envs.single_observation_space, Box) and self._chance.random() < self.task.parts:
            batch = self._step_by_parts(envs, actions)
        else:
            envs.step_async(actions)
            batch = Batch(*self._waited(envs.step_wait, "step"))
        self.checker.step(numbers, batch)
        over = batch.terminations | batch.truncations
        if self.task.mode == DISABLED and over.any():
            self._reset(envs, over)
        self._tell()

    def _step_by_parts(self, envs: Any, actions: np.ndarray) -> Batch:
        """Step every env by ``send``, a few at a time, between waits that may time out."""
        left = self._chance.sample(range(envs.num_envs), envs.num_envs)
        parts: list[Any] = []
        while left:
            count = self._chance.randint(1, len(left))
            chosen, left = left[:count], left[count:]
            envs.send(actions[chosen], chosen)
            with suppress(envhub.HubTimeout):
                parts.append(envs.recv(timeout=self._chance.choice(PART_WAITS_S)))
        while sum(len(part[-1]) for part in parts) < envs.num_envs:
            parts.append(self._waited(partial(envs.recv, 1), "part"))
        return joined(parts, envs.num_envs)

    def _waited(self, wait: Callable[[float], Any], what: str) -> Any:
        begun_s = time.monotonic()
        while True:
            try:
                found = wait(self.task.poll_s or self.task.patience_s)
            except envhub.HubTimeout as error:
                waited_s = time.monotonic() - begun_s
                if waited_s >= self.task.patience_s:
                    raise Hung(f"a {what} was not answered in {waited_s:.0f} s: {error}") from error
            else:
                if begun_s - self._answered_s > self.task.lease_s - UNSEEN_S:
                    self._back_s = time.monotonic()
                self._answered_s = begun_s
                return found

    def _tell(self) -> None:
        now_s = time.monotonic()
        if now_s > self._reported_s + REPORT_S:
            self._reported_s = now_s
            self._report(self)


def joined(parts: Sequence[Any], rows: int) -> Batch:
    """The batch of a step that was made by parts, each with different envs.

    Raises:
        ValueError: an env is in two parts.
    """
    env_ids = np.concatenate([part[-1] for part in parts])
    if sorted(env_ids.tolist()) != list(range(rows)):
        raise ValueError(f"of {rows} envs {env_ids.tolist()} were received")
    arrays = (np.concatenate(batch)[np.argsort(env_ids)] for batch in list(zip(*parts, strict=True))[:4])
    infos: dict[str, Any] = {}
    for *_, info, ids in parts:
        for name, values in info.items():
            if isinstance(values, np.ndarray):  # the checker looks into no map, such as final_info
                missing = None if values.dtype == object else 0
                whole = infos.setdefault(name, np.full((rows, *values.shape[1:]), missing, values.dtype))
                whole[ids] = values
    return Batch(*arrays, infos)


def told(trainer: Trainer) -> str:
    """The line that says how far it is."""
    tally = {**vars(trainer.checker.tally)}
    tally["findings"] = [(found.kind.value, found.row, found.text) for found in tally["findings"]]
    return json.dumps({"tally": tally, "endings": trainer.endings})


def heard(line: str) -> tuple[Tally, Counter[str]]:
    """What such a line says."""
    found = json.loads(line)
    tally = Tally(**found["tally"])
    tally.truncations, tally.wrong = Counter(tally.truncations), Counter(tally.wrong)
    tally.findings = [Finding(Kind(kind), row, text) for kind, row, text in found["tally"]["findings"]]
    return tally, Counter(found["endings"])


def arguments(task: Task) -> list[str]:
    """The command that starts a trainer with this task."""
    return [sys.executable, "-m", "chaos.trainer", json.dumps(asdict(task))]


def main() -> None:
    trainer = Trainer(Task(**json.loads(sys.argv[1])), lambda trainer: print(told(trainer), flush=True))
    logging.getLogger("envhub").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "stopped", True))
    if trainer.task.waits:
        print(told(trainer), flush=True)
        sys.stdin.read()
    trainer.run()
    print(told(trainer), flush=True)


if __name__ == "__main__":
    main()
