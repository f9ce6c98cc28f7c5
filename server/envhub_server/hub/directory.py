"""Sessions of a hub by number and by token, and the clients that hold them."""

from __future__ import annotations

import secrets
import socket
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from envhub.protocol.hub import HubProtocol, Incoming
from envhub.protocol.messages import Failure, Op
from envhub_server.hub.planner import Usage
from envhub_server.hub.resources import Attaching
from envhub_server.hub.runtime import SessionRuntime
from envhub_server.log import Logger
from envhub_server.memory.session_memory import ArenaBudget
from envhub_server.network.access import Access
from envhub_server.network.connections import Holder
from envhub_server.session.machine import SessionMachine

MINUTE_S = 60.0
NAME_BYTES = 4  # of a session's token, by which an administrator may call it

log = Logger("envhub.hub")

_KEY_REMOVED = Failure("session_lost", "session", "the key of its client was removed")
_NOT_ATTACHABLE = "this hub has no such session to take over: its lease ran out, it was closed or taken over"


class Directory:
    """The sessions of one hub. It owns which there are, and by which token each is reached."""

    def __init__(self, protocol: HubProtocol, access: Access) -> None:
        self._protocol, self._access = protocol, access
        self.by_number: dict[int, SessionRuntime] = {}  # the sessions, for reading
        self.by_token: dict[bytes, SessionRuntime] = {}  # likewise; a token is another one after each takeover
        self.next_number = 1  # the number of the next session
        self.restarts_before = self.steps_before = 0  # of the workers, and envs, of sessions that have ended
        self._heard_ns = 0  # when ``heard_peers`` was called last

    @property
    def sessions(self) -> Collection[SessionRuntime]:
        return self.by_number.values()

    # --- beginning and end --------------------------------------------------------------------------------------------

    def add(self, runtime: SessionRuntime, request: Incoming, holder: Holder) -> None:
        self.next_number = runtime.number + 1
        self.by_number[runtime.number] = self.by_token[request.token] = runtime
        make = runtime.state.make
        factories = {"factories": make.factories.hex()} if make.factories else {}
        made: dict[str, Any] = {"env": make.name[:200] or "factories", "num_envs": make.num_envs, **factories}
        # Event: A client makes a session. `factories` is the SHA-256 of those that it sent.
        runtime.log.info("session_made", **self._access.who(holder, request.peer), **made, audit=True)

    def remove(self, runtime: SessionRuntime) -> None:
        for token in [token for token, each in self.by_token.items() if each is runtime]:
            self.forget(token)
        self.restarts_before += runtime.state.restarts
        self.steps_before += runtime.steps
        del self.by_number[runtime.number]

    def forget(self, token: bytes) -> None:
        """Forget a token, which is of no session any more; its connections may have views of memory to read."""
        if (runtime := self.by_token.pop(token, None)) is not None:
            runtime.connections.update(self._protocol.connections_of(token))
        self._protocol.forget(token)

    # --- clients ------------------------------------------------------------------------------------------------------

    def named(self, session: bytes, holder: Holder) -> SessionRuntime | None:
        if not holder.administers or len(session) != NAME_BYTES:
            return self.by_token.get(session)
        matching = [each for token, each in self.by_token.items() if token.startswith(session)]
        return matching[0] if len(matching) == 1 else None

    def find(self, request: Incoming, holder: Holder) -> SessionRuntime | None:
        runtime = self.named(request.message.session, holder)
        if runtime is None or holder.owns(runtime.owner):
            return runtime
        self.note_foreign(request.peer, holder, request.op, request.message.session)
        return None

    def note_foreign(self, peer: bytes, holder: Holder, op: Op, token: bytes) -> None:
        """Note a request that is refused since the session is another client's; its sender learns of no session."""
        runtime = self.by_token.get(token)
        owner = "" if runtime is None else runtime.owner
        named = {"op": op.name, "session": token.hex()[:8], "owner": owner, "why": "another client's session"}
        # Event: A request of a client was refused; one to another client's session has it as `owner`.
        log.warning("request_refused", **self._access.who(holder, peer), **named, audit=True)

    def note_unknown(self, peer: bytes, session: bytes, holder: Holder, why: str) -> None:
        """Log that a client names a session that this hub has not, as after the hub was started again."""
        who = self._access.who(holder, peer)
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
        taken = {"owner": runtime.owner, "by": request.token.hex()[:8]}
        # Event: A client took the session of `owner` over, whose name is `by` from now on.
        runtime.log.info("session_taken_over", **self._access.who(attaching.client, request.peer), **taken, audit=True)
        self.forget(runtime.token)

    def connect_side(self, ticket: bytes, side: socket.socket) -> None:
        for runtime in self.sessions:
            if secrets.compare_digest(runtime.ticket, ticket):
                runtime.connect_side(side)
                return
        side.close()

    def heard_peers(self) -> set[bytes | None]:
        """The peers whose sessions have taken a request since the last call."""
        since_ns, self._heard_ns = self._heard_ns, time.monotonic_ns()
        return {self._protocol.peer_of(token) for token, each in self.by_token.items() if each.heard_ns >= since_ns}

    def beats_s(self) -> dict[bytes, float]:
        return {token: each.state.make.heartbeat_s for token, each in self.by_token.items()}

    # --- ends that no client asks for ---------------------------------------------------------------------------------

    def expire(self, token: bytes) -> None:
        """End the session of this token, whose lease has run out; or the waiting of a client that attaches to it."""
        runtime = self.by_token.get(token)
        self._protocol.forget(token)
        if runtime is None:
            return
        if runtime.token == token:
            runtime.report(SessionMachine.on_lease_expired)
        else:
            runtime.report(SessionMachine.on_attach_given_up)

    def revoke(self, clients: Sequence[str]) -> None:
        """End the sessions of these clients, whose keys were removed: they have no lease."""
        for runtime in self.sessions:
            if runtime.owner and runtime.owner in clients:
                # Event: A session is ended, since the key of its client was removed.
                runtime.log.warning("session_revoked", client=runtime.owner, why=_KEY_REMOVED.message)
                runtime.report(SessionMachine.on_abandoned, _KEY_REMOVED)

    def drain(self, by_s: float, end_by_s: float) -> None:
        """Have each session answer what is under way, until ``by_s``, and close its envs until ``end_by_s``."""
        for runtime in self.sessions:
            runtime.report(SessionMachine.on_draining, by_s, end_by_s, runtime.quiescent)

    def abandon_all(self, why: Failure) -> None:
        for runtime in self.sessions:
            runtime.report(SessionMachine.on_abandoned, why)


class ClientUsage:
    """Usage by each client that has quotas; the hub's own user has none.

    It owns the budgets of shared memory, and the times of the last MAKEs.
    """

    def __init__(self, budget: ArenaBudget, directory: Directory) -> None:
        """Count the sessions of ``directory``, within this budget of shared memory of all clients."""
        self._budget, self._directory = budget, directory
        self._budgets: dict[str, ArenaBudget] = {}
        self._made_s: dict[str, deque[float]] = {}  # the times of the last MAKEs and ATTACHes

    def budget(self, holder: Holder) -> ArenaBudget:
        if holder.quotas is None:
            return self._budget
        budget = self._budgets.setdefault(holder.name, ArenaBudget(0, self._budget))
        budget.bytes_max = holder.quotas.arena_bytes_max  # which may have changed
        return budget

    def count_make(self, holder: Holder, now_s: float) -> str:
        """Note a MAKE or ATTACH of the client, with any outcome; returns why it is one too many, or an empty text."""
        # An ATTACH counts because it gives the session another token, and each token has lines of its own in the log.
        if holder.quotas is None:
            return ""
        times = self._made_s.setdefault(holder.name, deque())
        while times and times[0] <= now_s - MINUTE_S:
            times.popleft()
        if why := holder.over_quota("makes_per_minute", len(times), 1, holder.quotas.makes_per_minute_max):
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
