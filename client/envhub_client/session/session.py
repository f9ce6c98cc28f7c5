"""A session on one hub: what may be begun in it, its calls, how it ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial

from gymnasium.vector.async_vector_env import AsyncState

from envhub import errors
from envhub.protocol.client import Reply
from envhub.protocol.messages import Attach, Call, Make, Observe, Op, SetAttr
from envhub.protocol.prelude import Frame
from envhub.secret import Secret
from envhub.transport.address import written
from envhub_client.connection.connection import Connection
from envhub_client.deadline import Deadline
from envhub_client.frames import hide_frames
from envhub_client.session.description import Sizing
from envhub_client.session.maker import SessionMaker
from envhub_client.session.options import SessionOptions
from envhub_client.session.pending import InUse, PendingRequest
from envhub_client.session.vector_session import SeedsGiven, Shares, VectorSession, results_of


class Session(VectorSession):
    """A ``VectorSession`` on one hub; that class describes its attributes, and methods without a docstring."""

    def __init__(
        self,
        class_name: str,
        address: str | Secret[str] | None,
        make: Make | Attach,
        options: SessionOptions,
        timeout: float | None = None,
    ) -> None:
        """Make a session and wait until its envs are built, or take one over; without an address on the private hub.

        ``class_name`` is the name of the class that holds it. ``options`` complete ``make``. The connection
        may take ``timeout`` seconds, by default 10; building the envs is not timed.

        Raises:
            HubUnreachable: no hub answered, or this system is not Linux.
            RequestRefused: the hub does not make this.
            RuntimeError: the envs' spaces differ.
            UnsupportedSpace: a space has no form on the network.
            Exception: what an env's constructor raised, as its own class or as ``EnvRaised``.
        """
        self.in_use = InUse()
        self._maker = self._ending = SessionMaker(address, make, options)
        self.options, self.values = self._maker.options, self._maker.values
        self._seeds = SeedsGiven()
        try:
            self.lane = self._maker.make(timeout)
            self.description = self._maker.description
            self._shares = Shares(self.description.num_envs, self.sizing.num_workers)
            self.pending = PendingRequest(class_name, (self._maker, self.lane))
        except BaseException as error:  # an interrupt, too, must not leave the hub with envs that are not used
            self._maker.end()
            hide_frames(error)
            raise

    @property
    def connection(self) -> Connection:
        """The connection to the hub."""
        return self._maker.connection

    @property
    def address(self) -> str | None:
        return None if self._maker.hub is None else written(self._maker.hub)

    @property
    def token(self) -> str:
        return self.connection.protocol.token.hex()

    @property
    def sizing(self) -> Sizing:
        return self._maker.sizing

    @property
    def compression(self) -> str:
        return self._maker.compression

    def hub_of(self, env: int) -> str | None:
        return self.connection.hub

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, call: Call) -> dict[int, Frame]:
        return self._results(call, self.connection.ask(Op.CALL, call))

    def _results(self, call: Call, reply: Reply) -> dict[int, Frame]:
        return results_of(call, reply, self.description.num_envs, self.connection)

    def begin_call(self, call: Call) -> None:
        self.pending.begin(AsyncState.WAITING_CALL, partial(self.connection.send, Op.CALL, call, keep=True))

    def wait_call(self, call: Call, timeout: float | None) -> dict[int, Frame]:
        return self._results(call, self.pending.wait(AsyncState.WAITING_CALL, self.connection.result, timeout))

    def set_attr(self, message: SetAttr) -> None:
        self.connection.ask(Op.SET_ATTR, message)

    def observe(self) -> Reply:
        return self.connection.ask(Op.OBSERVE, Observe(self.connection.protocol.token, described=True))

    # --- the end ------------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        self.check_free("detach")
        detach(self._maker)
        self.pending.closed = True

    def close(self, terminate: bool, finish: Callable[[], object], deadline: Deadline | None = None) -> None:
        with self.in_use:
            try:
                self.connection.in_use.check()
            except errors.LocalProtocolError:  # it is the parent's, or an earlier attempt was interrupted near its end
                self.connection.close()
                return
            with self.connection.in_use:
                self._end_once_finished(finish, partial(self._maker.end, terminate, deadline))

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close a session that was not closed; at the program's end its connection's end does it."""
        if is_finalizing() or not hasattr(self, "_maker"):
            return
        if not hasattr(self, "pending"):  # its making was interrupted, and so was the end of that
            self._maker.end()
        elif not self.pending.closed:
            with contextlib.suppress(errors.Forked):  # it is the parent's
                self.close(terminate=False, finish=lambda: None)


def detach(maker: SessionMaker) -> None:
    """Leave a session to another process; errors as for ``VectorSession.detach``."""
    if maker.hub is None:
        raise errors.RequestRefused(
            "the envs of a private hub end with its program; make them on a hub of its own to leave them to another"
        )
    maker.connection.check()
    maker.connection.close()
