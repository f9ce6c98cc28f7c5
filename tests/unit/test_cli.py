"""The ``envhub`` command as an operator and a client run it, in this process and without a hub."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import socket
import tempfile
from pathlib import Path
from typing import get_args

import cyclopts
import pytest
from envhub_client.connection import known_hubs
from envhub_server.network.key_folder import KeyFolder

from envhub import cli
from envhub.cli import commands, hubs
from envhub.cli.commands import shown_default
from envhub.options import HubOptions, RecycleOptions, Size, kinds_of
from envhub.transport.address import key_of, text_of

KEY = "-" + "A" * 42  # one key in 64 begins so


def run(*arguments: str) -> int:
    """Run the command; returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        cli.run([*arguments])
    return int(ended.value.code or 0)


def test_key_that_begins_with_a_hyphen_is_admitted_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert run("keys", "add", "alice", "--public", KEY, "--keys", str(folder)) == 0
    assert KeyFolder(folder).holder("alice")[1] == [key_of(KEY)]
    assert run("keys", "remove", "alice", "--key", KEY, "--keys", str(folder)) == 0
    assert KeyFolder(folder).names() == []


@pytest.mark.parametrize(
    ("arguments", "way"),
    [
        (
            ["conformance", "tcp://127.0.0.1:1", "--json"],
            "a clone of the repository: cd tests && python -m conformance.kit",
        ),
        (["record", "CartPole-v1", "runs", "--episodes", "3"], "envhub.make_vec(..., record=FOLDER)"),
        (["fleet", "logs", "sims", "0"], "`ray logs actor --id ID`"),
        (["fleet", "up", "CartPole-v1", "--announce", "hubs"], "by dns://NAME:PORT or by ray://FLEET"),
        (["serve", "CartPole-v1", "--announce=hubs"], "by dns://NAME:PORT or by ray://FLEET"),
        (["serve", "--audit", "audit"], "the lines of the hub's log with audit=true say who did what"),
        (["serve", "--replays-max", "3"], "the files of replays are limited by their bytes"),
        (["bench", "CartPole-v1", "--plot", "chart.svg"], "cd tests/benchmarks && python -m side_by_side -h"),
        (["replay", "CartPole-v1-0", "--until", "1"], "--pdb stops in the step that failed"),
    ],
)
def test_command_or_option_that_is_no_more_names_the_way_that_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], way: str
) -> None:
    monkeypatch.setattr("sys.argv", ["envhub", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == cli.EXIT_USAGE
    assert f"envhub {arguments[0]}" in (said := capsys.readouterr().err) and way in said


@pytest.mark.parametrize("output", ["/dev/full", None])
def test_no_key_is_admitted_whose_address_cannot_be_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str | None
) -> None:
    with contextlib.ExitStack() as until:
        if output is not None:
            until.enter_context(contextlib.suppress(OSError))  # of what is written at its close
        monkeypatch.setattr("sys.stdout", output and until.enter_context(open(output, "w")))
        assert run("keys", "add", "alice", "--keys", str(tmp_path)) == 1
    assert "no key is added, because its address cannot be printed: " in capsys.readouterr().err
    assert KeyFolder(tmp_path).names() == []


def test_login_without_a_name_replaces_no_other_hub_of_the_same_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    kept, other = (f"envhub://{text_of(bytes(64))}@127.0.0.1:{port}" for port in (5555, 5556))
    known_hubs.keep("127.0.0.1", kept)
    monkeypatch.setattr("sys.stdin", io.StringIO(other))
    assert run("login") == 2
    assert "another hub is kept as '127.0.0.1'; give this one a name: envhub login NAME" in capsys.readouterr().err
    assert (tmp_path / "envhub/hubs/127.0.0.1").read_text() == f"{kept}\n"


def test_folder_in_the_place_of_a_kept_hub_or_of_the_hubs_key_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "envhub/hubs/box").mkdir(parents=True)
    (tmp_path / "keys/server.key").mkdir(parents=True)
    why = "cannot be read: [Errno 22] this is no regular file"
    assert run("ls") == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(f"box: {tmp_path}/envhub/hubs/box {why}")
    for command in (["health", "box"], ["envs", "box"], ["keys", "add", "alice", "--keys", str(tmp_path / "keys")]):
        assert run(*command) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("envhub ") and why in line


def test_hubs_that_do_not_answer_are_waited_for_together_and_that_of_the_environment_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with contextlib.ExitStack() as silent:
        servers = [silent.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        ports = [server.getsockname()[1] for server in servers]
        for port in ports[1:]:
            known_hubs.keep(f"hub{port}", f"tcp://127.0.0.1:{port}")
        monkeypatch.setenv("ENVHUB_ADDRESS", f"envhub://{text_of(bytes(64))}@127.0.0.1:{ports[0]}")
        assert run("ls") == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 7 and any(line.startswith(f"envhub://***@127.0.0.1:{ports[0]}: ") for line in listed)


def test_logout_removes_a_kept_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    known_hubs.keep("box", f"envhub://{text_of(bytes(64))}@127.0.0.1:5555")
    assert run("logout", "box") == 0 and known_hubs.names() == []
    assert run("logout", "box") == 1
    assert "envhub logout: no hub is kept as 'box'; `envhub ls` lists the names" in capsys.readouterr().err


def test_login_without_an_input_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run("login") == 1
    assert "no address was given: paste" in capsys.readouterr().err


# --- health -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        *("", "tcp://127.0.0.1:1", "ipc:///tmp/hub.sock --timeout 3", "ssh://box --timeout 0.25"),
        *("--timeout 007.50", "ipc://@name --timeout 123456789", "envhub://key@box:1"),
    ],
)
def test_health_reads_a_plain_command_line_as_the_parser_does(line: str) -> None:
    plain = cli.plain_arguments(["health", *line.split()])
    command, bound, unknown = commands.app.parse_args(["health", *line.split()], print_error=False)[:3]
    bound.apply_defaults()
    assert command is hubs.health and not unknown
    assert plain == (bound.arguments["address"], bound.arguments["timeout"])


@pytest.mark.parametrize(
    "line",
    [
        *("", "--help", "ls", "healthy", "HEALTH", "health --help", "health --", "health --timeout 0", "health -h"),
        *("health --timeout 0.0", "health --timeout -1", "health --timeout nan", "health --timeout", "health --nope"),
        *("health --timeout=3 tcp://127.0.0.1:1", "health --timeout 3 tcp://127.0.0.1:1", "health tcp://127.0.0.1:1 5"),
        *("health --address tcp://127.0.0.1:1", "health tcp://127.0.0.1:1 --timeout 1e3", "health box", "health none"),
        *(
            "health tcp://127.0.0.1:1 --timeout 1_0",
            "health --timeout 3 3",
            "health tcp://a:1 tcp://a:2",
            "health --x://y",
            "health --timeout ٣",
        ),
    ],
)
def test_health_leaves_any_other_command_line_to_the_parser(line: str) -> None:
    assert cli.plain_arguments(line.split()) is None
    assert cli.plain_arguments(["health", ""]) is None


# --- help -------------------------------------------------------------------------------------------------------------


def arguments_of(*command: str) -> list[cyclopts.Argument]:
    """The arguments that the help of a command shows."""
    app = functools.reduce(cyclopts.App.__getitem__, command, commands.app)
    return [each for each in app.assemble_argument_collection(parse_docstring=True) if each.show and not each.children]


COMMANDS = [(name,) for name in commands.app if name[0] != "-" and commands.app[name].default_command]
COMMANDS += [("keys", name) for name in commands.app["keys"] if name[0] != "-"]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_option_has_a_help_of_its_own(command: tuple[str, ...]) -> None:
    texts = [argument.parameter.help for argument in arguments_of(*command)]
    assert all(texts) and len({*texts}) == len(texts)


def test_options_of_bytes_are_shown_as_sizes() -> None:
    tables = {"": HubOptions, "recycle.": RecycleOptions}
    named = {
        f"--{prefix}{name.replace('_', '-')}"
        for prefix, table in tables.items()
        for name in kinds_of(table)
        if "bytes" in name or "memory" in name
    }
    arguments = arguments_of("serve")
    assert {each.name for each in arguments if Size in (each.hint, *get_args(each.hint))} == named


@pytest.mark.parametrize(
    ("default", "shown"), [(None, None), (False, None), ("", None), ((), None), (0, "0"), (0.5, "0.5"), ("a", "a")]
)
def test_help_shows_no_default_where_nothing_is_given(default: object, shown: str | None) -> None:
    assert shown_default(default) == shown


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["keys", "add", "a", "--keys", "new", "--at", "box"],
            "--at 'box' has no port; write HOST:PORT, such as simbox:",
        ),
        (["keys", "add", "a", "--at", "bad host:5555", "--keys", "new"], "'bad host' is no host"),
        (["keys", "add", "a", "--keys", ""], "a path is not empty"),
        (["serve", "--keys", ""], "a path is not empty"),
        (["serve", "--config="], "a path is not empty"),
        (["keys", "list", "--keys", "none"], "there is no folder none; `envhub keys add NAME --keys DIR` makes one"),
        (["keys", "list", "--keys", "file"], "there is no folder file; `envhub keys add NAME --keys DIR` makes one"),
        (["keys", "remove", "a", "--keys", "folder"], "there is no client 'a' in folder/clients; `envhub keys"),
        (["login"], "no address was given: paste the one that `envhub keys add` has printed"),
        (["replays", "none"], "there is no folder none; name the one of `envhub serve --replays`"),
        (["replay", "none"], "; `envhub replays` lists the names"),
        (["replay", "file"], "envhub replay: file is no replay: "),
        (["serve", "CartPole-v1", "--replays", "file"], "replays cannot be kept in file, which is no"),
        (["health", "tcp://127.0.0.1:1", "--timeout", "0"], "Must be > 0"),
        (["envs", "tcp://127.0.0.1:1", "--timeout", "nan"], "Must be < inf"),
        (["bench", "CartPole-v1", "--seconds", "0"], "Must be > 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistake_is_told_in_a_line_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert run(*arguments) in (cli.EXIT_FAILED, cli.EXIT_USAGE)
    found = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said in found and "Traceback" not in found
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


def test_folder_of_keys_without_clients_says_how_one_is_admitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("keys", "list", "--keys", str(tmp_path)) == 0
    assert f"`envhub keys add NAME --keys {tmp_path}` admits one" in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(
    "arguments",
    [
        ["keys", "add", "a", "--keys", "{}/keys"],
        ["keys", "list", "--keys", "{}"],
        ["replays", "{}/x"],
        ["replay", "{}/x"],
        ["ls"],
        ["health", "box"],
        ["keygen"],
    ],
    ids=" ".join,
)
def test_place_that_this_user_may_not_enter_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    import envhub_client.connection.known_hubs  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:  # of mode 0700
        monkeypatch.setenv("XDG_CONFIG_HOME", folder)
        monkeypatch.setattr("sys.argv", ["envhub", *(each.format(folder) for each in arguments)])
        os.seteuid(65534)
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main()
        finally:
            os.seteuid(0)
    found = capsys.readouterr().err
    assert ended.value.code == cli.EXIT_USAGE and len(found.splitlines()) == 1
    assert found.startswith(f"envhub: user 65534 (nobody) may not use {folder}/")
    assert "name another place, or run this as its owner" in found


def test_fleet_without_a_name_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ENVHUB_ADDRESS", raising=False)
    assert run("fleet", "ls") == 2 and "name the hubs to list, or set ENVHUB_ADDRESS" in capsys.readouterr().err
    monkeypatch.setenv("ENVHUB_ADDRESS", f"envhub://{text_of(bytes(64))}@127.0.0.1:1")
    assert run("fleet", "ls", "--timeout", "0.2") == 1
    listed = capsys.readouterr()
    assert "envhub://***@127.0.0.1:1\t-\tunreachable" in listed.out and "no hub answered" in listed.err
