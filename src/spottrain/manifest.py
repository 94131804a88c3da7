"""Manifests: written last, they make a folder of files a checkpoint.

Standard library only; manager and workers share it. Names in a store (design: section 7)::

    step-<n>-g<generation>-<nonce>/section-<k>[.part-<j>].safetensors
    step-<n>-g<generation>-<nonce>/manifest.json
    frozen/section-<k>-<sha256>.safetensors

Parameters that are not trained never change: they are written once, in ``frozen``, and
each manifest names them. No manifest, no checkpoint; never a second write into a folder. Nothing in it depends on
the pipeline depth or data-parallel width that wrote it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spottrain.errors import SpottrainError, WireError
from spottrain.storage.store import ExistsError, StorageError, Store, UnreachableError
from spottrain.wire.codec import SCHEMA_VERSION, decode, encode

MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"step-(\d{1,18})-g(\d{1,18})-[0-9a-f]{8}")
FROZEN_FOLDER = "frozen"
_FILE = re.compile(r"section-\d+(\.part-\d+|-[0-9a-f]{16})?\.safetensors")


class CheckpointError(SpottrainError):
    """A checkpoint is damaged, or cannot be read or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor of a file: a parameter, or one value of its optimizer state."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch spells it, such as float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint, as it was written."""

    section: int
    file: str
    num_bytes: int
    sha256: str
    tensors: tuple[TensorRecord, ...]

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.file):
            raise WireError(f"file must be section-<k>.safetensors: got {self.file!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete checkpoint: the state after ``step`` mini-batches.

    The data position and every random number follow from seed, step and the sizes.
    """

    name: str
    step: int
    """Mini-batches applied."""
    num_sections: int
    model_fingerprint: str
    """As in ``ModelFacts``: parameters, shapes, optimizer and sections."""
    config_fingerprint: str
    """Of the job's settings that its weights depend on."""
    seed: int
    minibatch_size: int
    microbatch_size: int
    files: tuple[FileRecord, ...]
    """In the order of sections, then parts."""
    best_step: int = 0
    """Step of the best weights up to here, by evaluation; 0: unknown."""
    frozen: tuple[FileRecord, ...] = ()
    """Files in ``FROZEN_FOLDER`` with parameters that are not trained. None at all:
    there are no such parameters, or ``files`` hold them, as they did once."""
    base: str = ""
    """What transformers calls the weights that the model began with; empty: unknown."""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        entry = parse_name(self.name)
        if entry is None or entry.step != self.step:
            raise WireError(
                f"checkpoint must be named step-{self.step}-g…: got {self.name!r}"
            )
        found = {f.section for f in self.files}
        # Compared first: a damaged number may ask for more than there is memory.
        few = self.num_sections == len(found) > 0
        if not few or found != set(range(self.num_sections)):
            raise WireError(
                f"checkpoint {self.name} must hold sections 0 to "
                f"{self.num_sections - 1}: got {sorted(found)}"
            )

    def files_of(self, section: int) -> Iterator[tuple[str, FileRecord]]:
        """Yield folder and record of the files that make up ``section``."""
        for folder, files in ((self.name, self.files), (FROZEN_FOLDER, self.frozen)):
            yield from ((folder, file) for file in files if file.section == section)


class CheckpointEntry(NamedTuple):
    """A checkpoint in a listing."""

    name: str
    step: int


def new_name(step: int, generation: int) -> str:
    """Return a folder name that was never used before."""
    return f"step-{step}-g{generation}-{secrets.token_hex(4)}"


def parse_name(name: str) -> CheckpointEntry | None:
    """Return name and step of a checkpoint's folder, or None if it is not one."""
    match = _NAME.fullmatch(name)
    return CheckpointEntry(name, int(match[1])) if match else None


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Make a checkpoint complete atomically, once all its files are in the store.

    Raises:
        CheckpointError: The store refused, or the checkpoint was complete already.
    """
    name = f"{manifest.name}/{MANIFEST_FILE}"
    data = encode(manifest).encode()
    try:
        try:
            store.put_new(name, data)
        except ExistsError:
            # It is ours if the answer was lost and the request was repeated.
            if store.get(name) != data:
                raise
    except ExistsError as error:
        raise CheckpointError(
            f"checkpoint {store.place}/{manifest.name} is complete: use a new name"
        ) from error
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def read_manifest(store: Store, name: str) -> Manifest:
    """Return the manifest of checkpoint ``name``.

    Raises:
        CheckpointError: There is none, or it is not what its schema says.
        UnreachableError: The store cannot be asked.
    """
    path = f"{name}/{MANIFEST_FILE}"
    try:
        manifest = decode(Manifest, store.get(path))
    except UnreachableError:
        raise
    except StorageError as error:
        raise CheckpointError(str(error)) from error
    except WireError as error:
        raise CheckpointError(f"{store.place}/{path} is damaged: {error}") from error
    assert isinstance(manifest, Manifest)
    if manifest.name != name:
        raise CheckpointError(
            f"{store.place}/{path} is of another checkpoint: got {manifest.name}"
        )
    return manifest


def list_checkpoints(store: Store) -> list[CheckpointEntry]:
    """Return the complete checkpoints, newest first; files are not read.

    Raises:
        StorageError: The store cannot be asked.
    """
    return [entry for entry in _folders(store) if _is_complete(store, entry.name)]


@contextlib.contextmanager
def verified(store: Store, name: str, record: FileRecord) -> Iterator[Path]:
    """Give a local file of the folder ``name``, its size and hash compared.

    Raises:
        CheckpointError: The file is missing, or not as it was written.
        UnreachableError: The store cannot be asked.
    """
    where = f"{name}/{record.file}"
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(store.reading(where))
            _compare(path, record, f"{store.place}/{where}")
        except UnreachableError:
            raise
        except StorageError as error:
            raise CheckpointError(str(error)) from error
        yield path


def _compare(path: Path, record: FileRecord, where: str) -> None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != record.num_bytes:
            raise CheckpointError(
                f"{where} is damaged: must be {record.num_bytes} bytes, got {num_bytes}"
            )
        found = hash_file(path)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"cannot read {where}: {reason}") from error
    if found != record.sha256:
        raise CheckpointError(
            f"{where} is damaged: sha256 must be {record.sha256}, got {found}"
        )


def retain(
    store: Store, keep: int, protect: Collection[str] = (), best_step: int | None = None
) -> tuple[str, ...]:
    """Delete checkpoints that are no longer needed and return their names.

    That is: complete checkpoints beyond the newest ``keep``, but for the best, and
    folders without a manifest that are of an earlier step than the newest complete one.

    Args:
        store: Where the job's checkpoints are.
        keep: Complete checkpoints to keep, at least 1.
        protect: Names never to delete: in use, or being written.
        best_step: Step of the best one; 0: none is; ``None``: as the newest one says.

    Raises:
        StorageError: The store cannot be asked, or does not let it be deleted.
    """
    complete = list_checkpoints(store)
    if not complete:
        return ()
    newest, kept = complete[0], {entry.name for entry in complete[: max(keep, 1)]}
    if best_step is None:
        best_step = read_manifest(store, newest.name).best_step
    kept |= {entry.name for entry in complete if best_step and entry.step == best_step}
    is_complete = {entry.name for entry in complete}
    doomed = tuple(
        entry.name
        for entry in _folders(store)
        if entry.name not in kept
        and entry.name not in protect
        and (entry.name in is_complete or entry.step < newest.step)
    )
    for name in doomed:
        discard(store, name)
    return doomed


def discard(store: Store, name: str) -> None:
    """Delete a checkpoint, or what there is of one.

    Raises:
        StorageError: The store cannot be asked, or does not let it be deleted.
    """
    # In this order, so that half of a checkpoint is never taken for a whole one.
    store.delete([f"{name}/{MANIFEST_FILE}"])
    store.delete_folder(name)


def discard_cut_short(store: Store, generation: int) -> tuple[str, ...]:
    """Delete checkpoints that earlier generations have left unfinished; return their names.

    Nobody will finish them: that takes all ranks of their generation, which is over.
    What has a manifest stays, even a damaged one: it may be all there is.

    Args:
        store: Where the job's checkpoints are.
        generation: The present one.

    Raises:
        StorageError: The store cannot be asked, or does not let them be deleted.
    """
    doomed = tuple(
        entry.name
        for entry in _folders(store)
        if _generation(entry.name) < generation and not _has_manifest(store, entry.name)
    )
    for name in doomed:
        discard(store, name)
    return doomed


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex, read in pieces."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _folders(store: Store) -> list[CheckpointEntry]:
    """Return every folder named like a checkpoint, newest first."""
    found = (parse_name(name) for name in store.folders())
    return sorted(
        (entry for entry in found if entry),
        key=lambda entry: (entry.step, _generation(entry.name), entry.name),
        reverse=True,
    )


def _generation(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match[2]) if match else -1


def _has_manifest(store: Store, name: str) -> bool:
    manifest = f"{name}/{MANIFEST_FILE}"
    return any(entry.name == manifest for entry in store.list(name))


def _is_complete(store: Store, name: str) -> bool:
    try:
        read_manifest(store, name)
    except CheckpointError:
        return False
    return True
