"""What keys cost, and the proxy: steps by tcp of two hubs in turns. Ratios are printed; none fails a test."""

from __future__ import annotations

import statistics
from contextlib import closing
from pathlib import Path

import pytest
from envhub_server.network.key_folder import KeyFolder
from hubs import serve
from new_keys import address_of, admitted
from test_neighbours import steps_per_second

import envhub

TURNS = 7


IMAGES = "images=side_by_side.workloads:images"
ENVS = [("CartPole-v1", 1), ("CartPole-v1", 16), ("CartPole-v1", 64), ("ALE/Pong-v5", 16)]


PLAIN = ["tcp://127.0.0.1:0"]


@pytest.mark.benchmark
@pytest.mark.parametrize(("env", "num_envs"), [*ENVS, (IMAGES, 1), (IMAGES, 16), (IMAGES, 64)], ids=str)
def test_step_with_a_key_and_by_the_proxy_next_to_plain_loopback(tmp_path: Path, env: str, num_envs: int) -> None:
    """All that keys cost: plain loopback has neither the proxy nor encryption."""
    keys = KeyFolder(tmp_path / "keys")
    keys.make_secret()
    token = admitted(keys, "alice")
    with (
        serve(tmp_path, env, "--keys", str(keys.path)) as guarded,
        serve(tmp_path, env, "--insecure", binds=PLAIN) as proxied,
        serve(tmp_path, env, binds=PLAIN) as plain,
    ):
        name, with_key = env.partition("=")[0], address_of(token, guarded.tcp)
        compare(name, num_envs, {"on plain loopback": plain.tcp, "with a key": with_key})
        compare(name, num_envs, {"on plain loopback": plain.tcp, "by the proxy": proxied.tcp})


def compare(env: str, num_envs: int, addresses: dict[str, str]) -> None:
    """Print how much longer a step takes at the second address than at the first one, in turns."""
    (first, second), pairs = addresses, []
    for _ in range(TURNS):
        times = []
        for address in addresses.values():
            with closing(envhub.make_vec(env, num_envs, hub=address, lane="wire")) as envs:
                observations, _ = envs.reset(seed=1)
                steps_per_second(envs)
                times.append(1 / steps_per_second(envs))
        pairs.append(times)
    ratios = sorted(later / earlier for earlier, later in pairs)
    lowest, median, highest = statistics.quantiles(ratios, n=4)
    print(
        f"\n{num_envs} {env}, {observations.nbytes / 1000:.0f} kB a step: {second} {median:.2f} times as long as "
        f"{first} [{lowest:.2f} .. {highest:.2f}], {statistics.median(pair[0] for pair in pairs) * 1e6:.0f} us {first}"
    )
