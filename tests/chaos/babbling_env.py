"""A chain whose worker says anything to its hub when it is told to."""

from __future__ import annotations

import contextlib
import gc
import socket

from chaos.chain_env import ChainEnv
from chaos.mutations import Mutator
from envhub_server.ipc import control
from envhub_server.ipc.channel import Channel


class BabblingEnv(ChainEnv):
    """A hostile worker."""

    def babble(self, seed: int, count: int, rubbish: bool) -> None:
        """Say ``count`` well-formed control messages out of their order; with ``rubbish`` some are not well-formed."""
        mutator = Mutator(seed)
        (channel,) = [found for found in gc.get_objects() if type(found) is Channel and found.fileno() >= 0]
        with contextlib.suppress(OSError), socket.socket(fileno=channel.fileno()) as connection:
            try:
                connection.setblocking(True)
                for _ in range(count):
                    said = b"".join(control.pack(mutator.control_message()))
                    framed = len(said).to_bytes(4, "little") + said
                    if rubbish and mutator.chance.random() < 0.1:
                        framed = mutator.chance.choice([mutator.flipped(framed), mutator.value(), framed[:-1]])
                    connection.sendall(framed)
            finally:
                connection.detach()
