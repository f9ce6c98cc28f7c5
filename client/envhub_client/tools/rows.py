"""Rows of texts on a terminal and in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_rows(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal, else a line for each row, with tabs between its columns."""
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row).rstrip(), file=console.file)  # rich would put spaces in place of tabs
        return
    if rows:
        table = Table()
        for number, heading in enumerate(headings):
            table.add_column(heading, no_wrap=number == 0, overflow="fold")  # the first is a name to be copied
        for row in rows:
            table.add_row(*map(Text, row))  # no markup
        console.print(table)
