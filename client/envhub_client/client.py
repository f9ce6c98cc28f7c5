"""``envhub.connect``: a client of a running hub that asks about it and makes vector envs on it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, overload

from envhub.errors import AddressError, HubLost, HubUnreachable, RemoteProtocolError, brief, hub_at, only_linux
from envhub.protocol.messages import Attach, Op, Operate, Question, Status
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub_client.connection.connection import CONNECT_TIMEOUT_S
from envhub_client.connection.connection import connect as connect_to
from envhub_client.frames import hiding_frames

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from envhub_client.envs.vector_env import HubVectorEnv
    from envhub_client.make import EnvLike
    from envhub_client.observer import Frame, Observer
    from envhub_client.option_keywords import ClientKeywords

_SECONDS = (int, float)
_HEALTH: Any = {"status": str, "sessions": int, "uptime_s": _SECONDS, "loop_lag_s": _SECONDS, "unready": dict}
QUESTION = Question()
WAITING = "drain_wait"  # the action that takes as long as the sessions do
RETURN_S = 1.0  # for a hub that was lost to answer again; the next question tries once more


@hiding_frames
def connect(address: str | Secret[str] | None = None, timeout: float = CONNECT_TIMEOUT_S) -> Client:
    """A client of the hub at ``address``.

    Args:
        address: ``tcp://host:port``, ``ipc://path``, ``envhub://token@host:port`` where the hub wants a key,
            ``ssh://host`` through one's own ssh, or the name of a hub that ``envhub login`` keeps; without it
            ``ENVHUB_ADDRESS``, else where ``envhub serve`` listens by default.
        timeout: seconds for the connection, and for each answer.

    Raises:
        AccessDenied: the hub does not let this client's key in, or none without one.
        AddressError: not an address, or by default one where somebody else could listen in the hub's place.
        HubUnreachable: no hub answered in time; the message names the address and what to check.
    """
    chosen = address or addresses.address_of_environment()
    if not chosen:
        if sys.platform != "linux":
            raise AddressError(only_linux("a hub that is found without an address"))
        chosen = addresses.default_address()
        if addresses.runtime_folder().exists():
            addresses.check_private(addresses.runtime_folder())
    return Client(chosen, timeout)


class Client(AbstractContextManager["Client"]):
    """A connection to the hub at ``address``, usable in ``with``; it goes on with a hub that is started there again.

    Attributes:
        address: of the hub, without keys.
        timeout: the seconds for each answer.
    """

    def __init__(self, address: str | Secret[str], timeout: float = CONNECT_TIMEOUT_S) -> None:
        self._hub = addresses.guarded(address)  # as it was given: a name, or with keys
        self.timeout = timeout
        self._connection = connect_to(address, timeout=timeout)
        self.address = self._connection.address

    @property
    def host(self) -> str:
        """The name of the hub's machine; empty where the hub does not say."""
        return self._connection.welcome.host

    @hiding_frames
    def envs(self) -> list[str]:
        """The names that ``make_vec`` accepts here.

        Raises:
            HubTimeout, HubLost: as every question of this class.
        """
        # The hub may have to start a worker first, which reads what is registered.
        return [*self._ask(Op.LIST).names]

    @hiding_frames
    def make_vec(self, env: EnvLike, num_envs: int = 1, **options: Unpack[ClientKeywords]) -> HubVectorEnv:
        """A vector env on this hub; arguments and errors as for ``envhub.make_vec``."""
        from envhub_client.make import make_vec

        return make_vec(env, num_envs, hub=self._hub, **options)

    @overload
    def attach(self, token: str, *, observe: Literal[False] = False, **options: Any) -> HubVectorEnv: ...

    @overload
    def attach(self, token: str, *, observe: Literal[True]) -> Observer: ...

    @hiding_frames
    def attach(self, token: str, *, observe: bool = False, **options: Any) -> HubVectorEnv | Observer:
        """Take over a session of this hub that another process made, or observe it.

        The envs go on in the same episodes. The process that held the session loses it: its next call raises
        ``SessionLost``. A step that was under way is finished first, and its results are in ``observe()`` only.

        Args:
            token: of the session, as ``HubVectorEnv.detach`` returned it, or its ``token``. With the right ``admin``,
                and as the hub's own user, also the name that ``sessions`` shows; ``attach(name).close()`` ends it.
            observe: return an ``Observer`` instead, and leave the session where it is.
            **options: ``copy``, ``lane``, ``compression`` and ``reconnect_timeout``, as for ``make_vec``. There is no
                ``on_hub_loss``: what made the envs is not here, so that they cannot be made again.

        Raises:
            ValueError: this is no token.
            SessionLost: there is no such session (any longer).
            HubUnreachable: no hub answered.
        """
        from envhub_client.envs.vector_env import HubVectorEnv
        from envhub_client.observer import Observer, token_bytes
        from envhub_client.session.options import SessionOptions
        from envhub_client.session.session import Session

        session = token_bytes(token)
        if observe:
            return Observer(connect_to(self._hub, timeout=self.timeout), session, self.timeout)
        if unknown := options.keys() - {"copy", "lane", "compression", "reconnect_timeout"}:
            raise TypeError(f"attach takes no {', '.join(sorted(unknown))}; the session was made already")
        attached = Session(HubVectorEnv.__name__, self._hub, Attach(session), SessionOptions(**options), self.timeout)
        return HubVectorEnv(attached)

    @hiding_frames
    def end(self, session: str, why: str = "") -> dict[str, Any]:
        """End a session of this hub at once, whatever it is at; also one whose envs are being made.

        Its client's pending or next call raises ``SessionLost``, which says who ended it, and why.

        Args:
            session: its name, as ``sessions`` shows it, or its token. The sessions of others take the right ``admin``,
                or the hub's own user.
            why: the reason, for the session's user and the log.

        Returns:
            The session's row of ``sessions(ended=True)``.

        Raises:
            ValueError: this is no name or token.
            SessionLost: there is no such session (any longer).
            HubUnreachable: no hub answered.
        """
        return self._operate("end", session, why=why)[0]

    @hiding_frames
    def stack(self, session: str, env: int | None = None) -> list[dict[str, Any]]:
        """The Python stacks of a session's workers, or of that of one env, which go on; also in native code.

        A row has ``worker``, its number, ``pid``, ``envs``, and ``stacks``, or ``problem`` if there are none.
        """
        return self._operate("stack", session, **({} if env is None else {"env": env}))

    @hiding_frames
    def frame(self, session: str, env: int) -> Frame:
        """The frame that an env draws now, between two steps, or its observation. Its program does not notice.

        Raises:
            RequestRefused: the env draws nothing, or it is busy.
        """
        from envhub_client.observer import Frame

        reply = self._order("frame", session, env=env)
        return Frame.of_row(reply.message.rows[0], reply.frames)

    @hiding_frames
    def restart(self, session: str, env: int, why: str = "") -> dict[str, Any]:
        """End the worker of an env and start it again, which costs the session no restart.

        Its ``envs``, which the result has, are truncated; ``infos`` says who did that, and why.
        """
        return self._operate("restart", session, env=env, why=why)[0]

    @hiding_frames
    def drain(self, deadline: float | None = None, message: str = "", wait: bool = False) -> dict[str, Any]:
        """Have the hub make no session any more, and end with its last one; its clients are told.

        Args:
            deadline: seconds after which the sessions that are left end, as by SIGTERM; None for never.
            message: the reason.
            wait: return when the hub has ended, with ``cut``, the number of sessions that it ended.
        """
        # In a request 0 is never.
        wire_s = 0.0 if deadline is None else deadline or 0.001
        return self._operate(WAITING if wait else "drain", why=message, deadline_s=wire_s)[0]

    @hiding_frames
    def reload(self) -> dict[str, Any]:
        """Have the hub read its file again; sessions that run keep their settings."""
        return self._operate("reload")[0]

    def _operate(self, action: str, session: str = "", **fields: Any) -> list[dict[str, Any]]:
        return [*self._order(action, session, **fields).message.rows]

    def _order(self, action: str, session: str, **fields: Any) -> Any:
        """Have the hub carry out an action once; its answer. Fields are those of ``Operate``."""
        import secrets  # not for a health check

        from envhub_client.observer import token_bytes

        if session:
            token_bytes(session)
        self._ask(Op.HEALTH)  # the hub may have been started again; an order is not given to another hub
        order = Operate(action, secrets.token_bytes(16), session, **fields)
        return self._connection.ask(Op.OPERATE, order, timeout=None if action == WAITING else self.timeout)

    @hiding_frames
    def sessions(self, ended: bool = False) -> list[dict[str, Any]]:
        """A row for each session of this client, or of all for an administrator; or for the last that have ended.

        ``server/docs/monitoring.md`` says what a row has.
        """
        return self._rows(Op.STATUS, Status("ended" if ended else "sessions"))

    @hiding_frames
    def slow(self) -> list[dict[str, Any]]:
        """A row for each of the last 128 steps, resets and calls of these sessions that took at least ``slow_ms``.

        The oldest is first. The last ones may still go on: ``ago_s``, since when they are over, is None.
        """
        return self._rows(Op.STATUS, Status("slow"))

    @hiding_frames
    def stats(self) -> dict[str, Any]:
        """The hub's counters."""
        return self._row(Op.STATS)

    @hiding_frames
    def health(self) -> dict[str, Any]:
        """Health of the hub: ``status`` is ``ok`` or ``draining``.

        Also ``hub``, ``uptime_s``, ``sessions``, ``loop_lag_s``, and ``unready``: why envs cannot be made, by name.
        """
        row = self._row(Op.HEALTH)
        for name, kinds in _HEALTH.items():
            if not isinstance(row.get(name), kinds):
                text = f"says of its health {name}={brief(row.get(name), 100)}"
                raise RemoteProtocolError(f"{hub_at(self.address)} {text}")
        return row

    def _row(self, op: Op) -> dict[str, Any]:
        if len(rows := self._rows(op)) != 1:
            raise RemoteProtocolError(f"{hub_at(self.address)} answered {op.name} with {len(rows)} rows")
        return rows[0]

    def _rows(self, op: Op, question: Question | Status = QUESTION) -> list[dict[str, Any]]:
        return [*self._ask(op, question).rows]

    def _ask(self, op: Op, question: Question | Status = QUESTION) -> Any:
        """The answer to a question; one that was lost with its hub is asked of the next hub at the address."""
        try:
            return self._connection.ask(op, question, timeout=self.timeout).message
        except HubLost as lost:
            try:
                connection = connect_to(self._hub, timeout=min(self.timeout, RETURN_S))
            except HubUnreachable:
                raise lost from None
            self._connection.close()
            self._connection = connection
        return self._connection.ask(op, question, timeout=self.timeout).message

    def close(self) -> None:
        """Close the connection; vector envs made here live on."""
        self._connection.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()
