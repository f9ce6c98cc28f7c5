"""A hub that answers whatever a test wants, honest or not, and runs no env."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import zmq
from gymnasium import spaces as gym_spaces

from envhub.protocol import messages
from envhub.protocol.messages import REPLY, Made, Notice, Op, Welcome
from envhub.protocol.prelude import NO_SESSION, PRELUDE, Prelude
from envhub.values import codec, spaces

SPACE = codec.encode(spaces.describe(gym_spaces.Box(0, 1, (2,), np.float64)))
ACTION = codec.encode(spaces.describe(gym_spaces.Discrete(2)))
NUM_ENVS = 2

_ids = itertools.count(1)

Answer = tuple[Any, Sequence[bytes]]


def made(**fields: Any) -> Made:
    """What an honest hub says of two envs, with some fields replaced."""
    honest = {"num_workers": 1, "observation_spaces": [SPACE], "action_space": ACTION, "metadata": codec.encode({})}
    return Made(**{"num_envs": NUM_ENVS, **honest, **fields})


class LyingHub:
    """In ``with``: it serves ``address`` in a thread; ``answers`` has a message, and frames after it, by op.

    What has no answer there is answered as an honest hub would. Of an answer that is a ``Failure``, the reply is one.
    A test may change its ``answers``.
    At the first request after HELLO that has no answer at all, it pushes so many ``pings``. A frame of more than
    ``frame_bytes_max`` ends its connection.

    Attributes:
        id: its hub id.
        ping: a message that it may push at any time.
        asked: the ops of the requests that have come.
    """

    def __init__(
        self,
        answers: Mapping[Op, Answer] | None = None,
        notice: str = "",
        pings: int = 0,
        frame_bytes_max: int = 1 << 30,
    ) -> None:
        honest = {
            Op.HELLO: (Welcome("1", "1", False, {}), ()),
            Op.MAKE: (made(), ()),
            Op.RESET: (messages.Done(), [bytes(16 * NUM_ENVS)]),
            Op.STEP: (messages.Done(), [bytes(16 * NUM_ENVS), bytes(10 * NUM_ENVS)]),
            Op.CLOSE: (messages.Done(), ()),
        }
        self.answers: dict[Op, Answer] = {**honest, **(answers or {})}
        self.id = next(_ids)
        self.ping = Prelude(Op.PING, self.id, NO_SESSION, 0).pack()
        self.asked: list[int] = []
        self._notice = notice
        self._pings = pings
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = 0
        self._socket.maxmsgsize = frame_bytes_max
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        while not self._ended.is_set():
            if not self._socket.poll(20):
                continue
            peer, first, *_ = self._socket.recv_multipart()
            asked = Prelude.unpack(first[: PRELUDE.size])
            self.asked.append(asked.op)
            if asked.op not in self.answers:
                for _ in range(self._pings):
                    self._socket.send_multipart([peer, self.ping, bytes(1000)])
                self._pings = 0
                continue
            message, frames = self.answers[Op(asked.op)]
            if self._notice and asked.op == Op.RESET:
                self._send(peer, Op.NOTICE, asked, Notice(self._notice))
            op = Op.FAILURE if isinstance(message, messages.Failure) else asked.op
            self._send(peer, REPLY | op, asked, message, frames)

    def _send(self, peer: bytes, op: int, asked: Prelude, message: Any, frames: Sequence[bytes] = ()) -> None:
        head = Prelude(op, self.id, asked.token, asked.seq).pack() + messages.pack(message)
        self._socket.send_multipart([peer, head, *frames])

    def __enter__(self) -> LyingHub:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)
