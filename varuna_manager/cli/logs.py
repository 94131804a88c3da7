"""``spottrain logs``: what a job's manager, agents and workers printed."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from spottrain.errors import ConfigError
from spottrain.printable import printable
from spottrain.suggest import did_you_mean
from spottrain.varuna_manager.cli.arguments import FollowOption, NameArgument
from spottrain.varuna_manager.jobs.folder import JobDir, find

POLL_S = 0.5
_TAIL_BYTES = 256
"""Of what was printed of a log, by which it is found again."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_OLDER = ".1.log"
"""How the older part of a rotated log ends."""


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
    wanted = _Wanted(_vms(job, vm), rank, None if since is None else _moment(since, time.time()))
    read: dict[Path, _Shown] = {}
    while True:
        managed = follow and job.is_managed()
        files = [x for x in _log_files(job, rotated=not read) if wanted.includes(x)]
        last = tail if not read else None
        for _, parts in itertools.groupby(files, key=_log_of):
            lines = (
                f"{path.relative_to(job.path)}: {printable(line)}\n"
                for path in parts
                for line in _new_lines(path, read, wanted, is_last=not managed)
            )
            sys.stdout.writelines(lines if last is None else deque(lines, maxlen=last))
        if not managed:
            return
        sys.stdout.flush()  # it may be a pipe
        time.sleep(POLL_S)


def _vms(job: JobDir, wanted: str | None) -> set[str] | None:
    """Return the VMs that have logs and whose id begins as the user says; None: all is wanted.

    Raises:
        ConfigError: There is none.
    """
    if wanted is None:
        return None
    known = {path.parent.name for path in job.cloud.rglob("*.log")}
    if found := {vm for vm in known if vm.startswith(wanted)}:
        return found
    hint = did_you_mean(wanted, known) or f"it has those of {', '.join(sorted(known)) or 'none'}"
    raise ConfigError(f"--vm: job {job.name} has no logs of VM {wanted}; {hint}")


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


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which lines of which logs are shown."""

    vms: set[str] | None
    """None: of all, and of the manager."""
    rank: int | None
    since_s: float | None
    """Seconds since the epoch."""

    def includes(self, log: Path) -> bool:
        """Return whether a log may have such lines."""
        if self.rank is not None and not log.name.startswith("supervisor."):
            return False
        return self.vms is None or log.parent.name in self.vms

    def lines(self, lines: Iterable[str], shown: _Shown, written_s: float) -> Iterator[str]:
        """Yield those of new lines of a log that are shown."""
        printed = None if self.rank is None else re.compile(rf"\[[^]]*\brank {self.rank}\b[^]]*\]")
        for line in lines:
            if self.since_s is not None:
                shown.at_s = _stamp(line) or shown.at_s
                if (shown.at_s or written_s) < self.since_s:
                    continue
            if printed is None or printed.match(line):
                yield line


def _stamp(line: str) -> float | None:
    """Return the time with which a line begins, in seconds since the epoch."""
    first = line.split(" ", 1)[0]
    if "T" not in first:
        return None
    try:
        return datetime.fromisoformat(first).timestamp()
    except (ValueError, OverflowError):
        return None


@dataclasses.dataclass
class _Shown:
    """What of a log was printed."""

    end: int = 0
    """Up to where, in bytes."""
    tail: bytes = b""
    """The last bytes of it."""
    waits: bool = False
    """Whether a line after it has no end yet."""
    at_s: float | None = None
    """Time of the last line that has one, in seconds since the epoch."""


def _log_files(job: JobDir, *, rotated: bool) -> list[Path]:
    """Return the logs there are, each after its older part, ``NAME.1.log``, if asked for."""
    logs = sorted(job.cloud.rglob("*.log"), key=lambda x: (_log_of(x), not x.match(f"*{_OLDER}")))
    own = job.log.with_name(f"{job.log.stem}{_OLDER}"), job.log
    return [x for x in (*own, *logs) if x.exists() and (rotated or not x.match(f"*{_OLDER}"))]


def _log_of(path: Path) -> Path:
    """Return the log that a file is, or is the older part of."""
    return (
        path.with_name(f"{path.name.removesuffix(_OLDER)}.log")
        if path.match(f"*{_OLDER}")
        else path
    )


def _new_lines(
    path: Path, read: dict[Path, _Shown], wanted: _Wanted, *, is_last: bool
) -> Iterator[str]:
    """Yield the new lines of a log that are wanted; one without end too at last, or once
    nothing has ended it since the look before."""
    shown = read.setdefault(path, _Shown())
    try:
        with open(path, "rb") as log:
            log.seek(max(0, shown.end - len(shown.tail)))
            new = log.read()
            if new.startswith(shown.tail):
                new = new[len(shown.tail) :]
            else:  # it was rotated since, or is the end of a VM's log, sent again
                log.seek(0)
                whole = log.read()
                at = whole.rfind(shown.tail)
                new = whole if at < 0 else whole[at + len(shown.tail) :]
            end = log.tell()
        written_s = path.stat().st_mtime
    except FileNotFoundError:
        return  # its VM is gone since
    begun = new.rpartition(b"\n")[2]
    is_over = is_last or (begun and shown.waits)
    shown.waits = bool(begun) and not is_over
    if not is_over:
        new = new[: len(new) - len(begun)]
    if new:
        shown.end = end - len(begun) * (not is_over)
        shown.tail = (shown.tail + new)[-_TAIL_BYTES:]
    yield from wanted.lines(new.decode(errors="replace").splitlines(), shown, written_s)
