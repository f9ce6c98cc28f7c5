"""Pods as containers of a Docker engine, run as a kubelet would run them by the manifests."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hubs import wait_until
from image_files import ROOT

IMAGE = "envhub"  # `nox -s containers` builds it
RUNTIME_S = 120.0  # for any command of the engine


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=RUNTIME_S)
    assert not check or done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done


def as_root(folder: Path, program: str) -> None:
    """Run a program of Python as root in a container, with ``folder`` as /volumes and tests/support to import from."""
    options = ["--rm", "--user", "0:0", "--network", "none", "--entrypoint", "python"]
    options += ["--volume", f"{folder}:/volumes", "--volume", f"{ROOT}/tests/support:/support:ro"]
    options += ["--env", "PYTHONPATH=/support", "--env", "PYTHONDONTWRITEBYTECODE=1"]
    docker("run", *options, IMAGE, "-c", program)


@dataclass
class Volumes:
    """The ConfigMaps and Secrets of a namespace, as they are mounted: a folder for each, owned by root.

    Attributes:
        folder: of all of them.
        group: ``fsGroup`` of the pods.
    """

    folder: Path
    group: int

    def write(self, mode: int, **objects: Mapping[str, str]) -> None:
        """Make ConfigMaps or Secrets, or change them, by names with ``_`` for ``-``; ``mode`` is ``defaultMode``."""
        calls = [
            f"write_volume(Path('/volumes/{name.replace('_', '-')}'), {dict(files)!r}, {self.group}, {mode})"
            for name, files in objects.items()
        ]
        program = ["from pathlib import Path", "from secret_volume import write_volume", *calls]
        as_root(self.folder, "; ".join(program))

    def remove(self) -> None:
        """Remove all of them, as the user who may: root."""
        as_root(
            self.folder, "import shutil, os; [shutil.rmtree(f'/volumes/{name}') for name in os.listdir('/volumes')]"
        )

    def mount(self, volume: Mapping[str, Any], at: Mapping[str, Any]) -> list[str]:
        """Return the arguments of ``docker run`` for a volume of a pod that is mounted ``at`` a place."""
        if (empty := volume.get("emptyDir")) is not None:
            assert empty["medium"] == "Memory"
            size = empty["sizeLimit"].removesuffix("i").lower()
            return ["--tmpfs", f"{at['mountPath']}:size={size},mode=3777,gid={self.group}"]
        name = volume["secret"]["secretName"] if "secret" in volume else volume["configMap"]["name"]
        source = self.folder / name
        if "subPath" in at:
            source = source / "..data" / at["subPath"]
        return ["--mount", f"type=bind,readonly,src={source},dst={at['mountPath']}"]


def arguments_of(pod: Mapping[str, Any], volumes: Volumes) -> list[str]:
    """Return the arguments of ``docker run`` for the one container of a pod, with the image and the command last."""
    (container,) = pod["containers"]
    user = pod["securityContext"]
    arguments = ["--user", f"{user['runAsUser']}:{user['runAsGroup']}", "--group-add", str(user["fsGroup"])]
    arguments += ["--no-healthcheck"]  # which Kubernetes ignores
    confined = container.get("securityContext", {})
    arguments += ["--read-only"] if confined.get("readOnlyRootFilesystem") else []
    arguments += ["--security-opt", "no-new-privileges"] if confined.get("allowPrivilegeEscalation") is False else []
    arguments += [f"--cap-drop={each}" for each in confined.get("capabilities", {}).get("drop", [])]
    if limits := container.get("resources", {}).get("limits"):
        arguments += ["--cpus", str(cpu_limit(pod)), "--memory", limits["memory"].removesuffix("i").lower()]
    for at in container["volumeMounts"]:
        (volume,) = (each for each in pod["volumes"] if each["name"] == at["name"])
        arguments += volumes.mount(volume, at)
    for variable in container.get("env", []):
        arguments += ["--env", f"{variable['name']}={variable['value']}"]
    program, *rest = container.get("command", [""])
    arguments += ["--entrypoint", program] if program else []
    return [*arguments, IMAGE, *rest, *container.get("args", [])]


def cpu_limit(pod: Mapping[str, Any]) -> int:
    """Return the limit of a pod's CPUs, or all of this machine: the engine refuses more than there are."""
    (container,) = pod["containers"]
    return min(int(container["resources"]["limits"]["cpu"]), os.cpu_count() or 1)


@dataclass(frozen=True)
class Pod:
    """A running container.

    Attributes:
        name: of the container.
        grace_period_s: between SIGTERM and SIGKILL.
    """

    name: str
    grace_period_s: int

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as a kubelet runs that of a probe."""
        return docker("exec", self.name, *command, check=False)

    def wait_for(self, probe: Sequence[str]) -> None:
        """Wait until a probe succeeds."""
        assert wait_until(lambda: self.run(*probe).returncode == 0), self.log

    @property
    def log(self) -> str:
        done = docker("logs", self.name, check=False)
        return done.stdout + done.stderr

    @property
    def address(self) -> str:
        """IP address in the one network of the container."""
        networks = json.loads(docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", self.name).stdout)
        (network,) = networks.values()
        return str(network["IPAddress"])

    def stop(self) -> int:
        """Stop the container with its grace period; return its exit status, which is 137 after SIGKILL."""
        docker("stop", "--time", str(self.grace_period_s), self.name)
        return self.exit_status

    @property
    def exit_status(self) -> int:
        return int(docker("wait", self.name).stdout)


@contextmanager
def running(name: str, network: str, pod: Mapping[str, Any], volumes: Volumes, *options: str) -> Iterator[Pod]:
    """Run a pod in a network until the block ends."""
    arguments = arguments_of(pod, volumes)
    started = docker("run", "--detach", "--name", name, "--network", network, *options, *arguments, check=False)
    try:
        assert started.returncode == 0, started.stderr
        yield Pod(name, pod.get("terminationGracePeriodSeconds", 30))
    finally:
        docker("rm", "--force", "--volumes", name)
