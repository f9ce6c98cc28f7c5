"""Commands ``replays`` and ``replay``: envs that failed, run again."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from envhub.cli.consoles import console
from envhub.cli.terminal import EXIT_FAILED, EXIT_USAGE, end, errors_in_a_line, print_error, print_line
from envhub.errors import printable

if TYPE_CHECKING:
    import numpy as np


def replays(folder: Path | None = None) -> None:
    """List the failures of envs that can be run again, the newest first.

    A line has the name that ``envhub replay`` takes, the time, the client if it has a key, and the failure; in a pipe
    with tabs between them.

    Parameters
    ----------
    folder
        Folder of a hub's replays (``envhub serve --replays``). By default that of this user's hubs.
    """
    from envhub_client.tools.rows import print_rows
    from envhub_server.catalog.replay_folder import files_in
    from envhub_server.replay import Listed, listed

    if folder is not None and not folder.is_dir():
        end("replays", f"there is no folder {folder}; name the one of `envhub serve --replays`, or none")
    rows, chosen = [], _replay_folder(folder)
    for path in files_in(chosen):
        with contextlib.suppress(FileNotFoundError):  # a hub has removed it meanwhile
            rows.append(listed(path))
    print_rows(console, Listed._fields, rows)
    if not rows:
        print_error(f"there is no replay in {chosen}")


def replay(
    file: Path,
    *,
    pdb: Annotated[bool, Parameter(name="--pdb")] = False,
    until: int | None = None,
    video: Path | None = None,
    trust: Annotated[bool, Parameter(name="--trust")] = False,
) -> None:
    """Run an env that failed again, and say whether it fails in the same way; exit with 1 if it does not.

    It runs in a process of its own, with the interpreter and in the folder of the env that failed, and gets the
    same requests. Steps count from 0, resets included.

    A file names the program and the modules that are run, which are printed first. A file that is not yours, or not in
    the folder of your hubs, is run with --trust only.

    Parameters
    ----------
    file
        File, or a name that ``envhub replays`` lists, and that ``infos["env_failure"]`` has as ``replay``.
    pdb
        Start pdb at the step that failed, at the exception that it raised, or with --until at that step.
    until
        Number of the step to stop before.
    video
        MP4 file to render the env into, which has to have the mode rgb_array; needs the extra "record". The exit status
        is 1 if the env draws no frame.
    trust
        Run what the file names, wherever it comes from. It may run any code.
    """
    from envhub_server.catalog.replay_folder import default_path
    from envhub_server.ipc.replay_file import SUFFIX
    from envhub_server.replay import ReplayError, announced, is_own, run

    if until is not None and until < 0:
        end("replay", f"--until counts from 0, got {until}", EXIT_USAGE)
    path = file if file.exists() else _replay_folder(None) / f"{file.name.removesuffix(SUFFIX)}{SUFFIX}"
    if not path.exists():
        end("replay", f"there is neither {file} nor {path}; `envhub replays` lists the names")
    try:
        print_error(announced(path))
        if not trust and not is_own(path, default_path(os.environ)):
            why = "it is no file of yours in the folder of your hubs, or another user could replace it there"
            end("replay", f"{path} is not run, for {why}; --trust runs it")
        with _film_into(video) as show:
            verdict = run(path, until, pdb, show)
    except ReplayError as error:
        end("replay", error)
    print_line(printable(verdict.text))
    if video is not None and not verdict.frames:
        why = "the env drew no frame, for which it has to have the render mode rgb_array"
        end("replay", f"there is no film {video}: {why}", EXIT_FAILED)
    sys.exit(0 if verdict.alike else EXIT_FAILED)


@contextlib.contextmanager
def _film_into(path: Path | None) -> Iterator[Callable[[np.ndarray, float], None] | None]:
    """Open the film in this file, and yield what takes its frames; None without a file."""
    if path is None:
        yield None
        return
    from envhub.film import Film

    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        end("replay", f"--video {path}: it has to be a file in a folder that exists", EXIT_USAGE)
    films: list[Film] = []

    def show(frame: np.ndarray, fps: float) -> None:
        if not films:
            films.append(Film(path, fps))
        films[0].add(frame[None])

    with errors_in_a_line("replay"):
        import av  # noqa: F401  so that it is missed before the env is run

        try:
            yield show
        finally:
            for film in films:
                film.finish()


def _replay_folder(folder: Path | None) -> Path:
    from envhub_server.catalog.replay_folder import default_path

    chosen = folder or default_path(os.environ)
    if chosen is None:
        end("replays", "ENVHUB_REPLAYS is off; name the folder")
    return chosen
