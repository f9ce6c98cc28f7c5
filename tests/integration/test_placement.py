"""Workers know their place and their device, the same after a restart, and envs may have arguments of their own."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import sims
from envhub_client.session.factories import make_of_factories
from envhub_client.session.options import SessionOptions
from envhub_client.session.session import Session
from hubs import ServedHub, kill_worker, serve
from odd_sims import Placed

import envhub
from envhub.protocol.messages import Call
from envhub.values import codec


def test_workers_know_their_place_and_keep_it_when_they_are_restarted() -> None:
    with closing(envhub.make_vec(Placed, 5, num_workers=2)) as envs:
        places = envs.call("place")
        assert len(places[0][0]) == 8
        assert [place[1:] for place in places] == [["0", "2", "0,2,4"], ["1", "2", "1,3"]] * 2 + [["0", "2", "0,2,4"]]
        envs.reset()
        kill_worker(envs.call("pid")[1])
        assert envs.call("place") == places


def test_envs_of_a_part_of_a_larger_vector_env_get_their_indices_there() -> None:
    make = replace(make_of_factories([Placed] * 3), row_offset=10)
    session = Session("HubVectorEnv", None, make, SessionOptions(num_workers=2))
    try:
        call = Call("place", codec.encode([[], {}]))
        session.begin_call(call)
        places = session.wait_call(call, None, codec.decode)
        indices = {row: place[3] for row, place in places.items()}
        assert indices == {0: "10,12", 1: "11", 2: "10,12"}
    finally:
        session.close(terminate=True, finish=lambda: True)


def test_place_is_known_to_later_envs_where_the_first_decide_how_many_workers_there_are() -> None:
    with closing(envhub.make_vec(Placed, 7)) as envs:
        assert envs.num_workers == 7
        assert {tuple(place[2:]) for place in envs.call("place")} <= {("", ""), *(("7", str(env)) for env in range(7))}
        assert envs.call("environment", "ENVHUB_ENV_INDICES") == tuple(map(str, range(7)))


@pytest.mark.long
def test_operators_devices_are_dealt_to_sessions_in_turn_and_are_the_only_ones(tmp_path: Path) -> None:
    with serve(tmp_path, "placed=odd_sims:Placed", "--gpus", "4", "--gpus", "6") as hub:
        first, second = (envhub.make_vec("placed", 1, hub=hub.ipc) for _ in range(2))
        with closing(first), closing(second):
            assert {envs.call("device")[0][0] for envs in (first, second)} == {"4", "6"}
        with closing(envhub.make_vec("placed", 2, num_workers=2, hub=hub.ipc, gpus=[6])) as envs:
            assert envs.call("device") == (["6"] * 3, ["6"] * 3)
        with pytest.raises(envhub.RequestRefused, match=r"gpus=\[0\]: this hub deals 4, 6 to its workers"):
            envhub.make_vec("placed", 1, hub=hub.ipc, gpus=[0])


@pytest.mark.parametrize("gpus", ["0", [0.5], [-1], 1])
def test_what_names_no_device_is_refused(gpus: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="gpus must be"):
        envhub.make_vec(Placed, gpus=gpus)


def test_envs_may_have_arguments_of_their_own(hub: ServedHub) -> None:
    each = [{"length": length} for length in (2, 3, 4)]
    for address in (None, hub.tcp):
        name = "CartPole-v1" if address is None else "counter"
        arguments: Any = [{"max_episode_steps": one["length"]} for one in each] if address is None else each
        with closing(envhub.make_vec(name, hub=address, num_workers=2, env_kwargs=arguments)) as envs:
            envs.reset(seed=1)
            ended = np.zeros((4, 3), bool)
            for step in range(4):
                _, _, terminations, truncations, _ = envs.step([0, 0, 0])
                ended[step] = terminations | truncations
            assert ended.argmax(axis=0).tolist() == [1, 2, 3]


def test_envs_of_a_spec_may_have_arguments_of_their_own(hub: ServedHub) -> None:
    spec, each = gymnasium.spec("CartPole-v1"), [{"sutton_barto_reward": value} for value in (True, False)]
    for options in ({}, {"hub": hub.tcp}):
        env: Any = "CartPole-v1" if options else spec
        with closing(envhub.make_vec(env, env_kwargs=each, **options)) as envs:  # type: ignore[arg-type]
            envs.reset(seed=1)
            assert envs.step([0, 0])[1].tolist() == [0.0, 1.0]


def test_arguments_of_another_number_of_envs_are_refused() -> None:
    with pytest.raises(ValueError, match="num_envs=3 and env_kwargs of 2 envs"):
        envhub.make_vec("CartPole-v1", 3, env_kwargs=[{}, {}])
    with pytest.raises(TypeError, match="arguments of one env"):
        envhub.make("CartPole-v1", env_kwargs=[{}, {}])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 factories and env_kwargs of 3 envs"):
        envhub.make_vec([sims.Counter] * 2, env_kwargs=[{"length": 1}] * 3)
