"""A warm-up: the zygote builds an env, resets it and steps it as a worker does, before it forks the first worker.

What Python makes when code first runs (imports inside functions, specialised bytecode, caches of classes and methods)
is made once in the zygote, on pages that all of its workers share. Without the warm-up each worker makes it for
itself, which takes its time and 5 MB of its memory, and 64 copies of the same bytecode compete for the CPUs' caches.

The env is one of Gymnasium's own that is written in Python and starts nothing. Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from typing import Any, cast

import numpy as np

from envhub.arena.memory import OP_RESET, OP_STEP, Arena, allocate
from envhub.values import actions, codec
from envhub_server.ipc import control, trace
from envhub_server.ipc.channel import Channel
from envhub_server.worker.env_sources import remember_registry, remember_variables
from envhub_server.worker.host import Host
from envhub_server.worker.process import Worker

ENV = "CartPole-v1"
SEED = 1  # so that the warm-up is the same in every zygote
STEPS = 100  # by then CPython has specialised the bytecode of a step, and an episode or two have ended
INFO_BYTES = 512
TRACE_BYTES = 1 << 14


def warm_up() -> bool:
    """Execute once what a worker does, and leave no descriptor behind; returns whether that succeeded.

    Where it does not succeed, as in an interpreter without that env, workers start more slowly.
    """
    remember_registry()
    remember_variables()
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a worker repeats those that matter
        ends = socket.socketpair()
        for end in ends:
            stack.callback(end.close)
            end.setblocking(False)  # while one end writes, the other is not read
        hub, channel = map(Channel, ends)
        worker = Worker(channel, Host())
        stack.callback(worker.close)
        try:
            _WarmUp(hub, channel, worker).run()
        except Exception:
            return False
    return True


class _WarmUp:
    def __init__(self, hub: Channel, channel: Channel, worker: Worker) -> None:
        self._hub, self._channel, self._worker = hub, channel, worker

    def run(self) -> None:
        self._tell(control.Build(0, [0], ENV, b"", b"", "", [], "NextStep", True, columns=True))
        arena = self._map(self._heard(control.Built))
        for column in arena.action_codes:
            column[:] = actions.DTYPES.index(np.dtype(np.int64))
        self._tell(control.Serve())
        arena.post(OP_RESET)
        self._tell(control.ResetRows([0], [SEED], codec.encode({})))
        for _ in range(STEPS):
            arena.post(OP_STEP)
            self._worker.serve_rows()
        self._tell(control.CloseEnvs())

    def _map(self, built: Any) -> Arena:
        leaves = built.observation_leaves, built.action_leaves
        spaces = built.observation_spaces[0], built.action_space
        mapped = control.MapArena(1, *leaves, INFO_BYTES, *spaces, "same", 0, TRACE_BYTES)
        layout = mapped.layout()
        memory = allocate(layout)
        arena = Arena(layout, memory)
        arena.format(epoch=1)
        heard, rung = os.pipe()  # Python has no eventfd before 3.10
        os.set_blocking(rung, False)  # it is never read, and has room for all rings
        traced = trace.allocate(trace.layout_of(1, False, layout.actions, TRACE_BYTES))
        descriptors = control.ArenaDescriptors(memory, heard, heard, rung, rung, traced)
        self._tell(mapped, descriptors.sent)
        for descriptor in (memory, heard, rung, traced):
            os.close(descriptor)
        return arena

    def _tell(self, message: Any, descriptors: Any = ()) -> None:
        self._hub.send(message, descriptors)
        for each in cast("list[Any]", self._channel.receive()):
            self._worker.handle(each)

    def _heard(self, kind: type) -> Any:
        return next(message for message in cast("list[Any]", self._hub.receive()) if isinstance(message, kind))
