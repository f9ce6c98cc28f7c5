"""A session over several hubs, each of which has some rows of it."""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from gymnasium.vector.async_vector_env import AsyncState

from envhub import errors
from envhub.protocol.client import Reply
from envhub.protocol.messages import Call, Make, Observed, Op, SetAttr
from envhub.protocol.prelude import Frame
from envhub.transport.address import written
from envhub.values import spaces
from envhub.values.leaf import OBJECT
from envhub_client.connection.connection import CONNECT_TIMEOUT_S, Connection, connect
from envhub_client.federation.agreement import check_agreement, joint_description
from envhub_client.federation.joint_request import JointRequest
from envhub_client.federation.joint_shares import JointShares
from envhub_client.federation.lane import FederatedLane
from envhub_client.federation.part import HubPart
from envhub_client.federation.placement import Room, checked_split, divided, placed
from envhub_client.federation.slices import call_of, set_attr_of
from envhub_client.fleet.members import Member
from envhub_client.frames import hide_frames
from envhub_client.session import make_request
from envhub_client.session.call_results import results_of
from envhub_client.session.description import Sizing
from envhub_client.session.in_use import InUse
from envhub_client.session.lane_session import LaneSession
from envhub_client.session.maker import SessionMaker, end_sessions
from envhub_client.session.options import SessionOptions
from envhub_client.session.pending import PendingRequest
from envhub_client.session.value_codec import ValueCodec

log = logging.getLogger("envhub")

RowsMake = Callable[[range], Make]  # the request for these rows


class FederatedSession(LaneSession):
    """A ``VectorSession`` on several hubs.

    Attributes:
        options, values, in_use, lane, pending, description: as in ``VectorSession`` of ``session.base``.
    """

    def __init__(
        self,
        class_name: str,
        hubs: Sequence[Member],
        make: RowsMake,
        num_envs: int,
        options: SessionOptions,
    ) -> None:
        """Make a session on as many of these hubs as are needed, and wait until all envs are built.

        ``class_name`` is of the class that holds it. ``make`` has the request for
        some rows. ``options.split`` says how many rows each hub gets; without it that follows from their free CPUs.

        Raises:
            ValueError: ``split`` does not divide the envs among the hubs.
            RequestRefused: the hubs disagree, or have no room.
            Exception: as for ``Session``, of the first hub in the order of ``hubs``.
        """
        self._class_name = class_name
        self.in_use = InUse()
        self.options, self.values = options, ValueCodec(allow_pickle=False)
        self._connections: list[Connection] = []  # every one that may have a session of ours
        self._request: JointRequest[Reply] = JointRequest()
        try:
            counts = None if options.split is None else checked_split(options.split, num_envs, len(hubs))
            for _, address in hubs:
                token = secrets.token_bytes(16)
                timeout = options.reconnect_timeout
                self._connections.append(connect(address, token, CONNECT_TIMEOUT_S, None, timeout))
            parts = self._parts(hubs, make, counts or self._placed(num_envs))
            self._first = parts[0].maker
            self.description = joint_description([part.maker.description for part in parts])
            loose = OBJECT in spaces.leaves(self.description.observation_spaces[0])
            self.lane = FederatedLane(parts, self.description.observation_leaves, loose, options.copy)
            self._hub_parts = parts
            self._shares = JointShares(parts)
            self.pending = PendingRequest(class_name, (self.lane, self._request))
        except BaseException as error:  # an interrupt, too, must not leave hubs with envs that are not used
            end_sessions(self._connections, terminate=True)
            hide_frames(error)
            raise

    def _placed(self, num_envs: int) -> list[int]:
        rooms = [_room(connection) for connection in self._connections]
        try:
            return placed(num_envs, rooms)
        except ValueError as error:
            raise errors.RequestRefused(str(error)) from error

    def _parts(self, hubs: Sequence[Member], make: RowsMake, counts: Sequence[int]) -> list[HubPart]:
        """The sessions, of which all are asked for before any is waited for."""
        makers, first = [], 0
        processes = _divided(self.options.num_workers, counts)
        for (name, address), connection, count, num_workers in zip(
            hubs, self._connections, counts, processes, strict=True
        ):
            if not count:
                connection.close()
                continue
            rows = range(first, first + count)
            maker = SessionMaker(address, make(rows), replace(self.options, num_workers=num_workers))
            maker.begin(connection)
            makers.append((name, rows, maker))
            first += count
        lanes = [maker.describe(maker.made()) for _, _, maker in makers]
        check_agreement([(maker.connection, maker.description) for _, _, maker in makers], self.options)
        return [HubPart(name, rows, maker, lane) for (name, rows, maker), lane in zip(makers, lanes, strict=True)]

    @property
    def address(self) -> str | None:
        """The addresses or names of the hubs, as they were given but without their keys, separated by commas."""
        return ", ".join(written(part.maker.hub or "") for part in self._hub_parts)

    @property
    def token(self) -> str:
        """Refused: each of the hubs has a session of its own.

        Raises:
            RequestRefused: always.
        """
        self._refuse("no token of its own: each of its hubs has a session")

    def _refuse(self, why: str) -> NoReturn:
        raise errors.RequestRefused(f"a vector env over several hubs has {why}; make one on one hub for that")

    @property
    def sizing(self) -> Sizing:
        """Number of processes that host the envs now, on all hubs, and each hub's reason."""
        sizings = [(part.hub, part.maker.sizing) for part in self._hub_parts]
        reasons = "; ".join(f"{hub}: {sizing.reason}" for hub, sizing in sizings)
        return Sizing(sum(sizing.num_workers for _, sizing in sizings), reasons)

    @property
    def compression(self) -> str:
        """Compressions of observations on the wire lane, of all hubs; empty for none."""
        return "+".join(sorted({part.maker.compression for part in self._hub_parts} - {""}))

    def hub_of(self, env: int) -> str | None:
        """The name of the hub that has this env now; None where it is not known."""
        return next(part.connection.hub for part in self._hub_parts if env in part.rows)

    def speaks(self, minor: int) -> bool:
        """True if all hubs speak this minor version of the protocol, or a later one."""
        return all(make_request.speaks(part.connection, minor) for part in self._hub_parts)

    def require(self, minor: int, what: str) -> None:
        """Check that all hubs speak this minor version of the protocol; as ``VectorSession.require``."""
        for part in self._hub_parts:
            make_request.require(part.connection, minor, what)

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, call: Call) -> dict[int, Frame]:
        """Make a call, and wait for it; as ``VectorSession.call``."""
        self._begin_call(call)
        return self._call_results(call, None)

    def begin_call(self, call: Call) -> None:
        """Begin a call."""
        self.pending.begin(AsyncState.WAITING_CALL, self._begin_call, call)

    def wait_call(self, call: Call, timeout: float | None) -> dict[int, Frame]:
        """The results of the call that was begun; as ``VectorSession.wait_call``."""
        return self.pending.wait(AsyncState.WAITING_CALL, self._call_results, call, timeout)

    def _begin_call(self, call: Call) -> None:
        calls = {part: own for part in self._hub_parts if (own := call_of(call, part.rows)) is not None}
        self._ask(Op.CALL, calls)

    def _ask(self, op: Op, messages: dict[HubPart, Any]) -> None:
        def send(part: HubPart) -> None:
            part.connection.send(op, messages[part], keep=True)

        self._request.begin([*messages], send, lambda part, timeout: part.connection.result(timeout))

    def _call_results(self, call: Call, timeout: float | None) -> dict[int, Frame]:
        results = {}
        asked = [(part, own) for part in self._hub_parts if (own := call_of(call, part.rows)) is not None]
        for (part, own), reply in zip(asked, self._request.results(timeout), strict=True):
            for row, frame in results_of(own, reply, len(part.rows)).items():
                results[part.rows[row]] = frame
        return results

    def set_attr(self, message: SetAttr) -> None:
        """Set an attribute; errors as for ``call``."""
        count = self.description.num_envs
        own = {part: set_attr_of(message, part.rows, count) for part in self._hub_parts}
        self._ask(Op.SET_ATTR, {part: each for part, each in own.items() if each is not None})
        self._request.results(None)

    def observe(self) -> Reply:
        """Last observations of the envs, as in a hub's reply to OBSERVE."""
        observed = [part.observe() for part in self._hub_parts]
        steps = [count for message, _ in observed for count in message.steps]
        given = [flag for message, _ in observed for flag in message.given]
        leaves = zip(*(arrays for _, arrays in observed), strict=True)
        frames = [b"".join(array.tobytes() for array in leaf) for leaf in leaves]
        return Reply(Op.OBSERVE, Observed(len(steps), steps, given), frames)

    # --- the end ------------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Refuse to leave the session to another process.

        Raises:
            RequestRefused: always.
            SessionClosed: after ``close``.
        """
        self.check_free("detach")
        self._refuse("no session that another process could take over")

    def close(self, terminate: bool, finish: Callable[[], bool]) -> None:
        """End the session; as ``VectorSession.close``."""
        with self.in_use, contextlib.ExitStack() as held:
            for connection in self._connections:
                try:
                    connection.in_use.check()
                    held.enter_context(connection.in_use)
                except errors.LocalProtocolError:  # it is the parent's, or an earlier attempt has closed it
                    connection.close()
            try:
                if self.pending.state is not AsyncState.DEFAULT:
                    terminate = not finish() or terminate
            except errors.EnvRaised:
                raise
            except errors.EnvHubError as error:
                log.debug("closing a %s: %s", self._class_name, error)
            finally:
                # The first one last: while it is open, the session is.
                end_sessions([each for each in self._connections[::-1] if not each.in_use.closed], terminate)
                self.pending.closed = True

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Free a session that was not closed; at the program's end its connections' end does it."""
        if is_finalizing() or not hasattr(self, "_connections"):
            return
        if not hasattr(self, "pending"):  # its making was interrupted, and so was the end of that
            end_sessions(self._connections, terminate=True)
        elif not self.pending.closed:
            with contextlib.suppress(errors.Forked):  # it is the parent's
                self.close(terminate=True, finish=lambda: False)


def _room(connection: Connection) -> Room:
    capacity = connection.welcome.capacity  # an older hub does not tell
    return Room(1.0, 1.0, None) if capacity is None else Room(capacity.cpus, capacity.cpus_free, capacity.envs_free)


def _divided(num_workers: Any, counts: Sequence[int]) -> list[Any]:
    """The number of processes for each hub, by its envs; at least one where it has any."""
    if not isinstance(num_workers, int):
        return [num_workers] * len(counts)
    if not num_workers:
        return [0] * len(counts)
    wanted = min(max(num_workers, sum(map(bool, counts))), sum(counts))
    return divided(wanted, counts, counts)
