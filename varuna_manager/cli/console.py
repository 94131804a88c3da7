"""Output of the commands: data goes to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
import traceback
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from spottrain.errors import causes, one_line
from spottrain.printable import printable
from spottrain.redaction import redacted
from spottrain.varuna_manager.format import finite

_MAX_ERROR = 1_500
"""Characters of an error that are shown."""
LOG_WIDTH = 160
"""Width of tables that go to a file or a pipe, in characters."""


class Output(StrEnum):
    """Format of a command's answer."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="json prints a single JSON document.")
]


def console(*, stderr: bool = False) -> Console:
    """Return a console for people; without a terminal it is ``LOG_WIDTH`` wide."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else LOG_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, emoji=False)


def show(*parts: RenderableType) -> None:
    """Print the answer of a command for people."""
    out = console()
    for part in parts:
        out.print(part, markup=False)


def show_json(document: Any) -> None:
    """Print the answer of a command for programs."""
    sys.stdout.write(json.dumps(finite(document), indent=2, allow_nan=False) + "\n")


def say(line: str) -> None:
    """Print a line for the user that is not part of the answer."""
    console(stderr=True).print(line, markup=False, soft_wrap=True)


def is_debugging() -> bool:
    """Return whether the user asked for ``--debug``."""
    return "--debug" in sys.argv


def say_error(error: BaseException, message: str) -> None:
    """Print an error in one line; with ``--debug`` its causes and traceback, too."""
    if message:
        line = printable(redacted(one_line(message)))
        if len(line) > _MAX_ERROR and not is_debugging():
            # What is wrong stands first, what to do last.
            cut = "... (cut; --debug shows all) ..."
            line = f"{line[: _MAX_ERROR // 2]}{cut}{line[-_MAX_ERROR // 2 :]}"
        say(f"error: {line}")
    if is_debugging():
        for line in causes(error):
            say(line)
        say("".join(traceback.format_exception(error)).rstrip())
