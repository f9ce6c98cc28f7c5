"""A relay before a hub that makes it wrong in one way, by the rule of the kit that the hub then breaks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import zmq

from envhub.protocol import messages
from envhub.protocol.messages import REPLY, Failure, Op
from envhub.protocol.prelude import MAGIC, PRELUDE, Frames, Prelude

Tamper = Callable[[Frames], Frames]


@contextmanager
def tampered(address: str, tamper: Tamper, noise: Frames | None = None) -> Iterator[str]:
    """A hub's address behind somebody who changes its replies, and answers with ``noise`` what has no prelude."""
    context = zmq.Context()
    front = context.socket(zmq.ROUTER)
    front.linger = 0
    port = front.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def forward() -> None:
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        while not stop.is_set():
            while front.poll(5 if not backs else 0):
                peer, *frames = front.recv_multipart()
                if noise and not frames[0].startswith(MAGIC):
                    front.send_multipart([peer, *noise])
                    continue
                if peer not in backs:
                    backs[peer] = context.socket(zmq.DEALER)
                    backs[peer].linger = 0
                    backs[peer].connect(address)
                backs[peer].send_multipart(frames)
            for peer, back in backs.items():
                while back.poll(1):
                    front.send_multipart([peer, *tamper(back.recv_multipart())])
        for back in backs.values():
            back.close()

    thread = threading.Thread(target=forward)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join()
        front.close()
        context.term()


def at(op: Op, change: Tamper) -> Tamper:
    """Change the replies to requests of this op."""
    return lambda frames: change(frames) if Prelude.unpack(frames[0]).op == REPLY | op else frames


def without_id(frames: Frames) -> Frames:
    return [Prelude.unpack(frames[0])._replace(hub_id=0).pack() + frames[0][PRELUDE.size :]]


def other_code(frames: Frames) -> Frames:
    failure = messages.unpack(Failure, frames[0][PRELUDE.size :])
    return [frames[0][: PRELUDE.size] + messages.pack(Failure("refused", failure.scope, failure.message))]


def observing(change: Callable[[np.ndarray], object]) -> Tamper:
    """Change the observation frame, of float32."""

    def changed(frames: Frames) -> Frames:
        observations = np.frombuffer(frames[1], np.float32).copy()
        change(observations)
        return [frames[0], observations.tobytes(), *frames[2:]]

    return changed


def drifting(number: Iterator[int]) -> Tamper:
    return observing(lambda observations: np.add(observations, next(number) / 1000, out=observations))


NOISE = [Prelude(REPLY | Op.FAILURE, 1, bytes(16), 0).pack() + messages.pack(Failure("malformed", "request", ""))]
# Of CartPole-v1. Functions, as some count the replies.
WRONG_HUBS: dict[str, Callable[[], Tamper]] = {
    "HELLO is answered with an id and limits": lambda: at(Op.HELLO, without_id),
    "messages without a prelude are ignored": lambda: list,  # and NOISE
    "what cannot be executed is refused by its code": lambda: at(Op.FAILURE, other_code),
    "frames are those that the spaces say": lambda: at(
        Op.STEP, lambda frames: [frames[0], frames[1][:-1], *frames[2:]]
    ),
    "a request is executed once and answered as often as it is sent": lambda: at(Op.STEP, drifting(itertools.count())),
    "observations are in their spaces": lambda: at(Op.STEP, observing(lambda all_: all_.fill(100))),
    "the same seeds and actions give the same observations": lambda: at(Op.RESET, drifting(itertools.count())),
    "resets can be masked": lambda: at(Op.RESET, observing(lambda all_: all_.fill(0))),
    "next-step autoreset": lambda: at(Op.STEP, lambda frames: [*frames[:2], frames[2][:24] + b"\1" * 6, *frames[3:]]),
    "same-step autoreset": lambda: at(Op.STEP, lambda frames: frames[:3]),
}
