"""The seam between a vector env and where its envs are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from envhub.protocol.client import Reply
from envhub.protocol.messages import Call, Reset, SetAttr
from envhub.protocol.prelude import Frame
from envhub_client.deadline import Deadline
from envhub_client.lanes.base import Lane
from envhub_client.session.description import SessionDescription, Sizing
from envhub_client.session.in_use import InUse
from envhub_client.session.options import SessionOptions
from envhub_client.session.pending import PendingRequest
from envhub_client.session.value_codec import ValueCodec


class VectorSession(Protocol):
    """Everything that a ``HubVectorEnv`` needs of its envs, wherever these are.

    One request is pending at a time. Resets and steps go by the ``lane``, begun and waited for through ``pending``;
    calls by the methods here. Its users hold ``in_use`` from their first look at it until they have acted on that.
    Every method but ``close`` may raise ``HubLost`` and any other ``EnvHubError`` of the session.

    Attributes:
        description: what does not change in it.
        options: its options.
        values: encodes values for the envs, and decodes theirs.
        in_use: for ``with``: use the session in this thread alone. Entering it raises ``SessionInUse`` where another
            thread uses it.
        lane: steps the envs; the same object for the session's whole life.
        pending: the request that was begun and is to be waited for; says too whether the session is over.
    """

    description: SessionDescription
    options: SessionOptions
    values: ValueCodec
    in_use: InUse
    lane: Lane
    pending: PendingRequest

    @property
    def address(self) -> str | None:
        """The hub's address or name, as it was given but without its keys; None for a private hub, or without one."""

    @property
    def token(self) -> str:
        """The key to this session, with which another process takes it over or observes it."""

    @property
    def sizing(self) -> Sizing:
        """Number of processes that host the envs now, and the reason."""

    @property
    def compression(self) -> str:
        """Compression of observations on the wire lane; empty for none."""

    def hub_of(self, env: int) -> str | None:
        """The name of the hub that has this env now; None for a private hub, without one, or where it is not known."""

    def check_free(self, what: str, among_others: bool = False, resets_all: bool = False) -> None:
        """Check that ``what`` may be begun; with ``among_others`` also while some envs are outstanding.

        ``resets_all``: it is a reset of all envs, which may be begun while some wait for others of their share.

        Raises:
            SessionBusy: another request is pending, or envs are outstanding.
            SessionClosed: after ``close``.
        """

    def begin_reset(self, reset: Reset, resets_all: bool) -> None:
        """Begin a reset; one of all envs gives up those that wait for others of their share."""

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Sequence[np.ndarray]) -> None:
        """Begin a step of these envs; those of a vector env wait for the others of their share.

        Raises:
            ValueError: one of them is under way, or waits already; no env has moved.
            SessionBusy: a wait for others timed out, and the hub is too old for another ``begin_rows`` before it is
                repeated.
        """

    def check_received(self) -> None:
        """Check that some env is under way.

        Raises:
            NothingPending: none is.
        """

    def call(self, call: Call) -> dict[int, Frame]:
        """Make a call of its rows, or of all rows if it names none, and wait for it.

        Returns:
            The encoded result of each of these rows, empty where the env was left alone.

        Raises:
            RemoteProtocolError: the hub's reply does not have one result of each of them.
            Exception: what an env raised.
        """

    def begin_call(self, call: Call) -> None:
        """Begin a call."""

    def wait_call(self, call: Call, timeout: float | None) -> dict[int, Frame]:
        """The results of this call, which was begun; as ``call``, and with errors as for ``PendingRequest.wait``."""

    def set_attr(self, message: SetAttr) -> None:
        """Set an attribute; errors as for ``call``."""

    def observe(self) -> Reply:
        """Last observations of the envs, as in a hub's reply to OBSERVE."""

    def detach(self) -> None:
        """Leave the session as it is, for another process to take it over; this object is closed then.

        Raises:
            RequestRefused: the envs are this program's private hub's, which ends with it.
            HubLost: the hub is known to be lost, and the session with it.
            SessionBusy: a request is pending, or envs are outstanding.
            SessionClosed: after ``close``.
        """

    def close(self, terminate: bool, finish: Callable[[], object], deadline: Deadline | None = None) -> None:
        """End the session: have the envs closed, or with ``terminate`` kill their processes. May be called again.

        ``finish`` waits for the pending request, if there is one. At the deadline, and at an interrupt, the processes
        whose envs are not closed are killed.

        Raises:
            LocalProtocolError: another thread is using this session; nothing was closed.
            EnvRaised: as an env raised it in the pending request; all is closed.
        """
