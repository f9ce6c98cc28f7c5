"""The options of a program's interpreter, as other interpreters get them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from envhub_client.private_hub.interpreter_flags import interpreter_flags, start_flags

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


class Flags:
    """What ``sys.flags`` has of ``-S -v -i -q``."""

    isolated = ignore_environment = no_user_site = safe_path = optimize = bytes_warning = dont_write_bytecode = 0
    no_site = verbose = inspect = interactive = quiet = 1


def test_options_that_would_break_a_worker_are_left_out() -> None:
    assert interpreter_flags(Flags(), [], {}) == start_flags(Flags()) == []
