"""The folder in which a hub starts: only envs' own modules come from it, and only if nobody else may write there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hubs import serve
from interpreters import WORKING, environment

import envhub

# What the hub, its zygote and its workers import, at once or later; and every module of Python itself.
INSTALLED = (
    *(
        "numpy",
        "gymnasium",
        "gym",
        "msgpack",
        "msgpack_numpy",
        "msgspec",
        "zmq",
        "cloudpickle",
        "structlog",
        "cyclopts",
    ),
    *("rich", "lz4", "zstandard", "farama_notifications", "typing_extensions", "envhub_server", "envhub_client"),
    *("minari", "pyarrow", "PIL"),
)
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
DECOY = "with open({hits!r}, 'a') as file:\n    file.write({name!r})\nraise ImportError('a decoy')\n"
SIMS = """
import my_helper
from gymnasium.envs.classic_control import CartPoleEnv

class Env(CartPoleEnv):
    def origin(self):
        import csv, numpy, secrets
        return [csv.__file__, numpy.__file__, secrets.__file__, my_helper.__file__]

def make():
    return Env()
"""


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    """A folder with an env of its own, and modules named like all that is installed, which say that they were run."""
    folder = tmp_path / "sims"
    folder.mkdir(mode=0o755)
    hits = str(tmp_path / "hits")
    for name in (*INSTALLED, *sorted(sys.stdlib_module_names)):
        (folder / f"{name}.py").write_text(DECOY.format(hits=hits, name=f"{name} "))
    (folder / "my_sims.py").write_text(SIMS)
    (folder / "my_helper.py").write_text("")
    return folder


def command(folder: Path) -> str:
    """A script as pip installs for the command."""
    (folder / "bin").mkdir()
    (folder / "bin" / "envhub").write_text("from envhub.cli import main\nmain()\n")
    return str(folder / "bin" / "envhub")


def check(decoys: Path, address: str) -> None:
    envs = envhub.make_vec("sim", 2, hub=address)
    envs.reset()
    envs.step([0, 1])
    *installed, helper = envs.call("origin")[0]
    envs.close()
    assert helper == str(decoys / "my_helper.py")
    assert not any(place.startswith(str(decoys)) for place in installed), installed
    assert not (decoys.parent / "hits").exists(), (decoys.parent / "hits").read_text()


@pytest.mark.long
def test_only_the_modules_of_envs_are_imported_from_the_working_directory(tmp_path: Path, decoys: Path) -> None:
    with serve(tmp_path, "sim=my_sims:make", cwd=decoys, program=[command(tmp_path)]) as hub:
        check(decoys, hub.ipc)


@pytest.mark.long
def test_another_interpreter_imports_only_modules_of_envs_from_its_folder(tmp_path: Path, decoys: Path) -> None:
    python = environment(tmp_path / "venv", *WORKING)
    (tmp_path / "hub.toml").write_text(f'[envs.sim]\nenv = "my_sims:make"\npython = "{python}"\nfolder = "{decoys}"\n')
    with serve(tmp_path, "--config", str(tmp_path / "hub.toml")) as hub:
        check(decoys, hub.ipc)


@pytest.mark.long
def test_replay_imports_nothing_installed_from_the_working_directory(tmp_path: Path, decoys: Path) -> None:
    (tmp_path / "raising.py").write_text(
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class make(CartPoleEnv):\n    def step(self, action):\n        raise ValueError('it broke')\n"
    )
    environ = {"ENVHUB_REPLAYS": str(tmp_path / "replays")}
    with serve(tmp_path, "raising=raising:make", cwd=tmp_path, environ=environ) as hub:
        envs = envhub.make_vec("raising", 1, hub=hub.ipc)
        envs.reset(seed=1)
        with pytest.raises(ValueError, match="it broke"):
            envs.step([0])
        envs.close()
        assert hub.stop() == 0
    (file,) = (tmp_path / "replays").iterdir()
    line = [sys.executable, command(tmp_path), "replay", file.stem]
    done = subprocess.run(line, cwd=decoys, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)
    assert "failed alike" in done.stdout, done
    assert not (tmp_path / "hits").exists(), (tmp_path / "hits").read_text()


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What ``envhub serve`` says that is refused there."""
    line = [sys.executable, "-m", "envhub", "serve", *arguments, "--bind", f"ipc://{folder.parent}/hub.sock"]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=30)


@root_only
@pytest.mark.parametrize(
    ("mode", "who"), [(0o1777, "every user"), pytest.param(0o775, "the group", marks=pytest.mark.long)]
)
def test_folder_that_others_may_write_to_is_refused_if_an_env_is_imported_from_it(
    tmp_path: Path, mode: int, who: str
) -> None:
    folder = tmp_path / "sims"
    folder.mkdir()
    (folder / "my_sims.py").write_text("raise SystemExit('imported')\n")
    os.chown(folder, -1, 54321)  # of no user
    folder.chmod(mode)
    found = started(folder, "sim=my_sims:make")
    assert found.returncode == 2, found
    assert who in found.stderr and str(folder) in found.stderr and f"{mode:o}" in found.stderr
    assert f"chmod go-w {folder}" in found.stderr and "Traceback" not in found.stderr


@pytest.mark.long
def test_parent_folder_that_others_may_write_to_is_refused_and_a_link_is_followed(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    (open_to_all / "sims").mkdir(parents=True)
    (open_to_all / "sims" / "my_sims.py").write_text("raise SystemExit('imported')\n")
    open_to_all.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(open_to_all / "sims")
    found = started(link, "sim=my_sims:make")
    assert found.returncode == 2 and f"chmod go-w {open_to_all}" in found.stderr, found
    open_to_all.chmod(0o755)
    (open_to_all / "sims" / "my_sims.py").chmod(0o666)
    found = started(link, "sim=my_sims:make")
    assert found.returncode == 2 and f"chmod go-w {open_to_all}/sims/my_sims.py" in found.stderr, found


@pytest.mark.long
def test_hub_serves_installed_envs_in_such_a_folder_and_imports_nothing_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    (folder / "my_sims.py").write_text(DECOY.format(hits=str(tmp_path / "hits"), name="my_sims"))
    folder.chmod(0o1777)
    (tmp_path / "safe").mkdir()
    (tmp_path / "safe" / "import_sims.py").write_text(
        "import sys\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "class make(CartPoleEnv):\n    def imports_from(self):\n        return sys.path\n"
    )
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path / "safe"), os.environ.get("PYTHONPATH", "")]))}
    with serve(tmp_path, "CartPole-v1", "sims=import_sims:make", cwd=folder, environ=environ) as hub:
        envs = envhub.make_vec("sims", 1, hub=hub.ipc)
        assert str(folder) not in envs.call("imports_from")[0]
        envs.close()
    (line,) = logged(hub.log, "folder_unsafe")
    assert line["folder"] == str(folder) and "mode 1777" in str(line["why"]) and "not imported" in str(line["note"])


@pytest.mark.long
@root_only
def test_folder_of_another_user_is_warned_of_and_used(tmp_path: Path) -> None:
    folder = tmp_path / "sims"
    folder.mkdir()
    (folder / "my_sims.py").write_text(SIMS.replace("import my_helper\n", "").replace(", my_helper.__file__", ""))
    os.chown(folder, 54321, 54321)
    folder.chmod(0o775)  # of a group that is that user's own, as its number says
    with serve(tmp_path, "sim=my_sims:make", cwd=folder) as hub:
        envhub.make_vec("sim", 1, hub=hub.ipc).close()
    (line,) = logged(hub.log, "folder_unsafe")
    assert "belongs to the user 54321" in str(line["why"])


@pytest.mark.long
def test_folder_that_pythonpath_names_is_used_and_warned_of(tmp_path: Path) -> None:
    folder = tmp_path / "sims"
    folder.mkdir()
    (folder / "csv_sims.py").write_text("from gymnasium.envs.classic_control import CartPoleEnv as make\n")
    folder.chmod(0o777)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    with serve(tmp_path, "sim=csv_sims:make", cwd=folder, environ={"PYTHONPATH": path}) as hub:
        envhub.make_vec("sim", 1, hub=hub.ipc).close()
    line = next(line for line in logged(hub.log, "folder_unsafe") if line["folder"] == str(folder))
    assert "PYTHONPATH" in str(line["note"])


@pytest.mark.long
def test_module_that_an_installed_one_hides_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("def make():\n    pass\n")
    done = started(tmp_path, "sim=colorsys:make")
    assert done.returncode == 2 and "has no attribute 'make'" in done.stderr, done
    (line,) = logged(done.stderr, "module_shadowed")
    assert line["file"] == str(tmp_path / "colorsys.py") and str(line["used"]).endswith("colorsys.py")


def logged(log: str, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]
