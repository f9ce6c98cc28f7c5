"""Commands that time steps: ``bench`` and ``demo``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from envhub.cli.terminal import console, end, errors_in_a_line


def bench(
    *,
    env: list[str] | None = None,
    n: Annotated[str, Parameter(alias="-n")] = "1,16,64",
    seconds: float = 1.0,
    repeats: int = 3,
    json: bool = False,
    plot: Path | None = None,
    budget: bool = False,
) -> None:
    """Time stepping through a hub (embedded, ipc, tcp), AsyncVectorEnv and SyncVectorEnv in one run.

    Where they are installed, SB3, tianshou, PufferLib, EnvPool, dm_env_rpc and OpenEnv take part, too. Needs the
    extra "bench".

    Parameters
    ----------
    env
        A Gymnasium id such as ALE/Pong-v5 or HalfCheetah-v5, or images (84 x 84 x 4 bytes at no cost), busy (1 ms of
        CPU time), busy_100us, unequal (0.1 to 2 ms), wait (waits 10 ms), wait_2ms, wait_random (0.1 to 20 ms) or
        atari (Pong, preprocessed); may be given more than once. CartPole-v1 by default.
    n
        Numbers of envs, separated by commas: any from 1 up, such as 1,4,16,64,256,1024. Ways that take a process for
        each env are left out above 256.
    seconds
        How long each measurement lasts.
    repeats
        How often every way is measured, in turn; medians are shown.
    json
        Print one JSON object per way and number of envs instead of a table.
    plot
        A PNG or SVG file to draw the results into as well.
    budget
        Print instead where the time of one step goes, hop by hop.
    """
    try:
        sizes = [int(size) for size in n.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or not 0 < seconds < math.inf or repeats < 1:
        end("bench", "-n takes numbers of envs separated by commas, --seconds and --repeats positive ones")
    if budget and (json or plot):
        end("bench", "--budget goes with --env and -n only")
    with errors_in_a_line("bench"):
        from envhub_client.tools.bench.bench import run, run_budget
        from envhub_client.tools.bench.plot import check

        if budget:
            run_budget(console, env or ["CartPole-v1"], sizes)
            return
        if plot:
            try:
                check(plot)
            except ValueError as error:
                end("bench", error)
        run(console, env or ["CartPole-v1"], sizes, seconds, repeats, json, plot)


def demo() -> None:
    """Learn CartPole-v1 through a hub over tcp, then compare the ways to step it."""
    from envhub_client.tools.demo import run

    with errors_in_a_line("demo"):
        run(console)
