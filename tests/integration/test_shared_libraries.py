"""Libraries that the first workers of envs import are imported once for all others, and nothing else is shared."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import traces
from hubs import serve

import envhub

CPUS = len(os.sched_getaffinity(0))
NUM_ENVS = 2 * CPUS + 1
SIM = """
import os, sys, threading
import gymnasium as gym, numpy as np

SHARED = {library!r} in sys.modules
{before}
import {library}

class Sim(gym.Env):
    observation_space, action_space = gym.spaces.Discrete(3), gym.spaces.Discrete(3)
    shared = SHARED
    def reset(self, *, seed=None, options=None): return 0, {{}}
    def step(self, action): return 0, 0.0, False, False, {{}}
"""
PROGRAM = """
import os, envhub, fit_sim
for num_workers in {sessions}:
    envs = envhub.AsyncVectorEnv([fit_sim.Sim] * {num_envs}, num_workers=num_workers)
    envs.reset()
    for _ in range({steps}):
        envs.step([0] * {num_envs})
    print(*envs.get_attr("shared"))
    envs.close()
    {between}
"""
NONE, ALL = [False] * NUM_ENVS, [True] * NUM_ENVS
OTHERS = [row >= CPUS for row in range(NUM_ENVS)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sims").mkdir()
    return tmp_path


def written(folder: Path, library: str = "scipy.special", before: str = "") -> None:
    (folder / "sims" / "fit_sim.py").write_text(SIM.format(library=library, before=before))


def shared(folder: Path, *sessions: int | None, steps: int = 1, between: str = "", **environ: str) -> list[list[bool]]:
    """For each session of a program, of each env, whether its worker had the library before it imported it itself."""
    program = PROGRAM.format(sessions=sessions, num_envs=NUM_ENVS, steps=steps, between=between)
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder / "sims",
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environ},
    )
    assert found.returncode == 0, found.stderr
    return [[word == "True" for word in line.split()] for line in found.stdout.splitlines()]


def test_first_workers_import_a_library_and_the_others_have_it(folder: Path) -> None:
    written(folder)
    assert shared(folder, None, NUM_ENVS) == [OTHERS, ALL]


def test_number_that_is_told_makes_no_difference(folder: Path) -> None:
    written(folder)
    assert shared(folder, NUM_ENVS, None) == [OTHERS, ALL]


def test_later_program_has_it_for_all_workers(folder: Path) -> None:
    written(folder)
    cache = {"XDG_CACHE_HOME": str(folder), "ENVHUB_CACHE": ""}
    assert shared(folder, NUM_ENVS, steps=100, **cache) == [OTHERS]
    assert shared(folder, NUM_ENVS, **cache) == [ALL]


def test_library_of_the_program_itself_is_not_taken_for_an_installed_one(folder: Path) -> None:
    (folder / "sims" / "networkx.py").write_text("")
    written(folder, library="networkx")
    assert shared(folder, None, NUM_ENVS) == [NONE, NONE]


def test_library_that_is_not_listed_is_imported_by_each_worker(folder: Path) -> None:
    (folder / "sims" / "needed.py").write_text("import random\nDRAWN = random.random()\n")
    written(folder, library="needed")
    assert shared(folder, None, NUM_ENVS) == [NONE, NONE]


def test_program_that_changes_what_libraries_read_gets_a_zygote_without_them(folder: Path) -> None:
    written(folder)
    assert shared(folder, None, NUM_ENVS, between="os.environ['SCIPY_ARRAY_API'] = '0'") == [OTHERS, OTHERS]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", [OTHERS, ALL]),
        ("os.environ['SCIPY_ARRAY_API'] = '0'", [NONE, NONE]),  # the zygote would read another value
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", [NONE, NONE]),  # no fork has threads
    ],
)
def test_served_hub_shares_them_where_that_makes_no_difference(
    folder: Path, before: str, expected: list[list[bool]]
) -> None:
    written(folder, before=before)
    with serve(folder, "fit=fit_sim:Sim", cwd=folder / "sims") as hub:
        for each in expected:
            with closing(envhub.make_vec("fit", NUM_ENVS, hub=hub.tcp)) as envs:
                assert list(envs.get_attr("shared")) == each


def test_importing_a_shared_library_leaves_nothing_that_envs_must_not_share() -> None:
    found = traces.of_shared_libraries()
    assert "scipy.stats" in found and not any(found.values()), found
