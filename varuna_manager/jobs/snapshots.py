"""Snapshots in the copy of a journal: a takeover begins with one, not with the first event.

A snapshot is a file that is written once. One of epoch e counts if no later epoch began at
an event that is in it: what a manager writes after it was replaced has no effect. The
segments have all that a snapshot has; a damaged one, or one of another version of
spottrain, is passed over.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from spottrain.errors import SpottrainError
from spottrain.varuna_manager.jobs.journal import JournalRow, StoredSnapshot
from spottrain.varuna_manager.jobs.segments import Segment

SCHEMA_VERSION = 1
KEPT = 2
"""Snapshots that stay in the store: a takeover may be reading the one before the newest."""
_NAME = re.compile(r"(\d{12})-(\d{6})\.json\.gz")


class SnapshotError(SpottrainError):
    """A snapshot is damaged, or another version wrote it."""


class CopiedSnapshot(NamedTuple):
    """A snapshot after event ``seq``, by the manager of ``epoch``."""

    seq: int
    epoch: int

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{self.seq:012d}-{self.epoch:06d}.json.gz"


class Beginning(NamedTuple):
    """What a journal begins with that has no earlier events."""

    first: JournalRow
    """The job's first event."""
    snapshot: StoredSnapshot


def snapshot_of(name: str) -> CopiedSnapshot | None:
    """Return the snapshot that a file name denotes; None for other files."""
    match = _NAME.fullmatch(name)
    return None if match is None else CopiedSnapshot(*map(int, match.groups()))


def pack(beginning: Beginning) -> bytes:
    """Return the contents of a snapshot's file: JSON, compressed, with a checksum."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **beginning._asdict()})
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def unpack(copied: CopiedSnapshot, data: bytes) -> Beginning:
    """Return what is in a file.

    Raises:
        SnapshotError: It is damaged, or of another version.
    """
    try:
        what = json.loads(gzip.decompress(data))
        version = what["schema_version"]
        if version == SCHEMA_VERSION:
            first, snapshot = (
                JournalRow(*what["first"]),
                StoredSnapshot(*what["snapshot"]),
            )
            if (first.seq, snapshot.seq) != (1, copied.seq):
                raise ValueError("its contents do not match its name")
            return Beginning(first, snapshot)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError) as error:
        raise SnapshotError(f"snapshot {copied.name} is damaged: {error}") from error
    raise SnapshotError(
        f"snapshot {copied.name} has version {version}, this spottrain reads "
        f"{SCHEMA_VERSION}"
    )


def that_count(
    snapshots: Iterable[CopiedSnapshot], segments: Iterable[Segment]
) -> list[CopiedSnapshot]:
    """Return the snapshots that count, the newest first.

    Args:
        snapshots: All of a job.
        segments: All of its journal.
    """
    begins = [(one.epoch, one.first) for one in segments]
    counting = [
        one
        for one in snapshots
        if all(first > one.seq for epoch, first in begins if epoch > one.epoch)
    ]
    return sorted(counting, reverse=True)
