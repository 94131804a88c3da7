"""Checkpoints while training goes on: shares of ranks, and completion.

At a due mini-batch every rank begins to copy its share of its sections, and to write what is
copied, both beside training. The gather that ends each later mini-batch shows the progress of
all ranks; once all shares are settled, rank 0 writes the manifest. So no manager is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.distributed.distributed_c10d import Store

from spottrain.codec import decode, encode, from_data
from spottrain.manifest import (
    CheckpointError,
    FileRecord,
    Manifest,
    config_fingerprint,
    discard,
    discard_cut_short,
    new_name,
    own_uids,
    read_manifest,
    retain,
    write_manifest,
)
from spottrain.morphing.adapt.checkpointing import CheckpointInterval
from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.base.heap import trim_heap
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.comm.collectives import gather_json
from spottrain.pipeline.comm.groups import world
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.checkpoint import (
    SectionCopies,
    SnapshotOutcome,
    Tensors,
    write_snapshot,
)
from spottrain.pipeline.state.context import (
    FrozenFiles,
    StopRequest,
    WorkerContext,
)
from spottrain.pipeline.state.handover import (
    MisfitError,
    UnreadableCheckpointError,
    saved_tensors,
)
from spottrain.pipeline.state.numbers import EvaluationRecord
from spottrain.storage.store import StorageError
from spottrain.wire import messages
from spottrain.wire.messages import RunGeneration
from spottrain.wire.numerics import Numerics

NOT_SETTLED = -1
GRACE_S = 600.0
"""How long finished work is kept in the VMs' memory, and its checkpoint tried again,
before it is given up; a job whose budget ends earlier is told to stop."""
RETRY_S = 5.0
"""Pause before the next try."""
LEAVE_S = 1.0
"""How long ranks that hand over wait for a checkpoint that is being written."""
TIDY_S = 5.0
"""How long the end of a job waits for old checkpoints to be deleted."""
_POLL_S = 0.2
"""How often ranks that wait for a checkpoint look whether they are asked to stop."""


class CheckpointRound:
    """The checkpoints of one generation, one at a time, as one rank sees them.

    Every method but ``settled_step`` is called by all ranks at the same point.

    Args:
        context: The worker's.
        command: The generation's.
        arenas: The rank's sections.
        rank: Of this worker.
        store: Store in which rank 0 puts a number that makes names unique.
        tracker: Counts the copies that are being written.
    """

    def __init__(
        self,
        context: WorkerContext,
        command: RunGeneration,
        arenas: Mapping[int, SectionArena],
        rank: int,
        store: Store,
        tracker: TensorTracker,
    ) -> None:
        self._context = context
        self._command = command
        self._arenas = arenas
        self._tracker = tracker
        self._share = [section for section in arenas if command.plan.writer_of(section) == rank]
        self._uploads = context.uploads
        self._earlier = self._uploads.unfinished
        """What a generation before has left under way."""
        self._written: Future[SnapshotOutcome] | None = None
        """This rank's share of the pending checkpoint, if there is one."""
        self._abandoned = threading.Event()
        self._copier = ThreadPoolExecutor(1, "snapshot-copier")
        self._copies: SectionCopies | None = None
        """The newest ones, under way or done."""
        self._left_out = context.loaded.layout.frozen
        """Parameters whose files every manifest names: they are written once."""
        if self._left_out:
            self._agree_on_frozen(store)
        records = (arena.numbers.evaluation for arena in arenas.values())
        newest = max(records, key=lambda record: record.step, default=EvaluationRecord())
        self.best_step = newest.best_step
        """Step of the best weights by evaluation, whose checkpoint is kept; 0: none."""
        self._tries = 0
        """Checkpoints begun: no name is used twice, as half of one may be left there."""
        self._pending: int | None = None
        self._saved = self._begun = self._step_of(command.checkpoint)
        self._completing: Future[bool] | None = None
        """The newest manifest at rank 0, under way or done."""
        self._unconfirmed: int | None = None
        """The step whose manifest that is: not all ranks know yet whether it is put."""
        self.interval = CheckpointInterval(
            command.checkpoint_losses_per_s,
            command.plan.predicted_step_s,
            command.checkpoint_cost_s,
        )
        """Where the job file leaves it open."""
        if world().rank == 0:
            store.set("nonce", new_name(0, 0).rpartition("-")[2])
        self._nonce = int(store.get("nonce"), 16)
        self._tidying: Future[None] | None = None
        """Deletions at rank 0, under way or done."""
        if world().rank == 0:
            self._tidying = context.tidying.submit(self._discard_cut_short)

    def _discard_cut_short(self) -> None:
        try:
            own_uids(self._context.checkpoints, self._context.loaded.spec.uid)
            discard_cut_short(self._context.checkpoints, self._command.generation)
        except StorageError as error:
            sys.stderr.write(f"{error}; it is tried again later\n")

    def _agree_on_frozen(self, store: Store) -> None:
        """Learn of the files of frozen parameters, as the checkpoint before names them.

        Its manifest is read by rank 0 of the job's first generation here; later ones ask
        a rank that knows, as the store may take its time. Whatever happens to that, no
        rank waits for it.

        Raises:
            UnreadableCheckpointError: The manifest cannot be read.
            MisfitError: The model now begins with other frozen weights.
        """
        knows = self._context.frozen
        with self._context.activity.waiting():
            rows = gather_json(bool(knows))
        teacher = rows.index(True) if any(rows) else 0
        if world().rank == teacher:
            text = ""
            try:
                knows[:] = knows or [self._read_before(self._context.loaded.layout.base)]
                text = encode(knows[0])
            finally:
                store.set("frozen", text)
        elif not knows and (text := store.get("frozen").decode()):
            knows[:] = [decode(FrozenFiles, text)]

    def _read_before(self, base: str) -> FrozenFiles:
        name = self._command.checkpoint
        try:
            manifest = read_manifest(self._context.checkpoints, name)
        except (CheckpointError, StorageError) as error:
            raise UnreadableCheckpointError.of(name, error) from error
        names = manifest.base, base
        other = names[0] != names[1] and not any(map(os.path.isabs, names))
        if other:
            raise MisfitError(
                f"the frozen parameters of {name} are those of {names[0] or 'a model'}, "
                f"but model() now begins with {names[1] or 'others'}; go back, or launch "
                "a new job"
            )
        return FrozenFiles(files=manifest.frozen, base=manifest.base)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is to begin after ``step`` mini-batches."""
        every = self._context.loaded.spec.checkpoint_every_steps
        if every:
            return step % every == 0
        return step - max(0, self._begun) >= self.interval.every_steps

    @property
    def is_pending(self) -> bool:
        """True while a checkpoint is being written."""
        return self._pending is not None

    def can_start(self, step: int) -> bool:
        """Return whether none is being written, and none was begun at ``step``."""
        return not self.is_pending and step != self._begun

    def start(self, step: int) -> None:
        """Begin to copy this rank's share, and have it written.

        There is none while the upload of a generation before goes on.
        """
        began_s = time.monotonic()
        if not all(task.done() for task in self._earlier):
            self._pending = self._begun = step
            self._tries += 1
            reason = "a checkpoint of an earlier generation is still being uploaded"
            self._written = Future()
            self._written.set_result(SnapshotOutcome(error=reason))
            return
        devices = (arena.device for arena in self._arenas.values())
        home = next(devices, None) or HostDevice()
        beside = self._copier, self._tracker, self._abandoned
        copies = SectionCopies(self._context.device, home, self._tensors(), *beside)
        self._copies = copies
        self._submit(step, copies).add_done_callback(lambda _: copies.drop())
        self.interval.begin(time.monotonic() - began_s)

    def finish_copying(self) -> None:
        """Wait until sections may change again."""
        if self._copies is not None:
            with self._context.activity.during("save"):
                self._copies.finish()
            self._copies = None

    def settled_step(self) -> int:
        """Return the step of the pending checkpoint if this rank's share is settled."""
        if self._pending is None or self._written is None or not self._written.done():
            return NOT_SETTLED
        return self._pending

    def settle(self, common_step: int) -> None:
        """Complete the pending checkpoint if all ranks have settled their shares.

        Args:
            common_step: The minimum ``settled_step`` of all ranks, as gathered.
        """
        if self._pending is not None and common_step == self._pending:
            self._complete(self._pending)

    def finish(self, stop_request: Callable[[], int] = lambda: 0) -> bool:
        """Wait for the pending checkpoint, if there is one, and complete it.

        Args:
            stop_request: Returns what this rank is asked to do, if anything.

        Returns:
            False if some rank was asked to stop before: the checkpoint is dropped.
        """
        if (step := self._pending) is not None:
            if not self._wait(self._written, stop_request):
                self.abandon()
                return False
            self._complete(step)
        if self._unconfirmed is not None:
            if not self._wait(self._completing, stop_request):
                return False
            step, self._unconfirmed = self._unconfirmed, None
            done = self._completing is not None and self._completing.result()
            with self._context.activity.waiting():
                if gather_json(done)[0]:
                    self._saved = step
        return True

    def _wait(self, work: Future[Any] | None, stop_request: Callable[[], int]) -> bool:
        """Wait until all ranks have done their work; return False if one is to stop."""
        while True:
            if work is not None:
                with self._context.activity.during("save"):
                    futures.wait([work], timeout=_POLL_S)
            with self._context.activity.waiting():
                done = work is None or work.done()
                rows = gather_json([done, stop_request()])
            if all(done for done, _ in rows):
                return True
            if any(stop != StopRequest.NONE for _, stop in rows):
                return False

    def leave(self) -> None:
        """End with all ranks that hand over: a checkpoint that is not written soon is
        dropped, as a store may take longer than the VMs have."""
        if self._pending is None:
            return
        if self._written is not None:
            futures.wait([self._written], timeout=LEAVE_S)
        settled = self.settled_step() == self._pending
        with self._context.activity.waiting():
            all_settled = all(gather_json(settled))
        if all_settled:
            self._complete(self._pending)
        else:
            self.abandon()

    def save_now(self, step: int, stop_request: Callable[[], int] = lambda: 0) -> bool:
        """Have a complete checkpoint of ``step`` before returning; as ``finish``."""
        if not self.finish(stop_request):
            return False
        if self._saved != step:
            self._context.faults.at(Hook.SNAPSHOT)
            # Nothing is trained until it is written: no copy is needed.
            self._submit(step, sorted(self._tensors().items()))
            if not self.finish(stop_request):
                return False
        if self._tidying is not None:
            futures.wait([self._tidying], timeout=TIDY_S)
        return True

    def save_last(self, step: int, stop_request: Callable[[], int]) -> bool:
        """Have a complete checkpoint of ``step``, tried again for up to ``GRACE_S``.

        Args:
            step: The job's last.
            stop_request: Returns what this rank is asked to do, if anything.

        Returns:
            False if some rank was asked to stop before: the next generation tries on.
        """
        give_up_at_s = time.monotonic() + GRACE_S
        while True:
            if not self.save_now(step, stop_request):
                return False
            if self._saved == step:
                return True
            rows = gather_json([time.monotonic() > give_up_at_s, stop_request()])
            if any(stop != StopRequest.NONE for _, stop in rows):
                return False
            if rows[0][0]:
                return True
            time.sleep(RETRY_S)

    def _tensors(self) -> dict[int, Tensors]:
        """Return what this rank writes; numbers, which change at any time, are copies."""
        arenas = {section: self._arenas[section] for section in self._share}
        return {
            section: {
                name: tensor
                for name, tensor in {
                    **saved_tensors(arena),
                    **{name: one.clone() for name, one in arena.numbers.tensors().items()},
                }.items()
                if name not in self._left_out
            }
            for section, arena in arenas.items()
        }

    def _submit(self, step: int, share: Iterable[tuple[int, Tensors]]) -> Future[SnapshotOutcome]:
        self._pending = self._begun = step
        self._tries += 1
        store, uid = self._context.checkpoints, self._context.loaded.spec.uid
        name, abandoned = self._name(step), self._abandoned
        self._written = self._uploads.submit(write_snapshot, store, uid, name, share, abandoned)
        return self._written

    def abandon(self) -> None:
        """Drop the pending checkpoint: nobody waits for it, nor for a file of it that is on
        its way."""
        self._abandoned.set()
        self._abandoned = threading.Event()
        if self._written is not None:
            self._written.cancel()
        self._pending = self._written = self._copies = None

    def _name(self, step: int) -> str:
        nonce = (self._nonce + self._tries) % (1 << 32)
        return f"step-{step}-g{self._command.generation}-{nonce:08x}"

    @staticmethod
    def _step_of(checkpoint: str) -> int:
        return int(checkpoint.split("-")[1]) if checkpoint else NOT_SETTLED

    def _complete(self, step: int) -> None:
        assert self._written is not None
        outcome = self._written.result()
        self._pending = self._written = None
        trim_heap()
        self._context.faults.at(Hook.CHECKPOINT_WRITTEN)
        with self._context.activity.waiting():
            rows = gather_json(
                {
                    "error": outcome.error,
                    "files": [dataclasses.asdict(file) for file in outcome.files],
                }
            )
        self._unconfirmed = step
        if world().rank == 0:
            errors = [row["error"] for row in rows if row["error"]]
            files = [from_data(FileRecord, x) for row in rows for x in row["files"]]
            name, best = self._name(step), self.best_step
            # The store may take its time: nobody waits for it here.
            finish = functools.partial(self._finish, name, step, files, errors, best)
            self._completing = self._uploads.submit(finish)

    def _finish(
        self,
        name: str,
        step: int,
        files: list[FileRecord],
        errors: Sequence[str],
        best_step: int,
    ) -> bool:
        """Make a checkpoint complete, or tell why it is not; return whether it is."""
        if self._tidying is not None:
            futures.wait([self._tidying], timeout=TIDY_S)
        if not errors:
            errors = self._put_manifest(name, step, files, best_step)
        for error in errors[:1]:
            failed = messages.CheckpointFailed(step=step, reason=error)
            self._context.supervisor.report(failed)
        best = None if errors else best_step
        tidy = functools.partial(self._tidy, name, step, errors, best)
        self._tidying = self._context.tidying.submit(tidy)
        return not errors

    def _put_manifest(
        self, name: str, step: int, files: list[FileRecord], best_step: int
    ) -> list[str]:
        """Make a checkpoint complete; return why it is not."""
        manifest = make_manifest(
            self._context.loaded,
            name,
            step,
            files,
            self._context.frozen[0] if self._left_out else FrozenFiles(),
            numerics=self._command.numerics,
            best_step=best_step,
            code=self._command.code,
        )
        try:
            write_manifest(self._context.checkpoints, manifest)
        except CheckpointError as error:
            return [str(error)]
        # Reported first: it exists, even if an old one cannot be deleted.
        self._context.supervisor.report(messages.CheckpointSaved(name=name, step=step))
        return []

    def _tidy(self, name: str, step: int, errors: Sequence[str], best_step: int | None) -> None:
        """Delete what is left of a checkpoint that failed, and older ones.

        All ranks have settled: none writes into it any more.
        """
        checkpoints, report = self._context.checkpoints, self._context.supervisor.report
        try:
            spec = self._context.loaded.spec
            mine, protect = own_uids(checkpoints, spec.uid), () if errors else {name}
            if errors:
                discard(checkpoints, name)
            retain(checkpoints, spec.checkpoint_keep, protect, best_step, mine)
        except (CheckpointError, StorageError) as error:
            if not errors:
                report(messages.CheckpointFailed(step=step, reason=str(error)))


def make_manifest(
    loaded: LoadedJob,
    name: str,
    step: int,
    files: Iterable[FileRecord],
    frozen: FrozenFiles,
    *,
    numerics: Numerics | None = None,
    best_step: int = 0,
    code: str = "",
) -> Manifest:
    """Return the manifest of a checkpoint whose files are all written."""
    spec = loaded.spec
    ordered = tuple(sorted(files, key=lambda file: file.section))
    return Manifest(
        name=name,
        step=step,
        num_sections=1 + ordered[-1].section,
        model_fingerprint=loaded.fingerprint,
        config_fingerprint=config_fingerprint(spec),
        seed=spec.seed,
        minibatch_size=spec.minibatch_size,
        files=ordered,
        best_step=best_step,
        frozen=frozen.files,
        base=frozen.base,
        uid=spec.uid,
        datasets=loaded.datasets,
        code=code,
        numerics=numerics,
    )
