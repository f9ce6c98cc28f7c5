"""Sessions of a hub by number and by token, and the clients that hold them."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Failure, Op
from envhub_server.hub.biography import CLOSED, KILLED, Ending
from envhub_server.hub.planner import Usage
from envhub_server.hub.resources import NAME_BYTES, Attaching
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.log import log
from envhub_server.memory.session_memory import ArenaBudget
from envhub_server.network.access import Access
from envhub_server.network.connections import Holder
from envhub_server.session.machine import SessionMachine

MINUTE_S = 60.0

_KEY_REMOVED = Failure("session_lost", "session", "the key of its client was removed")
_NOT_ATTACHABLE = "this hub has no such session to take over: its lease ran out, it was closed or taken over"


class Directory:
    """The sessions of one hub. It owns which there are, and by which token each is reached."""

    def __init__(self, protocol: HubProtocol, access: Access) -> None:
        self.protocol, self.access = protocol, access
        self.by_number: dict[int, SessionRuntime] = {}  # the sessions, for reading
        self.by_token: dict[bytes, SessionRuntime] = {}  # likewise; a token is another one after each takeover
        self.next_number = 1  # the number of the next session
        self.restarts_before = self.steps_before = 0  # of the workers, and envs, of sessions that have ended

    @property
    def sessions(self) -> Collection[SessionRuntime]:
        return self.by_number.values()

    # --- beginning and end --------------------------------------------------------------------------------------------

    def add(self, runtime: SessionRuntime, request: Incoming, holder: Holder) -> None:
        self.next_number = runtime.number + 1
        self.by_number[runtime.number] = self.by_token[request.token] = runtime
        make, life = runtime.state.make, runtime.life
        life.owner, life.label = self.access.owner(holder, request), make.origin.label
        factories = {"factories": make.factories.hex()} if make.factories else {}
        made: dict[str, Any] = {"env": make.name[:200] or "factories", "num_envs": make.num_envs, **factories}
        # Event: A client makes a session. `factories` is the SHA-256 of those that it sent.
        runtime.log.info("session_made", **self.access.who(holder, request.peer), **made, audit=True)

    def remove(self, runtime: SessionRuntime) -> None:
        why = runtime.ended.failure(runtime.name)
        for token in [token for token, each in self.by_token.items() if each is runtime]:
            self.forget(token, why)
        for token in runtime.former_tokens:
            self.protocol.forget(token, why)
        self.restarts_before += runtime.state.restarts
        self.steps_before += runtime.steps
        del self.by_number[runtime.number]

    def forget(self, token: bytes, why: Failure | None = None) -> None:
        """Forget a token, which is of no session any more; its connections may have views of memory to read."""
        if (runtime := self.by_token.pop(token, None)) is not None:
            runtime.connections.update(self.protocol.link_of(token).connections)
        self.protocol.forget(token, why)

    # --- clients ------------------------------------------------------------------------------------------------------

    def named(self, session: bytes, holder: Holder) -> SessionRuntime | None:
        """The session of this token or, for an administrator, of this name."""
        if not holder.administers or len(session) != NAME_BYTES:
            return self.by_token.get(session)
        return self.called(session.hex())

    def called(self, name: str) -> SessionRuntime | None:
        return next((each for each in self.sessions if each.name == name), None)

    def name_of(self, token: bytes) -> str:
        """The name of the session of this token, also after its end."""
        runtime = self.by_token.get(token)
        return token[:NAME_BYTES].hex() if runtime is None else runtime.name

    def operated(self, session: str, holder: Holder) -> SessionRuntime | None:
        """The session of this name or token, if this client may act on it: its own, or as an administrator any."""
        runtime = self.called(session)
        if runtime is None:
            # The token lets its holder use the session.
            with contextlib.suppress(ValueError):
                runtime = self.by_token.get(bytes.fromhex(session))
            return runtime if runtime is not None and holder.owns(runtime.owner) else None
        own = bool(holder.name) and holder.name == runtime.owner  # a client without a key is anybody
        return runtime if own or holder.administers else None

    def find(self, request: Incoming, holder: Holder) -> SessionRuntime | None:
        runtime = self.named(request.message.session, holder)
        if runtime is None or holder.owns(runtime.owner):
            return runtime
        self.log_foreign(request.peer, holder, request.op, request.message.session)
        return None

    def log_foreign(self, peer: bytes, holder: Holder, op: Op, token: bytes) -> None:
        """Note a request that is refused since the session is another client's; its sender learns of no session."""
        runtime = self.by_token.get(token)
        owner = "" if runtime is None else runtime.owner
        named = {"op": op.name, "session": self.name_of(token), "owner": owner, "why": "another client's session"}
        # Event: A request of a client was refused; one to another client's session has it as `owner`.
        log.warning("request_refused", **self.access.who(holder, peer), **named, audit=True)

    def log_unknown(self, peer: bytes, session: bytes, holder: Holder, why: str) -> None:
        """Log that a client names a session that this hub has not, as after the hub was started again."""
        who = self.access.who(holder, peer)
        # Event: A client named a session that the hub has not, as after the hub was started again.
        log.info("session_unknown", once_per=("client", "why"), **who, session=session.hex()[:8], why=why, audit=True)

    def attach(self, request: Incoming, holder: Holder, budget: ArenaBudget) -> Failure | None:
        runtime = self.find(request, holder)
        if runtime is None or not runtime.state.attachable:
            return Failure("session_lost", "session", _NOT_ATTACHABLE)
        self.by_token[request.token] = runtime
        runtime.attach(Attaching(request, holder, budget))
        return None

    def transferred(self, number: int, attaching: Attaching) -> None:
        """Note that a session is given to a client that attaches, and forget its token of before."""
        runtime, request = self.by_number[number], attaching.request
        by = attaching.client.actor
        if not attaching.taker:  # an administrator's takeover leaves a session to its owner
            life = runtime.life
            life.owner = self.access.owner(attaching.client, request)
            life.label = request.message.origin.label or life.label
        who = self.access.who(attaching.client, request.peer)
        # Event: A client, `by`, took the session of `owner` over.
        runtime.log.info("session_taken_over", **who, owner=runtime.owner, by=by, audit=True)
        text = f"session {runtime.name} was taken over by {by}"
        self.forget(runtime.token, Failure("session_lost", "session", text))

    def connect_side(self, ticket: bytes, side: socket.socket) -> None:
        for runtime in self.sessions:
            if secrets.compare_digest(runtime.ticket, ticket):
                runtime.connect_side(side)
                return
        side.close()

    def beats_s(self) -> dict[bytes, float]:
        return {token: each.state.make.heartbeat_s for token, each in self.by_token.items()}

    # --- ends that no client asks for ---------------------------------------------------------------------------------

    def expire(self, token: bytes) -> None:
        """End the session of this token, whose lease has run out; or the waiting of a client that attaches to it."""
        runtime = self.by_token.get(token)
        self.protocol.forget(token)
        if runtime is None:
            return
        if runtime.token == token:
            runtime.life.end(Ending("lease", "its client was out of reach until its lease ran out", CLOSED))
            runtime.report(SessionMachine.on_lease_expired)
        else:
            runtime.report(SessionMachine.on_attach_given_up)

    def revoke(self, clients: Sequence[str]) -> None:
        """End the sessions of these clients, whose keys were removed: they have no lease."""
        for runtime in self.sessions:
            if runtime.owner and runtime.owner in clients:
                # Event: A session is ended, since the key of its client was removed.
                runtime.log.warning("session_revoked", client=runtime.owner, why=_KEY_REMOVED.message)
                runtime.abandon(Ending("key removed", _KEY_REMOVED.message, KILLED))

    def drain(self, by_s: float, end_by_s: float, why: Failure, by: str) -> None:
        """Have each session answer what is under way, until ``by_s``, and close its envs until ``end_by_s``."""
        for runtime in self.sessions:
            runtime.life.drained_by = by
            runtime.report(SessionMachine.on_draining, by_s, end_by_s, runtime.quiescent, why)


class ClientUsage:
    """Usage by each client that has quotas; the hub's own user has none.

    It owns the budgets of shared memory, and the times of the last MAKEs and restarts.
    """

    def __init__(self, budget: ArenaBudget, directory: Directory) -> None:
        """Count the sessions of ``directory``, within this budget of shared memory of all clients."""
        self._budget, self._directory = budget, directory
        self._budgets: dict[str, ArenaBudget] = {}
        self._times: dict[tuple[str, str], deque[float]] = {}  # of the last acts, by the quota and the client

    def budget(self, holder: Holder) -> ArenaBudget:
        if holder.quotas is None:
            return self._budget
        budget = self._budgets.setdefault(holder.name, ArenaBudget(0, self._budget))
        budget.bytes_max = holder.quotas.arena_bytes_max  # which may have changed
        return budget

    def count(self, name: Literal["makes", "restarts"], holder: Holder, now_s: float) -> str:
        """Note an act of the client, with any outcome; returns why it is one too many, or an empty text."""
        if holder.quotas is None:
            return ""
        times = self._times.setdefault((name, holder.name), deque())
        while times and times[0] <= now_s - MINUTE_S:
            times.popleft()
        if why := holder.quota_problem(f"{name}_per_minute", len(times), 1):
            return why
        times.append(now_s)
        return ""

    def of(self, holder: Holder) -> Usage:
        states = [each.state for each in self._directory.sessions]
        of_hub = Usage(
            hub_sessions=len(states),
            hub_envs=sum(each.make.num_envs for each in states),
            busy_workers=sum(len(each.slots) for each in states),
        )
        if holder.quotas is None:
            return of_hub
        states = [each.state for each in self._directory.sessions if each.owner == holder.name]
        return replace(
            of_hub,
            sessions=len(states),
            envs=sum(each.make.num_envs for each in states),
            processes=sum(each.processes for each in states),
        )
