"""Options of the whole suite."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator

import other_platform
import pytest

# A run starts hundreds of interpreters. Many container images set this variable, and each one compiles every module.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell has its background jobs ignore it, and what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
if "ENVHUB_TEST_PLATFORM" in os.environ:  # darwin or win32; the client alone is changed, and hubs run on Linux
    other_platform.become(os.environ["ENVHUB_TEST_PLATFORM"])
# Not among the replays of the user whose hubs these are. Each process of a run has its own, since tests look for what
# is new in it, and the oldest replays give way.
_REPLAYS = os.environ["ENVHUB_REPLAYS"] = tempfile.mkdtemp(prefix="envhub-test-replays-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=["auto", "wire"], default="auto", help="the lane of tests that choose none")
    parser.addoption("--write-texts", action="store_true", help="write tests/integration/texts.txt")
    parser.addoption("--seed", type=int, default=1, help="of the long run of tests/chaos")
    parser.addoption("--steps", type=int, default=10**6, help="to be acknowledged in it")


def pytest_configure(config: pytest.Config) -> None:
    _load_hypothesis_profile()
    if config.getoption("--lane") == "wire":
        os.environ["ENVHUB_LANE"] = "wire"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector: what is collected stays, and it took two fifths of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Four processes for two CPUs: a test waits for other processes more than half of its time."""
    return 2 * len(os.sched_getaffinity(0))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Cancel `faulthandler_timeout` for tests with a limit of their own: printing running threads can crash."""
    if item.get_closest_marker("timeout") is not None:
        faulthandler.cancel_dump_traceback_later()


def pytest_unconfigure() -> None:
    shutil.rmtree(_REPLAYS, ignore_errors=True)


def _load_hypothesis_profile() -> None:
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's business.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
