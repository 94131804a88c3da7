"""Checkpoints while training goes on: shares of ranks, and completion.

At a due mini-batch every rank copies its share of its sections and lets a thread write
it. The gather that ends each later mini-batch shows the progress of all ranks; once all
shares are settled, rank 0 writes the manifest. So no manager is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import torch
from torch.distributed.distributed_c10d import Store

from spottrain.errors import UserCodeError
from spottrain.manifest import (
    CheckpointError,
    FileRecord,
    Manifest,
    discard,
    discard_cut_short,
    new_name,
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
from spottrain.pipeline.devices.port import Transfer
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.checkpoint import (
    SnapshotOutcome,
    SnapshotWriter,
    save_frozen,
    save_section,
)
from spottrain.pipeline.state.context import StopRequest, WorkerContext
from spottrain.pipeline.state.handover import (
    DamagedCheckpointError,
    all_tensors,
    saved_tensors,
)
from spottrain.storage.store import StorageError
from spottrain.storage.store import Store as CheckpointStore
from spottrain.wire import messages
from spottrain.wire.codec import from_data
from spottrain.wire.messages import JobSpec, RunGeneration

NOT_SETTLED = -1
GRACE_S = 600.0
"""How long finished work is kept in the VMs' memory, and its checkpoint tried again,
before it is given up; a job whose budget ends earlier is told to stop."""
RETRY_S = 5.0
"""Pause before the next try."""


class CheckpointRound:
    """The checkpoints of one generation, one at a time, as one rank sees them.

    Every method but ``settled_step`` is called by all ranks at the same point.

    Args:
        context: The worker's.
        command: The generation's.
        arenas: The rank's sections.
        replica: Replicas take turns in writing the sections of a stage.
        store: Store in which rank 0 puts a number that makes names unique.
        tracker: Counts the copies that are being written.
    """

    def __init__(
        self,
        context: WorkerContext,
        command: RunGeneration,
        arenas: Mapping[int, SectionArena],
        replica: int,
        store: Store,
        tracker: TensorTracker,
    ) -> None:
        self._context = context
        self._command = command
        self._arenas = arenas
        self._tracker = tracker
        width = command.plan.data_parallel_width
        self._share = [section for section in arenas if section % width == replica]
        self._writer = SnapshotWriter(context.checkpoints)
        self._copying: list[Transfer] = []
        """Copies under way from the device."""
        self._before: Manifest | None = None
        self._left_out = self._agree_on_frozen(store)
        """Parameters that every checkpoint names, but does not hold."""
        self._rooms = self._writer.run(self._make_rooms)
        """Room for copies, kept: to get it takes longer than to copy."""
        records = (arena.numbers.evaluation for arena in arenas.values())
        self.best_step = max(records, key=lambda record: record.step).best_step
        """Step of the best weights by evaluation, whose checkpoint is kept; 0: none."""
        self._tries = 0
        """Checkpoints begun: no name is used twice, as half of one may be left there."""
        self._pending: int | None = None
        self._outcome: SnapshotOutcome | None = None
        self._saved = self._begun = self._step_of(command.checkpoint)
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
            self._tidying = self._writer.run(self._discard_cut_short)

    def _discard_cut_short(self) -> None:
        try:
            discard_cut_short(self._context.checkpoints, self._command.generation)
        except StorageError as error:
            sys.stderr.write(f"{error}; it is tried again later\n")

    def _agree_on_frozen(self, store: Store) -> frozenset[str]:
        """Return the parameters to leave out, as the checkpoint before has left them.

        Only rank 0 reads its manifest; whatever happens to that, no rank waits for it.

        Raises:
            DamagedCheckpointError: The manifest cannot be read.
            UserCodeError: The model now begins with other frozen weights.
            StorageError: The store cannot be asked.
        """
        layout = self._context.loaded.layout
        if not layout.frozen:
            return frozenset()
        if world().rank == 0:
            try:
                self._before = self._read_before(layout.base)
            finally:
                store.set("frozen", "kept" if self._before else "saved")
        return layout.frozen if store.get("frozen") == b"kept" else frozenset()

    def _read_before(self, base: str) -> Manifest | None:
        """Return the manifest of the checkpoint before if it leaves parameters out."""
        name = self._command.checkpoint
        try:
            manifest = read_manifest(self._context.checkpoints, name)
        except CheckpointError as error:
            raise DamagedCheckpointError(name, str(error)) from error
        if not manifest.frozen:
            return None
        names = manifest.base, base
        if names[0] != names[1] and not any(map(os.path.isabs, names)):
            raise UserCodeError(
                f"the frozen parameters of {name} are those of {names[0] or 'a model'}, "
                f"but model() now begins with {names[1] or 'others'}; go back, or launch "
                "a new job"
            )
        return manifest

    def _make_rooms(self) -> dict[tuple[int, str], torch.Tensor]:
        """Return page-locked room for what is on a device, touched pages for the rest.

        None on CPU slots, which have no memory to spare.
        """
        rooms = {}
        for section in () if self._context.device.is_host else self._share:
            arena = self._arenas[section]
            for name, tensor in all_tensors(arena).items():
                if name in self._left_out:
                    continue
                rooms[section, name] = (
                    torch.zeros_like(tensor)
                    if arena.device is None
                    else arena.device.allocate_host(tensor.shape, tensor.dtype)
                )
        return rooms

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
        """Return whether none is being written, and ``step`` is not saved yet."""
        return not self.is_pending and step != self._saved

    def start(self, step: int) -> None:
        """Begin to copy this rank's share, and have it written.

        What is on a GPU comes down beside computations, into room that was locked once.
        """
        began_s = time.monotonic()
        copies = {
            section: {
                name: self._copy(section, name, tensor)
                for name, tensor in tensors.items()
            }
            for section, tensors in self._tensors().items()
        }
        self._tracker.adopt_all(copies)
        self._submit(step, copies)
        self.interval.begin(time.monotonic() - began_s)

    def _copy(self, section: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        room = self._rooms.result().get((section, name))
        if room is None:
            return tensor.clone()
        if self._arenas[section].device is None:
            return room.copy_(tensor)
        transfer = self._context.device.download(tensor, room)
        self._copying.append(transfer)
        return room

    def finish_copying(self) -> None:
        """Wait until sections may change again."""
        for transfer in self._copying:
            self._context.device.finish(transfer)
        self._copying.clear()

    def settled_step(self) -> int:
        """Return the step of the pending checkpoint if this rank's share is settled."""
        if self._pending is None:
            return NOT_SETTLED
        if self._outcome is None:
            self._outcome = self._writer.poll()
        return NOT_SETTLED if self._outcome is None else self._pending

    def settle(self, common_step: int) -> None:
        """Complete the pending checkpoint if all ranks have settled their shares.

        Args:
            common_step: The minimum ``settled_step`` of all ranks, as gathered.
        """
        if self._pending is not None and common_step == self._pending:
            self._complete(self._pending)

    def finish(self) -> None:
        """Wait for the pending checkpoint, if there is one, and complete it.

        What is no longer needed is deleted then.
        """
        if self._pending is not None:
            if self._outcome is None:
                with self._context.activity.during("save"):
                    self._outcome = self._writer.wait()
            self._complete(self._pending)
        self._finish_tidying()

    def save_now(self, step: int) -> None:
        """Have a complete checkpoint of ``step`` before returning."""
        self.finish()
        if self._saved != step:
            self._context.faults.at(Hook.SNAPSHOT)
            # Nothing is trained until it is written: no copy is needed.
            self._submit(step, self._tensors())
            self.finish()

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
            self.save_now(step)
            if self._saved == step:
                return True
            rows = gather_json([time.monotonic() > give_up_at_s, stop_request()])
            if any(stop != StopRequest.NONE for _, stop in rows):
                return False
            if rows[0][0]:
                return True
            time.sleep(RETRY_S)

    def _tensors(self) -> dict[int, dict[str, torch.Tensor]]:
        arenas = {section: self._arenas[section] for section in self._share}
        return {
            section: {
                name: tensor
                for name, tensor in {
                    **saved_tensors(arena),
                    **arena.numbers.tensors(),
                }.items()
                if name not in self._left_out
            }
            for section, arena in arenas.items()
        }

    def _submit(self, step: int, share: dict[int, dict[str, torch.Tensor]]) -> None:
        self._pending = self._begun = step
        self._tries += 1
        device, copying = self._context.device, tuple(self._copying)

        def wait() -> None:
            for transfer in copying:
                device.finish(transfer)

        self._writer.submit(self._name(step), share, wait=wait)

    def close(self) -> None:
        """End the writing thread, once what it was given is written."""
        self._writer.close()

    def _name(self, step: int) -> str:
        nonce = (self._nonce + self._tries) % (1 << 32)
        return f"step-{step}-g{self._command.generation}-{nonce:08x}"

    @staticmethod
    def _step_of(checkpoint: str) -> int:
        return int(checkpoint.split("-")[1]) if checkpoint else NOT_SETTLED

    def _complete(self, step: int) -> None:
        outcome = self._outcome
        assert outcome is not None
        self._pending = self._outcome = None
        trim_heap()
        self._context.faults.at(Hook.CHECKPOINT_WRITTEN)
        with self._context.activity.waiting():
            rows = gather_json(
                {
                    "error": outcome.error,
                    "files": [dataclasses.asdict(file) for file in outcome.files],
                }
            )
        errors = [row["error"] for row in rows if row["error"] is not None]
        if world().rank == 0:
            if not errors:
                files = [from_data(FileRecord, x) for row in rows for x in row["files"]]
                with self._context.activity.during("save"):
                    errors += self._put_manifest(step, files)
            self._finish_tidying()
            name, best = self._name(step), None if errors else self.best_step
            self._tidying = self._writer.run(
                functools.partial(self._tidy, name, step, errors, best)
            )
        with self._context.activity.waiting():
            complete = gather_json(not errors)[0]
        if complete:
            self._saved = step

    def _put_manifest(self, step: int, files: list[FileRecord]) -> list[str]:
        """Make a checkpoint complete; return why it is not."""
        size = self._command.plan.microbatch_size
        spec = dataclasses.replace(self._context.loaded.spec, microbatch_size=size)
        checkpoints, name = self._context.checkpoints, self._name(step)
        fingerprint = self._context.loaded.fingerprint
        manifest = make_manifest(spec, fingerprint, name, step, files, self.best_step)
        if (before := self._before) is not None:
            manifest = dataclasses.replace(
                manifest, frozen=before.frozen, base=before.base
            )
        try:
            write_manifest(checkpoints, manifest)
        except CheckpointError as error:
            return [str(error)]
        # Reported first: it exists, even if an old one cannot be deleted.
        self._context.supervisor.report(messages.CheckpointSaved(name=name, step=step))
        return []

    def _tidy(
        self, name: str, step: int, errors: Sequence[str], best_step: int | None
    ) -> None:
        """Delete what is left of a checkpoint that failed, and older ones.

        All ranks have settled: none writes into it any more. A bucket that does not
        answer is waited for, so this runs in the writing thread.
        """
        checkpoints, report = self._context.checkpoints, self._context.supervisor.report
        for error in errors[:1]:
            report(messages.CheckpointFailed(step=step, reason=error))
        try:
            if errors:
                discard(checkpoints, name)
            keep = self._context.loaded.spec.checkpoint_keep
            retain(checkpoints, keep, () if errors else {name}, best_step)
        except (CheckpointError, StorageError) as error:
            if not errors:
                report(messages.CheckpointFailed(step=step, reason=str(error)))

    def _finish_tidying(self) -> None:
        if self._tidying is not None:
            self._tidying.result()


def write_first(
    store: CheckpointStore, loaded: LoadedJob, values: Mapping[str, torch.Tensor]
) -> Manifest:
    """Write the checkpoint of step 0, which a job starts from as it resumes.

    Parameters that are not trained are written once, for all checkpoints to come.

    Args:
        store: Where the job's checkpoints are.
        loaded: The job.
        values: Of all parameters.

    Raises:
        CheckpointError: The store refused.
    """
    name, layout = new_name(0, 0), loaded.layout
    files, frozen = [], []
    try:
        for section, names in enumerate(layout.parameters):
            trained = {n: values[n] for n in names if n not in layout.frozen}
            files.append(save_section(store, name, section, trained))
            if left_out := {n: values[n] for n in names if n in layout.frozen}:
                frozen.append(save_frozen(store, section, left_out))
        manifest = dataclasses.replace(
            make_manifest(loaded.spec, loaded.fingerprint, name, 0, files),
            frozen=tuple(frozen),
            base=layout.base if frozen else "",
        )
        write_manifest(store, manifest)
    except CheckpointError:
        with contextlib.suppress(StorageError):  # the reason above is told
            discard(store, name)
        raise
    return manifest


def make_manifest(
    spec: JobSpec,
    model_fingerprint: str,
    name: str,
    step: int,
    files: list[FileRecord],
    best_step: int = 0,
) -> Manifest:
    """Return the manifest of a checkpoint whose files are all written."""
    ordered = sorted(files, key=lambda file: (file.section, file.file))
    return Manifest(
        name=name,
        step=step,
        num_sections=1 + max(file.section for file in files),
        model_fingerprint=model_fingerprint,
        config_fingerprint=config_fingerprint(spec),
        seed=spec.seed,
        minibatch_size=spec.minibatch_size,
        microbatch_size=spec.microbatch_size,
        files=tuple(ordered),
        best_step=best_step,
    )


def config_fingerprint(spec: JobSpec) -> str:
    """Return a hash of the settings that a job's weights depend on."""
    parts = (
        spec.entrypoint,
        spec.seed,
        spec.minibatch_size,
        spec.microbatch_size,
        spec.reduction,
        *(() if spec.precision == "fp32" else (spec.precision,)),  # as it was before
        *((spec.init_from,) if spec.init_from else ()),  # likewise
        *(() if spec.semantics == "synchronous" else (spec.semantics,)),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
