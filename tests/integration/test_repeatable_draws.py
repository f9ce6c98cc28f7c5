"""Draws from ``np.random`` and ``random`` in envs: other ones in each env, and the same in each run."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import gymnasium
import numpy as np
import pytest
import sims
from hubs import kill_worker, serve, wait_until

import envhub

ENVIRON = {"PYTHONPATH": str(Path(__file__).parent)}


class Drawing(sims.Counter):
    """Draws when it is made, more than a generator holds, and in each step."""

    def __init__(self, notes: str = os.devnull) -> None:
        super().__init__()
        np.random.bytes(9_999), random.getrandbits(99_999)
        self.made_with = drawn()
        with open(notes, "a") as file:
            file.write(".")

    def step(self, action: int) -> Any:
        results = super().step(action)
        return results[0], sum(drawn()), *results[2:]


class Seeding(Drawing):
    """Seeds the generators when it is made."""

    def __init__(self) -> None:
        seed(3)
        super().__init__()


def drawn() -> tuple[float, float]:
    return float(np.random.random()), random.random()


@pytest.fixture(autouse=True)
def _programs_generators() -> Iterator[None]:
    states = np.random.get_state(legacy=False), random.getstate()
    yield
    np.random.set_state(states[0])
    random.setstate(states[1])


def seed(number: int) -> None:
    np.random.seed(number)
    random.seed(number)


def run(**options: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The draws of three envs when they are made and in two steps, and those of their second incarnation."""
    with (
        NamedTemporaryFile() as notes,
        closing(envhub.AsyncVectorEnv([partial(Drawing, notes.name)] * 3, **options)) as envs,
    ):
        made = [*envs.get_attr("made_with")]
        envs.reset()
        steps = [envs.step([0] * 3)[1].tolist() for _ in range(2)]
        assert wait_until(lambda: os.path.getsize(notes.name) >= 3 + options.get("spares", 0))
        kill_worker(envs.call("pid")[0])
        envs.step([0] * 3)
        return made, steps, [*envs.get_attr("made_with")]


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, pytest.param({"spares": 1}, marks=pytest.mark.long)], ids=["without", "spare"])
def test_draws_are_the_same_after_the_program_seeds_its_generators_alike(options: dict[str, Any]) -> None:
    seed(1)
    first = made, steps, again = run(num_workers=3, **options)
    assert len({*chain(*made)}) == 6 and len({*chain(*steps)}) == 6
    assert again[0] not in made and again[1:] == made[1:]
    following = drawn()
    seed(1)
    assert drawn() == following  # the envs have left the program's generators as they were
    seed(1)
    assert run(num_workers=3, **options) == first
    drawn()
    assert {*run(num_workers=3)[0]}.isdisjoint(made)


@pytest.mark.long
def test_draws_of_factories_do_not_depend_on_the_number_of_workers() -> None:
    seed(1)
    found = [run(num_workers=number)[0] for number in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    np.random.seed(2)
    assert [each for _, each in run()[0]] == [each for _, each in found[0]]  # by Python's generator


@pytest.mark.long
def test_envs_of_a_served_hub_draw_by_the_first_seed(tmp_path: Path) -> None:
    with serve(tmp_path, "drawing=test_repeatable_draws:Drawing", environ=ENVIRON) as hub:
        found = []
        for first in (5, 5, 6):
            with closing(envhub.make_vec("drawing", 2, hub=hub.ipc, num_workers=2)) as envs:
                envs.reset(seed=first)
                found.append([envs.step([0] * 2)[1].tolist() for _ in range(2)])
                envs.reset(seed=first)  # only the first counts
                found[-1].append(envs.step([0] * 2)[1].tolist())
    assert found[0] == found[1] and len({*chain(*found[0], *found[2])}) == 12


@pytest.mark.long
def test_a_served_hub_leaves_generators_that_an_env_has_seeded(tmp_path: Path) -> None:
    with serve(tmp_path, "seeding=test_repeatable_draws:Seeding", environ=ENVIRON) as hub:
        found = []
        for envs in (
            gymnasium.vector.SyncVectorEnv([Seeding] * 2),
            envhub.make_vec("seeding", 2, hub=hub.ipc, num_workers=1),
        ):
            with closing(envs):
                envs.reset(seed=5)
                found.append([envs.step(np.zeros(2, int))[1].tolist() for _ in range(2)])
    assert found[0] == found[1]
