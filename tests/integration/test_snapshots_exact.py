"""Envs of many simulators go on from snapshots to the bit, in each autoreset mode, on both lanes."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hubs import ServedHub, serve
from snapshot_sims import wander

import envhub

SHORT: dict[str, Any] = {"env_kwargs": {"max_episode_steps": 12}}
WRAPPERS = [
    ("TimeLimit", {"max_episode_steps": 15}),
    "RecordEpisodeStatistics",
    "NormalizeObservation",
    ("FrameStackObservation", {"stack_size": 3}),
]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "wrapped": ("CartPole-v1", {"wrappers": WRAPPERS}),
    "words": ("words", {}),
    "closed": ("closed", {}),
    "history": ("history", {}),
    "cartpole": ("CartPole-v1", {}),
    "pong": ("ALE/Pong-v5", SHORT),  # with sticky actions, as all of these names
    "montezuma": ("ALE/MontezumaRevenge-v5", SHORT),
    "cheetah": ("HalfCheetah-v5", SHORT),
    "humanoid": ("Humanoid-v5", {}),
    "lander": ("LunarLander-v3", SHORT),
    "minigrid": ("obstacles", {}),
    "dm_control": ("dm_control/cartpole-swingup-v0", SHORT),
    "torch": ("torch", {}),
}
NEEDED = {"lander": "Box2D", "torch": "torch"}
MODES, LANES = ("NextStep", "SameStep", "Disabled"), ("shared", "wire")
WAYS = [*product(MODES, LANES)]
FEW, EACH = 3, len(KINDS)
INTERLEAVINGS = 200  # of each kind, in all: 33 of each way, and 2 of more envs


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    own = ["words:Words", "closed:Closed", "history:History", "torch:Torch", "obstacles:obstacles"]
    named = [name.replace(":", "=snapshot_sims:") for name in own]
    offered = ["ALE/*", "dm_control/*", *{name for name, _ in KINDS.values() if name[0].isupper() and "/" not in name}]
    with serve(tmp_path_factory.mktemp("exact"), *named, *offered) as served:
        yield served


def wandered(hub: ServedHub, kind: str, way: tuple[str, str], num_envs: int, rounds: int, times: int) -> Counter[str]:
    if kind in NEEDED and importlib.util.find_spec(NEEDED[kind]) is None:
        pytest.skip(f"{NEEDED[kind]} is not installed")
    (name, options), (mode, lane) = KINDS[kind], way
    where: dict[str, Any] = {"hub": hub.ipc} if lane == "shared" else {"hub": hub.tcp, "lane": "wire"}
    counts = Counter[str]()
    with closing(envhub.make_vec(name, num_envs, snapshots=True, autoreset_mode=mode, **where, **options)) as envs:
        assert envs.lane == lane
        envs.single_action_space.seed(1)
        actions = [envs.single_action_space.sample() for _ in range(2)]
        for seed in range(times):
            counts += wander(envs, rounds, 100 * seed, actions)
    return counts


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, WAYS[n % len(WAYS)], marks=[pytest.mark.long] * (n >= FEW), id=f"{kind}-{n % len(WAYS)}")
        for n, kind in enumerate(KINDS)
    ],
)
def test_env_goes_on_to_the_bit(hub: ServedHub, kind: str, way: tuple[str, str]) -> None:
    assert wandered(hub, kind, way, 4, 30, 1)["compared"] > 5


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_env_goes_on_to_the_bit_where_most_snapshots_are_requests_that_are_repeated(tmp_path: Path, mode: str) -> None:
    with serve(tmp_path, "words=snapshot_sims:Words", "--snapshots-max", "3") as few:
        assert wandered(few, "words", (mode, "shared"), 3, 30, 3)["compared"] > 5


@pytest.mark.chaos
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_env_goes_on_to_the_bit_in_two_hundred_interleavings(hub: ServedHub, kind: str) -> None:
    counts = Counter[str]()
    for way in WAYS:
        counts += wandered(hub, kind, way, 4, 16, INTERLEAVINGS // len(WAYS))
    counts += wandered(hub, kind, WAYS[0], 16, 16, INTERLEAVINGS % len(WAYS))
    print(f"{kind}: {INTERLEAVINGS} sequences, {dict(counts)}, none differs")
    assert counts["restored"] > INTERLEAVINGS and counts["compared"] > INTERLEAVINGS
