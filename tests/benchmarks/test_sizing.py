"""The number of workers that a session gets by itself, beside other numbers and beside ``AsyncVectorEnv``, in one run.

``pytest -m benchmark -n 0 -s tests/benchmarks/test_sizing.py`` takes about an hour; ``-k`` chooses some. Ratios are
printed with the target; none fails a test, for the machine and its noise are nobody's fault.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from envhub_client.private_hub.process import private_hub
from envhub_client.tools.served_hub import served_hub
from side_by_side.entrant import ASYNC, Contest, Task, async_entrant, vector_entrant
from side_by_side.workloads import entry

import envhub

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

REPEATS, SECONDS = 5, 0.3
KINDS = [
    "wait",
    "wait_2ms",
    "wait_random",
    "busy",
    "busy_100us",
    "CartPole-v1",
    "LunarLander-v3",
    "HalfCheetah-v5",
    "atari",
]
RULE = "by the rule"


@contextlib.contextmanager
def new_hub(way: str, kind: str) -> Iterator[str | None]:
    """The address of a new hub; None for a private one."""
    if way == "private":
        private_hub().stop()
        yield None
    else:
        with served_hub(entry(kind)) as hub:
            yield getattr(hub, way)


@pytest.mark.parametrize("way", ["private", "ipc", "tcp"])
@pytest.mark.parametrize("num_envs", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_sizing(kind: str, num_envs: int, way: str) -> None:
    if kind.startswith("LunarLander") and importlib.util.find_spec("Box2D") is None:
        pytest.skip("gymnasium[box2d] is not installed")
    sizings: dict[str, envhub.Sizing] = {}
    task = Task(entry(kind), num_envs)
    with Contest() as contest:
        contest.add(ASYNC, async_entrant(task))
        address = contest.enter_context(new_hub(way, kind))
        env = task.factories if address is None else kind

        def session(name: str, workers: int | None) -> envhub.HubVectorEnv:
            envs = envhub.make_vec(env, num_envs, hub=address, num_workers=workers)
            sizings[name] = envs.sizing
            return envs

        def add(name: str, make: Callable[[], envhub.HubVectorEnv]) -> None:
            contest.add(name, vector_entrant(task, make))

        add(RULE, partial(session, RULE, None))
        for workers in sorted({1, 2, 4, 8, num_envs}):
            if workers <= num_envs:
                add(f"{workers} workers", partial(session, f"{workers} workers", workers))
        found = {name: summary.rate for name, summary in contest.run(SECONDS, REPEATS).items()}
    best = max((name for name in sizings if name.endswith("workers")), key=found.__getitem__)
    target = "none" if way == "tcp" and num_envs < 4 else ">= 1.0"
    print(
        f"\n{kind}, {num_envs} envs, {way}: {found[RULE] / found[ASYNC]:.2f} of AsyncVectorEnv (target {target}), "
        f"{found[RULE] / found[best]:.2f} of the best (target >= 0.9), {sizings[RULE].num_workers} workers, "
        f"{sizings[RULE].reason}; to AsyncVectorEnv: "
        + ", ".join(f"{name} {found[name] / found[ASYNC]:.2f}" for name in sizings)
    )
