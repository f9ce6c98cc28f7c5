"""Steps of some envs of a vector env while others are under way, as tianshou's asynchronous collectors make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Dict, Tuple
from gymnasium.vector.utils import create_empty_array, iterate

from envhub.errors import EnvTimeout, HubTimeout, RestartsExhausted, WorkerDied, raised_by_env
from envhub.vector_errors import NothingPending, SessionBusy
from envhub_client.deadline import Deadline
from envhub_client.envs.vector_env import HubVectorEnv
from envhub_client.frameworks import composed_actions

Ids = int | Sequence[int] | np.ndarray | None

INVALID = "invalid_transition"  # in the info of a step that is none of the env's


class Part(NamedTuple):
    """Results of some envs, with the infos by env."""

    observations: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    infos: dict[int, dict[str, Any]]
    rows: np.ndarray


def stacked(envs: HubVectorEnv, observations: Any) -> np.ndarray:
    """Observations in an array, of objects where tianshou has objects.

    Raises:
        TypeError: they are tuples, which tianshou does not support.
    """
    if isinstance(observations, np.ndarray) and observations.dtype != object:
        return observations
    if isinstance(envs.single_observation_space, (Dict, Tuple)) and isinstance(observations, (dict, tuple)):
        observations = iterate(envs.observation_space, observations)
    each = list(observations)
    if isinstance(each[0], tuple):
        raise TypeError("Tuple observation space is not supported. ", "Please change it to array or dict space")
    try:
        return np.stack(each)
    except ValueError:  # of several shapes
        array = np.empty(len(each), object)
        array[:] = each
        return array


class PartialSteps:
    """The envs that are stepping, and results that came while others were waited for.

    An error leaves no env under way, and drops the results that have not reached the caller. After Ctrl-C ``settle``
    does that, so that Ctrl-C does not wait for envs; with ``is_async`` the envs stay under way, and a step without an
    action returns their results.

    Attributes:
        waiting: the envs that are stepping, or whose results are held.
        ready: the others.
        ended: bool for each env, whether its episode has ended since its last reset.
    """

    def __init__(self, envs: HubVectorEnv, wait_num: int, timeout: float | None, is_async: bool) -> None:
        """Wrap these envs; a wait is for ``wait_num`` envs, or for as many as are done within ``timeout`` seconds."""
        self._envs = envs
        self._wait_num, self._timeout, self._is_async = wait_num, timeout, is_async
        self.waiting: list[int] = []
        self.ready = list(range(envs.num_envs))
        self.ended = np.zeros(envs.num_envs, bool)
        self._sent: Any = None  # the last actions that were sent among others
        self._held: list[Part] = []  # results that came while other envs were waited for
        self._interrupted = False  # by Ctrl-C, in a step whose results are not asked for again

    @property
    def under_way(self) -> int:
        """Number of envs that are under way in the hub."""
        return len(self.waiting) - sum(len(part.rows) for part in self._held)

    def step(self, actions: Any, rows: list[int]) -> Part:
        """Step these envs, and wait for all of them; the results are in ascending order of envs.

        Raises:
            Exception: as for ``HubVectorEnv.send`` and ``recv``.
        """
        self.ended[rows] = False
        with self._draining():
            self._envs.send(actions, rows)
            part = Part(*self._envs.recv())
        self.ended[part.rows] = part.terminations | part.truncations
        return part

    def begin(self, actions: Any, rows: list[int]) -> None:
        """Begin a step of these envs while others may be under way; errors as for ``step``."""
        self._send(actions, rows)
        self.waiting.extend(rows)
        self.ready = [row for row in self.ready if row not in set(rows)]

    def _send(self, actions: Any, rows: list[int]) -> None:
        self._sent = actions
        while True:
            try:
                self._envs.send(actions, rows)
                return
            except SessionBusy:  # over the network, a wait that timed out has to end first
                if not self.under_way:
                    raise
            with self._draining():
                self._hold(None)

    def receive(self, named: set[int]) -> Part:
        """The results of as many envs as a wait is for, and of all that are named; errors as for ``step``."""
        with self._draining():
            self._receive(named)
        parts, self._held = self._held, []
        rows = np.concatenate([part.rows for part in parts])
        rewards, terminations, truncations = (np.concatenate([part[field] for part in parts]) for field in (1, 2, 3))
        infos = {row: info for part in parts for row, info in part.infos.items()}
        each = [stacked(self._envs, part.observations) for part in parts]
        observations = each[0] if len(each) == 1 else stacked(self._envs, [one for batch in each for one in batch])
        self.ended[rows] = terminations | truncations
        returned = rows.tolist()
        self.waiting = [row for row in self.waiting if row not in set(returned)]
        self.ready.extend(returned)
        return Part(observations, rewards, terminations, truncations, infos, rows)

    def _receive(self, named: set[int]) -> None:
        deadline = None if self._timeout is None or named else Deadline(self._timeout)
        wanted = min(self._wait_num, len(self.waiting))
        named = named & set(self.waiting)
        while self.under_way:
            held = {row for part in self._held for row in part.rows.tolist()}
            if named <= held and (named or len(held) >= wanted):
                return
            try:
                self._hold(None if deadline is None else deadline.left_s(), 1 if named else wanted - len(held))
            except HubTimeout:
                if self._held:
                    return
                self._hold(None)

    def _hold(self, timeout: float | None, min_envs: int = 1) -> None:
        self._held.append(Part(*self._envs.recv(min_envs, timeout)))

    def receive_all(self) -> None:
        """Hold the results of all envs under way: nothing but steps is possible before. Errors as for ``step``."""
        if left := self.under_way:
            with self._draining():
                self._hold(None, left)

    def reset(self, rows: list[int]) -> tuple[np.ndarray, dict[int, dict[str, Any]]]:
        """Reset envs that have ended, as a step of theirs does, and hold what other envs return meanwhile.

        Unlike a reset proper it does not wait for all envs under way, and on the shared lane does not go by the hub.

        Returns:
            An observation for each of ``rows``, and infos by env.

        Raises:
            Exception: as for ``step``.
        """
        with self._draining():
            return self._reset(rows)

    def _reset(self, rows: list[int]) -> tuple[np.ndarray, dict[int, dict[str, Any]]]:
        observations: dict[int, Any] = {}
        infos: dict[int, dict[str, Any]] = {}
        # An env whose worker takes its time to come back is truncated once more.
        while asked := [row for row in dict.fromkeys(rows) if row not in observations or INVALID in infos[row]]:
            self._send(self._ignored_actions(len(asked)), asked)
            missing = set(asked)
            while missing:
                part = Part(*self._envs.recv(min_envs=1))
                own = np.isin(part.rows, asked)
                if not own.all():
                    self._held.append(self._some_of(part, ~own))
                each = stacked(self._envs, part.observations)
                for place in np.flatnonzero(own).tolist():
                    row = int(part.rows[place])
                    observations[row], infos[row] = each[place], part.infos.get(row, {})
                    missing.discard(row)
        return stacked(self._envs, [observations[row] for row in rows]), infos

    def _ignored_actions(self, count: int) -> Any:
        """Actions for envs whose step is a reset, of the dtype of those under way: by parts there is but one."""
        space = self._envs.single_action_space
        if isinstance(self._sent, np.ndarray):
            return np.repeat(self._sent[:1], count, axis=0)
        if self._sent is not None and not composed_actions.is_composed(space):
            return [self._sent[0]] * count
        return create_empty_array(space, count)

    def _some_of(self, part: Part, mask: np.ndarray) -> Part:
        rows = part.rows[mask]
        infos = {row: info for row, info in part.infos.items() if row in set(rows.tolist())}
        observations = stacked(self._envs, part.observations)[mask]
        return Part(observations, part.rewards[mask], part.terminations[mask], part.truncations[mask], infos, rows)

    @contextmanager
    def _draining(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._drop()
            raise
        except BaseException:
            self._interrupted = not self._is_async
            raise

    def settle(self) -> None:
        """Drop what an interrupted step has left under way."""
        if self._interrupted:
            self._drop()
            self._interrupted = False

    def _drop(self) -> None:
        """Wait until no env is under way; results that have not reached the caller are dropped."""
        self._held, self.waiting, self.ready = [], [], list(range(self._envs.num_envs))
        self.ended.fill(False)
        while True:
            try:
                self._envs.recv()
            except NothingPending:
                return
            except Exception as error:
                if not _is_of_one_env(error):  # such as the loss of the hub: no env returns any more
                    return


def _is_of_one_env(error: Exception) -> bool:
    """True if the env that an error of ``recv`` is of is not under way any more, and the others go on."""
    died = isinstance(error, (WorkerDied, EnvTimeout)) and not isinstance(error, RestartsExhausted)
    return died or raised_by_env(error) is not None
