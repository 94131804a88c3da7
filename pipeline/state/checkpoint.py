"""Writes sections to files and reads them back (design: section 7).

A section's file holds its parameters and optimizer state under plain names, so that any
pipeline depth and data-parallel width can load what any other wrote. The manifest,
which makes the files a checkpoint, is ``spottrain.manifest``.
"""

from __future__ import annotations

import dataclasses
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spottrain import machine
from spottrain.manifest import (
    FROZEN_FOLDER,
    CheckpointError,
    DamagedError,
    FileRecord,
    Manifest,
    hash_file,
    own_uids,
    verified,
)
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.devices.port import Device
from spottrain.storage.store import StorageError, Store, UnreachableError

STATE_SEPARATOR = "//"
"""Separator between a parameter's name and the key of its optimizer state."""
SPARE_SHARE = 0.05
"""Of a computer's memory, which copies leave to everything else."""
_POLL_S = 0.2
"""How often copies that wait for memory look whether there is some."""

Tensors = Mapping[str, torch.Tensor]
T = TypeVar("T")


def state_name(parameter: str, key: str) -> str:
    """Return the name under which a value of optimizer state is saved."""
    return f"{parameter}{STATE_SEPARATOR}{key}"


def save_section(store: Store, name: str, section: int, tensors: Tensors) -> FileRecord:
    """Write one section to a fresh file that survives power loss.

    Args:
        store: Where the job's checkpoints are.
        name: Of the checkpoint.
        section: Index of the section.
        tensors: By plain name; must not change until this returns.

    Returns:
        What the manifest says of the file.

    Raises:
        CheckpointError: The store refused, or the file exists.
    """
    file = f"section-{section}.safetensors"
    where = f"{name}/{file}"
    with _translating(f"{store.place}/{where}"), store.writing(where) as path:
        return _write(path, section, file, tensors)


def save_frozen(store: Store, section: int, tensors: Tensors) -> FileRecord:
    """Write the parameters of a section that are not trained, once for all checkpoints.

    The file's name tells its content: writing it twice does no harm.

    Returns:
        What manifests say of the file.

    Raises:
        CheckpointError: The store refused.
    """
    with (
        _translating(f"{store.place}/{FROZEN_FOLDER}"),
        tempfile.TemporaryDirectory(prefix="spottrain-") as scratch,
    ):
        path = Path(scratch, "frozen")
        record = _write(path, section, f"section-{section}.safetensors", tensors)
        file = f"section-{section}-{record.sha256[:16]}.safetensors"
        store.put(f"{FROZEN_FOLDER}/{file}", path)
        return dataclasses.replace(record, file=file)


@contextmanager
def _translating(where: str) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise CheckpointError(str(error)) from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {where}: {error}") from error


def _write(path: Path, section: int, file: str, tensors: Tensors) -> FileRecord:
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, path)
    return FileRecord(
        section=section,
        file=file,
        num_bytes=path.stat().st_size,
        sha256=hash_file(path),
    )


def load_section(store: Store, manifest: Manifest, section: int) -> dict[str, torch.Tensor]:
    """Return all tensors of one section, its files compared with their hashes first.

    The tensors are in the page cache, not in memory of this process, until they are
    written to (which does not reach the file): copy them to where they belong.

    Raises:
        CheckpointError: Names the file that is missing.
        DamagedError: Names the file that is not as it was written.
        UnreachableError: The store cannot be asked.
    """
    tensors: dict[str, torch.Tensor] = {}
    for folder, record in manifest.files_of(section):
        file = f"{folder}/{record.file}"
        where = f"{store.place}/{file}"
        with verified(store, folder, record) as path:
            try:
                found = _read(path)
            except SafetensorError as error:
                raise DamagedError(f"{where} is damaged: {error}", file) from error
            except OSError as error:
                raise UnreachableError(f"cannot read {where}: {error}") from error
        if twice := sorted(set(found) & set(tensors)):
            reason = f"{twice[0]} is in two files"
            raise DamagedError(f"{where} is damaged: {reason}", file)
        tensors |= found
    return tensors


def _read(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@dataclass(frozen=True, slots=True)
class SnapshotOutcome:
    """What has become of one rank's share of a checkpoint."""

    files: tuple[FileRecord, ...] = ()
    """Written files, empty when it failed."""
    error: str = ""
    """One line if it failed; then the checkpoint must not get a manifest."""


class Background:
    """A thread that does tasks one by one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-writer")
        self._tasks: list[Future[Any]] = []

    @property
    def unfinished(self) -> tuple[Future[Any], ...]:
        """The tasks that are under way, or wait for their turn."""
        self._tasks = [task for task in self._tasks if not task.done()]
        return tuple(self._tasks)

    def submit(self, task: Callable[..., T], *args: Any) -> Future[T]:
        """Have ``task`` called with ``args`` after those before it; returns at once."""
        future = self._thread.submit(task, *args)
        self._tasks = [*self.unfinished, future]
        return future


class SectionCopies:
    """Copies of sections as they are at one mini-batch, made in order by a thread.

    Each takes memory from then on until it is written. While the computer is short of memory
    one is written while the next one waits.

    Args:
        device: What the worker computes on.
        home: Where the sections are: there, or on the host.
        sections: Their tensors, which must not change before ``finish``.
        copier: Makes the copies.
        tracker: Counts them.
        abandoned: Once set, no further copy is made.
    """

    def __init__(
        self,
        device: Device,
        home: Device,
        sections: Mapping[int, Tensors],
        copier: Executor,
        tracker: TensorTracker,
        abandoned: threading.Event,
    ) -> None:
        self._device, self._home = device, home
        self._tracker, self._abandoned = tracker, abandoned
        self._unwritten: deque[tuple[int, Future[Tensors]]] = deque()
        mark = device.mark()
        for section, tensors in sorted(sections.items()):
            self._unwritten.append((section, copier.submit(self._copy, tensors, mark)))
        self._all: Future[None] = copier.submit(lambda: None)

    def _copy(self, tensors: Tensors, mark: Any) -> Tensors:
        """Return a copy of tensors as they are once the device has come to ``mark``."""
        self._device.reach(mark)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        while self._wait_helps() and num_bytes > _free_bytes():
            time.sleep(_POLL_S)
        if self._abandoned.is_set():
            return {}
        with self._device.using():
            copies = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in tensors.items()}
            self._tracker.adopt_all(copies)
            for name, tensor in tensors.items():
                self._home.rescue(tensor, copies[name])
        return copies

    def _wait_helps(self) -> bool:
        """Return whether a copy is being written."""
        with suppress(IndexError):  # the last one was written meanwhile
            return not self._abandoned.is_set() and self._unwritten[0][1].done()
        return False

    def __iter__(self) -> Iterator[tuple[int, Tensors]]:
        """Yield each section's copy, which is freed when the next one is asked for."""
        while self._unwritten:
            yield self._unwritten[0][0], self._unwritten[0][1].result()
            self._unwritten.popleft()

    def drop(self) -> None:
        """Free all copies, and make no more: nobody asks for them."""
        for _, copy in self._unwritten:
            copy.cancel()
        self._unwritten.clear()

    def finish(self) -> None:
        """Wait until all copies are made."""
        self._all.result()


def _free_bytes() -> int:
    return machine.available_bytes() - int(SPARE_SHARE * machine.memory_bytes())


def write_snapshot(
    store: Store,
    uid: str,
    name: str,
    sections: Iterable[tuple[int, Tensors]],
    abandoned: threading.Event,
) -> SnapshotOutcome:
    """Write sections into checkpoint ``name``.

    A failure, such as a full disk or no network, is an outcome and never an exception in
    training.

    Args:
        store: Where the job's checkpoints are.
        uid: Of the job, whose store it must be; empty: that is not looked at.
        name: From ``manifest.new_name``.
        sections: Each with its tensors.
        abandoned: Once set, no further file is written: the checkpoint will have no
            manifest.
    """
    files = []
    try:
        own_uids(store, uid)
        for section, tensors in sections:
            if abandoned.is_set():
                return SnapshotOutcome(error="it was abandoned")
            files.append(save_section(store, name, section, tensors))
            del tensors  # before the next ones are made
    except (CheckpointError, StorageError) as error:
        return SnapshotOutcome(error=str(error))
    return SnapshotOutcome(tuple(files))
