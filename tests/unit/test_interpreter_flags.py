"""The options of a program's interpreter, as other interpreters get them."""

from __future__ import annotations

from envhub_client.private_hub.program_environment import interpreter_flags, start_flags


class Flags:
    """What ``sys.flags`` has of ``-S -v -i -q``."""

    isolated = ignore_environment = no_user_site = safe_path = optimize = bytes_warning = dont_write_bytecode = 0
    no_site = verbose = inspect = interactive = quiet = 1


def test_options_that_would_break_a_worker_are_left_out() -> None:
    assert interpreter_flags(Flags(), [], {}) == start_flags(Flags()) == []
