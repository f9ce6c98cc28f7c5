"""The place of a row's info in the arena, and the way of an info that does not fit into it."""

from __future__ import annotations

from typing import Any, Callable

from envhub.arena.memory import STATUS_INFO, STATUS_OK, Arena
from envhub.arena.stand_in import with_objects
from envhub.values import codec
from envhub.values.info_columns import Writer
from envhub_server.ipc import control

NO_INFO = (0, 0)  # the template and the length of an empty info


class InfoPlace:
    """Stores the infos of one row.

    Attributes:
        bytes_max: an encoded info that is larger is dropped.
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
        is dropped since it has more than ``bytes_max`` bytes besides the observation. ``columns`` writes infos in
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
        self._dropped = False  # whether that was reported

    def store(self, info: dict[str, Any], objects: bytes = b"") -> None:
        """Store an info, and the encoded leaves of the observation that have no fixed size, if it has any."""
        index = self._index
        self._template[index], length = self._stored(info, objects) if info or objects else NO_INFO
        self._length[index] = length
        self._status[index] = STATUS_INFO if length else STATUS_OK

    def store_objects(self, objects: bytes) -> None:
        """Store the encoded leaves of the observation that have no fixed size, without an info."""
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
            blob = codec.encode(self.instead_of(info, len(blob)), self._unknown)
        return self.put(with_objects(objects, blob) if objects else blob)

    def instead_of(self, info: dict[str, Any], nbytes: int) -> dict[str, Any]:
        """The info in place of one of so many bytes, which is too large; the final observation belongs to the results.

        An empty ``final_info`` stays beside it, for clients find both at an episode's end.
        """
        if not self._dropped:
            self._dropped = True
            limit = f"info_bytes_max={self.bytes_max}, the observation included"
            self._send(control.Suspicious(self._index, f"an info of {nbytes} bytes, which is dropped: {limit}"))
        ended = self._same_step and "final_obs" in info
        final = {"final_obs": info["final_obs"], "final_info": {}} if ended else {}
        return {**final, control.INFO_DROPPED: True}
