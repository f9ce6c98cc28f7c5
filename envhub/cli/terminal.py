"""The terminal of the ``envhub`` command: where it prints, how it tells an error, and its exit statuses."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from envhub.errors import hidden
from envhub.process import write_no_core_file

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_KEYS = 3  # of ``serve``, whose keys cannot be used or let a stranger in
EXIT_INTERRUPTED = 130


class _Output(io.FileIO):
    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # another program made it nonblocking, and it is full
                select.select([], [self], [])
            return written
        except OSError as error:
            self.error = error
            if self.fileno() == 2:  # whose loss changes neither what a command does nor its status
                return len(data)
            raise


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """End a command in good order where its output cannot be written; nothing is said of a reader that has ended."""
    outputs = [_replace(name) for name in ("stdout", "stderr")]
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if not any(output is not None and error is output.error for output in outputs):
            raise
        if not isinstance(error, BrokenPipeError):
            print_error(f"envhub: its output cannot be written: {error.strerror}")
        sys.exit(EXIT_FAILED)
    finally:
        for output in outputs:
            if output is not None and output.error is not None:  # Python writes what is left when it exits
                os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())


def _replace(name: str) -> _Output | None:
    stream = getattr(sys, name)
    if type(stream) is not io.TextIOWrapper:  # its descriptor is closed, or a test reads it
        return None
    output = _Output(stream.fileno(), "w", closefd=False)
    by_line = stream.line_buffering or stream.write_through
    buffered = io.BufferedWriter(output)
    setattr(sys, name, io.TextIOWrapper(buffered, stream.encoding, stream.errors, line_buffering=by_line))
    return output


def print_line(text: str) -> None:
    if sys.stdout is not None:
        print(text, flush=True)


def print_error(text: str) -> None:
    """Print a line to the standard error, at once, without what may be a secret."""
    if sys.stderr is not None:
        print(hidden(text), file=sys.stderr, flush=True)


def end(command: str, why: object, status: int = EXIT_USAGE) -> NoReturn:
    print_error(f"envhub {command}: {why}")
    sys.exit(status)


@contextlib.contextmanager
def errors_in_a_line(command: str) -> Iterator[None]:
    """Print an expected error as one line; any other exception is a bug and shows its traceback."""
    import gymnasium
    from envhub_client.tools.console import making_bar
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
