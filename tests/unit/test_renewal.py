"""How often, and after which pauses, envs are made again when their session has ended."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from envhub_client.session import renewal
from envhub_client.session.description import ValueCodec
from envhub_client.session.renewal import DEATHS_MAX, PAUSE_S_MAX, RETRY_S, SETTLED_S, losses_in_a_row, made_again
from envhub_client.session.vector_session import SeedsGiven
from gymnasium.spaces import Box, Discrete

from envhub import errors
from envhub.values import codec, spaces

LOSS = errors.of_hub(errors.HubLost("the hub is gone"), "hub-1")


class Times:
    """In place of deadlines: the first is never over, the others, of pauses, always are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pauses: list[float] = []
        self._begun = False
        monkeypatch.setattr(renewal, "Deadline", self._deadline)

    def _deadline(self, timeout: float) -> Any:
        if self._begun:
            self.pauses.append(timeout)
        left_s, self._begun = (0.0 if self._begun else 1000.0), True
        return SimpleNamespace(timeout=timeout, left_s=lambda: left_s)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    return Times(monkeypatch)


class Makes:
    """Raises these errors, one a try, and then makes the envs."""

    def __init__(self, *failures: errors.EnvHubError) -> None:
        self.failures = list(failures)

    def __call__(self, _: Any) -> str:
        if self.failures:
            raise self.failures.pop(0)
        return "made"


@pytest.mark.parametrize(
    ("error", "losses", "pauses"),
    [
        (errors.HubUnreachable("no"), 0, [0, RETRY_S, RETRY_S, RETRY_S]),
        (errors.RequestRefused("no"), 0, [0, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S]),
        (errors.RequestRefused("no"), 2, [4 * RETRY_S, 8 * RETRY_S, 16 * RETRY_S, PAUSE_S_MAX]),
        (errors.RequestRefused("no"), 2000, [PAUSE_S_MAX] * 4),
    ],
)
def test_pauses_grow_where_a_hub_refuses_and_begin_longer_after_losses(
    times: Times, error: errors.EnvHubError, losses: int, pauses: list[float]
) -> None:
    assert made_again(Makes(*[error] * 3), LOSS, losses, 60.0) == "made" and times.pauses == pytest.approx(pauses)


def test_making_goes_on_after_fewer_deaths_than_are_too_many(times: Times) -> None:
    died = [errors.WorkerDied("died")] * (DEATHS_MAX - 1)
    assert made_again(Makes(*died, errors.RequestRefused("no")), LOSS, 0, 60.0) == "made"


def test_making_ends_with_the_deaths_that_are_too_many(times: Times) -> None:
    with pytest.raises(
        errors.HubLost, match="no hub made its envs again within reconnect_timeout=60 s: died"
    ) as raised:
        made_again(Makes(*[errors.WorkerDied("died")] * DEATHS_MAX), LOSS, 0, 60.0)
    assert raised.value.hub == "hub-1"


def test_making_ends_once_the_envs_are_not_wanted(times: Times) -> None:
    makes = Makes(*[errors.HubUnreachable("no")] * 9)
    with pytest.raises(errors.HubLost):
        made_again(makes, LOSS, 0, 60.0, is_wanted=lambda: len(makes.failures) > 6)
    assert len(makes.failures) == 6


def test_error_that_is_to_be_raised_ends_the_making(times: Times) -> None:
    denied = errors.AccessDenied("no")
    with pytest.raises(errors.AccessDenied):
        made_again(Makes(denied), LOSS, 0, 60.0, raised=(errors.AccessDenied,))


def test_losses_count_in_a_row_of_sessions_that_ended_soon_while_their_hub_served_on() -> None:
    soon: Any = SimpleNamespace(adopted_s=time.monotonic(), losses=3)
    late: Any = SimpleNamespace(adopted_s=time.monotonic() - SETTLED_S, losses=3)
    ended = errors.SessionLost("ended")
    assert [losses_in_a_row(maker, ended) for maker in (soon, late)] == [3, 0] and losses_in_a_row(soon, LOSS) == 0


@pytest.mark.parametrize("other", ["action_space", "observation_spaces", ""])
def test_session_of_other_spaces_is_not_adopted(other: str) -> None:
    values, box, discrete = ValueCodec(allow_pickle=False), Box(0, 1, (2,)), Discrete(3)
    blob = {name: codec.encode(spaces.describe(space)) for name, space in (("box", box), ("discrete", discrete))}
    made: Any = SimpleNamespace(num_envs=3, action_space=blob["discrete"], observation_spaces=[blob["box"]])
    if other:
        setattr(made, other, {"action_space": blob["box"], "observation_spaces": [blob["discrete"]]}[other])
    calls: list[str] = []
    maker: Any = SimpleNamespace(
        description=SimpleNamespace(vector=False, num_envs=3, action_space=discrete, observation_spaces=[box]),
        values=values,
        connection=SimpleNamespace(address="tcp://simbox:5555"),
        latest=None,
        options=SimpleNamespace(reconnect_timeout=5.0),
        sizing=SimpleNamespace(num_workers=1),
        adopted_s=0.0,
        end_all_but=lambda kept: calls.append("ended"),
        open=lambda *_: made,
        adopt=lambda *_: calls.append("adopted"),
    )
    absence = renewal.SessionRenewal(maker, SeedsGiven()).make_again(LOSS)
    assert absence.wait(30)
    if other:
        with pytest.raises(errors.HubLost, match="makes envs of other spaces"):
            absence.parts()
    else:
        absence.parts()
    assert calls == (["ended", "ended"] if other else ["ended", "adopted", "ended"])
