"""The checker accepts what a faultless hub does, whoever dies, and finds every way of not being one."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from chaos.chain_env import HEAD, ChainEnv
from chaos.checker import DISABLED, NEXT_STEP, SAME_STEP, Batch, Checker, Kind

ROWS, LENGTH, ELEMENTS = 3, 4, 8


class FaultlessHub:
    """A vector env of chains in this process, as a hub would be one, whose envs can be made to die."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.envs = [ChainEnv(ELEMENTS, LENGTH) for _ in range(ROWS)]
        self.ended = [False] * ROWS
        self.dead = [False] * ROWS
        self.last = np.zeros((ROWS, HEAD + ELEMENTS), np.int64)

    def reset(self, mask: list[bool] | None = None) -> np.ndarray:
        for row in range(ROWS):
            if mask is None or mask[row]:
                self._reset(row)
        return self.last.copy()

    def _reset(self, row: int) -> None:
        if self.dead[row]:
            self.envs[row] = ChainEnv(ELEMENTS, LENGTH)
        self.ended[row] = self.dead[row] = False
        self.last[row] = self.envs[row].reset()[0]

    def step(self, number: int, dying: tuple[int, ...] = ()) -> Batch:
        rewards, flags = np.zeros(ROWS), np.zeros((2, ROWS), bool)
        finals: list[np.ndarray | None] = [None] * ROWS
        for row, env in enumerate(self.envs):
            if row in dying:
                self.dead[row], flags[1, row], finals[row] = True, True, self.last[row].copy()
            elif self.dead[row] or (self.ended[row] and self.mode == NEXT_STEP):
                self._reset(row)
            else:
                seen, rewards[row], flags[0, row], flags[1, row], _ = env.step(np.array([row, number]))
                self.last[row] = seen
                self.ended[row] = flags[:, row].any()
                if self.ended[row] and self.mode == SAME_STEP:
                    finals[row] = self.last[row].copy()
                    self._reset(row)
        return Batch(self.last.copy(), rewards, *flags, self._infos(dying, finals))

    def _infos(self, dying: tuple[int, ...], finals: list[np.ndarray | None]) -> dict[str, object]:
        infos: dict[str, object] = {"final_obs": finals} if self.mode == SAME_STEP else {}
        if dying:
            mask = np.isin(np.arange(ROWS), dying)
            infos |= {"_env_failure": mask, "_invalid_transition": mask, "invalid_transition": mask}
            infos["env_failure"] = [{"cause": "crash"} if row in dying else None for row in range(ROWS)]
        return infos


def history(mode: str = NEXT_STEP, batches: int = 0) -> tuple[FaultlessHub, Checker]:
    hub, checker = FaultlessHub(mode), Checker(ROWS, mode, LENGTH)
    checker.reset(hub.reset(), {})
    for number in range(batches):
        checker.step([number] * ROWS, hub.step(number))
    return hub, checker


def kinds(checker: Checker) -> dict[str, int]:
    return dict(checker.tally.wrong)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP, DISABLED])
def test_faultless_history_with_deaths_is_accepted(mode: str) -> None:
    hub, checker = history(mode)
    for number in range(40):
        dying = {9: (1,), 10: (1,), 17: (0, 2), 30: (0,), 33: (2,)}.get(number, ())
        batch = hub.step(number, dying)
        checker.step([number] * ROWS, batch)
        over = (batch.terminations | batch.truncations).tolist()
        if mode == DISABLED and any(over):
            checker.reset(hub.reset(over), {}, over)
    assert kinds(checker) == {} and checker.tally.findings == []
    # Without autoreset, row 1 lives again before it dies for the second time.
    standins = 0 if mode == DISABLED else 1
    assert checker.tally.standins == standins
    assert checker.tally.truncations == {"crash": 6 - standins} and checker.tally.incarnations == 3 + 6 - standins
    assert checker.tally.acknowledged == 40 * ROWS


def test_reset_of_the_trainers_own_is_accepted_and_may_find_a_new_incarnation() -> None:
    hub, checker = history(batches=6)
    hub.dead[1] = True
    checker.reset(hub.reset(), {})
    checker.step([9] * ROWS, hub.step(9))
    assert kinds(checker) == {} and checker.tally.incarnations == ROWS + 1


def test_env_that_dies_between_two_episodes_cuts_none_short() -> None:
    hub, checker = history(batches=LENGTH)
    hub.dead[1] = True
    checker.step([9] * ROWS, hub.step(9))
    checker.step([10] * ROWS, hub.step(10))
    assert kinds(checker) == {} and checker.tally.incarnations == ROWS + 1


def with_step_left_out(hub: FaultlessHub) -> Batch:
    before = hub.last.copy()
    return hub.step(2)._replace(observations=before)


def with_step_twice(hub: FaultlessHub) -> Batch:
    hub.step(2)
    return hub.step(2)


def with_another_action(hub: FaultlessHub) -> Batch:
    return hub.step(7)


def with_part_of_the_last(hub: FaultlessHub) -> Batch:
    before = hub.last.copy()
    batch = hub.step(2)
    batch.observations[1, -2:] = before[1, -2:]
    return batch


def with_rows_exchanged(hub: FaultlessHub) -> Batch:
    batch = hub.step(2)
    batch.observations[[0, 1]] = batch.observations[[1, 0]]
    return batch


def with_action_of_another_row(hub: FaultlessHub) -> Batch:
    batch = hub.step(2)
    batch.observations[1, 0] = 2
    return batch


def with_unannounced_incarnation(hub: FaultlessHub) -> Batch:
    hub.dead[1] = True
    return hub.step(2)


def with_wrong_reward(hub: FaultlessHub) -> Batch:
    batch = hub.step(2)
    batch.rewards[1] += 1
    return batch


def with_wrong_flag(hub: FaultlessHub) -> Batch:
    batch = hub.step(2)
    batch.terminations[1] = True
    return batch


def with_death_that_shows_a_later_step(hub: FaultlessHub) -> Batch:
    hub.step(2)
    return hub.step(3, dying=(1,))._replace(infos=hub._infos((0, 1, 2), [None] * ROWS))


@pytest.mark.parametrize(
    ("spoiled", "kind"),
    [
        (with_step_left_out, Kind.LOST),
        (with_step_twice, Kind.DOUBLED),
        (with_another_action, Kind.REORDERED),
        (with_part_of_the_last, Kind.TORN),
        (with_rows_exchanged, Kind.CROSSED),
        (with_action_of_another_row, Kind.CROSSED),
        (with_unannounced_incarnation, Kind.LOST),
        (with_wrong_reward, Kind.BROKEN),
        (with_wrong_flag, Kind.BROKEN),
        (with_death_that_shows_a_later_step, Kind.LOST),
    ],
)
def test_bad_history_is_found(spoiled: Callable[[FaultlessHub], Batch], kind: Kind) -> None:
    hub, checker = history(batches=2)
    checker.step([2] * ROWS, spoiled(hub))
    assert kind.value in kinds(checker), checker.tally.findings
    assert len(kinds(checker)) == 1 or kind is Kind.LOST


def test_incarnation_that_ended_must_not_come_back() -> None:
    hub, checker = history(batches=2)
    checker.step([2] * ROWS, hub.step(2, dying=(1,)))
    hub.dead[1] = False
    checker.step([3] * ROWS, hub.step(3))
    assert kinds(checker)["lost"] == 1


def test_new_incarnation_must_not_have_been_stepped() -> None:
    hub, checker = history(batches=2)
    checker.step([2] * ROWS, hub.step(2, dying=(1,)))
    hub._reset(1)
    checker.step([3] * ROWS, hub.step(3))
    assert kinds(checker)["doubled"] == 1


def test_row_of_an_older_session_must_not_show_in_the_next() -> None:
    hub, checker = history(batches=2)
    checker.session()
    checker.reset(hub.reset(), {})
    assert kinds(checker) == {"lost": ROWS}


@pytest.mark.parametrize("times", [0, 1, 2])
def test_step_without_an_answer_happened_once_or_not_at_all(times: int) -> None:
    hub, checker = history(batches=2)
    checker.unanswered([2] * ROWS)
    for _ in range(times):
        hub.step(2)
    checker.step([3] * ROWS, hub.step(3))
    assert kinds(checker) == ({} if times < 2 else {"doubled": ROWS})


@pytest.mark.parametrize("dead_before", [False, True])
@pytest.mark.parametrize("unseen", [1, 2, 3])
def test_env_may_die_and_begin_again_in_steps_without_an_answer(unseen: int, dead_before: bool) -> None:
    hub, checker = history(batches=2)
    numbers = range(2, 2 + unseen)
    if dead_before:
        checker.step([1] * ROWS, hub.step(1, dying=(1,)))
    for number in numbers:
        checker.unanswered([number] * ROWS)
        hub.step(number, dying=() if dead_before or number > 2 else (1,))
    follower = Checker(ROWS, NEXT_STEP, LENGTH)
    follower.recall(pickle.loads(pickle.dumps(checker.memory)))
    for number in range(20, 30):
        follower.step([number] * ROWS, hub.step(number))
    assert kinds(follower) == {}, follower.tally.findings


def test_stand_in_must_be_marked_and_worth_nothing() -> None:
    for spoil in ("reward", "mark", "terminated"):
        hub, checker = history(batches=2)
        batch = hub.step(2, dying=(1,))
        if spoil == "reward":
            batch.rewards[1] = 1
        elif spoil == "mark":
            batch = batch._replace(infos={name: v for name, v in batch.infos.items() if "invalid" not in name})
        else:
            batch.terminations[1] = True
        checker.step([2] * ROWS, batch)
        assert kinds(checker) == {"broken": 1}, spoil


def test_final_observation_of_same_step_is_checked() -> None:
    hub, checker = history(SAME_STEP, batches=LENGTH - 1)
    batch = hub.step(LENGTH - 1)
    batch.infos["final_obs"][1][0] = 2
    checker.step([LENGTH - 1] * ROWS, batch)
    assert kinds(checker) == {"broken": 1}


@pytest.mark.parametrize("torn", [False, True])
def test_note_is_of_the_step_that_its_row_shows(torn: bool) -> None:
    hub, checker = FaultlessHub(SAME_STEP), Checker(ROWS, SAME_STEP, LENGTH)

    def noted(chains: np.ndarray) -> dict[str, object]:
        return {"chain": chains, "note": tuple(str(counter) for counter in chains[:, 2].tolist())}

    checker.reset(noted(hub.reset()), {})
    for number in range(LENGTH + 2):
        before, batch = noted(hub.last.copy()), hub.step(number)
        finals = [None if each is None else {"chain": each, "note": str(each[2])} for each in batch.infos["final_obs"]]
        seen = noted(batch.observations)
        if torn and number == 2:
            seen["note"] = before["note"]
        checker.step([number] * ROWS, batch._replace(observations=seen, infos={"final_obs": finals}))
    assert kinds(checker) == ({"torn": ROWS} if torn else {})


def test_next_session_may_have_another_number_of_rows() -> None:
    _, checker = history(batches=2)
    checker.session(1)
    for _ in range(2):
        checker.reset(ChainEnv(ELEMENTS, LENGTH).reset()[0][None], {})
    assert kinds(checker) == {} and checker.tally.incarnations == ROWS + 2
