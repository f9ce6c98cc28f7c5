"""A program written for ``gymnasium.vector.AsyncVectorEnv``, with only its import changed.

The examples are those of Gymnasium's documentation: the docstrings of ``AsyncVectorEnv`` and ``VectorEnv``, and the
pages on vector environments. What they print upstream is taken from upstream itself, in the same test.
"""

from __future__ import annotations

import collections
import copy
import functools
import importlib
import os
import pickle
import subprocess
import sys
import threading
import types
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sims
from same import assert_same

import envhub
from envhub import AsyncVectorEnv

Vectorizer = Any
BOTH = [gym.vector.AsyncVectorEnv, AsyncVectorEnv]


def pendulums(vectorizer: Vectorizer) -> list[Any]:
    """The docstring of ``AsyncVectorEnv``."""
    envs = vectorizer([lambda: gym.make("Pendulum-v1", g=9.81), lambda: gym.make("Pendulum-v1", g=1.62)])
    said = [repr(envs)]
    said += envs.reset(seed=42)
    envs.action_space.seed(123)
    said += envs.step(envs.action_space.sample())
    envs.close()
    return said


def cart_poles(vectorizer: Vectorizer) -> list[Any]:
    """The docstrings of ``VectorEnv.reset`` and ``VectorEnv.step``."""
    envs = vectorizer([lambda: gym.make("CartPole-v1") for _ in range(3)])
    said: list[Any] = [envs.num_envs, envs.action_space, envs.observation_space, envs.single_action_space]
    said += [envs.single_observation_space, envs.metadata, envs.spec, envs.render_mode, envs.closed]
    said += envs.reset(seed=42)
    said += envs.step(np.array([1, 0, 1], dtype=np.int32))
    envs.close()
    return [*said, envs.closed]


def attributes(vectorizer: Vectorizer) -> list[Any]:
    """``call``, ``get_attr``, ``set_attr`` and ``render`` as the documentation of ``AsyncVectorEnv`` shows them."""
    envs = vectorizer([lambda: sims.Counter(render_mode="rgb_array")] * 2)
    envs.reset(seed=1)
    envs.step([3, 4])
    envs.set_attr("note", [9.8, 1.6])
    said = [envs.get_attr("note"), envs.call("add", 2, right=3), envs.np_random_seed, envs.render_mode]
    said += [tuple(generator.random() for generator in envs.np_random)]
    said += list(envs.render())
    envs.close()
    return said


def episode_statistics(vectorizer: Vectorizer) -> list[Any]:
    """The example of ``RecordEpisodeStatistics`` with a vector env, until an episode has ended."""
    envs = gym.wrappers.vector.RecordEpisodeStatistics(vectorizer([lambda: gym.make("CartPole-v1")] * 3))
    envs.reset(seed=123)
    envs.action_space.seed(123)
    infos: dict[str, Any] = {}
    while "episode" not in infos:
        *_, infos = envs.step(envs.action_space.sample())
    envs.close()
    return [infos["episode"]["r"], infos["episode"]["l"], infos["_episode"]]


def asynchronous(vectorizer: Vectorizer) -> list[Any]:
    """The two halves of reset and step."""
    envs = vectorizer([lambda: gym.make("CartPole-v1")] * 2)
    envs.reset_async(seed=3)
    said = list(envs.reset_wait(timeout=30))
    envs.step_async([1, 1])
    said += envs.step_wait(timeout=30)
    envs.close()
    return said


@pytest.mark.parametrize("example", [pendulums, cart_poles, attributes, episode_statistics, asynchronous])
def test_examples_of_the_documentation_run_with_the_import_changed(example: Any) -> None:
    wanted, found = (example(vectorizer) for vectorizer in BOTH)
    assert_same(found, wanted, example.__name__)


# Gymnasium before 1.4 asserts where it now raises.
@pytest.mark.parametrize("vectorizer", BOTH if hasattr(gym.spaces.Dict(), "sort_keys") else BOTH[1:])
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"reset_mask": [True, False]}, TypeError),
        ({"reset_mask": np.array([True])}, ValueError),
        ({"reset_mask": np.array([1, 0])}, TypeError),
        ({"reset_mask": np.array([False, False])}, ValueError),
    ],
)
def test_malformed_masks_are_refused_as_upstream_refuses_them(
    vectorizer: Vectorizer, options: dict[str, Any], kind: type[Exception]
) -> None:
    envs = vectorizer([lambda: gym.make("CartPole-v1")] * 2)
    with pytest.raises(kind, match="reset_mask"):
        envs.reset(options=dict(options))
    envs.close()


def test_returned_arrays_are_the_callers_own_with_copy() -> None:
    envs = AsyncVectorEnv([sims.Counter] * 2)
    kept = [envs.reset()[0], *(envs.step([0, 0])[0] for _ in range(4))]
    assert [one[0, 0] for one in kept] == [0, 1, 2, 3, 4]
    kept[0][:] = 7
    assert envs.step([0, 0])[0][:, 0].tolist() == [5, 5]
    envs.close()


# --- the program's world --------------------------------------------------------------------------------------------


class Local(sims.Counter):
    """Registered by a plain ``gym.register`` of this program, with a class that only this module has."""

    def square(self, value: np.ndarray) -> np.ndarray:
        return value**2


def test_registrations_of_the_program_are_known_to_its_workers() -> None:
    gym.register("Local-v0", entry_point=Local, max_episode_steps=7)
    gym.register("Local-v1", entry_point=lambda length=3: Local(length))
    try:
        envs = envhub.make_vec("Local-v0", 2)
        assert envs.spec is not None and repr(envs) == "HubVectorEnv(Local-v0, num_envs=2)"
        envs.reset()
        assert [bool(envs.step([0, 0])[3][0]) for _ in range(7)] == [False] * 6 + [True]
        envs.close()
        envs = AsyncVectorEnv([lambda: gym.make("Local-v1", length=5)])
        assert envs.get_attr("length") == (5,)
        envs.close()
    finally:
        del gym.registry["Local-v0"], gym.registry["Local-v1"]


def test_registry_of_the_workers_is_the_programs() -> None:
    stock = gym.spec("CartPole-v1")
    gym.register("Variant-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=3)
    gym.registry["CartPole-v1"] = gym.envs.registration.EnvSpec("CartPole-v1", entry_point=Local)
    sys.modules["__main__"].Local = Local  # type: ignore[attr-defined]
    gym.register("Main-v0", entry_point="__main__:Local")
    try:
        for name, shape in (("Variant-v0", (4,)), ("CartPole-v1", (2,)), ("Main-v0", (2,))):
            envs = envhub.make_vec(name, 1)
            assert envs.single_observation_space.shape == shape, name
            envs.close()
        envs = AsyncVectorEnv([lambda: gym.make("Variant-v0")])
        envs.reset()
        assert [bool(envs.step([0])[3][0]) for _ in range(3)] == [False, False, True]
        envs.close()
    finally:
        gym.registry["CartPole-v1"] = stock
        del gym.registry["Variant-v0"], gym.registry["Main-v0"], sys.modules["__main__"].Local


def test_spec_that_nobody_registered_is_made_with_its_wrappers() -> None:
    gym.register("Local-v2", entry_point=Local, max_episode_steps=7)
    one = gym.wrappers.RescaleObservation(gym.make("Local-v2"), np.float64(-1), np.float64(1))
    del gym.registry["Local-v2"]
    assert one.spec is not None
    envs = envhub.make_vec(one.spec, 2)
    assert envs.single_observation_space == one.observation_space
    assert envs.spec is not None and envs.spec.id == "Local-v2"
    envs.close()


def test_factories_have_no_spec_that_would_make_other_envs() -> None:
    with closing(envhub.make_vec(functools.partial(gym.make, "FrozenLake-v1", map_name="8x8"), 1)) as envs:
        assert envs.spec is None
        assert envs.env_spec is not None and envs.env_spec.kwargs == {"map_name": "8x8"}


class Lost:
    """What no worker can load."""

    def __call__(self) -> Any:
        """The env, which is never made."""

    def __reduce__(self) -> Any:
        return importlib.import_module, ("of_the_program_alone",)


def test_registration_that_does_not_load_in_a_worker_hides_no_other() -> None:
    gym.register("Lost-v0", entry_point=Lost())
    try:
        envhub.make_vec("CartPole-v1", 1).close()
        with pytest.raises(ModuleNotFoundError, match="of_the_program_alone"):
            envhub.make_vec("Lost-v0", 1)
    finally:
        del gym.registry["Lost-v0"]


def test_class_of_a_module_that_only_the_program_has_is_sent_by_value() -> None:
    module = types.ModuleType("of_the_program_alone")
    module.Own = type("Own", (Local,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    gym.register("Own-v0", entry_point="of_the_program_alone:Own")
    try:
        for env in ("Own-v0", module.Own):
            envhub.make_vec(env, 1).close()
    finally:
        del gym.registry["Own-v0"], sys.modules[module.__name__]


PROGRAM = """
import os, sys
os.environ["MARK"] = "set by the program"
os.chdir({folder!r})
sys.path.insert(0, {place!r})
import sims
from envhub import AsyncVectorEnv

class Here(sims.Counter):
    def where(self):
        print("hello from the worker")
        print("trouble from the worker", file=sys.stderr)
        return os.getcwd(), os.environ["MARK"], os.environ["OMP_NUM_THREADS"]

envs = AsyncVectorEnv([Here] * 2)
print(envs.call("where"))
envs.close()
"""


@pytest.mark.long
def test_workers_start_from_the_programs_world_and_print_where_it_prints(tmp_path: Path) -> None:
    program = PROGRAM.format(folder=str(tmp_path), place=str(Path(sims.__file__).parent))
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "7"},
    )
    assert ran.returncode == 0, ran.stderr
    assert repr((str(tmp_path), "set by the program", "7")) in ran.stdout
    assert ran.stdout.count("hello from the worker") == 2 and ran.stderr.count("trouble from the worker") == 2


def test_address_of_the_environment_is_the_default(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVHUB_ADDRESS", hub.tcp)
    envs = envhub.make_vec("counter", 2)
    with envhub.connect() as client:
        assert [session["env"] for session in client.sessions()] == ["counter"]
    envs.close()
    private = envhub.make_vec([sims.Counter])  # factories are for the private hub only
    private.close()


def test_options_and_arguments_of_the_env_do_not_clash(hub: Any) -> None:
    envs = envhub.make_vec("counter", 2, hub=hub.tcp, length=2)
    assert envs.get_attr("length") == (2, 2)
    envs.close()
    with pytest.raises(TypeError, match="copy"):
        envhub.make_vec("counter", 1, hub=hub.tcp, env_kwargs={"copy": 1})
    with pytest.raises(ValueError, match="observation_mode"):
        envhub.make_vec("counter", 1, hub=hub.tcp, observation_mode="other")


def test_single_env_is_the_env_itself(address: str | None) -> None:
    found, wanted = envhub.make("CartPole-v1", hub=address), gym.make("CartPole-v1")
    assert found.observation_space == wanted.observation_space and found.spec == wanted.spec
    assert_same(found.reset(seed=4), wanted.reset(seed=4), "reset")
    for _ in range(5):
        assert_same(found.step(1), wanted.step(1), "step")
    found.set_wrapper_attr("gravity", 5.5)
    assert found.get_wrapper_attr("gravity") == 5.5
    found.reset(seed=6), wanted.reset(seed=6)
    assert found.np_random_seed == 6 and found.np_random.random() == wanted.np_random.random()
    found.np_random = np.random.default_rng(3)
    assert found.np_random.random() == np.random.default_rng(3).random()
    found.close()


@pytest.mark.long
def test_program_without_standard_streams_has_a_hub_too() -> None:
    program = "import envhub; envs = envhub.make_vec('CartPole-v1', 2); envs.reset(); envs.step([0, 1]); envs.close()"
    ran = subprocess.run(["sh", "-c", f'exec {sys.executable} -c "{program}" <&- >&- 2>&-'], timeout=60)
    assert ran.returncode == 0


def test_values_of_a_program_keep_their_classes_on_the_way_to_its_envs() -> None:
    envs = envhub.make_vec(sims.Counter, 2)
    left, right = envs.call("opaque")
    assert left(1, 2) == 3 and right(1) == 1
    envs.set_attr("note", collections.defaultdict(list, a=[object]))
    assert type(envs.get_attr("note")[0]) is collections.defaultdict and envs.get_attr("note")[1] == {"a": [object]}
    with pytest.raises(TypeError, match="cannot be pickled"):
        envs.set_attr("note", threading.Lock())
    with pytest.raises(TypeError, match="a str"):
        envs.call(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        envs.reset(seed=[1.5, 1])  # type: ignore[list-item]
    envs.close()


def test_big_endian_observations_arrive_as_they_are(address: str | None) -> None:
    envs = envhub.make_vec("big_endian", 2, hub=address) if address else envhub.make_vec(sims.BigEndian, 2)
    observations, _ = envs.reset()
    assert observations.tolist() == [[0.5, 0.5]] * 2 and envs.single_observation_space.dtype == np.dtype(">f4")
    envs.close()


@pytest.mark.long
def test_module_that_makes_its_envs_at_import_ends_in_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "rash.py").write_text(
        "import sims, envhub\nclass Mine(sims.Counter): pass\nenvs = envhub.AsyncVectorEnv([Mine] * 2)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", "import rash"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(sims.__file__).parent)])},
    )
    assert ran.returncode == 1 and "a worker starts no hub of its own" in ran.stderr, ran.stderr


def test_vector_env_and_client_are_not_copied(hub: Any) -> None:
    envs = envhub.make_vec(sims.Counter, 1)
    with envhub.connect(hub.tcp) as client:
        for use, of in ((copy.copy, envs), (copy.deepcopy, envs), (pickle.dumps, envs), (pickle.dumps, client)):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                use(of)
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be pickled for the workers"):
        envhub.make_vec(lambda: sims.Counter(int(lock.locked())), 1)
    envs.close()
