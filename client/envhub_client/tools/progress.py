"""A bar on the terminal while a hub makes envs slowly: what the library logs, as the ``envhub`` command shows it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from envhub.errors import printable


class _Bar(logging.Handler):
    """Shows the records of progress, and warnings."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self._progress = progress
        self._task = progress.add_task("", visible=False)

    def emit(self, record: logging.LogRecord) -> None:
        """Show it."""
        if (counts := getattr(record, "progress", None)) is not None:
            phase, built, num_envs = counts
            self._progress.start()
            self._progress.update(
                self._task, description=f"{phase} envs", completed=built, total=num_envs, visible=built < num_envs
            )
            self._progress.refresh()
        elif record.levelno >= logging.WARNING:
            self._progress.console.print(printable(record.getMessage()), markup=False, soft_wrap=True)


def counting_bar(console: Console, text: str = "{task.description}") -> Progress:
    """A bar with a count, gone when it has stopped. Its caller refreshes it.

    A thread of its own would do that, too; but a program that forks meanwhile, as ``AsyncVectorEnv`` does, may hang.
    """
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, auto_refresh=False, transient=True)


@contextlib.contextmanager
def making_bar(console: Console) -> Iterator[None]:
    """Show a bar, on a console of its own, whenever a hub that makes envs takes more than a second."""
    logger = logging.getLogger("envhub")
    level = logger.level
    progress = counting_bar(console)
    bar = _Bar(progress)
    logger.addHandler(bar)
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.removeHandler(bar)
        logger.setLevel(level)
        if progress.live.is_started:  # else it would end a line that it did not begin
            progress.stop()
