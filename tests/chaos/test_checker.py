"""The checker accepts what a faultless hub does, whoever dies, and finds every way of not being one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from chaos.chain_env import HEAD, ChainEnv
from chaos.checker import BROKEN, CROSSED, DOUBLED, LOST, REORDERED, TORN, Batch, Checker

ROWS, LENGTH, ELEMENTS = 3, 4, 8


class FaultlessHub:
    """A vector env of chains in this process, as a hub would be one, whose envs can be made to die."""

    def __init__(self) -> None:
        self.envs = [ChainEnv(ELEMENTS, LENGTH) for _ in range(ROWS)]
        self.ended = [False] * ROWS
        self.dead = [False] * ROWS
        self.last = np.zeros((ROWS, HEAD + ELEMENTS), np.int64)

    def reset(self) -> np.ndarray:
        for row in range(ROWS):
            self.reset_row(row)
        return self.last.copy()

    def reset_row(self, row: int) -> None:
        if self.dead[row]:
            self.envs[row] = ChainEnv(ELEMENTS, LENGTH)
        self.ended[row] = self.dead[row] = False
        self.last[row] = self.envs[row].reset()[0]

    def step(self, number: int, dying: tuple[int, ...] = ()) -> Batch:
        rewards, flags = np.zeros(ROWS), np.zeros((2, ROWS), bool)
        for row, env in enumerate(self.envs):
            if row in dying:
                self.dead[row] = flags[1, row] = True
            elif self.dead[row] or self.ended[row]:
                self.reset_row(row)
            else:
                self.last[row], rewards[row], flags[0, row], flags[1, row], _ = env.step(np.array([row, number]))
                self.ended[row] = flags[:, row].any()
        return Batch(self.last.copy(), rewards, *flags, infos_of(dying))


def infos_of(dying: tuple[int, ...]) -> dict[str, object]:
    if not dying:
        return {}
    mask = np.isin(np.arange(ROWS), dying)
    failures = [{"cause": "crash"} if row in dying else None for row in range(ROWS)]
    return {"_env_failure": mask, "env_failure": failures, "_invalid_transition": mask, "invalid_transition": mask}


def history(batches: int = 0) -> tuple[FaultlessHub, Checker]:
    hub, checker = FaultlessHub(), Checker(ROWS, LENGTH)
    checker.reset(hub.reset(), {})
    for number in range(batches):
        checker.step([number] * ROWS, hub.step(number))
    return hub, checker


def test_faultless_history_with_deaths_is_accepted() -> None:
    hub, checker = history()
    for number in range(40):
        dying = {9: (1,), 10: (1,), 17: (0, 2), 30: (0,), 33: (2,)}.get(number, ())
        checker.step([number] * ROWS, hub.step(number, dying))
    assert checker.tally.wrong == {} and checker.tally.findings == []
    assert checker.tally.truncations == {"crash": 5}  # a row that is down dies no second time
    assert checker.tally.acknowledged == 40 * ROWS


@pytest.mark.parametrize("between", [FaultlessHub.reset, lambda hub: None], ids=["reset", "end of an episode"])
def test_env_that_dies_between_two_episodes_cuts_none_short(between: Callable[[FaultlessHub], object]) -> None:
    hub, checker = history(batches=LENGTH)
    hub.dead[1] = True
    if (observations := between(hub)) is not None:
        checker.reset(observations, {})
    for number in (9, 10):
        checker.step([number] * ROWS, hub.step(number))
    assert checker.tally.wrong == {}


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


def with_death(hub: FaultlessHub, **spoiled: object) -> Batch:
    batch = hub.step(2, dying=(1,))
    return batch._replace(**spoiled)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spoiled", "kind"),
    [
        (lambda hub: Batch(hub.last.copy(), *hub.step(2)[1:]), LOST),
        (lambda hub: (hub.step(2), hub.step(2))[1], DOUBLED),
        (lambda hub: hub.step(7), REORDERED),
        (with_part_of_the_last, TORN),
        (with_rows_exchanged, CROSSED),
        (with_action_of_another_row, CROSSED),
        (lambda hub: (hub.dead.__setitem__(1, True), hub.step(2))[1], LOST),
        (lambda hub: hub.step(2)._replace(rewards=np.full(ROWS, 9.0)), BROKEN),
        (lambda hub: hub.step(2)._replace(terminations=np.array([False, True, False])), BROKEN),
        (lambda hub: hub.step(2)._replace(infos=infos_of((0, 1, 2))), LOST),  # a death that shows a later step
        (lambda hub: with_death(hub, rewards=np.ones(ROWS)), BROKEN),
        (lambda hub: with_death(hub, infos={k: v for k, v in infos_of((1,)).items() if "invalid" not in k}), BROKEN),
    ],
)
def test_bad_history_is_found(spoiled: Callable[[FaultlessHub], Batch], kind: str) -> None:
    hub, checker = history(batches=2)
    checker.step([2] * ROWS, spoiled(hub))
    assert kind in checker.tally.wrong, checker.tally.findings
    assert len(checker.tally.wrong) == 1 or kind == LOST


@pytest.mark.parametrize("stepped", [False, True])
def test_new_incarnation_is_another_one_and_has_not_been_stepped(stepped: bool) -> None:
    hub, checker = history(batches=2)
    checker.step([2] * ROWS, hub.step(2, dying=(1,)))
    if stepped:
        hub.reset_row(1)
    hub.dead[1] = False
    checker.step([3] * ROWS, hub.step(3))
    assert checker.tally.wrong[DOUBLED if stepped else LOST] == 1


def test_row_of_an_older_session_must_not_show_in_the_next() -> None:
    hub, checker = history(batches=2)
    checker.session()
    checker.reset(hub.reset(), {})
    assert checker.tally.wrong == {LOST: ROWS}


@pytest.mark.parametrize("times", [0, 1, 2])
def test_step_without_an_answer_happened_once_or_not_at_all(times: int) -> None:
    hub, checker = history(batches=2)
    checker.unanswered([2] * ROWS)
    for _ in range(times):
        hub.step(2)
    checker.step([3] * ROWS, hub.step(3))
    assert checker.tally.wrong == ({} if times < 2 else {DOUBLED: ROWS})


@pytest.mark.parametrize("dead_before", [False, True])
@pytest.mark.parametrize("unseen", [1, 3])
def test_env_may_die_and_begin_again_in_steps_without_an_answer(unseen: int, dead_before: bool) -> None:
    hub, checker = history(batches=2)
    if dead_before:
        checker.step([1] * ROWS, hub.step(1, dying=(1,)))
    for number in range(2, 2 + unseen):
        checker.unanswered([number] * ROWS)
        hub.step(number, dying=() if dead_before or number > 2 else (1,))
    for number in range(20, 30):
        checker.step([number] * ROWS, hub.step(number))
    assert checker.tally.wrong == {}, checker.tally.findings
