"""Commands that look at a hub's sessions and act on them, and on the hub."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from envhub import cli
from envhub.cli import EXIT_FAILED, print_json, print_line
from envhub.cli.commands import Seconds, console
from envhub.cli.hubs import HubAddress
from envhub.errors import hidden, printable

ANSWER_S = 10.0  # for a hub, which may wait for a worker
COMPLETION_S = 2.0  # for a hub that is asked while somebody types


def _names(context: Any) -> list[tuple[str, str]]:
    from envhub_client.client import connect

    with connect(context["hub"].raw, COMPLETION_S) as client:
        return [(row["session"], f"{row['num_envs']} x {row['env']}") for row in client.sessions()]


Session = Annotated[str, Parameter(completer=_names, help="The session's name, or its first digits.")]
Env = Annotated[int, Parameter(validator=Number(gte=0), help="Number of the env in its session.")]
Why = Annotated[str, Parameter(help="The reason, for trainers and the log.")]
Json = Annotated[bool, Parameter(help="Print JSON.")]


def _client(hub: str | None) -> Any:
    from envhub_client.client import connect

    return connect(hub, ANSWER_S)


@contextlib.contextmanager
def _client_for(command: str, hub: str | None, session: str) -> Iterator[tuple[Any, str]]:
    """A client, and the name of the only session that begins so; of others the hub says what became of them."""
    with _client(hub) as client:
        names = [row["session"] for row in client.sessions() if session and row["session"].startswith(session.lower())]
        if len(names) > 1:
            cli.end(command, f"several sessions begin with {session}: {', '.join(names)}", EXIT_FAILED)
        if not names and len(session) not in (8, 32):
            cli.end(command, f"no session of this hub begins with {session!r}", EXIT_FAILED)
        yield client, names[0] if names else session


def _print(rows: Any, json: bool, *lines: str) -> None:
    if json:
        print_json(rows)
    else:
        for line in lines:
            print_line(hidden(printable(line)))


def _print_table(columns: dict[str, Any], rows: list[Any], json: bool) -> None:
    from envhub_client.tools.console import print_rows, session_cells

    if json:
        print_json(rows)
    else:
        print_rows(console, [*columns], [session_cells(columns, row) for row in rows])


def _numbers(envs: Sequence[int]) -> str:
    return f"{'env' if len(envs) == 1 else 'envs'} {', '.join(map(str, envs))}"


def sessions(hub: HubAddress = None, *, ended: bool = False, json: Json = False) -> None:
    """List your sessions on a hub, or all of them with the right ``admin`` and as the hub's own user.

    Parameters
    ----------
    ended
        List the last ones that have ended, and who ended them, and why.
    """
    from envhub_client.tools.console import ENDED_COLUMNS, SESSION_COLUMNS

    with _client(hub) as client:
        _print_table(ENDED_COLUMNS if ended else SESSION_COLUMNS, client.sessions(ended), json)


def end(session: Session, *, why: Why, hub: HubAddress = None, json: Json = False) -> None:
    """End a session at once. Its trainer reads who did that, and why."""
    with _client_for("end", hub, session) as (client, name):
        row = client.end(name, why)
    _print(row, json, f"session {name} has ended: {row['num_envs']} x {row['env']}, {row['steps']} steps")


def stack(session: Session, env: Env | None = None, *, hub: HubAddress = None, json: Json = False) -> None:
    """Print the Python stacks of a session's workers, or of an env's; they go on, and may be in native code."""
    with _client_for("stack", hub, session) as (client, name):
        rows = client.stack(name, env)
    texts = (f"{_numbers(row['envs'])}, process {row['pid']}:\n{row['stacks'] or row['problem']}" for row in rows)
    _print(rows, json, *(f"worker {row['worker']}, {text}" for row, text in zip(rows, texts, strict=True)))


def frame(session: Session, env: Env, file: Path, *, hub: HubAddress = None, json: Json = False) -> None:
    """Write a PNG file of what an env shows now. Its trainer does not notice.

    It is the frame of ``render``, drawn between two steps; without ``render_mode="rgb_array"`` the observation, if that
    is an image.

    Parameters
    ----------
    file
        The file to write.
    """
    with _client_for("frame", hub, session) as (client, name):
        picture = client.frame(name, env)
    try:
        file.write_bytes(picture.png())
    except OSError as error:
        cli.end("frame", f"{file} cannot be written: {error.strerror}")
    height, width, channels = picture.pixels.shape
    row = {"file": str(file), "source": picture.source, "height": height, "width": width, "channels": channels}
    _print(row, json, f"{file}: the {picture.source} of env {env}, {width} x {height}")


def slow(hub: HubAddress = None, *, json: Json = False) -> None:
    """List the last 128 steps, resets and calls that took at least the hub's ``--slow-ms``, the newest last."""
    from envhub_client.tools.console import SLOW_COLUMNS

    with _client(hub) as client:
        _print_table(SLOW_COLUMNS, client.slow(), json)


def restart(session: Session, env: Env, *, why: Why = "", hub: HubAddress = None, json: Json = False) -> None:
    """End the worker of an env and start it again, which costs the session no restart.

    Its trainer gets all envs of the worker truncated, with who did that, and why.
    """
    with _client_for("restart", hub, session) as (client, name):
        row = client.restart(name, env, why)
    _print(row, json, f"worker {row['worker']} of session {name} is started again, with {_numbers(row['envs'])}")


def drain(
    hub: HubAddress = None,
    *,
    deadline: Seconds | None = None,
    message: Why = "",
    wait: bool = False,
    json: Json = False,
) -> None:
    """Let a hub end in peace: it makes no session any more, and ends with its last one.

    Trainers are told. With ``on_hub_loss="recreate"`` they go on on the hub that comes back at its address. Another
    ``drain`` changes the deadline and the message.

    Parameters
    ----------
    deadline
        Seconds after which the sessions that are left end, as by SIGTERM. Without it they end by themselves.
    wait
        Return when the hub has ended. The exit status is 1 if it cut sessions.
    """
    with _client(hub) as client:
        row = client.drain(deadline, message, wait)
    last = f"at the latest in {deadline:g} s" if deadline is not None else "when they end"
    number = row["cut" if wait else "sessions"]
    some = "1 session" if number == 1 else f"{number} sessions"
    text = f"has ended; it cut {some}" if wait else f"drains: it ends with its {some}, {last}"
    _print(row, json, f"the hub {text}")
    if wait and number:
        sys.exit(EXIT_FAILED)


def reload(hub: HubAddress = None, *, json: Json = False) -> None:
    """Have a hub read its file again. Sessions that run keep their settings."""
    with _client(hub) as client:
        row = client.reload()
    lines = [
        f"{name}: {before} -> {after}{when}"
        for what, when in (("changed", ""), ("needs_restart", ", from a restart on"))
        for name, (before, after) in row[what].items()
    ]
    _print(row, json, *(lines or ["nothing has changed"]))
