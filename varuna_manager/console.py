"""How commands speak: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

LOG_WIDTH = 160
"""Columns of tables that go into a file or a pipe."""


class Output(StrEnum):
    """How a command answers."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", help="json prints one JSON document, nothing else."),
]
NameArgument = Annotated[str, typer.Argument(help="Name of a job.")]


def console(*, stderr: bool = False) -> Console:
    """Return a console for people, wide enough where nobody has a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr, width=None if stream.isatty() else LOG_WIDTH, highlight=False
    )


def show(*parts: RenderableType) -> None:
    """Print the answer of a command for people."""
    out = console()
    for part in parts:
        out.print(part, markup=False)


def show_json(document: Any) -> None:
    """Print the answer of a command for programs."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def say(line: str) -> None:
    """Tell the user something beside the answer."""
    console(stderr=True).print(line, markup=False, soft_wrap=True)
