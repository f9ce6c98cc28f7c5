"""Observations out of their space, and what is not finite: told, never a hang, and the session goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import odd_sims
import pytest
from combinations import each_value
from hubs import LANES, ServedHub, serve, wait_until
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from strategies import any_space

import envhub

UNFIT = ("shape", "scalar", "nothing", "dtype", "bytes", "ragged")  # for the arena: an error of the env's, always
NOT_FINITE = ("nan", "infinite", "reward")


@pytest.fixture(scope="module")
def ill_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    with serve(tmp_path_factory.mktemp("ill"), "ill=odd_sims:Ill", "anything=sims:anything") as hub:
        yield hub


@pytest.fixture
def place(request: pytest.FixtureRequest, ill_hub: ServedHub) -> str | None:
    return None if request.param == "embedded" else getattr(ill_hub, request.param)


@contextlib.contextmanager
def made(place: str | None, illness: str, **options: Any) -> Iterator[envhub.HubVectorEnv]:
    """Two envs that have made their first step, of which the second is ill."""
    if place is None:
        healthy, ill = (lambda: odd_sims.Ill("bounds")), (lambda: odd_sims.Ill(illness))
        envs = envhub.make_vec([healthy, ill], num_workers=2, **options)
    else:
        envs = envhub.make_vec("ill", 2, hub=place, num_workers=2, illness=illness, **options)
    with contextlib.closing(envs):
        envs.reset()
        assert envs.step(np.zeros(2, int))[1].tolist() == [1.0, 1.0]
        yield envs


def stepped(envs: envhub.HubVectorEnv) -> Any:
    envs.step_async(np.zeros(2, int))
    return envs.step_wait(timeout=20)


def goes_on(envs: envhub.HubVectorEnv) -> bool:
    envs.reset()
    return bool(envs.step(np.zeros(2, int))[1].tolist() == [1.0, 1.0])


@pytest.mark.parametrize(("place", "illness"), each_value(LANES, UNFIT), indirect=["place"])
def test_observation_that_does_not_fit_its_space_is_an_error_of_the_env(place: str | None, illness: str) -> None:
    with made(place, illness) as envs:
        with pytest.raises((ValueError, TypeError)) as caught:
            stepped(envs)
        assert isinstance(caught.value.__cause__, envhub.EnvRaised)
        assert goes_on(envs)


@pytest.mark.parametrize(("place", "illness"), each_value(LANES, UNFIT), indirect=["place"])
def test_with_on_exception_it_is_a_truncation(place: str | None, illness: str) -> None:
    with made(place, illness, on_exception="truncate", restarts_max=1000) as envs:
        _, _, _, truncations, infos = stepped(envs)
        assert truncations[1] and infos["_env_failure"][1]
        assert infos["env_failure"][1]["cause"] == "exception"
        assert goes_on(envs)


@pytest.mark.parametrize(
    ("place", "illness", "policy"), each_value(LANES, NOT_FINITE, ["pass", "raise", "truncate"]), indirect=["place"]
)
def test_what_is_not_finite_passes_as_in_gymnasium_or_is_what_the_policy_says(
    place: str | None, illness: str, policy: Any
) -> None:
    with made(place, illness, on_invalid=policy, restarts_max=1000) as envs:
        if policy == "raise":
            with pytest.raises(Exception, match=r"not finite|a reward of nan") as caught:
                stepped(envs)
            assert isinstance(caught.value, envhub.EnvRaised) or isinstance(caught.value.__cause__, envhub.EnvRaised)
        else:
            observations, rewards, _, truncations, infos = stepped(envs)
            is_finite = np.isfinite(observations).all() and np.isfinite(rewards).all()
            assert is_finite == truncations[1] == (policy == "truncate")
            assert not is_finite or infos["_invalid_transition"][1]
        assert goes_on(envs)


@pytest.mark.parametrize("policy", ["raise", "truncate"])
@pytest.mark.parametrize("place", LANES, indirect=True)
def test_reset_that_observes_what_is_not_finite_raises(place: str | None, policy: str) -> None:
    with made(place, "bounds", on_invalid=policy, restarts_max=1000) as envs:
        with pytest.raises(Exception, match="not finite") as caught:
            envs.reset(options={"ill": True})
        assert isinstance(caught.value, envhub.EnvRaised) or isinstance(caught.value.__cause__, envhub.EnvRaised)
        assert goes_on(envs)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_autoreset_that_observes_what_is_not_finite_is_a_truncation_if_so_wished(mode: str) -> None:
    how = {"on_invalid": "truncate", "restarts_max": 1000, "autoreset_mode": mode}
    with contextlib.closing(envhub.make_vec([odd_sims.EndsIll] * 2, num_workers=1, **how)) as envs:
        envs.reset()
        steps = [envs.step(np.zeros(2, int)) for _ in range(4)]
        assert all(np.isfinite(observations).all() for observations, *_ in steps)
        causes = [infos["env_failure"][0]["cause"] for *_, infos in steps if "env_failure" in infos]
        assert causes and set(causes) == {"nan"}


def _mutated(draw: st.DrawFn, value: Any) -> Any:
    """Something near to this element of a space that need not be in it."""
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value)))
        return {**value, key: _mutated(draw, value[key])}
    if isinstance(value, tuple) and value:
        place = draw(st.integers(0, len(value) - 1))
        return (*value[:place], _mutated(draw, value[place]), *value[place + 1 :])
    array = np.asarray(value if isinstance(value, (np.ndarray, int, float, np.generic)) else 0.0)
    wrong = (None, "text", array[None], array.ravel(), array.astype(complex), array * np.nan, array + 1e4, [], {})
    return draw(st.sampled_from(wrong))


@st.composite
def mutants(draw: st.DrawFn) -> tuple[Any, Any]:
    """A space, and an observation that is meant to be of it."""
    space = draw(any_space)
    space.seed(1)
    return space, _mutated(draw, space.sample())


@pytest.mark.long
@pytest.mark.parametrize("examples", [8, pytest.param(1000, marks=[pytest.mark.chaos, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("lane", ["auto", pytest.param("wire", marks=pytest.mark.chaos)])
def test_no_observation_hangs_or_ends_a_session(lane: str, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(mutants())
    def holds(mutant: tuple[Any, Any]) -> None:
        factory = partial(odd_sims.Mutant, *mutant)
        with contextlib.closing(envhub.make_vec([factory] * 2, num_workers=1, lane=lane)) as envs:
            for _ in range(2):
                envs.reset()
                envs.step(np.zeros(2, int))
                with contextlib.suppress(ValueError, TypeError, KeyError, envhub.EnvRaised):  # or it does fit
                    stepped(envs)

    holds()


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_observation_out_of_bounds_passes_and_is_logged_once(ill_hub: ServedHub, kind: str) -> None:
    before = len(ill_hub.log)
    with made(getattr(ill_hub, kind), "bounds") as envs:
        for _ in range(5):
            assert stepped(envs)[0].max() > 1
        assert wait_until(lambda: ill_hub.log[before:].count("env_suspicious") == 2)
        assert "an observation out of its space" in ill_hub.log[before:]
