"""Random programs over hubs that fail see what the model of a vector env allows; and the model sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chaos.model import MODES, SAME_STEP, Rows, Wrong
from chaos.model_env import BOX, DICT, GO, KINDS, ModelEnv
from chaos.programs import run
from gymnasium.vector import SyncVectorEnv

COUNT, STEPS = 5, 60


@pytest.mark.long
def test_short_programs_see_what_the_model_allows(tmp_path: Path) -> None:
    report = run(tmp_path, 11, 2_000, requests=60, rows_max=16)
    assert not report.wrong, report.wrong[0]


@pytest.mark.chaos
@pytest.mark.timeout(0)
def test_a_million_row_steps_are_what_the_model_allows(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    report = run(tmp_path, request.config.getoption("--seed"), request.config.getoption("--steps"))
    print(report.text)
    assert not report.wrong, report.wrong[0]


def upstream(kind: str, mode: str, change: Callable[[int, Any], None] = lambda step, result: None) -> None:
    """Have the model follow Gymnasium's vector env, whose results are changed by step."""
    envs = SyncVectorEnv([lambda row=row: ModelEnv(kind, row) for row in range(COUNT)], autoreset_mode=mode)  # type: ignore[misc]
    rows, chance = Rows(kind, COUNT, mode, {}), np.random.default_rng(3)
    masked: tuple[int, ...] = (*range(COUNT),)
    for step in range(STEPS):
        if masked:
            options = {
                row: [each for at in rows.possible(row) for each in rows.reset(row, at, row + 5, 0)] for row in masked
            }
            mask = np.isin(np.arange(COUNT), masked)
            rows.reset_batch(range(COUNT), options, envs.reset(seed=5, options={"reset_mask": mask}), by_env=False)
        numbers = chance.integers(1 << 20, size=COUNT).tolist()
        result = deepcopy(envs.step(np.array([(GO, number) for number in numbers])))
        change(step, result)
        steps = {
            row: [each for at in rows.possible(row) for each in rows.stepped(row, at, GO, numbers[row])]
            for row in range(COUNT)
        }
        rows.batch(range(COUNT), steps, result, by_env=False)
        masked = tuple(np.flatnonzero(result[2] | result[3]).tolist()) if mode == "Disabled" else ()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_allows_what_upstream_does(kind: str, mode: str) -> None:
    upstream(kind, mode)


def swapped(batch: Any) -> None:
    batch[0][[0, 1]] = batch[0][[1, 0]]


def repeated(batch: Any) -> None:
    batch[0][:, 3] += 1


def truncated(batch: Any) -> None:
    batch[3][2] = True
    batch[4]["invalid_transition"] = batch[4]["_invalid_transition"] = np.arange(COUNT) == 2


def without_infos(batch: Any) -> None:
    batch[4].clear()


@pytest.mark.parametrize("change", [swapped, repeated, truncated, without_infos], ids=lambda change: change.__name__)
def test_the_model_finds(change: Callable[[Any], None]) -> None:
    with pytest.raises(Wrong):
        upstream(BOX, SAME_STEP, lambda step, result: change(result) if step == STEPS // 2 else None)


def test_the_model_finds_an_observation_of_two_moments() -> None:
    def tear(step: int, result: Any) -> None:
        result[0]["word"] = ("torn",) * COUNT

    with pytest.raises(Wrong):
        upstream(DICT, SAME_STEP, tear)
