"""Tests of this folder start no process: those that do are in ``tests/integration``."""

from __future__ import annotations

import os
import subprocess
from typing import Any, NoReturn

import pytest
from envhub_server.log import Logger


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Fail the test that would start a process, also one of code that catches exceptions."""
    pytest.fail("a test of tests/unit starts a process")


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess.Popen, "_execute_child", refuse)
    for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp"):
        monkeypatch.setattr(os, name, refuse)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The lines that are logged from now on."""
    logged: list[dict[str, Any]] = []

    def write(self: Logger, event: str, once_per: object = None, **fields: Any) -> None:
        logged.append({"event": event, **fields})

    for level in ("debug", "info", "warning", "error", "exception"):
        monkeypatch.setattr(Logger, level, write)
    return logged
