"""``spottrain logs``: what a job's manager, agents and workers printed."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from datetime import datetime
from typing import Annotated

import typer

from spottrain.errors import ConfigError
from spottrain.varuna_manager.cli.arguments import FollowOption, NameArgument
from spottrain.varuna_manager.jobs.folder import find
from spottrain.varuna_manager.jobs.logs import LogReader

POLL_S = 0.5
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def logs(
    name: NameArgument,
    vm: Annotated[
        str | None, typer.Option("--vm", help="Only the logs of this VM: its id, or its beginning.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Only what your code printed in this rank.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, help="Only the last N lines of each log.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Only newer lines: 90s, 15m, 2h or 1d, or a time as in "
            "2030-01-31T18:00:00+00:00. A line without a time has that of the line before "
            "it, or of the log's last change.",
        ),
    ] = None,
    follow: FollowOption = False,
) -> None:
    """Show the logs of a job's manager, agents and workers."""
    job = find(name)
    since_s = None if since is None else _moment(since, time.time())
    reader = LogReader(job, vm=vm, rank=rank, since_s=since_s)
    while True:
        managed = follow and job.is_managed()
        last = tail if reader.is_new else None
        for new in reader.new_lines(is_last=not managed):
            lines = (f"{path.relative_to(job.path)}: {line}\n" for path, line in new)
            sys.stdout.writelines(lines if last is None else deque(lines, maxlen=last))
        if not managed:
            return
        sys.stdout.flush()  # it may be a pipe
        time.sleep(POLL_S)


def _moment(text: str, now_s: float) -> float:
    """Return a time that the user gives, in seconds since the epoch.

    Raises:
        ConfigError: It is none.
    """
    if span := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return now_s - float(span[1]) * _UNITS_S[span[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"--since: must be 90s, 15m, 2h or 1d, or a time such as 2030-01-31T18:00: got {text}"
        ) from error
