"""Vector envs that failed are run again as a whole: the file of a failure is that of all envs of a worker."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vector_sims
from brittle import CAUSES
from envhub_server import replay
from gymnasium.vector import AutoresetMode
from hubs import serve, written_replay

import envhub

FOLDER = Path(os.environ["ENVHUB_REPLAYS"])
OPTIONS: dict[str, Any] = {
    "on_exception": "truncate",
    "on_invalid": "truncate",
    "step_timeout": 60.0,
    "init_timeout": 60.0,
    "restarts_max": 1000,
    "num_workers": 2,
}
NUM_ENVS = 4
HANG_S = 3.0  # for envs that hang, and no others: a slow machine may stall


def files_in(folder: Path) -> list[Path]:
    return [path for path, _ in replay.files_in(folder)]


def failures(envs: envhub.HubVectorEnv, count: int) -> dict[str, list[int]]:
    """The names of so many replays, each with the envs that failed."""
    rng, found = np.random.default_rng(1), dict[str, list[int]]()
    while len(found) < count:
        *_, terminations, truncations, infos = envs.step(rng.integers(0, 5, NUM_ENVS))
        for row in np.flatnonzero(infos.get("_env_failure", ())).tolist():
            found.setdefault(infos["env_failure"][row].replay, []).append(row)
        over = terminations | truncations
        if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and over.any():
            envs.reset(options={"reset_mask": over})
    return found


def run(name: str) -> replay.Comparison:
    return replay.run(written_replay(name))


def check(envs: envhub.HubVectorEnv, count: int) -> None:
    """Run so many failures again."""
    envs.reset(seed=3)
    for name, rows in failures(envs, count).items():
        assert rows in ([0, 2], [1, 3])  # each worker's whole share
        verdict = run(name)
        assert verdict.alike, verdict.text
        assert "failed alike" in verdict.text


@pytest.mark.long
@pytest.mark.parametrize("lane", ["auto", pytest.param("wire", marks=pytest.mark.chaos)])
@pytest.mark.parametrize(
    "cause", [pytest.param(cause, marks=pytest.mark.chaos if cause == "hang" else ()) for cause in CAUSES[:-1]]
)
def test_vector_env_fails_alike_as_a_whole(cause: str, lane: str, tmp_path: Path) -> None:
    arguments = {"cause": cause, "rate": 0.02}
    options = {**OPTIONS, "lane": lane}
    if cause == "hang":
        options |= {"step_timeout": HANG_S, "init_timeout": 10.0}  # which a first step has, too
    with (
        serve(tmp_path, "brittles=vector_sims:brittles", "--vector") as hub,
        closing(envhub.make_vec("brittles", NUM_ENVS, hub=hub.ipc, env_kwargs=arguments, **options)) as envs,
    ):
        check(envs, 3)


@pytest.mark.long
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_vector_env_fails_alike_in_every_autoreset_mode(mode: AutoresetMode) -> None:
    factory = partial(vector_sims.brittles, cause="exception", rate=0.02)
    with closing(envhub.make_vec(factory, NUM_ENVS, vector=True, autoreset_mode=mode, **OPTIONS)) as envs:
        check(envs, 3)


def test_exception_that_is_raised_names_one_replay_of_all_envs() -> None:
    factory = partial(vector_sims.brittles, cause="exception", rate=1.0)
    with closing(envhub.make_vec(factory, NUM_ENVS, vector=True, num_workers=1)) as envs:
        envs.reset(seed=3)
        with pytest.raises(ValueError, match="brittle") as caught:
            envs.step(np.ones(NUM_ENVS, int))
    assert isinstance(caught.value.__cause__, envhub.EnvRaised)
    name = caught.value.__cause__.replay
    assert run(name).alike
    session = name.rpartition("-env")[0]  # replays of earlier tests may be written only now
    assert len([path for path in files_in(FOLDER) if path.name.startswith(f"{session}-")]) == 1
