"""Commands that time steps: ``bench`` and ``demo``."""

from __future__ import annotations

import math
from typing import Annotated

from cyclopts import Parameter

from envhub.cli.parameters import console
from envhub.cli.terminal import end, errors_in_a_line


def bench(
    env: list[str],
    *,
    num_envs: Annotated[str, Parameter(alias="-n")] = "1,16,64",
    seconds: float = 1.0,
    repeats: int = 3,
    json: bool = False,
) -> None:
    """Time the ways to step your env on this machine, and say which is fastest, and why.

    The ways are Gymnasium's SyncVectorEnv and AsyncVectorEnv, a private hub, and a hub over ipc and over tcp; by shared
    memory, and over tcp by messages. They are timed in turn, in one run.

    Parameters
    ----------
    env
        Env to step, as ``envhub serve`` takes it: a Gymnasium id, ``module:id``, or ``name=module:factory``; may be
        given more than once.
    num_envs
        Numbers of envs, separated by commas, such as 1,4,16,64,256. AsyncVectorEnv is left out above 256, since it
        takes a process for each env.
    seconds
        Seconds that each measurement lasts.
    repeats
        Number of times that every way is measured; medians are shown, and how far the repeats differ.
    json
        Print one JSON object for each env and number of envs instead of a table.
    """
    try:
        sizes = [int(size) for size in num_envs.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or not 0 < seconds < math.inf or repeats < 1:
        end("bench", "-n takes numbers of envs separated by commas, --seconds and --repeats positive ones")
    from envhub_client.tools.bench import run

    with errors_in_a_line("bench"):
        run(console, env, sizes, seconds, repeats, json)


def demo() -> None:
    """Learn CartPole-v1 through a hub over tcp, then compare the ways to step it."""
    from envhub_client.tools import bench

    with errors_in_a_line("demo"):
        bench.demo(console)
