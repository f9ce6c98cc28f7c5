"""Hubs of the manifests in containers: probes, volumes, user, clients by name, and an end by SIGTERM.

`nox -s containers` builds the image and runs them; they need a Docker engine on this machine.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from envhub_server.network.key_folder import KeyFolder
from hubs import wait_until
from manifests import FOLDER, pod, probes, trainer, trainer_program
from pods import IMAGE, Pod, Volumes, cpu_limit, docker, running

pytestmark = [pytest.mark.container, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
RUN = f"envhub-test-{os.getpid()}"
SLOW = '\n[envs.slow]\nenv = "slow_env:SlowEnv"\nfolder = "/sims"\n'
ANSWER_S = 120.0
# A client that acts on each line of its input, and prints the outcome of each.
CLIENT = """
import json, sys
import envhub
from envhub_client.tools.console import reports

made = {}
for line in sys.stdin:
    act, name, *rest = json.loads(line)
    try:
        if act == "make":
            made[name] = envhub.make_vec(rest[0], 2, hub=rest[1], **rest[2])
            outcome = made[name].reset(seed=1)[0].tolist()
        elif act == "connect":
            envhub.connect(name).close()
            outcome = "connected"
        elif act == "fleet":
            outcome = [{"name": each.name, "state": each.state} for each in reports([name], 20.0)]
        else:
            observations, _, _, truncations, infos = made[name].step(rest[0])
            outcome = [observations.tolist(), truncations.tolist(), sorted(infos)]
    except envhub.EnvHubError as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps(outcome), flush=True)
"""

PHASES = """
import envhub

with envhub.connect("ipc:///tmp/hub.sock") as hub:
    print(*(session["phase"] for session in hub.sessions()))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[str]:
    docker("network", "create", RUN)
    yield RUN
    docker("network", "rm", RUN)


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    """The keys of all hubs, and a client's, as the page makes them."""
    at = ["--keys", str(tmp_path / "keys"), "--at", "hubs:5555"]
    program = [sys.executable, "-m", "envhub", "keys", "add", "trainer", *at]
    (tmp_path / "address").write_text(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
    return KeyFolder(tmp_path / "keys")


@pytest.fixture
def volumes(tmp_path: Path, keys: KeyFolder) -> Iterator[Volumes]:
    """The ConfigMap and the Secrets of the hubs, and that of a client: an address of each hub by the hub's name."""
    # The folder of a test is for root alone, but the engine mounts by its own right.
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        made = Volumes(Path(folder), pod()["securityContext"]["fsGroup"])
        made.write(0o644, hub_config={"hub.toml": (FOLDER / "hub.toml").read_text() + SLOW})
        address = (tmp_path / "address").read_text()
        places = {name: address.replace("@hubs:", f"@{name}.hubs:") for name in ("hub-0", "hub-1")}
        secrets = {"hub_key": server_key(keys), "hub_clients": clients(keys), "trainer": {"hubs": address, **places}}
        made.write(0o440, **secrets)
        yield made
        made.remove()


def server_key(keys: KeyFolder) -> dict[str, str]:
    return {"server.key": (keys.path / "server.key").read_text()}


def clients(keys: KeyFolder) -> dict[str, str]:
    return {path.name: path.read_text() for path in (keys.path / "clients").iterdir()}


@contextmanager
def hub(name: str, network: str, volumes: Volumes) -> Iterator[Pod]:
    """A ready hub, which ``name.hubs`` and ``hubs`` lead to."""
    aliases = ["--hostname", name, "--network-alias", f"{name}.hubs", "--network-alias", "hubs"]
    sims = ["--volume", f"{HERE}:/sims:ro"]
    with running(f"{RUN}-{name}", network, pod(), volumes, *aliases, *sims) as started:
        started.wait_for(probes()["startupProbe"])
        yield started


class Client:
    """A program in a container of the hubs' network."""

    def __init__(self, name: str, network: str, volumes: Volumes) -> None:
        user = ["--user", "1000:1000", "--group-add", str(volumes.group)]
        mount = {"secret": {"secretName": "trainer"}}
        config = ["--env", "XDG_CONFIG_HOME=/config", *volumes.mount(mount, {"mountPath": "/config/envhub/hubs"})]
        options = ["--interactive", "--rm", "--name", name, "--network", network, *user, *config]
        command = ["docker", "run", *options, "--no-healthcheck", "--entrypoint", "python", IMAGE, "-u", "-c", CLIENT]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def begin(self, act: str, name: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([act, name, *arguments]) + "\n")

    def outcome(self) -> Any:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], ANSWER_S)[0], "no outcome"
        return json.loads(self._process.stdout.readline())

    def ask(self, act: str, name: str, *arguments: Any) -> Any:
        self.begin(act, name, *arguments)
        return self.outcome()

    def step(self, name: str, *actions: int) -> Any:
        return self.ask("step", name, actions)

    def close(self) -> None:
        self._process.communicate(timeout=ANSWER_S)


@pytest.fixture
def client(network: str, volumes: Volumes) -> Iterator[Client]:
    made = Client(f"{RUN}-client", network, volumes)
    yield made
    made.close()


def test_hub_is_confined_and_its_probes_succeed(network: str, volumes: Volumes) -> None:
    with hub("hub-0", network, volumes) as started:
        for probe in probes().values():
            done = started.run(*probe)
            assert done.returncode == 0 and done.stdout.startswith("ok: "), done.stderr
        (user,) = {pod()["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")}
        status = started.run("cat", "/proc/1/status").stdout
        facts = dict(line.split(":\t", 1) for line in status.splitlines())
        assert facts["Uid"].split() == [str(user)] * 4 and facts["Groups"].split() == [str(user)]
        assert {facts[name] for name in ("CapEff", "CapPrm", "CapBnd")} == {"0" * 16}
        assert facts["NoNewPrivs"] == "1" and facts["Seccomp"] == "2"
        cpus = started.run(
            "python", "-c", "from envhub_server import config; print(config.usable_cpus(), config.has_quota())"
        )
        assert cpus.stdout == f"{cpu_limit(pod())} True\n"
        for path in ("/", "/opt/envhub", "/etc/envhub", "/etc/envhub/keys", "/etc/envhub/keys/clients"):
            assert "Read-only" in started.run("touch", f"{path}/x").stderr, path
        assert started.run("touch", "/tmp/x").returncode == 0
        assert started.stop() == 0


@pytest.mark.parametrize("name", ["hub_key", "hub_clients"])
def test_hub_refuses_keys_that_others_can_read(network: str, volumes: Volumes, keys: KeyFolder, name: str) -> None:
    volumes.write(0o444, **{name: {"hub_key": server_key, "hub_clients": clients}[name](keys)})
    with running(f"{RUN}-hub", network, pod(), volumes, "--volume", f"{HERE}:/sims:ro") as started:
        assert started.exit_status == 3 and "with mode 0440" in started.log


def test_clients_of_the_secret_change_while_the_hub_runs(
    network: str, volumes: Volumes, keys: KeyFolder, client: Client
) -> None:
    with hub("hub-0", network, volumes) as started:
        admitted = clients(keys)
        assert client.ask("make", "a", "slow", "hub-0", {}) == [0, 0]
        volumes.write(0o440, hub_clients={})
        assert wait_until(lambda: '"event": "keys_read"' in started.log), started.log
        assert str(client.step("a", 0, 0)).startswith("AccessDenied: ")
        volumes.write(0o440, hub_clients=admitted)
        assert wait_until(lambda: client.ask("make", "b", "slow", "hub-0", {}) == [0, 0])
        assert client.step("b", 0, 0)[0] == [1, 1]


def test_hub_that_is_stopped_drains(network: str, volumes: Volumes, client: Client) -> None:
    """The step under way is answered, the probe fails meanwhile, the client hears why, and the envs are closed."""
    with hub("hub-0", network, volumes) as started:
        assert client.ask("make", "a", "slow", "hub-0", {}) == [0, 0]
        client.begin("step", "a", [40, 1])
        assert wait_until(lambda: started.run("python", "-c", PHASES).stdout == "moving\n")  # the hub has the request
        docker("kill", "--signal", "TERM", started.name)
        probed: list[subprocess.CompletedProcess[str]] = []

        def drains() -> bool:  # seen by one probe: the hub may have ended before the next
            probed.append(started.run(*probes()["readinessProbe"]))
            return probed[-1].stdout.startswith("draining")

        assert wait_until(drains) and probed[-1].returncode == 1
        assert client.outcome() == [[1, 1], [False, False], []]
        assert "shutting down" in client.step("a", 0, 0)
        assert started.exit_status == 0
        assert started.log.count("the env is closed") == 2


def test_one_name_stands_for_all_hubs(network: str, volumes: Volumes, client: Client) -> None:
    """Also for a hub that comes back at another address: a vector env on both goes on, with that hub's envs again."""
    names = ("hub-0", "hub-1")
    options = {"split": [1, 1], "on_hub_loss": "recreate", "reconnect_timeout": 100, "restart_wait": 0}
    with hub("hub-0", network, volumes):
        with hub("hub-1", network, volumes) as first:
            listed = client.ask("fleet", "dns://hubs:5555")
            # The engine's own names, as a StatefulSet's pods have theirs.
            assert [each["name"] for each in listed] == [f"{RUN}-{name}.{network}:5555" for name in names]
            assert [each["state"] for each in listed] == ["ok", "ok"]
            assert "stands for 2 hubs" in client.ask("connect", "dns://hubs:5555")
            assert client.ask("make", "all", "slow", "dns://hubs:5555", options) == [0, 0]
            assert client.step("all", 0, 0)[:2] == [[1, 1], [False, False]]
            before = first.address
            assert first.stop() == 0
            assert wait_until(lambda: client.ask("connect", "dns://hubs:5555") == "connected")
            observations, truncations, infos = client.step("all", 0, 0)
            assert observations[0] == 2 and truncations == [False, True] and "env_failure" in infos
        with running(f"{RUN}-taker", network, pod(), volumes) as taker, hub("hub-1", network, volumes) as second:
            assert taker.address == before != second.address
            steps = [2]
            assert wait_until(lambda: advanced(client.step("all", 0, 0)[0], steps))


def advanced(observations: list[int], steps: list[int]) -> bool:
    """True if the second env counts its steps again, as the first one has never ceased to do."""
    steps[0] += 1
    assert observations[0] == steps[0]
    return observations[1] == 3


def test_trainer_of_the_page_uses_three_hubs(network: str, volumes: Volumes) -> None:
    spec = trainer()["spec"]["template"]["spec"]
    group = spec["securityContext"]["fsGroup"]
    own = Volumes(volumes.folder, group)
    address = (volumes.folder.parent / "address").read_text()
    own.write(0o440, trainer={"hubs": address})
    own.write(0o644, trainer_program={"trainer.py": trainer_program()})
    with ExitStack() as opened:
        hubs = [opened.enter_context(hub(f"hub-{number}", network, volumes)) for number in range(3)]
        pod_of_trainer = opened.enter_context(running(f"{RUN}-trainer", network, spec, own))
        assert pod_of_trainer.exit_status == 0, pod_of_trainer.log
        assert pod_of_trainer.log.endswith("stepped 24 envs\n")
        assert all('"event": "session_made"' in each.log for each in hubs)
