"""The logs of a job's manager, agents and workers, read while they grow."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from spottrain.errors import ConfigError
from spottrain.printable import printable
from spottrain.suggest import did_you_mean
from spottrain.varuna_manager.jobs.folder import JobDir

_TAIL_BYTES = 256
"""Of what was read of a log, by which it is found again."""
_OLDER = ".1.log"
"""How the older part of a rotated log ends."""


class LogReader:
    """Reads the logs of a job, and then what was added to them.

    Args:
        vm: Only of VMs whose id begins so; None: of all, and of the manager.
        rank: Only what the user's code printed in this rank.
        since_s: Only newer lines, seconds since the epoch.

    Raises:
        ConfigError: There are no logs of such a VM.
    """

    def __init__(
        self,
        job: JobDir,
        *,
        vm: str | None = None,
        rank: int | None = None,
        since_s: float | None = None,
    ) -> None:
        self._job = job
        self._wanted = _Wanted(_chosen(job, vm), rank, since_s)
        self._read: dict[Path, _Shown] = {}

    @property
    def is_new(self) -> bool:
        """True if nothing was read yet."""
        return not self._read

    def new_lines(self, *, is_last: bool) -> Iterator[Iterator[tuple[Path, str]]]:
        """Yield for each log its new lines, each with its file: that of the log, or of the
        log's older part. Lines are safe to show.

        Args:
            is_last: Nothing is added any more: also what has no end yet is a line.
        """
        found = _log_files(self._job, rotated=self.is_new)
        files = [path for path in found if self._wanted.includes(path)]
        for _, parts in itertools.groupby(files, key=_log_of):
            yield (
                (path, printable(line))
                for path in parts
                for line in _new_lines(path, self._read, self._wanted, is_last=is_last)
            )


def vms_with_logs(job: JobDir) -> list[str]:
    """Return the ids of VMs of which there are logs."""
    return sorted({path.parent.name for path in job.cloud.rglob("*.log")})


def _chosen(job: JobDir, wanted: str | None) -> set[str] | None:
    """Return the VMs that have logs and whose id begins as the user says; None: all is wanted.

    Raises:
        ConfigError: There is none.
    """
    if wanted is None:
        return None
    known = vms_with_logs(job)
    if found := {vm for vm in known if vm.startswith(wanted)}:
        return found
    hint = did_you_mean(wanted, known) or f"it has those of {', '.join(known) or 'none'}"
    raise ConfigError(f"--vm: job {job.name} has no logs of VM {wanted}; {hint}")


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
