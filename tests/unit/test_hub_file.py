from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from envhub_server import config
from envhub_server.catalog.registry import EnvSettings, Recipe
from envhub_server.config import HubConfig, usable_cpus
from envhub_server.network.connections import Quotas
from envhub_server.processes.interpreter import OWN
from envhub_server.replay import default_path
from envhub_server.serve import read_configuration

from envhub import cli
from envhub.cli import commands
from envhub.options import HubArguments, HubOptions, RecycleOptions, byte_count, kinds_of, options_from

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
    config = read_configuration((), None, path).config
    assert config.bind == ("tcp://127.0.0.1:5555",) and config.workers == "auto"
    assert config.lease == 120 and config.max_envs == 8
    assert config.keys == path.parent / "keys"  # beside the file


def test_devices_are_those_of_the_command_line_of_the_file_or_of_an_env(path: Path) -> None:
    path.write_text("gpus = [0, 1]\n[envs.arm]\nenv = 'my_sims:make'\ngpus = [2]")
    config = read_configuration((), None, path).config
    assert config.hosting.gpus == [0, 1] and config.tables["arm"].hosting(config.hosting).gpus == [2]
    assert EnvSettings().hosting(config.hosting).gpus == [0, 1]
    assert read_configuration((), HubArguments(gpus=[3]), path).config.hosting.gpus == [3]
    path.write_text("[envs.arm]\ngpus = [-1]")
    with pytest.raises(ValueError, match=r"\[envs\.arm\] gpus\[0\] = \[-1\]: expected `int` >= 0; allowed: 0 to 1023"):
        read_configuration((), None, path)


def test_command_line_wins(path: Path) -> None:
    config = read_configuration(("CartPole-v1",), HubArguments(lease=5, bind=["ipc:///tmp/x"]), path).config
    assert config.lease == 5 and config.bind == ("ipc:///tmp/x",)
    assert config.max_envs == 8  # of which the command line says nothing
    assert config.registry().offered({OWN: ["CartPole-v1", "ALE/Pong-v5"]}) == [
        "ALE/Pong-v5",
        "CartPole-v1",
        "arm",
        "pole",
    ]


def test_table_offers_a_factory_an_id_or_a_pattern(path: Path) -> None:
    registry = read_configuration((), None, path).config.registry()
    assert registry.find("arm") == Recipe("arm", entry="my_sims:make", settings=EnvSettings("my_sims:make"))
    assert registry.find("pole") == Recipe("CartPole-v1", settings=EnvSettings("CartPole-v1"))
    assert registry.find("ALE/Pong-v5") == Recipe("ALE/Pong-v5", ("ale_py",))
    assert registry.find("CartPole-v1") is None and not registry.offers_all
    assert registry.unmatched(OWN, []).keys() == {"pole", "ALE/*"}


def test_without_a_file_the_hub_has_its_defaults() -> None:
    config = read_configuration(("CartPole-v1",)).config
    assert config == type(config)(envs=("CartPole-v1",), replays=default_path(os.environ))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lease = ", "hub.toml is no TOML"),
        ("lese = 3", "hub.toml: unknown key 'lese', did you mean 'lease'? Keys here are: bind, name, python"),
        ("bind = ['ipc://a', 3]", 'hub.toml: bind[1] = ["ipc://a", 3]: expected `str`, got `int`'),
        ("keys = ''", "hub.toml: keys: a path is not empty"),
        ("[envs.arm]\nld_library_path = ['a', '']", "ld_library_path[1]: a path is not empty"),
        ("x = " + "[" * 6000, "hub.toml cannot be read: maximum recursion depth"),
        ("workers = 0", 'hub.toml: workers = 0: expected `int` >= 1; allowed: 1 to 1024 or "auto"'),
        ("envs = 3", "hub.toml: envs has a table for each environment, such as [envs.NAME]"),
        ("[envs.arm]\nenf = 3", "hub.toml: [envs.arm] unknown key 'enf', did you mean 'env'? Keys here are: env"),
        (
            "[envs.arm]\nrecycle = {episode = 3}",
            "hub.toml: [envs.arm] recycle: unknown key 'episode', did you mean 'episodes'? Keys here are: ep",
        ),
        (
            "[envs.arm.variables]\n'A=B' = ''",
            'hub.toml: [envs.arm] variables = {"A=B": ""}: expected `str` matching regex \'^[^=\\\\x00]+$\' - at',
        ),
        ("[envs.arm]\nenv = 'A*'", 'hub.toml: [envs.arm] env = "A*": expected an id, module:id or module:factory'),
        (
            "[envs.'a:b']\nenv = 'CartPole-v1'",
            'hub.toml: [envs."a:b"] has an env, and should have no colon in its name',
        ),
        ("GPUS = [0]", "hub.toml: unknown key 'GPUS', did you mean 'gpus'?"),
        (
            "record = 'a'",
            "hub.toml: unknown key 'record'; episodes are recorded by the program that steps the envs: env",
        ),
        (
            "[env.arm]",
            "hub.toml: unknown key 'env', did you mean 'envs'? An environment has a table such as [envs.NAME].",
        ),
        ("[envs.arm]\nlease = 3", "[envs.arm] unknown key 'lease'; it is one of the hub, and stands before the first"),
        ("folder = 'a'", "unknown key 'folder'; it is one of an environment's table, such as [envs.NAME]."),
        ("[envs.my.sim]\nenv = 'a:b'", "[envs.my] unknown key 'sim'; a name with a dot is written in quotes."),
        ("[envs.ALE/*]", "(at line 1, column 10) (a name such as ALE/* is written in quotes)"),
        ('bind = ["ipc:///tmp/a\\u0000b"]', r"hub.toml: bind[0]: 'ipc:///tmp/a\x00b' is no address: it has control"),
        (f'bind = ["tcp://a:{"1" * 5000}"]', "hub.toml: bind[0]: what was given is no address"),
        (f"lease = {'1' * 5000}", "hub.toml cannot be read: Exceeds the limit (4300 digits) for integer string"),
        (f"max_envs = 0x{'f' * 5000}", "hub.toml: max_envs = a number with more digits than Python writes: expected"),
        ('keys = "a\\u0000b"', r"hub.toml: keys: 'a\x00b' has a null character"),
        (
            'worker_env = ["A", "B\\u0000"]',
            "hub.toml: worker_env[1]: the name of a variable is not empty, and has no '=' and no null character",
        ),
        ("bind = ['here']", "hub.toml: bind[0]: 'here' is no address; write tcp://HOST:PORT or ipc://PATH"),
        (
            "bind = ['ipc://a', 'ipc://a']",
            'bind = ["ipc://a", "ipc://a"]: the same is given twice (the command line, variables and',
        ),
        ("allow_arguments = ['a']", "hub.toml: allow_arguments[0]: 'a' should read name=argument,argument"),
        ("rendering = 'EGL'", 'hub.toml: rendering = "EGL": invalid enum value \'EGL\'; allowed: "egl" or "osmesa"'),
        (
            "[envs.'A-v1']\nspares = 1000000",
            'hub.toml: [envs."A-v1"] spares = 1000000: expected `int` <= 1024; allowed: 0 to 1024',
        ),
        ("spares = true", "hub.toml: spares = true: expected `int | null`, got `bool`; allowed: 0 to 1024"),
        ("gpus = [0, 0]", "gpus = [0, 0]: the same is given twice (the command line, variables and"),
        (
            "memory_max = 5",
            "hub.toml: memory_max: 5 is less than 16777216 bytes, in which an interpreter just starts; 0 is ",
        ),
        ("keys = '~nobody-here/x'", "hub.toml: keys: '~nobody-here/x' begins with no known home folder"),
        (
            'worker_env = ["TOKEN=hf_1"]',
            "hub.toml: worker_env[0]: the name of a variable is not empty, and has no '=' and no null character",
        ),
        ('name = "a\\n"', 'hub.toml: name = "a\\n": expected `str` matching regex'),
        ("insecure = 'yes'", 'hub.toml: insecure = "yes": expected `bool`, got `str`; allowed: true or false'),
        ("log_level = 'loud'", 'hub.toml: log_level = "loud": invalid enum value \'loud\'; allowed: "debug" or'),
        (
            "[envs.arm]\nshared_process = true\none_per_process = true",
            "[envs.arm] shared_process and one_per_process ex",
        ),
        (
            "replays_max = 3",
            "unknown key 'replays_max'; the files of replays are limited by their bytes (replays_bytes_max), and 0 ",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "hub.toml").write_text(text)
    with pytest.raises(ValueError) as caught:
        read_configuration((), None, tmp_path / "hub.toml")
    assert why in str(caught.value) and "hub.toml" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_command_may_be_longer_than_a_name_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text(f"python = '{'x' * 5000}'")
    assert config.read_hub_file(tmp_path / "hub.toml")[0] == {"python": "x" * 5000}


def test_variable_may_have_the_name_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text("[envs.arm]\nenv = 'a:b'\nvariables = { bind = 'here', spares = '-1' }")
    assert config.read_hub_file(tmp_path / "hub.toml")[1]["arm"].variables == {"bind": "here", "spares": "-1"}


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.toml cannot be read: No such file"):
        config.read_hub_file(tmp_path / "none.toml")


def test_replays_are_kept_where_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "hub.toml"
    file.write_text('replays = "kept"\ntrace_bytes_max = 3\nreplays_bytes_max = 1000\n')
    config = read_configuration((), None, file, {}).config
    assert (config.replays, config.trace_bytes_max, config.replays_bytes_max) == (tmp_path / "kept", 3, 1000)


def test_setup_of_workers_is_the_name_of_a_function(path: Path) -> None:
    path.write_text("[envs.arm]\nenv = 'my_sims:make'\nworker_setup = 'my_sims:set_up'")
    recipe = read_configuration((), None, path).config.registry().find("arm")
    assert recipe is not None and recipe.settings.worker_setup == "my_sims:set_up"
    path.write_text("[envs.arm]\nenv = 'my_sims:make'\nworker_setup = 'my_sims'")
    with pytest.raises(ValueError, match=r"\[envs\.arm\] worker_setup: .my_sims. names no function; expected"):
        read_configuration((), None, path)


def test_cpus_are_as_many_as_given_and_no_more_than_may_be_used() -> None:
    assert usable_cpus(1) == 1
    assert usable_cpus(1 << 16) == usable_cpus()


def test_configuration_that_differs_from_the_defaults_is_told_in_types_of_json() -> None:
    config = HubConfig(
        bind=("tcp://127.0.0.1:5555", "ipc:///run/hub.sock"),
        envs=("CartPole-v1",),
        keys=Path("/keys"),
        insecure=True,
        max_envs=3,
        lease=7.0,
        gpus=(0, 1),
        spares=2,
        tables={"arm": EnvSettings(env="Pendulum-v1")},
    )
    assert json.loads(json.dumps(config.to_builtins())) == {
        "bind": ["tcp://127.0.0.1:5555", "ipc:///run/hub.sock"],
        "envs": ["CartPole-v1"],
        "keys": "/keys",
        "insecure": True,
        "max_envs": 3,
        "lease": 7.0,
        "gpus": [0, 1],
        "spares": 2,
        "tables": ["arm"],
    }
    assert HubConfig().to_builtins() == {}


# --- bytes with a unit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("64KiB", 1 << 16),
        ("3TB", 3 * 10**12),
        ("1TiB", 1 << 40),
        ("4096", 4096),
    ],
)
def test_units_are_powers_of_1000_or_of_1024(text: str, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "2.5", "2G", "2 Gi", "GB", "-2GB", "0.3B", "1e9B", "2GB/s", "٢GB", "2IB", "2MIB2"]
)
def test_what_has_no_unit_or_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it such as 2000000000, 2GB or 512MiB"):
        byte_count(text)


def test_every_number_that_is_named_after_bytes_or_memory_takes_a_unit() -> None:
    for table in (HubOptions, RecycleOptions, EnvSettings, Quotas):
        for name in kinds_of(table):
            if "bytes" in name or "memory" in name:
                assert options_from({name: "32MB"}, table) == {name: 32_000_000}, name


def test_options_of_the_command_line_take_units() -> None:
    names = [name for name in kinds_of(HubOptions) if "bytes" in name or "memory" in name]
    options = [text for name in names for text in (f"--{name.replace('_', '-')}", "32MiB")]
    _, bound, _ = commands.app.parse_args(["serve", *options, "--recycle.memory-bytes=2GB", "--max-envs", "8"])
    found = read_configuration((), bound.arguments["options"]).config
    assert len(names) == 7 and {getattr(found, name) for name in names} == {32 << 20}
    assert found.recycle == RecycleOptions(memory_bytes=2 * 10**9) and found.max_envs == 8


@pytest.mark.parametrize("option", ["--memory-max", "--recycle.memory-bytes"])
def test_option_that_is_no_number_of_bytes_says_how_to_write_one(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.app(["serve", "CartPole-v1", option, "2G"])
    assert ended.value.code == cli.EXIT_USAGE
    found = " ".join(capsys.readouterr().err.split())
    assert f"{option}: '2G' is no number of bytes; write it such as 2000000000, 2GB or 512MiB" in found


def test_tables_of_a_file_take_units_and_variables_of_the_same_names_stay_texts(tmp_path: Path) -> None:
    path = tmp_path / "hub.toml"
    path.write_text(
        'worker_memory = "4GiB"\nrecycle = {memory_bytes = "1GB"}\n'
        '[envs.arm]\nenv = "CartPole-v1"\nmemory_max = "512MiB"\nvariables = {memory_max = "2GB"}\n'
    )
    config = read_configuration((), None, path).config
    assert config.worker_memory == 4 << 30 and config.hosting.recycle.memory_bytes == 10**9
    assert config.tables["arm"].memory_max == 512 << 20 and config.tables["arm"].variables == {"memory_max": "2GB"}
    path.write_text('memory_max = "2G"')
    with pytest.raises(
        ValueError, match=r"memory_max: '2G' is no number of bytes; write it such as 2000000000, 2GB or 512MiB"
    ):
        read_configuration((), None, path)
