"""A client of a page: ``ClientProtocol`` around a DEALER, and the programs of the kit by it.

A test makes a client that is wrong in one way by a class that extends one of these two.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import zmq
from conformance.kit.counting_envs import NAME, NUM_ENVS, SEEDS, STEPS

from envhub.errors import RemoteProtocolError
from envhub.protocol import messages
from envhub.protocol.client import ClientProtocol, Reply
from envhub.protocol.messages import Attach, Call, Close, Failure, Hello, Make, Observe, Op, Receive, Reset, Send, Step
from envhub.transport import sockets
from envhub.values import codec

GIVEN_UP_STEP, GIVE_UP_S, ANSWER_S, POLL_S, ROUNDS = 3, 1.0, 30.0, 0.02, 4
INT64 = b"\x04"


class ClientError(Exception):
    """What a client tells its user."""


class PageClient:
    """One connection, and a method by the name of each program."""

    half: ClassVar[type[ClientProtocol]] = ClientProtocol

    def __init__(self, address: str, ended: threading.Event) -> None:
        """Connect; ``ended`` is set when the test does not wait any longer."""
        self.protocol = self.half(secrets.token_bytes(16))
        self._ended = ended
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 500
        self._socket.reconnect_ivl = 20
        self._monitor = sockets.open_monitor(self._socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._observations = np.zeros((NUM_ENVS, 2), np.float32)
        self._forget_totals()

    def disconnect(self) -> None:
        """Close the sockets."""
        self._socket.monitor(None, 0)
        self._monitor.close()
        self._socket.close()
        self._context.term()

    # --- requests ---------------------------------------------------------------------------------------------------

    def ask(self, op: Op, message: Any, frames: Sequence[bytes] = ()) -> Reply:
        """The reply to a request; a failure is raised."""
        self.begin(op, message, frames)
        reply = self.wait(ANSWER_S)
        if reply is None:
            raise ClientError(f"no reply to {op.name}")
        if isinstance(reply.message, Failure):
            raise ClientError(f"{op.name}: {reply.message.code}")
        return reply

    def begin(self, op: Op, message: Any, frames: Sequence[bytes] = ()) -> None:
        """Send a request."""
        sent = self.protocol.request(op, message, frames, time.monotonic())
        if not self.protocol.held:
            self._socket.send_multipart(sent)

    def wait(self, seconds: float) -> Reply | None:
        """The reply to what was begun; None if it does not come in time."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            if self._ended.is_set():
                raise ClientError("the test has ended")
            self._read_monitor()
            if self._socket.poll(int(POLL_S * 1000)):
                reply = self.protocol.receive(self._socket.recv_multipart(), time.monotonic())
                if reply is not None:
                    return reply
            now_s = time.monotonic()
            if (loss := self.protocol.loss(now_s)) or self.protocol.cut_off is not None:
                self.protocol.give_up()
                raise ClientError(loss or "each connection ends at this request")
            for frames in self.protocol.tick(now_s):
                self._socket.send_multipart(frames)
        return None

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event, _ = sockets.read_monitor(self._monitor)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.protocol.connected()
            else:
                self.protocol.disconnected(time.monotonic())

    # --- the programs -------------------------------------------------------------------------------------------------

    def hello(self) -> None:
        """Say hello."""
        self.ask(Op.HELLO, Hello("test"))

    def make(self) -> None:
        """Make the session."""
        if self.ask(Op.MAKE, Make(NUM_ENVS, NAME)).message.num_envs != NUM_ENVS:
            raise ClientError("another number of envs")

    def steps(self) -> None:
        """The program of this name; so do the next three."""
        self.hello()
        self.make()
        self.reset()
        self._step_to_the_end()

    def give_up(self) -> None:
        self.hello()
        self.make()
        self.reset()
        for _ in range(GIVEN_UP_STEP - 1):
            self.step()
        self.begin(Op.STEP, Step(INT64), [self._actions(range(NUM_ENVS))])
        if self.wait(GIVE_UP_S) is None:
            self.protocol.give_up()
        self.reset()
        self._step_to_the_end()

    def parts(self) -> None:
        self.hello()
        self.make()
        self.reset()
        for _ in range(ROUNDS):
            for row in (1, 0):
                self.ask(Op.SEND, Send([row], INT64), [self._actions([row])])
            missing = {0, 1}
            while missing:
                missing -= {*self.receive_rows(missing)}
        self._check()

    def attach(self, token: str) -> None:
        self.hello()
        session = bytes.fromhex(token)
        self.observe(self.ask(Op.OBSERVE, Observe(session, False)).frames[0])
        self.join(session)
        self._step_to_the_end()

    def close(self) -> None:
        """End the session."""
        self.ask(Op.CLOSE, Close())

    def reset(self) -> None:
        """Reset with the program's seeds."""
        self._forget_totals()
        self.observe(self.ask(Op.RESET, Reset(seeds=[*SEEDS])).frames[0])

    def join(self, session: bytes) -> None:
        """Take a session over."""
        self.ask(Op.ATTACH, Attach(session))

    def step(self) -> None:
        """Step both envs."""
        frames = self.ask(Op.STEP, Step(INT64), [self._actions(range(NUM_ENVS))]).frames
        self.observe(frames[0])
        self.take(range(NUM_ENVS), frames[1:])

    def receive_rows(self, missing: set[int]) -> list[int]:
        """Receive some of the missing rows; returns them."""
        frames = self.ask(Op.RECEIVE, Receive(1)).frames
        rows: list[int] = np.frombuffer(frames[0], np.int64).tolist()
        if not {*rows} <= missing:
            raise ClientError(f"rows {rows} were not sent")
        self._observations[rows] = np.frombuffer(frames[1], np.float32).reshape(-1, 2)
        self.take(rows, frames[2:])
        return rows

    def observe(self, frame: bytes) -> None:
        """Take the observations of both envs from a frame."""
        if len(frame) != self._observations.nbytes:
            raise ClientError(f"an observation frame of {len(frame)} bytes")
        self._observations = np.frombuffer(frame, np.float32).reshape(NUM_ENVS, 2).copy()

    def take(self, rows: Sequence[int], frames: Sequence[bytes]) -> None:
        """Add the results and infos of these rows to the totals."""
        rewards = np.frombuffer(frames[0], np.float64, len(rows))
        flags = np.frombuffer(frames[0], np.bool_, offset=8 * len(rows)).reshape(2, -1)
        self._rewards[rows] += rewards
        self._ends[rows] += flags.any(axis=0)
        for row, info in messages.unpack_rows(frames[1], NUM_ENVS) if len(frames) > 1 else []:
            self._numbers[row] += codec.decode(info)["n"]

    def _step_to_the_end(self) -> None:
        for _ in range(STEPS):
            self.step()
        self._check()

    def _check(self) -> None:
        totals = [self._rewards.tolist(), self._ends.tolist(), self._numbers.tolist()]
        self.ask(Op.CALL, Call("check", codec.encode([totals, {}])))

    def _actions(self, rows: Sequence[int]) -> bytes:
        return self._observations[[*rows], 0].astype(np.int64).tobytes()

    def _forget_totals(self) -> None:
        self._rewards, self._ends, self._numbers = np.zeros(NUM_ENVS), np.zeros(NUM_ENVS, int), np.zeros(NUM_ENVS, int)


def execute(kind: type[PageClient], program: str, arguments: Sequence[str], ended: threading.Event) -> int:
    """Execute a program; returns its exit status, 1 where the client told of an error."""
    address, *others = arguments
    client = kind(address, ended)
    try:
        getattr(client, program)(*others)
        client.close()
    except (ClientError, RemoteProtocolError, codec.DecodeError):
        client.protocol.give_up()
        return 1
    finally:
        client.disconnect()
    return 0
