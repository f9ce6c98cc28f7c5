"""What keys cost, and the proxy: steps by tcp of two hubs in turns. Ratios are printed; none fails a test."""

from __future__ import annotations

import statistics
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_client.tools import bench
from hubs import serve
from new_keys import address_of, admitted, keys_in

import envhub

TURNS, SECONDS = 7, 1.0

IMAGES = "images=side_by_side.workloads:images"
ENVS = [("CartPole-v1", 1), ("CartPole-v1", 16), ("CartPole-v1", 64), ("ALE/Pong-v5", 16)]


PLAIN = ["tcp://127.0.0.1:0"]


@pytest.mark.benchmark
@pytest.mark.parametrize(("env", "num_envs"), [*ENVS, (IMAGES, 1), (IMAGES, 16), (IMAGES, 64)], ids=str)
def test_step_with_a_key_and_by_the_proxy_next_to_plain_loopback(tmp_path: Path, env: str, num_envs: int) -> None:
    """All that keys cost: plain loopback has neither the proxy nor encryption."""
    keys = keys_in(tmp_path / "keys")
    token = admitted(keys, "alice")
    with (
        serve(tmp_path, env, "--keys", str(keys.path)) as guarded,
        serve(tmp_path, env, "--insecure", binds=PLAIN) as proxied,
        serve(tmp_path, env, binds=PLAIN) as plain,
    ):
        name, with_key = env.partition("=")[0], address_of(token, guarded.tcp)
        loopback, key = ("on plain loopback", plain.tcp, None), ("with a key", with_key, "auto")
        compare(name, num_envs, loopback, key)
        compare(name, num_envs, key, ("with a key, uncompressed", with_key, None))
        compare(name, num_envs, loopback, ("by the proxy", proxied.tcp, None))


def compare(env: str, num_envs: int, *ways: tuple[str, str, Any]) -> None:
    """Print how much longer a step takes in the second way than in the first one, in turns."""
    (first, second), pairs, actions = [name for name, *_ in ways], [], np.zeros(num_envs, np.int64)
    for _ in range(TURNS):
        times = []
        for _, address, compression in ways:
            with closing(envhub.make_vec(env, num_envs, hub=address, lane="wire", compression=compression)) as envs:
                observations, _ = envs.reset(seed=1)
                times.append([bench.times(envs.step, [actions], SECONDS) for _ in range(2)][1].mean())
        pairs.append(times)
    ratios = sorted(later / earlier for earlier, later in pairs)
    lowest, median, highest = statistics.quantiles(ratios, n=4)
    print(
        f"\n{num_envs} {env}, {observations.nbytes / 1000:.0f} kB a step: {second} {median:.2f} times as long as "
        f"{first} [{lowest:.2f} .. {highest:.2f}], {statistics.median(pair[0] for pair in pairs) * 1e6:.0f} us {first}"
    )
