"""The rows of a lost hub are made again in the background, and nothing is left of what fails or is wanted no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from envhub_client.connection.known_hubs import Member
from envhub_client.federation.part import HubPart
from envhub_client.federation.parts_opener import PartsOpener
from envhub_client.federation.remaker import Remaker
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
        self.member = SimpleNamespace(name=name)
        self.connection: Any = self
        self.protocol = SimpleNamespace(silence_s=lambda now_s: 0.0)
        self.asked: list[Any] = []
        self.welcome = SimpleNamespace(capacity=None)

    def ask(self, op: Any, message: Any) -> None:
        self.asked.append(message)


class Opener:
    """Opens no real sessions: ``hub-1`` answers, or is out of reach, or refuses."""

    def __init__(self) -> None:
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

    def hubs(self) -> list[Any]:
        return [self.hub.member, *(other.member for other in self.others)]

    def connect(
        self, members: Sequence[Any], timeout: float, failed: Callable[[errors.EnvHubError], None]
    ) -> list[Any]:
        if not self.answers:
            failed(errors.HubUnreachable("no answer"))
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

    def end_later(self, connections: Sequence[Any], wanted: Any) -> None:
        self.ended_later += connections


def maker(hub: Hub) -> Any:
    sizing = SimpleNamespace(num_workers=1)
    return SimpleNamespace(connection=hub, description=DESCRIPTION, sizing=sizing, adopted_s=0.0, losses=0)


class Scene:
    """The rows 3 to 5 of six, whose hub was lost."""

    def __init__(self) -> None:
        self.opener, self.gone = Opener(), Hub("hub-1")
        self.lost_rows: list[range] = []
        opener, seeds = self.opener, SimpleNamespace(lose=self.lost_rows.append)
        self.remaker = Remaker(opener, DESCRIPTION, seeds, loose=False)  # type: ignore[arg-type]
        self.part = HubPart("hub-1", range(3, 6), maker(self.gone), LANE)

    def lose(self) -> Any:
        return self.remaker.absent_lane(self.part, LOSS, np.zeros(3, bool)).absence


def test_session_that_was_lost_is_ended_before_its_hub_makes_the_rows_again() -> None:
    scene = Scene()
    absence = scene.lose()
    assert absence.wait(10) and scene.opener.ended == [scene.gone] and scene.lost_rows == [range(3, 6)]
    (part,) = absence.parts()
    assert part.rows == range(3) and part.maker is scene.opener.made[0].maker and part.maker.losses == 1


def test_connections_of_a_making_that_failed_are_ended() -> None:
    scene = Scene()
    scene.opener.refuses = True
    absence = scene.lose()
    assert absence.wait(10) and scene.opener.ended == [scene.gone, scene.opener.hub]
    with pytest.raises(errors.HubLost, match="within reconnect_timeout=0 s: no room"):
        absence.parts()


def test_connection_that_an_interrupt_has_left_in_use_keeps_no_rows_from_being_made_again() -> None:
    scene = Scene()
    scene.opener.held = [scene.gone]
    absence = scene.lose()
    assert absence.wait(10) and [part.hub for part in absence.parts()] == ["hub-1"]


def test_hub_that_is_back_makes_its_rows_again_where_no_other_has_room() -> None:
    scene = Scene()
    scene.opener.options.on_hub_loss, scene.opener.others = "redistribute", [Hub("hub-2")]
    absence = scene.lose()
    assert absence.wait(10) and [part.hub for part in absence.parts()] == ["hub-1"]
    assert scene.opener.ended == [*scene.opener.others, scene.gone]


def test_attributes_are_set_again_before_the_rows_are_used() -> None:
    scene = Scene()
    scene.remaker.attributes.remember(SetAttr("level", [b"\x01"] * 6))
    assert scene.lose().wait(10) and [len(message.values) for message in scene.opener.hub.asked] == [3]


@pytest.mark.parametrize("begun", [True, False])
def test_nothing_is_made_and_nobody_waits_once_the_envs_are_closed(begun: bool) -> None:
    scene = Scene()
    scene.opener.answers, scene.opener.options.reconnect_timeout = False, 600.0
    absence = scene.lose()
    assert not begun or not absence.over
    scene.remaker.stop()
    assert absence.wait(0) and scene.opener.ended_later == ([scene.gone] if begun else [])
    with pytest.raises(errors.HubLost):
        absence.parts()
    with pytest.raises(errors.HubLost):
        scene.lose()


@pytest.mark.parametrize("other", ["action_space", "observation_spaces"])
def test_hub_that_makes_envs_of_other_spaces_is_refused(other: str) -> None:
    scene = Scene()
    description = SimpleNamespace(**vars(DESCRIPTION))
    setattr(description, other, {"action_space": Box(0, 1), "observation_spaces": [Discrete(2)]}[other])
    scene.remaker = Remaker(scene.opener, description, SimpleNamespace(lose=id), loose=False)  # type: ignore[arg-type]
    absence = scene.lose()
    assert absence.wait(10)
    with pytest.raises(errors.HubLost, match="the hub hub-1 makes envs of other spaces"):
        absence.parts()


def test_no_session_is_opened_once_all_were_ended() -> None:
    opener = PartsOpener(list, cast(Any, None), SessionOptions(), cast(Any, None))
    opener.end_all(terminate=True)
    with pytest.raises(SessionClosed):
        opener.connect([Member("hub-1", "tcp://127.0.0.1:1")], 1.0)
