"""Snapshots of envs on several hubs: each hub has the part of a snapshot that is of its own envs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from envhub import errors
from envhub.protocol.messages import Op, SnapshotRequest
from envhub_client.connection.connection import Connection
from envhub_client.federation.joint_request import JointRequest
from envhub_client.federation.lane import FederatedLane
from envhub_client.federation.part import HubPart

Table = list[dict[str, Any]]
_JOINED = ("rows", "steps", "episodes", "ended", "problems", "nbytes")  # of each hub's part, in the order of the envs


class JointSnapshots:
    """Snapshots are taken, and envs restored, on all hubs or on none."""

    def __init__(self, lane: FederatedLane, request: JointRequest[Table]) -> None:
        self._lane, self._request = lane, request
        self._taken: dict[str, dict[int, Connection]] = {}  # by name and env, the hub that has it, or had it
        self._unwanted: list[str] = []  # names of those that were not taken on all hubs, which the next request drops

    def ask(self, wanted: SnapshotRequest) -> Table:
        """The table of what was taken, or of all; errors as for ``SnapshotVectorEnv``."""
        rows, table = wanted.rows or [*range(self._lane.num_envs)], []
        if (drop := [*wanted.drop, *self._unwanted]) or wanted.action == "list":
            present = [*filter(self._is_present, self._lane.hub_parts())]
            table = self._ask(dict.fromkeys(present, SnapshotRequest(drop=drop)))
            for name in drop:
                self._taken.pop(name, None)
            self._unwanted = []
        if wanted.action == "take":
            return self._take(wanted.name, rows)
        if wanted.action == "restore":
            self._restore(wanted.name, rows, wanted.sources or rows)
        return table

    def _take(self, name: str, rows: Sequence[int]) -> Table:
        if name in self._taken:
            raise errors.RequestRefused(f"there is a snapshot {name!r} already: drop it first")
        parts = self._parts_of(rows)
        own = {
            part: [row - part.rows.start for row in rows if row in part.rows] for part in dict.fromkeys(parts.values())
        }
        self._taken[name] = {row: part.connection for row, part in parts.items()}
        try:
            return self._ask({part: SnapshotRequest("take", name, rows) for part, rows in own.items()})
        except BaseException as error:  # an interrupt, too
            self._unwanted.append(name)
            if isinstance(error, errors.EnvHubError):
                with contextlib.suppress(errors.EnvHubError):
                    self.ask(SnapshotRequest())
            raise

    def _restore(self, name: str, rows: Sequence[int], sources: Sequence[int]) -> None:
        if (taken := self._taken.get(name)) is None:
            raise errors.SnapshotLost(f"this session has no snapshot {name!r}: it was dropped")
        for source in sources:
            if source not in taken:
                raise errors.SnapshotRefused(f"env {source} is none of the envs {[*taken]} of snapshot {name!r}")
            if not self._lane.is_present(hub := taken[source]):
                raise errors.of_hub(
                    errors.SnapshotLost(f"env {source} has lost its snapshot with {_text(hub)}"), hub.hub
                )
        own: dict[HubPart, tuple[list[int], list[int]]] = {}
        for (row, part), source in zip(self._parts_of(rows).items(), sources, strict=True):
            if taken[source] is not part.connection:
                where = f"env {row} is on {_text(part.connection)}, and the snapshot of env {source} on"
                raise errors.SnapshotRefused(f"{where} {_text(taken[source])}: it goes on in envs of its own hub")
            own_rows, own_sources = own.setdefault(part, ([], []))
            own_rows.append(row - part.rows.start)
            own_sources.append(source - part.rows.start)
        action = "prepare" if len(own) > 1 else "restore"
        try:
            self._ask({part: SnapshotRequest(action, name, *each) for part, each in own.items()})
        except Exception:
            with contextlib.suppress(errors.EnvHubError):
                self._ask(dict.fromkeys(filter(self._is_present, own), SnapshotRequest()))  # ends what is prepared
            raise
        if action == "prepare":
            with contextlib.suppress(errors.EnvHubError):  # the reset that follows says which envs are not restored
                self._ask(dict.fromkeys(own, SnapshotRequest("commit", name)))

    def _parts_of(self, rows: Sequence[int]) -> dict[int, HubPart]:
        """The hub of each of these envs, which must be on one."""
        every = {row: part for part in self._lane.hub_parts() for row in part.rows}
        for row in rows:
            if not self._lane.is_present(hub := every[row].connection):
                raise errors.SnapshotRefused(
                    f"env {row} was lost with {_text(hub)}: step it until it is on a hub again"
                )
        return {row: every[row] for row in rows}

    def _is_present(self, part: HubPart) -> bool:
        return self._lane.is_present(part.connection)

    def _ask(self, requests: Mapping[HubPart, SnapshotRequest]) -> Table:
        def send(part: HubPart) -> None:
            part.connection.send(Op.SNAPSHOT, requests[part], keep=True)

        with self._request.given_up_at_error():
            self._request.begin([*requests], send, self._wait)
            tables = self._request.results(None)
        joint: dict[str, dict[str, Any]] = {}
        for part, table in zip(requests, tables, strict=True):
            for row in table:
                own = {**row, "rows": [part.rows.start + each for each in row["rows"]]}
                before = joint.get(row["name"])
                if before is not None:
                    own |= {key: before[key] + own[key] for key in _JOINED}
                    own["depth"] = max(before["depth"], own["depth"])
                joint[row["name"]] = own
        return [joint[name] for name in self._taken if name in joint]

    def _wait(self, part: HubPart, timeout: float | None) -> Table:
        rows: Table = self._lane.while_in_reach(part, timeout, part.connection.result).message.rows
        return rows


def _text(hub: Connection) -> str:
    return errors.hub_at(hub.address)
