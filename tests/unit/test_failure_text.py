"""What a client is told of a worker that ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from envhub_server.processes.worker_handle import ExitCause
from envhub_server.session.slots import Late, Overrun
from envhub_server.session.supervision import (
    LOG_TAIL_CHARS_MAX,
    MIB,
    env_failure_of,
    exhausted_failure,
    exit_failure,
    logged,
    slow_to_close,
    unready_failure,
    worker_named,
)

from envhub.protocol.messages import Failure, Make

ROWS = [3, 7]
MAKE = Make(8)
CRASH = ExitCause(
    "was ended by SIGSEGV", "SIGSEGV", None, 'File "/home/a/sim.py"\nThread 0x7 (most recent call first):'
)


@pytest.mark.parametrize("hide_folders", [False, True])
def test_env_whose_interpreter_cannot_be_used_is_told_by_its_name(hide_folders: bool) -> None:
    told = unready_failure(Make(1, "sim"), "/home/a/python has no numpy", hide_folders)
    assert told.code == "env_unready" and told.message.startswith("'sim' is not ready: ")
    assert ("/home/a" in told.message) is not hide_folders
    assert "a factory" in unready_failure(Make(1), "why", hide_folders).message


def test_worker_is_named_with_its_envs() -> None:
    assert worker_named(1, [3]) == "worker 1 (env 3)" and worker_named(1, ROWS) == "worker 1 (envs 3, 7)"


def test_envs_of_a_part_are_named_as_in_the_whole_vector_env() -> None:
    part = Make(8, row_offset=100)
    crash, late = (
        exit_failure(part, 1, ROWS, CRASH, why, hide_folders=False) for why in (None, Late("step", 7, 6.0, 5.0))
    )
    assert crash.message == "worker 1 (envs 103, 107) was ended by SIGSEGV" and crash.env_index == 3
    assert late.message.startswith("env 107 did not finish") and "(envs 103, 107)" in late.message
    assert late.env_index == 7


def test_crash_is_told_of_the_workers_first_env_with_the_end_of_its_output() -> None:
    long = ExitCause(CRASH.how, CRASH.signal, None, "x" + "y" * LOG_TAIL_CHARS_MAX)
    told = exit_failure(MAKE, 1, ROWS, long, None, hide_folders=False)
    assert told == Failure(
        "worker_died",
        "request",
        "worker 1 (envs 3, 7) was ended by SIGSEGV",
        env_index=3,
        worker=1,
        log_tail="y" * LOG_TAIL_CHARS_MAX,
    )
    assert "/home/a" not in exit_failure(MAKE, 1, ROWS, CRASH, None, hide_folders=True).log_tail


def test_late_env_is_told_by_its_own_number_with_its_limit() -> None:
    told = exit_failure(MAKE, 1, ROWS, CRASH, Late("step", 7, 6.0, 5.0), hide_folders=False)
    assert (told.code, told.env_index, told.worker, told.log_tail) == ("env_timeout", 7, 1, CRASH.log_tail)
    assert told.message == ("env 7 did not finish its step within step_timeout=5 s; its worker 1 (envs 3, 7) was ended")
    found = env_failure_of(told, CRASH, Late("step", 7, 6.0, 5.0), restarts=2)
    assert (found.cause, found.restarts, found.signal) == ("timeout", 2, "SIGSEGV")
    assert found.traceback.startswith("Thread 0x7")


def test_worker_with_too_much_memory_is_told_with_the_limit_that_it_broke() -> None:
    overrun = Overrun(300 * MIB, 256 * MIB)
    told = exit_failure(MAKE, 1, ROWS, CRASH, overrun, hide_folders=False)
    text = "had 300 MiB of memory, more than memory_max=268435456 bytes, and was ended"
    assert told.message == f"worker 1 (envs 3, 7) {text}"
    assert (told.code, told.env_index, told.worker) == ("worker_died", 3, 1)
    found = env_failure_of(told, CRASH, overrun, restarts=0)
    assert (found.cause, found.traceback) == ("memory", "")


def test_end_of_the_restarts_is_of_the_session_and_keeps_what_is_known() -> None:
    crash = replace(exit_failure(MAKE, 1, ROWS, CRASH, None, hide_folders=False), replay="an-env-1")
    told = exhausted_failure(crash, "it ended 5 times in 60 s")
    assert told.replay == env_failure_of(crash, CRASH, None, restarts=0).replay == "an-env-1"
    assert (told.code, told.scope, told.env_index, told.worker) == ("restarts_exhausted", "session", 3, 1)
    assert told.message.startswith("worker 1 (envs 3, 7) was ended by SIGSEGV; it ended 5 times in 60 s")
    assert told.log_tail == CRASH.log_tail


def test_log_has_the_class_the_env_and_the_replay_of_an_exception_without_a_text() -> None:
    raised = Failure("env_raised", "env", "", 3, 1, type="builtins.AssertionError", replay="arm-1")
    assert logged(raised) == {"code": "env_raised", "env": 3, "why": "AssertionError", "replay": "arm-1"}
    keyed = replace(raised, message="'pose'", type="builtins.KeyError", replay="")
    assert logged(keyed) == {"code": "env_raised", "env": 3, "why": "KeyError: 'pose'"}
    crash = exit_failure(MAKE, 1, ROWS, CRASH, None, hide_folders=False)
    assert logged(crash) == {"code": "worker_died", "why": crash.message}


STACK = """Stack (most recent call first):
  File "/home/me/env.py", line 9 in finish
  File "/home/me/env.py", line 12 in close
  File "/site/envhub_server/worker/process.py", line 160 in _close_envs
"""


def test_slow_envs_are_named_with_what_they_execute() -> None:
    make = Make(4, "A-v0", row_offset=10)
    stacks = {STACK: [2, 0], "": [3]}
    text = (
        "slow to close: envs 10, 12, 13; each env has close_timeout=60 s; envs 10, 12 in finish ({0}env.py, line 9), "
    )
    text += "called by close ({0}env.py, line 12)"
    assert slow_to_close(make, stacks, hide_folders=False) == text.format("/home/me/")
    assert slow_to_close(make, stacks, hide_folders=True) == text.format("")
