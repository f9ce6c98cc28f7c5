"""The ``envhub`` command: ``main`` and its terminal. ``commands`` has the parser, and other modules the commands."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from envhub.errors import FULL_TRACEBACKS, ONLY_PROGRAMS_RECORD, EnvHubError, hidden, only_linux, printable
from envhub.files import user_text
from envhub.transport.address import NO_ANNOUNCEMENTS

__all__ = ("main",)


# They start a hub or processes, or read and write files of a hub.
ONLY_LINUX = {"serve", "service", "doctor", "validate", "keys", "demo", "bench", "replays", "replay"}
# What was a command or an option of one, and the way that is left; ``envhub.options.RETIRED`` has those of ``serve``.
RETIRED = {
    "conformance": (
        "hubs and clients are tested from a clone of the repository: cd tests && python -m conformance.kit -h"
    ),
    "record": ONLY_PROGRAMS_RECORD,
    "fleet logs": "Ray keeps the logs of hubs: `ray logs actor --id ID`, with an ID of `ray list actors`",
    "fleet up --announce": NO_ANNOUNCEMENTS,
    "bench --json": "bench prints a table, and no JSON any more",
    "bench --plot": (
        "other ways are compared from a clone of the repository: cd tests/benchmarks && python -m side_by_side -h"
    ),
    **dict.fromkeys(
        ("replay --until", "replay --video"),
        "there is no --until and no --video any more: --pdb stops in the step that failed",
    ),
}

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_KEYS = 3  # of ``serve``, whose keys cannot be used or let a stranger in
EXIT_INTERRUPTED = 130
TIMEOUT_S = 5.0
SLOW_S = 0.1  # a loop that was busy for longer than this is mentioned
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def main() -> None:
    arguments = sys.argv[1:]
    if sys.platform != "linux" and arguments and arguments[0] in ONLY_LINUX:
        end(arguments[0], only_linux("this command"))
    with standard_streams():
        try:
            run(arguments)
        except PermissionError as error:
            if sys.platform == "win32" or error.filename is None or os.environ.get(FULL_TRACEBACKS):
                raise
            path = os.fsdecode(error.filename)
            text = f"{user_text(os.geteuid())} may not use {path}: name another place, or run this as its owner"
            print_error(f"envhub: {text}")
            sys.exit(EXIT_USAGE)


def run(arguments: list[str]) -> None:
    # Containers and scripts ask ``health`` every few seconds, so its usual command lines need no import of the parser,
    # of NumPy and of what draws tables.
    if (plain := plain_arguments(arguments)) is not None:
        try:
            with errors_in_a_line("health"):
                check(*plain)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
    refuse_retired(arguments)
    from envhub.cli.commands import app

    with errors_in_a_line(" ".join(app.parse_commands(arguments)[0])):
        app(arguments)


def refuse_retired(arguments: list[str]) -> None:
    """End with the way that is left if these arguments have a command or an option that is no more."""
    from envhub.options import RETIRED as OPTIONS

    given = [each.partition("=")[0] for each in arguments]
    for retired, way in (RETIRED | {f"serve --{name.replace('_', '-')}": OPTIONS[name] for name in OPTIONS}).items():
        command, _, option = retired.partition(" --")
        words = command.split()
        if given[: len(words)] == words and (not option or f"--{option}" in given):
            end(command, way)


def plain_arguments(arguments: list[str]) -> tuple[str | None, float] | None:
    """The arguments of ``health [ADDRESS] [--timeout SECONDS]``, as the parser reads them; None for other lines."""
    name, *given = arguments or [""]
    timeout = TIMEOUT_S
    if given[-2:-1] == ["--timeout"] and _SECONDS.fullmatch(given[-1]) and float(given[-1]):
        timeout = float(given[-1])
        del given[-2:]
    if name != "health" or len(given) > 1 or not all("://" in address and address[0] != "-" for address in given):
        return None
    return given[0] if given else None, timeout


def check(address: str | None, timeout: float) -> NoReturn:
    """Ask a hub for its health, print the answer, and exit; arguments as of ``envhub.connect``."""
    from envhub_client.client import connect

    with connect(address, timeout) as client:
        answer = client.health()
    text = f"{answer['sessions']} sessions, up for {answer['uptime_s']:.0f} s"
    if (lag_s := answer.get("loop_lag_s", 0.0)) >= SLOW_S:
        text += f", busy for up to {lag_s:.1f} s at a time"
    print_line(f"{answer['status']}: {text}")
    if why := answer.get("why"):
        print_line(hidden(printable(f"{why}")))
    for name, why in answer.get("unready", {}).items():
        print_line(hidden(f"unready: {name}: {why}"))
    sys.exit(0 if answer["status"] == "ok" else EXIT_FAILED)


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
    """End a command in good order where its output cannot be written; nothing is given of a reader that has ended."""
    outputs = [_replace(name) for name in ("stdout", "stderr")]
    try:
        try:
            yield
        finally:
            if sys.stdout is not None and (outputs[0] is None or outputs[0].error is None):  # else that was told
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


def print_json(value: Any) -> None:
    import msgspec

    print_line(hidden(msgspec.json.format(msgspec.json.encode(value)).decode()))


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
    try:
        yield
    except Exception as error:
        gymnasium = sys.modules.get("gymnasium")  # which takes long to import
        expected = (EnvHubError, ModuleNotFoundError, *([] if gymnasium is None else [gymnasium.error.Error]))
        if not isinstance(error, expected) or os.environ.get(FULL_TRACEBACKS):
            raise
        end(command, error, EXIT_FAILED)
