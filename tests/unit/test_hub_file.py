from __future__ import annotations

import os
from pathlib import Path

import pytest
from envhub_server.catalog import hub_file
from envhub_server.catalog.env_settings import EnvSettings
from envhub_server.catalog.registry import Recipe
from envhub_server.catalog.replay_folder import default_path
from envhub_server.processes.interpreter import OWN
from envhub_server.serve import config_of

from envhub.hub_options import HubOptions

FILE = """
bind = ["tcp://127.0.0.1:5555"]
lease = 120
max_envs = 8
workers = "auto"
keys = "keys"

[envs.arm]
env = "my_sims:make"

[envs.pole]
env = "CartPole-v1"

[envs."ALE/*"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "hub.toml").write_text(FILE)
    return tmp_path / "hub.toml"


def test_file_says_what_the_command_line_would(path: Path) -> None:
    config = config_of((), HubOptions(), path)
    assert config.binds == ("tcp://127.0.0.1:5555",) and config.workers is None
    assert config.timing.lease_s == 120 and config.limits.envs_max == 8
    assert config.keys == path.parent / "keys"  # beside the file


def test_devices_are_those_of_the_command_line_of_the_file_or_of_an_env(path: Path) -> None:
    path.write_text("gpus = [0, 1]\n[envs.arm]\nenv = 'my_sims:make'\ngpus = [2]")
    config = config_of((), HubOptions(), path)
    assert config.hosting.gpus == [0, 1] and config.tables["arm"].hosting(config.hosting).gpus == [2]
    assert EnvSettings().hosting(config.hosting).gpus == [0, 1]
    assert config_of((), HubOptions(gpus=[3]), path).hosting.gpus == [3]
    path.write_text("[envs.arm]\ngpus = [-1]")
    with pytest.raises(ValueError, match=r"Hosting\.gpus is -1"):
        config_of((), HubOptions(), path)


def test_command_line_wins(path: Path) -> None:
    config = config_of(("CartPole-v1",), HubOptions(lease=5, bind=["ipc:///tmp/x"]), path)
    assert config.timing.lease_s == 5 and config.binds == ("ipc:///tmp/x",)
    assert config.limits.envs_max == 8  # of which the command line says nothing
    assert config.registry().offered({OWN: ["CartPole-v1", "ALE/Pong-v5"]}) == [
        "ALE/Pong-v5",
        "CartPole-v1",
        "arm",
        "pole",
    ]


def test_table_offers_a_factory_an_id_or_a_pattern(path: Path) -> None:
    registry = config_of((), HubOptions(), path).registry()
    assert registry.find("arm") == Recipe("arm", entry="my_sims:make", settings=EnvSettings("my_sims:make"))
    assert registry.find("pole") == Recipe("CartPole-v1", settings=EnvSettings("CartPole-v1"))
    assert registry.find("ALE/Pong-v5") == Recipe("ALE/Pong-v5", ("ale_py",))
    assert registry.find("CartPole-v1") is None and not registry.offers_all
    assert registry.unmatched(OWN, []) == ["pole", "ALE/*"]


def test_without_a_file_the_hub_has_its_defaults() -> None:
    config = config_of(("CartPole-v1",), HubOptions())
    assert config == type(config)(envs=("CartPole-v1",), replays=default_path(os.environ))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lease = ", "hub.toml is no TOML"),
        ("lese = 3", "hub.toml: unknown key 'lese', did you mean 'lease'? Keys here are: bind, python"),
        ("lease = '3'", "hub.toml: lease: Expected `float`, got `str`"),
        ("bind = ['a', 3]", "hub.toml: bind[1]: Expected `str`, got `int`"),
        ("keys = 3", "hub.toml: keys: Expected `str`, got `int`"),
        ("lease = -1", "lease_s must be between 0 and"),
        ("workers = 0", "--workers must be at least 1"),
        ("envs = 3", "hub.toml: envs has a table for each environment, such as [envs.NAME]"),
        ("[envs.arm]\nenf = 3", "hub.toml: [envs.arm] unknown key 'enf', did you mean 'env'? Keys here are: env"),
        ("[envs.arm]\nenv = 3", "hub.toml: [envs.arm] env: Expected `str`, got `int`"),
        ("[envs.arm]\nrecycle = {episode = 3}", "[envs.arm] recycle: unknown key 'episode', did you mean 'episodes'?"),
        ("recycle = {memory = 3}", "hub.toml: recycle: unknown key 'memory', did you mean 'memory_bytes'?"),
        ("[envs.arm.variables]\n'A=B' = ''", "hub.toml: [envs.arm] variables: 'A=B': a name is not empty and has no"),
        ('[envs.arm.variables]\nA = "\\u0000"', "hub.toml: [envs.arm] variables: 'A': a name is not empty and"),
        ("[envs.arm]\nenv = 'A*'", "[envs.arm] env='A*' is neither an id, module:id nor module:factory"),
        ("[envs.'a:b']\nenv = 'CartPole-v1'", "[envs.a:b] has an env, and should have no colon in its name"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "hub.toml").write_text(text)
    with pytest.raises(ValueError) as caught:
        config_of((), HubOptions(), tmp_path / "hub.toml")
    assert why in str(caught.value) and "hub.toml" in str(caught.value)


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(hub_file.HubFileError, match=r"none.toml cannot be read: No such file"):
        hub_file.read(tmp_path / "none.toml")


def test_replays_are_kept_where_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "hub.toml"
    file.write_text('replays = "kept"\nreplays_max = 3\nreplays_bytes_max = 1000\n')
    config = config_of((), HubOptions(), file)
    assert (config.replays, config.limits.replays_max, config.limits.replays_bytes_max) == (tmp_path / "kept", 3, 1000)
    assert config_of((), HubOptions(replays_max=0), file).replay_folder() is None
