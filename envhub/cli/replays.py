"""Commands ``replays`` and ``replay``: envs that failed, run again."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from envhub.cli.parameters import console
from envhub.cli.terminal import EXIT_FAILED, end, print_error, print_line
from envhub.errors import printable


def replays(folder: Path | None = None) -> None:
    """List the failures of envs that can be run again, the newest first.

    A line has the name that ``envhub replay`` takes, the time and the failure; in a pipe with tabs between them.

    Parameters
    ----------
    folder
        Folder of a hub's replays (``envhub serve --replays``). By default that of this user's hubs.
    """
    from envhub_client.tools.console import print_rows
    from envhub_server.catalog.replay_folder import files_in
    from envhub_server.replay import listed

    if folder is not None and not folder.is_dir():
        end("replays", f"there is no folder {folder}; name the one of `envhub serve --replays`, or none")
    rows, chosen = [], folder or _own_folder()
    for path, _ in files_in(chosen):
        with contextlib.suppress(FileNotFoundError):  # a hub has removed it meanwhile
            rows.append(listed(path))
    print_rows(console, ("name", "time", "failure"), rows)
    if not rows:
        print_error(f"there is no replay in {chosen}")


def replay(
    file: Path,
    *,
    pdb: Annotated[bool, Parameter(name="--pdb")] = False,
    trust: Annotated[bool, Parameter(name="--trust")] = False,
    until: Annotated[str | None, Parameter(show=False)] = None,
    video: Annotated[str | None, Parameter(show=False)] = None,
) -> None:
    """Run an env that failed again, and say whether it fails in the same way; exit with 1 if it does not.

    It runs in a process of its own, with the interpreter and in the folder of the env that failed, and gets the
    same requests since a reset. Steps count from 0, resets included.

    A file names the program and the modules that are run, which are printed first. A file that is not yours, or not in
    the folder of your hubs, is run with --trust only.

    Parameters
    ----------
    file
        File, or a name that ``envhub replays`` lists, and that ``infos["env_failure"]`` has as ``replay``.
    pdb
        Start pdb at the step that failed, or at the exception that it raised.
    trust
        Run what the file names, wherever it comes from. It may run any code.
    """
    from envhub_server.catalog.replay_folder import default_path
    from envhub_server.ipc.replay_file import SUFFIX
    from envhub_server.replay import ReplayError, announced, is_own, run

    if until is not None or video is not None:
        end("replay", "there is no --until and no --video any more: --pdb stops in the step that failed")
    path = file if file.exists() else _own_folder() / f"{file.name.removesuffix(SUFFIX)}{SUFFIX}"
    if not path.exists():
        end("replay", f"there is neither {file} nor {path}; `envhub replays` lists the names")
    try:
        print_error(announced(path))
        if not trust and not is_own(path, default_path(os.environ)):
            why = "it is no file of yours in the folder of your hubs, or another user could replace it there"
            end("replay", f"{path} is not run, for {why}; --trust runs it")
        verdict = run(path, pdb)
    except ReplayError as error:
        end("replay", error)
    print_line(printable(verdict.text))
    sys.exit(0 if verdict.alike else EXIT_FAILED)


def _own_folder() -> Path:
    from envhub_server.catalog.replay_folder import default_path

    folder = default_path(os.environ)
    if folder is None:
        end("replays", "ENVHUB_REPLAYS is off; name the folder")
    return folder
