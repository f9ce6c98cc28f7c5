"""What one session costs the others of its hub. Timings are printed; none fails a test."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import pytest
from envhub_client.tools.bench import served_hub
from gymnasium.vector import AsyncVectorEnv
from side_by_side.workloads import Synthetic, entry

import envhub

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

NEIGHBOURS, NUM_ENVS = 4, 4
TURNS, TURN_S = 5, 4.0
STEP_EVERY_S, FILM_EVERY_S, IDLE_S = 0.005, 0.2, 10.0


def every(period_s: float, work: Callable[[], object]) -> list[float]:
    """Seconds of each call, which are made at this rate for a turn."""
    taken, begun_s = [], time.perf_counter()
    while (now_s := time.perf_counter()) < begun_s + TURN_S:
        work()
        taken.append(time.perf_counter() - now_s)
        time.sleep(max(0.0, now_s + period_s - time.perf_counter()))
    return taken


def neighbour(address: str, line: Connection) -> None:
    with closing(envhub.make_vec("CartPole-v1", NUM_ENVS, hub=address, lane="wire")) as envs:
        envs.reset(seed=1)
        line.send(None)
        while line.recv():
            line.send(every(STEP_EVERY_S, partial(envs.step, np.zeros(NUM_ENVS, np.int64))))


def step_and_render(envs: Any) -> None:
    envs.step(np.zeros(NUM_ENVS, np.int64))
    envs.render()


def test_steps_of_four_sessions_beside_films_and_slow_envs() -> None:
    """``AsyncVectorEnv`` tells what the same films cost that no hub has to do with."""
    film: dict[str, Any] = {"frame": (1080, 1920), "render_mode": "rgb_array"}
    spawn = multiprocessing.get_context("spawn")
    with served_hub("CartPole-v1", entry("Synthetic")) as hub, ExitStack() as stack:
        made = partial(envhub.make_vec, "Synthetic", NUM_ENVS)
        films = {
            "AsyncVectorEnv": AsyncVectorEnv([partial(Synthetic, **film)] * NUM_ENVS),
            "the shared lane": made(hub=hub.ipc, env_kwargs=film),
            "tcp": made(hub=hub.tcp, lane="wire", env_kwargs=film),
        }
        slow = made(hub=hub.tcp, lane="wire", env_kwargs={"wait_s": FILM_EVERY_S})
        for envs in (*films.values(), slow):
            stack.enter_context(closing(envs)).reset(seed=1)
        lines = []
        for _ in range(NEIGHBOURS):
            line, theirs = spawn.Pipe()
            spawn.Process(target=neighbour, args=(hub.tcp, theirs), daemon=True).start()
            lines.append(line)
            line.recv()
        conditions: dict[str, Callable[[], object]] = {"alone": lambda: None}
        for way, envs in films.items():
            conditions[f"beside films by {way}"] = partial(step_and_render, envs)
        conditions["beside slow envs"] = partial(slow.step, np.zeros(NUM_ENVS, np.int64))
        process = psutil.Process(hub.pid)
        found: dict[str, list[tuple[float, ...]]] = {condition: [] for condition in conditions}
        for _ in range(TURNS):
            for condition, work in conditions.items():
                for line in lines:
                    line.send(True)
                before_s = sum(process.cpu_times()[:2])
                works = every(FILM_EVERY_S, work)
                steps_ms = 1e3 * np.concatenate([line.recv() for line in lines])
                hub_ms = 1e3 * (sum(process.cpu_times()[:2]) - before_s) / TURN_S
                figures = (*np.percentile(steps_ms, [50, 99]), steps_ms.max(), hub_ms, 1e3 * np.median(works))
                found[condition].append(tuple(map(float, figures)))
        for line in lines:
            line.send(False)
    print("\n| steps of 4 other sessions | median | p99 | longest | hub's CPU a second | step and film |")
    print("|---|---|---|---|---|---|")
    for condition, turns in found.items():
        cells = " | ".join(f"{value:.1f} ms" for value in np.median(turns, axis=0))
        print(f"| {condition} | {cells} |")
        assert min(turn[0] for turn in turns) > 0


def test_idle_sessions() -> None:
    with served_hub("CartPole-v1") as hub, ExitStack() as stack:
        for _ in range(2 * NEIGHBOURS):
            envs = stack.enter_context(closing(envhub.make_vec("CartPole-v1", 2 * NUM_ENVS, hub=hub.ipc)))
            envs.reset()
            envs.step(envs.action_space.sample())
        root = psutil.Process(hub.pid)
        processes = [root, *root.children(recursive=True)]
        before_s = sum(sum(each.cpu_times()[:2]) for each in processes)
        time.sleep(IDLE_S)
        cores = (sum(sum(each.cpu_times()[:2]) for each in processes) - before_s) / IDLE_S
    print(f"\na hub with {2 * NEIGHBOURS} idle sessions and their workers keep {cores:.3f} cores busy (target 0.01)")
