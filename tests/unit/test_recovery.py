"""What a trainer is told when its only hub is lost again and again: every episode's end once, never two as one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from envhub_client.federation.joint_request import ATTEMPTS_MAX
from envhub_client.federation.lane import FederatedLane
from envhub_client.federation.part import HubPart
from envhub_client.federation.rebuild import Rebuild
from envhub_client.lanes.base import Batch
from test_federation import OneHub

from envhub.errors import AccessDenied, EnvHubError, HubLost, HubTimeout, RemoteProtocolError
from envhub.protocol.messages import Reset
from envhub.values import codec
from envhub.values.leaf import Leaf

ROWS = 3


class Hub(OneHub):
    """A lane whose envs count their steps from ``first``, until it is ``lost``. The first step of a new env is none.

    It shows 7 before it has anything else, and with ``disabled`` before a reset.
    """

    leaves = (Leaf("<i8", ()),)

    def __init__(self, first: int, has_object_leaves: bool = False, disabled: bool = False) -> None:
        super().__init__(first)
        self.has_object_leaves, self.disabled = has_object_leaves, disabled
        self.counts = np.full(ROWS, first)
        self.new = np.full(ROWS, first > 0)
        self.invalid = np.zeros(ROWS, bool)
        self.shows = np.full(ROWS, 7)
        self.returned = np.zeros(ROWS, int)  # what the envs were seen to show last
        self.lost: EnvHubError | None = None
        self.interrupts = 0  # once something was begun

    def _check(self, what: str) -> None:
        self._check_hub()
        self.begun.append(what)

    def breach(self, row: int, what: str) -> None:
        raise RemoteProtocolError(what)

    def begin_reset(self, reset: Reset) -> None:
        self._check("reset")
        rows = np.array(reset.mask or [True] * ROWS)
        self.counts[rows] = self.shows[rows] = 0
        self.new[rows] = self.invalid[:] = False
        self._interrupt()

    def _interrupt(self) -> None:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt

    def begin_step(self, codes: bytes, arrays: object, out_of_band: bytes) -> None:
        self._check("step")
        self._step(np.arange(ROWS))
        self._interrupt()

    def _step(self, rows: np.ndarray) -> None:
        if self.disabled:
            self.invalid = self.new.copy()
            self.counts[rows] += ~self.new[rows]
        else:
            self.counts[rows] += ~self.new[rows]
            self.new[rows] = False
        self.shows[rows] = np.where(self.invalid[rows], self.shows[rows], self.counts[rows])

    def _batch(self, env_ids: np.ndarray, into: Any = None) -> Batch:
        self.returned[env_ids] = self.shows[env_ids]
        told = codec.encode({"invalid_transition": True})
        rows = [
            (row, told if self.invalid[row] else b"")
            for row in env_ids.tolist()
            if self.invalid[row] or self.has_object_leaves
        ]
        if self.has_object_leaves:
            rows = [(row, codec.encode_pair(codec.encode([str(self.shows[row])]), blob)) for row, blob in rows]
        flags = np.zeros(len(env_ids), bool)
        return Batch([self.shows[env_ids]], np.ones(len(env_ids)), flags, flags.copy(), rows, [], env_ids)

    def wait(self, timeout: float | None, into: Any = None) -> Batch:
        self._check_hub()
        batch = self._batch(np.arange(ROWS))._replace(env_ids=None)
        if into is not None:
            into[0][...] = batch.observations[0]
        return batch

    def last_observations(self) -> list[np.ndarray]:
        return [self.returned.copy()]

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: list[np.ndarray]) -> None:
        self._check("send")
        assert len(arrays[0]) == len(env_ids)
        self._step(env_ids)
        self.outstanding_rows[env_ids] = True

    def done_rows(self, min_envs: int = 1) -> int:
        self._check_hub()
        return self.outstanding

    def _check_hub(self) -> None:
        if self.lost is not None:
            raise self.lost


class Hubs:
    """One hub after another, and the lane that outlives them."""

    is_only_hub = True

    def __init__(self, count: int = 9, workers: int | None = None, **options: bool) -> None:
        self.left = [Hub(100 * number, **options) for number in range(count)]
        self.workers = workers
        part = self._part()
        self.lane = FederatedLane([part], options.get("has_object_leaves", False), True, self)  # type: ignore[arg-type]
        self.losses: list[str] = []  # after which another one was made
        self.may_make = threading.Event()
        self.may_make.set()
        self.denied = False
        self.interrupts = 0  # of those that come next

    def _part(self) -> HubPart:
        self.now = self.left.pop(0)
        connection = SimpleNamespace(row_offset=0, address="tcp://here:1", give_up=lambda: None)
        maker: Any = SimpleNamespace(connection=connection)
        return HubPart("hub", range(ROWS), maker, self.now)  # type: ignore[arg-type]

    def rebuild(self, lost: HubPart, gone: Sequence[HubPart], loss: EnvHubError) -> Rebuild:
        return Rebuild(loss, float("inf"), lambda: [self._made(loss)], lambda: None)

    def workers_of(self, part: HubPart) -> int | None:
        return self.workers

    def _made(self, loss: EnvHubError) -> HubPart:
        assert self.may_make.wait(30)
        if self.denied:
            raise AccessDenied("no key")
        if not self.left:
            raise HubLost(f"{loss}, and no other")
        self.losses.append(str(loss))
        part = self._part()
        self.now.interrupts = self.interrupts
        return part

    def lose(self) -> None:
        self.now.lost = HubLost(f"hub {self.now.first} is lost")

    def post(self, out_of_band: bytes = b"") -> None:
        self.lane.settle()
        self.lane.begin_step(b"", [np.zeros(ROWS)], out_of_band)

    def step(self) -> Batch:
        self.post()
        return self.lane.wait(None)

    def reset(self, *mask: bool) -> Batch:
        self.lane.settle()
        self.lane.begin_reset(Reset(mask=list(mask), seeds=[]))
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
    """The rows that are truncated by a loss."""
    assert batch.truncations is not None
    ids = np.arange(ROWS) if batch.env_ids is None else batch.env_ids
    found: list[int] = ids[batch.truncations].tolist()
    return found


def test_truncation_in_a_result_that_was_dropped_is_returned_by_the_next_step() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.lose()
    assert truncated(hubs.step()) == [0, 1, 2]
    hubs.lane.give_up()  # an interrupt has kept it from the caller
    assert truncated(hubs.step()) == [0, 1, 2] and truncated(hubs.step()) == []
    hubs.lane.settle()
    hubs.lane.give_up()  # of another request: the results were returned
    assert truncated(hubs.step()) == [] and len(hubs.losses) == 1


def test_loss_that_a_reset_or_parts_have_told_is_not_told_again() -> None:
    hubs = Hubs()
    hubs.lose()
    hubs.reset()
    hubs.post()
    hubs.lane.give_up()
    assert truncated(hubs.step()) == []
    hubs.lose()
    hubs.send(0, 1, 2)
    assert truncated(hubs.receive(3)) == [0, 1, 2]
    hubs.post()
    hubs.lane.give_up()
    assert truncated(hubs.step()) == [] and len(hubs.left) == 6


@pytest.mark.parametrize("has_object_leaves", [False, True])
def test_env_that_a_masked_reset_found_the_loss_for_steps_and_the_others_are_truncated(has_object_leaves: bool) -> None:
    hubs = Hubs(has_object_leaves=has_object_leaves)
    hubs.reset()
    hubs.step()
    hubs.lose()
    assert seen(hubs.reset(False, True, False)) == [1, 0, 1]
    batch = hubs.step()
    assert truncated(batch) == [0, 2] and seen(batch) == [1, 1, 1]
    batch = hubs.step()
    assert truncated(batch) == [] and seen(batch) == [100, 2, 100]


def test_masked_reset_after_the_truncation_shows_the_last_observations_of_the_others() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.step()
    hubs.lose()
    assert truncated(hubs.step()) == [0, 1, 2]
    for _ in range(2):
        assert seen(hubs.reset(False, True, False)) == [1, 0, 1]
    assert seen(hubs.reset(True, False, False)) == [0, 0, 1]


def test_env_that_waits_for_its_reset_shows_its_last_observation() -> None:
    hubs = Hubs(disabled=True)
    hubs.reset()
    hubs.step()
    hubs.lose()
    assert seen(hubs.step()) == [1, 1, 1]
    assert seen(hubs.step()) == [1, 1, 1]
    assert seen(hubs.reset(True, False, False)) == [0, 1, 1] and seen(hubs.step()) == [1, 1, 1]


def test_envs_of_a_vector_env_step_by_whole_workers_or_are_truncated() -> None:
    hubs = Hubs(workers=2)  # of which one has rows 0 and 2
    hubs.reset()
    hubs.lose()
    hubs.reset(False, True, False)
    assert truncated(hubs.step()) == [0, 2]
    hubs.lose()
    hubs.reset(True, False, False)
    assert truncated(hubs.step()) == [0, 1, 2]


def test_reset_that_no_hub_survives_is_given_up() -> None:
    hubs = Hubs()
    for hub in (hubs.now, *hubs.left):
        hub.lost = HubLost(f"hub {hub.first} is lost")
    with pytest.raises(HubLost, match=f"hub {100 * ATTEMPTS_MAX} is lost"):
        hubs.reset()
    assert hubs.losses[:ATTEMPTS_MAX] == [f"hub {100 * number} is lost" for number in range(ATTEMPTS_MAX)]


@pytest.mark.parametrize("found", ["there", "where it is made again"])
def test_only_hub_that_does_not_let_the_program_in_is_no_loss(found: str) -> None:
    hubs = Hubs()
    hubs.reset()
    if found == "there":
        hubs.now.lost = AccessDenied("no key")
    else:
        hubs.lose()
        hubs.denied = True
    for _ in range(2):
        with pytest.raises(AccessDenied, match="no key"):
            hubs.step()
    hubs.denied, hubs.now.lost = False, None
    assert truncated(hubs.step()) == ([] if found == "there" else [0, 1, 2])


@pytest.mark.parametrize("kind", ["step", "reset", "rows"])
def test_timeout_holds_while_envs_are_made_again_and_the_next_wait_goes_on(kind: str) -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.lose()
    hubs.may_make.clear()
    if kind == "reset":
        hubs.lane.begin_reset(Reset(seeds=[]))
    elif kind == "step":
        hubs.post()
    else:
        hubs.send(0, 1, 2)
        assert truncated(hubs.receive(3)) == [0, 1, 2]  # at once
        hubs.send(0, 1, 2)

    def wait(timeout: float | None) -> Batch:
        return hubs.lane.wait_rows(3, timeout) if kind == "rows" else hubs.lane.wait(timeout)

    for _ in range(2):
        with pytest.raises(
            HubTimeout, match="0 of 3 envs were done" if kind == "rows" else "hub 0 is lost; its envs are"
        ):
            wait(0.01)
    hubs.may_make.set()
    batch = wait(None)
    assert len(hubs.losses) == 1 and seen(batch) == ([100] * 3 if kind == "rows" else [0, 0, 0])
    assert kind != "step" or truncated(batch) == [0, 1, 2]


def test_envs_under_way_by_parts_are_truncated_and_the_others_when_they_are_sent() -> None:
    hubs = Hubs()
    hubs.reset()
    hubs.send(0)
    hubs.send(2)
    hubs.lose()
    part = hubs.receive(1)
    assert part.env_ids is not None and part.env_ids.tolist() == truncated(part) == [0, 2] and seen(part) == [0, 0]
    hubs.send(0, 1)
    with pytest.raises(ValueError, match="under way"):
        hubs.lane.begin_rows(np.array([1]), b"", [np.zeros(1)])
    part = hubs.receive(2)
    assert part.env_ids is not None and part.env_ids.tolist() == [0, 1]
    assert truncated(part) == [1] and seen(part) == [100, 0]
    hubs.send(0, 1, 2)
    part = hubs.receive(3)
    assert truncated(part) == [] and seen(part) == [101, 100, 100]


def test_request_whose_results_break_the_protocol_in_each_session_fails() -> None:
    hubs = Hubs()
    for _ in range(2):  # requests
        hubs.reset()
        for _ in range(ATTEMPTS_MAX - 1):
            hubs.lane.breach(0, "an info that is none")
            hubs.lane.wait(None)
        with pytest.raises(RemoteProtocolError, match="an info that is none"):
            hubs.lane.breach(0, "an info that is none")
        hubs.lane.give_up()
    assert len(hubs.losses) == 2 * (ATTEMPTS_MAX - 1)
