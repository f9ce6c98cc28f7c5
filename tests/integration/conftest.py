from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import cloudpickle
import pytest
from envhub_client.session.options import FaultOptions
from hubs import ServedHub, lane_address, serve, wait_until, worker_processes
from sims import OFFERED

RESTARTED_S = 60.0
# Test modules with envs, which go to workers by value: a worker that imported the module would import pytest, too.
BY_VALUE = ["test_any_space", "test_defects", "test_hub_loss", "test_infos", "test_interrupts", "test_partial"]
BY_VALUE += ["test_drop_in", "test_many_hubs_sessions", "test_shared_lane", "test_slow_and_leaking", "test_workers"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if module.__name__ in BY_VALUE:
            cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A hub that offers everything the tests use; tests that harm a hub start their own."""
    with serve(tmp_path_factory.mktemp("hub"), *OFFERED) as served:
        yield served


@pytest.fixture(params=["embedded", pytest.param("ipc", marks=pytest.mark.chaos), "tcp"])
def address(request: pytest.FixtureRequest) -> str | None:
    """Every way to reach a hub: None is this program's own. Ipc has the memory of the one and the hub of the other."""
    return lane_address(request, request.param)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for an env that is being restarted; on a slow machine that takes longer than ``restart_wait``."""
    defaults = {field.name: field.default for field in dataclasses.fields(FaultOptions)}
    values = tuple({**defaults, "restart_wait": RESTARTED_S}.values())
    monkeypatch.setattr(FaultOptions.__init__, "__defaults__", values)


@pytest.fixture(scope="session")
def _left() -> set[int]:
    """The workers that tests which failed have left. One scan a test is enough: a scan reads of every process."""
    return set()


@pytest.fixture(autouse=True)
def _nothing_left(_left: set[int]) -> Iterator[None]:
    """Every test closes what it opens: no worker of this process's hubs that it started outlives it."""
    yield
    remaining = set[int]()

    def are_gone() -> bool:
        remaining.clear()
        remaining.update(process.pid for process in worker_processes(os.getpid()))
        return remaining <= _left

    gone = wait_until(are_gone, 60)
    _left |= remaining
    assert gone
