"""The division of a vector env's rows among hubs, and of requests for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise, repeat
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from chaos.interrupts import Interrupt, Places
from envhub_client.federation.lane import FederatedLane
from envhub_client.federation.lost_part import LostPart, LostRows
from envhub_client.federation.opener import (
    check_agreement,
    check_distinct,
    checked_split,
    divided,
    placed,
    processes_of,
)
from envhub_client.federation.part import SILENCE_S_MIN, HubPart, call_of, out_of_band_of, reset_of, set_attr_of
from envhub_client.federation.rebuild import Rebuild
from envhub_client.lanes.base import Batch
from envhub_client.session.options import SessionOptions
from gymnasium.spaces import Box, Discrete
from hypothesis import example, given
from hypothesis import strategies as st

from envhub.errors import (
    AddressError,
    EnvHubError,
    EnvRaised,
    HubLost,
    HubTimeout,
    RequestRefused,
    RestartsExhausted,
    ended_by,
)
from envhub.protocol.messages import Call, Capacity, Reset, SetAttr, pack_rows, unpack_rows
from envhub.values import codec
from envhub.values.leaf import Leaf

# --- placement --------------------------------------------------------------------------------------------------------


def room(cpus: Any, cpus_free: Any, envs_free: int | None) -> Capacity:
    return Capacity(cpus, cpus_free, envs_free, None)


cpus = st.integers(0, 12).map(float)
rooms = st.lists(st.builds(room, cpus, cpus, st.none() | st.integers(0, 12)), min_size=1, max_size=6)


@given(st.integers(1, 40), rooms)
def test_all_envs_are_placed_within_the_limits(num_envs: int, hubs: list[Capacity]) -> None:
    most = [num_envs if hub.envs_free is None else hub.envs_free for hub in hubs]
    if sum(min(num_envs, each) for each in most) < num_envs:
        with pytest.raises(ValueError, match=f"{num_envs} envs are wanted"):
            placed(num_envs, hubs)
        return
    counts = placed(num_envs, hubs)
    assert sum(counts) == num_envs
    assert all(0 <= count <= limit for count, limit in zip(counts, most, strict=True))


@given(st.integers(1, 40), st.lists(cpus, min_size=1, max_size=6))
@example(3, [0.0, 0.0])
def test_envs_are_on_as_few_hubs_as_have_free_cpus(num_envs: int, free: list[float]) -> None:
    counts = placed(num_envs, [room(16.0, each, None) for each in free])
    used = sum(map(bool, counts))
    sums = [*accumulate(sorted(free, reverse=True))]
    if sums[-1] >= num_envs:
        assert used == 1 + sum(total < num_envs for total in sums)
    elif any(free):  # on all that have any, as far as there are envs
        assert used == min(num_envs, sum(map(bool, free)))
        assert all(each or not count for each, count in zip(free, counts, strict=True))
    else:
        assert used == min(num_envs, len(free))


def test_envs_are_divided_by_free_cpus() -> None:
    assert placed(8, [room(4, 4, None), room(16, 12, None)]) == [0, 8]
    assert placed(16, [room(4, 4, None), room(16, 12, None)]) == [4, 12]
    assert placed(32, [room(4, 4, None), room(16, 12, None)]) == [8, 24]
    assert placed(6, [room(4, 0, None), room(8, 0, None)]) == [2, 4]
    assert placed(6, [room(4, 4, 1), room(8, 2, None)]) == [1, 5]


@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_processes_are_divided_by_envs(data: st.DataObject, counts: list[int]) -> None:
    number = data.draw(st.integers(len(counts), sum(counts)))
    processes = divided(number, counts, counts)
    assert sum(processes) == number
    assert all(1 <= each <= count for each, count in zip(processes, counts, strict=True))


@given(st.lists(st.integers(-1, 5), max_size=4), st.integers(1, 12), st.integers(1, 4))
def test_split_is_taken_as_given_or_refused(split: list[int], num_envs: int, hubs: int) -> None:
    if len(split) == hubs and min(split) >= 0 and sum(split) == num_envs:
        assert checked_split(split, num_envs, hubs) == split
        assert checked_split(np.array(split), num_envs, hubs) == split  # type: ignore[arg-type]
    else:
        with pytest.raises(ValueError, match="split="):
            checked_split(split, num_envs, hubs)


@pytest.mark.parametrize("split", ["22", [2.0, 2.0], 4])
def test_split_that_is_no_list_of_numbers_is_refused(split: Any) -> None:
    with pytest.raises(TypeError, match="must be a list"):
        checked_split(split, 4, 2)


# --- slices -----------------------------------------------------------------------------------------------------------


@st.composite
def parts_of_rows(draw: st.DrawFn) -> list[range]:
    ends = [0, *accumulate(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))]
    return [range(*pair) for pair in pairwise(ends)]


@given(st.data(), parts_of_rows())
def test_reset_has_each_rows_seed_mask_and_options(data: st.DataObject, parts: list[range]) -> None:
    count = parts[-1].stop
    seeds = data.draw(st.lists(st.none() | st.integers(0, 99), min_size=count, max_size=count) | st.just([]))
    mask = data.draw(st.lists(st.booleans(), min_size=count, max_size=count) | st.just([]))
    each = data.draw(st.lists(st.binary(max_size=2), min_size=count, max_size=count) | st.just([]))
    reset = Reset(seeds, mask, b"all", each)
    for rows in parts:
        own = reset_of(reset, rows)
        wanted = [row for row in rows if not mask or mask[row]]
        if own is None:
            assert not wanted
            continue
        assert [rows[row] for row in range(len(rows)) if not own.mask or own.mask[row]] == wanted
        assert own.mask == [] or not all(own.mask)  # else it is a reset of all rows there
        assert own.seeds == ([seeds[row] for row in rows] if seeds else [])
        assert own.options_each == ([each[row] for row in rows] if each else [])
        assert own.options == b"all"


@given(st.data(), parts_of_rows())
def test_calls_and_attributes_go_to_the_hubs_of_their_rows(data: st.DataObject, parts: list[range]) -> None:
    count = parts[-1].stop
    named = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    values = [b"%d" % row for row in named or range(count)] if data.draw(st.booleans()) else [b"one"]
    called, given_values = [], {}
    for rows in parts:
        call = call_of(Call("name", b"", rows=named), rows)
        if call is not None:
            called += [rows[row] for row in (call.rows or range(len(rows)))]
        message = set_attr_of(SetAttr("name", values, named), rows, count)
        if message is not None:
            own = message.rows or range(len(rows))
            each = message.values * len(own) if len(message.values) == 1 else message.values
            given_values.update({rows[row]: value for row, value in zip(own, each, strict=True)})
    wanted = named or [*range(count)]
    assert called == wanted
    assert given_values == {row: b"one" if values == [b"one"] else b"%d" % row for row in wanted}


@given(st.data(), parts_of_rows())
def test_actions_out_of_band_go_to_the_hubs_of_their_rows(data: st.DataObject, parts: list[range]) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, parts[-1].stop - 1))))
    packed = pack_rows((row, b"action %d" % row) for row in rows)
    found = []
    for part, own in zip(parts, out_of_band_of(packed, parts), strict=True):
        found += [(part[row], bytes(blob)) for row, blob in unpack_rows(own, len(part))]
    assert found == [(row, b"action %d" % row) for row in rows]


def test_no_more_processes_host_envs_than_there_are() -> None:
    assert processes_of(9, [2, 1]) == [2, 1] and processes_of("auto", [2, 1]) == ["auto"] * 2


@pytest.mark.parametrize(("mode", "agrees"), [("same", False), ("different", True)])
def test_hubs_agree_on_bounds_of_observations_only_where_these_are_the_same(mode: Any, agrees: bool) -> None:
    first, second = (described(observation_spaces=[Box(0, high, (1,))]) for high in (1, 2))
    hubs: Any = [(SimpleNamespace(address="tcp://hub-1"), first), (SimpleNamespace(address="tcp://hub-2"), second)]
    with nullcontext() if agrees else pytest.raises(RequestRefused, match="tcp://hub-1 and tcp://hub-2 cannot share"):
        check_agreement(hubs, SessionOptions(observation_mode=mode))


def described(**changes: Any) -> Any:
    found = {"observation_spaces": [Box(0, 1, (1,))], "action_space": Discrete(2), "render_mode": None, "metadata": {}}
    return SimpleNamespace(**{**found, "vector": False, **changes})


def test_hubs_that_do_not_agree_whether_envs_are_vector_envs_are_refused() -> None:
    hubs: Any = [(SimpleNamespace(address="tcp://hub"), described(vector=vector)) for vector in (False, True)]
    with pytest.raises(RequestRefused, match="their kinds of envs differ"):
        check_agreement(hubs, SessionOptions())


def test_hubs_that_do_not_say_which_they_are_may_be_different_ones() -> None:
    hubs: Any = {SimpleHub(0): "hub-1", SimpleHub(0): "hub-2"}
    check_distinct(hubs)
    with pytest.raises(AddressError, match="the same hub is named twice, as 'hub-1' and as 'hub-2'"):
        check_distinct(cast(Any, {SimpleHub(7): "hub-1", SimpleHub(7): "hub-2"}))


class SimpleHub:
    """A connection to the hub of this number."""

    def __init__(self, hub_id: int) -> None:
        self.protocol = SimpleNamespace(hub_id=hub_id)


# --- rows whose hub was lost ------------------------------------------------------------------------------------------

LOSS = HubLost("the hub is gone")
LOSS.hub = "hub-1"


class Rebuilt:
    """The making of rows that are on a hub again once ``over`` is set."""

    def __init__(self, patience_s: float, *hubs: OneHub) -> None:
        self.loss, self.patience_s, self.over = LOSS, patience_s, False
        self.hubs = hubs

    @property
    def made(self) -> list[HubPart]:
        maker: Any = SimpleNamespace(connection=SimpleNamespace(row_offset=4))
        rows = (range(3 * number, 3 * number + 3) for number in range(len(self.hubs)))
        return [HubPart("hub-9", *each) for each in zip(rows, repeat(maker), self.hubs)] if self.over else []  # type: ignore[arg-type]

    def wait(self, timeout: float | None) -> bool:
        assert self.over or timeout is not None, "it waits for ever"
        return self.over

    def parts(self) -> list[HubPart]:
        return self.made


class OneHub:
    """A lane of three rows that counts what was begun on it."""

    num_envs, name = 3, "wire"
    leaves = (Leaf("<f8", (1,)),)

    def __init__(self, first: float) -> None:
        self.first, self.begun, self.outstanding_rows = first, list[str](), np.zeros(3, bool)
        self.taken_rows: list[int] = []

    def last_observations(self) -> list[np.ndarray]:
        return [np.arange(3.0).reshape(3, 1) + self.first]

    @property
    def are_outstanding(self) -> np.ndarray:
        return self.outstanding_rows

    @property
    def outstanding(self) -> int:
        return int(self.outstanding_rows.sum())

    @property
    def progress(self) -> tuple[int, ...]:
        return (len(self.begun),)

    def settle(self) -> bool:
        return bool(self.outstanding)

    def _begin(self, what: str) -> None:
        self.begun.append(what)

    def begin_reset(self, reset: Reset) -> None:
        assert not self.outstanding, "the hub refuses this"
        self._begin("reset")

    def begin_step(self, codes: bytes, arrays: Any, out_of_band: bytes) -> None:
        self._begin(f"step {arrays[0].tolist()}")

    def begin_rows(self, env_ids: np.ndarray, codes: bytes, arrays: Any) -> None:
        assert not self.outstanding_rows[env_ids].any()
        self.outstanding_rows[env_ids] = True
        self._begin(f"rows {env_ids.tolist()} {arrays[0].tolist()}")

    def done_rows(self, min_envs: int = 1) -> int:
        return self.outstanding

    def _batch(self, rows: np.ndarray, into: Any = None) -> Batch:
        observations = [leaf[rows] for leaf in self.last_observations()]
        if into is not None:
            into[0][...] = observations[0]
        none = np.zeros(len(rows), bool)
        return Batch(into or observations, np.ones(len(rows)), none, none.copy(), [], [], rows)

    def wait(self, timeout: float | None, into: Any = None) -> Batch:
        return self._batch(np.arange(3), into)._replace(env_ids=None)

    def wait_rows(self, min_envs: int, timeout: float | None) -> Batch:
        return self._batch(np.flatnonzero(self.outstanding_rows))

    def taken(self, env_ids: np.ndarray) -> None:
        assert env_ids.size, "a lane may drop what it has read"
        self.taken_rows += env_ids.tolist()
        self.outstanding_rows[env_ids] = False


class RaisesOnce(OneHub):
    """A lane whose first wait raises."""

    def __init__(self, first: float, error: BaseException) -> None:
        super().__init__(first)
        self.errors = [error]

    def wait(self, timeout: float | None, into: Any = None) -> Batch:
        if self.errors:
            raise self.errors.pop()
        return super().wait(timeout, into)


class Slow(OneHub):
    """A lane whose rows are not done when it is asked first."""

    asked = 0

    def done_rows(self, min_envs: int = 1) -> int:
        self.asked += 1
        return 0 if self.asked == 1 else super().done_rows(min_envs)


class Raising(OneHub):
    """A lane whose row 0, env 4, raises when its results are asked for, while the others are still under way."""

    def done_rows(self, min_envs: int = 1) -> int:
        if self.outstanding_rows[0]:
            raise ValueError("row 0 raised") from EnvRaised(4, "ValueError", "row 0 raised", "", 0, "")
        return self.outstanding


RECOVERY = SimpleNamespace(patience_s=0.0, is_only_hub=False)


def lane_of(*hubs: Any, has_object_leaves: bool = False, copy: bool = True, recovery: Any = None) -> FederatedLane:
    """The lane of these hubs, with three rows each."""
    maker: Any = SimpleNamespace(connection=SimpleNamespace(check=lambda: None, address="tcp://hub"))
    parts = [HubPart(f"hub-{n}", range(3 * n, 3 * n + 3), maker, hub) for n, hub in enumerate(hubs)]
    return FederatedLane(parts, has_object_leaves, copy, recovery)


ACTIONS = np.array([7, 8, 9])


class Lost:
    """Three rows whose hub was lost, and the lane of the hub that has them again."""

    def __init__(self, patience_s: float = 0.0, hub: type[OneHub] = OneHub, has_object_leaves: bool = False) -> None:
        self.hub = hub(100.0)
        self.rebuild = Rebuilt(patience_s, self.hub)
        lane: Any = OneHub(10.0)
        self.lane = LostPart(lane, lane.are_outstanding, has_object_leaves, self.rebuild, lambda _: self.hub)  # type: ignore[arg-type, return-value]

    def step(self, timeout: float | None = None) -> Batch:
        self.lane.begin_step(b"c", [ACTIONS], b"")
        return self.lane.wait(timeout)

    def reset(self, mask: list[bool] | None = None, timeout: float | None = None) -> Batch:
        self.lane.begin_reset(Reset([], mask or []))
        return self.lane.wait(timeout)


def truncated(batch: Batch) -> list[int]:
    """The rows that this batch truncates by the loss."""
    assert batch.truncations is not None and batch.rewards is not None
    rows = range(3) if batch.env_ids is None else batch.env_ids.tolist()
    told = [row for row, flag in zip(rows, batch.truncations, strict=True) if flag]
    assert [row for row, _ in batch.rows] == told
    for _, blob in batch.rows:
        (failure,) = (value for key, value in codec.decode_leniently(blob)[0].items() if key == "env_failure")
        assert "hub_lost" in str(failure) and "hub-1" in str(failure)
    return told


def test_step_waits_for_the_rows_where_no_other_hub_serves() -> None:
    lost, serving = Lost(patience_s=0.0), [False]
    lost.lane.others_serve = lambda: serving[0]
    assert truncated(lost.step()) == [0, 1, 2]
    with pytest.raises(HubTimeout):
        lost.step(timeout=0.0)
    serving[0] = True  # another hub is back, and its rows wait no longer
    assert truncated(lost.lane.wait(0.0)) == [0, 1, 2]


def test_hub_whose_rows_could_not_be_made_again_does_not_serve() -> None:
    lost, lane = Lost(), lane_of(OneHub(0.0), OneHub(0.0), recovery=Rebuilder())
    parts = [*lane.parts]
    for part in parts:
        lane.lost(part, LOSS)
    absent = cast(Any, parts[0].lane)
    absent.rebuild.over = True  # it has failed: no hub has its rows
    assert not absent.others_serve()
    absent.rebuild.hubs = [lost.hub]
    assert absent.others_serve()


def test_rows_that_were_reset_since_the_loss_step_and_the_others_are_truncated() -> None:
    lost = Lost()
    lost.rebuild.over = True
    lost.reset([True, False, False])
    batch = lost.step()
    assert batch.env_ids is None and truncated(batch) == [1, 2]
    assert batch.observations[0].ravel().tolist() == [100.0, 11.0, 12.0]
    assert lost.hub.begun == ["reset", "rows [0] [7]"]
    assert lost.lane.outstanding == 0 and not lost.lane.rows.are_settled
    assert truncated(lost.lane.wait(None)) == [1, 2]  # the same again
    assert lost.lane.rows.no_new_observation.tolist() == [False, True, True]
    assert lost.lane.last_observations()[0].ravel().tolist() == [100.0, 11.0, 12.0]
    assert truncated(lost.step()) == [] and lost.lane.rows.are_settled


def test_actions_out_of_band_truncate_rows_that_were_reset_too_which_step_then() -> None:
    lost = Lost()
    lost.rebuild.over = True
    lost.reset([True, False, False])
    lost.lane.begin_step(b"c", [ACTIONS], b"packed")
    batch = lost.lane.wait(None)
    assert truncated(batch) == [0, 1, 2] and lost.hub.begun == ["reset"]
    assert batch.observations[0].ravel().tolist() == [100.0, 11.0, 12.0]
    assert truncated(lost.step()) == [] and lost.hub.begun == ["reset", "step [7, 8, 9]"]


def test_env_that_raises_among_rows_that_are_truncated_leaves_no_other_under_way() -> None:
    lost = Lost(hub=Raising)
    lost.rebuild.over = True
    lost.reset([True, True, False])
    for _ in range(2):
        with pytest.raises(ValueError, match="row 0 raised"):
            lost.step()
        with pytest.raises(ValueError, match="row 0 raised"):
            lost.lane.wait(None)  # the same again
        assert lost.lane.outstanding == lost.hub.outstanding == 0
        assert lost.lane.rows.truncation_pending.tolist() == [False, False, True]  # whose truncation was in no result
    lost.reset()
    assert truncated(lost.step()) == [] and lost.lane.rows.are_settled


def test_wait_for_rows_that_are_made_again_names_their_hub() -> None:
    lost = Lost(hub=Slow)
    lost.rebuild.over = True
    lost.reset([True, True, False])
    with pytest.raises(
        HubTimeout, match=r"not all envs that are made again on hub-9 are done yet: wait again"
    ) as caught:
        lost.step(timeout=0.0)
    assert caught.value.hub == "hub-9"
    assert truncated(lost.lane.wait(1.0)) == [2]


def test_hub_is_told_only_of_its_own_rows_that_reached_the_caller() -> None:
    lost = Lost()
    lost.lane.begin_rows(np.array([0]), b"c", [ACTIONS[[0]]])
    lost.lane.taken(np.array([0]))
    lost.rebuild.over = True
    lost.lane.begin_rows(np.array([0, 2]), b"c", [ACTIONS[[0, 2]]])
    lost.lane.done_rows()
    lost.lane.taken(np.array([2]))  # the hub's lane may have read a part of the result of row 0, and drop it
    assert lost.hub.begun == ["rows [0] [7]"] and lost.hub.taken_rows == []
    lost.lane.taken(np.array([0]))
    assert lost.hub.taken_rows == [0]


def test_lane_of_lost_rows_has_the_name_of_a_lane() -> None:
    lost = Lost()
    lane = lane_of(lost.lane)
    assert lane.name == "wire"
    lost.rebuild.over, lost.hub.name = True, "shared"
    assert lane.name == "shared"


def test_row_that_raises_is_outstanding_until_its_error_has_reached_the_caller() -> None:
    lost = Lost(hub=Raising)
    lane = lane_of(lost.lane, recovery=RECOVERY)
    lane.begin_rows(np.arange(3), b"c", [ACTIONS])
    lane.taken(lane.wait_rows(3, 0).env_ids)  # type: ignore[arg-type]
    lost.rebuild.over = True
    lane.begin_rows(np.arange(2), b"c", [ACTIONS[:2]])
    for _ in range(2):
        with pytest.raises(ValueError, match="row 0 raised"):
            lane.wait_rows(2, 0)
    lane.taken(np.array([0]))
    assert lane.are_outstanding.tolist() == [False, True, False]
    assert lane.wait_rows(1, 0).env_ids.tolist() == [1]  # type: ignore[union-attr]


def test_observation_of_rows_that_were_not_returned_is_not_their_last() -> None:
    lost = Lost()
    assert truncated(lost.step()) == [0, 1, 2]
    lost.rebuild.over = True
    lost.lane.begin_rows(np.array([0]), b"c", [ACTIONS[[0]]])
    lost.lane.done_rows()
    assert lost.lane.wait_rows(1, 0).observations[0].ravel().tolist() == [100.0]
    assert lost.lane.last_observations()[0].ravel().tolist() == [10.0, 11.0, 12.0]
    lost.lane.taken(np.array([0]))
    assert lost.lane.last_observations()[0].ravel().tolist() == [100.0, 11.0, 12.0]


class Failing(OneHub):
    """A lane whose session ends by this error once its rows are waited for."""

    error: EnvHubError

    def done_rows(self, min_envs: int = 1) -> int:
        self.error.env_ids = np.flatnonzero(self.outstanding_rows).tolist()
        raise self.error


@pytest.mark.parametrize("error", [LOSS, RestartsExhausted("it died again")])
def test_end_of_a_session_is_the_result_of_its_rows_in_the_whole_batch(error: EnvHubError) -> None:
    ended = Failing(0.0)
    ended.error = error
    lane = lane_of(OneHub(0.0), ended)
    lane.begin_rows(np.array([0, 4, 5]), b"c", [ACTIONS])
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            lane.wait_rows(3, 1)
        assert ended_by(caught.value) == [4, 5] and lane.outstanding == 3
    lane.taken(np.array(ended_by(caught.value)))
    assert lane.wait_rows(1, 1).env_ids.tolist() == [0]  # type: ignore[union-attr]


@pytest.mark.parametrize("patience_s", [0.0, 10.0], ids=["between two steps", "in a step"])
def test_step_raises_that_envs_were_not_made_again_before_other_hubs_step(patience_s: float) -> None:
    failing = threading.Event()

    def remake() -> list[Any]:
        assert failing.wait(10)
        raise LOSS

    lost, other = Lost(), OneHub(0.0)
    lost.lane.rebuild = rebuild = Rebuild(LOSS, patience_s, remake, lambda: None)
    lost.lane._lane_of = lambda _: lost.hub  # type: ignore[assignment, return-value]
    lane = lane_of(other, lost.lane, recovery=RECOVERY)
    lane._has_lost = True

    def step() -> Batch:
        lane.begin_step(b"c", [np.arange(6)], b"")
        return lane.wait(10)

    step()  # which truncates the rows
    if patience_s:
        lane.begin_step(b"c", [np.arange(6)], b"")
        failing.set()
        batch = lane.wait(10)
    else:
        batch = step()
        failing.set()
        rebuild.join()
    assert batch.truncations is not None and batch.truncations.tolist() == [False] * 3 + [True] * 3
    with pytest.raises(HubLost, match="the hub is gone"):
        step()
    assert other.begun == ["step [0, 1, 2]"] * 2
    failing.clear()
    lost.lane.begin_reset(Reset([]))  # looks at the rows, and so their making begins again
    with pytest.raises(HubTimeout):
        lost.lane.wait(0.0)
    failing.set()
    rebuild.join()


class Rebuilder:
    """Counts the rows of the hubs that are lost."""

    patience_s, is_only_hub = 0.0, False

    def __init__(self) -> None:
        self.lost: list[range] = []

    def rebuild(self, lost: HubPart, gone: Sequence[HubPart], loss: HubLost) -> Any:
        self.lost.append(lost.rows)
        return Rebuilt(0.0)

    def workers_of(self, part: HubPart) -> None:
        """It is no vector env."""


class Ended(OneHub):
    """A lane of a hub that is lost once it has answered."""

    def done_rows(self, min_envs: int = 1) -> int:
        if self.begun[1:]:
            raise LOSS
        return super().done_rows(min_envs)


def test_rows_that_two_hubs_have_made_again_are_lost_with_their_own_hub_only() -> None:
    hubs, first, maker, recovery = (Ended(100.0), OneHub(200.0)), OneHub(10.0), cast(Any, None), cast(Any, Rebuilder())
    old: Any = SimpleNamespace(
        num_envs=6, leaves=OneHub.leaves, name="wire", last_observations=lambda: [np.zeros((6, 1))]
    )
    rebuild: Any = Rebuilt(0.0, *hubs)
    unmade: Any = None
    absent = LostPart(old, np.zeros(6, bool), False, rebuild, unmade)
    parts = [HubPart("hub-1", range(3), maker, first), HubPart("hub-2", range(3, 9), maker, absent)]  # type: ignore[arg-type]
    lane = FederatedLane(parts, has_object_leaves=False, copy=True, recovery=recovery)
    lane._has_lost = True

    def exchange() -> list[int]:
        """Send what is not outstanding, and take all results but that of the last row; returns the truncated."""
        rows = np.flatnonzero(~lane.are_outstanding)
        lane.begin_rows(rows, b"c", [np.arange(9)[rows]])
        batch = lane.wait_rows(1, 0)
        assert batch.env_ids is not None and batch.truncations is not None
        lane.taken(batch.env_ids[:-1])
        return batch.env_ids[batch.truncations].tolist()  # type: ignore[no-any-return]

    assert exchange() == [*range(3, 9)]
    rebuild.over = True
    assert exchange() == [8]
    assert [part.hub for part in lane.parts] == ["hub-1", "hub-9", "hub-9"]
    assert exchange() == [3, 4, 5, 8] and recovery.lost == [range(3, 6)]


class Cut(OneHub):
    """A lane with an interrupt after the first request was begun."""

    def _begin(self, what: str) -> None:
        super()._begin(what)
        if len(self.begun) == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("request_of_all", [Lost.step, Lost.reset])
def test_request_of_all_rows_that_an_interrupt_has_met_is_begun_once(request_of_all: Any) -> None:
    lost = Lost(hub=Cut)
    lost.step()
    lost.rebuild.over = True
    with pytest.raises(KeyboardInterrupt):
        request_of_all(lost)
    lost.lane.wait(None)
    assert len(lost.hub.begun) == 1
    request_of_all(lost)
    assert len(lost.hub.begun) == 2


def test_waiting_step_that_an_interrupt_has_met_is_begun_once() -> None:
    lost = Lost(hub=Cut)
    lost.step()
    for rows in ([0, 2], [1]):
        lost.lane.begin_rows(np.array(rows), b"c", [ACTIONS[rows]])
    lost.rebuild.over = True
    with pytest.raises(KeyboardInterrupt):
        lost.lane.done_rows()
    assert lost.lane.outstanding == 3
    lost.lane.done_rows()
    assert lost.hub.begun == ["rows [0, 2] [7, 9]", "rows [1] [8]"]
    assert truncated(lost.lane.wait_rows(1, 0)) == []


class PlacesOfThreading(Places):
    """Counts the places in Python's own module."""

    folders = (threading.__file__,)


class InterruptInThreading(Interrupt):
    """Raises ``KeyboardInterrupt`` at such a place."""

    folders = (threading.__file__,)


def test_interrupt_anywhere_in_the_wait_for_rows_comes_out_as_one() -> None:
    may_end = threading.Event()
    rebuild = Rebuild(LOSS, 0.0, lambda: [may_end.wait(30)], lambda: None)  # type: ignore[list-item]
    assert not rebuild.wait(0)
    places = PlacesOfThreading()
    places.during(lambda: rebuild.wait(0.01))
    assert places.found
    for place in places.found:
        InterruptInThreading(1, place).during(lambda: rebuild.wait(0.01))
    may_end.set()
    assert rebuild.wait(30)


def test_rows_that_wait_for_a_hub_no_longer_are_truncated_until_that_was_told() -> None:
    lost = Lost()
    lost.step()
    lost.lane.begin_rows(np.arange(2), b"c", [ACTIONS[:2]])
    lost.lane.rows.truncate_waiting()
    assert truncated(lost.lane.wait_rows(1, 0)) == [0, 1]  # an interrupt came before they were taken
    lost.rebuild.over = True
    lost.lane.done_rows()
    lost.lane.begin_rows(np.arange(3), b"c", [ACTIONS])
    assert truncated(lost.lane.wait_rows(1, 0)) == [0, 1] and lost.lane.rows.are_waiting.tolist() == [
        False,
        False,
        True,
    ]


def test_state_of_rows_is_divided_among_two_hubs_with_what_waits() -> None:
    rows = LostRows([np.arange(4.0)], np.array([True, False, False, False]))
    rows.truncation_pending[2:] = rows.no_new_observation[3] = False
    rows.waiting = [(np.array([3, 1]), b"c", [np.array([30, 10])]), (np.array([2]), b"c", [np.array([20])])]
    first, second = rows.of(range(2)), rows.of(range(2, 4))
    assert [each.earlier[0].tolist() for each in (first, second)] == [[0, 1], [2, 3]]
    assert [each.truncates.tolist() for each in (first, second)] == [[True, False], [False, False]]
    assert [each.truncation_pending.tolist() for each in (first, second)] == [[True, True], [False, False]]
    assert [each.no_new_observation.tolist() for each in (first, second)] == [[True, True], [True, False]]
    waiting = [[(ids.tolist(), arrays[0].tolist()) for ids, _, arrays in each.waiting] for each in (first, second)]
    assert waiting == [[([1], [10])], [([1], [30]), ([0], [20])]]


def test_truncations_in_results_that_an_interrupt_has_dropped_are_returned_by_the_next_step() -> None:
    lost, other = Lost(), RaisesOnce(50.0, KeyboardInterrupt())
    lane = lane_of(lost.lane, other, recovery=RECOVERY)
    lane._has_lost = True
    actions = [np.concatenate([ACTIONS, ACTIONS])]
    lane.begin_step(b"c", actions, b"")
    with pytest.raises(KeyboardInterrupt):
        lane.wait(None)
    lane.give_up()
    lost.rebuild.over = True
    assert not lane.settle()
    lane.begin_step(b"c", actions, b"")
    batch = lane.wait(None)
    assert batch.truncations is not None and batch.truncations.tolist() == [True] * 3 + [False] * 3
    assert other.begun == ["step [7, 8, 9]"] * 2 and not lost.lane.rows.are_settled


def test_row_is_not_sent_while_its_truncation_waits_for_the_caller() -> None:
    lost = Lost()
    assert truncated(lost.step()) == [0, 1, 2]
    lost.lane.begin_rows(np.array([1]), b"c", [ACTIONS[1:2]])
    lost.lane.rows.truncation_pending[1] = lost.lane.rows.truncates[1] = (
        True  # an interrupt came in ``truncate_waiting``
    )
    lost.rebuild.over = True
    lost.lane.done_rows()
    assert lost.hub.begun == [] and truncated(lost.lane.wait_rows(1, 0)) == [1]


# --- two hubs ---------------------------------------------------------------------------------------------------------


def stepped(lane: FederatedLane) -> np.ndarray:
    lane.settle()
    lane.begin_step(b"c", [np.arange(6)], b"")
    return lane.wait(None).observations[0]


def test_results_are_in_two_buffers_in_turn_without_copy() -> None:
    lane = lane_of(OneHub(0.0), OneHub(10.0), copy=False)
    first, second, third = (stepped(lane) for _ in range(3))
    assert first is third is not second and first.ravel().tolist() == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize(("patience_s", "silence_s"), [(9.0, 9.0), (0.0, SILENCE_S_MIN)])
def test_hub_may_be_silent_as_long_as_others_wait_for_its_rows(patience_s: float, silence_s: float) -> None:
    silent = RaisesOnce(0.0, HubTimeout("no answer yet"))
    lane = lane_of(silent, OneHub(10.0), recovery=SimpleNamespace(patience_s=patience_s, is_only_hub=False))
    looks: list[float] = []
    cast(Any, lane.parts[0].connection).check_reach = looks.append
    assert stepped(lane).size == 6 and looks == [silence_s]


def test_hubs_that_have_answered_are_asked_again_before_others_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envhub_client.federation.lane._park", None)
    lane = lane_of(OneHub(0.0), Slow(10.0))
    lane.begin_rows(np.arange(6), b"c", [np.arange(6)])
    assert lane.wait_rows(6, 10).env_ids.tolist() == [*range(6)]  # type: ignore[union-attr]


class Spelling(OneHub):
    """A lane whose observations have a word, too, of no fixed size."""

    def _batch(self, rows: np.ndarray, into: Any = None) -> Batch:
        word = codec.encode([f"word {len(self.begun)}"])
        return super()._batch(rows, into)._replace(rows=[(row, codec.encode_pair(word, b"")) for row in rows.tolist()])


def test_reset_shows_the_words_of_rows_that_it_leaves_out_as_they_were_received() -> None:
    lane = lane_of(Spelling(0.0), Spelling(10.0), has_object_leaves=True)
    lane.begin_rows(np.array([4]), b"c", [np.array([4])])
    lane.taken(lane.wait_rows(1, 0).env_ids)  # type: ignore[arg-type]
    lane.begin_reset(Reset([], [True] * 3 + [False] * 3))
    words = [codec.decode_pair(blob)[0] for _, blob in lane.wait(None).rows]
    assert [bytes(word) for word in words] == [codec.encode(["word 1"])] * 3 + [b"", codec.encode(["word 1"]), b""]


def test_reset_shows_the_words_of_a_step_that_raised_on_another_hub_beside_its_numbers() -> None:
    lane = lane_of(Spelling(0.0), RaisesOnce(10.0, ValueError("env 4 raised")), has_object_leaves=True)
    lane.begin_step(b"c", [np.arange(6)], b"")
    with pytest.raises(ValueError, match="env 4 raised"):
        lane.wait(None)
    lane.parts[1].lane = Spelling(10.0)  # type: ignore[assignment]
    lane.begin_reset(Reset([], [False] * 3 + [True] * 3))
    words = [codec.decode_pair(blob)[0] for _, blob in sorted(lane.wait(None).rows)]
    assert [bytes(word) for word in words[:3]] == [codec.encode(["word 1"])] * 3
