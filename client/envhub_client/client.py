"""``envhub.connect``: a client of a running hub that asks about it and makes vector envs on it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, overload

from envhub.errors import AddressError, HubLost, HubUnreachable, RemoteProtocolError, hub_at, only_linux, shown
from envhub.protocol.messages import Attach, Close, Op, Question
from envhub.secret import Secret
from envhub.transport import address as addresses
from envhub_client.connection.connection import CONNECT_TIMEOUT_S
from envhub_client.connection.connection import connect as connect_to
from envhub_client.frames import hiding_frames

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from envhub_client.envs.vector_env import HubVectorEnv
    from envhub_client.make import EnvLike
    from envhub_client.observer import Observer
    from envhub_client.option_keywords import ClientKeywords

_HEALTH: dict[str, Any] = {
    "status": str,
    "sessions": int,
    "uptime_s": (int, float),
    "loop_lag_s": (int, float),
    "unready": dict,
}
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
    chosen = address or addresses.of_environment()
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
        names: list[str] = self._ask(Op.LIST).names
        return names

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
    def end(self, session: str) -> None:
        """End a session of this hub at once, whatever it is at; also one whose envs are being made.

        Its client's pending or next call raises ``SessionLost``.

        Args:
            session: its token. With the right ``admin``, and as the hub's own user, also the name that ``sessions``
                shows.

        Raises:
            ValueError: this is no token.
            SessionLost: there is no such session (any longer).
            HubUnreachable: no hub answered.
        """
        import secrets  # not for a health check

        from envhub_client.observer import token_bytes

        connection = connect_to(self._hub, secrets.token_bytes(16), self.timeout)
        try:
            connection.send(Op.ATTACH, Attach(token_bytes(session)))
            connection.give_up()  # the session may be long in making, and CLOSE does not wait
            connection.ask(Op.CLOSE, Close(terminate=True), timeout=self.timeout)
        finally:
            connection.close()

    @hiding_frames
    def sessions(self) -> list[dict[str, Any]]:
        """One description per session: env, number of envs, process ids of its workers, phase."""
        return self._rows(Op.SESSIONS)

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
                raise RemoteProtocolError(
                    f"{hub_at(self.address)} says of its health {name}={shown(row.get(name), 100)}"
                )
        return row

    def _row(self, op: Op) -> dict[str, Any]:
        if len(rows := self._rows(op)) != 1:
            raise RemoteProtocolError(f"{hub_at(self.address)} answered {op.name} with {len(rows)} rows")
        return rows[0]

    def _rows(self, op: Op) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._ask(op).rows
        return rows

    def _ask(self, op: Op) -> Any:
        """The answer to a question; one that was lost with its hub is asked of the next hub at the address."""
        try:
            return self._connection.ask(op, Question(), timeout=self.timeout).message
        except HubLost as lost:
            try:
                connection = connect_to(self._hub, timeout=min(self.timeout, RETURN_S))
            except HubUnreachable:
                raise lost from None
            self._connection.close()
            self._connection = connection
        return self._connection.ask(op, Question(), timeout=self.timeout).message

    def close(self) -> None:
        """Close the connection; vector envs made here live on."""
        self._connection.close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()
