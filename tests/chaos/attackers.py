"""Threads that attack a hub: by changed messages and bytes, over their session's memory, and by hostile workers."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import struct
import threading
from collections import Counter

from chaos.mutations import HUB_REQUESTS, MAKE, RESET, SESSION_REQUESTS, Message, Mutator, on_the_wire, unreadable
from conformance.kit.raw_peer import RawAnswer, RawPeer
from envhub_client.connection.local_sockets import LocalSockets
from envhub_client.lanes.attach import Attachment
from envhub_server.network.connections import MALFORMED_MAX
from zmtp import ZmtpPeer

import envhub
from envhub.protocol import messages
from envhub.protocol.messages import REPLY, Close, Made, Op
from envhub.protocol.prelude import MAGIC, NO_SESSION, PRELUDE, Prelude, pack_head
from envhub.transport.address import parse

ANSWER_S = 30.0
ASK_AGAIN_S = 1.0  # of replies that are more than their queue holds, the awaited one may be lost
MESSAGES_MAX = 100  # of one connection, about
NO_LINGER = struct.pack("ii", 1, 0)  # the kernel remembers no connection that has ended
WORKER_S = 1.0  # of which one that has sent the beginning of a message is silent for ever
SESSION_S = 0.3  # for what a worker whose memory was overwritten may answer


class Attack(threading.Thread):
    """Goes on until ``finished``, or until ``stopped`` is set.

    Attributes:
        sent: what it did, by kind.
        problem: what it found that no hub may do.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(daemon=True)
        self.mutator = Mutator(seed)
        self.chance = self.mutator.chance
        self.stopped = threading.Event()
        self.sent: Counter[str] = Counter()
        self.problem = ""

    @property
    def finished(self) -> bool:
        return self.stopped.is_set()

    def run(self) -> None:
        try:
            while not self.finished:
                self.attack()
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}, after {dict(self.sent)}"

    def attack(self) -> None:
        """One connection, or one session."""
        raise NotImplementedError


class FrameAttack(Attack):
    """Changed messages and changed bytes, until so many frames were sent."""

    def __init__(self, seed: int, address: str, frames: int) -> None:
        super().__init__(seed)
        self._address = address
        self._frames = frames
        self._nonces = itertools.count(1 << 62)
        self._token, self._seq = b"", 0

    @property
    def finished(self) -> bool:
        return self.stopped.is_set() or self.sent["frames"] >= self._frames

    def attack(self) -> None:
        self.sent["connections"] += 1
        # The hub ends connections by their descriptors. One that the other attacker has left may be this one's by then.
        with contextlib.suppress(ConnectionError), ZmtpPeer(self._address) as peer:
            peer.connection.settimeout(ANSWER_S)
            peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            self._have_session(peer)
            if self.chance.randrange(20) == 0:
                self._changed_bytes(peer)
            else:
                self._changed_messages(peer)
            return
        self.sent["lost connections"] += 1

    def _have_session(self, peer: ZmtpPeer) -> None:
        """A session of its own, which it continues by the next connection until the hub has ended it."""
        own = self._token or NO_SESSION, 0  # a request that has arrived, where there is a session
        peer.ask(Op.HEARTBEAT, b"\x80", *own)
        if messages.unpack(messages.HeartbeatReply, self._answer(peer, *own)[PRELUDE.size :]).state != "unknown":
            return
        self._token, self._seq = self.chance.randbytes(16), 0
        for asked in [MAKE, *SESSION_REQUESTS]:
            self._seq += 1
            peer.ask(asked.op, asked.header, self._token, self._seq, *asked.frames)
            answer = self._answer(peer, self._token, self._seq)
            if Prelude.unpack(answer).op == REPLY | Op.FAILURE:
                failure = messages.unpack(messages.Failure, answer[PRELUDE.size :])
                if failure.code == "limit":  # of sessions that changed messages have made; their leases end
                    self.sent["full"] += 1
                    self._token = b""
                    return
                raise AssertionError(f"a well-formed {asked.op.name} is refused: {failure}")
        self.sent["sessions"] += 1

    def _answer(self, peer: ZmtpPeer, token: bytes, seq: int) -> bytes:
        """The first frame of the reply to this request; pushes, and the other frames of replies, are passed over."""
        while True:
            found = peer.receive()
            if found.startswith(MAGIC) and Prelude.unpack(found)[2:4] == (token, seq) and found[6] & REPLY:
                return found

    def _changed_messages(self, peer: ZmtpPeer) -> None:
        """As many as the hub reads of one connection, and then see that it has read them all."""
        batch: list[Message] = []
        malformed, wanted = 0, self.chance.choice([0, MESSAGES_MAX])
        while malformed < MALFORMED_MAX or len(batch) < wanted:
            self._seq += 1
            message = self.mutator.message(peer.hub_id, self._token or NO_SESSION, self._seq)
            if not unreadable(message):
                batch.append(message)
            elif malformed < MALFORMED_MAX - 1 or len(batch) >= wanted - 1:  # the hub listens to no more than these
                batch.append(message)
                malformed += 1
        with contextlib.suppress(ConnectionError):  # the hub may end it before all is written
            peer.connection.sendall(on_the_wire(batch))
        ended = not self._is_answered(peer)
        self.sent["messages"] += len(batch)
        self.sent["frames"] += sum(map(len, batch))
        self.sent["malformed"] += malformed
        self.sent["ended"] += ended

    def _is_answered(self, peer: ZmtpPeer) -> bool:
        """Whether the hub answers what came last; False if it has ended the connection."""
        nonce = next(self._nonces)
        wanted, heard = pack_head(REPLY | Op.HEALTH, 0, peer.hub_id, NO_SESSION, nonce), b""
        peer.connection.settimeout(ASK_AGAIN_S)
        for _ in range(int(ANSWER_S / ASK_AGAIN_S)):
            try:
                peer.ask(Op.HEALTH, messages.pack(messages.Question()), NO_SESSION, nonce)
                while wanted not in heard:
                    found = peer.connection.recv(1 << 16)
                    if not found:
                        return False
                    heard = heard[-len(wanted) :] + found
                return True
            except TimeoutError:
                continue
            except ConnectionError:
                return False
        raise TimeoutError(f"neither an answer nor an end within {ANSWER_S} s")

    def _changed_bytes(self, peer: ZmtpPeer) -> None:
        """Messages whose bytes are changed anywhere, also in the flags and lengths of their frames, or end anywhere."""
        batch = [self.mutator.message(peer.hub_id, self._token or NO_SESSION, self._seq + 1) for _ in range(5)]
        written = on_the_wire(batch)
        if self.chance.random() < 0.7:
            written = self.mutator.flipped(written)
        else:
            written = written[: self.chance.randrange(len(written))]
        with contextlib.suppress(ConnectionError):  # the hub may end it first, or once this side has ended
            peer.connection.sendall(written)
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
            while peer.connection.recv(1 << 16):
                pass
        self.sent["byte streams"] += 1
        self.sent["frames"] += sum(map(len, batch))


class MemoryAttack(Attack):
    """A client of the shared lane that writes anything into its memory, while its workers and its hub use it."""

    def __init__(self, seed: int, address: str) -> None:
        super().__init__(seed)
        self._address = address

    def attack(self) -> None:
        peer, token = RawPeer(self._address, ANSWER_S), self.chance.randbytes(16)
        with contextlib.closing(peer), contextlib.closing(Attachment()) as attachment:
            made = peer.ask(Op.MAKE, MAKE.header, token)
            if made.failure is not None:
                assert made.failure.code == "limit", made.failure
                self.stopped.wait(0.1)
                return
            peer.ask(Op.RESET, RESET.header, token, 2)
            attachment.open(LocalSockets(parse(self._address).path), messages.unpack(Made, made.body).ticket)
            arena, *bells = attachment.bells
            with mmap.mmap(arena, os.fstat(arena).st_size) as memory:
                self._write_over(memory, bells, peer, token)
            peer.ask(Op.CLOSE, messages.pack(Close(terminate=self.chance.random() < 0.8)), token, 1 << 32)
        self.sent["arenas"] += 1

    def _write_over(self, memory: mmap.mmap, bells: list[int], peer: RawPeer, token: bytes) -> None:
        for seq in range(3, 3 + self.chance.randrange(1, 8)):
            for _ in range(self.chance.choice([1, 5, 200])):
                self._write_once(memory)
            for bell in bells:
                with contextlib.suppress(BlockingIOError):
                    os.write(bell, self.chance.choice([1, 1 << 32]).to_bytes(8, "little"))
            asked = self.chance.choice([*SESSION_REQUESTS, *HUB_REQUESTS])
            own = (NO_SESSION, seq) if asked in HUB_REQUESTS else (token, seq)
            peer.send([Prelude(asked.op, peer.hub_id, *own).pack() + asked.header, *asked.frames])
            self._hear(peer, seq)

    def _write_once(self, memory: mmap.mmap) -> None:
        """A word of the header or of a row, or any bytes anywhere."""
        words = [0, 1, 2, 3, 4, -1, 1 << 20, (1 << 63) - 1, -(1 << 63), self.chance.getrandbits(62)]
        if self.chance.random() < 0.8:
            at = self.chance.choice([self.chance.randrange(0, 48, 8), self.chance.randrange(4096, 6144, 8)])
            memory[at : at + 8] = self.chance.choice(words).to_bytes(8, "little", signed=True)
        else:
            length = self.chance.randrange(1, min(2000, len(memory)))
            at = self.chance.randrange(len(memory) - length)
            memory[at : at + length] = self.chance.randbytes(length)

    def _hear(self, peer: RawPeer, seq: int) -> RawAnswer | None:
        """The answer, if one comes: of a session whose memory is overwritten it need not."""
        while peer._socket.poll(int(SESSION_S * 1000)):
            answer = peer.receive()
            if answer.prelude.seq == seq:
                self.sent["answers over written memory"] += 1
                return answer
        return None


class WorkerAttack(Attack):
    """Sessions whose worker sends its hub anything."""

    def __init__(self, seed: int, address: str) -> None:
        super().__init__(seed)
        self._address = address

    def attack(self) -> None:
        chance = self.chance
        try:
            options = {"restart_wait": 0.0, "call_timeout": WORKER_S, "step_timeout": WORKER_S, "lane": "wire"}
            envs = envhub.make_vec("babbling", 1, hub=self._address, **options)
        except envhub.RequestRefused:  # the attackers' sessions are all that the hub gives
            self.stopped.wait(0.1)
            return
        seed = chance.getrandbits(30)
        try:
            envs.reset()
            self.sent["babbles"] += 1
            envs.call("babble", seed, chance.choice([1, 10, 100]), chance.random() < 0.3)
            envs.step_async(envs.action_space.sample())
            envs.step_wait(timeout=WORKER_S)
        except (envhub.EnvHubError, ValueError, ArithmeticError, TypeError) as error:
            self.sent[f"{type(error).__name__} after a babble"] += 1
        finally:
            envs.close(terminate=True)
