"""A job in its checkpoint store: all that another machine needs to resume it.

    job/<uid>/config.json, facts.json, workdir.tar.gz
    job/newest.json                          written after them: the job's name and uid
    job/<uid>/journal/<first>-<last>-<epoch>.json.gz
    job/<uid>/measurements/<first step>-<epoch>.json.gz
    job/<uid>/manager/<epoch>.json           a claim of each manager that was started
    job/<uid>/down.json                      the job has been ended for good

They contain no keys, tokens or secret values. ``uid`` is unique: another job of that
name with the same checkpoint path gets a folder of its own.
"""

from __future__ import annotations

import json
import platform
import re
import tarfile
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import spottrain
from spottrain.codec import SCHEMA_VERSION, encode, from_data
from spottrain.errors import ConfigError, SpottrainError, WireError
from spottrain.eventlog.journal import JournalError, Row
from spottrain.manifest import hash_file
from spottrain.storage.open import open_store
from spottrain.storage.store import PATIENCE_S, ExistsError, MissingError, Store
from spottrain.varuna_manager.config.base import JOB_NAME
from spottrain.varuna_manager.core.model.events import ReportReceived
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Block, Measurements, Minibatch, block_of
from spottrain.varuna_manager.jobs.packed import PackedError, pack, unpack
from spottrain.varuna_manager.jobs.samples import samples_of
from spottrain.varuna_manager.jobs.segments import (
    Segment,
    chain,
    covered,
    ends,
    restore,
    segment_of,
    unpacked,
)

_FILES = ("config.json", "facts.json", "workdir.tar.gz")
_NEWEST = "job/newest.json"
_FOLDER = "/job"
"""Folder of a job in its store; a URL may end with it or not."""
_DAMAGED = (SpottrainError, ValueError, OSError, EOFError, tarfile.TarError, zlib.error)
"""Errors that reading a damaged file raises."""
_REPORT = ReportReceived.__name__
"""Kind of the events that may measure something."""
_READS = 3
"""Attempts to read a journal whose segments a manager merges meanwhile."""


class FencedError(SpottrainError):
    """Another manager has taken the job over: this one must stop."""


class StoredJobError(SpottrainError):
    """A job's files in its store are damaged or of another version."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A manager's claim on a job, from some moment on."""

    folder: str
    """The claiming job folder's id: a manager restarted on the same folder is no rival."""
    host: str
    at_s: float
    software_version: str
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Newest:
    """The job that a store belongs to; both fields become parts of paths."""

    name: str
    uid: str
    code: str
    """Hash of the packed workdir in the store."""
    schema_version: int = SCHEMA_VERSION


class Found(NamedTuple):
    """A job in a store."""

    place: str
    """The job's ``checkpoint.path``."""
    newest: Newest


def folder_mark(job: JobDir) -> str:
    """Return the id that tells a job's folder from copies on other machines."""
    path = job.path / "folder.id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    return path.read_text()


class StoredJob:
    """One job in a store.

    Every method may raise ``StorageError``: the store cannot be reached or refuses.

    Args:
        url: The job's ``checkpoint.path``.
        uid: The job's unique id, from its settings.
        patience_s: How long a store that does not answer is retried.
    """

    def __init__(self, url: str, uid: str, patience_s: float = PATIENCE_S) -> None:
        self._store = open_store(url, patience_s=patience_s)
        self._root = f"job/{uid}"
        self.uid, self.url = uid, url

    # --- What the job is ------------------------------------------------------------------

    def publish(self, job: JobDir) -> None:
        """Copy the files that no manager changes into the store, if it lacks them."""
        found, code = _read_newest(self._store), hash_file(job.workdir)
        if found is None or (found.uid, found.code) != (self.uid, code):
            for name in _FILES:
                self._store.put(f"{self._root}/{name}", job.path / name)
            newest = Newest(job.config().name, self.uid, code)
            self._store.put(_NEWEST, encode(newest).encode())

    def fetch(self, folder: Path) -> None:
        """Copy the files that no manager changes into a folder.

        Raises:
            StoredJobError: One is damaged or of another version.
        """
        for name in _FILES:
            self._store.fetch(f"{self._root}/{name}", folder / name)
        job = JobDir(folder)
        reads: tuple[Callable[[], object], ...]
        reads = (job.config, job.facts, lambda: _check_packed(job.workdir))
        for name, read in zip(_FILES, reads, strict=True):
            try:
                read()
            except _DAMAGED as error:
                why = str(error).removeprefix(f"{job.name}: ")
                raise StoredJobError(
                    f"{self.url}: {name} is damaged or of another version: {why}"
                ) from error

    def mark_down(self) -> None:
        """Note that the job has been ended for good."""
        self._store.put(f"{self._root}/down.json", json.dumps({"at_s": time.time()}).encode())

    def is_down(self) -> bool:
        """Return whether the job has been ended for good."""
        try:
            self._store.get(f"{self._root}/down.json")
        except MissingError:
            return False
        return True

    # --- Claims ---------------------------------------------------------------------------

    def newest_claim(self) -> tuple[int, Claim | None]:
        """Return the newest epoch and its claim; 0 and None if there is none."""
        prefix = f"{self._root}/manager"
        epochs = [
            int(number)
            for entry in self._store.list(prefix)
            if (number := Path(entry.name).stem).isdecimal()
        ]
        epoch = max(epochs, default=0)
        return epoch, self._claim_of(epoch)

    def claim(self, folder: str, *, take_over: bool = False) -> int:
        """Begin a new epoch, which fences all earlier ones; return its number.

        Args:
            folder: From ``folder_mark``.
            take_over: Fence a manager of another folder, too.

        Raises:
            FencedError: The newest epoch is another folder's.
        """
        epoch, newest = self.newest_claim()
        if newest is not None and newest.folder != folder and not take_over:
            raise self._fenced(newest)
        claim = Claim(folder, platform.node(), time.time(), spottrain.__version__)
        epoch, name = epoch + 1, self._claim_name(epoch + 1)
        try:
            self._store.put_new(name, encode(claim).encode())
        except ExistsError as error:
            # A put whose answer was lost finds its own claim; otherwise somebody was faster.
            if (other := self._claim_of(epoch)) != claim and other is not None:
                raise self._fenced(other) from error
        return epoch

    def check_mine(self, folder: str) -> None:
        """Check that the newest epoch, if there is one, is this folder's.

        Raises:
            FencedError: It is not.
        """
        _, newest = self.newest_claim()
        if newest is not None and newest.folder != folder:
            raise self._fenced(newest)

    def check(self, epoch: int) -> None:
        """Check that no later epoch than ``epoch`` has begun.

        Raises:
            FencedError: One has.
        """
        if (later := self._claim_of(epoch + 1)) is not None:
            raise self._fenced(later)

    # --- Its journal ----------------------------------------------------------------------

    def segments(self) -> list[Segment]:
        """Return all segments of the journal, including obsolete ones."""
        entries = self._store.list(f"{self._root}/journal")
        found = (segment_of(entry.name.rpartition("/")[2]) for entry in entries)
        return [segment for segment in found if segment is not None]

    def held(self) -> list[Segment]:
        """Return the segments that make up the journal, in order."""
        found = self.segments()
        return [segment for segment, _ in chain(found, ends(found))]

    def put(self, segment: Segment, rows: list[Row]) -> None:
        """Write one segment of the journal."""
        self._store.put(self._segment_name(segment), pack(rows))

    def drop_below(self, whole: Segment) -> None:
        """Delete the segments in whose place another one was written."""
        done = covered(whole, self.segments())
        self._store.delete([self._segment_name(one) for one in done])

    def journal(self, say: Callable[[str], None], at: int = 1) -> Iterator[list[Row]]:
        """Yield the events of the journal, in order, up to the first gap.

        Args:
            say: Called with a line about what is damaged or missing.
            at: Number of the first event to return.
        """
        for _ in range(_READS):
            try:
                for rows in restore(self.segments(), self._unpack, say, at):
                    yield rows
                    at = rows[-1].seq + 1
            except MissingError:
                continue  # merged meanwhile, by a manager that is not fenced yet
            return
        raise StoredJobError(
            f"{self.url}: the journal is changing while it is read; stop the manager that "
            "writes it, then try again"
        )

    def fetch_journal(
        self, journal: Journal, measured: Measurements, say: Callable[[str], None]
    ) -> None:
        """Copy the events that a journal lacks, with what they measure.

        Args:
            journal: Open for writing.
            measured: What belongs to it.
            say: Called with a line about what is damaged or missing.

        Raises:
            JournalError: They are of another version, or the disk refuses.
        """
        known = journal.last_seq()
        for rows in self.journal(say, known + 1):
            journal.add_rows(rows)
        reports = (row for row in journal.rows_after(known) if row.kind == _REPORT)
        measured.write(one for row in reports for one in samples_of(journal.event_of(row)))

    def blocks(self) -> list[Block]:
        """Return all blocks of measurements."""
        entries = self._store.list(f"{self._root}/measurements")
        found = (block_of(entry.name.rpartition("/")[2]) for entry in entries)
        return [block for block in found if block is not None]

    def put_block(self, block: Block, rows: Sequence[Minibatch]) -> None:
        """Write a block of measurements, or write it anew."""
        name = f"{self._root}/measurements/{block.name}"
        self._store.put(name, pack(rows))

    def get_block(self, block: Block) -> list[Minibatch]:
        """Return the rows of a block of measurements.

        Raises:
            PackedError: It is damaged, or of another version.
        """
        data = self._store.get(f"{self._root}/measurements/{block.name}")
        return unpack(Minibatch, f"measurements/{block.name}", data)

    def _unpack(self, segment: Segment) -> list[Row]:
        rows = unpacked(segment, self._store.get(self._segment_name(segment)))
        try:
            for row in rows:
                Journal.decoded(row)
        except JournalError as error:
            raise PackedError(f"{segment.name}: {error}") from error
        return rows

    def _segment_name(self, segment: Segment) -> str:
        return f"{self._root}/journal/{segment.name}"

    def _claim_name(self, epoch: int) -> str:
        return f"{self._root}/manager/{epoch:06d}.json"

    def _claim_of(self, epoch: int) -> Claim | None:
        try:
            data = self._store.get(self._claim_name(epoch))
        except MissingError:
            return None
        claim: Claim = _read(Claim, self._claim_name(epoch), data)
        return claim

    def _fenced(self, claim: Claim) -> FencedError:
        return FencedError(
            f"the job was taken over by {claim.host} from {self.url}; "
            f"to continue it here run 'spottrain resume {self.url}'"
        )


def find_stored(url: str) -> Found:
    """Return the job at a URL.

    Args:
        url: The job's ``checkpoint.path``; ``/job`` may follow.

    Raises:
        ConfigError: There is none.
        StorageError: The store cannot be read.
        StoredJobError: The file that names it is damaged.
    """
    place, mark, options = url.partition("?")
    above = place.rstrip("/").removesuffix(_FOLDER) + mark + options
    for where in dict.fromkeys((url, above)):
        if (found := _read_newest(open_store(where))) is not None:
            return Found(where, found)
    raise ConfigError(
        f"{url}: no job found; give the checkpoint.path of a job (its journal is copied "
        "there if that is a URL)"
    )


def _read_newest(store: Store) -> Newest | None:
    try:
        data = store.get(_NEWEST)
    except MissingError:
        return None
    found: Newest = _read(Newest, _NEWEST, data)
    if not (re.fullmatch(JOB_NAME, found.name) and re.fullmatch("[0-9a-f-]+", found.uid)):
        raise StoredJobError(f"{_NEWEST} is damaged: it has no name and uid of a job")
    return found


def _read(kind: type[Claim | Newest], name: str, data: bytes) -> Any:
    """Return the contents of a JSON file, which may have more fields than are known here.

    Raises:
        StoredJobError: It is damaged or of another version.
    """
    try:
        document = json.loads(data)
        names = [one.name for one in fields(kind)]
        return from_data(kind, {name: document[name] for name in names if name in document})
    except (ValueError, TypeError, RecursionError, WireError) as error:
        raise StoredJobError(f"{name} is damaged or of another version: {error}") from error


def _check_packed(path: Path) -> None:
    """Read an archive to its end, where its checksum is."""
    with tarfile.open(path, "r:gz") as tar:
        tar.getmembers()
        assert tar.fileobj is not None, "it was opened for reading"
        while tar.fileobj.read(1 << 20):
            pass
