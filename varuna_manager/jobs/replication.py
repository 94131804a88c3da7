"""Copies a job's journal to its checkpoint store while its manager runs.

The copy runs in the background: no step waits for it. One segment is written at a time,
and what is journalled meanwhile goes into the next: the copy is always a prefix of the
journal. Now and then all segments become one. What was measured is copied beside it, less
often (``BlockCopy``). A store that is down is reported once and retried forever.

Each manager begins a new epoch. One that finds a later epoch than its own has been
replaced by a manager on another machine and stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    wait_random_exponential,
)

from spottrain.errors import SpottrainError
from spottrain.eventlog.journal import JournalError, Row
from spottrain.storage.store import DeniedError, MissingError, StorageError, is_url
from spottrain.units import counted
from spottrain.varuna_manager.core.allocation import epoch_of
from spottrain.varuna_manager.core.model.events import ReportReceived
from spottrain.varuna_manager.jobs.bucket import FencedError, StoredJob, folder_mark
from spottrain.varuna_manager.jobs.folder import JobDir, try_to_write_text
from spottrain.varuna_manager.jobs.follow import ReplicationStatus, last_seq, uid_of
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import STEPS, Block, Cursor, Measurements, Minibatch
from spottrain.varuna_manager.jobs.packed import PackedError
from spottrain.varuna_manager.jobs.segments import Segment, is_to_be_merged

logger = logging.getLogger(__name__)

PACE_S = 1.0
"""Time between segments, unless somebody waits for one: each put costs money."""
CHECK_S = 5.0
"""Time between checks for a later epoch."""
PERMIT_S = 10.0
"""How long to wait for the store's answer whether this manager is still the newest."""
DURABLE_S = 30.0
"""How long a launch of VMs waits until its intent is in the store."""
FINISH_S = 60.0
"""How long a manager that ends waits for the last segment."""
MAX_EVENTS = 5_000
"""In one segment."""
BLOCKS_PACE_S = 30.0
"""Time between two copies of measurements: each put costs money."""
_PART = 256
"""Measurements that are filled in at a time: a manager does nothing else meanwhile."""
_MAX_PAUSE_S = 30.0
_PATIENCE_S = 10.0


class ReplicationError(SpottrainError):
    """The local journal is older than its copy in the store."""


def stored_job(job: JobDir) -> StoredJob | None:
    """Return the job in its checkpoint store; None if that is a plain folder.

    Raises:
        StorageError: The store cannot be opened.
        JournalError: The journal cannot be read.
    """
    url = job.config().checkpoint.path
    if url is None or not is_url(url):
        return None
    return StoredJob(url, uid_of(job), _PATIENCE_S)


def begin_replication(job: JobDir, *, durable: bool = False) -> JournalReplication | None:
    """Begin an epoch for a manager that starts; None if the journal is not copied.

    Args:
        job: The job; the caller holds its lock.
        durable: Launches of VMs wait until their intents are in the store.

    Raises:
        FencedError: Another machine has taken the job over.
        StorageError: The store cannot be reached, so this is unknown.
        ReplicationError: The local journal is older than its copy in the store.
    """
    stored = stored_job(job)
    if stored is None:
        return None
    epoch = stored.claim(folder_mark(job))
    return JournalReplication(job, stored, epoch, stored.held(), durable=durable)


async def backfill(
    measurements: Measurements, copy: JournalReplication, pause_s: float = 0.0
) -> None:
    """Fetch the measurements that were left in the store when the job was taken over.

    Args:
        measurements: Open for writing.
        copy: Where they are.
        pause_s: Between two parts, for those who have other work in this thread.

    Raises:
        StorageError: The store cannot be read; what has come is kept.
        JournalError: The disk refuses.
    """
    for block in measurements.pending():
        rows = await copy.block(block)
        for at in range(0, len(rows), _PART):
            measurements.fill(rows[at : at + _PART])
            await asyncio.sleep(pause_s)
        measurements.fill((), arrived=block)


def check_here(job: JobDir) -> None:
    """Check that no other machine has taken a job over, as far as the store answers.

    Raises:
        FencedError: One has.
    """
    try:
        if (stored := stored_job(job)) is not None:
            stored.check_mine(folder_mark(job))
    except FencedError:
        raise
    except SpottrainError as error:
        logger.warning("cannot check whether another machine has the job: %s", error)


def end_replication(job: JobDir) -> None:
    """Complete the copy of a job that has been ended for good.

    Args:
        job: The job; the caller holds its lock.

    Raises:
        FencedError: Another machine has taken the job over.
        StorageError: The store cannot be written.
    """
    if (copy := begin_replication(job)) is not None:
        copy.end()


class JournalReplication:
    """Copies one job's journal, in one epoch.

    Args:
        job: The job; its journal is only read.
        stored: Where the copy goes.
        epoch: This manager's, from ``StoredJob.claim``.
        held: Segments that are already in the store.
        durable: See ``begin_replication``.

    Raises:
        ReplicationError: The store has events that the local journal lacks.
    """

    def __init__(
        self,
        job: JobDir,
        stored: StoredJob,
        epoch: int,
        held: list[Segment],
        *,
        durable: bool = False,
    ) -> None:
        self.durable = durable
        self._job = job
        self._stored = stored
        self._epoch = epoch
        self._held = held
        self._blocks = BlockCopy(stored, epoch)
        self._published = False
        self._failure = ""
        self._checked_at_s = -math.inf
        self._whole_at_s = time.time()
        self._one_at_a_time = threading.Lock()
        self._threads = ThreadPoolExecutor(3, "copy")
        self._news = asyncio.Event()
        self._urgent = asyncio.Event()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        if self.copied > (last := last_seq(self._job)):
            raise ReplicationError(
                f"{job.journal} has {counted(last, 'event')}, its copy in {stored.url} "
                f"{self.copied}; continue from the copy with 'spottrain resume "
                f"{stored.url}' on a machine without this job"
            )

    @property
    def copied(self) -> int:
        """Number of the newest event in the store."""
        return self._held[-1].last if self._held else 0

    # --- For the manager ------------------------------------------------------------------

    def wake(self) -> None:
        """Signal that the journal has grown."""
        self._news.set()

    async def run(self) -> None:
        """Copy until cancelled.

        Raises:
            FencedError: A later epoch has begun: this manager must stop.
        """
        try:
            while True:
                self._news.clear()
                if not await self._persist():
                    await _wait(self._urgent, PACE_S)
                    await _wait(self._news, CHECK_S)
        except FencedError as error:
            self._write_status(elsewhere=str(error))
            raise

    async def reach(self, seq: int, limit_s: float) -> bool:
        """Wait until event ``seq`` is in the store; return whether it is.

        Args:
            seq: A number that the journal has.
            limit_s: How long to wait at most.
        """
        if self.copied >= seq:
            return True
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((seq, done))
        self._urgent.set()
        self._news.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await done
        return self.copied >= seq

    async def permit(self, seq: int | None = None) -> None:
        """Wait until a command may be sent to the cloud: this manager is the newest.

        If the store does not answer, go ahead: VMs that are not returned cost money. If it
        refuses to, a launch must wait for a person.

        Args:
            seq: Number of the event that must be in the store before a launch, if the
                copy is durable; for launches alone.

        Raises:
            FencedError: A later epoch has begun.
            DeniedError: The store does not let a launch ask it.
        """
        if seq is not None and self.durable and not await self.reach(seq, DURABLE_S):
            logger.warning("launching although event %d is not in the store yet", seq)
        try:
            async with asyncio.timeout(PERMIT_S):
                await self._call(self._check)
        except (StorageError, TimeoutError) as error:
            if seq is not None and isinstance(error, DeniedError):
                raise
            logger.warning("cannot check whether this manager is the newest: %s", error)

    def check_intents(self, intents: Iterable[str]) -> None:
        """Check that no VM of the job is another manager's, as the cloud lists them.

        The intent in its tag says so, also where the store cannot be asked.

        Raises:
            FencedError: A manager has rented that took the job over after this one began.
        """
        if any(epoch_of(intent) > self._epoch for intent in intents):
            raise FencedError(
                "the job was taken over by another manager, which has rented VMs; to "
                f"continue it here run 'spottrain resume {self._stored.url}'"
            )

    async def finish(self, limit_s: float = FINISH_S) -> bool:
        """Copy what is left after ``run`` has ended; return whether all is copied.

        Raises:
            FencedError: A later epoch has begun.
        """
        self._blocks.hurry()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while await self._persist():
                    pass
        if left := last_seq(self._job) - self.copied:
            logger.warning("%d events are not in %s", left, self._stored.url)
        return not left

    def end(self) -> None:
        """Copy what is left and mark the job as ended for good.

        Raises:
            StorageError: The store cannot be written.
        """
        while self._advance():
            pass
        self._stored.mark_down()
        self.close()

    def close(self) -> None:
        """Cancel calls that have not begun and wait for the others."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def block(self, block: Block) -> list[Minibatch]:
        """Return a block of measurements; none if it is damaged.

        Raises:
            StorageError: The store cannot be read.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._stored.get_block, block)
        except (PackedError, MissingError) as error:
            logger.warning("%s", error)
            return []

    # --- Copying --------------------------------------------------------------------------

    async def _persist(self) -> bool:
        """Write the next segment, retrying until the store takes it; return whether
        there may be more."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type((StorageError, JournalError, OSError)),
            wait=wait_random_exponential(max=_MAX_PAUSE_S),
            before_sleep=self._record_failure,
        )
        more = bool(await retrying(self._call, self._advance))
        if self._failure:
            logger.info("the journal is copied to %s again", self._stored.url)
            self._failure = ""
        self._write_status()
        for seq, done in self._waiting:
            if seq <= self.copied and not done.done():
                done.set_result(None)
        self._waiting = [(s, done) for s, done in self._waiting if not done.done()]
        if not self._waiting:
            self._urgent.clear()
        return more

    async def _call(self, work: Callable[[], bool | None]) -> bool | None:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _record_failure(self, call: RetryCallState) -> None:
        error = call.outcome.exception() if call.outcome else None
        if not self._failure:
            logger.warning("the journal cannot be copied: %s", error)
        self._failure = str(error)
        self._write_status()

    def _write_status(self, elsewhere: str = "") -> None:
        """Save the copy's progress for the ``status`` command."""
        with contextlib.suppress(JournalError):
            if self.copied >= last_seq(self._job):
                self._whole_at_s = time.time()
        note = ReplicationStatus(self.copied, self._whole_at_s, self._failure, elsewhere)
        try_to_write_text(self._job.copy_status, json.dumps(asdict(note)))

    def _check(self) -> None:
        """Check for a later epoch."""
        began_at_s = time.monotonic()
        self._stored.check(self._epoch)
        self._checked_at_s = began_at_s

    def _advance(self) -> bool:
        """Write the next segment; return whether there may be more."""
        with self._one_at_a_time:
            if time.monotonic() - self._checked_at_s >= CHECK_S:
                self._check()
            if not self._published:
                self._stored.publish(self._job)
                self._published = True
            first = self.copied + 1
            with contextlib.closing(Journal(self._job.journal, read_only=True)) as journal:
                rows = journal.rows(first, first + MAX_EVENTS - 1)
                if any(map(_is_checkpoint, rows)):
                    self._blocks.hurry()  # whoever takes over goes on from there
                file = self._job.measurements
                with contextlib.closing(Measurements(file, read_only=True)) as measured:
                    self._blocks.advance(measured)
                if rows:
                    segment = Segment(first, rows[-1].seq, self._epoch)
                    self._stored.put(segment, rows)
                    self._held.append(segment)
                if is_to_be_merged(self._held):
                    self._merge(journal)
            return len(rows) == MAX_EVENTS

    def _merge(self, journal: Journal) -> None:
        """Write the whole journal as one segment in place of all."""
        whole = Segment(1, self.copied, self._epoch)
        self._stored.put(whole, journal.rows(1, whole.last))
        self._held = [whole]
        self._stored.drop_below(whole)


def _is_checkpoint(row: Row) -> bool:
    """Return whether an event says that a checkpoint was saved."""
    return row.kind == ReportReceived.__name__ and '"checkpoint_saved"' in row.body


class BlockCopy:
    """Copies the rows of one job's mini-batches: a block is written anew whenever one of its
    rows changes, the newest every ``BLOCKS_PACE_S``, others after a restore.

    Args:
        store: Where they go.
        epoch: This manager's.
    """

    def __init__(self, store: StoredJob, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._cursor: Cursor | None = None
        """None: what the store has is unknown."""
        self._due_s = 0.0

    def hurry(self) -> None:
        """Copy at once the next time."""
        self._due_s = 0.0

    def advance(self, measurements: Measurements) -> None:
        """Copy what has changed, unless that was done a moment ago."""
        if time.monotonic() < self._due_s:
            return
        since = self._cursor
        if since is None:
            held = max((block.first for block in self._store.blocks()), default=0)
            since = Cursor(position=2 * held - 1)  # and every rewrite again
        changed, cursor = measurements.changed(since)
        if changed is not None:
            first, last = (at // 2 // STEPS for at in (changed, cursor.position))
            for number in range(first, max(first, last) + 1):
                start = number * STEPS
                rows = measurements.between(start, start + STEPS - 1)
                self._store.put_block(Block(start, self._epoch), rows)
        self._cursor, self._due_s = cursor, time.monotonic() + BLOCKS_PACE_S


async def _wait(until: asyncio.Event, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await until.wait()
