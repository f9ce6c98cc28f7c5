"""``envhub serve`` and ``envhub health`` as an operator meets them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from envhub_server.network.listener import Listener
from hubs import HERE, ServedHub, lives, serve, wait_until
from pages import ROOT, blocks

import envhub
from envhub.transport import sockets
from envhub.transport.address import HubKeys, token_of

PAGE = ROOT / "server/docs/options.md"


def command(*arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "envhub", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **environ},
    )


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_signal_ends_a_hub_with_an_idle_session_at_once_with_0_and_nothing_is_left(tmp_path: Path, number: int) -> None:
    with serve(tmp_path, "CartPole-v1") as hub:
        envs = envhub.make_vec("CartPole-v1", 4, hub=hub.tcp)
        envs.reset()
        with envhub.connect(hub.ipc) as client:
            workers = client.sessions()[0]["workers"]  # without the one that finds the names of what is offered
        tree = psutil.Process(hub.process.pid).children(recursive=True)
        assert workers and (tmp_path / "hub.sock").exists()
        assert hub.stop(number) == 0
        # It is idle; where a hub has waited for its steps, which it does for 5 s, they are killed.
        lines = [json.loads(line) for line in hub.log.splitlines() if '"worker_exited"' in line]
        assert [line["how"] for line in lines] == ["exited with status 0"] * len(workers)
        assert not any(map(lives, tree))
        assert not (tmp_path / "hub.sock").exists() and not (tmp_path / "hub.sock.lock").exists()
        with pytest.raises(envhub.HubLost):
            envs.step(np.zeros(4, int))
        envs.close()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_right_after_the_start_ends_the_hub_with_0(tmp_path: Path, number: int) -> None:
    with serve(tmp_path, "CartPole-v1") as hub:
        assert hub.stop(number) == 0
        assert [path.suffix for path in tmp_path.iterdir()] == [".log"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_until_the_very_end_change_nothing(tmp_path: Path, number: int) -> None:
    with serve(tmp_path, "CartPole-v1") as hub:
        while hub.process.poll() is None:
            hub.process.send_signal(number)
            time.sleep(0.005)
        assert hub.process.returncode == 0
        assert [path.suffix for path in tmp_path.iterdir()] == [".log"]


@pytest.mark.long
def test_entries_whose_package_is_missing_are_unready(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", "no_such_module:Sim-v7", "sim=nomod:make") as hub:
        assert wait_until(lambda: hub.log.count("env_unready") == 2)
        with envhub.connect(hub.ipc) as client:
            assert "CartPole-v1" in client.envs() and "Sim-v7" not in client.envs()
            assert client.health()["unready"].keys() == {"Sim-v7", "sim"}


# What an operator writes, its name, what is offered besides, and what the hub says when it ends.
MISTAKES = [
    ("CartPole-v77", ["CartPole-v1"], "no id 'CartPole-v77' is registered"),
    ("os:nope", ["CartPole-v1"], "x=os:nope cannot be made: module 'os' has no attribute 'nope'"),
    ("nomod:make", [], "x=nomod:make cannot be made: No module named 'nomod'"),
    ("nomod:Sim-v0", [], "no id 'Sim-v0' is registered"),
    ("needy:factory", [], "x=needy:factory cannot be made: ModuleNotFoundError: No module named 'no_such_module'"),
]


@pytest.mark.long
@pytest.mark.parametrize("way", ["command line", "file"])
@pytest.mark.parametrize(
    ("env", "others", "why"), [MISTAKES[0], *(pytest.param(*each, marks=pytest.mark.chaos) for each in MISTAKES[1:])]
)
def test_env_that_can_never_be_made_ends_the_hub_with_2_whichever_way_it_is_named(
    tmp_path: Path, way: str, env: str, others: list[str], why: str
) -> None:
    is_factory = env.rpartition(":")[2].isidentifier() and ":" in env
    entries = [f"x={env}" if is_factory else env]
    if way == "file":
        (tmp_path / "hub.toml").write_text(f'[envs.x]\nenv = "{env}"\n')
        entries = ["--config", str(tmp_path / "hub.toml")]
    found = command("serve", *others, *entries, "--bind", f"ipc://{tmp_path}/hub.sock", cwd=HERE)
    assert found.returncode == 2
    (line,) = [line for line in found.stderr.splitlines() if not line.startswith("{")]
    assert line.startswith(f"envhub serve: {why}")
    assert not [path for path in tmp_path.iterdir() if path.name != "hub.toml"]


@pytest.mark.long
def test_required_env_that_is_not_ready_ends_the_hub_with_2(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text('[envs.x]\nenv = "nomod:make"\nrequired = true\n')
    found = command("serve", "CartPole-v1", "--config", str(tmp_path / "hub.toml"), "--bind", f"ipc://{tmp_path}/h")
    assert found.returncode == 2 and "envhub serve: 'x' is required and not ready: nomod:make" in found.stderr


@pytest.mark.long
def test_child_that_a_module_forks_does_not_go_on_in_place_of_the_worker(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text("import os\nos.fork() and os.wait()\nfrom sims import counter\n")
    environ = {"PYTHONPATH": str(HERE)}
    with serve(tmp_path, "forks=forks:counter", cwd=tmp_path, environ=environ) as hub:
        assert wait_until(lambda: "was ended: its code has to end in os._exit" in hub.log)


@pytest.mark.long
def test_factories_are_found_from_the_working_directory_and_never_imported_into_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("import os\nprint('imported by', os.getpid(), flush=True)\n")
    (folder / "sub.py").write_text("from gymnasium.envs.classic_control import CartPoleEnv as factory\n")
    with serve(tmp_path, "x=package.sub:factory", cwd=tmp_path) as hub:
        envhub.make_vec("x", 2, hub=hub.ipc).close()
        assert hub.stop() == 0
        assert hub.process.stdout is not None
        printed = hub.process.stdout.read().decode()
        assert "imported by" in printed and f"imported by {hub.process.pid}\n" not in printed


def _phase(hub: ServedHub) -> str:
    with envhub.connect(hub.ipc) as client:
        return str(client.sessions()[0]["phase"])


@pytest.mark.long
def test_second_signal_does_not_wait_for_slow_envs(tmp_path: Path) -> None:
    with serve(tmp_path, "slow_close=sims:slow_close") as hub:
        envs = envhub.make_vec("slow_close", 1, hub=hub.tcp, close_timeout=60)
        envs.reset()
        hub.process.terminate()
        assert wait_until(lambda: '"event": "stopping"' in hub.log)
        hub.process.terminate()
        assert hub.process.wait(15) == 0
        assert "drain_close_timeout" not in hub.log  # as after one signal, when the envs have had 7 s
        envs.close()


@pytest.mark.long
def test_env_that_hangs_does_not_hold_up_the_end_of_the_hub(tmp_path: Path) -> None:
    with serve(tmp_path, "naughty=sims:naughty") as hub:
        envs = envhub.make_vec("naughty", 2, hub=hub.tcp)
        envs.reset()
        envs.step_async(np.array([0, 8]))
        assert wait_until(lambda: _phase(hub) == "moving")
        begun = time.monotonic()
        assert hub.stop() == 0
        assert time.monotonic() - begun < 10  # when `docker stop` kills
        with pytest.raises(envhub.HubLost, match="shutting down"):
            envs.step_wait()
        envs.close()


@pytest.mark.long
def test_signals_that_ask_are_answered_in_the_log_and_end_nothing(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter") as hub, closing(envhub.make_vec("counter", 2, hub=hub.ipc)) as envs:
        envs.reset()
        for number, answer in [(signal.SIGUSR1, "in run"), (signal.SIGQUIT, "in run"), (signal.SIGUSR2, "requests")]:
            os.kill(hub.process.pid, number)
            told = [answer, number.name]
            assert wait_until(
                lambda told=told: any(all(each in line for each in told) for line in hub.log.splitlines())
            )
        assert envs.step([0, 0])[0][:, 0].tolist() == [1, 1]


@pytest.mark.long
def test_restarts_are_counted_on_when_their_session_has_ended(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter") as hub, closing(envhub.connect(hub.ipc)) as client:
        with closing(client.make_vec("counter", 1)) as envs:
            envs.reset()
            os.kill(envs.call("pid")[0], signal.SIGKILL)
            envs.step([0])
            assert wait_until(lambda: client.stats()["restarts"] == 1)
        assert wait_until(lambda: client.health()["sessions"] == 0) and client.stats()["restarts"] == 1


@pytest.mark.long
def test_log_has_one_structured_line_per_change(tmp_path: Path) -> None:
    with serve(tmp_path, "counter=sims:counter") as hub:
        envs = envhub.make_vec("counter", 2, hub=hub.tcp, num_workers=2)
        envs.reset()
        os.kill(envs.call("pid")[1], signal.SIGKILL)
        assert wait_until(lambda: "worker_exited" in hub.log)
        assert wait_until(lambda: not envs.step([0, 0])[3].any())  # it was started again
        envs.close()
        hub.stop()
        # What comes every second, and what a machine that stalls adds.
        others = {"session_making", "env_starting", "hub_suspended", "client_lost", "client_back", "connected"}
        others |= {"disconnected"}
        lines = [line for line in map(json.loads, hub.log.splitlines()) if line["event"] not in others]
    started, made, first, second, ready, died, anew, *exited, ended, stopping = lines
    assert started["event"] == "hub_started" and started["pid"] == hub.process.pid
    assert started["version"] == envhub.__version__ and hub.tcp in started["addresses"]
    assert started["configuration"]["envs"] == ["counter=sims:counter"]
    assert made["event"] == "session_made" and made["num_envs"] == 2
    assert {line["event"] for line in (first, second, anew)} == {"worker_started"}
    assert {first["worker"], second["worker"]} == {0, 1} and anew["worker"] == 1
    assert [line["event"] for line in (ready, ended, stopping)] == ["session_ready", "session_ended", "stopping"]
    assert (died["event"], died["worker"], died["how"]) == ("worker_exited", 1, "was ended by SIGKILL")
    assert {(line["event"], line["how"]) for line in exited} == {("worker_exited", "exited with status 0")}
    assert {line["worker"] for line in exited} == {0, 1} and len(exited) == 2


@pytest.mark.long
def test_second_hub_on_an_address_is_refused_and_the_first_unharmed(hub: ServedHub) -> None:
    for address in (hub.tcp, hub.ipc):
        refused = command("serve", "CartPole-v1", "--bind", address)
        assert refused.returncode == 2
        assert "in use" in refused.stderr or "already listens" in refused.stderr
        with envhub.connect(address) as client:
            assert client.health()["status"] == "ok"


BAD_ARGUMENTS = [
    (["CartPole-v1", "--bind", "tcp://0.0.0.0:0"], "--insecure"),
    (["--bind", "tcp://0.0.0.0:0", "--insecure"], "name the environments"),
    (["CartPole-v1", "--bind", "http://localhost:1"], "is no address"),
    (["CartPole-v1", "--bind", "ipc:///" + "x" * 200], "107 bytes"),
    (["CartPole-v1", "--bind", "ipc:///no/such/folder/hub.sock"], "does not exist"),
    (["name=module"], "name=module:factory"),
    (["CartPole-v1", "--workers", "0"], "--workers"),
    (["CartPole-v1", "--max-envs", "0"], "--max-envs"),
    (["CartPole-v1", "--lease", "nan"], "allowed: 0 to 604800"),
    (["CartPole-v1", "--lease", "1e12"], "allowed: 0 to 604800"),
    (["CartPole-v1", "--bind", "tcp://127.0.0.1:0", "--bind", "tcp://127.0.0.1:0"], "given twice"),
    (["CartPole-v1", "--bind", "ipc:///tmp"], "is no socket"),
]


@pytest.mark.long
def test_bad_arguments_end_with_2_and_one_line() -> None:
    command = [sys.executable, "-m", "envhub", "serve"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environ = {**os.environ, "COLUMNS": "200"}
    started = [subprocess.Popen([*command, *given], env=environ, **pipes) for given, _ in BAD_ARGUMENTS]  # all at once
    for process, (given, why) in zip(started, BAD_ARGUMENTS, strict=True):
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 2 and why in errors and "Traceback" not in errors, (given, errors)


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "entries"),
    [
        pytest.param("127.0.0.1:0", ["CartPole-v1"], marks=pytest.mark.long),
        pytest.param("10.1.2.3:4567", [], marks=pytest.mark.long),
        ("10.1.2.3:4567:8", []),
    ],
)
def test_address_of_a_client_is_not_bound_and_its_key_not_shown(place: str, entries: list[str]) -> None:
    keys = HubKeys(*sockets.new_key_pair())
    ended = command("serve", "--bind", f" envhub://{token_of(keys).reveal_secret()}@{place}", *entries)
    assert ended.returncode == 2 and f"a hub binds tcp://{place}" in ended.stderr
    assert token_of(keys).reveal_secret() not in ended.stdout + ended.stderr


def test_files_in_the_place_of_a_hubs_own_are_kept(tmp_path: Path) -> None:
    router = sockets.Router()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router.socket:
        listener = Listener(router, open_to_all=False)
        for ending in ("", ".side", ".aside", ".full", ".lock"):
            notes = tmp_path / f"notes{ending}"
            notes.write_text("precious")
            with pytest.raises(envhub.AddressError, match=rf"{notes} exists and is no"):
                listener.bind(f"ipc://{tmp_path}/notes")
            assert notes.read_text() == "precious"
            notes.unlink()
        assert not [*tmp_path.iterdir()]
        listener.close()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
@pytest.mark.parametrize("ending", ["", ".side", ".aside"])
def test_socket_that_another_program_has_open_is_kept(tmp_path: Path, ending: str, kind: int) -> None:
    path = tmp_path / f"agent.sock{ending}"
    router = sockets.Router()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router.socket:
        listener = Listener(router, open_to_all=False)
        with socket.socket(socket.AF_UNIX, kind) as other:
            other.bind(str(path))
            if kind == socket.SOCK_STREAM:
                other.listen()
            with pytest.raises(envhub.AddressError, match=f"another program has {path} open; choose another path"):
                listener.bind(f"ipc://{tmp_path}/agent.sock")
            with socket.socket(socket.AF_UNIX, kind) as client:
                client.connect(str(path))
        listener.close()
        listener.bind(f"ipc://{tmp_path}/agent.sock")  # it has ended, as a hub that was killed
        listener.close()


@pytest.mark.long
def test_runtime_folder_that_cannot_be_made_is_reported_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = command("serve", "CartPole-v1", XDG_RUNTIME_DIR=str(tmp_path / "file"))
    assert refused.returncode == 2 and "cannot be made" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.long
def test_insecure_address_is_warned_about(tmp_path: Path) -> None:
    with serve(tmp_path, "CartPole-v1", "--insecure", binds=["tcp://0.0.0.0:0"]) as hub:
        assert wait_until(lambda: "insecure" in hub.log)


@pytest.mark.long
def test_hub_is_found_at_its_default_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ENVHUB_ADDRESS", raising=False)
    process = subprocess.Popen([sys.executable, "-m", "envhub", "serve", "CartPole-v1"], stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: (tmp_path / "envhub" / "hub.sock").exists())
        assert (tmp_path / "envhub").stat().st_mode & 0o777 == 0o700
        with envhub.connect() as client:
            assert client.address == f"ipc://{tmp_path}/envhub/hub.sock"
        assert command("health", "--timeout", "20").returncode == 0
    finally:
        process.terminate()
        assert process.wait(15) == 0
    assert list((tmp_path / "envhub").iterdir()) == []


@pytest.mark.long
def test_health_reports_what_is_wrong(hub: ServedHub) -> None:
    well = command("health", hub.tcp)
    assert well.returncode == 0 and well.stdout.startswith("ok")
    gone = command("health", "ipc:///nowhere/hub.sock", "--timeout", "1")
    assert gone.returncode == 1 and "ipc:///nowhere/hub.sock within 1 s" in gone.stderr


def test_health_imports_no_parser_and_no_library_of_arrays_and_tables(hub: ServedHub) -> None:
    program = "import atexit, sys; atexit.register(lambda: print(*sys.modules)); from envhub.cli import main; main()"
    asked = [sys.executable, "-c", program, "health", hub.tcp, "--timeout", "20"]
    output = subprocess.run(asked, stdout=subprocess.PIPE, text=True, timeout=30, check=True).stdout
    answer, *unready, modules = output.splitlines()
    assert answer.startswith("ok: ") and all(line.startswith("unready: ") for line in unready), output
    heavy = {"cyclopts", "envhub_server", "gymnasium", "msgspec", "numpy", "rich", "tempfile"}
    assert "zmq" in modules.split() and not heavy & {*modules.split()}


# --- its file ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_file_of_the_page_serves_with_the_envs_of_the_command_line(tmp_path: Path) -> None:
    (text,) = blocks("toml", [PAGE])
    (tmp_path / "hub.toml").write_text(text.replace(":5555", ":0"))
    arguments = ("Acrobot-v1", "--config", str(tmp_path / "hub.toml"))
    with serve(tmp_path, *arguments, binds=[f"ipc://{tmp_path}/hub.sock"]) as hub, envhub.connect(hub.ipc) as client:
        assert {"Acrobot-v1", "CartPole-v1", "heavy"} <= {*client.envs()}
        envs = client.make_vec("heavy", 2)
        assert envs.single_observation_space.shape == (3,)  # Pendulum's
        envs.close()


def test_file_that_cannot_be_used_ends_the_hub_with_2_and_a_line(tmp_path: Path) -> None:
    (tmp_path / "hub.toml").write_text("lese = 3")
    ended = command("serve", "--config", str(tmp_path / "hub.toml"))
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "hub.toml: unknown key 'lese', did you mean 'lease'?" in ended.stderr
