"""The yardstick: what raw pyzmq does over loopback tcp with the bytes of a batched step, without EnvHub.

The other end is in a process of its own, as a hub is. Each message is a single frame.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

from envhub_client.tools.bench import Factory, Ways

from envhub.values import spaces
from envhub.values.actions import RESULT_BYTES

ECHO = "pyzmq echo"


def yardstick(make: Factory, num_envs: int) -> Ways:
    """A round trip as if it were a step of a vector env of these envs."""
    with closing(make()) as env:
        request, reply = (num_envs * nbytes(space) for space in (env.action_space, env.observation_space))
        space = env.action_space

    def made() -> Any:
        stack = ExitStack()
        step = stack.enter_context(echo(request, reply + num_envs * RESULT_BYTES))
        return SimpleNamespace(
            num_envs=num_envs, action_space=space, reset=lambda seed: None, step=lambda _: step(), close=stack.close
        )

    return {ECHO: made}


def nbytes(space: Any) -> int:
    return sum(leaf.nbytes for leaf in spaces.leaves(space))


@contextlib.contextmanager
def echo(request_bytes: int, reply_bytes: int) -> Iterator[Callable[[], object]]:
    """One DEALER/ROUTER round trip per call, with a request and a reply of these sizes."""
    with peer(f"from {__name__} import answer; answer({reply_bytes})") as address, _socket("DEALER") as dealer:
        dealer.connect(address)
        request = bytes(request_bytes)

        def round_trip() -> None:
            dealer.send(request, copy=False)
            dealer.recv(copy=False)

        yield round_trip


@contextlib.contextmanager
def peer(program: str, quiet: bool = False) -> Iterator[str]:
    """The address that this program prints, in a process of its own, which ends with the block."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    if quiet:
        pipes["stderr"] = subprocess.DEVNULL
    with subprocess.Popen([sys.executable, "-c", program], text=True, start_new_session=True, **pipes) as process:
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


def answer(reply_bytes: int) -> None:
    """Be the ROUTER: print its address, then answer every request, until stdin ends."""
    reply = bytes(reply_bytes)
    with _socket("ROUTER") as router:
        router.bind("tcp://127.0.0.1:*")
        announce(router.last_endpoint.decode())
        while True:
            sender, _ = router.recv_multipart(copy=False)
            router.send_multipart([sender, reply], copy=False)


def announce(address: str) -> None:
    """Print the address, and end this process as soon as its stdin ends: the program that started it is gone."""
    # A thread and not a poller, which every message would pay for.
    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    print(address, flush=True)


def _exit_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
