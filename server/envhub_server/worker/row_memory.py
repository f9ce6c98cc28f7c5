"""Places of a row's action, observation and info in the arena, and checks of what is stored there."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Callable, Collection, Iterator, Sequence

import numpy as np

from envhub.arena.layout import SLOTS
from envhub.arena.memory import STATUS_INFO, STATUS_OK, Arena
from envhub.values import actions, codec, spaces
from envhub.values.info_columns import NESTING_MAX, VECTOR_REWARD, Writer
from envhub.values.leaf import OBJECT
from envhub.values.spaces import space_mismatch
from envhub_server.ipc import control
from envhub_server.ipc.channel import MESSAGE_BYTES_MAX

Send = Callable[[object], None]  # takes a message to the hub


class RowActions:
    """A row's actions in the arena, and the way of the leaves that are not there."""

    def __init__(self, arena: Arena, index: int, space: Any) -> None:
        self._arena, self._index, self._space = arena, index, space
        self._is_flat = spaces.is_flat(space)
        leaves = len(arena.layout.actions)
        self._code_words = [column.data for column in arena.action_codes]
        self._codes = [-1] * leaves
        self._readers: list[Callable[[], Any]] = [lambda: None] * leaves
        self._out_of_band: Iterator[Any] = iter(())

    def read(self, out_of_band: Sequence[Any]) -> Any:
        self._out_of_band = iter(out_of_band)
        for number, words in enumerate(self._code_words):
            if words[self._index] != self._codes[number]:
                self._read_as(number, words[self._index])
        if self._is_flat:
            return self._readers[0]()
        return spaces.assemble(self._space, (read() for read in self._readers))

    def _read_as(self, number: int, code: int) -> None:
        layout = self._arena.layout
        buffer, leaf = self._arena.actions[number], layout.actions[number]
        self._codes[number] = code
        if code == actions.OUT_OF_BAND:
            self._readers[number] = lambda: next(self._out_of_band)
        else:
            self._readers[number] = actions.reader(buffer, leaf, layout.rows, self._index, code)


class ObservationWriter:
    """Stores the observations of one row."""

    def __init__(self, arena: Arena, index: int, space: Any, name: str) -> None:
        self._name = name
        self._index, self._space, self._request = index, space, arena.request.data
        self._objects = [leaf == OBJECT for leaf in spaces.leaves(space)]
        self.has_objects = any(self._objects)  # which have no fixed size, and so no place in the arena
        self._batches = [[leaf[slot] for leaf in arena.observations] for slot in range(SLOTS)]
        self._is_flat = spaces.is_flat(space)
        self._shapes = [leaf.shape for leaf in arena.layout.observations]

    def store(self, observation: Any, method: str) -> list[Any]:
        """Store what a method of the env has returned, but for its object leaves, which are returned."""
        index = self._index
        batches = self._batches[self._request[index] & 1]
        objects: list[Any] = []
        try:
            if self._is_flat:
                if self.has_objects:
                    return [observation]
                batch = batches[0]
                is_array = type(observation) is np.ndarray
                if is_array and observation.dtype == batch.dtype and observation.shape == self._shapes[0]:
                    batch[index] = observation
                else:
                    _store_leaf(batch, index, observation)
            else:
                remaining = iter(batches)
                for is_object, part in zip(self._objects, spaces.flatten(self._space, observation)):
                    if is_object:
                        objects.append(part)
                    else:
                        _store_leaf(next(remaining), index, part)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if why := space_mismatch(self._space, observation, "observation"):
                kind = TypeError if isinstance(error, TypeError) else ValueError
                text = f"{method} of {self._name} returned an observation that does not fit: {why}; correct the space "
                raise kind(f"{text}or make the envs with observation_mode='any'") from error
            raise
        return objects


def _store_leaf(batch: np.ndarray, index: int, value: Any) -> None:
    # ``AsyncVectorEnv`` silently casts floats into an integer space and spreads a single number over a whole row. Here
    # both are errors, because both are always a mistake in the env. ``SyncVectorEnv`` refuses such a cast too.
    if type(value) is not np.ndarray or value.dtype != batch.dtype or value.shape != batch.shape[1:]:
        array = np.asarray(value)
        if array.shape != batch.shape[1:]:
            raise ValueError(f"an observation part of shape {array.shape} where its space has {batch.shape[1:]}")
        if not np.can_cast(array.dtype, batch.dtype, "same_kind"):
            raise TypeError(f"an observation part of dtype {array.dtype} where its space has {batch.dtype}")
    batch[index] = value


MARK_BYTES = 64  # room for the mark of an info that lost entries
NAMES_CHARS_MAX = 500  # of these entries, in the log

NO_INFO = (0, 0)  # the template and the length of an empty info


def put_info(arena: Arena, row: int, send: Send, *pieces: Any) -> tuple[int, int]:
    """Put an encoded info, or a result of a call, into its place, or send it if it is too large.

    Returns its template and length.
    """
    template = arena.put_info(row, *pieces)
    if template is None:  # the hub makes the place larger when it has read this
        send(control.RowInfo(row, b"".join(pieces), int(arena.request[row])))
        template = 0
    return template, sum(map(len, pieces))


class InfoWriter:
    """Stores the infos of one row. ``bytes_max``: an encoded info that is larger loses its largest entries."""

    def __init__(self, index: int, arena: Arena, send: Send, columns: Writer | None, build: control.Build) -> None:
        # ``send`` takes a ``RowInfo`` whose info is too large for the arena, and ``Suspicious`` for the first info that
        # loses entries. With SAME_STEP, an info at an episode's end holds the final observation, which never is.
        self._index, self._arena, self._send, self._columns = index, arena, send, columns
        self._unknown = codec.as_pickle_or_repr if build.allow_pickle else codec.as_repr
        self.bytes_max = MESSAGE_BYTES_MAX if build.allow_pickle else build.info_bytes_max
        self.bytes_max += arena.layout.row_bytes()
        self._info, self._large_info = arena.infos[index].data, arena.large_infos[index].data
        self._rooms = arena.rooms.data
        self._length, self._template = arena.info_length.data, arena.info_template.data
        self._status = arena.status.data
        self._same_step = build.autoreset_mode == "SameStep"
        self._dropped = False  # whether lost entries were reported

    def store(self, info: dict[str, Any], objects: bytes = b"") -> None:
        index = self._index
        self._template[index], length = self._stored(info, objects) if info or objects else NO_INFO
        self._length[index] = length
        self._status[index] = STATUS_INFO if length else STATUS_OK

    def store_objects(self, objects: bytes) -> None:
        self._template[self._index], self._length[self._index] = self.put(codec.encode_pair(objects, b""))
        self._status[self._index] = STATUS_INFO

    def put(self, blob: bytes) -> tuple[int, int]:
        return put_info(self._arena, self._index, self._send, blob)

    def _stored(self, info: dict[str, Any], objects: bytes) -> tuple[int, int]:
        if self._columns is not None and not objects and type(info) is dict:
            written = self._columns.write(info, self._info, self._large_info[: self._rooms[self._index]])
            if written != NO_INFO:
                return written
        blob = codec.encode(info, self._unknown) if info else b""
        if len(blob) > self.bytes_max:
            blob = codec.encode(self.drop_largest(info, len(blob)), self._unknown)
        return self.put(codec.encode_pair(objects, blob) if objects else blob)

    def drop_largest(self, info: dict[str, Any], nbytes: int) -> dict[str, Any]:
        """The info without its largest entries, also of nested maps, so that it has at most ``bytes_max`` bytes."""
        # The final observation and a reward with axes are kept, because they belong to the results.
        entries = _entries(info, self._unknown, (VECTOR_REWARD, "final_obs") if self._same_step else (VECTOR_REWARD,))
        dropped, left = set(), nbytes
        for size, path in sorted(entries, key=itemgetter(0), reverse=True):
            if left <= self.bytes_max - MARK_BYTES:
                break
            dropped.add(path)
            left -= size
        if not self._dropped:
            self._dropped = True
            names = ", ".join(sorted("/".join(map(str, path)) for path in dropped))
            text = f"an info of {nbytes} bytes, of which these entries are dropped (info_bytes_max={self.bytes_max}, "
            text += f"the observation included): {names:.{NAMES_CHARS_MAX}}"
            self._send(control.Suspicious(self._index, text))
        return {**_without(info, dropped), control.INFO_DROPPED: True}


def _entries(
    info: dict[str, Any], unknown: codec.Unknown, kept: Collection[str] = (), path: tuple[Any, ...] = ()
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    for key, value in info.items():
        if key in kept:
            continue
        if type(value) is dict and len(path) < NESTING_MAX:
            yield from _entries(value, unknown, (), (*path, key))
        else:
            yield len(codec.encode([key, value], unknown)), (*path, key)


def _without(info: dict[str, Any], dropped: set[tuple[Any, ...]], path: tuple[Any, ...] = ()) -> dict[str, Any]:
    kept = {key: value for key, value in info.items() if (*path, key) not in dropped}
    return {key: _without(each, dropped, (*path, key)) if type(each) is dict else each for key, each in kept.items()}


def as_slice(rows: Sequence[int]) -> slice:
    """The rows of a worker, each as far from the next, as a slice of a column of the arena."""
    return slice(rows[0], rows[-1] + 1, rows[1] - rows[0] if len(rows) > 1 else 1)


STEPS_CHECKED_FIRST = 100  # the observations of an env's first steps that are all compared with the space
CHECKED_FIRST_S = 0.01  # CPU time for them; a graph of a few nodes or an image of megabytes takes a millisecond
STEPS_PER_CHECK = 256  # after them, one observation in this many


class NotFinite(ValueError):
    """An observation or a reward is infinite or not a number."""


class CheckPlan:
    """Says which observations of an env are compared with its space."""

    def __init__(self) -> None:
        # Up to the next one, including it; not positive where none is compared any more.
        self.steps_left = self._checks = 0
        self._spent_s = 0.0

    def begin(self, is_checked: bool = True) -> None:
        self.steps_left = int(is_checked)

    def plan_next(self, spent_s: float) -> None:
        """Plan the next comparison, after one that took ``spent_s`` of CPU time."""
        self._checks, self._spent_s = self._checks + 1, self._spent_s + spent_s
        is_first = self._checks < STEPS_CHECKED_FIRST and self._spent_s < CHECKED_FIRST_S
        self.steps_left = 1 if is_first else STEPS_PER_CHECK

    def stop(self) -> None:
        self.steps_left = 0


def why_not_finite(space: Any, observation: Any) -> str:
    for number, part in enumerate(spaces.flatten(space, observation)):
        if wrong := _not_finite(part):
            return f"{wrong} values of part {number} of an observation are not finite"
    return ""


def _not_finite(part: Any) -> int:
    """Number of values are infinite or not a number, in an array, or in the arrays of a Graph, Sequence or OneOf."""
    if isinstance(part, dict):
        return sum(map(_not_finite, part.values()))
    if isinstance(part, (tuple, list)):
        return sum(map(_not_finite, part))
    if isinstance(part, (float, np.ndarray, np.floating)) and np.asarray(part).dtype.kind in "fc":
        return int(np.size(part) - np.count_nonzero(np.isfinite(part)))
    return 0
