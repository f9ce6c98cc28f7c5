"""The checks of this repository, for developers and CI; ``nox --list`` lists them.

All but ``frameworks``, ``manifests`` and ``containers`` run in the active environment, in which
``pip install -e ".[dev]"`` has been run.
"""

from __future__ import annotations

import subprocess

import nox

# The limit is for tests that hang: a machine of CI may be several times slower than a developer's.
PATIENT = ("--timeout", "600", "-o", "faulthandler_timeout=590")
# Tests in which a program's own hub chooses the lane, which `long` runs once more by messages.
ANY_LANE = "contract defects drop_in"
# Processes of pytest. Training takes all of a CPU. Ray starts processes of its own.
SIDE_BY_SIDE = {"torch": 2, "rllib": 0, "vector": 2}

# The extras of each image, and the Python of all.
IMAGES = {"core": ("atari", "lz4", "web"), "mujoco": ("atari", "lz4", "mujoco", "web")}
IMAGE_PYTHON = "3.13"

nox.options.sessions = ["lint", "unit"]


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style and types."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    # What clients import on other systems; `--warn-unreachable` would report all that is for Linux only.
    printed = str(session.run("python", "tests/support/client_modules.py", silent=True, log=False))
    modules = [part for name in printed.split() for part in ("-m", name)]
    for system in ("darwin", "win32"):
        options = ("--platform", system, "--cache-dir", f".mypy_cache/{system}", "--no-warn-unreachable")
        session.run("mypy", *options, "--follow-imports", "silent", *modules, log=False)


@nox.session(venv_backend="none")
def unit(session: nox.Session) -> None:
    """Run the pure tests and the golden frames, in less than a minute."""
    session.run("pytest", "-q", "tests/unit", "tests/conformance", *session.posargs)


@nox.session(venv_backend="none")
def coverage(session: nox.Session) -> None:
    """Hold the branch coverage of the pure rooms by the pure tests, without those whose examples differ by run."""
    alike = "not hypothesis and not long and not chaos and not benchmark and not container"
    session.run("coverage", "run", "-m", "pytest", "-q", "-n", "0", "-m", alike, "tests/unit", "tests/conformance")
    session.run("coverage", "report", "--skip-covered")


@nox.session(venv_backend="none")
def long(session: nox.Session) -> None:
    """Run what `pytest` leaves out: the full matrix, and the tests of any lane by messages."""
    session.run("pytest", "-q", "-m", "long and not chaos", *PATIENT, *session.posargs)
    files = [f"tests/integration/test_{name}.py" for name in ANY_LANE.split()]
    session.run("pytest", "-q", "--lane", "wire", *files)


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """Run everything but the chaos tests and benchmarks."""
    session.notify("lint")
    session.notify("coverage")
    session.run("pytest", "-q")
    session.notify("long")
    for folder in SIDE_BY_SIDE:
        session.notify(f"frameworks({folder})")


@nox.session(venv_backend="venv", reuse_venv=True)
@nox.parametrize("folder", [nox.param(name, id=name) for name in SIDE_BY_SIDE])
def frameworks(session: nox.Session, folder: str) -> None:
    """Run the tests of training frameworks, in an environment for each folder."""
    session.install("-q", "-e", ".", "-r", f"tests/frameworks/{folder}/requirements.txt")
    processes = str(SIDE_BY_SIDE[folder])
    session.run("pytest", "-q", "-n", processes, "-m", "not benchmark and not chaos", f"tests/frameworks/{folder}")


@nox.session(venv_backend="venv", reuse_venv=True)
def manifests(session: nox.Session) -> None:
    """Check the manifests of docker/kubernetes, in an environment with the schemas of Kubernetes."""
    session.install("-q", "-e", ".", "-r", "tests/kubernetes/requirements.txt")
    session.run("pytest", "-q", "tests/kubernetes", *session.posargs)


@nox.session(venv_backend="venv", reuse_venv=True)
def containers(session: nox.Session) -> None:
    """Build the images, and run hubs in containers as their manifests say; needs a Docker engine and 1 GB."""
    session.install("-q", "-e", ".", "-r", "tests/kubernetes/requirements.txt")
    for image in IMAGES:
        build = ("docker", "build", "--network", "host", "-f", "docker/Dockerfile", "--target", image)
        session.run(*build, "-t", "envhub" if image == "core" else f"envhub:{image}", ".", external=True)
    session.run("pytest", "-q", "-n", "0", "-m", "container", "tests/kubernetes", *session.posargs)


@nox.session(venv_backend="none")
def lock(session: nox.Session) -> None:
    """Write the locks of the images, docker/*.lock: the newest versions that pyproject.toml allows; needs uv."""
    command = ["uv", "pip", "compile", "--quiet", "--upgrade", "--no-annotate", "--universal", "--generate-hashes"]
    command += ["--python-version", IMAGE_PYTHON]
    for image, extras in IMAGES.items():
        chosen = [f"--extra={name}" for name in extras]
        agreeing = [] if image == "core" else ["--constraint=docker/core.lock"]
        session.run(*command, "pyproject.toml", *chosen, *agreeing, f"--output-file=docker/{image}.lock", external=True)
    requires = "\n".join(nox.project.load_toml("pyproject.toml")["build-system"]["requires"])
    subprocess.run([*command, "-", "--output-file=docker/build.lock"], input=requires, text=True, check=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Run the programs and check the links, tables and names of all pages."""
    session.run("pytest", "-q", "-m", "not chaos", "-k", "readme or page or protocol_document", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Time EnvHub beside its yardsticks; no time fails a test."""
    session.run("pytest", "-m", "benchmark", "-n", "0", "-s", *session.posargs)
