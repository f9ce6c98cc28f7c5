"""The zygote: a process that has imported what every worker needs, and forks a worker whenever the hub asks for one.

It is exec'ed, so it holds nothing of the hub's, and it has one thread, so that forking it is safe. Its workers share
the pages of what it imported. ``boot.py`` starts it, on Python 3.8 and later.

A worker is forked twice and its parent ends, so that it becomes the child of the hub, which is a subreaper: the hub
gets its exit status, and the zygote's end is not the worker's.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import time

import numpy as np

from envhub_server import control, crash_points, worker
from envhub_server.boot import die_with_hub
from envhub_server.channel import Channel, ChannelClosed

ADOPTION_POLL_S = 0.0002
PR_SET_NAME = 15


def main(descriptor: int, hub: int) -> None:
    """Fork workers until the hub closes its end of the control descriptor."""
    name_process("envhub-zygote")
    crash_points.install("zygote")
    gc.freeze()  # a collection in a worker would write to pages that all of them share
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        while True:
            for request in channel.receive() or ():
                for _ in range(request.count):
                    # One at a time, for ``close`` to free those of the others in the worker: a worker's end that
                    # another holds, too, would hide from the hub that it is gone.
                    (end,) = channel.take_descriptors(1)
                    fork_worker(channel, end, hub)
    except ChannelClosed:
        return


def fork_worker(channel: Channel, descriptor: int, hub: int) -> None:
    """Fork a worker that serves the descriptor, which is closed here."""
    try:
        middle = os.fork()
    except OSError as error:
        Channel(socket.socket(fileno=descriptor)).send(control.NotBorn(str(error)))
        return
    if middle:
        os.close(descriptor)
        os.waitpid(middle, 0)
        return
    parent = os.getpid()
    channel.close()
    connection = Channel(socket.socket(fileno=descriptor))
    try:
        grown = os.fork()
    except OSError as error:
        connection.send(control.NotBorn(str(error)))
        os._exit(1)
    if grown:
        os._exit(0)
    become_worker(connection, parent, hub)


def become_worker(channel: Channel, parent: int, hub: int) -> None:
    """Be a worker of the hub, in this process that ``parent`` just forked and then ended; it does not return."""
    os.setsid()  # a process group of its own, with all that its envs start
    while os.getppid() == parent:
        time.sleep(ADOPTION_POLL_S)
    die_with_hub(hub)
    name_process("envhub-worker")
    crash_points.install("worker")
    np.random.seed()  # ``random`` does so by itself; envs of two workers must not draw the same numbers
    try:
        channel.send(control.Born(os.getpid()))
    except ChannelClosed:
        os._exit(0)  # the hub does not want it any more
    worker.main(channel)


def name_process(name: str) -> None:
    """Give this process the name that ``ps`` and ``top`` show; at most 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
