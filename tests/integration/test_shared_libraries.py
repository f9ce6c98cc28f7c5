"""Libraries that the first workers of envs import are imported once for all others, and nothing else is shared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import pytest
import traces
from envhub_server.config import usable_cpus
from envhub_server.ipc import packages
from envhub_server.worker.row import EnvRunner
from envhub_server.worker.shared_process import may_share_process
from hubs import HERE, ServedHub, serve

import envhub

CPUS = usable_cpus()
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
import envhub, fit_sim
for num_workers in {sessions}:
    envs = envhub.AsyncVectorEnv([fit_sim.Sim] * {num_envs}, num_workers=num_workers)
    envs.reset()
    print(*envs.get_attr("shared"))
    envs.close()
"""
NONE, ALL = [False] * NUM_ENVS, [True] * NUM_ENVS
OTHERS = [row >= CPUS for row in range(NUM_ENVS)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sims").mkdir()
    return tmp_path


def written(folder: Path, library: str = "scipy.special", before: str = "") -> None:
    (folder / "sims" / "fit_sim.py").write_text(SIM.format(library=library, before=before))


def shared(folder: Path, *sessions: int | None, **environ: str) -> list[list[bool]]:
    """For each session of a program, of each env, whether its worker had the library before it imported it itself."""
    program = PROGRAM.format(sessions=sessions, num_envs=NUM_ENVS)
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


@pytest.mark.long
def test_first_workers_import_a_library_and_the_others_have_it(folder: Path) -> None:
    written(folder)
    assert shared(folder, None, NUM_ENVS) == [OTHERS, ALL]


def test_mujoco_that_has_opened_a_device_is_not_shared() -> None:
    assert packages.shared(["mujoco", "scipy"]) == ["mujoco", "scipy"]
    assert packages.shared(["mujoco", "mujoco.egl", "scipy"]) == ["scipy"]


@pytest.mark.long
def test_library_of_the_program_itself_is_not_taken_for_an_installed_one(folder: Path) -> None:
    (folder / "sims" / "scipy").mkdir()
    (folder / "sims" / "scipy" / "__init__.py").write_text("")
    (folder / "sims" / "scipy" / "special.py").write_text("")
    written(folder)
    assert shared(folder, None, NUM_ENVS) == [NONE, NONE]


@pytest.mark.long
def test_library_that_is_not_listed_is_imported_by_each_worker(folder: Path) -> None:
    (folder / "sims" / "needed.py").write_text("import random\nDRAWN = random.random()\n")
    written(folder, library="needed")
    assert shared(folder, None, NUM_ENVS) == [NONE, NONE]


@pytest.mark.long
def test_env_that_must_load_something_before_a_library_is_made_without(folder: Path) -> None:
    written(folder, before="if SHARED: raise ImportError('it has to be imported after the simulator')")
    assert shared(folder, None, NUM_ENVS) == [NONE, NONE]


def seen(hub: ServedHub, env: str, num_workers: int | None = None) -> list[bool]:
    """As ``shared``, of a session of a served hub."""
    with closing(envhub.make_vec(env, NUM_ENVS, hub=hub.tcp, num_workers=num_workers)) as envs:
        envs.reset()
        return list(envs.get_attr("shared"))


@pytest.mark.long
def test_sessions_of_another_env_have_no_library_of_it(folder: Path) -> None:
    written(folder)
    text = SIM.format(library="scipy.special", before="").replace("import scipy.special\n", "")
    (folder / "sims" / "plain_sim.py").write_text(text)
    with serve(folder, "fit=fit_sim:Sim", "plain=plain_sim:Sim", cwd=folder / "sims") as hub:
        assert [seen(hub, env) for env in ("fit", "plain", "fit", "plain")] == [OTHERS, NONE, ALL, NONE]


@pytest.mark.long
def test_first_session_of_a_registered_id_shares_what_its_entry_point_imports(folder: Path) -> None:
    written(folder)
    registers = 'import gymnasium\n\ngymnasium.register("Fit-v0", entry_point="fit_sim:Sim")\n'
    (folder / "sims" / "registers.py").write_text(registers)
    with serve(folder, "registers:Fit-v0", cwd=folder / "sims") as hub:
        assert seen(hub, "Fit-v0", num_workers=NUM_ENVS) == OTHERS


@pytest.mark.long
@pytest.mark.parametrize(
    "before",
    [
        "os.environ['ANY_VARIABLE'] = '1'",  # a library may read it, and the zygote would not have it
        # What has threads is not forked.
        pytest.param("threading.Thread(target=threading.Event().wait, daemon=True).start()", marks=pytest.mark.chaos),
    ],
)
def test_nothing_is_shared_where_that_could_make_a_difference(folder: Path, before: str) -> None:
    written(folder, before=before)
    with serve(folder, "fit=fit_sim:Sim", cwd=folder / "sims") as hub:
        assert [seen(hub, "fit"), seen(hub, "fit")] == [NONE, NONE]


@pytest.mark.long
@pytest.mark.parametrize(
    "trouble",
    ["time.sleep(600)", *(pytest.param(text, marks=pytest.mark.chaos) for text in ("os._exit(3)", "os.abort()"))],
)
def test_library_that_no_zygote_can_import_is_imported_by_each_worker(folder: Path, trouble: str) -> None:
    (folder / "lib").mkdir()
    is_worker = "open('/proc/self/comm').read() == 'envhub-worker\\n'"
    (folder / "lib" / "networkx.py").write_text(f"import os, time\nif not {is_worker}: {trouble}\n")
    written(folder, library="networkx")
    with serve(folder, "fit=fit_sim:Sim", cwd=folder / "sims", environ={"PYTHONPATH": str(folder / "lib")}) as hub:
        assert [seen(hub, "fit"), seen(hub, "fit")] == [NONE, NONE]
        assert hub.log.count("libraries_not_shared") == 1


@pytest.mark.long
def test_importing_a_shared_library_leaves_nothing_that_envs_must_not_share() -> None:
    found = traces.of_shared_libraries()
    assert "scipy.stats" in found and not any(found.values()), found


@pytest.mark.long
def test_four_zygotes_with_libraries_are_kept_and_the_one_used_longest_ago_ends_for_another() -> None:
    sets = ["networkx", "scipy.special", "scipy.linalg", "networkx", "scipy.special,scipy.linalg", "scipy.sparse"]
    command = [sys.executable, str(HERE / "supervised.py"), "zygotes", *sets]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert all(found["born"])
    assert found["left"] == ["scipy.linalg", "networkx", "scipy.special,scipy.linalg", "scipy.sparse"]


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Humanoid-v5"])
def test_envs_of_mujoco_may_share_a_process(name: str) -> None:
    with closing(gym.make(name)) as env:
        assert may_share_process(env, EnvRunner)
