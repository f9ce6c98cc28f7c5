"""What a client is told of a worker that ended."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_client.envs.observations import Observations
from envhub_client.lanes.base import Batch
from envhub_server.processes.worker_handle import (
    OUT_OF_MEMORY,
    PERHAPS_OUT_OF_MEMORY,
    ExitCause,
    MemoryKills,
    exit_cause,
    own_counters,
)
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
from gymnasium import spaces
from gymnasium.vector import VectorEnv

import envhub
from envhub.env_failure import EnvFailure, failure_info
from envhub.errors import EnvRaised, brief, hide_folders_in, printable, shortened
from envhub.protocol.messages import Failure, Make
from envhub.values import codec

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


STACK = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/threading.py", line 3 in wait

Current thread 0x00007f02 (most recent call first):
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


# --- texts of a peer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('File "/home/op/sims/robot.py", line 3, in act', 'File "robot.py", line 3, in act'),
        ("[Errno 2] No such file or directory: '/etc/passwd'", "[Errno 2] No such file or directory: 'passwd'"),
        ("/a/b.py:3: Warning", "b.py:3: Warning"),
        ("PYTHONPATH=/a/b:/c/d", "PYTHONPATH=b:d"),
        ("/srv", "srv"),
        ("no file '/srv/my sims/näme/a b.txt' or '/x y/z'", "no file 'a b.txt' or 'z'"),
        ("see ~/sims/arm.xml, file:///srv/sims/leg.xml", "see arm.xml, file://leg.xml"),
        ("ALE/Pong-v5 at tcp://127.0.0.1:5555/x", "ALE/Pong-v5 at tcp://127.0.0.1:5555/x"),
        ("1 / 2, and/or, 3/4, ./here, ../there", "1 / 2, and/or, 3/4, ./here, ../there"),
    ],
)
def test_folders_are_left_out(text: str, told: str) -> None:
    assert hide_folders_in(text) == told


def test_texts_are_changed_wherever_they_are() -> None:
    failure = Failure("env_raised", "env", "a\x1b[2J /x/y", args=b"/x/y", env_index=3)
    assert printable(failure) == Failure("env_raised", "env", "a\\x1b[2J /x/y", args=b"/x/y", env_index=3)
    assert hide_folders_in(failure).message == "a\x1b[2J y"
    assert hide_folders_in([("/x/y", 1), {"/k/l": None}]) == [("y", 1), {"l": None}]


def test_text_is_shortened_at_a_word() -> None:
    assert shortened("a few words", 11) == "a few words"
    assert shortened("a few words more", 11) == "a few…"
    assert shortened("a few words, more", 13) == "a few words…"
    assert shortened("a few words", 6) == "a few…"
    assert shortened("x" * 50, 10) == "x" * 9 + "…"
    assert brief(["one", "two"], 9) == "['one'…"
    assert all(len(shortened("some words of a text", most)) <= most for most in range(1, 25))


def test_exception_without_a_text_is_told_with_its_class_its_env_and_its_replay() -> None:
    told = str(EnvRaised(3, "builtins.AssertionError", "", "Traceback: …", 1, "simbox", "arm-1"))
    assert told.startswith(
        "env 3 in worker 1 of the hub at simbox raised AssertionError\n\nOn the hub's machine `envhub "
    )
    assert "`envhub replay arm-1`" in told
    assert str(EnvRaised(3, "builtins.KeyError", "'pose'")) == "env 3 raised KeyError: 'pose'"


# --- why a worker ended -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, ExitCause("exited with status 0", "", 0, "last")),
        (-11, ExitCause("was ended by SIGSEGV", "SIGSEGV", None, "last")),
        (-40, ExitCause("was ended by signal 40", "signal 40", None, "last")),
    ],
)
def test_exit_cause_names_status_or_signal(code: int, cause: ExitCause) -> None:
    assert exit_cause(code, "", "last") == cause


def test_exit_cause_says_that_the_kernel_killed_the_worker_for_lack_of_memory() -> None:
    assert exit_cause(-9, OUT_OF_MEMORY).how == "was ended by SIGKILL: the kernel killed it, out of memory"
    assert exit_cause(-9, PERHAPS_OUT_OF_MEMORY).how == "was ended by SIGKILL, perhaps out of memory"


def counter(file: Path, kills: int) -> Path:
    file.write_text(f"oom 7\noom_kill {kills}\noom_group_kill 0\n")
    return file


def test_kill_that_the_cgroup_counted_explains_one_worker(tmp_path: Path) -> None:
    own, everywhere = counter(tmp_path / "own", 3), counter(tmp_path / "all", 5)
    kills = MemoryKills(own, everywhere)
    assert kills.explain() == ""
    counter(own, 4)
    counter(everywhere, 6)
    assert [kills.explain(), kills.explain()] == [OUT_OF_MEMORY, ""]


def test_kill_that_only_the_machine_counted_may_be_another_containers(tmp_path: Path) -> None:
    kills = MemoryKills(counter(tmp_path / "own", 0), counter(tmp_path / "all", 5))
    counter(tmp_path / "all", 6)
    assert kills.explain() == PERHAPS_OUT_OF_MEMORY


def test_kill_where_nothing_is_counted_may_be_for_lack_of_memory(tmp_path: Path) -> None:
    assert MemoryKills(None, tmp_path / "none").explain() == PERHAPS_OUT_OF_MEMORY


def test_kills_before_a_worker_starts_do_not_explain_its_end(tmp_path: Path) -> None:
    own, everywhere = counter(tmp_path / "own", 0), counter(tmp_path / "all", 0)
    kills = MemoryKills(own, everywhere)
    counter(own, 1)
    counter(everywhere, 1)
    kills.forget()
    assert kills.explain() == ""


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/", "memory.events"),
        ("0::/box/hub", "box/hub/memory.events"),
        ("0::/not/seen/from/here", "memory.events"),
        ("4:memory:/hub\n0::/", "memory/hub/memory.oom_control"),
        ("5:cpu,memory:/elsewhere", "memory/memory.oom_control"),
    ],
)
def test_counters_are_found_in_any_kind_of_cgroup(tmp_path: Path, cgroup: str, file: str) -> None:
    (tmp_path / "cgroup").write_text(cgroup + "\n")
    (tmp_path / "fs" / file).parent.mkdir(parents=True)
    counter(tmp_path / "fs" / file, 0)
    assert own_counters(tmp_path / "cgroup", tmp_path / "fs") == tmp_path / "fs" / file
    assert own_counters(tmp_path / "none", tmp_path / "fs") is None


# --- what a trainer reads ---------------------------------------------------------------------------------------------


FAILURE = EnvFailure("crash", "worker 3 was ended by SIGSEGV", signal="SIGSEGV", restarts=2)


class Envs(VectorEnv[Any, Any, Any]):
    """Lays infos out for so many envs."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs


def batch(arrays: list[np.ndarray], *infos: tuple[int, Any]) -> Batch:
    return Batch(arrays, None, None, None, [(row, codec.encode(info)) for row, info in infos], [])


def test_failure_is_a_read_only_mapping_of_its_fields() -> None:
    assert envhub.EnvFailure is EnvFailure and FAILURE["signal"] == FAILURE.signal == "SIGSEGV"
    assert dict(FAILURE)["exit_status"] is None and len(FAILURE) == len(dict(FAILURE)) == 10
    with pytest.raises(KeyError):
        FAILURE["keys"]
    with pytest.raises(AttributeError):
        FAILURE.cause = "timeout"  # type: ignore[misc]


def test_failure_pickles_and_copies() -> None:
    for again in (pickle.loads(pickle.dumps(FAILURE)), copy.deepcopy(FAILURE)):
        assert again == FAILURE and hash(again) == hash(FAILURE)


def test_failures_are_laid_out_one_per_env() -> None:
    seen = Observations(spaces.Box(-1, 1, (2,)), 3, False)
    truncated = batch([np.zeros((3, 2), np.float32)], (1, codec.decode(failure_info(FAILURE))))
    infos = seen.take(truncated).batched(Envs(3))
    assert infos["env_failure"].tolist() == [None, FAILURE, None]
    assert infos["_env_failure"].tolist() == infos["_invalid_transition"].tolist() == [False, True, False]
    assert infos["invalid_transition"].tolist() == [False, True, False] and "final_obs" not in infos


def test_own_info_of_an_env_by_that_name_is_left_alone() -> None:
    seen = Observations(spaces.Discrete(3), 1, False)
    found = seen.take(batch([np.zeros(1, np.int64)], (0, {"env_failure": {"hard": True}}))).by_env()
    assert found == {0: {"env_failure": {"hard": True}}}


def test_same_step_mode_has_the_last_observation_as_final_obs() -> None:
    space = spaces.Dict({"pose": spaces.Box(-1, 1, (2,)), "gear": spaces.Discrete(5), "word": spaces.Text(3)})
    seen = Observations(space, 2, False, same_step=True)
    gears, poses = np.array([3, 4]), np.array([[0, 0.5], [1, 1]], np.float32)
    assert [leaf.shape for leaf in seen.leaves] == [(), (2,)]  # a Dict space sorts its keys
    words = [(row, [codec.encode([word]), b""]) for row, word in enumerate(("a", "b"))]
    seen.take(batch([gears, poses], *words))
    info = codec.encode({"invalid_transition": True})
    found = seen.take(batch([gears, poses], (0, [b"", info]), (1, [b"", b""]))).by_env()
    final = found[0]["final_obs"]
    assert list(found) == [0] and found[0]["final_info"] == {}
    assert final["gear"] == 3 and final["pose"].tolist() == [0, 0.5] and final["word"] == "a"
    poses[0] = 9  # the lane writes there again
    assert final["pose"].tolist() == [0, 0.5] and seen.batch([gears, poses])["word"] == ("a", "b")


def test_final_obs_of_a_part_is_that_of_its_own_env() -> None:
    seen = Observations(spaces.Box(-9, 9, (1,)), 4, False, same_step=True)
    rows = [(3, codec.encode({"invalid_transition": True, "final_info": {"n": 1}}))]
    flags = np.zeros(2, bool)
    observations = [np.array([[1.0], [3.0]], np.float32)]
    part = Batch(observations, np.zeros(2), flags, flags, rows, [], np.array([1, 3]))
    info = seen.take(part).by_env()[3]
    assert info["final_obs"].tolist() == [3.0] and info["final_info"] == {"n": 1}
