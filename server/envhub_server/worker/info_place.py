"""The place of a row's info in the arena, and the message of an info that does not fit into it."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Callable, Collection, Iterator

from envhub.arena.memory import STATUS_INFO, STATUS_OK, Arena
from envhub.arena.stand_in import with_objects
from envhub.values import codec
from envhub.values.info_columns import NESTING_MAX, VECTOR_REWARD, Writer
from envhub_server.ipc import control

MARK_BYTES = 64  # room for the mark of an info that lost entries
NAMES_CHARS_MAX = 500  # of these entries, in the log
NO_INFO = (0, 0)  # the template and the length of an empty info


class InfoPlace:
    """Stores the infos of one row.

    Attributes:
        bytes_max: an encoded info that is larger loses its largest entries.
    """

    def __init__(
        self,
        index: int,
        arena: Arena,
        send: Callable[[object], None],
        columns: Writer | None,
        unknown: codec.Unknown,
        same_step: bool,
        bytes_max: int,
    ) -> None:
        """Store in this row of ``arena``.

        ``send`` takes a ``RowInfo`` whose info is too large for the arena, and ``Suspicious`` for the first info that
        loses entries since it has more than ``bytes_max`` bytes besides the observation. ``columns`` writes infos in
        columns, if the session has any. ``unknown`` encodes the values that the codec does not know. With
        ``same_step``, an info at an episode's end holds the final observation, which is never dropped.
        """
        self._index, self._arena, self._send, self._columns, self._unknown = index, arena, send, columns, unknown
        layout = arena.layout
        self.bytes_max = bytes_max + layout.row_bytes()
        self._place = arena.infos[index].data
        self._length, self._template = arena.info_length.data, arena.info_template.data
        self._status = arena.status.data
        self._same_step = same_step
        self._dropped = False  # whether lost entries were reported

    def store(self, info: dict[str, Any], objects: bytes = b"") -> None:
        """Store an info, with the encoded leaves of the observation that have a variable size, if it has any."""
        index = self._index
        self._template[index], length = self._stored(info, objects) if info or objects else NO_INFO
        self._length[index] = length
        self._status[index] = STATUS_INFO if length else STATUS_OK

    def store_objects(self, objects: bytes) -> None:
        """Store the encoded leaves of the observation that have a variable size, without an info."""
        self._template[self._index], self._length[self._index] = self.put(with_objects(objects, b""))
        self._status[self._index] = STATUS_INFO

    def put(self, blob: bytes) -> tuple[int, int]:
        """Put an encoded info into its place, or send it if it is too large; returns its template and length."""
        template = self._arena.put_info(self._index, blob)
        if template is None:  # the hub makes the place larger when it has read this
            self._send(control.RowInfo(self._index, blob, int(self._arena.request[self._index])))
            template = 0
        return template, len(blob)

    def _stored(self, info: dict[str, Any], objects: bytes) -> tuple[int, int]:
        if self._columns is not None and not objects and type(info) is dict:
            written = self._columns.write(info, self._place)
            if written != NO_INFO:
                return written
        blob = codec.encode(info, self._unknown) if info else b""
        if len(blob) > self.bytes_max:
            blob = codec.encode(self.without_largest(info, len(blob)), self._unknown)
        return self.put(with_objects(objects, blob) if objects else blob)

    def without_largest(self, info: dict[str, Any], nbytes: int) -> dict[str, Any]:
        """The info without its largest entries, also of nested maps, so that it has at most ``bytes_max`` bytes.

        The final observation and a reward with axes are kept, because they belong to the results.
        """
        entries = _entries(info, self._unknown, (VECTOR_REWARD, "final_obs") if self._same_step else (VECTOR_REWARD,))
        dropped, left = set(), nbytes
        for size, path in sorted(entries, key=itemgetter(0), reverse=True):
            if left <= self.bytes_max - MARK_BYTES:
                break
            dropped.add(path)
            left -= size
        if not self._dropped:
            self._dropped = True
            limit = f"info_bytes_max={self.bytes_max}, the observation included"
            names = ", ".join(sorted("/".join(map(str, path)) for path in dropped))
            text = (
                f"an info of {nbytes} bytes, of which these entries are dropped ({limit}): {names:.{NAMES_CHARS_MAX}}"
            )
            self._send(control.Suspicious(self._index, text))
        return {**_without(info, dropped), control.INFO_DROPPED: True}


def _entries(
    info: dict[str, Any], unknown: codec.Unknown, kept: Collection[str] = (), path: tuple[Any, ...] = ()
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """The size and path of every entry but those ``kept``; of a map in it, its entries."""
    for key, value in info.items():
        if key in kept:
            continue
        if type(value) is dict and len(path) < NESTING_MAX:
            yield from _entries(value, unknown, (), (*path, key))
        else:
            yield len(codec.encode([key, value], unknown)), (*path, key)


def _without(info: dict[str, Any], dropped: set[tuple[Any, ...]], path: tuple[Any, ...] = ()) -> dict[str, Any]:
    left = {}
    for key, value in info.items():
        if (*path, key) not in dropped:
            left[key] = _without(value, dropped, (*path, key)) if type(value) is dict else value
    return left
