"""What a wire lane keeps of results until they have reached the caller, and when it asks for more."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from envhub_client.lanes import wire
from envhub_client.lanes.wire import InfoTemplates, WireLane

from envhub.errors import EnvRaised, HubTimeout, RequestRefused, ended_by
from envhub.protocol.client import Reply
from envhub.protocol.messages import Done, Failure, Op
from envhub.values import codec
from envhub.values.info_columns import Rows, Template
from envhub.values.leaf import Leaf


class Hub:
    """A connection that answers each SEND and RECEIVE with the next of ``replies``, once it is waited for."""

    row_offset, in_use = 0, nullcontext()

    def __init__(self) -> None:
        self.protocol = SimpleNamespace(received=[], receives=False, has_room=True, last_seq=0)
        self.replies: list[Reply] = []
        self.asked: list[Any] = []

    def await_room(self) -> None:
        pass

    def send(self, op: Op, message: Any, *_: Any, **__: Any) -> None:
        self.asked.append((op, message.min_envs))
        self.protocol.last_seq += 1
        self.protocol.receives = True

    def await_received(self, timeout: float | None) -> None:
        if not self.replies:
            raise HubTimeout("no reply")
        self.protocol.received = [self.replies.pop(0)._replace(seq=self.protocol.last_seq - len(self.replies))]
        self.protocol.receives = bool(self.replies)

    def fail(self, failure: Failure) -> None:
        if failure.env_index is not None:
            raise EnvRaised(failure.env_index, "ValueError", failure.message)
        raise RequestRefused(failure.message)

    def ask(self, op: Op, request: Any, timeout: float | None) -> Any:
        self.asked.append(request.numbers)
        return SimpleNamespace(
            message=SimpleNamespace(numbers=request.numbers, examples=[codec.encode({"n": 1})] * len(request.numbers))
        )


def received(row: int) -> Reply:
    """The result of a row, which observes its number."""
    return Reply(Op.SEND, Done(), [np.array([row]).tobytes(), np.array([float(row)]).tobytes(), bytes(10)])


EMPTY = Reply(Op.SEND, Done(), [])


def sending(hub: Hub, *parts: Sequence[int]) -> WireLane:
    lane = WireLane(hub, 3, [Leaf("<f8", (1,))], copy=True)  # type: ignore[arg-type]
    for rows in parts:
        lane.begin_rows(np.array(rows), b"c", [np.array(rows)])
    return lane


def test_error_of_an_env_is_raised_until_it_is_taken_and_leaves_the_results_of_others() -> None:
    hub = Hub()
    hub.replies = [received(0), Reply(Op.RECEIVE, Failure("env_raised", "env", "no", 1), [])]
    lane = sending(hub, [0, 1])
    for _ in range(2):
        with pytest.raises(EnvRaised):
            lane.wait_rows(2, 1.0)
    assert hub.asked == [(Op.SEND, 2), (Op.RECEIVE, 1)]
    lane.taken(np.array([1]))
    batch = lane.wait_rows(1, 1.0)
    assert batch.env_ids.tolist() == [0] and batch.observations[0].tolist() == [[0.0]]  # type: ignore[union-attr]


def test_refused_send_is_raised_with_its_envs_which_are_under_way_until_that_was_taken() -> None:
    hub = Hub()
    lane = sending(hub, [0], [1, 2])
    hub.replies = [Reply(Op.SEND, Failure("bad_actions", "request", "they do not fit"), []), received(0)]
    hub.replies.reverse()
    for _ in range(2):
        with pytest.raises(RequestRefused, match=r"envs \[1, 2\], which have not moved: they do not fit") as caught:
            lane.wait_rows(3, 1.0)
        assert ended_by(caught.value) == [1, 2] and lane.outstanding == 3
    lane.taken(np.array([1, 2]))
    assert lane.wait_rows(1, 1.0).env_ids.tolist() == [0]  # type: ignore[union-attr]


def test_hub_is_asked_where_it_waits_for_more_than_is_wanted_or_for_nothing() -> None:
    hub = Hub()
    lane = sending(hub, [0, 1, 2])
    with pytest.raises(HubTimeout):
        lane.wait_rows(3, 0.0)
    with pytest.raises(HubTimeout):
        lane.wait_rows(1, 0.0)
    assert hub.asked == [(Op.SEND, 3), (Op.RECEIVE, 1)]
    hub.replies = [EMPTY, EMPTY, received(2)]
    assert lane.done_rows() == 0 and lane.done_rows() == 0
    assert lane.wait_rows(1, 1.0).env_ids.tolist() == [2]  # type: ignore[union-attr]
    lane.taken(np.array([2]))
    lane.begin_rows(np.array([2]), b"c", [np.array([2])])
    assert hub.asked[2:] == [(Op.SEND, 1)], "as many as were wanted last"


def test_further_results_are_asked_for_where_other_hubs_may_have_too_few() -> None:
    hub = Hub()
    lane = sending(hub, [0, 1, 2])
    hub.replies = [received(0)]
    assert [lane.done_rows() for _ in range(2)] == [1, 1]
    assert hub.asked == [(Op.SEND, 3), (Op.RECEIVE, 1)]


def test_results_that_come_while_further_ones_are_asked_for_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    lane, ask, signalled = sending(hub, [0, 1, 2]), hub.send, [received(0)]

    def ask_and_take_in_what_was_signalled(*request: Any, **kept: Any) -> None:
        ask(*request, **kept)
        hub.replies, signalled[:] = [*signalled], []

    monkeypatch.setattr(hub, "send", ask_and_take_in_what_was_signalled)
    assert lane.done_rows() == 1


def test_envs_that_are_under_way_and_actions_that_the_hub_would_refuse_are_refused_at_once() -> None:
    lane = sending(Hub(), [0])
    with pytest.raises(ValueError, match="under way; receive"):
        lane.begin_rows(np.array([0]), b"c", [np.array([0])])
    with pytest.raises(ValueError, match="another size"):
        lane.begin_rows(np.array([1]), b"c", [np.array([0], np.int8)])


def test_send_that_an_interrupt_has_kept_from_the_hub_leaves_its_envs() -> None:
    hub = Hub()
    lane = sending(hub)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hub, "send", Mock(side_effect=KeyboardInterrupt))
        lane.begin_rows(np.array([0]), b"c", [np.array([0])])
    assert not lane.settle()


def test_forms_of_infos_are_forgotten_beyond_a_limit_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TEMPLATES_MAX", 1)
    hub, nbytes = Hub(), Template({"n": 1}).nbytes
    templates = InfoTemplates(hub)  # type: ignore[arg-type]
    for number in (1, 1, 2, 1):
        templates.read([Rows(number, np.array([0]), np.zeros((1, nbytes), np.uint8))])
    assert hub.asked == [[1], [2], [1]]
