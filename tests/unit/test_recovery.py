"""What a trainer is told when hubs are lost in turn: every episode's end once, and never two episodes as one."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from envhub_client.batch import Batch
from envhub_client.session.absence import Absence
from envhub_client.session.maker import SessionMaker
from envhub_client.session.options import SessionOptions
from envhub_client.session.recovery import ATTEMPTS_MAX, RecoveringLane
from envhub_client.session.renewal import SessionRenewal
from envhub_client.session.vector_session import SeedsGiven

from envhub.errors import HubLost, HubTimeout, RemoteProtocolError
from envhub.protocol.messages import Make, Reset
from envhub.values import codec
from envhub.values.leaf import Leaf

ROWS = 3
LOST = codec.encode({"invalid_transition": True, "env_failure": {"cause": "hub_lost"}})


class Hub:
    """A lane whose envs count their steps from ``first``, until it is ``lost``. It shows 7 before it has anything else.

    If it is no session's first hub, the first step of an env that was not reset is a truncation.
    """

    name = "wire"
    num_envs = ROWS
    leaves = (Leaf("<i8", ()),)

    def __init__(self, first: int) -> None:
        self.counts = np.full(ROWS, first)
        self.untold = np.full(ROWS, first > 0)
        self.shows = np.full(ROWS, 7)
        self.cut = np.zeros(ROWS, bool)
        self.lost = False
        self.posted: list[str] = []
        self.sent = np.zeros(ROWS, bool)
        self.first = first
        self.loose = False  # whether its blobs have observations of no fixed size, too
        self.tries = 0
        self.settled = self.given_up = 0
        self.raises: Exception | None = None  # in the next part
        self.interrupts = 0
        self.late = 0  # how many waits until rows are confirmed time out
        self.returned = np.zeros(ROWS, int)  # what the envs were seen to show last

    def _check(self, what: str) -> None:
        self.tries += 1
        if self.lost:
            raise HubLost(f"hub {self.first} is lost")
        self.posted.append(what)

    def breach(self, row: int, what: str) -> None:
        raise RemoteProtocolError(what)

    def _interrupt(self) -> None:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt

    @property
    def progress(self) -> tuple[int, ...]:
        return (len(self.posted),)

    def confirm_rows(self, timeout: float | None) -> None:
        if self.late and self.sent.any():
            self.late -= 1
            assert timeout is not None and timeout < 60
            raise HubTimeout("not confirmed")

    def give_up(self) -> None:
        self.given_up += 1

    def settle(self) -> bool:
        self.settled += 1
        if self.raises is not None:
            raise self.raises
        return False

    def begin_reset(self, reset: Reset) -> None:
        self._check("reset")
        rows = np.array(reset.mask or [True] * ROWS)
        self.counts[rows] = 0
        self.untold[rows] = self.cut[:] = False
        self.shows[rows] = 0

    def begin_step(self, codes: bytes, arrays: object, out_of_band: bytes) -> None:
        self._check("step")
        self._step(np.arange(ROWS))
        self._interrupt()

    def _step(self, rows: np.ndarray) -> None:
        self.cut[rows] = self.untold[rows]
        self.counts[rows] += ~self.untold[rows]
        self.shows[rows] = np.where(self.untold[rows], self.shows[rows], self.counts[rows])
        self.untold[rows] = False

    def wait(self, timeout: float | None) -> Batch:
        self._check("wait")
        flags = np.zeros(ROWS, bool)
        self.returned = self.shows.copy()
        return Batch([self.shows.copy()], np.ones(ROWS), flags, self.cut.copy(), self._rows(np.arange(ROWS)), [])

    def _rows(self, env_ids: np.ndarray) -> list[tuple[int, bytes]]:
        if self.loose:
            return [(row, codec.encode([b"objects", LOST if self.cut[row] else b""])) for row in env_ids.tolist()]
        return [(row, LOST) for row in env_ids.tolist() if self.cut[row]]

    def last_observations(self) -> list[np.ndarray]:
        return [self.returned.copy()]

    @property
    def are_outstanding(self) -> np.ndarray:
        return self.sent

    @property
    def outstanding(self) -> int:
        return int(self.sent.sum())

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: list[np.ndarray]) -> None:
        self._check("send")
        if self.raises is not None:
            raise self.raises
        assert len(arrays[0]) == len(env_ids)
        self._step(env_ids)
        self.sent[env_ids] = True

    send_rows = begin_rows

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        self._check("recv")
        env_ids = np.flatnonzero(self.sent)
        flags = np.zeros(len(env_ids), bool)
        self.returned[env_ids] = self.shows[env_ids]
        seen = [self.shows[env_ids]]
        return Batch(seen, np.ones(len(env_ids)), flags, self.cut[env_ids], self._rows(env_ids), [], env_ids)

    def taken(self, env_ids: np.ndarray) -> None:
        self.sent[env_ids] = False


class Hubs:
    """One hub after another, and the lane that outlives them."""

    def __init__(self, count: int = 9) -> None:
        self.left = [Hub(100 * number) for number in range(count)]
        self.now = self.left.pop(0)
        self.lane = RecoveringLane(self.now, self)  # type: ignore[arg-type]
        self.losses: list[str] = []  # after which another one was made
        self.may_make = threading.Event()
        self.may_make.set()
        self.interrupts = 0  # of those that come next, once something was begun there

    def make_again(self, loss: HubLost) -> Absence:
        return Absence(loss, math.inf, lambda absence: [self._made(loss)], lambda absence: None)

    def _made(self, loss: HubLost) -> Any:
        assert self.may_make.wait(30)
        if not self.left:
            raise HubLost(f"{loss}, and no other")
        self.losses.append(str(loss))
        self.now = self.left.pop(0)
        self.now.interrupts = self.interrupts
        return self.now

    def post(self) -> None:
        self.lane.settle()
        self.lane.begin_step(b"", [np.zeros(ROWS)], b"")

    def step(self) -> Batch:
        self.post()
        return self.lane.wait(None)

    def reset(self, *mask: bool) -> Batch:
        self.lane.settle()
        self.lane.begin_reset(Reset(mask=list(mask)))
        return self.lane.wait(None)

    def send(self, *env_ids: int) -> None:
        self.lane.settle()
        self.lane.begin_rows(np.array(env_ids), b"", [np.zeros(len(env_ids))])

    def receive(self, min_envs: int) -> Batch:
        part = self.lane.wait_rows(min_envs, None)
        assert part.env_ids is not None
        self.lane.taken(part.env_ids)
        return part


def seen(batch: Batch) -> list[int]:
    found: list[int] = batch.observations[0].tolist()
    return found


def truncated(batch: Batch) -> list[int]:
    """The rows that are truncated."""
    return [row for row, _ in batch.rows]


def test_step_under_way_is_a_truncation_and_the_next_one_is_a_step() -> None:
    hubs = Hubs()
    hubs.reset()
    assert seen(hubs.step()) == [1, 1, 1]
    hubs.post()
    hubs.now.lost = True
    batch = hubs.lane.wait(None)
    assert seen(batch) == [1, 1, 1] and truncated(batch) == [0, 1, 2]
    assert batch.truncations is not None and batch.truncations.all()
    assert seen(hubs.lane.wait(None)) == [1, 1, 1]  # asked again, as after an interrupt
    after = hubs.step()
    assert seen(after) == [101, 101, 101] and truncated(after) == []


def test_loss_whose_truncation_was_dropped_is_told_by_the_next_step() -> None:
    hubs = Hubs()
    hubs.reset()
    assert seen(hubs.step()) == [1, 1, 1]
    hubs.now.lost = True
    assert truncated(hubs.step()) == [0, 1, 2]
    hubs.lane.settle()
    hubs.lane.give_up()  # of another request: the truncation was returned
    assert seen(hubs.step()) == [101, 101, 101]
    hubs.post()
    hubs.now.lost = True
    hubs.lane._wait(lambda lane, left_s: lane.wait(left_s), None)  # and then came an interrupt
    hubs.lane.give_up()
    batch = hubs.step()
    assert truncated(batch) == [0, 1, 2] and seen(batch) == [101, 101, 101]
    assert truncated(hubs.step()) == []


def test_loss_that_a_reset_or_parts_have_told_is_not_told_again() -> None:
    hubs = Hubs()
    hubs.now.lost = True
    hubs.reset()
    hubs.post()
    hubs.lane.give_up()
    assert truncated(hubs.step()) == []
    hubs.now.lost = True
    hubs.send(0, 1, 2)
    assert truncated(hubs.receive(3)) == [0, 1, 2]
    hubs.post()
    hubs.lane.give_up()
    assert truncated(hubs.step()) == [] and len(hubs.left) == 6


def test_call_that_fails_after_parts_were_sent_leaves_the_session() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.post()
    hubs.lane.give_up()
    hubs.now.lost = True
    hubs.send(0)
    assert truncated(hubs.receive(1)) == [0]
    hubs.lane.give_up()
    assert truncated(hubs.step()) == [1, 2] and len(hubs.left) == 7


def test_reset_that_was_dropped_after_a_loss_leaves_the_session() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.now.lost = True
    hubs.lane.begin_reset(Reset(mask=[False, True, False]))
    hubs.lane._wait(lambda lane, left_s: lane.wait(left_s), None)
    hubs.lane.give_up()
    left = len(hubs.left)
    assert truncated(hubs.step()) == [0, 2]
    assert len(hubs.left) == left


def test_loss_that_something_else_found_is_told_by_the_next_step() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.now.lost = True
    hubs.lane.lose(HubLost("lost"))
    assert hubs.now.posted == []
    assert truncated(hubs.step()) == [0, 1, 2]
    assert truncated(hubs.step()) == []


def test_reset_begins_episodes_that_the_loss_is_no_matter_of() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.now.lost = True
    assert seen(hubs.reset()) == [0, 0, 0] and hubs.now.posted == ["reset", "wait"]
    assert truncated(hubs.step()) == []


def test_env_that_a_masked_reset_found_the_loss_for_steps_and_the_others_are_truncated() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.step()
    hubs.now.lost = True
    assert seen(hubs.reset(False, True, False)) == [1, 0, 1]
    batch = hubs.step()
    assert truncated(batch) == [0, 2] and seen(batch) == [1, 1, 1]
    batch = hubs.step()
    assert truncated(batch) == [] and seen(batch) == [101, 2, 101]


def test_masked_reset_after_the_truncation_shows_the_last_observations_of_the_others() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.step()
    hubs.now.lost = True
    assert truncated(hubs.step()) == [0, 1, 2]
    for _ in range(2):
        assert seen(hubs.reset(False, True, False)) == [1, 0, 1]
    assert seen(hubs.reset(True, False, False)) == [0, 0, 1]


def test_reset_that_no_hub_survives_is_given_up() -> None:
    hubs = Hubs()
    for hub in (hubs.now, *hubs.left):
        hub.lost = True
    with pytest.raises(HubLost):
        hubs.reset()
    assert len(hubs.left) == 8 - ATTEMPTS_MAX


def test_two_losses_in_a_row_are_two_truncations() -> None:
    hubs = Hubs()
    hubs.reset()
    for _ in range(2):
        hubs.now.lost = True
        batch = hubs.step()
        assert truncated(batch) == [0, 1, 2] and seen(batch) == [0, 0, 0]


def test_without_another_hub_it_is_raised_and_tried_again() -> None:
    hubs = Hubs(count=1)
    hubs.reset()
    hubs.now.lost = True
    for _ in range(2):
        with pytest.raises(HubLost, match="no other"):
            hubs.step()
    hubs.left.append(Hub(500))
    assert truncated(hubs.step()) == [0, 1, 2]
    assert seen(hubs.step()) == [501, 501, 501]


def test_interrupt_while_envs_are_made_again_loses_no_truncation() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.step()
    hubs.now.lost, hubs.interrupts = True, 1
    with pytest.raises(KeyboardInterrupt):
        hubs.step()
    batch = hubs.lane.wait(None)  # of the step that was begun there, which is not begun once more
    assert truncated(batch) == [0, 1, 2] and seen(batch) == [1, 1, 1]
    assert truncated(hubs.step()) == []


@pytest.mark.parametrize("resets", [False, True])
def test_request_after_one_that_was_given_up_where_it_began_in_another_session_is_begun(resets: bool) -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.step()
    hubs.now.lost, hubs.interrupts = True, 1
    with pytest.raises(KeyboardInterrupt):
        hubs.step()
    hubs.interrupts = 0
    hubs.lane.give_up()
    if resets:
        assert seen(hubs.reset()) == [0, 0, 0]
    else:
        assert truncated(hubs.step()) == [0, 1, 2]
    assert truncated(hubs.step()) == []


def test_rows_that_are_sent_while_others_wait_for_another_session_are_begun_there() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.send(0)
    hubs.now.lost, hubs.left[0].late = True, 1
    with pytest.raises(HubTimeout, match="not confirmed"):
        hubs.lane.wait_rows(1, 60.0)
    hubs.send(2)
    part = hubs.receive(2)
    assert part.env_ids is not None and part.env_ids.tolist() == truncated(part) == [0, 2]


def test_truncation_in_a_result_that_was_dropped_is_returned_by_the_next_step() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.now.lost = True
    assert truncated(hubs.step()) == [0, 1, 2]
    hubs.lane.give_up()  # an interrupt has kept it from the caller
    assert truncated(hubs.step()) == [0, 1, 2] and truncated(hubs.step()) == []


@pytest.mark.parametrize("kind", ["step", "reset", "rows"])
def test_timeout_holds_while_envs_are_made_again_and_the_next_wait_goes_on(kind: str) -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.now.lost = True
    hubs.may_make.clear()
    if kind == "reset":
        hubs.lane.begin_reset(Reset())
    elif kind == "step":
        hubs.post()
    else:
        hubs.send(0, 1, 2)

    def wait(timeout: float | None) -> Batch:
        return hubs.lane.wait_rows(3, timeout) if kind == "rows" else hubs.lane.wait(timeout)

    for _ in range(2):
        with pytest.raises(HubTimeout, match="hub 0 is lost; its envs are not made again yet"):
            wait(0.01)
    hubs.may_make.set()
    batch = wait(None)
    assert len(hubs.losses) == 1
    assert seen(batch) == [0, 0, 0] and (kind == "reset" or truncated(batch) == [0, 1, 2])


def test_envs_under_way_by_parts_are_truncated_and_the_others_when_they_are_sent() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.send(0)
    hubs.send(2)
    hubs.now.lost = True
    part = hubs.receive(1)
    assert part.env_ids.tolist() == truncated(part) == [0, 2] and seen(part) == [0, 0]
    hubs.send(0, 1)
    with pytest.raises(ValueError, match="under way"):
        hubs.send(1)
    part = hubs.receive(2)
    assert part.env_ids.tolist() == [0, 1] and truncated(part) == [1] and seen(part) == [101, 0]
    hubs.send(0, 1, 2)
    part = hubs.receive(3)
    assert truncated(part) == [] and seen(part) == [102, 101, 101]


def test_send_that_finds_the_hub_lost_is_told_by_the_next_receive() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.now.lost = True
    hubs.send(1)
    assert hubs.lane.outstanding == 1
    part = hubs.receive(1)
    assert truncated(part) == [1] and hubs.lane.outstanding == 0


def test_stopped_renewal_makes_no_other_session() -> None:
    renewal = SessionRenewal(SessionMaker(None, Make(1), SessionOptions()), SeedsGiven())
    renewal.stop()
    loss = HubLost("lost")
    with pytest.raises(HubLost) as caught:
        renewal.make_again(loss)
    assert caught.value is loss


def test_what_is_given_up_is_given_up_on_the_lane_that_is_held() -> None:
    hubs = Hubs()
    hubs.post()
    hubs.lane.give_up()
    assert hubs.now.given_up == 1


# --- what is begun, given up and told ---------------------------------------------------------------------------------


def test_lane_is_as_the_one_that_it_holds() -> None:
    hubs = Hubs()
    assert hubs.lane.name == "wire" and hubs.lane.are_outstanding.tolist() == [False] * ROWS
    hubs.send(1)
    assert hubs.lane.are_outstanding.tolist() == [False, True, False] and hubs.lane.settle() is True
    hubs.receive(1)
    assert hubs.lane.settle() is False and hubs.now.settled == 3


def test_loss_that_is_found_while_a_step_that_was_given_up_ends_is_told_by_the_next() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.now.raises = HubLost("while it settled")
    tries = hubs.now.tries
    assert truncated(hubs.step()) == [0, 1, 2] and hubs.losses == ["while it settled"]
    assert len(hubs.left) == 7 and tries == 2


def test_lost_lane_is_not_settled_again() -> None:
    hubs = Hubs()
    hubs.reset()
    first = hubs.now
    first.lost = True
    hubs.lane.begin_step(b"", [np.zeros(ROWS)], b"")
    settled = first.settled
    hubs.lane.settle()
    assert first.settled == settled and truncated(hubs.lane.wait(None)) == [0, 1, 2]


def test_request_whose_results_break_the_protocol_in_each_session_fails() -> None:
    hubs = Hubs()
    for _ in range(2):  # requests
        hubs.post()
        for _ in range(ATTEMPTS_MAX - 1):
            hubs.lane.breach(0, "an info that is none")
            hubs.lane.wait(None)
        with pytest.raises(RemoteProtocolError, match="an info that is none"):
            hubs.lane.breach(0, "an info that is none")
    assert len(hubs.losses) == 2 * (ATTEMPTS_MAX - 1)


def test_last_loss_is_the_one_that_is_raised() -> None:
    hubs = Hubs()
    for hub in (hubs.now, *hubs.left):
        hub.lost = True
    with pytest.raises(HubLost, match=f"hub {100 * ATTEMPTS_MAX} is lost"):
        hubs.reset()
    assert hubs.losses == [f"hub {100 * number} is lost" for number in range(ATTEMPTS_MAX)]


def test_call_that_found_a_loss_is_given_up_and_leaves_the_next_session() -> None:
    for stepped in (False, True):
        hubs = Hubs()
        hubs.reset()
        if stepped:
            hubs.post()
            hubs.lane.give_up()
        else:
            hubs = Hubs()  # nothing was ever begun
        hubs.now.lost = True
        hubs.lane.lose(HubLost("lost"))
        hubs.lane.give_up()
        assert truncated(hubs.step()) == [0, 1, 2] and len(hubs.left) == 7


def test_step_that_is_given_up_on_a_lost_hub_is_told_of_that_loss() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.now.lost = True
    hubs.post()
    hubs.lane._wait(lambda lane, left_s: lane.wait(left_s), None)  # and then came an interrupt
    hubs.now.lost = True
    hubs.lane.begin_step(b"", [np.zeros(ROWS)], b"")
    hubs.lane.give_up()
    assert truncated(hubs.step()) == [0, 1, 2]
    assert hubs.losses == ["hub 0 is lost", "hub 100 is lost"]


def test_reset_and_parts_after_a_step_that_nobody_waits_for_leave_the_session_when_given_up() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.post()
    hubs.now.lost = True
    hubs.lane.begin_reset(Reset(mask=[False, True, False]))
    hubs.lane._wait(lambda lane, left_s: lane.wait(left_s), None)
    hubs.lane.give_up()
    assert truncated(hubs.step()) == [0, 2] and len(hubs.left) == 7
    hubs.post()
    hubs.now.lost = True
    hubs.send(0)
    assert truncated(hubs.receive(1)) == [0]
    hubs.lane.give_up()
    assert truncated(hubs.step()) == [1, 2] and len(hubs.left) == 6


def test_masked_reset_tells_nothing_of_the_envs_that_it_leaves_out() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.now.lost = True
    hubs.reset(False, True, False)
    hubs.post()
    hubs.lane._wait(lambda lane, left_s: lane.wait(left_s), None)  # and then came an interrupt
    hubs.lane.give_up()
    assert {0, 2} <= {*truncated(hubs.step())}


def test_parts_with_several_numbers_an_action_are_begun_again_with_all_of_them() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.lane.begin_rows(np.array([0, 2]), b"", [np.zeros((2, 5))])
    hubs.now.lost = True
    assert truncated(hubs.receive(2)) == [0, 2]


def test_parts_that_could_not_be_begun_are_not_under_way() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.now.raises = ValueError("no such actions")
    with pytest.raises(ValueError, match="no such actions"):
        hubs.lane.begin_rows(np.array([0, 1]), b"", [np.zeros(2)])
    assert hubs.lane.outstanding == 0


def test_truncation_is_known_by_an_info_that_came_with_observations_of_no_fixed_size() -> None:
    hubs = Hubs()
    for hub in (hubs.now, *hubs.left):
        hub.loose = True
    hubs.reset()
    assert seen(hubs.step()) == [1, 1, 1]
    hubs.now.lost = True
    assert seen(hubs.reset(False, True, False)) == [1, 0, 1]
    assert seen(hubs.step()) == [1, 1, 1]  # a truncation, a step, a truncation
    assert seen(hubs.step()) == [101, 2, 101]
