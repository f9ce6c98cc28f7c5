"""The yardsticks: what raw pyzmq does over loopback tcp with the bytes of a batched step, without EnvHub.

The other end is in a process of its own, as a hub is. Each message is a single frame.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from types import SimpleNamespace
from typing import Any

from envhub_client.tools.bench import Factory, Ways

from envhub.values import spaces
from envhub.values.actions import RESULT_BYTES

ECHO, ONE_WAY = "pyzmq echo", "pyzmq one-way"

# On the way; then the sender waits, and takes no CPU from the way that is measured meanwhile.
QUEUE_MESSAGES_MAX = 4
BUFFER_BYTES = 1 << 16  # of the kernel's for each side, which would hold small messages by the 100,000


def yardsticks(make: Factory, num_envs: int) -> Ways:
    """A round trip, and replies of which none was asked for, as if they were vector envs of these envs."""
    with closing(make()) as env:
        request, reply = (num_envs * nbytes(space) for space in (env.action_space, env.observation_space))
        space = env.action_space
    reply += num_envs * RESULT_BYTES

    def made(opened: AbstractContextManager[Callable[[], object]]) -> Any:
        stack = ExitStack()
        step = stack.enter_context(opened)
        return SimpleNamespace(
            num_envs=num_envs,
            action_space=space,
            reset=lambda seed: None,
            step=lambda _: step(),
            close=stack.close,
        )

    return {ECHO: lambda: made(echo(request, reply)), ONE_WAY: lambda: made(one_way(reply))}


def nbytes(space: Any) -> int:
    return sum(leaf.nbytes for leaf in spaces.leaves(space))


@contextlib.contextmanager
def echo(request_bytes: int, reply_bytes: int) -> Iterator[Callable[[], object]]:
    """One DEALER/ROUTER round trip per call, with a request and a reply of these sizes."""
    with peer("answer", reply_bytes) as address, _socket("DEALER") as dealer:
        dealer.connect(address)
        request = bytes(request_bytes)

        def round_trip() -> None:
            dealer.send(request, copy=False)
            dealer.recv(copy=False)

        yield round_trip


@contextlib.contextmanager
def one_way(message_bytes: int) -> Iterator[Callable[[], object]]:
    """One message of this size per call, of many that come one after another and ask for nothing."""
    with peer("pour", message_bytes) as address, _socket("PULL") as pull:
        pull.rcvhwm, pull.rcvbuf = QUEUE_MESSAGES_MAX, buffer_bytes(message_bytes)
        pull.connect(address)
        yield partial(pull.recv, copy=False)


@contextlib.contextmanager
def peer(role: str, message_bytes: int) -> Iterator[str]:
    """The address that this function of this module prints, in a process of its own, which ends with the block."""
    command = [sys.executable, "-c", f"from {__name__} import {role}; {role}({message_bytes})"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@contextlib.contextmanager
def _socket(kind: str) -> Iterator[Any]:
    import zmq

    with zmq.Context() as context, context.socket(getattr(zmq, kind)) as socket:
        socket.linger = 0
        yield socket


def buffer_bytes(message_bytes: int) -> int:
    """Size of a socket's buffer in the kernel; -1 leaves it to the kernel, where the messages are large."""
    return BUFFER_BYTES if QUEUE_MESSAGES_MAX * message_bytes < BUFFER_BYTES else -1


def answer(reply_bytes: int) -> None:
    """Be the ROUTER: print its address, then answer every request, until stdin ends."""
    reply = bytes(reply_bytes)
    with _socket("ROUTER") as router:
        router.bind("tcp://127.0.0.1:*")
        _announce(router.last_endpoint.decode())
        while True:
            sender, _ = router.recv_multipart(copy=False)
            router.send_multipart([sender, reply], copy=False)


def pour(message_bytes: int) -> None:
    """Be the PUSH: print its address, then send without end, until stdin ends."""
    message = bytes(message_bytes)
    with _socket("PUSH") as push:
        push.sndhwm, push.sndbuf = QUEUE_MESSAGES_MAX, buffer_bytes(message_bytes)
        push.bind("tcp://127.0.0.1:*")
        _announce(push.last_endpoint.decode())
        while True:
            push.send(message, copy=False)


def _announce(address: str) -> None:
    """Print the address, and end this process as soon as its stdin ends: the program that started it is gone."""
    # A thread and not a poller, which every message would pay for.
    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    print(address, flush=True)


def _exit_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
