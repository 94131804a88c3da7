"""Writes the checkpoint of step 0, from which every job starts as it resumes.

Where the user's code makes the weights, all participants of a round write them together,
each a share of the sections, one section after the other: no process holds more. The bits do
not depend on who writes what (``skeleton.first_values``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store as RendezvousStore

from spottrain.codec import decode, encode
from spottrain.manifest import (
    CheckpointError,
    FileRecord,
    Manifest,
    discard,
    new_name,
    own_uids,
    write_manifest,
)
from spottrain.pipeline.comm.groups import TIMEOUT_S, connect_rendezvous, release_rendezvous
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.skeleton import first_values
from spottrain.pipeline.state.checkpoint import save_frozen, save_section
from spottrain.pipeline.state.context import FrozenFiles
from spottrain.pipeline.state.saving import make_manifest
from spottrain.storage.open import open_store
from spottrain.storage.store import StorageError, Store
from spottrain.wire.messages import Initialise

_PART_BYTES = 64 << 20
"""Sections are made together up to here: the model's code runs anew for each part."""
_NAME, _FILES = "name", "files"
"""Keys in the round's store."""
_EVER = timedelta(days=365)
"""The manager ends a round that gets nowhere."""


@dataclass(frozen=True, slots=True)
class FirstFiles:
    """Files of some sections. Parameters that are not trained are written once, for all
    checkpoints to come."""

    trained: tuple[FileRecord, ...] = ()
    frozen: tuple[FileRecord, ...] = ()

    def __add__(self, other: FirstFiles) -> FirstFiles:
        return FirstFiles(self.trained + other.trained, self.frozen + other.frozen)


class FirstCheckpoint:
    """A checkpoint of step 0 that is being written.

    Args:
        store: Where the job's checkpoints are.
        loaded: The job.
        name: Of the checkpoint; empty: a new one.

    Raises:
        StorageError: The store cannot be asked, or is another job's.
    """

    def __init__(self, store: Store, loaded: LoadedJob, name: str = "") -> None:
        own_uids(store, loaded.spec.uid)
        self._store, self._loaded = store, loaded
        self.name = name or new_name(0, 0)

    def write(self, section: int, values: Mapping[str, torch.Tensor]) -> FirstFiles:
        """Write a section, whose parameters are among ``values``.

        Raises:
            CheckpointError: The store refused; what there is of the checkpoint is deleted.
        """
        layout = self._loaded.layout
        names = layout.parameters[section]
        trained = {n: values[n] for n in names if n not in layout.frozen}
        frozen = {n: values[n] for n in names if n in layout.frozen}
        with self._discarding():
            record = save_section(self._store, self.name, section, trained)
            kept = (save_frozen(self._store, section, frozen),) if frozen else ()
        return FirstFiles((record,), kept)

    def complete(self, files: FirstFiles) -> Manifest:
        """Write the manifest: all sections are written.

        Raises:
            CheckpointError: As ``write`` does.
        """
        loaded = self._loaded
        frozen = FrozenFiles(files.frozen, loaded.layout.base if files.frozen else "")
        manifest = make_manifest(loaded, self.name, 0, files.trained, frozen)
        with self._discarding():
            write_manifest(self._store, manifest)
        return manifest

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            with contextlib.suppress(StorageError):  # the reason above is told
                discard(self._store, self.name)
            raise


def write_first_weights(
    loaded: LoadedJob,
    command: Initialise,
    rank: int,
    share: range,
    written: Callable[[int], None],
) -> Manifest | None:
    """Take part in a round of writing first weights.

    Args:
        loaded: The job.
        command: The participants, and where they meet.
        rank: Which of the participants this process is.
        share: The sections that it writes.
        written: Called with each of them once it is written.

    Returns:
        The manifest, at rank 0.

    Raises:
        UserCodeError: The model cannot be built.
        CheckpointError, StorageError: The checkpoint cannot be written.
    """
    size = len(command.participants) or 1
    meeting: RendezvousStore = dist.HashStore()  # type: ignore[attr-defined]
    if command.store_host:
        where = command.store_host, command.store_port
        meeting = connect_rendezvous(*where, TIMEOUT_S)
    store = open_store(loaded.spec.checkpoint_path)
    if rank == 0:
        checkpoint = FirstCheckpoint(store, loaded)
        meeting.set(_NAME, checkpoint.name)
    else:
        meeting.wait([_NAME], _EVER)
        checkpoint = FirstCheckpoint(store, loaded, meeting.get(_NAME).decode())
    files = FirstFiles()
    for section, values in values_of_sections(loaded, share):
        files += checkpoint.write(section, values)
        written(section)
    meeting.set(f"{_FILES}-{rank}", encode(files))
    manifest = None
    if rank == 0:
        keys = [f"{_FILES}-{one}" for one in range(size)]
        meeting.wait(keys, _EVER)
        everything = (decode(FirstFiles, meeting.get(key)) for key in keys)
        manifest = checkpoint.complete(sum(everything, FirstFiles()))
    release_rendezvous(meeting, size)
    return manifest


def values_of_sections(
    loaded: LoadedJob, sections: Iterable[int]
) -> Iterator[tuple[int, Mapping[str, torch.Tensor]]]:
    """Yield sections with the first values of their parameters, until the next is asked for.

    Raises:
        UserCodeError: The model cannot be built.
    """
    layout = loaded.layout
    parts = _parts(layout, sections)
    names = [{name for k in part for name in layout.parameters[k]} for part in parts]
    made = first_values(loaded.job, loaded.spec.seed, names)
    for part in parts:
        values = next(made)
        for name in layout.running & values.keys():
            values[name] = values[name].to(layout.specs[name].dtype)
        for section in part:
            yield section, values


def _parts(layout: ModelLayout, sections: Iterable[int]) -> list[list[int]]:
    """Return runs of sections that are small together, or one that is not."""
    parts: list[list[int]] = []
    room = 0
    for section in sections:
        num_bytes = layout.param_bytes(section)
        if num_bytes > room:
            parts.append([])
            room = _PART_BYTES
        parts[-1].append(section)
        room -= num_bytes
    return parts
