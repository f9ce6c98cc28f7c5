"""The rows of a lost part are made again in the background: after which pauses, and what is left of failures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from envhub_client.connection.known_hubs import Member
from envhub_client.federation import opener as openers
from envhub_client.federation import rebuild as rebuilds
from envhub_client.federation.opener import PartsOpener
from envhub_client.federation.part import HubPart
from envhub_client.federation.rebuild import (
    DEATHS_MAX,
    PAUSE_S_MAX,
    RETRY_S,
    SETTLED_S,
    OtherEnvs,
    PartRebuilder,
    Rebuild,
    losses_in_a_row,
    made_again,
)
from envhub_client.federation.session import joint_description
from envhub_client.session.options import SessionOptions
from gymnasium.spaces import Box, Discrete

from envhub import errors
from envhub.protocol.messages import SetAttr
from envhub.values.leaf import Leaf
from envhub.vector_errors import SessionClosed

LOSS = errors.of_hub(errors.HubLost("the hub is gone"), "hub-1")
LANE: Any = SimpleNamespace(num_envs=3, leaves=(Leaf("<f8", (1,)),), name="wire", last_observations=list)
DESCRIPTION: Any = SimpleNamespace(
    num_envs=6, vector=False, action_space=Discrete(2), observation_spaces=[Box(0, 1, (1,))]
)


class Hub:
    """A connection to a hub, which says what it was asked."""

    def __init__(self, name: str) -> None:
        self.member = SimpleNamespace(name=name, address=name)
        self.connection: Any = self
        self.address, self.hub = f"tcp://{name}:5555", name
        self.protocol = SimpleNamespace(silence_s=lambda now_s: 0.0)
        self.asked: list[Any] = []
        self.welcome = SimpleNamespace(capacity=None)

    def ask(self, op: Any, message: Any) -> None:
        self.asked.append(message)


class Opener(PartsOpener):
    """Opens no real sessions: ``hub-1`` answers, or is out of reach, or refuses."""

    is_only_hub = False

    def __init__(self) -> None:
        self.lost_rows: list[range] = []
        self.seeds = SimpleNamespace(lose=self.lost_rows.append)  # type: ignore[assignment]
        self.options: Any = SimpleNamespace(
            faults=SimpleNamespace(restart_wait=1.0),
            num_workers=None,
            reconnect_timeout=0.0,
            on_hub_loss="recreate",
            hub_index=None,
        )
        self.hub = Hub("hub-1")
        self.others: list[Hub] = []  # which have no room
        self.answers, self.refuses = True, False
        self.ended: list[Any] = []
        self.held: list[Any] = []  # by another thread
        self.ended_later: list[Any] = []
        self.made: list[HubPart] = []
        self.stopped = False

    def hubs(self) -> list[Any]:
        return [self.hub.member, *(other.member for other in self.others)]

    def connect(
        self, members: Sequence[Any], timeout: float, failures: list[errors.EnvHubError] | None = None
    ) -> list[Any]:
        if not self.answers and failures is not None:
            failures.append(errors.HubUnreachable("no answer"))
        return [hub for hub in (self.hub, *self.others) if hub.member in members] if self.answers else []

    def parts(self, hubs: Sequence[Any], counts: Sequence[int], *_: Any) -> list[HubPart]:
        assert list(counts) == [3]
        if self.refuses or hubs[0] in self.others:
            raise errors.RequestRefused("no room")
        self.made = [HubPart("hub-1", range(3, 6), maker(self.hub), LANE)]
        return self.made

    def end(self, connections: Sequence[Any]) -> None:
        if any(each in self.held for each in connections):
            raise errors.ConnectionInUse("another thread is using it")
        self.ended += connections

    def end_later(self, gone: Sequence[HubPart]) -> None:
        self.ended_later += [part.connection for part in gone]


def maker(hub: Hub) -> Any:
    sizing = SimpleNamespace(num_workers=1)
    description = SimpleNamespace(**vars(DESCRIPTION))
    return SimpleNamespace(connection=hub, description=description, sizing=sizing, adopted_s=0.0, losses=0)


class Scene:
    """The rows 3 to 5 of six, whose hub was lost."""

    def __init__(self) -> None:
        self.opener, self.gone = Opener(), Hub("hub-1")
        self.rebuilder = PartRebuilder(self.opener, DESCRIPTION)
        self.part = HubPart("hub-1", range(3, 6), maker(self.gone), LANE)

    def lose(self) -> Rebuild:
        return self.rebuilder.rebuild(self.part, [self.part], LOSS)


def test_session_that_was_lost_is_ended_before_its_hub_makes_the_rows_again() -> None:
    scene = Scene()
    rebuild = scene.lose()
    assert rebuild.wait(10) and scene.opener.ended == [scene.gone] and scene.opener.lost_rows == [range(3, 6)]
    (part,) = rebuild.parts()
    assert part.rows == range(3) and part.maker is scene.opener.made[0].maker and part.maker.losses == 1


def test_connection_that_an_interrupt_has_left_in_use_keeps_no_rows_from_being_made_again() -> None:
    scene = Scene()
    scene.opener.held = [scene.gone]
    rebuild = scene.lose()
    assert rebuild.wait(10) and [part.hub for part in rebuild.parts()] == ["hub-1"]


def test_hub_that_is_back_makes_its_rows_again_where_no_other_has_room() -> None:
    scene = Scene()
    scene.opener.options.on_hub_loss, scene.opener.others = "redistribute", [Hub("hub-2")]
    rebuild = scene.lose()
    assert rebuild.wait(10) and [part.hub for part in rebuild.parts()] == ["hub-1"]
    assert scene.opener.ended == [*scene.opener.others, scene.gone]


def test_attributes_are_set_again_before_the_rows_are_used() -> None:
    scene = Scene()
    for name in ("level", "wind", "level"):
        scene.rebuilder.remember(SetAttr(name, [b"\x01"] * 6))
    assert scene.lose().wait(10)
    assert [(each.name, len(each.values)) for each in scene.opener.hub.asked] == [("wind", 3), ("level", 3)]


def test_patience_began_with_the_silence_of_the_hub_and_has_no_end_where_no_other_row_waits() -> None:
    scene = Scene()
    scene.gone.protocol = SimpleNamespace(silence_s=lambda now_s: 0.75)
    assert scene.lose().patience_s <= 0.25
    scene.part = HubPart("hub-1", range(6), maker(scene.gone), LANE)
    assert scene.lose().patience_s == float("inf")


@pytest.mark.parametrize("begun", [True, False])
def test_nothing_is_made_and_nobody_waits_once_the_envs_are_closed(begun: bool) -> None:
    scene = Scene()
    scene.opener.answers, scene.opener.options.reconnect_timeout = False, 600.0
    rebuild = scene.lose()
    assert not begun or not rebuild.over
    scene.rebuilder.stop()
    assert rebuild.wait(0) and scene.opener.ended_later == ([scene.gone] if begun else [])
    with pytest.raises(errors.HubLost):
        rebuild.parts()
    with pytest.raises(errors.HubLost):
        scene.lose()


OTHERS: dict[str, Any] = {"action_space": Box(0, 1), "observation_spaces": [Discrete(2)]}


@pytest.mark.parametrize("other", OTHERS)
def test_hub_that_makes_envs_of_other_spaces_is_refused(other: str) -> None:
    scene = Scene()
    scene.rebuilder._description = cast(Any, SimpleNamespace(**{**vars(DESCRIPTION), other: OTHERS[other]}))
    rebuild = scene.lose()
    assert rebuild.wait(10) and scene.opener.ended == [scene.gone, scene.opener.hub]
    with pytest.raises(errors.HubLost, match="the hub at tcp://hub-1:5555 makes envs of other spaces"):
        rebuild.parts()


def test_vector_env_is_made_again_with_as_many_workers() -> None:
    scene = Scene()
    scene.rebuilder._description = cast(Any, SimpleNamespace(**{**vars(DESCRIPTION), "vector": True}))
    scene.part.maker.sizing = cast(Any, SimpleNamespace(num_workers=2))
    rebuild = scene.lose()
    assert rebuild.wait(10)
    with pytest.raises(errors.HubLost, match="divides the vector env among other workers"):
        rebuild.parts()
    assert scene.rebuilder.workers_of(scene.part) == 2 and Scene().rebuilder.workers_of(scene.part) is None


def test_no_session_is_opened_once_all_were_ended() -> None:
    opener = PartsOpener("tcp://a", cast(Any, None), SessionOptions(), False)
    opener.end_all(terminate=True)
    with pytest.raises(SessionClosed):
        opener.connect([Member("hub-1", "tcp://127.0.0.1:1")], 1.0)


@pytest.mark.parametrize(("is_vector", "counts"), [(False, [2, 1]), (True, [3, 0])])
def test_rows_of_a_vector_env_are_made_again_on_one_hub(is_vector: bool, counts: list[int]) -> None:
    scene, seen = Scene(), list[list[int]]()
    scene.opener.options.on_hub_loss, scene.opener.others = "redistribute", [Hub("hub-2"), Hub("hub-3")]
    scene.part.maker.description.vector = is_vector
    scene.opener.parts = lambda hubs, counts, *_: seen.append(counts) or []  # type: ignore[method-assign, func-returns-value, assignment]
    assert scene.lose().wait(10) and seen == [counts]


class Begun:
    """A maker that begins no real session."""

    def __init__(self, address: str, make: Any, options: SessionOptions) -> None:
        self.options, self.description = options, DESCRIPTION
        self.sizing, self.adopted_s, self.losses = SimpleNamespace(num_workers=1), 0.0, 0

    def begin(self, connection: Any, seeds: Any) -> None:
        self.connection = connection

    def made(self, timeout: float) -> None:
        """It is made."""

    def describe(self, made: None) -> Any:
        return LANE


def test_rows_are_divided_among_hubs_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openers, "SessionMaker", Begun)
    monkeypatch.setattr(openers, "check_agreement", lambda *_: None)
    opener = PartsOpener("tcp://a", cast(Any, lambda rows: rows), SessionOptions(num_workers=1), False)
    ended: list[Any] = []
    opener.end = ended.extend  # type: ignore[method-assign, assignment]
    hubs: list[Any] = [SimpleNamespace(member=Member(name, name), connection=name) for name in ("a", "b", "c")]
    parts = opener.parts(hubs, [2, 0, 3], 4)
    assert [(part.hub, part.rows) for part in parts] == [("a", range(4, 6)), ("c", range(6, 9))] and ended == ["b"]
    assert [part.maker.options.num_workers for part in parts] == [1, 1]  # each hub with envs has a process


@dataclass
class Described:
    """The description of a session on one hub."""

    num_envs: int
    observation_spaces: list[Any]


def test_joint_description_has_the_space_of_each_env_where_some_hub_has_several() -> None:
    one, other = Box(0, 1, (1,)), Box(0, 2, (1,))
    hubs: Any = [Described(2, [one]), Described(2, [one, other])]
    assert joint_description(hubs) == Described(4, [one, one, one, other])
    assert joint_description([hubs[0]] * 2) == Described(4, [one] * 4)


# --- tries and pauses -------------------------------------------------------------------------------------------------


class Times:
    """In place of deadlines: the first is never over, the others, of pauses, always are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pauses: list[float] = []
        self._begun = False
        monkeypatch.setattr(rebuilds, "Deadline", self._deadline)

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

    def __call__(self, _: Any) -> Any:
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
    assert made_again(
        Makes(*[error] * 3), LOSS, losses, 60.0, lambda: True, False
    ) == "made" and times.pauses == pytest.approx(pauses)


def test_making_ends_with_the_deaths_that_are_too_many(times: Times) -> None:
    with pytest.raises(
        errors.HubLost, match="no hub made its envs again within reconnect_timeout=60 s: died"
    ) as raised:
        made_again(Makes(*[errors.WorkerDied("died")] * DEATHS_MAX), LOSS, 0, 60.0, lambda: True, False)
    assert raised.value.hub == "hub-1"


def test_only_hub_ends_the_making_where_it_lets_nobody_in_or_makes_other_envs(times: Times) -> None:
    with pytest.raises(errors.AccessDenied):
        made_again(Makes(errors.AccessDenied("no")), LOSS, 0, 60.0, lambda: True, True)
    with pytest.raises(errors.HubLost, match="the hub is gone; others") as raised:
        made_again(Makes(OtherEnvs("others")), LOSS, 0, 60.0, lambda: True, True)
    assert raised.value.hub == "hub-1"


def test_losses_count_in_a_row_of_sessions_that_ended_soon_while_their_hub_served_on() -> None:
    soon: Any = SimpleNamespace(maker=SimpleNamespace(adopted_s=time.monotonic(), losses=3))
    late: Any = SimpleNamespace(maker=SimpleNamespace(adopted_s=time.monotonic() - SETTLED_S, losses=3))
    ended = errors.SessionLost("ended")
    assert [losses_in_a_row(part, ended) for part in (soon, late)] == [3, 0] and losses_in_a_row(soon, LOSS) == 0


# --- on the only hub --------------------------------------------------------------------------------------------------


def test_only_hub_makes_all_rows_whatever_its_room_and_ends_what_was_lost_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openers, "SessionMaker", Begun)
    scene = Scene()
    scene.opener.is_only_hub, scene.opener.hub.hub = True, "cluster-1"
    scene.opener._make, scene.opener._hubs = cast(Any, lambda rows: rows), "tcp://127.0.0.1:5555"
    scene.opener.seeds.first_seeds = lambda rows: [None] * len(rows)  # type: ignore[assignment, misc]
    scene.opener.options = SessionOptions(on_hub_loss="recreate", reconnect_timeout=0.0)
    scene.opener.parts = partial(PartsOpener.parts, scene.opener)  # type: ignore[method-assign]
    rebuild = scene.lose()
    assert rebuild.wait(10) and [part.hub for part in rebuild.parts()] == ["cluster-1"]  # as it calls itself
    assert scene.opener.ended == [scene.gone]


def test_nothing_is_left_of_a_session_that_cannot_be_made_again() -> None:
    scene = Scene()
    scene.opener.is_only_hub, scene.opener.refuses = True, True
    rebuild = scene.lose()
    assert rebuild.wait(10) and scene.opener.ended == [scene.gone, scene.opener.hub]
    with pytest.raises(errors.HubLost, match="no room"):
        rebuild.parts()


@pytest.mark.parametrize(("wanted", "tries"), [(True, 3), (False, 1)])
def test_lost_session_that_the_program_still_uses_is_ended_once_it_does_not(
    wanted: bool, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openers, "LOOK_S", 0.0)
    opener, tried = Opener(), list[Any]()

    def end(connections: Sequence[Any], **_: Any) -> None:
        tried.extend(connections)
        opener.held = [] if len(tried) == 3 else connections
        Opener.end(opener, connections)

    monkeypatch.setattr(opener, "end", end)
    opener.stopped = not wanted
    PartsOpener.end_later(opener, [HubPart("hub-1", range(3, 6), maker(opener.hub), LANE)])
    assert tried == [opener.hub] * tries and opener.ended == [opener.hub] * wanted
