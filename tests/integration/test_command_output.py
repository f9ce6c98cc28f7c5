"""Every command ends in good order where its output cannot be written, and has no colours where none are wanted."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cyclopts
import pytest
from hubs import ServedHub

from envhub.cli import commands

# Arguments of commands that write without harm; of any other command the help is written.
ARGUMENTS = {
    "envs": "{hub} CartPole-v1",
    "fleet ls": "{hub} --json",
    "health": "{hub}",
    "keys add": "eve --keys {folder}/keys",
    "keys list": "--keys {folder}/keys",
    "keygen": "",
    "ls": "",
    "replays": "{folder}",
    "serve": "CartPole-v1 --show-config",
    "sessions": "{hub} --json",
}
# It has imported once what most commands need, and runs each in a fork with the output of each kind, all at once.
RUN = """
import contextlib, io, json, os, sys
import envhub
from envhub.cli import commands, main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    commands.app(["serve", "--help"])
begun = []
for line, kind in json.loads(sys.stdin.read()):
    reading, writing = os.pipe()
    told, tell = os.pipe()
    os.close(reading)
    output = writing if kind == "closed" else os.open("/dev/full", os.O_WRONLY)
    if (pid := os.fork()) == 0:
        os.dup2(output, 1)
        os.dup2(tell, 2)
        os.close(tell)
        sys.argv = ["envhub", *line]
        main()
        sys.exit()
    os.close(writing)
    os.close(tell)
    begun.append((pid, open(told)))
errors = [stderr.read() for _, stderr in begun]
statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in begun]
print(json.dumps([*zip(statuses, errors)]))
"""
COLOUR = re.compile(r"\x1b\[[\d;]*\b[349]\d")


def names(app: cyclopts.App, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command, of groups too."""
    for name in app:
        if name[0] != "-":
            if app[name].default_command:
                yield (*before, name)
            else:
                yield from names(app[name], (*before, name))


@pytest.fixture(scope="module")
def place(hub: ServedHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "an-env-0123456789abcdef-env0-1.replay").write_bytes(b"none")
    environ = {**os.environ, **dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"), str(folder))}
    subprocess.run([sys.executable, "-m", "envhub", "keys", "add", "bob", "--keys", folder / "keys"], check=True)
    return {"hub": hub.ipc, "folder": folder, "environ": environ}


def line_of(name: tuple[str, ...], place: dict[str, Any]) -> list[str]:
    return [*name, *ARGUMENTS.get(" ".join(name), "--help").format(**place).split()]


@pytest.mark.long
@pytest.mark.parametrize("with_help", [False, pytest.param(True, marks=pytest.mark.long)])
def test_output_that_cannot_be_written_ends_every_command_with_1_and_no_traceback(
    place: dict[str, Any], with_help: bool
) -> None:
    named = [name for name in names(commands.app) if with_help or " ".join(name) in ARGUMENTS]
    lines = [(line_of(name, place), "closed") for name in named]
    lines += [(line_of(tuple(name.split()), place), "disk") for name in ARGUMENTS]
    ran = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(lines), capture_output=True, text=True, env=place["environ"]
    )
    assert ran.stderr == ""
    for (line, kind), (status, told) in zip(lines, json.loads(ran.stdout), strict=True):
        assert (status, "Traceback" in told, told.count("\n") <= 1) == (1, False, True), (line, kind, status, told)


def on_a_terminal(line: list[str], environ: dict[str, str], until: str = "") -> str:
    """What a command writes to a terminal, until it ends or has written that."""
    ours, theirs = pty.openpty()
    written = ""
    with subprocess.Popen([sys.executable, "-m", "envhub", *line], stdout=theirs, stderr=theirs, env=environ) as run:
        os.close(theirs)
        try:
            while not until or until not in written:
                written += os.read(ours, 1 << 16).decode(errors="replace")
        except OSError:  # the end, of a terminal
            pass
        run.terminate()
    os.close(ours)
    return written


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({}, True),
        *(pytest.param(each, False, marks=pytest.mark.long) for each in ({"NO_COLOR": "1"}, {"TERM": "dumb"})),
    ],
    ids=str,
)
def test_terminal_has_colours_where_they_are_wanted(
    place: dict[str, Any], variables: dict[str, str], coloured: bool, tmp_path: Path
) -> None:
    inherited = {name: value for name, value in place["environ"].items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    environ = {**inherited, "TERM": "xterm-256color", **variables}
    log = on_a_terminal(["serve", "CartPole-v1", "--bind", f"ipc://{tmp_path}/hub"], environ, "connect with")
    assert "hub_started" in log and bool(COLOUR.search(log)) is coloured
    assert bool(COLOUR.search(on_a_terminal(["serve", "--help"], environ))) is coloured


def test_terminal_obeys_no_text_of_a_client_in_the_log(place: dict[str, Any]) -> None:
    logged = "from envhub_server.log import Logger; Logger('envhub.hub').warning('refused', why='\\x1b[2J')"
    run = [sys.executable, "-c", f"from envhub_server import log; log.configure(); {logged}"]
    ours, theirs = pty.openpty()
    subprocess.run(run, stderr=theirs, env={**place["environ"], "TERM": "dumb"}, check=True)
    assert b"why=\\x1b[2J" in os.read(ours, 1 << 16)
    os.close(ours)
    os.close(theirs)
