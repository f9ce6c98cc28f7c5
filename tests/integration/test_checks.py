"""What is found before anything runs: ``serve --check``, ``validate`` and ``doctor``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from envhub_server.doctor import of_hub
from envhub_server.validate import lines_of
from hubs import HERE, serve

HANGS = """
[envs.hangs]
env = "checked_sims:Hangs"
"""
CHECKED = """
[envs.good]
env = "CartPole-v1"

[envs.batch]
env = "CartPole-v1"
vector = true

[envs.team]
env = "team_envs:duel"

[envs.misspelt]
env = "CartPole-v7"

[envs.missing]
env = "nomod:make"

[envs.raises]
env = "checked_sims:raises"

[envs.crashes]
env = "checked_sims:Crashes"

[envs.steps]
env = "checked_sims:Divides"

[envs.wants]
env = "checked_sims:wants"

[envs.other]
env = "Pendulum-v1"
python = "/nowhere/python"
"""


def command(*arguments: str, cwd: Path = HERE) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "envhub", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, cwd=cwd)


def found(*arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit status of a command, and the verdict and the text of each subject."""
    ran = command(*arguments, "--json")
    printed = json.loads(ran.stdout)
    lines = printed if isinstance(printed, list) else printed["lines"]
    return ran.returncode, {line["subject"]: (line["verdict"], line["text"]) for line in lines}


def test_check_makes_resets_and_steps_every_env_and_names_each_fault_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text(CHECKED)
    ran = command("serve", "--config", str(tmp_path / "hub.toml"), "--check")
    lines = dict(line[7:].split(": ", 1) for line in ran.stdout.splitlines())
    verdicts = {line[7:].partition(": ")[0]: line[:7].strip() for line in ran.stdout.splitlines()}
    assert ran.returncode == 1 and len(lines) == CHECKED.count("[envs.")
    assert {name for name, verdict in verdicts.items() if verdict == "ok"} == {"good", "batch", "team"}
    assert verdicts.pop("wants") == "note" and "missing 1 required positional argument" in lines["wants"]
    for name, (what, remedy) in {
        "misspelt": ("no id 'CartPole-v7' is registered", "did you mean 'CartPole-v1'"),
        "missing": ("No module named 'nomod'", "install the package that has it"),
        "raises": ("in its making: ValueError: no licence", "checked_sims.py, line "),
        "crashes": ("in step: its process was ended by SIGABRT; it executed act", "correct the env"),
        "steps": ("in step: ZeroDivisionError: division by zero", "correct the env"),
        "other": ("/nowhere/python", "no such file"),
    }.items():
        assert verdicts[name] == "wrong" and what in lines[name] and remedy in lines[name], lines[name]


@pytest.mark.long
def test_check_allows_an_env_its_time(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text(HANGS)
    status, lines = found("serve", "--config", str(tmp_path / "hub.toml"), "--check", "--check-timeout", "10")
    verdict, text = lines["hangs"]
    assert (status, verdict) == (1, "wrong") and "allow it more time" in text
    assert "in reset: it was not done in time; it executed reset" in text


@pytest.mark.long
def test_check_of_what_can_be_served_succeeds_and_listens_nowhere(tmp_path: Path) -> None:
    assert command("keys", "add", "alice", "--keys", str(tmp_path / "keys")).returncode == 0
    address = f"ipc://{tmp_path}/hub.sock"
    with serve(tmp_path, "CartPole-v1", binds=[address]):  # a hub that runs is not in its way
        options = ["--bind", address, "--keys", str(tmp_path / "keys"), "--check"]
        assert found("serve", "CartPole-v1", *options) == (0, {"CartPole-v1": ("ok", "made, reset and stepped")})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        pytest.param(["--max-envs", "0"], "--max-envs = 0: expected `int` >= 1", marks=pytest.mark.long),
        pytest.param(["--bind", "tcp://0.0.0.0:5555"], "name the environments to offer", marks=pytest.mark.long),
        (["--keys", "/nowhere/keys"], "there is no folder /nowhere/keys; `envhub keys add NAME --keys"),
    ],
)
def test_check_tells_what_is_wrong_with_the_configuration(options: list[str], why: str) -> None:
    status, lines = found("serve", *options, "--check")
    assert status == 1 and [*lines] == ["configuration"] and why in lines["configuration"][1]


# --- validate ---------------------------------------------------------------------------------------------------------


def test_env_that_does_what_it_should_is_valid() -> None:
    status, lines = found("validate", "sims:counter")
    assert status == 0 and {verdict for verdict, _ in lines.values()} == {"ok"}
    assert "two runs of 200 steps with the same seed and actions are equal" in lines["determinism"][1]
    assert "num_workers=" in lines["workers"][1] and "MB for another one" in lines["memory"][1]


SLOWER = [
    ("Random", 1, "Gymnasium's checker", "wrong", "AssertionError"),
    ("Waits", 0, "wall over CPU", "note", "it waits"),
    ("Lone", 0, "may share a process", "note", "RuntimeError: only one per process); say one_per_process"),
    ("Divides", 1, "makes, resets and steps", "wrong", "ZeroDivisionError: division by zero"),
    ("nothing", 1, "makes, resets and steps", "wrong", "has no attribute 'nothing'"),
]


@pytest.mark.parametrize(
    ("env", "status", "subject", "verdict", "text"),
    [
        ("Random", 1, "determinism", "wrong", "differ in result 1"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in SLOWER),
        ("Threads", 0, "threads", "note", "left after close: poller, poller, 2 processes; end them in close"),
        ("Threads", 0, "snapshots", "note", "none, because of the child process"),
        ("Crashes", 1, "makes, resets and steps", "wrong", "its process was ended by SIGABRT"),
    ],
)
def test_env_that_does_what_it_should_not_is_told_so(
    env: str, status: int, subject: str, verdict: str, text: str
) -> None:
    code, lines = found("validate", f"checked_sims:{env}")
    assert code == status and lines[subject][0] == verdict and text in lines[subject][1], lines


@pytest.mark.long
def test_env_of_a_file_is_tried_as_its_table_says_within_its_time(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text(HANGS)
    code, lines = found("validate", "hangs", "--config", str(tmp_path / "hub.toml"), "--timeout", "8")
    assert code == 1 and "it was not done in time; it executed reset" in lines["makes, resets and steps"][1]


def test_env_that_is_not_in_the_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text(HANGS)
    ran = command("validate", "none", "--config", str(tmp_path / "hub.toml"))
    assert (ran.returncode, ran.stderr) == (2, "envhub validate: 'none' is not on offer\n")


FACTS: dict[str, Any] = {
    "made_s": 1.0,
    "memory_bytes": 10 << 20,
    "steps": 200,
    "reset_ms": 1.0,
    "step_ms": 1.0,
    "cpu_ms": 1.0,
    "threads": 0,
    "processes": 0,
    "shared": [],
    "may_share": True,
    "cheap": False,
    "second_error": "",
    "further_bytes": 1 << 20,
    "differs": None,
    "refused": "",
    "not_copied": [],
    "remarks": [],
    "left": [],
}


@pytest.mark.parametrize(
    ("facts", "workers"),
    [
        ({}, "num_workers=4 for 64 envs on 4 CPUs: one per CPU"),
        ({"cpu_ms": 0.1}, "num_workers=40 for 64 envs on 4 CPUs: more than CPUs, since a step waits"),
        ({"may_share": False}, "num_workers=4 for 64 envs on 4 CPUs: one per CPU: shared_process"),
        ({"may_share": False, "shared": ["os.environ"]}, "num_workers=64 for 64 envs on 4 CPUs: a process per env"),
        (
            {"may_share": False, "second_error": "no", "memory_bytes": 1 << 30},
            "num_workers=16 for 64 envs on 4 CPUs: a process per",
        ),
    ],
)
def test_number_of_workers_follows_from_what_was_found(facts: dict[str, Any], workers: str) -> None:
    lines = lines_of({**FACTS, **facts}, 4, 32 << 30)
    assert lines[-1].subject == "workers" and lines[-1].text.startswith(workers)


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_doctor_says_what_to_run_where_a_limit_is_too_low() -> None:
    ran = subprocess.run(
        ["bash", "-c", f"ulimit -n 300; OMP_NUM_THREADS=7 {sys.executable} -m envhub doctor --json"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    lines = {line["subject"]: line for line in json.loads(ran.stdout)}
    assert ran.returncode == 1 and lines["open files"]["verdict"] == "wrong"
    assert "run: ulimit -Hn 65536" in lines["open files"]["text"]
    assert (
        lines["BLAS threads"]["text"] == "OMP_NUM_THREADS=7: each worker starts that number; run: unset OMP_NUM_THREADS"
    )
    assert {"versions", "processes", "locked memory", "memory", "shared memory", "CPUs", "clock"} <= lines.keys()
    assert {"/dev/shm", "autogroup", "rendering by egl", "rendering by osmesa", "interpreter"} <= lines.keys()


@pytest.mark.long
def test_doctor_asks_a_hub(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", "sim=nomod:make", "--sessions-max", "1") as hub:
        status, lines = found("doctor", hub.ipc)
    assert status == 1 and lines["hub"][0] == "ok" and "No module named 'nomod'" in lines["env sim"][1]


def test_what_a_hub_says_of_itself_is_judged() -> None:
    stats = {
        "status": "draining",
        "sessions": 3,
        "uptime_s": 7.0,
        "unready": {},
        "loop_lag_s": 0.5,
        "capacity": {"sessions_free": 0, "envs_free": 5},
        "failures": {"internal": 2},
        "restarts": 4,
        "handshakes_refused": 0,
    }
    assert [(each.subject, each.verdict) for each in of_hub(stats)] == [
        *(("hub", "note"), ("loop", "note"), ("sessions", "wrong"), ("bugs", "wrong"), ("restarts", "note"))
    ]
