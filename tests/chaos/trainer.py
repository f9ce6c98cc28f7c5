"""One trainer under chaos: it steps chains, in session after session, and checks all that it sees."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from chaos.checker import BROKEN, HUNG, Batch, Checker

import envhub

PART_WAITS_S = (0.0, 0.0, 0.002, 0.05)
RESET_EVERY = 100  # steps, on average
# What a faultless hub may say while it or its workers are being killed; anything else is a finding.
ENDINGS = (envhub.HubUnreachable, envhub.SessionLost, envhub.RestartsExhausted, envhub.RequestRefused)


class Trainer(threading.Thread):
    """Goes from session to session until its steps are made, or until ``stopped`` is set.

    Attributes:
        tally: what it saw.
        endings: by which errors its sessions ended.
    """

    def __init__(
        self,
        seed: int,
        hub: str,
        steps: int = 1 << 60,
        rows: int = 4,
        workers: int = 2,
        length: int = 50,
        patience_s: float = 60.0,
        pause_s: float = 0.0,
        parts: float = 0.0,
        **options: Any,
    ) -> None:
        """Make so many steps of single envs; wait so long for any one answer, and step so often by parts.

        The options are those of ``make_vec``. Between two steps there is a pause.
        """
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self.endings: Counter[str] = Counter()
        self._hub, self._rows, self._options = hub, rows, {"num_workers": workers, **options}
        self._arguments = {"elements": 60, "length": length}
        self._steps, self._patience_s, self._pause_s, self._parts = steps, patience_s, pause_s, parts
        self._chance = random.Random(seed)
        self._checker = Checker(rows, length)
        self.tally = self._checker.tally

    @property
    def done(self) -> bool:
        return self.stopped.is_set() or self.tally.acknowledged >= self._steps

    def run(self) -> None:
        try:
            while not self.done:
                self._session()
        except TimeoutError as error:
            self._checker.find(HUNG, -1, str(error))
        except Exception as error:
            self._checker.find(BROKEN, -1, f"{type(error).__name__}: {error}")

    def _session(self) -> None:
        envs = None
        try:
            envs = self._make()
            self._checker.session()
            self._reset(envs)
            while not self.done:
                self._step(envs)
                if self._chance.random() < 1 / RESET_EVERY:
                    self._reset(envs)
            envs.close()
        except ENDINGS as error:
            self.endings[type(error).__name__] += 1
        finally:
            if envs is not None:
                envs.close(terminate=True)

    def _make(self) -> Any:
        """A session; while the hub is being started again there is nobody to make one."""
        until_s = time.monotonic() + self._patience_s
        while True:
            try:
                return envhub.make_vec("chain", self._rows, hub=self._hub, env_kwargs=self._arguments, **self._options)
            except (*ENDINGS, envhub.WorkerDied) as error:
                if time.monotonic() > until_s:
                    raise TimeoutError(f"no session within {self._patience_s:g} s: {error}") from error
                self.stopped.wait(0.05)

    def _reset(self, envs: Any) -> None:
        envs.reset_async()
        self._checker.reset(*self._waited(envs.reset_wait))

    def _step(self, envs: Any) -> None:
        self.stopped.wait(self._pause_s)
        numbers = [self._chance.getrandbits(30) for _ in range(self._rows)]
        actions = np.array(list(enumerate(numbers)), np.int64)
        if self._chance.random() < self._parts:
            batch = self._step_by_parts(envs, actions)
        else:
            envs.step_async(actions)
            batch = Batch(*self._waited(envs.step_wait))
        self._checker.step(numbers, batch)

    def _step_by_parts(self, envs: Any, actions: np.ndarray) -> Batch:
        """Step every env by ``send``, a few at a time, between waits that may time out."""
        left = self._chance.sample(range(self._rows), self._rows)
        parts: list[Any] = []
        while left:
            count = self._chance.randint(1, len(left))
            chosen, left = left[:count], left[count:]
            envs.send(actions[chosen], chosen)
            with suppress(envhub.HubTimeout):
                parts.append(envs.recv(timeout=self._chance.choice(PART_WAITS_S)))
        while sum(len(part[-1]) for part in parts) < self._rows:
            parts.append(self._waited(partial(envs.recv, 1)))
        env_ids = np.concatenate([part[-1] for part in parts])
        if sorted(env_ids.tolist()) != list(range(self._rows)):
            raise ValueError(f"of {self._rows} envs {env_ids.tolist()} were received")
        infos: dict[str, Any] = {}
        for *_, info, ids in parts:
            for name, values in info.items():
                whole = infos.setdefault(name, np.full(self._rows, None if values.dtype == object else 0, values.dtype))
                whole[ids] = values
        arrays = (np.concatenate(batch)[np.argsort(env_ids)] for batch in list(zip(*parts, strict=True))[:4])
        return Batch(*arrays, infos)

    def _waited(self, wait: Callable[..., Any]) -> Any:
        try:
            return wait(timeout=self._patience_s)
        except envhub.HubTimeout as error:
            raise TimeoutError(f"no answer within {self._patience_s:g} s: {error}") from error
