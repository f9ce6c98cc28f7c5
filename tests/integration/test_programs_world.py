"""What envs see of the program that they are made for, in the workers of its hub, and of a served one."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sims
from hubs import serve

import envhub

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


@pytest.mark.long
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
    ("-O", "-W", "error::DeprecationWarning"),
    ("-X", "dev", "-W", "ignore::UserWarning", "-W", "default"),
    ("-I", "-E", "-s", "-W", "ignore", "-X", "faulthandler"),
]


@pytest.mark.long
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_workers_of_a_program_have_its_arguments_and_flags(tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "sim_with_options.py").write_text(SIM_WITH_OPTIONS.format(required=True))
    program = OF_OPTIONS.format(places=[SUPPORT, str(tmp_path)], workers=2)
    own, *seen = printed(run(tmp_path, program, "--length", "7", "--name=Zoë", flags=flags))
    assert own["argv"] == [str(tmp_path / "program.py"), "--length", "7", "--name=Zoë"]
    assert (own["length"], own["name"], own["absl"]) == (7, "Zoë", "Zoë")
    assert seen == [own, own]


@pytest.mark.long
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
"""


@pytest.mark.long
def test_what_cannot_be_sent_is_named_with_its_path_and_the_remedy(tmp_path: Path) -> None:
    ran = run(tmp_path, UNSENDABLE.format(support=SUPPORT))
    assert ran.returncode == 0, ran.stderr
    mine, named, given, inside, factory, queue = ran.stdout.splitlines()
    for text, name in ((mine, "Mine-v0"), (named, "Named-v0"), (inside, "Mine-v0")):
        assert text.startswith(f"the registered env '{name}' cannot be sent to a worker: ")
        assert "(Mine) > class attribute 'step' > global 'LOCK' is a _thread.lock" in text
    assert "the spec of Given-v0 > attribute 'kwargs' > item 'length' is a _thread.lock" in given
    assert "factory 1 (Mine) > class attribute 'step' > global 'LOCK' is a _thread.lock" in factory
    assert all("or in the env's __init__" in text for text in (mine, named, given, inside, factory))
    assert "global 'box' > item 'queue' is a multiprocessing.queues.Queue" in queue
    assert "use multiprocessing.Manager().Queue()" in queue


# --- levels of messages -----------------------------------------------------------------------------------------------

LOUD = """
import logging, os, warnings
import gymnasium as gym
import sims

class Loud(sims.Counter):
    def seen(self):
        class Worse(OwnWarning):
            pass
        told = []
        for category in (OwnWarning, Worse, UserWarning, DeprecationWarning):
            try:
                warnings.warn("a.b", category)
                told.append(category.__name__ + " passes")
            except Warning as warning:
                told.append(category.__name__ + " is raised")
        names = "", "mine", "mine.part", "other"
        return {"levels": [logging.getLogger(name or None).getEffectiveLevel() for name in names],
                "off": logging.getLogger("mine").isEnabledFor(logging.DEBUG),
                "gymnasium": gym.logger.min_level, "told": told}
"""
OF_LEVELS = (
    """
import json, logging, sys, warnings
sys.path.append({support!r})
import gymnasium as gym
import envhub

class OwnWarning(Warning):
    pass
"""
    + LOUD
    + """
logging.getLogger().setLevel("ERROR")
logging.getLogger("mine").setLevel("DEBUG")
logging.getLogger("mine.part").setLevel("INFO")
logging.disable(logging.DEBUG)
gym.logger.min_level = gym.logger.ERROR
warnings.simplefilter("ignore")
warnings.filterwarnings("error", category=OwnWarning)
warnings.filterwarnings("error", "A.b", DeprecationWarning, r"__main__|somewhere")
envs = envhub.make_vec(Loud, 2, num_workers=2)
print(json.dumps([Loud().seen(), *envs.call("seen")]))
envs.close()
"""
)


@pytest.mark.long
def test_levels_of_loggers_and_filters_of_warnings_are_the_programs(tmp_path: Path) -> None:
    program = OF_LEVELS.replace("{support!r}", repr(SUPPORT))
    own, *seen = printed(run(tmp_path, program))
    assert own["levels"] == [40, 10, 20, 40] and own["gymnasium"] == 40 and not own["off"]
    assert [text.split()[-1] for text in own["told"]] == ["raised", "raised", "passes", "raised"]
    assert seen == [own, own]


# --- worker_setup -----------------------------------------------------------------------------------------------------


class Needy(sims.Counter):
    """Cannot be made where its worker was not set up."""

    def __init__(self) -> None:
        super().__init__()
        self.set_up = int(os.environ["SET_UP"]), np.geterr()["over"], os.getpid()

    def act(self, action: int) -> None:
        if action == 9:
            os._exit(1)


def set_worker_up() -> None:
    """As programs do: what no variable says, and once in a process."""
    np.seterr(over="raise")
    os.environ["SET_UP"] = str(int(os.environ.get("SET_UP", "0")) + 1)


def fails() -> None:
    raise ZeroDivisionError("no setup today")


@pytest.fixture
def own_state() -> Iterator[None]:
    """For envs in this process: what a setup changes is put back."""
    before = np.geterr()
    yield
    np.seterr(**before)
    os.environ.pop("SET_UP", None)


def test_worker_setup_runs_once_in_each_worker_before_its_envs(own_state: None) -> None:
    for setup in (set_worker_up, "test_programs_world:set_worker_up"):
        envs = envhub.make_vec(Needy, 4, num_workers=2, worker_setup=setup)
        set_ups = envs.get_attr("set_up")
        assert [(times, over) for times, over, _ in set_ups] == [(1, "raise")] * 4
        assert len({pid for _, _, pid in set_ups}) == 2
        envs.close()


@pytest.mark.long
def test_worker_setup_runs_in_replacements_spares_and_recycled_workers() -> None:
    options = {"spares": 1, "recycle": {"episodes": 1}, "restart_wait": 60.0}
    envs = envhub.make_vec(functools.partial(Needy), 1, num_workers=1, worker_setup=set_worker_up, **options)
    envs.reset()
    pids = set()
    for action in [9, 1, 9, 1]:  # the first takes the spare, the next waits for what is made then
        envs.step([action])
        envs.reset()
        ((times, over, pid),) = envs.get_attr("set_up")
        assert (times, over) == (1, "raise")
        pids.add(pid)
    assert len(pids) >= 2
    envs.close()


def test_exception_of_worker_setup_is_raised_as_that_of_the_making() -> None:
    with pytest.raises(ZeroDivisionError, match="no setup today") as raised:
        envhub.make_vec(sims.Counter, 1, worker_setup=fails)
    assert isinstance(raised.value.__cause__, envhub.EnvRaised) and "in fails" in str(raised.value.__cause__)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        envhub.make_vec("CartPole-v1", worker_setup="no_such_module:set_up")


def test_worker_setup_is_checked_before_a_worker_starts() -> None:
    with pytest.raises(ValueError, match="is no name of a function"):
        envhub.make_vec("CartPole-v1", worker_setup="json")
    with pytest.raises(TypeError, match="worker_setup must be a function"):
        envhub.make_vec("CartPole-v1", worker_setup=3)
    with pytest.raises(TypeError, match=r"worker_setup \(.*<lambda>\) > variable 'lock' is a _thread\.lock"):
        envhub.make_vec("CartPole-v1", worker_setup=(lambda lock: lambda: lock)(threading.Lock()))


CONFIG = """
[envs.plain]
env = "sims:Counter"

[envs.needy]
env = "test_programs_world:Needy"
worker_setup = "test_programs_world:set_worker_up"
"""


@pytest.mark.long
def test_served_hub_sets_its_workers_up_as_its_operator_says(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text(CONFIG)
    environ = {"PYTHONPATH": os.pathsep.join([SUPPORT, str(Path(__file__).parent)])}
    binds = ["tcp://127.0.0.1:0", f"ipc://{tmp_path}/hub.sock"]
    with serve(tmp_path, "--config", str(tmp_path / "hub.toml"), binds=binds, environ=environ) as hub:
        for address in (hub.tcp, hub.ipc):
            for asked in ({}, {"worker_setup": "test_programs_world:set_worker_up"}):
                envs = envhub.make_vec("needy", 1, hub=address, **asked)
                assert envs.get_attr("set_up")[0][:2] == (1, "raise")  # once, whoever says it
                envs.close()
            for name, foreign in (("plain", set_worker_up), ("plain", "os:getcwd"), ("needy", "os:getcwd")):
                with pytest.raises(envhub.RequestRefused, match="is its operator's choice, by worker_setup"):
                    envhub.make_vec(name, 1, hub=address, worker_setup=foreign)


# --- modules that have no name in a worker ----------------------------------------------------------------------------

LOADED = """
import importlib.util, json, sys
sys.path.append({support!r})
import gymnasium as gym
import envhub

def load(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

mine = load("mine", "hidden/other_name.py")
other = load("json_tools", "hidden/json_tools.py")  # beside a module of this name that can be imported
gym.register("Mine-v0", entry_point="mine:Mine")
gym.register("Mine-v1", entry_point=mine.Mine, kwargs={{"length": 3}})
found = []
by_ids = "Mine-v0", "Mine-v1", lambda: gym.make("Mine-v0")
for env in (mine.Mine, lambda: mine.make(), *by_ids, lambda: mine.Mine(other.LENGTH)):
    envs = envhub.make_vec(env, 2, num_workers=2)
    found.append(envs.call("told"))
    envs.close()

def set_up():
    import os
    os.environ["SET_UP"] = mine.WORD

envs = envhub.make_vec(lambda: mine.Mine(), 1, worker_setup="__main__:set_up")
found.append(envs.call("environment", "SET_UP"))
envs.close()
import cloudpickle
print(json.dumps([found, sorted(cloudpickle.list_registry_pickle_by_value())]))
"""


def hidden(folder: Path) -> None:
    (folder / "hidden").mkdir()
    (folder / "hidden/other_name.py").write_text(
        "import sims\nWORD = 'mine'\nclass Base(sims.Counter):\n"
        "    def told(self):\n        return [WORD, self.length]\n"
        "class Mine(Base):\n    pass\ndef make():\n    return Mine(5)\n"
    )
    (folder / "hidden/json_tools.py").write_text("LENGTH = 7\n")
    (folder / "json_tools.py").write_text("LENGTH = 8\n")


@pytest.mark.long
def test_modules_that_were_loaded_from_files_travel_by_value(tmp_path: Path) -> None:
    hidden(tmp_path)
    found, registered = printed(run(tmp_path, LOADED.format(support=SUPPORT)))
    million = 10**6
    *told, set_up = found
    assert told == [[["mine", length]] * 2 for length in (million, 5, million, 3, million, 7)]
    assert set_up == ["mine"]
    assert registered == []


@pytest.mark.long
def test_factory_whose_module_a_hub_does_not_find_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "of_the_client.py").write_text("import sims\ndef make():\n    return sims.Counter()\n")
    program = """
import sys
import envhub, of_the_client
sys.path.append({support!r})
try:
    envhub.make_vec(of_the_client.make, hub={hub!r})
except ModuleNotFoundError as error:
    print(error)
import cloudpickle
cloudpickle.register_pickle_by_value(of_the_client)
envs = envhub.make_vec(of_the_client.make, hub={hub!r})
print(envs.reset()[0].shape)
"""
    environ = {"PYTHONPATH": SUPPORT}
    with serve(tmp_path, "counter=sims:counter", "--allow-factories", binds=["tcp://127.0.0.1:0"]) as hub:
        ran = run(tmp_path, program.format(support=SUPPORT, hub=hub.tcp), environ=environ)
    assert ran.returncode == 0, ran.stderr
    error, shape = ran.stdout.splitlines()
    assert error.startswith("No module named 'of_the_client': a worker imports the module of a factory by its name")
    assert "cloudpickle.register_pickle_by_value(module)" in error and shape == "(1, 2)"


# --- envs that make vector envs ---------------------------------------------------------------------------------------


class Nest(sims.Counter):
    """Has envs of its own."""

    def __init__(self, made_by: Any) -> None:
        super().__init__()
        self.envs = made_by([lambda: gym.make("CartPole-v1")] * 2)

    def inner(self) -> Any:
        self.envs.reset(seed=3)
        return self.envs.step(np.array([0, 1]))[0].tolist()

    def close(self) -> None:
        self.envs.close()


def test_env_that_makes_a_vector_env_of_a_hub_is_told_of_gymnasiums() -> None:
    with pytest.raises(envhub.EnvRaised, match=r"no hub of its own: an env makes its vector env by gymnasium\.vector"):
        envhub.make_vec(functools.partial(Nest, envhub.AsyncVectorEnv), 2)


def test_env_of_gymnasiums_vector_env_has_it_in_its_worker() -> None:
    with contextlib.closing(envhub.make_vec(functools.partial(Nest, gym.vector.SyncVectorEnv), 2)) as envs:
        assert np.shape(envs.call("inner")) == (2, 2, 4)
