"""What a user reads at the moment of a mistake: the terminal's own text, of programs and commands that run apart."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from envhub_client import client as client_module
from envhub_client.session.session import Session
from hubs import HERE, ServedHub, serve

import envhub
from envhub.protocol import client as protocol_client

IN_ALL_LINES = 25


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "COLUMNS": "200", **environ},
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=100,
    )


def program(folder: Path, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a user's program, from a file, as its traceback shows the lines."""
    path = folder / "program.py"
    path.write_text(text)
    return run(str(path), **environ)


def refusal(address: str, name: str) -> str:
    ran = run("-c", f"import envhub; envhub.make_vec({name!r}, 2, hub={address!r})")
    assert ran.returncode == 1
    return ran.stderr.splitlines()[-1]


@pytest.mark.long
def test_id_that_a_hub_does_not_offer_is_answered_by_the_nearest(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", "Pendulum-v1", "ALE/P*", "counter=sims:counter") as hub:
        with envhub.connect(hub.tcp) as client:
            assert "ALE/Pong-v5" in client.envs()  # from now on the hub knows what its pattern matches
        assert "does not offer 'cartpole-v1'; did you mean 'CartPole-v1'?" in refusal(hub.tcp, "cartpole-v1")
        assert "does not offer 'Pong-v5'; did you mean 'ALE/Pong-v5'" in refusal(hub.tcp, "Pong-v5")
        assert "did you mean 'counter'?" in refusal(hub.tcp, "Counter")
        far = refusal(hub.tcp, "Humanoid-v5")
        assert "does not offer 'Humanoid-v5'; its operator decides" in far and "did you mean" not in far
        # What a pattern matches is looked up by Gymnasium, which names the nearest itself.
        assert "Environment `Pongo` doesn't exist in namespace ALE. Did you mean: `Pong`" in refusal(
            hub.tcp, "ALE/Pongo-v5"
        )


# --- envs that take long to make --------------------------------------------------------------------------------------

SLOW = """
import logging, sys, time
import envhub, sims

class Slow(sims.Counter):
    def __init__(self):
        time.sleep(1.5)
        super().__init__()

{}
envhub.make_vec("CartPole-v1", 1).close()  # the making of the others waits for no start of a hub
envhub.make_vec(Slow, 3, num_workers=1).close()
print("made")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("setup", "told"),
    [
        ("", r"(envhub: [0-3] of [13] envs made( \(.*\))?\n)*envhub: [0-3] of 3 envs made( \(.*\))?\n"),
        ("logging.basicConfig(level=logging.INFO)", r"(?s)(?!.*envs made).*[0-3]/3 envs ready.*"),
        ("logging.getLogger('envhub').setLevel(logging.WARNING)", ""),
    ],
)
def test_slow_making_is_counted_on_stderr_or_left_to_logging_where_that_is_set_up(
    tmp_path: Path, setup: str, told: str
) -> None:
    ran = program(tmp_path, SLOW.format(setup), PYTHONPATH=with_here())
    assert ran.stdout == "made\n" and re.fullmatch(told, ran.stderr), ran.stderr


def with_here() -> str:
    return os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))


# --- an env's error ---------------------------------------------------------------------------------------------------

RAISING = """
import logging

import gymnasium as gym
import numpy as np

import envhub

logging.getLogger("envhub").setLevel("WARNING")  # so that EnvHub does not count a slow making on stderr

class Arm(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return self.simulate({"left": -1}, action)

    def simulate(self, forces, action):
        return np.zeros(2, np.float32), forces[action], False, False, {}


gym.register("Arm-v0", Arm, max_episode_steps=100)


def main():
    envs = envhub.make_vec("Arm-v0", 2)
    envs.reset(seed=1)
    envs.BEGIN


main()
"""
LIBRARY = ("envhub_client", "envhub_server", os.path.join("gymnasium", "wrappers"))


@pytest.mark.long
@pytest.mark.parametrize(
    "begin",
    [
        "step(np.array([0, 1]))",
        *(pytest.param(begin, marks=pytest.mark.chaos) for begin in ("call('simulate', {}, 'right')", "step([0, 1])")),
    ],
)
def test_error_of_an_env_shows_the_envs_frames_first_and_not_the_librarys(tmp_path: Path, begin: str) -> None:
    ran = program(tmp_path, RAISING.replace("BEGIN", begin))
    lines = ran.stderr.splitlines()
    assert lines[0].startswith("envhub.errors.EnvRaised: env 0 in worker 0") and "KeyError" in lines[0]
    remote, _, own = ran.stderr.partition("The above exception was the direct cause of the following exception")
    assert "forces[action]" in remote and "frames of EnvHub and Gymnasium; ENVHUB_FULL_TRACEBACKS=1" in remote
    assert not any(name in remote for name in LIBRARY)
    assert f"envs.{begin}" in own and lines[-1].startswith("KeyError")
    if sys.version_info >= (3, 11):
        assert not any(name in own for name in LIBRARY)
        assert len(lines) <= IN_ALL_LINES, ran.stderr


class Broken(gym.Env[Any, Any]):
    """Everything raises ``KeyError`` that ``broken`` names."""

    observation_space = action_space = gym.spaces.Discrete(3)
    render_mode, metadata = "rgb_array", {"render_modes": ["rgb_array"]}

    def __init__(self, broken: bool = False) -> None:
        if broken:
            raise KeyError("arm")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return {}["arm"] if options else (0, {})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return {}["arm"] if action else (0, 0.0, False, False, {})

    def render(self) -> Any:
        raise KeyError("arm")

    @property
    def arm(self) -> Any:
        raise KeyError("arm")

    @arm.setter
    def arm(self, value: Any) -> None:
        raise KeyError("arm")


OF_ENVS: dict[str, Callable[[Any], Any]] = {
    "step": lambda envs: envs.step([1, 1]),
    "reset": lambda envs: envs.reset(options={"arm": 1}),
    "call": lambda envs: envs.call("arm"),
    "call_some": lambda envs: envs.call_some([1], "arm"),
    "get_attr": lambda envs: envs.get_attr("arm"),
    "set_attr": lambda envs: envs.set_attr("arm", 3),
    "has_attr": lambda envs: envs.has_attr("arm"),
    "attr_is_callable": lambda envs: envs.attr_is_callable("arm", [0]),
    "render": lambda envs: envs.render(),
    "recv": lambda envs: (envs.send([1, 0]), envs.recv()),
}


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 11), reason="a bare raise goes on with all frames before 3.11")
@pytest.mark.parametrize(
    "kind", ["make", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("make_vec", "AsyncVectorEnv"))]
)
def test_traceback_of_an_envs_error_ends_at_the_call_in_the_program(kind: str) -> None:
    make: Callable[[Any], Any] = {
        "make_vec": lambda factory: envhub.make_vec([factory] * 2),
        "AsyncVectorEnv": lambda factory: envhub.AsyncVectorEnv([factory] * 2),
        "make": envhub.make,
    }[kind]
    asked = {"step": lambda env: env.step(1), "reset": OF_ENVS["reset"], "render": OF_ENVS["render"]}
    with contextlib.closing(make(Broken)) as envs:
        for name, ask in (asked if kind == "make" else OF_ENVS).items():
            envs.reset()
            with pytest.raises(KeyError) as raised:
                ask(envs)
            assert raised.traceback[-1].path == Path(__file__), name
    with pytest.raises(KeyError) as raised:
        make(functools.partial(Broken, broken=True))
    assert raised.traceback[-1].path == Path(__file__)


def shown_files(error: BaseException) -> set[str]:
    """The files that the traceback of an error and those of its causes name."""
    return set(re.findall(r'^ *File "(.*?)"', "".join(traceback.format_exception(error)), re.MULTILINE))


OF_HUBS: dict[str, Callable[[envhub.Client, Any, str], Any]] = {
    "step": lambda client, envs, address: envs.step([0, 0]),
    "reset": lambda client, envs, address: envs.reset(),
    "get_attr": lambda client, envs, address: envs.get_attr("state"),
    "envs": lambda client, envs, address: client.envs(),
    "sessions": lambda client, envs, address: client.sessions(),
    "stats": lambda client, envs, address: client.stats(),
    "health": lambda client, envs, address: client.health(),
    "make_vec of a client": lambda client, envs, address: client.make_vec("CartPole-v1"),
    "attach": lambda client, envs, address: client.attach("0" * 32, observe=True),
    "make_vec": lambda client, envs, address: envhub.make_vec("CartPole-v1", hub=address),
    "connect": lambda client, envs, address: envhub.connect(address, timeout=0.2),
    "no address": lambda client, envs, address: envhub.make_vec("CartPole-v1", hub="tcp://127.0.0.1"),
    "no name": lambda client, envs, address: envhub.connect("nowhere"),
    "no key": lambda client, envs, address: envhub.connect(f"envhub://***@{address[6:]}"),
}


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 11), reason="a bare raise goes on with all frames before 3.11")
def test_traceback_of_a_hubs_error_ends_at_the_call_in_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with serve(tmp_path, "CartPole-v1", binds=["tcp://127.0.0.1:0"]) as hub:
        client = envhub.connect(hub.tcp)
        envs = client.make_vec("CartPole-v1", 2)
        envs.reset()
    client.timeout = 0.5  # from here on there is no hub that could answer in time
    monkeypatch.setattr(protocol_client, "REFUSED_S", 0.2)
    monkeypatch.setattr(Session.__init__, "__defaults__", (0.2,))  # the time to connect
    monkeypatch.setattr(client_module, "RETURN_S", 0.1)
    for name, ask in OF_HUBS.items():
        with pytest.raises(envhub.EnvHubError) as raised:
            ask(client, envs, hub.tcp)
        assert shown_files(raised.value) == {__file__}, name
    monkeypatch.setenv("ENVHUB_FULL_TRACEBACKS", "1")
    with pytest.raises(envhub.AddressError) as raised:
        envhub.connect("nowhere")
    assert any("envhub_client" in file for file in shown_files(raised.value))


@pytest.mark.long
def test_frames_of_the_library_are_shown_on_request(tmp_path: Path) -> None:
    ran = program(tmp_path, RAISING.replace("BEGIN", "step([0, 1])"), ENVHUB_FULL_TRACEBACKS="1")
    assert all(name in ran.stderr for name in LIBRARY) and "forces[action]" in ran.stderr


# --- the command line -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lines_of(folder: Path, offered: list[str]) -> Iterator[Callable[[], str]]:
    """Lines that a hub prints, one by one."""
    command = [sys.executable, "-m", "envhub", "serve", *offered, "--bind", f"ipc://{folder}/hub.sock"]
    pipes: Mapping[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=HERE, env={**os.environ, "PYTHONUNBUFFERED": "1"}, text=True, **pipes) as hub:
        try:
            assert hub.stdout is not None
            yield hub.stdout.readline
        finally:
            hub.terminate()
            assert hub.wait(15) == 0


@pytest.mark.parametrize(
    ("offered", "named"),
    [
        (["no_such_module:Sim-v0", "sim=needy:factory", "Pendulum-v1", "CartPole-v1"], "Pendulum-v1"),
        pytest.param(["ALE/*"], "ALE/Pong-v5", marks=pytest.mark.long),
        pytest.param([], "CartPole-v1", marks=pytest.mark.long),
    ],
)
def test_connect_line_names_an_env_that_is_ready(tmp_path: Path, offered: list[str], named: str) -> None:
    with lines_of(tmp_path, offered) as line:
        _, connects = line(), line()
        assert connects == f'connect with: envhub.make_vec("{named}", num_envs=64, hub="ipc://{tmp_path}/hub.sock")\n'
        with envhub.connect(f"ipc://{tmp_path}/hub.sock") as client:
            assert named in client.envs()


@pytest.mark.long
def test_hub_of_which_no_env_is_ready_says_what_is_missing_in_place_of_the_connect_line(tmp_path: Path) -> None:
    with lines_of(tmp_path, ["no_such_module:Sim-v0", "sim=needy:factory"]) as line:
        _, *lines = line(), line(), line()
    assert [line.split(":")[:2] for line in lines] == [["unready", " Sim-v0"], ["unready", " sim"]]
    assert "No module named 'no_such_module', in " in lines[1] and "pip install" not in lines[1]


@pytest.mark.long
def test_envs_lists_what_a_hub_offers_with_the_spaces(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", "Pendulum-v1", "broken=faulty:disconnected") as hub:
        listed = envs_of(hub)
        # On a slow machine the making of each is counted there.
        assert listed.returncode == 0 and not re.sub(r"envhub: [01] of 1 envs made.*\n", "", listed.stderr)
        rows = [line.split("\t") for line in listed.stdout.splitlines()]
        assert [row[0] for row in rows] == ["CartPole-v1", "Pendulum-v1", "broken"]
        assert rows[1][1:] == ["Box([-1. -1. -8.], [1. 1. 8.], (3,), float32)", "Box(-2.0, 2.0, (1,), float32)"]
        assert rows[2][1] == "cannot be made: no arm is connected"
        assert envs_of(hub, "Cart*").stdout.splitlines()[0].startswith("CartPole-v1\tBox(")
        none = envs_of(hub, "Zork*")
        assert none.returncode == 1 and none.stderr == "of its 3 envs none matches Zork*\n"
        with envhub.connect(hub.ipc) as client:
            assert client.sessions() == []


def envs_of(hub: ServedHub, *patterns: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "envhub", "envs", hub.tcp, *patterns)


@pytest.mark.long
def test_bash_completes_commands_once_completion_is_installed(tmp_path: Path) -> None:
    installed = run("-m", "envhub", "--install-completion", "--shell", "bash", HOME=str(tmp_path))
    assert installed.returncode == 0, installed.stderr
    asked = """
    source ~/.bashrc
    complete -p envhub
    COMP_WORDS=(envhub "$1") COMP_CWORD=1 COMP_LINE="envhub $1" COMP_POINT=${#COMP_LINE}
    $(complete -p envhub | sed 's/.*-F \\([^ ]*\\) .*/\\1/') envhub "$1" envhub
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    for typed, completed in (("he", ["health"]), ("en", ["end", "envs"]), ("ke", ["keygen", "keys"])):
        ran = subprocess.run(
            ["bash", "--norc", "-c", asked, "bash", typed],
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert sorted(map(str.strip, ran.stdout.splitlines()[1:])) == completed, (ran.stdout, ran.stderr)
