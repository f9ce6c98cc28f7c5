"""Bytes that an operator gives a unit."""

from __future__ import annotations

from pathlib import Path

import pytest
from envhub_server.catalog.registry import EnvSettings
from envhub_server.network.connections import Quotas
from envhub_server.serve import config_of

from envhub import cli
from envhub.cli import commands
from envhub.options import HubOptions, RecycleOptions, byte_count, kinds_of, options_from


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
    found = config_of((), bound.arguments["options"])
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
    config = config_of((), None, path)
    assert config.worker_memory == 4 << 30 and config.hosting.recycle.memory_bytes == 10**9
    assert config.tables["arm"].memory_max == 512 << 20 and config.tables["arm"].variables == {"memory_max": "2GB"}
    path.write_text('memory_max = "2G"')
    with pytest.raises(
        ValueError, match=r"memory_max: '2G' is no number of bytes; write it such as 2000000000, 2GB or 512MiB"
    ):
        config_of((), None, path)
