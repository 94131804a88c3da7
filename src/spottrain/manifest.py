"""What makes a folder of files a checkpoint: its manifest, put there last.

Standard library only; manager and workers share it. Layout (design: section 7)::

    <root>/step-<n>-g<generation>-<nonce>/section-<k>[.part-<j>].safetensors
    <root>/step-<n>-g<generation>-<nonce>/manifest.json

No manifest, no checkpoint; never a second write into a folder. Nothing in it depends on
the pipeline depth or data-parallel width that wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from spottrain.errors import SpottrainError, WireError
from spottrain.wire import SCHEMA_VERSION, decode

MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"step-(\d+)-g(\d+)-[0-9a-f]{8}")
_FILE = re.compile(r"section-\d+(\.part-\d+)?\.safetensors")
_CHUNK_BYTES = 1 << 20


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
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        entry = parse_name(self.name)
        if entry is None or entry.step != self.step:
            raise WireError(
                f"checkpoint must be named step-{self.step}-g…: got {self.name!r}"
            )
        found = {f.section for f in self.files}
        if found != set(range(self.num_sections)):
            raise WireError(
                f"checkpoint {self.name} must hold sections 0 to "
                f"{self.num_sections - 1}: got {sorted(found)}"
            )

    def files_of(self, section: int) -> tuple[FileRecord, ...]:
        """Return the files that make up ``section``."""
        return tuple(f for f in self.files if f.section == section)


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


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Make a checkpoint complete, atomically, once all its files are on disk.

    Raises:
        CheckpointError: The disk refused, or the checkpoint was complete already.
    """
    folder = root / manifest.name
    final = folder / MANIFEST_FILE
    temporary = folder / f"{MANIFEST_FILE}.{secrets.token_hex(4)}"
    if final.exists():
        raise CheckpointError(f"checkpoint {folder} is complete: use a new name")
    try:
        with open(temporary, "x", encoding="utf-8") as stream:
            json.dump(asdict(manifest), stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, final)
        sync_folder(folder)
        sync_folder(root)
    except OSError as error:
        raise CheckpointError(_cannot("write", final, error)) from error


def read_manifest(root: Path, name: str) -> Manifest:
    """Return the manifest of checkpoint ``name``.

    Raises:
        CheckpointError: It is missing, or not what its schema says.
    """
    path = root / name / MANIFEST_FILE
    try:
        manifest = decode(Manifest, path.read_bytes())
    except OSError as error:
        raise CheckpointError(_cannot("read", path, error)) from error
    except WireError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    assert isinstance(manifest, Manifest)
    if manifest.name != name:
        raise CheckpointError(f"{path} is of another checkpoint: got {manifest.name}")
    return manifest


def list_checkpoints(root: Path) -> list[CheckpointEntry]:
    """Return the complete checkpoints, newest first; files are not looked into."""
    return [entry for entry in _folders(root) if _is_complete(root, entry.name)]


def verify(root: Path, name: str) -> None:
    """Read every file of checkpoint ``name`` and compare sizes and hashes.

    Raises:
        CheckpointError: Names the first file that is not as it was written.
    """
    for record in read_manifest(root, name).files:
        verify_file(root / name / record.file, record)


def verify_file(path: Path, record: FileRecord) -> None:
    """Compare size and hash of one file with its record.

    Raises:
        CheckpointError: The file is missing, or not as it was written.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes != record.num_bytes:
            raise CheckpointError(
                f"{path} is damaged: must be {record.num_bytes} bytes, got {num_bytes}"
            )
        found = hash_file(path)
    except OSError as error:
        raise CheckpointError(_cannot("read", path, error)) from error
    if found != record.sha256:
        raise CheckpointError(
            f"{path} is damaged: sha256 must be {record.sha256}, got {found}"
        )


def newest_valid(
    root: Path,
    skip: Collection[str] = (),
    on_damaged: Callable[[str, CheckpointError], None] | None = None,
) -> CheckpointEntry | None:
    """Return the newest checkpoint whose every file is as it was written.

    Args:
        root: Where the job's checkpoints are.
        skip: Names known to be damaged.
        on_damaged: Called with the name and the error of each one passed over.
    """
    for entry in _folders(root):
        if entry.name in skip or not (root / entry.name / MANIFEST_FILE).exists():
            continue
        try:
            verify(root, entry.name)
        except CheckpointError as error:
            if on_damaged is not None:
                on_damaged(entry.name, error)
        else:
            return entry
    return None


def retain(root: Path, keep: int, protect: Collection[str] = ()) -> tuple[str, ...]:
    """Delete what is no longer needed and return the names of it.

    That is: complete checkpoints beyond the newest ``keep``, and folders without a
    manifest that are of an earlier step than the newest complete one.

    Args:
        root: Where the job's checkpoints are.
        keep: Complete checkpoints to keep, at least 1.
        protect: Names never to delete: in use, or being written.

    Raises:
        CheckpointError: A folder could not be deleted.
    """
    complete = list_checkpoints(root)
    if not complete:
        return ()
    newest, kept = complete[0], {entry.name for entry in complete[: max(keep, 1)]}
    is_complete = {entry.name for entry in complete}
    doomed = tuple(
        entry.name
        for entry in _folders(root)
        if entry.name not in kept
        and entry.name not in protect
        and (entry.name in is_complete or entry.step < newest.step)
    )
    for name in doomed:
        _delete(root / name)
    return doomed


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a loss of power."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _folders(root: Path) -> list[CheckpointEntry]:
    """Return every folder named like a checkpoint, newest first."""
    if not root.is_dir():
        return []
    found = (
        parse_name(path.name)
        for path in root.iterdir()
        if path.is_dir() and not path.is_symlink()
    )
    return sorted(
        (entry for entry in found if entry),
        key=lambda entry: (entry.step, _generation(entry.name), entry.name),
        reverse=True,
    )


def _generation(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match[2]) if match else -1


def _is_complete(root: Path, name: str) -> bool:
    try:
        read_manifest(root, name)
    except CheckpointError:
        return False
    return True


def _delete(folder: Path) -> None:
    """Delete a checkpoint so that half of it is never taken for the whole."""
    try:
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        sync_folder(folder)
        shutil.rmtree(folder)
    except FileNotFoundError:
        return  # another one deletes it too
    except OSError as error:
        raise CheckpointError(_cannot("delete", folder, error)) from error


def _cannot(verb: str, path: Path, error: OSError) -> str:
    return f"cannot {verb} {path}: {error.strerror or error}"
