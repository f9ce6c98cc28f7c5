"""Imports of a session's first worker are those of its other workers, except where each must have its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import psutil
import pytest
from envhub_server.worker.row import EnvRunner
from envhub_server.worker.shared_process import may_share_process
from hubs import ServedHub, below, serve, wait_until

import envhub

NUM_ENVS = 4
SIM = """
import os, random, subprocess, sys, threading
import gymnasium as gym, numpy as np
{imported}

IMPORTED_BY = os.getpid()
RNG, SEEDED = np.random.default_rng(), np.random.default_rng(3)
OWN, CHOSEN, PREFIXED = random.Random(), random.Random(3), [name for name, _ in os.environ.items()]

class Sim(gym.Env):
    observation_space, action_space = gym.spaces.Discrete(3), gym.spaces.Discrete(3)
    metadata = {{"render_modes": []}}
    def __init__(self):
        self.imported_by, self.pid = IMPORTED_BY, os.getpid()
        self.drawn, self.own, self.chosen = RNG.random(), OWN.random(), CHOSEN.random()
        {made}
    def reset(self, *, seed=None, options=None): return 0, {{}}
    def step(self, action): return 0, 0.0, False, False, {{}}

gym.register("Sim-{name}", entry_point="sim_{name}:Sim")
"""
# What workers must have each for themselves, or what no fork has.
DIFFERS = {
    "thread": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "generator": "OTHERS = np.random.RandomState()",
    "variable": "PORT = 5000 + int(os.environ['ENVHUB_WORKER_INDEX'])",
    "descriptor": "LOG = open(os.devnull)",
    "child": "CHILD = subprocess.Popen(['sleep', '600'])",
    "device": "sys.modules['mujoco.egl'] = sys",
}


def written(folder: Path, name: str, imported: str = "", made: str = "") -> None:
    (folder / f"sim_{name}.py").write_text(SIM.format(name=name, imported=imported, made=made))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    folder = tmp_path_factory.mktemp("sims")
    written(folder, "same")
    for name, code in DIFFERS.items():
        written(folder, name, code)
    written(folder, "unforkable", made="if os.getpid() != IMPORTED_BY: os.abort()")
    offered = [f"{name}=sim_{name}:Sim" for name in ("same", "unforkable", *DIFFERS)]
    with serve(folder, *offered, "sim_same:Sim-same", cwd=folder) as served:
        yield served


def imports(envs: gym.vector.VectorEnv) -> int:
    """How many of the workers have imported the code of their envs."""
    assert len(set(envs.get_attr("pid"))) == len(set(envs.get_attr("drawn"))) == NUM_ENVS
    assert len(set(envs.get_attr("own"))) == NUM_ENVS and len(set(envs.get_attr("chosen"))) == 1
    return len(set(envs.get_attr("imported_by")))


@pytest.mark.parametrize("env", ["same", "Sim-same"])
def test_one_worker_imports_for_all_of_its_session(hub: ServedHub, env: str) -> None:
    with closing(envhub.make_vec(env, NUM_ENVS, num_workers=NUM_ENVS, hub=hub.tcp)) as envs:
        assert imports(envs) == 1
        (first,) = set(envs.get_attr("imported_by"))
        assert first in envs.get_attr("pid")
        with closing(envhub.make_vec(env, NUM_ENVS, num_workers=NUM_ENVS, hub=hub.tcp)) as others:
            assert imports(others) == 1 and first not in others.get_attr("imported_by")
    assert wait_until(lambda: below(psutil.Process(hub.process.pid), "envhub-imports") == [])


@pytest.mark.parametrize("name", DIFFERS)
def test_each_worker_imports_what_it_must_have_for_itself(hub: ServedHub, name: str) -> None:
    with closing(envhub.make_vec(name, NUM_ENVS, num_workers=NUM_ENVS, hub=hub.tcp)) as envs:
        assert imports(envs) == NUM_ENVS


def test_envs_that_no_fork_can_make_are_made_without_and_that_is_learned(hub: ServedHub) -> None:
    ended = hub.log.count("SIGABRT")
    for known in (False, True):
        with closing(envhub.make_vec("unforkable", NUM_ENVS, num_workers=NUM_ENVS, hub=hub.tcp)) as envs:
            assert imports(envs) == NUM_ENVS
        assert (hub.log.count("SIGABRT") > ended) is not known
        ended = hub.log.count("SIGABRT")


def test_worker_that_is_replaced_has_the_imports_as_long_as_there_is_a_process_with_them(hub: ServedHub) -> None:
    with closing(envhub.make_vec("same", NUM_ENVS, num_workers=NUM_ENVS, hub=hub.tcp)) as envs:
        envs.reset()
        ((zygote, _),) = below(psutil.Process(hub.process.pid), "envhub-imports")
        os.kill(zygote, signal.SIGTERM)  # as a batch system does, and means the program
        for imported in (1, 2):
            before = envs.get_attr("pid")
            os.kill(before[1], signal.SIGKILL)
            envs.step(envs.action_space.sample())
            assert wait_until(lambda before=before: envs.get_attr("pid")[1] != before[1])  # type: ignore[misc]
            assert imports(envs) == imported
            if psutil.pid_exists(zygote):
                os.kill(zygote, signal.SIGKILL)
            assert wait_until(lambda: not psutil.pid_exists(zygote))


@pytest.mark.parametrize("by", ["id", "class", "function"])
def test_program_that_has_not_imported_its_envs_has_them_imported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    # Whatever else an import changes holds in every worker, as in the program's own forks.
    name = f"own_{by}"
    changes = "sys.path.insert(0, os.path.join(os.path.dirname(__file__), 'parts')); os.environ['SIM_HOME'] = 'here'"
    written(tmp_path, name, changes, "import sim_part; assert os.environ['SIM_HOME'] == 'here'")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "sim_part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    if by == "id":
        envs = envhub.make_vec(f"sim_{name}:Sim-{name}", NUM_ENVS, num_workers=NUM_ENVS)
    elif by == "function":
        made = [lambda: gym.make(f"sim_{name}:Sim-{name}")] * NUM_ENVS
        envs = envhub.AsyncVectorEnv(made, num_workers=NUM_ENVS)
    else:
        monkeypatch.setenv("SIM_HOME", "away")
        made = [__import__(f"sim_{name}").Sim] * NUM_ENVS
        envs = envhub.AsyncVectorEnv(made, num_workers=NUM_ENVS)
    with closing(envs):
        assert imports(envs) == 1 and os.getpid() not in envs.get_attr("imported_by")


def test_later_sessions_of_a_program_import_nothing_until_the_code_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    by: list[int] = []
    for changed in (False, False, True, False):
        if changed or not by:
            written(tmp_path, "later", made=f"self.version = {len(by)}")
        for num_envs in (NUM_ENVS, 1):  # an env for an evaluation, too
            with closing(envhub.make_vec("sim_later:Sim-later", num_envs, num_workers=num_envs)) as envs:
                by += set(envs.get_attr("imported_by"))
    assert [by.index(each) for each in by] == [0, 0, 0, 0, 4, 4, 4, 4]


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Humanoid-v5"])
def test_envs_of_mujoco_may_share_a_process(name: str) -> None:
    with closing(gym.make(name)) as env:
        assert may_share_process(env, EnvRunner)
