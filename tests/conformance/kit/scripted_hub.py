"""A hub that tests a client: the hub's half of the protocol, and a script of what happens to its messages."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq
from conformance.kit.counting_envs import FRAME_BYTES_MAX, NAME, NUM_ENVS, CountingSession, made

from envhub.errors import RemoteProtocolError
from envhub.protocol import messages
from envhub.protocol.hub import SHUTTING_DOWN, HubProtocol, Incoming
from envhub.protocol.messages import REPLY, Failure, HeartbeatReply, Make, Op
from envhub.protocol.prelude import FRAMES_MAX, PRELUDE, Frames, Prelude
from envhub.transport import sockets

QUEUE_MESSAGES_MAX = 16
LAST_S = 0.2  # after a program's end, for what it has sent
_POLL_S = 0.1

Status = Callable[[], int | None]


@dataclass(frozen=True)
class Heard:
    """A message of the client; ``nth`` counts the requests of its op, to which a copy does not add."""

    at_s: float
    connection: int
    prelude: Prelude
    message: tuple[bytes, ...]
    nth: int

    @property
    def op(self) -> int:
        return self.prelude.op

    @property
    def is_request(self) -> bool:
        """True if it asks for something to be done, which a HELLO, a HEARTBEAT and a CLOSE do not."""
        return self.op >= Op.MAKE and self.op != Op.CLOSE


@dataclass
class Record:
    """Record of a client's messages in one case.

    Attributes:
        heard: its messages.
        wrong: what was wrong about them, whatever the case.
        fault: how many messages had come when the script first interfered; None if it has not.
        running: the seconds from and until which each request ran, by token and seq.
        status: the exit status of the client's program; None if it is not known.
        limit: why the case was ended; empty where the program ended by itself.
    """

    heard: list[Heard] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    fault: int | None = None
    running: dict[tuple[bytes, int], tuple[float, float]] = field(default_factory=dict)
    status: int | None = None
    limit: str = ""

    def of(self, *ops: Op) -> list[Heard]:
        return [heard for heard in self.heard if heard.op in ops]

    def copies(self, op: Op, nth: int) -> list[Heard]:
        return [heard for heard in self.heard if (heard.op, heard.nth) == (op, nth)]

    def after_fault(self) -> list[Heard]:
        return [] if self.fault is None else self.heard[self.fault :]


class Script:
    """Faults of the messages of one case; none as it stands.

    Attributes:
        fault: the script has interfered.
    """

    def __init__(self, op: Op = Op.STEP, nth: int = 0) -> None:
        """Interfere at the ``nth`` request of an op and at each of its copies; at each request of the op with 0."""
        self.fault, self._op, self._nth = False, op, nth

    def is_at(self, heard: Heard) -> bool:
        """Whether this is the request at which it interferes, which it does then."""
        matches = heard.op == self._op and self._nth in (0, heard.nth)
        self.fault = self.fault or matches
        return matches

    def arrives(self, heard: Heard) -> Sequence[bytes] | None:
        """The frames that reach the hub in place of this message; None if it is lost."""
        return heard.message

    def cuts(self, heard: Heard) -> bool:
        """True if the connection ends once the message has reached the hub."""
        return False

    def restarts(self, heard: Heard) -> bool:
        """True if the hub ends at this message, which is lost, and another hub takes its place."""
        return False

    def stops(self, heard: Heard) -> bool:
        """True if the hub begins to stop once it has answered this request."""
        return False

    def takes_s(self, heard: Heard) -> float:
        """The seconds that the envs take for this request."""
        return 0.0

    def refusal(self, heard: Heard) -> Failure | None:
        return None

    def replies(self, heard: Heard, reply: Frames) -> Sequence[Frames]:
        """The messages that the client gets in place of this reply to a request."""
        return [reply]


class ScriptedHub(contextlib.AbstractContextManager["ScriptedHub"]):
    """A hub at an address, for one case after another.

    Attributes:
        address: where it listens, with the port.
        former_token: the token of a session that is there already, for a client that attaches.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._router = sockets.open_socket(self._context, zmq.ROUTER, FRAME_BYTES_MAX, QUEUE_MESSAGES_MAX)
        self._router.setsockopt(zmq.LINGER, 0)
        self._monitor = sockets.open_monitor(self._router, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.former_token = secrets.token_bytes(16)
        self._router.bind("tcp://127.0.0.1:0")
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._connections: set[int] = set()  # the descriptors of those that have not ended
        self._ids: list[int] = []
        self._former_ids: set[int] = set()
        self._begin(Script())

    def __exit__(self, *exc_info: object) -> None:
        self._router.monitor(None, 0)
        self._monitor.close()
        self._context.destroy(linger=0)

    def run(self, script: Script, status: Status, seconds: float) -> Record:
        """Serve one case until the program ends, or for ``seconds``; returns what came of the client.

        ``status`` returns the exit status of the client's program once it has ended, and None before.
        """
        self._begin(script)
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self._serve_once(min([_POLL_S, *(due_s - time.monotonic() for due_s, _, _ in self._due)]))
            if self._record.status is None and (ended := status()) is not None:
                self._record.status = ended
                deadline_s = min(deadline_s, time.monotonic() + LAST_S)
        if self._record.status is None:
            self._record.limit = f"it did not end within {seconds:g} s"
        return self._record

    def _begin(self, script: Script) -> None:
        self._script, self._record = script, Record()
        self._former_ids.update(self._ids)
        self._ids.clear()
        self._asked: dict[tuple[bytes, int], Heard] = {}
        self._new_hub()

    def _new_hub(self) -> None:
        """Begin a hub with an id of its own, and the session that a client may attach to."""
        self._protocol = HubProtocol(secrets.randbits(63) | 1)
        self._ids.append(self._protocol.hub_id)
        self._session = CountingSession(self.former_token, self._record.wrong)
        self._due: list[tuple[float, Heard, Incoming]] = []
        make = Prelude(Op.MAKE, self._protocol.hub_id, self.former_token, 1).pack()
        former = self._protocol.receive(b"former", -2, [make + messages.pack(Make(NUM_ENVS, NAME))])
        assert former is not None
        self._protocol.answer(former, made())
        self._protocol.outgoing.clear()

    # --- the socket -------------------------------------------------------------------------------------------------

    def _serve_once(self, wait_s: float) -> None:
        self._router.poll(max(0, int(wait_s * 1000) + 1))
        self._read_monitor()
        try:
            peer = self._router.recv(sockets.NOBLOCK)
            frames = sockets.receive(self._router, FRAMES_MAX)
        except zmq.Again:
            frames = []
        if frames:
            self._hear(peer, sockets.connection_of(frames), tuple(frame.bytes for frame in frames))
        now_s = time.monotonic()
        for due in [due for due in self._due if due[0] <= now_s]:
            self._due.remove(due)
            self._answer(*due[1:])

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event, descriptor = sockets.read_monitor(self._monitor)
            change = self._connections.add if event == zmq.EVENT_ACCEPTED else self._connections.discard
            change(descriptor)

    def _cut(self, connection: int) -> None:
        """End a connection, given by its descriptor, if it has not ended.

        libzmq may have closed it, and the descriptor is another's then; the monitor has reported the end by then. So
        what the monitor has reported is read once the descriptor is held.
        """
        with contextlib.suppress(OSError):  # libzmq has closed it, or the client has ended the connection
            held = os.dup(connection)
            try:
                self._read_monitor()
                if connection in self._connections:
                    with socket.socket(fileno=os.dup(held)) as shared:
                        shared.shutdown(socket.SHUT_RDWR)
            finally:
                os.close(held)

    def _hear(self, peer: bytes, connection: int, message: tuple[bytes, ...]) -> None:
        try:
            prelude = Prelude.unpack(message[0])
        except RemoteProtocolError as error:
            self._record.wrong.append(f"{error}: {message[0][:48].hex()}")
            return
        if prelude.hub_id in self._former_ids:
            return  # of a client of an earlier case
        heard = self._note(connection, prelude, message)
        if self._script.restarts(heard):
            self._note_fault()
            self._new_hub()
            self._cut(connection)
            return
        arrived = self._script.arrives(heard)
        if arrived is not None:
            self._execute(peer, connection, [*arrived], heard)
        if self._script.cuts(heard):
            self._protocol.connection_ended(connection)
            self._cut(connection)
        self._note_fault()

    def _note(self, connection: int, prelude: Prelude, message: tuple[bytes, ...]) -> Heard:
        key = prelude.token, prelude.seq
        now_s, is_heartbeat = time.monotonic(), prelude.op == Op.HEARTBEAT
        nth = len({heard.prelude.seq for heard in self._record.heard if heard.op == prelude.op})
        if key in self._asked and self._asked[key].op == prelude.op:
            nth = self._asked[key].nth
        elif not is_heartbeat:
            nth += 1
        heard = Heard(now_s, connection, prelude, message, nth)
        if not is_heartbeat:
            self._asked.setdefault(key, heard)
        self._record.heard.append(heard)
        return heard

    def _note_fault(self) -> None:
        if self._record.fault is None and self._script.fault:
            self._record.fault = len(self._record.heard)

    def _send_outgoing(self) -> None:
        for peer, frames in self._protocol.outgoing:
            prelude = Prelude.unpack(frames[0])
            asked = self._asked.get((prelude.token, prelude.seq))
            is_reply = prelude.op & REPLY and prelude.op != REPLY | Op.HEARTBEAT
            for message in self._script.replies(asked, frames) if asked is not None and is_reply else [frames]:
                self._router.send_multipart([peer, *message])
        self._protocol.outgoing.clear()
        self._note_fault()

    # --- the hub ----------------------------------------------------------------------------------------------------

    def _execute(self, peer: bytes, connection: int, frames: Frames, heard: Heard) -> None:
        request = self._protocol.receive(peer, connection, frames)
        if request is not None and request.op == Op.HEARTBEAT:
            self._protocol.answer(request, HeartbeatReply("running"))
        elif request is not None:
            due_s = heard.at_s + self._script.takes_s(heard)
            self._record.running[request.token, request.seq] = heard.at_s, due_s
            self._due.append((due_s, heard, request))
        self._send_outgoing()

    def _answer(self, heard: Heard, request: Incoming) -> None:
        result = self._script.refusal(heard) or self._session.outcome(request)
        if isinstance(result, Failure):
            self._protocol.fail(request, result)
        else:
            self._protocol.answer(request, *result)
        if request.op == Op.CLOSE or (request.op in (Op.MAKE, Op.ATTACH) and isinstance(result, Failure)):
            self._protocol.forget(request.token)
        elif request.op == Op.ATTACH:
            self._protocol.forget(self.former_token)
        self._send_outgoing()
        if self._script.stops(heard):
            self._protocol.draining, self._protocol.stopping = SHUTTING_DOWN, True
            self._protocol.goodbye(request.token, SHUTTING_DOWN)
            self._protocol.forget(request.token)
            self._send_outgoing()


def header(heard: Heard) -> bytes:
    return heard.message[0][PRELUDE.size :]
