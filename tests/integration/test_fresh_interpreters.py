"""What a fresh interpreter loads, logs and calculates."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# --- what an import costs ---------------------------------------------------------------------------------------------

SERVER_LIBRARIES = ["gymnasium", "structlog", "cyclopts", "rich", "psutil"]


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after the statement."""
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_import_of_envhub_loads_nothing_until_it_is_used() -> None:
    loaded = loaded_by("import envhub")
    assert "envhub" in loaded
    assert not loaded & {*SERVER_LIBRARIES, "zmq", "numpy", "msgpack", "cloudpickle", "envhub_server", "envhub_client"}


def test_private_hub_imports_little_before_it_starts_its_zygote_and_nothing_that_it_seldom_needs() -> None:
    assert not loaded_by("import envhub_server.private_hub") & {*SERVER_LIBRARIES, "numpy", "zmq", "msgpack"}
    loaded = loaded_by("import envhub_server.private_hub, envhub_server.serve")
    assert "zmq" in loaded
    assert not loaded & {"structlog", "cyclopts", "rich", "psutil", "asyncio"}


def test_connection_needs_neither_gymnasium_nor_a_server_library() -> None:
    loaded = loaded_by("import envhub.protocol.prelude, envhub_client.connection.connection")
    assert "zmq" in loaded
    assert not loaded & {*SERVER_LIBRARIES, "envhub_server", "asyncio"}


def test_vector_envs_by_address_need_no_library_of_servers() -> None:
    loaded = loaded_by("import envhub; envhub.make_vec")
    assert "gymnasium" in loaded
    assert not loaded & ({*SERVER_LIBRARIES, "msgspec", "ray", "envhub_server"} - {"gymnasium"})


# --- flags and limits of a process -----------------------------------------------------------------------------------

SHOWN = "import json, sys; print(json.dumps([list(sys.flags), sys.warnoptions, sys._xoptions]))"
OF_THIS = "from envhub_client.private_hub.program_environment import own_flags"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["-OO", "-B", "-bb", "-s", "-E"],
        ["-I", "-X", "dev", "-X", "utf8=0", "-W", "error::DeprecationWarning", "-W", "ignore"],
        ["-Wonce", "-Xint_max_str_digits=5000"],
    ],
    ids=" ".join,
)
def test_interpreter_with_the_options_of_another_has_its_flags(flags: list[str]) -> None:
    printed = f"import sys; sys.path += {sys.path}; {OF_THIS}; import json; print(json.dumps(own_flags())); {SHOWN}"
    first = subprocess.run([sys.executable, *flags, "-c", printed], capture_output=True, text=True, check=True)
    found, shown = map(json.loads, first.stdout.splitlines())
    again = subprocess.run([sys.executable, *found, "-c", SHOWN], capture_output=True, text=True, check=True)
    assert json.loads(again.stdout) == shown


def test_older_libzmq_is_refused() -> None:
    program = "import zmq; zmq.zmq_version_info = lambda: (4, 3, 4); import envhub.transport.sockets"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1 and "ImportError: EnvHub needs libzmq 4.3.5 or later" in found.stderr
