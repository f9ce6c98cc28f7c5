"""The files of docker/ keep their promises, as far as that can be seen without a Docker engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from envhub_server.catalog.registry import Registry
from envhub_server.serve import check_config, config_of
from hubs import ServedHub, serve
from image_files import DOCKERFILE, HEALTH, IMAGE, ROOT, command, config, instruction

from envhub.cli import commands, hubs
from envhub.transport import address

COMPOSE = (ROOT / "docker" / "compose.yaml").read_text()
README = (ROOT / "docker" / "README.md").read_text()
RENDERING = (ROOT / "server/envhub_server/worker/name_lister.py").read_text()


def test_image_runs_as_a_numbered_user_without_rights() -> None:
    user, group = instruction("USER").split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert f"useradd --uid {user} " in IMAGE


def test_image_stops_by_sigterm_through_an_init() -> None:
    assert instruction("STOPSIGNAL") == "SIGTERM"
    assert json.loads(instruction("ENTRYPOINT")) == ["tini", "--", "envhub"]


def test_health_is_asked_by_the_command_line() -> None:
    assert json.loads(instruction("HEALTHCHECK").split("CMD")[1]) == HEALTH
    (test,) = re.findall(r"^ +test: (.+)$", COMPOSE, re.MULTILINE)
    assert json.loads(test) == ["CMD", *HEALTH]
    health, _, unknown = commands.app.parse_args(HEALTH[1:], exit_on_error=False, print_error=False)[:3]
    assert health is hubs.health
    assert not unknown


def test_health_is_asked_where_the_hub_listens() -> None:
    tcp, ipc = config(command()).bind
    assert address.parse(tcp).port == int(instruction("EXPOSE")) and ipc == HEALTH[2]


def test_default_command_offers_cartpole_and_atari_only() -> None:
    found = config(command())
    check_config(found)
    offered = Registry(found.envs)
    assert offered.find("CartPole-v1") is not None
    pong = offered.find("ALE/Pong-v5")
    assert pong is not None
    assert pong.modules == ("ale_py",)
    for other in ("Pendulum-v1", "CartPole-v0", "phys2d/CartPole-v1", "os:CartPole-v1", "ale_py:CartPole-v1"):
        assert offered.find(other) is None, other


def test_default_command_wants_keys_which_a_volume_keeps() -> None:
    found = config(command())
    assert found.keys == Path(instruction("VOLUME")) and not found.insecure
    assert not any(address.parse(bind).is_loopback for bind in found.bind)
    assert f"\n      - keys:{found.keys}\n" in COMPOSE and f"--volume envhub-keys:{found.keys}" in README


def test_derived_image_of_the_readme_serves_what_it_names() -> None:
    derived, _ = re.findall(r"```dockerfile\n(.*?)```", README, re.DOTALL)
    found = config(command(derived))
    check_config(found)
    recipe = Registry(found.envs).find("name")
    assert recipe is not None
    assert recipe.entry == "my_sims:make"
    assert re.findall(r"^USER (.+)$", derived, re.MULTILINE) == ["root", instruction("USER")]


def test_compose_publishes_the_port_that_wants_keys_only() -> None:
    assert not re.search("\t|network_mode|privileged: true|expose:", COMPOSE)
    (ports,) = re.findall(r"^ +ports:\n((?: +- .*\n)+)", COMPOSE, re.MULTILINE)
    assert re.findall(r'- "([^"]+)"', ports) == ["5555:5555"]
    assert len(ports.splitlines()) == 1


@pytest.mark.parametrize(
    "setting",
    [
        "read_only: true",
        "tmpfs:\n      - /tmp:",
        "cap_drop:\n      - ALL\n",
        "security_opt:\n      - no-new-privileges:true\n",
        "stop_grace_period: 10s",
        "restart: unless-stopped",
        "pids_limit: ",
        "mem_limit: ",
    ],
)
def test_compose_confines_the_hub(setting: str) -> None:
    assert f"\n    {setting}" in COMPOSE
    assert "shm_size" not in COMPOSE


def test_replays_leave_room_in_the_only_folder_that_can_be_written_to(tmp_path: Path) -> None:
    (size,) = re.findall(r"^ +- /tmp:.*\bsize=(\d+)m$", COMPOSE, re.MULTILINE)
    derived, _ = re.findall(r"```dockerfile\n(.*?)```", README, re.DOTALL)
    (file,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "hub.toml").write_text(file)
    drawing = config_of([], None, tmp_path / "hub.toml")
    for found in (config(command()), config(command(derived)), drawing):
        assert 4 * found.replays_bytes_max <= int(size) << 20


def test_build_context_holds_what_the_build_copies_and_no_more() -> None:
    ignored, *kept = (line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#"))
    sources = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    copied = {source for line in sources for source in line.split()}
    assert ignored == "*"
    assert {line[1:] for line in kept if line[0] == "!"} == copied
    assert all((ROOT / source).exists() for source in copied)
    links = [path for source in copied for path in (ROOT / source).rglob("*") if path.is_symlink()]
    assert all(path.resolve().relative_to(ROOT).parts[0] in copied for path in links)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A hub that offers what the image offers, on this machine."""
    with serve(tmp_path_factory.mktemp("box"), *config(command()).envs) as served:
        yield served


@pytest.mark.long
def test_program_of_the_readme_runs(box: ServedHub) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    program = program.replace('"box"', f'"{box.tcp}"')
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "(16, 210, 160, 3) uint8\n"


def test_image_for_envs_that_draw_has_what_the_hub_asks_for(tmp_path: Path) -> None:
    _, derived = re.findall(r"```dockerfile\n(.*?)```", README, re.DOTALL)
    (file,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "hub.toml").write_text(file)
    found = config_of([], None, tmp_path / "hub.toml")
    check_config(found)
    assert str(found.keys) == "/keys" and HEALTH[2] in found.bind
    assert [each.rendering for each in found.tables.values()] == ["egl", "osmesa"]
    assert command(derived) == ["serve", "--config", "/etc/envhub.toml"]
    installed = re.findall(r"--no-install-recommends (.*?) \\$", derived, re.MULTILINE)[0].split()
    advised = re.findall(r"apt-get install (lib[^\";]*)", RENDERING)
    assert advised and {package for line in advised for package in line.split()} <= {*installed}
