"""What Gymnasium's vector API promises beyond the spaces: runners, registration, threads, wrappers in the worker."""

from __future__ import annotations

import copy
import functools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import sims
from combinations import each_value
from envhub_server.hub.planner import WRAPPER_NAMES
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hubs import LANES, ServedHub, stopped, wait_until
from same import assert_same

import envhub
from envhub import AsyncVectorEnv
from envhub.protocol.messages import Op, Question

# --- runners ----------------------------------------------------------------------------------------------------------


class Halving(envhub.EnvRunner):
    """Halves rewards, and marks resets that nobody asked for."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, reward / 2, *rest

    def autoreset(self) -> Any:
        observation, info = super().autoreset()
        return observation, {**info, "by_itself": True}


@pytest.mark.long
@pytest.mark.parametrize("worker", [Halving, "test_contract:Halving"])
def test_runner_of_ones_own_steps_and_resets(worker: Any) -> None:
    envs = AsyncVectorEnv([lambda: sims.Counter(2)] * 2, worker=worker)
    envs.reset()
    assert envs.step([4, 6])[1].tolist() == [2, 3]
    envs.step([0, 0])
    *_, infos = envs.step([0, 0])
    assert infos["by_itself"].tolist() == [True, True]
    envs.close()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"context": "forked"}, ValueError, "cannot find context for 'forked'"),
        ({"worker": lambda *arguments: None}, ValueError, r"envhub\.EnvRunner"),
        ({"worker": "module"}, ValueError, "worker="),
        ({"worker": ""}, ValueError, "worker="),
        ({"worker": sims.Counter}, TypeError, "worker="),
    ],
)
def test_context_or_worker_that_is_none_is_refused(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        AsyncVectorEnv([sims.Counter], **wrong)


def test_no_more_envs_run_at_once_than_asked_for(tmp_path: Path) -> None:
    class Watched(sims.Counter):
        """Notes how many of its kind run while it does."""

        def __init__(self, number: int) -> None:
            super().__init__()
            self.mine = tmp_path / str(number)
            self.most = 0

        def act(self, action: int) -> None:
            self.mine.touch()
            time.sleep(0.03)
            self.most = max(self.most, len(list(tmp_path.iterdir())))
            self.mine.unlink()

        def reset(self, **kwargs: Any) -> Any:
            self.act(0)
            return super().reset(**kwargs)

    for limit in (1, 2):
        envs = AsyncVectorEnv([functools.partial(Watched, number) for number in range(5)], max_concurrency=limit)
        envs.reset()
        for _ in range(2):
            envs.step([0] * 5)
        assert max(envs.get_attr("most")) == limit
        envs.close()


@pytest.mark.parametrize(("address", "mode"), each_value(LANES, AutoresetMode), indirect=["address"])
def test_what_no_codec_carries_arrives_as_its_repr_and_is_listed(
    address: str | None, mode: AutoresetMode, caplog: pytest.LogCaptureFixture
) -> None:
    if address:
        envs = envhub.make_vec("entangled", 2, hub=address, length=3, autoreset_mode=mode)
    else:
        envs = AsyncVectorEnv([lambda: sims.Entangled(3)] * 2, autoreset_mode=mode)
    envs.reset()
    for _ in range(2):
        *_, infos = envs.step([0, 0])
        assert infos["held"]["lock"][1].startswith("<unlocked _thread.lock")
        assert infos["held"]["count"].tolist() == [1, 1]
    assert list(envs.represented) == ["infos['held']['lock']", "infos['held']['all'][1]"]
    told = [record.message.split(" cannot")[0] for record in caplog.records if " cannot" in record.message]
    assert told == [f"{place} of env 0" for place in envs.represented]
    *_, infos = envs.step([0, 0])
    if mode == AutoresetMode.SAME_STEP:
        infos = infos["final_info"]
    assert infos["held"]["lock"][1].startswith("<unlocked _thread.lock")
    envs.close()


# --- registration -----------------------------------------------------------------------------------------------------


def test_envs_of_a_hub_are_made_by_gymnasium(hub: ServedHub) -> None:
    envs = gym.make_vec("EnvHub/Remote-v0", num_envs=3, env_id="CartPole-v1", url=hub.tcp, autoreset_mode="SameStep")
    wanted = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    assert_same(envs.reset(seed=3), wanted.reset(seed=3), "reset")
    assert envs.spec is not None
    again = gym.make_vec(gym.envs.registration.EnvSpec.from_json(envs.spec.to_json()))
    assert again.num_envs == 3 and again.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert_same(again.reset(seed=3), wanted.reset(seed=3), "reset again")
    again.close()
    envs.close()
    one = gym.make("EnvHub/Remote-v0", env_id="CartPole-v1", url=hub.tcp)
    plain = gym.make("CartPole-v1")
    assert_same(one.reset(seed=5), plain.reset(seed=5), "one")
    assert_same(one.step(1), plain.step(1), "one step")
    assert one.spec is not None
    gym.make(gym.envs.registration.EnvSpec.from_json(one.spec.to_json())).close()
    one.close()


LOOKS = "import envhub, importlib.util; importlib.util.find_spec('gymnasium'); import gymnasium"


@pytest.mark.long
@pytest.mark.parametrize("imports", ["import gymnasium", LOOKS], ids=["prefix imports envhub", "look for gymnasium"])
def test_any_process_finds_the_registration(hub: ServedHub, imports: str) -> None:
    program = (
        f"{imports}\nenvs = gymnasium.make_vec('envhub:EnvHub/Remote-v0', 2, env_id='CartPole-v1', url={hub.tcp!r})\n"
        "print(envs.reset(seed=1)[0].shape)\nenvs.close()\n"
        "import importlib.resources; assert importlib.resources.files('gymnasium').joinpath('core.py').is_file()"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "(2, 4)\n", ran.stderr


def test_hub_offers_no_hub(hub: ServedHub) -> None:
    with pytest.raises(envhub.RequestRefused, match="does not offer"):
        envhub.make_vec("EnvHub/Remote-v0", hub=hub.tcp)


# --- threads ----------------------------------------------------------------------------------------------------------


def waits(envs: envhub.HubVectorEnv, thread: threading.Thread) -> bool:
    """Whether this thread waits for the step, as nobody else can then."""
    return envs._session.pending.state.value == "step" and f"owner={thread.ident} " in repr(
        envs._session.connection.in_use
    )


@pytest.mark.parametrize("lane", ["auto", "wire"])
def test_closing_while_another_thread_waits_is_refused_and_harms_nothing(lane: str) -> None:
    envs = envhub.make_vec(sims.Naughty, 1, lane=lane)
    envs.reset()
    results: list[Any] = []
    with stopped(*envs.call("pid")):
        thread = threading.Thread(target=lambda: results.append(envs.step([6])))
        thread.start()
        assert wait_until(lambda: waits(envs, thread))
        for refused in (
            envs.close,
            lambda: envs._session.connection.ask(Op.STATS, Question()),
            envs._session.connection.give_up,
        ):
            with pytest.raises(envhub.ConnectionInUse, match="another thread"):
                refused()
    thread.join()
    assert not envs.closed and results[0][1].tolist() == [6] and envs.step([9])[1].tolist() == [9]
    envs.step_async([0])
    if lane == "wire":
        with pytest.raises(envhub.LocalProtocolError, match="STEP is pending"):
            envs._session.connection.send(Op.STATS, Question())
    assert envs.step_wait()[1].tolist() == [0]
    envs.close()


def test_vector_env_can_be_closed_in_a_signal_handler() -> None:
    envs = envhub.make_vec(sims.Naughty, 1)
    envs.reset()

    def leave(*_: Any) -> None:
        envs.close(terminate=True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, leave)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            envs.step([8])  # for ever
    finally:
        signal.signal(signal.SIGALRM, before)
    assert envs.closed


# --- exceptions -------------------------------------------------------------------------------------------------------


class Outer:
    class Inner(ValueError):
        pass


class Formatted(ValueError):
    def __init__(self, left: int, *, right: int) -> None:
        super().__init__(f"{left} and {right}")
        self.left = left


RAISED = {
    "nested class": (lambda: Outer.Inner("x"), "x"),
    "constructor that wants other arguments": (lambda: Formatted(1, right=2), "1 and 2"),
    "attributes": (lambda: subprocess.CalledProcessError(3, "ls"), "returned non-zero exit status 3"),
    "of the standard library": (lambda: json.JSONDecodeError("no", "{", 1), "no: line 1 column 2"),
    "long message": (lambda: KeyError("k" * 10_000), "kkk"),
}


@pytest.mark.parametrize(("make", "text"), RAISED.values(), ids=RAISED.keys())
def test_exceptions_arrive_as_they_were_raised(make: Callable[[], Exception], text: str) -> None:
    class Raising(sims.Counter):
        def act(self, action: int) -> None:
            raise make()

    wanted = make()
    envs = envhub.make_vec(Raising, 1)
    envs.reset()
    with pytest.raises(type(wanted), match=text) as caught:
        envs.step([0])
    assert str(caught.value) == str(wanted) and vars(caught.value) == vars(wanted)
    assert isinstance(caught.value.__cause__, envhub.EnvRaised)
    assert "env 0 in worker 0 of the private hub of this program" in str(caught.value.__cause__)
    envs.close()


def test_errors_of_envs_are_logged_where_upstream_logs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(gym.logger, "error", lambda text, *given: said.append(text % given))

    class Full(sims.Counter):
        def act(self, action: int) -> None:
            if action:
                raise ValueError(f"disk {action}% full")

    envs = AsyncVectorEnv([Full] * 2)
    envs.reset()
    with pytest.raises(ValueError, match="disk 1% full"):
        envs.step([0, 1])
    assert said[0] == "Received the following error from Worker-1 - Shutting it down"
    assert "disk 1% full" in said[1] and said[2].startswith("Raising the last exception")
    assert envs.reset()[0].shape == (2, 2)
    envs.close()


# --- wrappers in the worker -------------------------------------------------------------------------------------------


def wrapped() -> gym.Env[Any, Any]:
    env = gym.wrappers.FlattenObservation(gym.make("Blackjack-v1"))
    return gym.wrappers.FrameStackObservation(env, 3)


def test_wrappers_of_a_spec_run_in_the_workers(address: str | None) -> None:
    one = wrapped()
    assert one.spec is not None
    envs, wanted = envhub.make_vec(one.spec, 2, hub=address), SyncVectorEnv([wrapped] * 2)
    assert envs.observation_space == wanted.observation_space
    assert_same(envs.reset(seed=1), wanted.reset(seed=1), "reset")
    for _ in range(10):
        assert_same(envs.step([1, 0]), wanted.step([1, 0]), "step")
    envs.close()


@pytest.mark.parametrize(
    "entry",
    [
        "os:system",
        "gymnasium.wrappers.rendering:RecordVideo",
        "gymnasium.wrappers.array_conversion:importlib",
        "gymnasium.wrappers.common.x:TimeLimit",
    ],
)
def test_wrapper_that_is_not_on_the_list_is_refused_on_the_network(hub: ServedHub, entry: str) -> None:
    spec = copy.deepcopy(gym.spec("CartPole-v1"))
    spec.additional_wrappers = (gym.envs.registration.WrapperSpec("Evil", entry, {}),)
    with pytest.raises(envhub.RequestRefused, match=f"{entry}: a hub on the network makes no wrappers but"):
        envhub.make_vec(spec, 1, hub=hub.tcp)


def test_list_of_wrappers_has_all_of_gymnasiums_that_any_client_may_name() -> None:
    refused = {"RecordVideo", "HumanRendering", "ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch"}
    assert set(gym.wrappers.__all__) <= {*WRAPPER_NAMES, *refused, "vector"}


def test_spaces_and_specs_of_the_envs_are_there_for_the_asking(address: str | None) -> None:
    envs = envhub.make_vec("Pendulum-v1", 2, hub=address)
    assert envs.get_attr("action_space") == (envs.single_action_space,) * 2
    found, wanted = envs.env_spec, copy.deepcopy(gym.make("Pendulum-v1").spec)
    assert envs.get_attr("spec")[0] == found and envs.spec.entry_point == wanted.entry_point
    if address is not None:  # it has the data only
        wanted.entry_point = found.entry_point
        wanted.additional_wrappers = found.additional_wrappers
    assert found == wanted
    envs.close()


def test_single_env_passes_gymnasiums_checker(hub: ServedHub) -> None:
    env = gym.make("EnvHub/Remote-v0", env_id="CartPole-v1", url=hub.tcp)
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_autoreset_mode_is_an_attribute_as_of_gymnasiums(hub: ServedHub, mode: AutoresetMode) -> None:
    with closing(envhub.make_vec("counter", 2, hub=hub.tcp, autoreset_mode=mode.value)) as envs:
        assert envs.autoreset_mode is mode
        with closing(envhub.connect(hub.tcp)) as client, closing(client.attach(envs.token)) as heir:
            assert heir.autoreset_mode is mode
    with closing(gym.make_vec("EnvHub/Remote-v0", 2, env_id="counter", url=hub.tcp)) as remote:
        assert remote.unwrapped.autoreset_mode is AutoresetMode.NEXT_STEP


def test_envs_may_differ_in_their_bounds_where_the_first_ones_are_told(address: str | None) -> None:
    def make(row: int) -> gym.Env[Any, Any]:
        wide = gym.spaces.Box(-1.0 - row, 1.0 + row, (2,))
        return sims.Anything(wide, gym.spaces.Discrete(3 + row, start=row), [{}])

    factories = [functools.partial(make, row) for row in range(3)]
    options: dict[str, Any] = {"hub": address, "num_workers": 2}
    if address is not None:
        options |= {"hub": None, "lane": "auto" if address.startswith("ipc") else "wire"}
    with closing(envhub.make_vec(factories, observation_mode="first", **options)) as envs:
        assert envs.single_action_space == gym.spaces.Discrete(3)
        assert envs.single_observation_space == gym.spaces.Box(-1.0, 1.0, (2,))
        envs.reset(seed=1)
        assert envs.step([2, 3, 4])[0].shape == (3, 2)
        assert [space.n for space in envs.get_attr("action_space")] == [3, 4, 5]
    with pytest.raises(RuntimeError, match="observation spaces"):
        envhub.make_vec(factories, **options)
    with pytest.raises(RuntimeError, match="action spaces from all environments must be equal"):
        envhub.make_vec(factories, observation_mode="different", **options)


def test_actions_that_lack_a_part_are_refused_by_its_name() -> None:
    space = gym.spaces.Dict({"a": gym.spaces.Discrete(3), "b": gym.spaces.Box(-1, 1, (1,))})
    with closing(envhub.make_vec([lambda: sims.Anything(gym.spaces.Discrete(2), space, [{}])] * 2)) as envs:
        envs.reset()
        with pytest.raises(envhub.SpaceMismatch, match="actions has no 'b', which its space has; no env has moved"):
            envs.step({"a": [0, 1]})
        with pytest.raises(envhub.SpaceMismatch, match="actions is None"):
            envs.send(None, [1])
        envs.step({"a": [0, 1], "b": [[0.0], [0.0]]})
