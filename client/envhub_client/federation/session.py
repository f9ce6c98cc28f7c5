"""A session of parts, and its snapshots: over several hubs, each with some of its rows, or on one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, NoReturn, cast

import numpy as np
from gymnasium.vector.async_vector_env import AsyncState

from envhub import errors
from envhub.protocol.client import Reply
from envhub.protocol.messages import Call, Observe, Observed, Op, SetAttr, SnapshotRequest
from envhub.protocol.prelude import Frame
from envhub.transport.address import written
from envhub_client.connection.connection import Connection
from envhub_client.connection.failures import SESSION_ENDS
from envhub_client.deadline import Deadline
from envhub_client.federation.joint_request import JointRequest
from envhub_client.federation.lane import FederatedLane
from envhub_client.federation.opener import PartsOpener
from envhub_client.federation.part import HubPart, call_of, set_attr_of
from envhub_client.federation.rebuild import PartRebuilder
from envhub_client.frames import hide_frames
from envhub_client.lanes.base import Decode, HubLane, observed_arrays
from envhub_client.session.description import SessionDescription, Sizing
from envhub_client.session.pending import InUse, PendingRequest
from envhub_client.session.session import VectorSession, detach


class FederatedSession(VectorSession):
    """A ``VectorSession`` of parts; that class describes its attributes, and methods without a docstring."""

    lane: FederatedLane

    def __init__(self, class_name: str, opener: PartsOpener, num_envs: int) -> None:
        """Errors are those of ``Session``, of the first hub in the order of ``hubs``, and of hubs that do not agree."""
        self.in_use = InUse()
        self._opener = self._closable = opener
        self.options, self.values, self._seeds = opener.options, opener.values, opener.seeds
        try:
            parts = opener.open(num_envs)
            description = self.description = joint_description([part.maker.description for part in parts])
            self._rebuilder = PartRebuilder(opener, description)
            recovery = None if self.options.on_hub_loss == "raise" else self._rebuilder
            self.lane = FederatedLane(parts, description.has_object_leaves, self.options.copy, recovery)
            self._request: JointRequest[Any] = JointRequest(partial(_lost, self.lane))
            self._snapshots = JointSnapshots(self.lane, self._request)
            workers = [(part.rows, part.maker.sizing.num_workers) for part in parts]
            self._worker_rows = [rows[n::count] for rows, count in workers for n in range(count)]
            self.pending = PendingRequest(class_name, self.lane.give_up, self._request.give_up)
        except BaseException as error:  # an interrupt, too, must not leave hubs with envs that are not used
            self._opener.end_all()
            hide_frames(error)
            raise

    @property
    def connection(self) -> Connection:
        return self.lane.hub_parts()[0].connection

    @property
    def address(self) -> str | None:
        """The addresses or names of the hubs, as they were given but without their keys, separated by commas."""
        hubs = [part.maker.hub for part in self.lane.parts]
        return ", ".join(written(hub) for hub in hubs if hub is not None) or None

    @property
    def token(self) -> str:
        self._refuse_of_several("no token of its own: each of its hubs has a session")
        return self.connection.protocol.token.hex()

    def _refuse_of_several(self, why: str) -> None:
        if not self._opener.is_only_hub:
            raise errors.RequestRefused(f"a vector env over several hubs has {why}; make one on one hub for that")

    @property
    def sizing(self) -> Sizing:
        sizings = [(part.hub, part.maker.sizing) for part in self.lane.hub_parts()]
        if self._opener.is_only_hub:
            return sizings[0][1]
        reasons = "; ".join(f"{hub}: {sizing.reason}" for hub, sizing in sizings)
        return Sizing(sum(sizing.num_workers for _, sizing in sizings), reasons)

    @property
    def compression(self) -> str:
        return "+".join(sorted({part.maker.compression for part in self.lane.parts} - {""}))

    def hub_of(self, env: int) -> str | None:
        return next(part.connection.hub for part in self.lane.parts if env in part.rows)

    def check_free(self, what: str, among_others: bool = False) -> None:
        """Check that ``what`` may be begun, once each hub has its part of a call that was given up."""
        if not self._opener.closed:
            self._request.settle()
        super().check_free(what, among_others)

    def begin_call(self, call: Call) -> None:
        """Begin a call; as long as some of its envs are on no hub, that is left to the wait for it."""
        self.pending.begin(AsyncState.WAITING_CALL, self._begin_call, call)

    def wait_call(self, call: Call, timeout: float | None, decode: Decode) -> dict[int, Any]:
        return self.pending.wait(AsyncState.WAITING_CALL, self._call_results, call, timeout, decode)

    def _begin_call(self, call: Call) -> None:
        self._ask_call(call, ())  # what was asked before is over
        with contextlib.suppress(errors.HubTimeout):
            self._ask_call(call, self.lane.present_parts(call.rows, 0.0))

    def _ask_call(self, call: Call, parts: Sequence[HubPart]) -> None:
        self._call_parts({part: own for part in parts if (own := call_of(call, part.rows)) is not None})

    def _call_parts(self, messages: Mapping[HubPart, Call | SetAttr]) -> None:
        """Begin these calls; the result of each is the encoded results by row."""
        # The request must not hold this session, which ends with the last reference to it.
        reached = self.lane.while_in_reach
        lanes = {part: cast(HubLane, part.lane) for part in messages}  # that of a part which is lost is another one

        def send(part: HubPart) -> None:
            lanes[part].begin_call(messages[part])

        def wait(part: HubPart, timeout: float | None) -> dict[int, Frame]:
            keep: Decode = bytes if lanes[part].name == "shared" else memoryview  # which has views of its memory
            results = reached(part, timeout, lambda left_s: lanes[part].wait_call(left_s, keep))
            return {part.rows[row]: frame for row, frame in results.items()}

        self._request.begin([*messages], send, wait)

    def _call_results(self, call: Call, timeout: float | None, decode: Decode) -> dict[int, Any]:
        deadline = None if timeout is None else Deadline(timeout)
        if not self._request.is_pending:
            self._ask_call(call, self.lane.present_parts(call.rows, timeout))
        results: dict[int, Frame] = {}
        for each in self._request.results(None if deadline is None else deadline.left_s()):
            results.update(each)
        return {row: decode(frame) for row, frame in results.items()}

    def set_attr(self, message: SetAttr) -> None:
        count = self.description.num_envs
        own = {part: set_attr_of(message, part.rows, count) for part in self.lane.present_parts(message.rows)}
        with self._request.given_up_at_error():
            self._call_parts({part: each for part, each in own.items() if each is not None})
            self._request.results(None)
        self._rebuilder.remember(message)

    def snapshot(self, wanted: SnapshotRequest) -> list[dict[str, Any]]:
        return self._snapshots.ask(wanted)

    def observe(self) -> Reply:
        parts = self.lane.present_parts()
        with self._request.given_up_at_error():
            self._request.begin(parts, _ask_observed, partial(_observed, self.lane))
            observed = self._request.results(None)
        arrays = [np.concatenate(leaf) for leaf in zip(*(arrays for _, arrays in observed), strict=True)]
        self.lane.put_earlier(arrays)
        steps = [count for message, _ in observed for count in message.steps]
        given = [flag for message, _ in observed for flag in message.given]
        return Reply(Op.OBSERVE, Observed(len(steps), steps, given), [array.tobytes() for array in arrays])

    def detach(self) -> None:
        self.check_free("detach")
        self._refuse_of_several("no session that another process could take over")
        if self.address is not None:
            self.lane.present_parts()
        (part,) = self.lane.hub_parts()
        try:
            detach(part.maker)
        except SESSION_ENDS as loss:
            _lost(self.lane, part, loss)
        self.pending.closed = True

    def close(self, terminate: bool, finish: Callable[[], object], deadline: Deadline | None = None) -> None:
        with self.in_use:
            self._rebuilder.stop()
            self._end_once_finished(finish, terminate, deadline)


def _ask_observed(part: HubPart) -> None:
    part.connection.send(Op.OBSERVE, Observe(part.connection.protocol.token, described=True), keep=True)


def _observed(lane: FederatedLane, part: HubPart, timeout: float | None) -> tuple[Observed, list[np.ndarray]]:
    reply = lane.while_in_reach(part, timeout, part.connection.result)
    try:
        return reply.message, observed_arrays(reply, len(part.rows), part.lane.leaves)
    except ValueError as error:
        raise part.connection.breach(f"an OBSERVE reply does not fit the session: {error}") from error


def _lost(lane: FederatedLane, part: HubPart, loss: errors.EnvHubError) -> NoReturn:
    """Have the rows of this part made again, and raise this loss, as a request other than a step or reset does."""
    if lane.is_present(part.connection):
        lane.lost(part, loss)
    raise loss


def joint_description(descriptions: Sequence[SessionDescription]) -> SessionDescription:
    """The description of a session that has the rows of all of these."""
    of_each = (islice(cycle(each.observation_spaces), each.num_envs) for each in descriptions)
    observation_spaces = [*chain.from_iterable(of_each)]
    return replace(descriptions[0], num_envs=len(observation_spaces), observation_spaces=observation_spaces)


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
