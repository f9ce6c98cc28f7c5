"""What a wire lane keeps of the replies to RECEIVE until their rows have reached the caller."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from envhub_client.lanes import wire
from envhub_client.lanes.wire import InfoTemplates, WireLane

from envhub.errors import EnvRaised
from envhub.protocol.client import Reply
from envhub.protocol.messages import Done, Failure, Op
from envhub.values import codec
from envhub.values.info_columns import Rows, Template
from envhub.values.leaf import Leaf


class Hub:
    """A connection that answers each request with the next of ``replies``."""

    row_offset, in_use = 0, nullcontext()

    def __init__(self) -> None:
        self.protocol = SimpleNamespace(pending=None, answer=None, last_seq=0)
        self.replies: list[Reply] = []
        self.asked: list[Op] = []

    def send(self, op: Op, *_: Any, **__: Any) -> None:
        self.asked.append(op)
        self.protocol.pending, self.protocol.answer = op, None
        self.protocol.last_seq += 1

    def wait(self, timeout: float | None) -> Reply:
        if self.protocol.pending is not None:
            self.protocol.pending, self.protocol.answer = None, self.replies.pop(0)
        reply: Reply = self.protocol.answer
        return reply

    def fail(self, failure: Failure) -> None:
        raise EnvRaised(failure.env_index or 0, "ValueError", failure.message)

    def ask(self, op: Op, request: Any, timeout: float | None) -> Any:
        self.asked.append(request.numbers)
        return SimpleNamespace(
            message=SimpleNamespace(numbers=request.numbers, examples=[codec.encode({"n": 1})] * len(request.numbers))
        )


def received(row: int) -> Reply:
    """The result of a row, which observes its number."""
    return Reply(Op.RECEIVE, Done(), [np.array([row]).tobytes(), np.array([float(row)]).tobytes(), bytes(10)])


def sending(hub: Hub, *rows: int) -> WireLane:
    lane = WireLane(hub, InfoTemplates(hub), 3, [Leaf("<f8", (1,))], copy=True)  # type: ignore[arg-type]
    hub.replies.insert(0, Reply(Op.SEND, Done(), []))
    lane.begin_rows(np.array(rows), b"c", [np.array(rows)])
    lane.confirm_rows(None)
    return lane


def test_error_of_an_env_is_raised_until_it_is_taken_and_leaves_the_results_of_others() -> None:
    hub = Hub()
    hub.replies = [received(0), Reply(Op.RECEIVE, Failure("env_raised", "env", "no", 1), [])]
    lane = sending(hub, 0, 1)
    for _ in range(2):
        with pytest.raises(EnvRaised):
            lane.wait_rows(2, 1.0)
    assert hub.asked == [Op.SEND, Op.RECEIVE, Op.RECEIVE]
    lane.taken(np.array([1]))
    batch = lane.wait_rows(1, 1.0)
    assert batch.env_ids.tolist() == [0] and batch.observations[0].tolist() == [[0.0]]  # type: ignore[union-attr]


@pytest.mark.parametrize("refused", [True, False])
def test_receive_that_a_send_ends_is_kept_unless_no_env_was_under_way(refused: bool) -> None:
    hub = Hub()
    lane = sending(hub, 0)
    ended = Reply(Op.RECEIVE, Failure("refused", "request", "no env is under way"), []) if refused else received(0)
    hub.replies = [Reply(Op.SEND, Done(), [], ended), received(1)]
    lane.begin_rows(np.array([1]), b"c", [np.array([1])])
    found = lane.wait_rows(1, 1.0).env_ids
    assert found is not None and found.tolist() == ([1] if refused else [0])


def test_reply_to_a_receive_of_rows_that_were_taken_meanwhile_is_dropped() -> None:
    hub = Hub()
    lane = sending(hub, 0)
    lane.taken(np.array([0]))  # with the end of a wait for it by an error
    hub.protocol.answer = received(0)
    hub.replies = [Reply(Op.SEND, Done(), []), received(1)]
    lane.begin_rows(np.array([1]), b"c", [np.array([1])])
    assert lane.wait_rows(1, 1.0).env_ids.tolist() == [1]  # type: ignore[union-attr]


def test_forms_of_infos_are_forgotten_beyond_a_limit_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TEMPLATES_MAX", 1)
    hub, nbytes = Hub(), Template({"n": 1}).nbytes
    templates = InfoTemplates(hub)  # type: ignore[arg-type]
    for number in (1, 1, 2, 1):
        templates.read([Rows(number, np.array([0]), np.zeros((1, nbytes), np.uint8))])
    assert hub.asked == [[1], [2], [1]]
