"""The files of docker/ keep their promises, as far as that can be seen without a Docker engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib
from envhub_server.catalog.registry import Registry
from envhub_server.serve import check_config, read_configuration
from hubs import ServedHub, serve
from image_files import DOCKERFILE, IMAGE, MUJOCO, ROOT, command, config, instruction
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envhub.transport import address

COMPOSE = (ROOT / "docker" / "compose.yaml").read_text()
README = (ROOT / "docker" / "README.md").read_text()
CORE = ("atari", "lz4", "web")  # extras
RENDERING = (ROOT / "server/envhub_server/worker/name_lister.py").read_text()


def test_image_runs_as_a_numbered_user_without_rights() -> None:
    user, group = instruction("USER").split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert f"useradd --uid {user} " in IMAGE


def test_image_stops_by_sigterm_through_an_init() -> None:
    assert instruction("STOPSIGNAL") == "SIGTERM"
    assert json.loads(instruction("ENTRYPOINT")) == ["tini", "--", "envhub"]


@pytest.mark.long
def test_health_is_asked_where_the_hub_listens(tmp_path: Path) -> None:
    """By the program of the image: at ENVHUB_ADDRESS, else at an ipc address of this network namespace that exists."""
    assert json.loads(instruction("HEALTHCHECK").split("CMD")[1]) == ["health"]
    assert "COPY --chmod=755 docker/health.sh /usr/local/bin/health\n" in IMAGE
    tcp = config(command()).bind[0]
    assert address.parse(tcp).port == int(instruction("EXPOSE"))
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def health(*before: str, **variables: str) -> tuple[int, str]:
        program = [*before, "sh", str(ROOT / "docker" / "health.sh")]
        ran = subprocess.run(program, capture_output=True, text=True, env={**environ, **variables}, timeout=60)
        return ran.returncode, ran.stdout

    with serve(tmp_path, "CartPole-v1") as hub:
        for where in hub.addresses:
            status, printed = health(ENVHUB_ADDRESS=where)
            assert status == 0 and printed.startswith("ok: ")
    alone = ["unshare", "--user", "--net"]  # no other hub of this machine listens there
    if subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("this user may have no network namespace")
    status, printed = health(*alone)
    assert status == 1 and "add --bind ipc:///tmp/hub.sock" in printed


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


def test_image_of_mujoco_draws_and_wants_keys_too() -> None:
    found = config(command(MUJOCO))
    check_config(found)
    assert found.rendering == "egl" and found.bind == config(command()).bind and found.keys == Path("/keys")
    for name in ("HalfCheetah-v5", "ALE/Pong-v5", "CartPole-v1"):
        assert Registry(found.envs).find(name) is not None, name
    assert re.findall(r"^USER (.+)$", MUJOCO, re.MULTILINE) == ["root", instruction("USER")]
    installed = re.findall(r"--no-install-recommends (.*?) +&&", MUJOCO)[0].split()
    advised = re.findall(r"apt-get install (lib[^\";]*)", RENDERING)
    assert advised and {package for line in advised for package in line.split()} <= {*installed}


def test_image_is_described_and_its_packages_are_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f'org.opencontainers.image.version="{project["project"]["version"]}"' in IMAGE
    assert f'org.opencontainers.image.licenses="{project["project"]["license"]}"' in IMAGE
    for line in re.findall(r"pip .*install (?!--no-deps).*", DOCKERFILE):
        assert "--require-hashes" in line, line
    wanted = {"core": project["project"]["dependencies"], "build": project["build-system"]["requires"]}
    wanted["mujoco"] = wanted["core"]
    extras = project["project"]["optional-dependencies"]
    for image, names in {"core": CORE, "mujoco": (*CORE, "mujoco")}.items():
        wanted[image] = [*wanted[image], *(each for name in names for each in extras[name])]
    for image, requirements in wanted.items():
        text = (ROOT / "docker" / f"{image}.lock").read_text()
        locked = dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))
        assert text.count("--hash=sha256:") > len(locked) > 0
        for requirement in map(Requirement, requirements):
            if requirement.marker is None:
                assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def test_derived_image_of_the_readme_serves_what_it_names() -> None:
    (derived,) = re.findall(r"```dockerfile\n(.*?)```", README, re.DOTALL)
    found = config(command(derived))
    check_config(found)
    recipe = Registry(found.envs).find("name")
    assert recipe is not None
    assert recipe.entry == "my_sims:make"
    assert re.findall(r"^USER (.+)$", derived, re.MULTILINE) == ["root", instruction("USER")]


def test_compose_publishes_the_port_that_wants_keys_only() -> None:
    assert not re.search("\t|network_mode: (?!none)|privileged: true|expose:", COMPOSE)
    (ports,) = re.findall(r"^ +ports:\n((?: +- .*\n)+)", COMPOSE, re.MULTILINE)
    assert re.findall(r'- "([^"]+)"', ports) == ["5555:5555"]
    assert len(ports.splitlines()) == 1


def test_compose_runs_a_trainer_that_reaches_the_hub_by_its_socket() -> None:
    assert "\n  trainer:\n    profiles: [trainer]\n" in COMPOSE and "\n    network_mode: none" in COMPOSE
    (found,) = re.findall(r"- --bind=(ipc://\S+)", COMPOSE)
    assert f'--hub, "{found}"' in COMPOSE and COMPOSE.count("- socket:/run/envhub\n") == 2
    (program,) = re.findall(r"- \.\./(\S+):/trainer.py:ro", COMPOSE)
    assert (ROOT / program).exists()
    given = re.search(r"command:\n((?: +- .*\n)+)", COMPOSE)
    assert given is not None
    arguments = re.findall(r"- (.+)", given[1])
    assert config(arguments).replays_bytes_max == config(command()).replays_bytes_max


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
    (derived,) = re.findall(r"```dockerfile\n(.*?)```", README, re.DOTALL)
    (file,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "hub.toml").write_text(file)
    drawing = read_configuration([], None, tmp_path / "hub.toml").config
    for found in (config(command()), config(command(derived)), drawing):
        assert 4 * found.replays_bytes_max <= int(size) << 20


def test_build_context_holds_what_the_build_copies_and_no_more() -> None:
    ignored, *kept = (line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#"))
    sources = re.findall(r"^COPY (?!--from)(?:--chmod=\d+ )?(.+) \S+$", DOCKERFILE, re.MULTILINE)
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


def test_file_for_envs_that_draw_is_one_of_the_image(tmp_path: Path) -> None:
    (file,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "hub.toml").write_text(file)
    found = read_configuration([], None, tmp_path / "hub.toml").config
    check_config(found)
    assert str(found.keys) == "/keys" and found.bind == config(command(MUJOCO)).bind
    assert [each.rendering for each in found.tables.values()] == ["egl", "osmesa"]
