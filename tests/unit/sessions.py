"""Sessions in the states that tests begin with, and what their workers say."""

from __future__ import annotations

import random
from typing import Any

from envhub_server.catalog.registry import Recipe
from envhub_server.ipc.control import Built, Mapped
from envhub_server.session.hang_detector import Late
from envhub_server.session.restarts import RestartPolicy, Restarts
from envhub_server.session.state import Phase, SessionState
from envhub_server.session.worker_count import Machine, WorkerCount

from envhub.protocol.messages import Failure, Make

MACHINE = Machine((0, 1, 2, 3), 4, quota=True)  # with which nobody spins
OBSERVATION, WIDER, ACTION = b"a space", b"a wider one of the same leaves", b"actions"
INFO_BYTES = 64
RECIPE = Recipe("CartPole-v1")
RAISED = Failure("env_raised", "env", "no", env_index=1, worker=0)
LATE = Late("step", 2, 1.6, 1.5)
STOPPING = Failure("draining", "hub", "the hub is shutting down")


def restarts(**policy: Any) -> Restarts:
    return Restarts(RestartPolicy(jitter=0.0, **policy), random.Random(0))


def built(*observations: bytes) -> Built:
    return Built(list(observations or [OBSERVATION]), ACTION, [["<f4", [4]]], [["<i8", []]], b"meta", "rgb_array", "{}")


def session_of(make: Make, workers: int | None, recipe: Recipe = RECIPE, **policy: Any) -> SessionState:
    """A session of so many workers; where that is None, its first envs decide."""
    sizing = None if workers is None else WorkerCount(workers, "as the test wants it")
    return SessionState(make, recipe, sizing, INFO_BYTES, MACHINE, restarts(**policy))


def begun(num_envs: int = 3, workers: int = 2, **make: Any) -> SessionState:
    """A session whose workers are building."""
    made = Make(num_envs, "CartPole-v1", **make)
    session = session_of(made, workers, restarts_max=made.faults.restarts_max)
    session.start()
    return session


def ready(num_envs: int = 3, workers: int = 2, **make: Any) -> SessionState:
    """A session that is made, idle."""
    session = begun(num_envs, workers, **make)
    for worker in range(len(session.blocks)):
        session.event(worker, built())
    for worker in range(len(session.blocks)):
        session.event(worker, Mapped())
    assert session.phase is Phase.READY and session.idle
    return session
