"""Writes sections to files and reads them back (design: section 7).

A section's file holds its parameters and optimizer state under plain names, so that any
pipeline depth and data-parallel width can load what any other wrote. The manifest,
which makes the files a checkpoint, is ``spottrain.manifest``.
"""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from spottrain.manifest import (
    FROZEN_FOLDER,
    CheckpointError,
    DamagedError,
    FileRecord,
    Manifest,
    TensorRecord,
    hash_file,
    own_uids,
    verified,
)
from spottrain.storage.store import StorageError, Store, UnreachableError

STATE_SEPARATOR = "//"
"""Separator between a parameter's name and the key of its optimizer state."""

Tensors = Mapping[str, torch.Tensor]
T = TypeVar("T")


def state_name(parameter: str, key: str) -> str:
    """Return the name under which a value of optimizer state is saved."""
    return f"{parameter}{STATE_SEPARATOR}{key}"


def section_file(section: int, part: int | None = None) -> str:
    """Return the file name of a section, or of the share of it one replica writes."""
    suffix = "" if part is None else f".part-{part}"
    return f"section-{section}{suffix}.safetensors"


def save_section(
    store: Store, name: str, section: int, tensors: Tensors, part: int | None = None
) -> FileRecord:
    """Write one section, or a share of it, to a fresh file that survives power loss.

    Args:
        store: Where the job's checkpoints are.
        name: Of the checkpoint.
        section: Index of the section.
        tensors: By plain name; must not change until this returns.
        part: Which share, when several replicas write one section.

    Returns:
        What the manifest says of the file.

    Raises:
        CheckpointError: The store refused, or the file exists.
    """
    file = section_file(section, part)
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
        record = _write(path, section, section_file(section), tensors)
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
        tensors=_records(tensors),
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
        if _records(found) != record.tensors:
            reason = "tensors are not the manifest's"
            raise DamagedError(f"{where} is damaged: {reason}", file)
        if twice := sorted(set(found) & set(tensors)):
            reason = f"{twice[0]} is in two files"
            raise DamagedError(f"{where} is damaged: {reason}", file)
        tensors |= found
    return tensors


def _read(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _records(tensors: Tensors) -> tuple[TensorRecord, ...]:
    return tuple(
        TensorRecord(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
        )
        for name, tensor in sorted(tensors.items())
    )


@dataclass(frozen=True, slots=True)
class SnapshotOutcome:
    """Outcome of one snapshot."""

    name: str
    """The checkpoint it is part of."""
    files: tuple[FileRecord, ...]
    """Written files, empty when it failed."""
    error: str | None
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


class SnapshotWriter:
    """Writes snapshots to the store in a background thread, in the order given.

    A failure, such as a full disk or no network, is an outcome and never an exception
    in training. Used as a context manager, or ended by ``close``.

    Args:
        store: Where the job's checkpoints are.
        uid: Of the job, whose store it must be; empty: that is not looked at.
        thread: Does the work, of earlier writers too; by default one of its own.
    """

    def __init__(self, store: Store, uid: str = "", thread: Background | None = None) -> None:
        self._store, self._uid = store, uid
        self._thread = thread or Background()
        self._pending: deque[Future[SnapshotOutcome]] = deque()
        self._is_abandoned = threading.Event()
        self._earlier = self._thread.unfinished

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_free(self) -> bool:
        """Whether the thread does no task of an earlier writer any more."""
        return all(task.done() for task in self._earlier)

    def run(self, task: Callable[[], T]) -> Future[T]:
        """Run something in the thread."""
        return self._thread.submit(task)

    def submit(
        self,
        name: str,
        sections: Mapping[int, Tensors],
        part: int | None = None,
        wait: Callable[[], None] = lambda: None,
    ) -> Future[SnapshotOutcome]:
        """Have ``sections`` written into checkpoint ``name``; returns at once.

        Args:
            name: From ``manifest.new_name``.
            sections: Tensors of each section, owned by the writer from now on.
            part: Which share of the sections, when several replicas write them.
            wait: Called in the thread, returns once the tensors are there.
        """
        future = self._thread.submit(self._write, name, sections, part, wait)
        self._pending.append(future)
        return future

    def poll(self) -> SnapshotOutcome | None:
        """Return the outcome of the oldest snapshot if there is one already."""
        if self._pending and self._pending[0].done():
            return self._pending.popleft().result()
        return None

    def wait(self) -> SnapshotOutcome | None:
        """Return the outcome of the oldest snapshot, or None if none is pending."""
        return self._pending.popleft().result() if self._pending else None

    def abandon(self) -> None:
        """Drop what was submitted, without waiting for a file that is on its way: it is
        of a checkpoint that will have no manifest."""
        self._is_abandoned.set()
        for future in self._pending:
            future.cancel()
        self._pending.clear()

    def close(self) -> None:
        """Write what was submitted; safe to call twice."""
        futures.wait(self._pending)

    def _write(
        self,
        name: str,
        sections: Mapping[int, Tensors],
        part: int | None,
        wait: Callable[[], None],
    ) -> SnapshotOutcome:
        wait()
        files = []
        try:
            own_uids(self._store, self._uid)
            for section, tensors in sorted(sections.items()):
                if self._is_abandoned.is_set():
                    return SnapshotOutcome(name, (), "it was abandoned")
                files.append(save_section(self._store, name, section, tensors, part))
        except (CheckpointError, StorageError) as error:
            return SnapshotOutcome(name, (), str(error))
        return SnapshotOutcome(name, tuple(files), None)
