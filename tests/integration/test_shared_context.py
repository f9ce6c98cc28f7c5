"""The ZeroMQ context that all connections of a program share."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, closing

import pytest
import zmq
from envhub_client.connection import zeromq_transport
from envhub_client.connection.connection import connect
from hubs import ServedHub, wait_until

import envhub
from envhub.protocol.messages import Hello, Op


def test_connections_have_no_threads_of_their_own(hub: ServedHub) -> None:
    with ExitStack() as opened:
        opened.enter_context(closing(connect(hub.tcp)))
        threads = len(os.listdir("/proc/self/task"))
        for _ in range(8):
            opened.enter_context(closing(connect(hub.tcp)))
        assert len(os.listdir("/proc/self/task")) <= threads


def test_program_may_terminate_its_own_contexts(hub: ServedHub) -> None:
    with closing(connect(hub.tcp)) as connection:
        for context in (zmq.Context.instance(), zmq.Context()):
            with context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as theirs:
                ours.bind("inproc://monitor-0")
                theirs.connect("inproc://monitor-0")
            context.term()
        connection.ask(Op.HELLO, Hello(client="test"))


def test_error_says_that_no_socket_is_left(hub: ServedHub, monkeypatch: pytest.MonkeyPatch) -> None:
    small = zeromq_transport.SharedContext()
    monkeypatch.setattr(zeromq_transport, "shared_context", small)
    monkeypatch.setattr(zeromq_transport, "SOCKETS_MAX", 4)
    with closing(connect(hub.tcp)) as connection:
        with pytest.raises(envhub.HubUnreachable, match="as many sockets or files as it may"):
            connect(hub.tcp)
        connection.ask(Op.HELLO, Hello(client="test"))

    def connects() -> bool:
        try:
            connect(hub.tcp).close()
        except envhub.HubUnreachable:
            return False
        return True

    assert wait_until(connects)  # a thread of libzmq ends the sockets that were closed
    assert small._context is not None
    small._context.term()


FORKED = """
import logging, os, sys
import envhub

logging.getLogger("envhub").setLevel("WARNING")  # so that EnvHub does not count a slow making on stderr
held = [envhub.make_vec("counter", 1, hub=sys.argv[1]), envhub.connect(sys.argv[1])]
held[0].reset()
child = os.fork()
if not child:
    envs = envhub.make_vec("counter", 1, hub=sys.argv[1])
    envs.reset()
    print("child", *envs.step([3])[1], flush=True)
    envs.close()
    unclosed = envhub.connect(sys.argv[1])
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print("parent", *held[0].step([3])[1])
held[0].close()
"""


def test_forked_child_has_a_context_of_its_own(hub: ServedHub) -> None:
    run = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, hub.tcp]
    result = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert (result.stdout, result.stderr) == ("child 3.0\nparent 3.0\n", "")


UNCLOSED = """
import sys
import envhub

many = [envhub.connect(sys.argv[1]) for _ in range(20)]
envs = envhub.make_vec("counter", 1, hub=sys.argv[1])
envs.reset()
envs.step_async([1])
"""


def test_program_ends_that_closes_nothing(hub: ServedHub) -> None:
    run = [sys.executable, "-W", "ignore", "-c", UNCLOSED, hub.tcp]
    subprocess.run(run, timeout=60, check=True)
    with envhub.connect(hub.tcp) as client:
        for session in client.sessions():
            client.end(session["session"])
