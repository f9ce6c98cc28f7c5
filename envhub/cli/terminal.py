"""The terminal of the ``envhub`` command: where it prints, how it tells an error, and its exit statuses."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn

from rich.console import Console

from envhub.core_files import write_no_core_file

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_KEYS = 3  # of ``serve``, whose keys cannot be used or let a stranger in

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def end(command: str, why: object, status: int = EXIT_USAGE) -> NoReturn:
    """Print one line that begins with the command, and exit."""
    errors.print(f"envhub {command}: {why}", markup=False, soft_wrap=True)
    sys.exit(status)


@contextlib.contextmanager
def errors_in_a_line(command: str) -> Iterator[None]:
    """Print an expected error as one line; any other exception is a bug and shows its traceback."""
    import gymnasium
    from envhub_client.tools.progress import making_bar

    from envhub.errors import EnvHubError

    try:
        with making_bar(Console(stderr=True)):
            yield
    except (EnvHubError, gymnasium.error.Error, ModuleNotFoundError) as error:
        end(command, error, EXIT_FAILED)


@contextlib.contextmanager
def with_secrets(command: str) -> Iterator[None]:
    """Have keys in this process, which then leaves no core file; errors as of ``errors_in_a_line``."""
    write_no_core_file()
    with errors_in_a_line(command):
        yield
