"""A request to several hubs: each gets its part exactly once, wherever an interrupt comes."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
from envhub_client.deadline import no_reply
from envhub_client.federation.joint_request import JointRequest

from envhub.errors import ConnectionInUse, EnvRaised, HubLost, HubTimeout, LocalProtocolError, RequestRefused, of_hub


class Lane:
    """Counts what was begun on it, until its hub is lost."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.loss: HubLost | None = None

    @property
    def progress(self) -> tuple[int, ...]:
        return (len(self.begun),)


class Part:
    """A hub that interrupts when ``interrupts`` says so, and answers as ``answers`` say."""

    def __init__(self, name: str) -> None:
        self.name, self.lane = name, Lane()
        self.connection = SimpleNamespace(address=f"tcp://{name}")
        self.answers: list[Exception] = []


class Script:
    """Interrupts at the given point of those that are passed."""

    def __init__(self, at: int) -> None:
        self.at, self.points = at, itertools.count()

    def point(self) -> None:
        if next(self.points) == self.at:
            raise KeyboardInterrupt


class Scene:
    """Three parts of a request, whose hubs interrupt before and after they have got theirs."""

    def __init__(self, at: int = -1) -> None:
        self.script = Script(at)
        self.parts: list[Any] = [Part("a"), Part("b"), Part("c")]
        self.lost: list[str] = []
        self.recovers = True
        self.dropped: list[str] = []
        self.request: JointRequest[str] = JointRequest(self.on_lost, lambda part: self.dropped.append(part.name))  # type: ignore[attr-defined]

    def on_lost(self, part: Any, loss: HubLost) -> None:
        self.script.point()
        self.lost.append(part.name)
        if not self.recovers:
            raise loss
        part.lane = Lane()
        self.script.point()

    def send(self, part: Any) -> None:
        self.script.point()
        if part.lane.loss is not None:
            raise part.lane.loss
        part.lane.begun.append(part.name)
        self.script.point()

    def wait(self, part: Any, timeout: float | None) -> str:
        self.script.point()
        if part.lane.loss is not None:
            raise part.lane.loss
        if part.answers:
            raise part.answers.pop(0)
        return part.name.upper()

    def begin(self) -> None:
        self.request.begin(self.parts, self.send, self.wait)

    @property
    def counts(self) -> list[int]:
        return [len(part.lane.begun) for part in self.parts]


@pytest.mark.parametrize("had", ["some", "all", "all, by the caller"])
def test_parts_whose_results_do_not_reach_the_caller_are_told(had: str) -> None:
    scene = Scene()
    scene.begin()
    if had == "some":
        scene.parts[1].answers = [RequestRefused("this one had no result")]
    else:
        scene.request.results(None)
    if had == "all, by the caller":
        scene.request.settle()
    scene.request.give_up()
    scene.request.settle()
    assert scene.dropped == {"some": ["a", "c"], "all": ["a", "b", "c"]}.get(had, [])


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(range(14), 2)])
def test_each_part_is_sent_once_though_settling_is_interrupted_too(first: int, second: int) -> None:
    scene = Scene(first)
    with pytest.raises(KeyboardInterrupt):
        scene.begin()
        scene.request.results(None)
        for _ in range(20):  # where it has passed all points
            scene.script.point()
    scene.request.give_up()
    scene.script.at = second
    while True:
        try:
            scene.request.settle()
            break
        except KeyboardInterrupt:
            continue
    assert scene.counts == [1, 1, 1]
    scene.script.at = -1
    scene.begin()
    assert scene.request.results(None) == ["A", "B", "C"] and scene.counts == [2, 2, 2]


@pytest.mark.parametrize(("at", "sent"), [*((at, True) for at in range(12)), *((at, False) for at in range(10))])
def test_part_of_a_lost_hub_is_sent_to_the_next_lane_wherever_an_interrupt_comes(at: int, sent: bool) -> None:
    scene = Scene(at)
    try:
        if sent:
            scene.begin()
        scene.parts[1].lane.loss = HubLost("gone")
        if not sent:
            scene.begin()
        scene.request.results(None)
    except KeyboardInterrupt:
        scene.request.give_up()
        scene.request.settle()
    assert scene.counts == [1, 1, 1] and {*scene.lost} <= {"b"}


@pytest.mark.parametrize("at", range(7, 10))
def test_part_whose_hub_was_lost_by_its_silence_is_not_sent_there_again(at: int) -> None:
    scene = Scene(at)
    send = scene.send

    def send_once(part: Any) -> None:
        if part.lane.begun:
            raise LocalProtocolError("a STEP is pending")
        send(part)

    part = scene.parts[1]
    part.answers.append(HubLost("silent"))
    scene.request.begin(scene.parts, send_once, scene.wait)
    with pytest.raises(KeyboardInterrupt):
        scene.request.results(None)
        for _ in range(20):  # where it has passed all points
            scene.script.point()
    scene.request.give_up()
    scene.request.settle()
    assert scene.counts == [1, 1, 1] and {*scene.lost} == {"b"}
    scene.request.begin(scene.parts[1:2], lambda part: part.lane.begun.append(part.name), scene.wait)
    assert scene.request.results(None) == ["B"]


def test_error_of_the_lowest_part_is_raised_once_all_have_ended() -> None:
    scene = Scene()
    scene.parts[1].answers.append(ValueError("b"))
    scene.parts[2].answers.append(ValueError("c"))
    scene.begin()
    with pytest.raises(ValueError, match="b"):
        scene.request.results(None)
    assert not scene.parts[2].answers
    scene.request.give_up()
    scene.request.settle()
    scene.begin()
    assert scene.request.results(None) == ["A", "B", "C"]


def test_timeout_names_the_callers_seconds_and_the_hubs_that_are_late_and_leaves_the_request_pending() -> None:
    scene = Scene()
    for part in scene.parts[::2]:
        part.answers.append(of_hub(HubTimeout("no reply within the 0.01 s that were left"), part.name))
    scene.begin()
    with pytest.raises(HubTimeout) as caught:
        scene.request.results(5.0)
    assert str(caught.value) == no_reply(["tcp://a", "tcp://c"], 5.0)
    assert caught.value.hub == "a" and caught.value.__cause__ is None
    assert scene.request.results(None) == ["A", "B", "C"] and scene.counts == [1, 1, 1]


def test_all_parts_are_waited_for_within_one_deadline() -> None:
    scene, left_s = Scene(), list[Any]()

    def wait(part: Any, timeout: float | None) -> str:
        left_s.append(timeout)
        while time.monotonic() - begun_s < 0.01 * len(left_s):
            time.sleep(0.001)
        return "done"

    begun_s = time.monotonic()
    scene.request.begin(scene.parts, scene.send, wait)
    scene.request.results(5.0)
    assert 5.0 >= left_s[0] > left_s[1] > left_s[2]


def test_timeout_has_the_loss_of_a_hub_as_its_cause_and_comes_before_errors_of_other_parts() -> None:
    scene, loss = Scene(), HubLost("gone")
    late = HubTimeout("its envs are not made again")
    late.__cause__ = loss
    scene.parts[0].answers.append(EnvRaised(1, "ValueError", "an env's"))
    scene.parts[1].answers.append(HubTimeout("later"))
    scene.parts[2].answers.append(late)
    scene.begin()
    with pytest.raises(HubTimeout) as caught:
        scene.request.results(0.1)
    assert caught.value.__cause__ is loss


def test_end_of_a_hub_is_raised_before_other_hubs_have_answered_and_each_time_until_the_next_request() -> None:
    scene, refused = Scene(), RequestRefused("b refuses this")
    scene.parts[0].answers += [HubTimeout("later"), HubTimeout("later")]
    scene.parts[1].answers.append(refused)
    scene.begin()
    for _ in range(2):
        with pytest.raises(RequestRefused) as caught:
            scene.request.results(0.1)
        assert caught.value is refused
    scene.request.give_up()
    scene.request.settle()  # waits for the first one
    scene.begin()
    assert scene.request.results(None) == ["A", "B", "C"] and scene.counts == [2, 2, 2]


def test_use_in_two_threads_leaves_the_request_pending() -> None:
    scene = Scene()
    scene.parts[1].answers.append(ConnectionInUse("another thread is using this connection"))
    scene.begin()
    with pytest.raises(ConnectionInUse):
        scene.request.results(None)
    assert scene.request.results(None) == ["A", "B", "C"]


def test_part_that_cannot_be_sent_is_not_sent_with_the_next_request() -> None:
    scene = Scene()
    send, refusals = scene.send, [ValueError("too large")]

    def refusing(part: Any) -> None:
        if part.name == "b" and refusals:
            raise refusals[0]
        send(part)

    scene.request.begin(scene.parts, refusing, scene.wait)
    with pytest.raises(ValueError, match="too large"):
        scene.request.results(None)
    assert scene.counts == [1, 0, 1]  # the others have what they would have had
    scene.begin()
    assert scene.request.results(None) == ["A", "B", "C"]


def test_part_that_the_program_itself_cannot_send_now_is_sent_by_a_later_settling() -> None:
    scene, in_use = Scene(), [True]
    send = scene.send

    def by_one_thread(part: Any) -> None:
        if part.name == "b" and in_use[0]:
            raise LocalProtocolError("another thread is using this connection")
        send(part)

    with pytest.raises(LocalProtocolError):
        scene.request.begin(scene.parts, by_one_thread, scene.wait)
    scene.request.give_up()
    with pytest.raises(LocalProtocolError):
        scene.request.settle()
    assert scene.counts == [1, 0, 0]
    in_use[0] = False
    scene.request.settle()
    assert scene.counts == [1, 1, 1]


def test_only_part_of_a_request_is_given_up_at_its_hub_which_is_not_waited_for() -> None:
    scene, given_up = Scene(), list[str]()
    (part,) = scene.parts = scene.parts[:1]
    part.connection.give_up = lambda: given_up.append(part.name)
    part.lane.settle = lambda: False
    part.answers = [AssertionError("it waits")]
    scene.begin()
    scene.request.give_up()
    scene.request.settle()
    assert given_up == scene.dropped == ["a"] and part.answers


def test_parts_that_are_on_no_hub_are_not_waited_for() -> None:
    scene = Scene()
    scene.request = JointRequest(scene.on_lost, lambda part: scene.dropped.append(part.name), lambda part: [])  # type: ignore[arg-type, attr-defined]
    for part in scene.parts:
        part.answers = [AssertionError("it waits")]
    scene.begin()
    scene.request.give_up()
    scene.request.settle()
    assert scene.dropped == ["a", "b", "c"] and all(part.answers for part in scene.parts)


def test_part_whose_result_was_retracted_is_carried_out_by_the_next_lane_before_it_is_dropped() -> None:
    scene = Scene()
    scene.begin()
    scene.request.results(None)
    scene.request.retract(scene.parts[1], HubLost("it lies"))
    scene.request.give_up()
    scene.request.settle()
    assert scene.lost == ["b"] and scene.counts == [1, 1, 1] and scene.dropped == ["a", "b", "c"]
