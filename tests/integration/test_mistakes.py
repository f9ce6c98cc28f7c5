"""What a user mistypes or hands over by mistake is answered by a sentence that says what to do."""

from __future__ import annotations

import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import sims
from envhub_client.frames import hide_frames, hiding_frames
from hubs import ServedHub, serve

import envhub

# --- keywords ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_workers": True},
        {"num_workers": False},
        {"spin_us": 1.5},
        {"spin_us": True},
        {"pin": 1},
        {"vector": "yes"},
        {"reconnect_timeout": "3"},
        {"env_kwargs": 7},
        {"step_timeout": -1},
        {"recycle": {"episode": 1}},
    ],
    ids=str,
)
def test_keyword_of_another_type_is_named_at_the_call(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    for make in (partial(envhub.make_vec, num_envs=2), envhub.make):
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be|make takes .* {name}") as raised:
            make("CartPole-v1", **wrong)
        assert sys.version_info < (3, 11) or raised.traceback[-1].path == Path(__file__)


def test_wrong_argument_of_a_method_is_named_at_the_call() -> None:
    calls: dict[str, Callable[[envhub.HubVectorEnv], object]] = {
        "seeds": lambda envs: envs.reset(seed=[1]),
        "options must be": lambda envs: envs.reset(options=7),  # type: ignore[arg-type]
        "env_ids must be": lambda envs: envs.send([0], env_ids=[7]),
        "actions must be": lambda envs: envs.step(None),
        "observer must be": lambda envs: envs.add_observer(7),  # type: ignore[arg-type]
        "timeout must be": lambda envs: (envs.step_async([0, 0]), envs.step_wait(timeout="1")),  # type: ignore[arg-type]
    }
    with closing(envhub.make_vec("CartPole-v1", 2, num_workers=1)) as envs:
        envs.reset()
        for text, call in calls.items():
            with pytest.raises((TypeError, ValueError), match=text) as raised:
                call(envs)
            assert sys.version_info < (3, 11) or raised.traceback[-1].path == Path(__file__)
        with pytest.raises(TypeError, match="timeout must be"):
            envs.close(timeout="1")


def test_bug_of_the_library_shows_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envhub_client.make.named_wrappers", len)
    with pytest.raises(TypeError, match="has no len") as raised:
        envhub.make_vec("CartPole-v1", 2, wrappers=None)  # type: ignore[arg-type]
    assert raised.traceback[-1].path.name == "make.py"


def test_number_of_envs_that_cannot_be_is_named() -> None:
    for wrong, kind in ((0, ValueError), (-1, ValueError), (2.0, TypeError), ("3", TypeError)):
        with pytest.raises(kind, match=f"^num_envs must be .*got {wrong!r}"):
            envhub.make_vec("CartPole-v1", num_envs=wrong)
    for make in (envhub.make_vec, envhub.AsyncVectorEnv):
        with pytest.raises(ValueError, match=r"^there is no factory in the list"):
            make([])


def test_misspelt_keyword_beside_a_factory_is_named_with_the_right_one() -> None:
    with pytest.raises(
        TypeError, match="neither make_vec nor the factory takes 'num_worker'; did you mean 'num_workers'"
    ):
        envhub.make_vec([sims.Counter] * 2, num_worker=3)
    with pytest.raises(TypeError, match="AsyncVectorEnv takes no 'on_crahs'; did you mean 'on_crash'"):
        envhub.AsyncVectorEnv([sims.Counter] * 2, on_crahs="raise")


@pytest.mark.parametrize(
    ("keyword", "told"), [("vectorization_mode", "leave it out"), ("vector_kwargs", "pass what is in it")]
)
def test_keyword_of_gymnasiums_make_vec_is_explained(keyword: str, told: str) -> None:
    with pytest.raises(TypeError, match=f"neither make_vec nor the env takes '{keyword}'; {told}"):
        envhub.make_vec("CartPole-v1", 2, **{keyword: "async"})  # type: ignore[arg-type]


def test_keyword_of_the_env_that_resembles_one_of_ours_is_the_envs() -> None:
    class Trucks(sims.Counter):
        def __init__(self, lanes: int, num_worker: int) -> None:
            super().__init__()
            self.note = f"{lanes} {num_worker}"

    gym.register("Trucks-v0", Trucks)
    try:
        with closing(envhub.make_vec("Trucks-v0", 2, lanes=3, num_worker=4)) as envs:
            assert envs.get_attr("note") == ("3 4", "3 4")
    finally:
        del gym.registry["Trucks-v0"]


def test_other_errors_of_a_constructor_are_as_they_were(hub: ServedHub) -> None:
    with pytest.raises(TypeError, match=r"^CartPoleEnv.*unexpected keyword argument 'zzz'"):
        envhub.make_vec("CartPole-v1", 2, hub=hub.tcp, zzz=1)
    with pytest.raises(TypeError, match=r"^CartPoleEnv.*unexpected keyword argument 'num_worker'"):
        envhub.make_vec("CartPole-v1", 2, hub=hub.tcp, env_kwargs={"num_worker": 3})


@pytest.mark.parametrize("name", ["num_envs", "autoreset_mode"])
def test_single_env_refuses_what_only_several_have(name: str) -> None:
    with pytest.raises(TypeError, match=rf"make takes no '{name}'.*make_vec"):
        envhub.make("CartPole-v1", **{name: 2})


# --- names and packages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ("gymnasium.envs.classic_control:PendulmEnv", "has no attribute 'PendulmEnv'; did you mean 'PendulumEnv'?"),
        (
            "gymnasium.envs.clasic_control:PendulumEnv",
            "No module named 'gymnasium.envs.clasic_control'; did you mean 'classic_control'?",
        ),
        ("gymnasum:PendulumEnv", "No module named 'gymnasum'; did you mean 'gymnasium'?"),
        ("or_gym:make", f"No module named 'or_gym'; run: {sys.executable} -m pip install or_gym"),
        ("no_such_simulator:make", "No module named 'no_such_simulator'"),  # a stranger's package may have this name
    ],
)
def test_private_hub_says_what_was_meant_and_what_is_missing(env: str, told: str) -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError), match=f"{re.escape(told)}$"):
        envhub.make_vec(env, 2)


def test_errors_of_a_private_hub_name_no_address_of_it() -> None:
    with pytest.raises(envhub.RequestRefused, match=r"\(private hub of this program\)"):
        envhub.make_vec("CartPole-v1", 2, python="no_such_python")
    with closing(envhub.make_vec(sims.Counter, 2, on_crash="raise")) as envs:
        with pytest.raises(TypeError, match="a connection to the private hub of this program cannot be pickled"):
            pickle.dumps(envs._session.connection)
        envs.reset()
        os.kill(envs.call("pid")[0], signal.SIGKILL)
        with pytest.raises(envhub.WorkerDied, match=r"\(private hub of this program\)"):
            envs.step([0, 0])


# --- factories --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [lambda: gym.make("CartPole-v1"), "CartPole-v1", None, 3])
def test_what_is_no_list_of_factories_is_refused_here(given: Any) -> None:
    with pytest.raises(TypeError, match="factories of envs are wanted"):
        envhub.AsyncVectorEnv(given)


class Spaceless(sims.Counter):
    """Its author forgot the action space."""

    action_space = None  # type: ignore[assignment]


@pytest.mark.long
@pytest.mark.parametrize(
    ("factory", "told"),
    [
        (lambda: gym.vector.SyncVectorEnv([sims.Counter]), "returned a vector env"),
        (lambda: None, "returned None, which is no env: it has no `observation_space`"),
        (Spaceless, "returned .*Spaceless.*, whose action_space is None and no space of gymnasium.spaces$"),
        (lambda: sims.Counter, "returned the class Counter in place of an env"),
    ],
)
def test_factory_of_what_is_no_single_env_is_refused(factory: Any, told: str) -> None:
    for make in (envhub.make_vec, envhub.AsyncVectorEnv):
        with pytest.raises(TypeError, match=rf"the factory of env \d {told}"):
            make([factory])


def test_program_on_another_system_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(envhub.HubUnreachable, match="a hub of the program's own needs Linux, and this is macOS"):
        envhub.make_vec("CartPole-v1", 2)


class CallsWhatEnvsLack(envhub.StepObserver):
    """An observer of a program whose own call is wrong."""

    def step_ended(self, envs: envhub.HubVectorEnv, result: Any) -> None:
        self.ask(envs)

    def ask(self, envs: envhub.HubVectorEnv) -> None:
        envs.call("nothing")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a bare raise goes on with all frames before 3.11")
def test_traceback_shows_the_frames_of_the_program_that_the_library_called() -> None:
    with closing(envhub.make_vec("CartPole-v1", 1, num_workers=1)) as envs:
        envs.add_observer(CallsWhatEnvsLack())
        envs.reset()
        with pytest.raises(AttributeError) as raised:
            envs.step([0])
    assert [entry.name for entry in raised.traceback[1:]] == ["step_ended", "ask"]


def test_traceback_of_a_module_of_the_program_is_shown_whatever_its_name_and_its_causes() -> None:
    program: dict[str, Any] = {"__name__": "envhub_experiments"}
    exec("def fail(): raise ValueError('of the program')", program)  # noqa: S102
    with pytest.raises(ValueError, match="of the program") as raised:
        hiding_frames(program["fail"])()
    assert raised.traceback[-1].name == "fail"
    one, other = envhub.AddressError("one"), envhub.AddressError("other")
    one.__cause__, other.__cause__ = other, one
    hide_frames(one)


# --- a hub that is down -----------------------------------------------------------------------------------------------


def announced(caplog: pytest.LogCaptureFixture) -> str:
    return next(message for message in caplog.messages if "out of reach" in message)


@pytest.mark.long
def test_hub_that_is_down_is_announced_with_the_time_it_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with caplog.at_level(logging.WARNING, "envhub"), pytest.raises(envhub.HubUnreachable, match="within 4 s"):
            envhub.connect(address, timeout=4)
    assert announced(caplog).endswith("it is tried for 4 s")


@pytest.mark.long
def test_hub_that_has_ended_is_announced_with_the_time_it_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(tmp_path, "CartPole-v1") as hub, closing(envhub.make_vec("CartPole-v1", 2, hub=hub.tcp)) as envs:
        hub.process.kill()
        hub.process.wait()
        with caplog.at_level(logging.WARNING, "envhub"), pytest.raises(envhub.HubLost, match="refused for 5 s"):
            envs.reset()
        assert announced(caplog).endswith("others are refused; it is tried for 5 s")


def test_host_that_does_not_exist_is_told() -> None:
    with pytest.raises(envhub.HubUnreachable, match=r"host 'nohost\.invalid' cannot be resolved here \(.+\): is its"):
        envhub.connect("tcp://nohost.invalid:5555", timeout=0.2)


def test_host_is_not_doubted_where_this_process_has_no_more_files() -> None:
    program = """
import resource
from envhub_client.connection.zeromq_transport import ZeroMqTransport
transport = ZeroMqTransport("tcp://127.0.0.1:1")
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
print(transport.advice())  # the first look-up of a process reads files
"""
    ran = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert ran.stdout == "this process cannot look up the host '127.0.0.1': Too many open files\n"
