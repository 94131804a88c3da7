"""Tables for the terminal, without lines."""

from __future__ import annotations

from rich.table import Table


def columns(*names: str, title: str | None = None) -> Table:
    """Return an empty table; names that begin with ``r:`` are columns of numbers."""
    table = Table(box=None, title=title, title_justify="left", pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name.removeprefix("r:"), justify="right" if name[:2] == "r:" else "left")
    return table
