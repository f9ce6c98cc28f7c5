"""Command ``envhub envs``: print the envs that a hub offers, and their spaces."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from rich.console import Console

from envhub.errors import EnvHubError, printable
from envhub.secret import hidden
from envhub_client.client import Client, connect
from envhub_client.tools.rows import print_rows

SPACES_MAX = 16  # a hub tells the spaces of an env only by making one
ANSWER_MAX_S = 10.0  # a hub answers sooner than it makes some envs
HEADINGS = ("env", "observation space", "action space")


def run(console: Console, errors: Console, address: str | None, patterns: Sequence[str], timeout: float) -> bool:
    """Print the names that a hub offers, and the spaces of each where they are few enough to be made one by one.

    Args:
        console: where to print: a table on a terminal, else a line for each env, with tabs between its columns.
        errors: where to print why there are no spaces.
        address: the hub's, as for ``envhub.connect``.
        patterns: which of its envs; all without any.
        timeout: seconds to wait for each answer, at most ``ANSWER_MAX_S``, and for the making of each env.

    Returns:
        Whether there are any.

    Raises:
        EnvHubError: as of ``envhub.connect``.
    """
    with connect(address, min(timeout, ANSWER_MAX_S)) as client:
        offered, unready = client.envs(), client.health()["unready"]
        names = [name for name in offered if any(fnmatchcase(name, pattern) for pattern in patterns or ("*",))]
        for name in sorted(unready.keys() - set(offered)):  # an id or a pattern that names nothing there
            errors.print(hidden(printable(f"unready: {name}: {unready[name]}")), markup=False, soft_wrap=True)
        if len(names) > SPACES_MAX:
            for name in names:
                console.print(name, markup=False, soft_wrap=True)
            text = f"{len(names)} envs; of at most {SPACES_MAX} the spaces are listed, too: name them, or a pattern"
            errors.print(text, markup=False, soft_wrap=True)
            return True
        print_rows(console, HEADINGS, [(name, *_spaces(client, name, timeout)) for name in names])
    if not names:
        text = f"of its {len(offered)} envs none matches {' or '.join(patterns)}" if offered else "it offers no env"
        errors.print(text, markup=False, soft_wrap=True)
    return bool(names)


def _spaces(client: Client, name: str, timeout: float) -> tuple[str, str]:
    """The observation and the action space of the env, or why it cannot be made."""
    try:
        envs = client.make_vec(name, 1, num_workers=1, lane="wire", init_timeout=timeout)
    except Exception as error:  # an env may raise anything
        if not (isinstance(error, EnvHubError) or isinstance(error.__cause__, EnvHubError)):
            raise
        return f"cannot be made: {_in_a_line(str(error)) or type(error).__name__}", ""
    try:
        return _in_a_line(str(envs.single_observation_space)), _in_a_line(str(envs.single_action_space))
    finally:
        envs.close()


def _in_a_line(text: str) -> str:
    return " ".join(str(printable(text)).partition("\n\n")[0].split())
