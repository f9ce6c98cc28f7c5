"""The configuration of a hub: where each value comes from, and what another one changes in a hub that runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from envhub_server.catalog.registry import EnvSettings
from envhub_server.config import AT_START, HubConfig, reloaded
from envhub_server.serve import Configuration, read_configuration, settings_of

from envhub.cli import commands
from envhub.errors import AddressError
from envhub.options import OTHER_VARIABLES, HubArguments, HubOptions, OptionError, RecycleOptions, kinds_of
from envhub.options import options_of_variables as by_variables


def read(folder: Path, text: str, environ: dict[str, str], **options: Any) -> Configuration:
    (folder / "hub.toml").write_text(text)
    return read_configuration((), HubArguments(**options), folder / "hub.toml", environ)


def test_option_comes_before_a_variable_a_variable_before_the_file_and_the_file_before_the_default(
    tmp_path: Path,
) -> None:
    text = "sessions_max = 1\nmax_envs = 1\nlease = 1\n"
    environ = {"ENVHUB_SESSIONS_MAX": "2", "ENVHUB_MAX_ENVS": "2", "HOME": "/home/me"}
    config, origins, _ = read(tmp_path, text, environ, sessions_max=3)
    assert (config.sessions_max, config.max_envs, config.lease, config.spares_max) == (3, 2, 1, 8)
    assert origins == {
        "sessions_max": "option --sessions-max",
        "max_envs": "variable ENVHUB_MAX_ENVS",
        "lease": f"file {tmp_path}/hub.toml",
    }


def test_bounds_of_recycling_come_each_from_the_first_that_says_it(tmp_path: Path) -> None:
    text = "recycle = {episodes = 1, age_s = 1, memory_bytes = '1GB'}"
    environ = {"ENVHUB_RECYCLE_EPISODES": "2", "ENVHUB_RECYCLE_AGE_S": "2"}
    _, bound, _ = commands.app.parse_args(["serve", "--recycle.episodes", "0"])
    (tmp_path / "hub.toml").write_text(text)
    config, origins, _ = read_configuration((), bound.arguments["options"], tmp_path / "hub.toml", environ)
    assert config.recycle == RecycleOptions(0, 2.0, 10**9)
    assert [*map(origins.get, ("recycle.episodes", "recycle.age_s"))] == [
        "option --recycle.episodes",
        "variable ENVHUB_RECYCLE_AGE_S",
    ]


def test_every_option_has_a_variable() -> None:
    texts = {
        "bind": "ipc:///a,tcp://127.0.0.1:5",
        "rendering": "egl",
        "allow_arguments": "A=x,y,B/*=z",
        "worker_env": "A, B",
        "gpus": "0,1",
        "recycle_episodes": "5",
        "recycle_age_s": "1.5",
        "recycle_memory_bytes": "2GB",
        "workers": "auto",
        "log_level": "debug",
        "web": "127.0.0.1:8265",
        "web_proxy": "https://hub.example.org",
        **dict.fromkeys(("name", "python", "keys"), "text"),
        **dict.fromkeys(("vector", "insecure", "allow_factories", "verbose_errors"), "true"),
    }
    numbers = [name for name in kinds_of(HubOptions) if name not in (*texts, "recycle", "replays")]
    texts |= {name: "33554432" if "bytes" in name or "memory" in name else "7" for name in numbers}
    environ = {f"ENVHUB_{name.upper()}": text for name, text in texts.items()}
    config, origins, warnings = read_configuration((), None, None, environ)
    assert {name.partition(".")[0] for name in origins} == kinds_of(HubOptions).keys() - {"replays"} and not warnings
    assert config.allow_arguments == ("A=x,y", "B/*=z") and config.worker_env == ("A", "B") and config.gpus == (0, 1)
    assert config.recycle == RecycleOptions(5, 1.5, 2 * 10**9) and config.vector is True and config.lease == 7.0


def test_variable_of_replays_keeps_its_meaning_and_comes_before_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, "replays = 'kept'", {"ENVHUB_REPLAYS": "off"}).config.replays is None
    assert read(tmp_path, "replays = 'kept'", {"ENVHUB_REPLAYS": "here"}).config.replays == Path("here")
    assert read(tmp_path, "replays = 'kept'", {"ENVHUB_REPLAYS": ""}).config.replays == tmp_path / "kept"


@pytest.mark.parametrize(
    ("variable", "text", "why"),
    [
        ("SESSIONS_MAX", "eight", 'ENVHUB_SESSIONS_MAX = "eight": expected `int`, got `str`; allowed: 1 to 65536'),
        ("SESSIONS_MAX", "0", 'ENVHUB_SESSIONS_MAX = "0": expected `int` >= 1; allowed: 1 to 65536'),
        ("GPUS", "0,x", 'ENVHUB_GPUS[1] = ["0", "x"]: expected `int`, got `str`; allowed: 0 to 1023'),
        ("INSECURE", "perhaps", 'ENVHUB_INSECURE = "perhaps": expected `bool`, got `str`; allowed: true or false'),
        ("RECYCLE_MEMORY_BYTES", "2G", "ENVHUB_RECYCLE_MEMORY_BYTES: '2G' is no number of bytes; write it such as"),
        ("RECYCLE_EPISODES", "-1", 'ENVHUB_RECYCLE_EPISODES = "-1": expected `int` >= 0; allowed: 0 to'),
        ("WORKERS", "many", 'ENVHUB_WORKERS = "many": invalid enum value \'many\'; allowed: 1 to 1024 or "auto"'),
        ("BIND", "here", "ENVHUB_BIND[0]: 'here' is no address; write tcp://HOST:PORT or ipc://PATH"),
        ("LOG_LEVEL", "loud", 'ENVHUB_LOG_LEVEL = "loud": invalid enum value \'loud\'; allowed: "debug" or'),
        ("LEASE", "nan", 'ENVHUB_LEASE = "nan": expected `float` >= 0.0; allowed: 0 to 604800'),
    ],
)
def test_wrong_value_is_an_error_of_one_line_that_names_the_variable(variable: str, text: str, why: str) -> None:
    with pytest.raises(OptionError) as caught:
        by_variables({f"ENVHUB_{variable}": text})
    assert str(caught.value).startswith(why) and len(str(caught.value).splitlines()) == 1


def test_variable_that_is_nearly_an_option_is_warned_of_and_no_other_one() -> None:
    others = {f"ENVHUB_{name}": "1" for name in OTHER_VARIABLES}
    kubernetes = {
        "ENVHUB_PORT": "tcp://10.0.0.1:1",
        "ENVHUB_SERVICE_HOST": "10.0.0.1",
        "ENVHUB_PORT_5555_TCP_PORT": "1",
    }
    assert by_variables({**others, **kubernetes, "ENVHUB_MAX_ENVS": ""}) == ({}, [])
    warned = by_variables({"ENVHUB_SESSION_MAX": "8", "MY_ENVHUB_LEASE": "1"})
    assert warned == ({}, ["ENVHUB_SESSION_MAX is no option; did you mean ENVHUB_SESSIONS_MAX?"])


def test_settings_are_shown_with_their_origins_and_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "hub.toml"
    file.write_text(
        'lease = 5\nrecycle = {age_s = 9}\n[envs.arm]\nenv = "sims:make"\nvariables = {HF_TOKEN = "x", SIDE = "left"}\n'
    )
    read = read_configuration(("CartPole-v1",), None, file, {"ENVHUB_NAME": "A" * 42 + "b"})
    rows = {name: (value, origin) for name, value, origin in settings_of(read, file)}
    assert {*kinds_of(HubOptions)} - {"recycle"} < rows.keys()
    assert rows["lease"] == (5.0, f"file {file}") and rows["recycle.age_s"] == (9.0, f"file {file}")
    assert rows["recycle.episodes"] == (0, "default") and rows["envs"] == (["CartPole-v1"], "arguments")
    assert rows["bind"][0][0].startswith("ipc://") and rows["bind"][1] == "default"  # where it would listen
    assert rows["name"] == ("***", "variable ENVHUB_NAME")
    assert rows["envs.arm.variables"] == ({"HF_TOKEN": "***", "SIDE": "left"}, f"file {file}")
    assert json.loads(json.dumps(rows))


def test_show_config_prints_a_line_for_each_setting_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENVHUB_SESSION_MAX", "4")
    monkeypatch.setenv("ENVHUB_MAX_ENVS", "4")
    with pytest.raises(SystemExit) as ended:
        commands.app(["serve", "CartPole-v1", "--lease", "5", "--show-config"])
    found = capsys.readouterr()
    assert ended.value.code == 0 and "max_envs\t4\tvariable ENVHUB_MAX_ENVS\n" in found.out
    assert "lease\t5.0\toption --lease\n" in found.out
    assert found.err == "envhub serve: ENVHUB_SESSION_MAX is no option; did you mean ENVHUB_SESSIONS_MAX?\n"
    with pytest.raises(SystemExit):
        commands.app(["serve", "CartPole-v1", "--show-config", "--json"])
    assert {"name": "workers", "value": "auto", "origin": "default"} in json.loads(capsys.readouterr().out)


# --- another configuration ------------------------------------------------------------------------------------------


def test_hub_goes_on_with_what_was_read_but_for_what_is_read_at_its_start() -> None:
    current = HubConfig(bind=("ipc:///a",), lease=60.0, python="python3.9", tables={"arm": EnvSettings("sims:make")})
    read = replace(current, bind=("ipc:///b",), lease=5.0, python="", tables={"leg": EnvSettings(spares=1)})
    config, changed, waiting = reloaded(current, read)
    assert config == replace(read, bind=("ipc:///a",), python="python3.9")
    assert changed == {
        "lease": [60.0, 5.0],
        "envs.arm": [{"env": "sims:make"}, None],
        "envs.leg": [None, {"spares": 1}],
    }
    assert waiting == {"bind": [["ipc:///a"], ["ipc:///b"]], "python": ["python3.9", ""]}
    assert reloaded(config, read) == (config, {}, waiting)  # what waits for a restart is said each time


def test_each_option_that_is_read_at_the_start_is_one() -> None:
    assert {*AT_START} <= kinds_of(HubOptions).keys()


def test_secrets_in_changes_are_hidden() -> None:
    tables = [{"arm": EnvSettings(variables={"API_KEY": key})} for key in ("old", "new")]
    _, changed, _ = reloaded(*(HubConfig(tables=table) for table in tables))
    assert changed == {"envs.arm": [{"variables": {"API_KEY": "***"}}] * 2}


def test_offer_of_all_envs_is_refused_where_other_machines_reach_the_hub() -> None:
    current = HubConfig(bind=("tcp://0.0.0.0:5555",), envs=("CartPole-v1",))
    with pytest.raises(AddressError, match="name the environments to offer there"):
        reloaded(current, replace(current, bind=("ipc:///a",), envs=()))
