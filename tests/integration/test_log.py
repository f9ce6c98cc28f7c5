"""What the hub's log writes, each in a process of its own, since structlog is imported once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

BEGIN = """
import logging, resource, sys
from envhub_server import log
logger = log.Logger('envhub.hub').bind(session='s')
"""
FULL = """
log.configure(logging.ERROR)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(open('/dev/null'))
except OSError:
    pass
try:
    1 / 0
except ZeroDivisionError:
    logger.exception('internal_error', number=1)
"""
ERRORS_ONLY = """
log.configure(logging.ERROR)
logger.warning('left_out')
assert 'structlog' not in sys.modules
try:
    1 / 0
except ZeroDivisionError:
    logger.exception('internal_error', number=1)
"""
REPEATED = """
log.configure(logging.INFO)
for built in (1, 1, 1, 2):
    logger.info('session_making', phase='building', built=built, num_envs=3)
"""
OF_A_PROGRAM = """
import structlog
structlog.configure(
    processors=[lambda _, method, line: f"{{method}} {{sorted(line.items())}}"],
    wrapper_class={wrapper},
    logger_factory=lambda *names: structlog.PrintLogger() if names == ('envhub.hub',) else None,
)
logger.info('session_ready', rows=2)
logger.exception('internal_error')
"""
AFTERWARDS = """
log.configure(logging.ERROR)
import structlog
structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
logger.error('of_the_hub')
structlog.get_logger().info('of_the_program')
"""


def written(script: str) -> tuple[str, str]:
    ran = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, ran.stderr


def test_hub_that_logs_errors_only_imports_structlog_with_the_first() -> None:
    line = json.loads(written(ERRORS_ONLY)[1])
    assert line["exception"].endswith("ZeroDivisionError: division by zero")
    found = {key: line[key] for key in ("event", "level", "session", "number")}
    assert found == {"event": "internal_error", "level": "error", "session": "s", "number": 1}


def test_exception_is_written_where_no_descriptor_is_left_to_import_structlog_with() -> None:
    stderr = written(FULL)[1]
    assert stderr.startswith("internal_error {'session': 's', 'number': 1}\n")
    assert "ZeroDivisionError: division by zero\n" in stderr and "Too many open files" in stderr


@pytest.mark.parametrize("wrapper", ["None", "structlog.BoundLogger"])
def test_program_that_configures_structlog_has_the_lines_by_name_and_method(wrapper: str) -> None:
    stdout, _ = written(OF_A_PROGRAM.format(wrapper=wrapper))
    info, error = stdout.splitlines()
    assert info == "info [('event', 'session_ready'), ('rows', 2), ('session', 's')]"
    assert error.startswith(("error [('event', 'internal_error')", "exception [('event', 'internal_error')"))


def test_progress_is_logged_once_however_often_a_client_asks_after_it() -> None:
    assert [json.loads(line)["built"] for line in written(REPEATED)[1].splitlines()] == [1, 2]


def test_hubs_log_is_not_the_programs() -> None:
    stdout, stderr = written(AFTERWARDS)
    assert json.loads(stderr)["event"] == "of_the_hub"
    assert stdout == "event='of_the_program'\n"
