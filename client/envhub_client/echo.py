"""The yardstick of ``envhub bench``: a DEALER/ROUTER round trip of raw pyzmq over loopback tcp, without EnvHub.

The ROUTER is in a process of its own, as a hub is. Each message is a single frame.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

_PROGRAM = "from envhub_client.echo import answer; answer({})"


@contextlib.contextmanager
def echo(request_bytes: int, reply_bytes: int) -> Iterator[Callable[[], object]]:
    """One round trip per call, with a request and a reply of these sizes."""
    import zmq

    command = [sys.executable, "-c", _PROGRAM.format(reply_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().decode().strip()
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.connect(address)
                request = bytes(request_bytes)

                def round_trip() -> None:
                    dealer.send(request, copy=False)
                    dealer.recv(copy=False)

                yield round_trip
        finally:
            process.terminate()


def answer(reply_bytes: int) -> None:
    """Be the ROUTER: print its address, then answer every request, until stdin ends."""
    import zmq

    # A thread and not a poller, which every round trip would pay for.
    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    reply = bytes(reply_bytes)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind("tcp://127.0.0.1:*")
        print(router.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
        while True:
            peer, _ = router.recv_multipart(copy=False)
            router.send_multipart([peer, reply], copy=False)


def _exit_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
