"""A row: one env and its place in the arena, inside a worker.

This file decides what one step or reset of one env means (autoreset, what goes into infos) and how the outcome is
stored. The autoreset rules are those of ``gymnasium.vector.AsyncVectorEnv`` (1.4).
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from envhub.arena.layout import SLOTS
from envhub.arena.memory import TURN_FIRST, Arena
from envhub.arena.stand_in import (
    ENDED,
    FRESH,
    ONGOING,
    REPORT_PENDING,
    put_info,
    repeat_observation,
    truncate,
    with_objects,
)
from envhub.values import actions, codec, spaces
from envhub.values.info_columns import Writer
from envhub.values.leaf import OBJECT
from envhub_server.ipc.reseeding import reseeded
from envhub_server.worker.env_runner import EnvRunner

NEXT_STEP, SAME_STEP, DISABLED = "NextStep", "SameStep", "Disabled"

SendInfo = Callable[[int, bytes], None]
SendSuspicion = Callable[[int, str], None]
ALWAYS_LOOKED_AT = 100  # steps; of those after them, one in LOOKED_AT_ONE_IN
LOOKED_AT_ONE_IN = 256
NOTHING = (0, 0)  # the template and the length of no info


class NotFinite(ValueError):
    """An observation or a reward that is not a number, or infinite."""


class Row:
    """One env of this worker.

    Attributes:
        turn: how it is called in its worker's ``turn`` word.
    """

    def __init__(self, index: int, runner: EnvRunner, autoreset_mode: str, allow_pickle: bool) -> None:
        self.index = index
        self.turn = index | TURN_FIRST
        self.env = runner.env
        self._runner = runner
        self._mode = autoreset_mode
        self._exact = codec.as_pickle if allow_pickle else codec.refuse
        self._lenient = codec.as_pickle_or_repr if allow_pickle else codec.as_repr
        self._beside: Iterator[Any] = iter(())
        self._finite_only = False
        self._looks = 0
        self._until_look = 0  # steps; never, where it is not positive
        self._seed: Any = None  # of the next reset that is owed
        self._seeded: Any = None  # by the program, or in the place of that
        self._times = 0  # that the env was made anew here
        self._last_objects = b""  # nothing: whoever reads it goes on with what it had
        self._owed: Any = None
        self._owed_info = b""

    def rebuilt(self, runner: EnvRunner) -> None:
        """Have another env from now on, whose first step is its reset."""
        self.env, self._runner = runner.env, runner
        self._times += 1
        self.turn, self._seed = self.index | TURN_FIRST, reseeded(self._seeded, self._times)

    def attach(
        self, arena: Arena, observation_space: Any, action_space: Any, send_info: SendInfo, columns: Writer | None
    ) -> None:
        """Work in this row of ``arena``, whose leaves are those of the session's spaces.

        The env's own spaces may have their keys in another order. Infos that do not fit in go to ``send_info``.
        """
        self._columns = columns
        self._info_place = arena.infos[self.index].data
        layout = arena.layout
        self._observation_space, self._action_space = observation_space, action_space
        self._objects = [leaf == OBJECT for leaf in spaces.leaves(observation_space)]
        self._loose = any(self._objects)
        self._last_slot = 0
        self._arena = arena
        self._send_info = send_info
        self._info_bytes = layout.info_bytes
        self._batches = [[leaf[slot] for leaf in arena.observations] for slot in range(SLOTS)]
        self._flat = spaces.is_flat(observation_space) and not self._loose
        self._action_flat = spaces.is_flat(action_space)
        self._code_words = [arena.words(column) for column in arena.action_codes]
        self._codes = [-1] * len(layout.actions)
        self._readers: list[Callable[[], Any]] = [lambda: None] * len(layout.actions)
        self._row_shapes = [leaf.shape for leaf in layout.observations]
        # As words, not as arrays: NumPy takes ten times as long to store a single number.
        results = arena.rewards, arena.terminations, arena.truncations
        self._rewards, self._terminations, self._truncations = map(arena.words, results)
        self._needs_reset = arena.words(arena.needs_reset)
        self._slot = arena.words(arena.slot)
        self._info_length, self._info_template = arena.words(arena.info_length), arena.words(arena.info_template)

    def look_after(self, finite_only: bool, suspect: SendSuspicion) -> None:
        """Refuse what is not finite, if so; and tell ``suspect`` of the first observation that is out of its space."""
        self._finite_only, self._suspect, self._until_look = finite_only, suspect, 1

    def _look(self, observation: Any) -> None:
        """See whether the observation is in its space; of the first steps always, and then now and then."""
        self._looks += 1
        self._until_look = 1 if self._looks < ALWAYS_LOOKED_AT else LOOKED_AT_ONE_IN
        try:
            problem = "" if self.env.observation_space.contains(observation) else "an observation out of its space"
        except Exception as error:  # of a space of the env's own, which we do not need
            problem = f"its space cannot tell whether it contains an observation: {error!r}"
        if problem:
            self._suspect(self.index, problem)
            self._until_look = 0

    def _check_finite(self, observation: Any, reward: Any) -> None:
        if not np.isfinite(reward):
            raise NotFinite(f"a reward of {reward}")
        for number, part in enumerate(spaces.flatten(self._observation_space, observation)):
            if isinstance(part, (float, np.ndarray, np.floating)) and np.asarray(part).dtype.kind in "fc":
                wrong = np.size(part) - np.count_nonzero(np.isfinite(part))
                if wrong:
                    raise NotFinite(f"{wrong} values of part {number} of an observation are not finite")

    def go_on(self) -> None:
        """Go on from what stands in the arena."""
        pending = self._arena.request[self.index] != self._arena.done[self.index]
        self._last_slot = (int(self._arena.slot[self.index]) & 1) ^ int(pending)

    def owe(self, seed: int | None, owed: Exception | None, owed_info: bytes, objects: bytes) -> None:
        """Begin in the place of another env, as far as ``needs_reset`` says so.

        Args:
            seed: of the reset that the env begins with.
            owed: what to raise, where nobody was told yet what became of the env before this one.
            owed_info: the info of the truncation, where that is to be none.
            objects: the parts of no fixed size of the observation that the row showed last; empty if not known.
        """
        self._seed = self._seeded = seed
        self._owed, self._owed_info = owed, owed_info
        self._last_objects = objects

    def step(self, beside: Sequence[Any] = ()) -> None:
        """Step the env with the row's action, or reset it where NEXT_STEP owes one, and store the outcome.

        Args:
            beside: the parts of the action that are not in the arena, in the order of the leaves.
        """
        self._beside = iter(beside)
        owed = self._needs_reset[self.index]
        if owed > ENDED:
            self._begin(owed)
            return
        self.turn = self.index
        if owed and self._mode == NEXT_STEP:
            observation, info = self._runner.autoreset()
            self._store(observation, 0.0, False, False, info)
            return
        observation, reward, terminated, truncated, info = self._runner.step(self._action())
        self._until_look -= 1
        if not self._until_look:
            self._look(observation)
        if self._finite_only:
            self._check_finite(observation, reward)
        if (terminated or truncated) and self._mode == SAME_STEP:
            # The env may write its next observation over this one, so the final one is copied before the reset.
            ended = {"final_obs": copy.deepcopy(observation), "final_info": _copied(info)}
            observation, info = self._runner.autoreset()
            self._store(observation, reward, terminated, truncated, {**ended, **_as_dict(info)})
            self._needs_reset[self.index] = ONGOING
            return
        self._store(observation, reward, terminated, truncated, info)

    def _begin(self, owed: int) -> None:
        """In place of the first step of an env that is new."""
        if owed == REPORT_PENDING:
            self._needs_reset[self.index] = FRESH
            if self._owed is not None:
                raise self._owed
            self.truncate(self._owed_info)
        elif self._mode == DISABLED:
            self.truncate(codec.encode({"invalid_transition": True}))
        else:
            observation, info = self._runner.reset(self._seed, None)
            self._seed = None
            self._store(observation, 0.0, False, False, info)

    @property
    def awaits_first_reset(self) -> bool:
        """Whether the env took the place of another one, and was not reset yet."""
        return bool(self._needs_reset[self.index] > ENDED)

    def truncate(self, info: bytes) -> None:
        """End the episode without a transition of the env's, which is to be reset before its next step."""
        if self._loose:
            info = with_objects(self._last_objects, info)
        if not put_info(self._arena, self.index, info):
            self._send_info(self.index, info)
        truncate(self._arena, self.index, len(info))
        self._last_slot = self._slot[self.index]

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Reset the env and store its first observation."""
        self._seeded = self._seeded if seed is None else seed
        observation, info = self._runner.reset(seed, options)
        self._store(observation, 0.0, False, False, info)

    def stay(self) -> None:
        """Leave the env as it is: its last observation is the outcome, too, without an info."""
        slot = self._slot[self.index]
        if slot != self._last_slot:
            repeat_observation(self._arena, self.index)
            self._last_slot = slot
        self._note(self._put(with_objects(self._last_objects, b"")) if self._loose else NOTHING)

    def _action(self) -> Any:
        for number, words in enumerate(self._code_words):
            if words[self.index] != self._codes[number]:
                self._read_as(number, words[self.index])
        if self._action_flat:
            return self._readers[0]()
        return spaces.assemble(self._action_space, (read() for read in self._readers))

    def _read_as(self, number: int, code: int) -> None:
        """Read an action leaf in another form from now on: the caller sends other dtypes than before."""
        layout = self._arena.layout
        buffer, leaf = self._arena.actions[number], layout.actions[number]
        self._codes[number] = code
        if code == actions.BESIDE:
            self._readers[number] = lambda: next(self._beside)
        else:
            self._readers[number] = actions.reader(buffer, leaf, layout.rows, self.index, code)

    def _store(self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        if type(info) is not dict:
            info = _as_dict(info)
        index = self.index
        slot = self._slot[index]
        batches = self._batches[slot]
        objects: list[Any] = []
        if self._flat:
            batch = batches[0]
            if (
                type(observation) is np.ndarray
                and observation.dtype == batch.dtype
                and observation.shape == self._row_shapes[0]
            ):
                batch[index] = observation
            else:
                _store_leaf(batch, index, observation)
        else:
            remaining = iter(batches)
            for is_object, part in zip(self._objects, spaces.flatten(self._observation_space, observation)):
                if is_object:
                    objects.append(part)
                else:
                    _store_leaf(next(remaining), index, part)
        try:
            self._rewards[index] = reward
        except TypeError:  # an array of one number, as some envs give
            self._arena.rewards[index] = reward
        self._terminations[index], self._truncations[index] = terminated, truncated
        self._needs_reset[index] = ENDED if terminated or truncated else ONGOING
        self._note(self._store_info(info, objects) if info or objects else NOTHING)
        self._last_slot = slot  # not before: of a step that fails in here nothing is repeated

    def _note(self, what: tuple[int, int]) -> None:
        self._info_template[self.index], self._info_length[self.index] = what

    def _store_info(self, info: dict[str, Any], objects: list[Any]) -> tuple[int, int]:
        if self._columns is not None and not objects and type(info) is dict:
            written = self._columns.write(info, self._info_place)
            if written != NOTHING:
                return written
        blob = codec.encode(info, self._lenient) if info else b""
        if not objects:
            return self._put(blob)
        encoded = codec.encode(objects, self._exact)
        written = self._put(with_objects(encoded, blob))
        self._last_objects = encoded
        return written

    def _put(self, blob: bytes) -> tuple[int, int]:
        if len(blob) <= self._info_bytes:
            self._arena.infos[self.index, : len(blob)] = np.frombuffer(blob, np.uint8)
        else:
            self._send_info(self.index, blob)
        return 0, len(blob)


def _as_dict(info: Any) -> dict[Any, Any]:
    """The info as a dict, of any map that Gymnasium's vector envs can read.

    Raises:
        AttributeError: it is none, as upstream.
    """
    try:
        items = info.items()
    except AttributeError as error:
        raise AttributeError(f"{error}: the env returned an info that is not a dict: {info!r:.100}") from error
    return dict(items)


def _copied(info: Any) -> Any:
    """A copy as deep as can be had: what cannot be copied, such as a lock, arrives as its ``repr`` anyhow."""
    try:
        return copy.deepcopy(info)
    except Exception:  # anything may raise in a foreign __reduce__
        return {key: _copied(value) for key, value in info.items()} if isinstance(info, dict) else info


def _store_leaf(batch: np.ndarray, index: int, value: Any) -> None:
    """Put one env's part of an observation into its row.

    ``AsyncVectorEnv`` casts floats into an integer space and spreads a single number over a whole row without a word;
    here both are errors, since they are always a mistake of the env, as a cast is that ``SyncVectorEnv`` refuses.
    """
    if type(value) is not np.ndarray or value.dtype != batch.dtype or value.shape != batch.shape[1:]:
        found = np.asarray(value)
        if found.shape != batch.shape[1:]:
            raise ValueError(f"an observation part of shape {found.shape} where its space has {batch.shape[1:]}")
        if not np.can_cast(found.dtype, batch.dtype, "same_kind"):
            raise TypeError(f"an observation part of dtype {found.dtype} where its space has {batch.dtype}")
    batch[index] = value
