"""A session on one hub at a time: what may be begun in it, its calls, how it goes on after a loss, how it ends."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from gymnasium.vector.async_vector_env import AsyncState

from envhub import errors
from envhub.protocol.client import Reply
from envhub.protocol.messages import Attach, Call, Failure, Make, Observe, Op, Reset, SetAttr, unpack_rows
from envhub.protocol.prelude import Frame
from envhub.secret import Secret
from envhub.transport.address import written
from envhub.vector_errors import NothingPending, SessionBusy
from envhub_client.connection.connection import Connection
from envhub_client.connection.failures import raise_failure
from envhub_client.frames import hide_frames
from envhub_client.lanes.base import Lane
from envhub_client.session import make_request
from envhub_client.session.description import Sizing
from envhub_client.session.in_use import InUse
from envhub_client.session.maker import SessionMaker, end_session
from envhub_client.session.options import SessionOptions
from envhub_client.session.pending import PendingRequest
from envhub_client.session.recovery import RecoveringLane
from envhub_client.session.renewal import SessionRenewal
from envhub_client.session.shares import Shares

log = logging.getLogger("envhub")


class Session:
    """A ``VectorSession`` on one hub.

    Attributes:
        options, values, in_use, lane, pending, description: as in ``VectorSession`` of ``session.base``.
    """

    lane: Lane

    def __init__(
        self,
        owner: str,
        address: str | Secret[str] | None,
        make: Make | Attach,
        options: SessionOptions,
        timeout: float | None = None,
    ) -> None:
        """Make a session and wait until its envs are built, or take one over; without an address on the private hub.

        ``owner`` is the name of the class that holds it. ``options`` complete ``make``. The connection
        may take ``timeout`` seconds, by default 10; building the envs is not timed.

        Raises:
            HubUnreachable: no hub answered, or this system is not Linux.
            RequestRefused: the hub does not make this.
            RuntimeError: the envs' spaces differ.
            UnsupportedSpace: a space has no form on the network.
            Exception: what an env's constructor raised, as its own class or as ``EnvRaised``.
        """
        self._owner = owner
        self.in_use = InUse()
        self._maker = SessionMaker(address, make, options)
        self.options, self.values = self._maker.options, self._maker.values
        self._renewal = SessionRenewal(self._maker)
        try:
            self.lane = self._maker.make(timeout)
            if self.options.on_hub_loss == "recreate":
                self.lane = RecoveringLane(self.lane, self._renewal)
            self.description = self._maker.description
            self._shares = Shares(self.description.num_envs, max(1, self.sizing.num_workers))
            self.pending = PendingRequest(owner, (self._maker, self.lane))
        except BaseException as error:  # an interrupt, too, must not leave the hub with envs that are not used
            self._maker.end_all_but(None)
            hide_frames(error)
            raise

    @property
    def connection(self) -> Connection:
        """The connection to the hub that has the envs now."""
        return self._maker.connection

    @property
    def address(self) -> str | None:
        """The hub's address or name, as it was given but without its keys; None for a private or unnamed hub."""
        return None if self._maker.hub is None else written(self._maker.hub)

    @property
    def token(self) -> str:
        """The key to this session, with which another process takes it over or observes it."""
        return self.connection.protocol.token.hex()

    @property
    def sizing(self) -> Sizing:
        """Number of processes that host the envs now, and the reason."""
        return self._maker.sizing

    @property
    def compression(self) -> str:
        """Compression of observations on the wire lane; empty for none."""
        return self._maker.compression

    def hub_of(self, env: int) -> str | None:
        """The name of the hub that has this env now; as ``VectorSession.hub_of``."""
        return self.connection.hub

    def speaks(self, minor: int) -> bool:
        """True if the hub speaks this minor version of the protocol, or a later one."""
        return self.connection.speaks(minor)

    def require(self, minor: int, what: str) -> None:
        """Check that the hub speaks this minor version of the protocol; as ``VectorSession.require``."""
        make_request.require(self.connection, minor, what)

    # --- steps and resets: what may begin, and partial batches; ``lane`` executes them --------------------------------

    def check_free(self, what: str, among_others: bool = False, resets_all: bool = False) -> None:
        """Check that ``what`` may be begun; as ``VectorSession.check_free``."""
        pending = self.pending
        if pending.closed or self._maker.connection.in_use.closed:
            raise pending.closed_error()
        if pending.state is not AsyncState.DEFAULT:
            raise pending.busy_error(what)
        if self._shares.held and not among_others and not resets_all:
            text = f"while envs {self._shares.held} wait for envs {self._shares.missing} of their share to be sent."
            raise SessionBusy(f"Calling `{what}` {text}", "send")
        if self.lane.settle() and not among_others:
            raise SessionBusy(f"Calling `{what}` while envs are under way that `recv` has not returned.", "recv")

    def begin_reset(self, reset: Reset, resets_all: bool) -> None:
        """Begin a reset; one of all envs gives up those that wait for others of their share."""
        if resets_all:
            self._shares.give_up()
        self.pending.begin(AsyncState.WAITING_RESET, self.lane.begin_reset, reset)

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these envs; as ``VectorSession.begin_rows``."""
        if not self.description.vector:
            self.lane.begin_rows(env_ids, codes, arrays)
            return
        moving = self.lane.moving[env_ids]
        if moving.any():
            raise ValueError(f"envs {env_ids[moving].tolist()} are under way; receive them first")
        self._shares.send(env_ids, codes, arrays, self.lane.begin_rows)

    def check_received(self) -> None:
        """Check that some env is under way; as ``VectorSession.check_received``."""
        if self.lane.outstanding:
            return
        why = "without any prior call to `send` or `async_reset`."
        if held := self._shares.held:
            why = f"while envs {held} of a vector env wait for envs {self._shares.missing} of their share to be sent."
        raise NothingPending(f"Calling `recv` {why}", "recv")

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, call: Call) -> dict[int, Frame]:
        """Make a call, and wait for it; as ``VectorSession.call``."""
        with self._noticing_loss():
            return self._results(call, self.connection.ask(Op.CALL, call))

    def begin_call(self, call: Call) -> None:
        """Begin a call."""
        with self._noticing_loss():
            self.pending.begin(AsyncState.WAITING_CALL, self.connection.send, Op.CALL, call)

    def wait_call(self, call: Call, timeout: float | None) -> dict[int, Frame]:
        """The results of the call that was begun; as ``VectorSession.wait_call``."""
        with self._noticing_loss():
            reply = self.pending.wait(AsyncState.WAITING_CALL, self.connection.wait, timeout)
            if isinstance(reply.message, Failure):
                raise_failure(reply.message, self.connection.address, self.connection.hub)
            return self._results(call, reply)

    def _results(self, call: Call, reply: Reply) -> dict[int, Frame]:
        num_envs = self.description.num_envs
        wanted = call.rows or range(num_envs)
        try:
            if len(reply.frames) == 1:
                results: Sequence[tuple[int, Frame]] = unpack_rows(reply.frames[0], num_envs)
            else:
                results = [*zip(wanted, reply.frames, strict=True)]
            if [row for row, _ in results] != [*wanted]:
                raise ValueError(f"results of envs {[row for row, _ in results]}")
        except ValueError as error:
            raise errors.RemoteProtocolError(f"a reply to CALL does not fit the session: {error}") from error
        return dict(results)

    def set_attr(self, message: SetAttr) -> None:
        """Set an attribute; errors as for ``call``."""
        with self._noticing_loss():
            self.connection.ask(Op.SET_ATTR, message)
        if self.options.on_hub_loss == "recreate":
            self._renewal.remember(message)

    def observe(self) -> Reply:
        """Last observations of the envs, as in a hub's reply to OBSERVE."""
        with self._noticing_loss():
            return self.connection.ask(Op.OBSERVE, Observe(self.connection.protocol.token, described=True))

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        """If the hub proves lost in the block, later requests go to the next hub, where ``on_hub_loss`` says so."""
        try:
            yield
        except errors.HubLost as error:
            self.lane.lose(error)
            raise

    # --- the end ------------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Leave the session to another process; as ``VectorSession.detach``."""
        self.check_free("detach")
        if self._maker.hub is None:
            raise errors.RequestRefused(
                "the envs of a private hub end with its program; make them on a hub of its own to leave them to another"
            )
        with self._noticing_loss():
            self.connection.tend()
        self.connection.close()
        self.pending.closed = True

    def close(self, terminate: bool, finish: Callable[[], bool]) -> None:
        """End the session; as ``VectorSession.close``."""
        with self.in_use:
            try:
                self.connection.in_use.check()
            except errors.LocalProtocolError:  # it is the parent's, or an earlier attempt was interrupted near its end
                self.connection.close()
                return
            with self.connection.in_use:
                self._close(terminate, finish)

    def _close(self, terminate: bool, finish: Callable[[], bool]) -> None:
        self._renewal.stop()
        try:
            if self.pending.state is not AsyncState.DEFAULT:
                terminate = not finish() or terminate
        except errors.EnvRaised:
            raise
        except errors.EnvHubError as error:
            log.debug("closing a %s: %s", self._owner, error)
        finally:
            self._maker.end_all_but(self.connection)
            end_session(self.connection, terminate)
            self.pending.closed = True

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Free a session that was not closed; at the program's end its connection's end does it."""
        if is_finalizing() or not hasattr(self, "_maker"):
            return
        if not hasattr(self, "pending"):  # its making was interrupted, and so was the end of that
            self._maker.end_all_but(None)
        elif not self.pending.closed:
            with contextlib.suppress(errors.Forked):  # it is the parent's
                self.close(terminate=True, finish=lambda: False)
