"""What envs see of the program that they are made for, in the workers of its hub, and of a served one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sims
from hubs import serve

import envhub

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
SUPPORT = str(Path(sims.__file__).parent)


def run(
    folder: Path, program: str, *arguments: str, flags: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this text as a program of this folder."""
    script = folder / "program.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, *flags, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env={**os.environ, **(environ or {})},
    )


def printed(ran: subprocess.CompletedProcess[str]) -> Any:
    """The JSON of the last line of what it printed."""
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


# --- numbers of threads -----------------------------------------------------------------------------------------------

OF_THREADS = """
import json, sys
sys.path.append({support!r})
import sims, envhub
envs = envhub.make_vec(sims.Counter, 1, num_workers={workers})
print(json.dumps([envs.call("environment", name)[0] for name in {names}]))
envs.close()
"""


@pytest.mark.parametrize("workers", [1, pytest.param(0, marks=pytest.mark.long)])
def test_numbers_of_threads_that_the_program_has_set_are_kept(tmp_path: Path, workers: int) -> None:
    program = OF_THREADS.format(support=SUPPORT, workers=workers, names=THREADS)
    own = {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": ""}
    found = dict(zip(THREADS, printed(run(tmp_path, program, environ=own)), strict=True))
    assert {name: found[name] for name in own} == own
    assert found["NUMEXPR_NUM_THREADS"] == ("1" if workers else os.environ.get("NUMEXPR_NUM_THREADS"))


def test_numbers_of_threads_that_the_operator_has_set_are_kept(tmp_path: Path) -> None:
    own = {"OMP_NUM_THREADS": "3", "VECLIB_MAXIMUM_THREADS": "2"}
    binds = [f"ipc://{tmp_path}/hub.sock"]
    with serve(tmp_path, "counter=sims:counter", "--worker-env", "OMP_NUM_THREADS", binds=binds, environ=own) as hub:
        envs = envhub.make_vec("counter", 1, hub=hub.ipc)
        assert [envs.call("environment", name)[0] for name in own] == ["3", "2"]
        assert envs.call("environment", "MKL_NUM_THREADS") == ("1",)
        envs.close()


# --- arguments and flags ----------------------------------------------------------------------------------------------

# An env's module that reads the program's options when it is imported, by argparse and as absl's ``FLAGS(sys.argv)``.
SIM_WITH_OPTIONS = """
import argparse, sys, warnings
import sims

parser = argparse.ArgumentParser()
parser.add_argument("--length", type=int, default=1)
parser.add_argument("--name", required={required})
OPTIONS = parser.parse_args()
FLAGS = dict(part[2:].split("=", 1) for part in sys.argv[1:] if "=" in part)  # absl's pattern

class Sim(sims.Counter):
    def seen(self):
        names = "optimize bytes_warning isolated ignore_environment no_user_site utf8_mode dev_mode".split()
        flags = [getattr(sys.flags, name) for name in names]
        try:
            warnings.warn("old", DeprecationWarning)
            raised = False
        except DeprecationWarning:
            raised = True
        asserts = "no"
        assert (asserts := "yes")
        return {{"argv": sys.argv, "length": OPTIONS.length, "name": OPTIONS.name, "absl": FLAGS.get("name"),
                "flags": flags, "warnoptions": sys.warnoptions, "xoptions": sys._xoptions, "raised": raised,
                "asserts": asserts}}
"""
OF_OPTIONS = """
import json, sys
sys.path += {places}
import envhub, sim_with_options
envs = envhub.make_vec(sim_with_options.Sim, 2, num_workers={workers})
envs.step([1, 1]) if envs.reset() else None
print(json.dumps([sim_with_options.Sim().seen(), *envs.call("seen")]))
envs.close()
"""
FLAGS = [
    (),
    ("-O", "-W", "error::DeprecationWarning"),
    pytest.param(("-OO", "-b", "-X", "utf8"), marks=pytest.mark.long),
    pytest.param(("-X", "dev", "-W", "ignore::UserWarning", "-W", "default"), marks=pytest.mark.long),
    pytest.param(("-W", "error", "-B"), marks=pytest.mark.long),
    pytest.param(("-E", "-s"), marks=pytest.mark.long),
    pytest.param(("-I", "-W", "ignore", "-X", "faulthandler"), marks=pytest.mark.long),
]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.long)])
def test_workers_of_a_program_have_its_arguments_and_flags(
    tmp_path: Path, flags: tuple[str, ...], workers: int
) -> None:
    (tmp_path / "sim_with_options.py").write_text(SIM_WITH_OPTIONS.format(required=True))
    program = OF_OPTIONS.format(places=[SUPPORT, str(tmp_path)], workers=workers)
    own, *seen = printed(run(tmp_path, program, "--length", "7", "--name=Zoë", flags=flags))
    assert own["argv"] == [str(tmp_path / "program.py"), "--length", "7", "--name=Zoë"]
    assert (own["length"], own["name"], own["absl"]) == (7, "Zoë", "Zoë")
    assert seen == [own, own]


def test_workers_of_a_served_hub_have_its_name_only(tmp_path: Path) -> None:
    (tmp_path / "sim_with_options.py").write_text(SIM_WITH_OPTIONS.format(required=False))
    binds = ["tcp://127.0.0.1:0"]
    environ = {"PYTHONPATH": SUPPORT}
    with serve(tmp_path, "sim=sim_with_options:Sim", binds=binds, cwd=tmp_path, environ=environ) as hub:
        envs = envhub.make_vec("sim", 1, hub=hub.tcp)
        (seen,) = envs.call("seen")
        envs.close()
    assert seen["argv"] == ["envhub"] and seen["length"] == 1


# --- what cannot be sent ----------------------------------------------------------------------------------------------

UNSENDABLE = """
import sys, threading, multiprocessing
sys.path.append({support!r})
import gymnasium as gym
import sims, envhub

LOCK = threading.Lock()

class Mine(sims.Counter):
    def step(self, action):
        with LOCK:
            return super().step(action)

gym.register("Mine-v0", entry_point=Mine)
gym.register("Named-v0", entry_point="__main__:Mine")
gym.register("Given-v0", entry_point=sims.Counter, kwargs={{"length": LOCK}})
gym.register("Never-v0", entry_point=lambda: LOCK)  # which stops no other env
if __name__ == "__main__":
    box = {{"queue": multiprocessing.Queue()}}
    for made in ("Mine-v0", "Named-v0", "Given-v0", lambda: gym.make("Mine-v0"), [sims.Counter, Mine], lambda: box):
        try:
            envhub.make_vec(made).close()
        except TypeError as error:
            print(error)
    envhub.make_vec("CartPole-v1").close()
    envs = envhub.make_vec("Mine-v0", num_workers=0)
    print(envs.reset()[0].shape)
    envs.close()
"""


def test_what_cannot_be_sent_is_named_with_its_path_and_the_remedy(tmp_path: Path) -> None:
    ran = run(tmp_path, UNSENDABLE.format(support=SUPPORT))
    assert ran.returncode == 0, ran.stderr
    mine, named, given, inside, factory, queue, in_process = ran.stdout.splitlines()
    for text, name in ((mine, "Mine-v0"), (named, "Named-v0"), (inside, "Mine-v0")):
        assert text.startswith(f"the registered env '{name}' cannot be sent to a worker: ")
        assert "(Mine) > method 'step' > global 'LOCK' is a _thread.lock" in text
    assert "the spec of Given-v0 > attribute 'kwargs' > item 'length' is a _thread.lock" in given
    assert "factory 1 (Mine) > method 'step' > global 'LOCK' is a _thread.lock" in factory
    assert all("or in the env's __init__" in text for text in (mine, named, given, inside, factory))
    assert "global 'box' > item 'queue' is a multiprocessing.queues.Queue" in queue
    assert "use multiprocessing.Manager().Queue()" in queue
    assert in_process == "(1, 2)"  # where nothing is sent


def test_argument_that_cannot_be_sent_is_named_with_its_path(tmp_path: Path) -> None:
    held = {"a": [threading.Lock()]}
    with pytest.raises(TypeError, match=r"a _thread\.lock cannot be pickled"):
        envhub.make_vec("CartPole-v1", render_mode=held)
    with pytest.raises(TypeError, match=r"Held > attribute 'held' > item 'a' > item 0 is a _thread\.lock"):
        envhub.make_vec("CartPole-v1", render_mode=Held(held))


class Held:
    def __init__(self, held: object) -> None:
        self.held = held
