"""The terminal of the ``envhub`` command: where it prints, how it tells an error, and its exit statuses."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn, TextIO

from envhub.core_files import write_no_core_file

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_KEYS = 3  # of ``serve``, whose keys cannot be used or let a stranger in
EXIT_INTERRUPTED = 130


def print_line(text: str) -> None:
    """Print a line to the standard output, at once."""
    _print(text, sys.stdout)


def print_error(text: str) -> None:
    """Print a line to the standard error, at once."""
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO | None) -> None:
    if stream is None:  # its descriptor is closed
        return
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:  # its reader has ended; Python writes what is left when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(EXIT_FAILED)


def end(command: str, why: object, status: int = EXIT_USAGE) -> NoReturn:
    """Print one line that begins with the command, and exit."""
    print_error(f"envhub {command}: {why}")
    sys.exit(status)


@contextlib.contextmanager
def errors_in_a_line(command: str) -> Iterator[None]:
    """Print an expected error as one line; any other exception is a bug and shows its traceback."""
    import gymnasium
    from envhub_client.tools.progress import making_bar
    from rich.console import Console

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
