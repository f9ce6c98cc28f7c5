"""The text of an exit cause, and how a lack of memory is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from envhub_server.processes.worker_handle import ExitCause, MemoryKills, OutOfMemory, exit_cause, own_counters


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, ExitCause("exited with status 0", "", 0, "last")),
        (-11, ExitCause("was ended by SIGSEGV", "SIGSEGV", None, "last")),
        (-40, ExitCause("was ended by signal 40", "signal 40", None, "last")),
    ],
)
def test_exit_cause_names_status_or_signal(code: int, cause: ExitCause) -> None:
    assert exit_cause(code, OutOfMemory.NO, "", "last") == cause


def test_exit_cause_says_that_the_kernel_killed_the_worker_for_lack_of_memory() -> None:
    assert exit_cause(-9, OutOfMemory.YES, "", "").how == "was ended by SIGKILL: the kernel killed it, out of memory"
    assert exit_cause(-9, OutOfMemory.PERHAPS, "", "").how == "was ended by SIGKILL, perhaps out of memory"


def counter(file: Path, kills: int) -> Path:
    file.write_text(f"oom 7\noom_kill {kills}\noom_group_kill 0\n")
    return file


def test_kill_that_the_cgroup_counted_explains_one_worker(tmp_path: Path) -> None:
    own, everywhere = counter(tmp_path / "own", 3), counter(tmp_path / "all", 5)
    kills = MemoryKills(own, everywhere)
    assert kills.explain() is OutOfMemory.NO
    counter(own, 4)
    counter(everywhere, 6)
    assert [kills.explain(), kills.explain()] == [OutOfMemory.YES, OutOfMemory.NO]


def test_kill_that_only_the_machine_counted_may_be_another_containers(tmp_path: Path) -> None:
    kills = MemoryKills(counter(tmp_path / "own", 0), counter(tmp_path / "all", 5))
    counter(tmp_path / "all", 6)
    assert kills.explain() is OutOfMemory.PERHAPS


def test_kill_where_nothing_is_counted_may_be_for_lack_of_memory(tmp_path: Path) -> None:
    assert MemoryKills(None, tmp_path / "none").explain() is OutOfMemory.PERHAPS


def test_kills_before_a_worker_starts_do_not_explain_its_end(tmp_path: Path) -> None:
    own, everywhere = counter(tmp_path / "own", 0), counter(tmp_path / "all", 0)
    kills = MemoryKills(own, everywhere)
    counter(own, 1)
    counter(everywhere, 1)
    kills.forget()
    assert kills.explain() is OutOfMemory.NO


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
