"""Envs in other interpreters: what today's trainer gets is what the env gives when it is run directly there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hubs import HERE, ServedHub, serve, wait_until, written_replay
from interpreters import FEW, MATRIX, WORKING, Combination, environment, interpreter
from snapshot_sims import wander

import envhub

sys.path.insert(0, str(HERE / "old_sims"))

from any_gym import KINDS, Unruly, plain

FOLDER = HERE / "old_sims"
NUM_ENVS, STEPS, SEED = 2, 12, 5
COMBINATIONS = [
    pytest.param(each, id=each.name, marks=pytest.mark.long if each in (FEW[0], FEW[-1]) else pytest.mark.chaos)
    for each in MATRIX
]
TABLES = """
[envs."{name}-CartPole"]
env = "CartPole-v1"
python = "{python}"

[envs."{name}-Pendulum"]
env = "Pendulum-v1"
python = "{python}"

[envs."{name}-kinds"]
env = "any_gym:kinds"
python = "{python}"
folder = "{folder}"

[envs."{name}-unruly"]
env = "any_gym:unruly"
python = "{python}"
folder = "{folder}"
"""


def tables(name: str, python: Path) -> str:
    return TABLES.format(name=name, python=python, folder=FOLDER)


class Hosted:
    """A combination, its virtual environment, and the hub that has its envs."""

    def __init__(self, combination: Combination, folder: Path, hub: ServedHub) -> None:
        self.combination = combination
        self.folder = folder
        self.hub = hub

    def make(self, env: str, lane: str, num_envs: int = NUM_ENVS, **options: Any) -> Any:
        return envhub.make_vec(f"{self.combination.name}-{env}", num_envs, hub=self.hub.ipc, lane=lane, **options)


@pytest.fixture(scope="module", params=COMBINATIONS)
def hosted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    combination: Combination = request.param
    folder = interpreter(request.config, combination)
    place = tmp_path_factory.mktemp(combination.name)
    (place / "hub.toml").write_text(tables(combination.name, folder))
    # As in a terminal in which ROS is set up: what is for one Python would break another.
    (place / "sitecustomize.py").write_text(f"import sys\nassert sys.executable == {sys.executable!r}\n")
    path = os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), str(place)])
    with serve(place, "--config", str(place / "hub.toml"), environ={"PYTHONPATH": path}) as hub:
        yield Hosted(combination, folder, hub)


@pytest.fixture(params=["auto", pytest.param("wire", marks=pytest.mark.chaos)])
def lane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


Run = tuple[str, dict[str, Any], int, list[Any]]  # of one env: its name and arguments, its seed, its actions


def directly(folder: Path, runs: list[Run]) -> list[Any]:
    """What the envs give in that interpreter, without EnvHub."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [str(folder / "bin/python"), str(FOLDER / "any_gym.py")]
    given = "\n".join(map(json.dumps, runs))
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environ, input=given)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def by_hub(hosted: Hosted, env: str, lane: str, name: str, kwargs: dict[str, Any]) -> Iterator[tuple[Run, list[Any]]]:
    """Of each env what it is to do, and what the trainer gets."""
    envs = hosted.make(env, lane, env_kwargs=kwargs, num_workers=2)
    try:
        observations, actions, steps = envs.observation_space, envs.action_space, []
        actions.seed(3)
        found: list[list[Any]] = [[] for _ in range(NUM_ENVS)]

        def note(batch: Any, *others: Any) -> None:
            for record, one, *rest in zip(found, gym.vector.utils.iterate(observations, batch), *others, strict=True):
                record.append([plain(envs.single_observation_space, one), *rest])

        note(envs.reset(seed=SEED)[0])
        for _ in range(STEPS):
            action = actions.sample()
            each = gym.vector.utils.iterate(actions, action)
            steps.append([plain(envs.single_action_space, one) for one in each])
            observation, rewards, *ends, infos = envs.step(action)
            there = infos.get("_action", np.zeros(NUM_ENVS, bool))
            arrived = [int(infos["action"][index]) if there[index] else None for index in range(NUM_ENVS)]
            note(observation, [float(one).hex() for one in rewards], *(each.tolist() for each in ends), arrived)
    finally:
        envs.close()
    for index, record in enumerate(found):
        yield (name, kwargs, SEED + index, [step[index] for step in steps]), record


def check(hosted: Hosted, lane: str, *chosen: tuple[str, str, dict[str, Any]]) -> None:
    runs = [pair for env, name, kwargs in chosen for pair in by_hub(hosted, env, lane, name, kwargs)]
    assert len(runs) == NUM_ENVS * len(chosen)
    for (run, found), wanted in zip(runs, directly(hosted.folder, [run for run, _ in runs]), strict=True):
        assert json.loads(json.dumps(found)) == wanted, run


def kinds_of(combination: Combination) -> list[str]:
    package, version = combination.version
    found = [*KINDS["gym 0.21"]]
    if package == "gymnasium" or version >= (0, 26):
        found += KINDS["gym 0.26"]
    if package == "gymnasium" and version >= (1, 0):
        found += KINDS["gymnasium 1.0"]
    return found


@pytest.mark.timeout(300)
def test_registered_envs_give_what_they_give_directly(hosted: Hosted, lane: str) -> None:
    check(hosted, lane, ("CartPole", "CartPole-v1", {}), ("Pendulum", "Pendulum-v1", {}))


@pytest.mark.timeout(300)
def test_every_kind_of_space_gives_what_it_gives_directly(hosted: Hosted, lane: str) -> None:
    check(hosted, lane, *(("kinds", "kinds", {"kind": kind}) for kind in kinds_of(hosted.combination)))


def test_failures_are_told_and_survived(hosted: Hosted, lane: str) -> None:
    envs = hosted.make("unruly", lane, num_workers=2, step_timeout=5.0)
    nothing, deeds = np.zeros(2, int), {name: number for number, name in enumerate(Unruly.DEEDS)}
    try:
        envs.reset(seed=1)
        with pytest.raises(ValueError, match="boom") as caught:
            envs.step(np.array([deeds["raise"], 0]))
        assert caught.value.args == ("boom", 3) and "any_gym.py" in str(caught.value.__cause__)
        for deed, cause in (("crash", "crash"), ("hang", "timeout"), ("exit", "crash")):
            envs.reset(seed=1)
            envs.step(nothing)  # the first step of an env has the time of its making
            _, _, _, truncations, infos = envs.step(np.array([0, deeds[deed]]))
            assert truncations.tolist() == [False, True], deed
            assert infos["_env_failure"].tolist() == [False, True] and cause in repr(infos["env_failure"][1]), deed
            assert wait_until(lambda: not envs.step(nothing)[4].get("_env_failure", nothing).any(), 20)
        envs.reset(seed=1)
        assert envs.step(nothing)[0][:, 0].tolist() == [1, 1]
    finally:
        envs.close()


@pytest.mark.timeout(300)
def test_failure_is_run_again_in_the_interpreter_of_its_env(hosted: Hosted, lane: str) -> None:
    options = {"num_workers": 2, "step_timeout": 5.0, "on_exception": "truncate"}
    envs = hosted.make("unruly", lane, env_kwargs={"seeded": True}, **options)
    nothing, found = np.zeros(2, int), {}
    try:
        for deed in ("raise", "crash", "exit", "hang"):
            envs.reset(seed=1)
            envs.step(nothing)
            infos = envs.step(np.array([0, Unruly.DEEDS.index(deed)]))[4]
            found[deed] = infos["env_failure"][1].replay
            assert wait_until(lambda: not envs.step(nothing)[4].get("_env_failure", nothing).any(), 20)
    finally:
        envs.close()
    ends = {"raise": "raised ValueError: ('boom', 3)", "crash": "ended by SIGSEGV"}
    for deed, name in found.items():
        ran = again(name)
        told = ends.get(deed, "hung" if deed == "hang" else "ended by status 3")
        assert (ran.returncode, ran.stdout.startswith(f"failed alike: {told} at step ")) == (0, True), ran
        assert ran.stderr.startswith(f"runs any_gym:unruly with {hosted.folder} in {FOLDER}, "), ran.stderr


def again(name: str) -> subprocess.CompletedProcess[str]:
    """``envhub replay`` of the replay of this name."""
    command = [sys.executable, "-m", "envhub", "replay", written_replay(name).stem]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_render_and_call(hosted: Hosted, lane: str) -> None:
    envs = hosted.make("unruly", lane, env_kwargs={"render_mode": "rgb_array"})
    try:
        envs.reset(seed=1)
        envs.step(np.zeros(2, int))
        frames = envs.render()
        assert len(frames) == 2 and all(np.array_equal(frame, np.full((4, 6, 3), 1)) for frame in frames)
        assert envs.call("add", 3, other=4) == (7, 7) and envs.get_attr("count") == (1, 1)
        envs.set_attr("count", [2, 0])
        assert envs.step(np.zeros(2, int))[0][:, 0].tolist() == [3, 1]
        with pytest.raises(AttributeError, match="no_such"):
            envs.get_attr("no_such")
        with envhub.connect(envs.address) as client:
            (name,) = (row["session"] for row in client.sessions() if envs.token.startswith(row["session"]))
            assert np.array_equal(client.frame(name, 0).pixels, np.full((4, 6, 3), 3))
            assert all("in run\n" in row["stacks"] for row in client.stack(name))
    finally:
        envs.close()


def test_chunk_is_its_actions_one_by_one(hosted: Hosted, lane: str) -> None:
    chunks, single = hosted.make("CartPole", lane, wrappers=[("ActionChunk", {"k": 4})]), hosted.make("CartPole", lane)
    with closing(chunks), closing(single):
        for envs in (chunks, single):
            envs.reset(seed=1)
        actions = np.array([[0, 1, 1, 0]] * NUM_ENVS)
        observations, rewards, *_, infos = chunks.step(actions)
        found = [single.step(actions[:, number]) for number in range(4)]
        assert np.array_equal(observations, found[-1][0]) and rewards.tolist() == [4.0] * NUM_ENVS
        assert infos["chunk_steps"].tolist() == [4] * NUM_ENVS and infos["chunk_rewards"].shape == (NUM_ENVS, 4)


@pytest.mark.long
def test_each_env_has_its_variables_libraries_and_folder_and_nothing_of_the_hubs_python(tmp_path: Path) -> None:
    folder = environment(tmp_path / "venv", *WORKING)
    (tmp_path / "hub.toml").write_text(
        f"""
        [envs.plain]
        env = "any_gym:unruly"
        python = "venv"
        folder = "{FOLDER}"

        [envs.own]
        env = "any_gym:unruly"
        python = "venv/bin/python"
        folder = "."
        ld_library_path = ["lib", "/opt/lib"]
        variables = {{ PYTHONPATH = "{FOLDER}", OMP_NUM_THREADS = "3", HELLO = "world" }}
        """
    )
    environ = {"PYTHONSTARTUP": "x", "LD_LIBRARY_PATH": "/the/hubs", "CONDA_PREFIX": "/the/hubs"}
    places = {}
    with serve(tmp_path, "--config", str(tmp_path / "hub.toml"), environ=environ) as hub:
        for name in ("plain", "own"):
            envs = envhub.make_vec(name, 1, hub=hub.ipc)
            ((prefix, places[name], variables),) = envs.call("place")
            envs.close()
            assert prefix == str(folder) == variables["VIRTUAL_ENV"] and "CONDA_PREFIX" not in variables
            assert variables["PATH"].startswith(f"{folder}/bin:")
            of_python = {key: value for key, value in variables.items() if key.startswith("PYTHON")}
            threads, libraries = variables["OMP_NUM_THREADS"], variables["LD_LIBRARY_PATH"]
            if name == "plain":
                assert not of_python and (threads, libraries) == ("1", "/the/hubs") and "HELLO" not in variables
            else:
                assert of_python == {"PYTHONPATH": str(FOLDER)} and variables["HELLO"] == "world"
                assert (threads, libraries) == ("3", f"{tmp_path}/lib:/opt/lib")
    assert places == {"plain": str(FOLDER), "own": str(tmp_path)}


@pytest.mark.long
def test_python_of_the_command_line_is_that_of_all_envs_without_one(tmp_path: Path) -> None:
    folder = environment(tmp_path / "venv", *WORKING)
    with serve(tmp_path, "sim=any_gym:unruly", "--python", str(folder), cwd=FOLDER) as hub:
        envs = envhub.make_vec("sim", 2, hub=hub.ipc)
        assert [place[0] for place in envs.call("place")] == [str(folder)] * 2
        envs.close()


@pytest.mark.long
def test_factories_of_another_python_are_refused_in_a_line(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = interpreter(request.config, FEW[2] if sys.version_info[:2] != (3, 10) else FEW[3])
    with serve(tmp_path, "CartPole-v1", "--python", str(folder), "--allow-factories") as hub:
        with pytest.raises(
            TypeError, match=r"from a trainer with Python 3\.\d+ cannot run in Python 3\.1[03] \(.*"
        ) as told:
            envhub.make_vec(lambda: gym.make("CartPole-v1"), 2, hub=hub.ipc)
        assert f"({folder}/bin/python on " in str(told.value) and "NAME=module:factory" in str(told.value)
        envhub.make_vec("CartPole-v1", 2, hub=hub.ipc).close()


# --- what an import costs ---------------------------------------------------------------------------------------------

SERVER_LIBRARIES = ["gymnasium", "structlog", "cyclopts", "rich", "psutil"]


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after the statement."""
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_import_of_envhub_loads_nothing_until_it_is_used() -> None:
    loaded = loaded_by("import envhub")
    assert "envhub" in loaded
    assert not loaded & {*SERVER_LIBRARIES, "zmq", "numpy", "msgpack", "cloudpickle", "envhub_server", "envhub_client"}


def test_private_hub_imports_little_before_it_starts_its_zygote_and_nothing_that_it_seldom_needs() -> None:
    assert not loaded_by("import envhub_server.private_hub") & {*SERVER_LIBRARIES, "numpy", "zmq", "msgpack"}
    loaded = loaded_by("import envhub_server.private_hub, envhub_server.serve")
    assert "zmq" in loaded
    assert not loaded & {"structlog", "cyclopts", "rich", "psutil", "asyncio"}


def test_connection_needs_neither_gymnasium_nor_a_server_library() -> None:
    loaded = loaded_by("import envhub.protocol.prelude, envhub_client.connection.connection")
    assert "zmq" in loaded
    assert not loaded & {*SERVER_LIBRARIES, "envhub_server", "asyncio"}


def test_vector_envs_by_address_need_no_library_of_servers() -> None:
    loaded = loaded_by("import envhub; envhub.make_vec")
    assert "gymnasium" in loaded
    assert not loaded & ({*SERVER_LIBRARIES, "msgspec", "ray", "envhub_server"} - {"gymnasium"})


# --- flags and limits of a process -----------------------------------------------------------------------------------

SHOWN = "import json, sys; print(json.dumps([list(sys.flags), sys.warnoptions, sys._xoptions]))"
OF_THIS = "from envhub_client.private_hub.program_environment import own_flags"


@pytest.mark.parametrize(
    "flags",
    [
        ["-OO", "-B", "-bb", "-s", "-E"],
        pytest.param([], marks=pytest.mark.long),
        pytest.param(["-Wonce", "-Xint_max_str_digits=5000"], marks=pytest.mark.long),
        ["-I", "-X", "dev", "-X", "utf8=0", "-W", "error::DeprecationWarning", "-W", "ignore"],
    ],
    ids=" ".join,
)
def test_interpreter_with_the_options_of_another_has_its_flags(flags: list[str]) -> None:
    printed = f"import sys; sys.path += {sys.path}; {OF_THIS}; import json; print(json.dumps(own_flags())); {SHOWN}"
    first = subprocess.run([sys.executable, *flags, "-c", printed], capture_output=True, text=True, check=True)
    found, shown = map(json.loads, first.stdout.splitlines())
    again = subprocess.run([sys.executable, *found, "-c", SHOWN], capture_output=True, text=True, check=True)
    assert json.loads(again.stdout) == shown


def test_older_libzmq_is_refused() -> None:
    program = "import zmq; zmq.zmq_version_info = lambda: (4, 3, 4); import envhub.transport.sockets"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1 and "ImportError: EnvHub needs libzmq 4.3.5 or later" in found.stderr


def test_env_goes_on_from_snapshots(hosted: Hosted, lane: str) -> None:
    with closing(hosted.make("CartPole", lane, snapshots=True)) as envs:
        assert wander(envs, 40, 1, [0, 1])["compared"] > 5
