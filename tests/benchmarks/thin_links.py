"""Times envs of a hub at the other end of a slow link, with and without compression, and by chunks of actions.

The link is a pair of TUN devices in two network namespaces of its own, and needs root. The tables of NOTES.md are of

cd tests/benchmarks
python -m thin_links
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import multiprocessing
import os
import select
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from envhub_client.tools import bench
from side_by_side.workloads import entry

import envhub

MTU = 9000  # so that Python keeps up with 1 Gbit/s
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
HUB, CLIENT = "10.77.0.1", "10.77.0.2"
ADDRESS = f"tcp://{HUB}:5555"
ENVS = ("ALE/Pong-v5", "tiles", "noisy", "CartPole-v1", "HalfCheetah-v5")
CHUNKS = (1, 8, 50)


@contextmanager
def link() -> Iterator[tuple[str, Any]]:
    """The namespace of the hub, and bits a second and seconds each way, which may be set; this thread is the client."""
    names = [f"envhub-{os.getpid()}-{end}" for end in ("hub", "client")]
    with ExitStack() as stack:
        devices = [stack.enter_context(device(name, ip)) for name, ip in zip(names, (HUB, CLIENT), strict=True)]
        speed = multiprocessing.Array("d", [1e9, 0.0], lock=False)
        forwarder = multiprocessing.Process(target=forward, args=(devices, speed), daemon=True)
        forwarder.start()
        stack.callback(forwarder.kill)
        enter(f"/run/netns/{names[1]}")
        stack.callback(enter, f"/proc/{os.getpid()}/ns/net")
        yield names[0], speed


@contextmanager
def device(namespace: str, ip: str) -> Iterator[int]:
    run("ip", "netns", "add", namespace)
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        name = f"tun{os.getpid()}{ip[-1]}"
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
        run("ip", "link", "set", name, "netns", namespace)
        run("ip", "-n", namespace, "addr", "add", f"{ip}/24", "dev", name)
        run("ip", "-n", namespace, "link", "set", name, "up", "mtu", str(MTU), "txqueuelen", "10000")
        run("ip", "-n", namespace, "link", "set", "lo", "up")
        yield descriptor
        os.close(descriptor)
    finally:
        run("ip", "netns", "delete", namespace)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def enter(namespace: str) -> None:
    """Move this thread, and the threads that it starts later, into this network namespace."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def forward(devices: Sequence[int], speed: Any) -> None:
    """Carry packets from each device to the other, after the time that the link takes; as a queue without an end."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # or the machine's load would be the link's
    under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free_s = [0.0, 0.0]  # when the last packet of each direction has left
    while True:
        dues = [queue[0][0] for queue in under_way if queue]
        select.select(devices, (), (), max(0.0, min(dues) - time.monotonic()) if dues else None)
        now_s = time.monotonic()
        for side, descriptor in enumerate(devices):
            try:
                while packet := os.read(descriptor, MTU):
                    free_s[side] = max(now_s, free_s[side]) + 8 * len(packet) / speed[0]
                    under_way[side].append((free_s[side] + speed[1], packet))
            except BlockingIOError:
                pass
            while under_way[side] and under_way[side][0][0] <= time.monotonic():
                os.write(devices[1 - side], under_way[side].popleft()[1])


@contextmanager
def hub(namespace: str) -> Iterator[None]:
    command = [sys.executable, "-m", "envhub", "serve", *map(entry, ENVS), "--bind", ADDRESS, "--insecure"]
    process = subprocess.Popen(["ip", "netns", "exec", namespace, *command], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def rate(envs: envhub.HubVectorEnv, seconds: float) -> float:
    """Steps of envs in a second, by the quickest step: the others tell what else the machine does."""
    return float(envs.num_envs / bench.times(envs.step, [envs.action_space.sample()], seconds).min())


def in_turns(ways: Sequence[Callable[[], float]], turns: int) -> tuple[list[float], list[float]]:
    """The median of each way, and its median ratio to the first one's of the same turn."""
    measured = [[measure() for measure in ways] for _ in range(turns + 1)][1:]
    ratios = [[value / turn[0] for value in turn] for turn in measured]
    medians, of_ratios = ([*map(statistics.median, zip(*rows, strict=True))] for rows in (measured, ratios))
    return medians, of_ratios


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m thin_links", description=__doc__)
    options.add_argument("--num-envs", type=int, default=64)
    options.add_argument("--seconds", type=float, default=0.7, help="seconds that each measurement lasts (0.7)")
    options.add_argument("--turns", type=int, default=3)
    asked = options.parse_args()
    links = [(bits, delay_s) for bits in (1e9, 1e8) for delay_s in (0.0001, 0.001, 0.01)]
    with link() as (namespace, speed), hub(namespace):
        for env in ENVS:
            with ExitStack() as stack:
                make = partial(envhub.make_vec, env, asked.num_envs, hub=ADDRESS)
                both = [stack.enter_context(closing(envs)) for envs in (make(compression=None), make())]
                for envs in both:
                    envs.reset(seed=1)
                for speed[0], speed[1] in links:
                    of_both = [partial(rate, envs, asked.seconds) for envs in both]
                    (plain, by_default), (_, ratio) = in_turns(of_both, asked.turns)
                    title = f"{asked.num_envs} {env}, {speed[0] / 1e6:g} Mbit/s, {speed[1] * 1e3:g} ms"
                    print(f"{title}: {plain:,.0f} -> {by_default:,.0f} a second, {ratio:.2f}", flush=True)
        speed[0], speed[1] = 1e9, 0.01
        for env in ("CartPole-v1", "HalfCheetah-v5"):
            with ExitStack() as stack:
                ways: list[Callable[[], float]] = []
                for k in CHUNKS:
                    chunks: dict[str, Any] = {"wrappers": [("ActionChunk", {"k": k})], "hub": ADDRESS}
                    envs = stack.enter_context(closing(envhub.make_vec(env, 16, **chunks)))
                    envs.reset(seed=1)
                    ways.append(partial(lambda e, k: k * rate(e, asked.seconds), envs, k))
                rates, ratios = in_turns(ways, asked.turns)
                for k, found, ratio in zip(CHUNKS, rates, ratios, strict=True):
                    print(f"16 {env}, 10 ms, chunks of {k}: {found:,.0f} actions a second, {ratio:.1f}", flush=True)
    print(f"load {Path('/proc/loadavg').read_text().strip()}")


if __name__ == "__main__":
    main()
