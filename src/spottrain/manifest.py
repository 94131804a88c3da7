"""Manifests: written last, they make a folder of files a checkpoint.

Standard library only; manager and workers share it. Names in a store (design: section 7)::

    step-<n>-g<generation>-<nonce>/section-<k>.safetensors
    step-<n>-g<generation>-<nonce>/manifest.json
    frozen/section-<k>-<sha256>.safetensors
    owner.json                                  the job whose store it is

Parameters that are not trained never change: they are written once, in ``frozen``, and
each manifest names them. No manifest, no checkpoint; never a second write into a folder. Nothing in it depends on
the pipeline depth or data-parallel width that wrote it.

Three things are told apart. A file that is there, but not as its manifest says, is damaged
(``DamagedError``). One that is not there is missing (``CheckpointError``). And where the
store itself does not answer, or is not the job's, nothing is known (``UnreachableError``):
a disk that is not mounted lacks ``owner.json``, which is there from launch on.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spottrain.codec import SCHEMA_VERSION, decode, encode
from spottrain.errors import SpottrainError, WireError
from spottrain.storage.store import (
    DeniedError,
    ExistsError,
    MissingError,
    StorageError,
    Store,
    UnreachableError,
)
from spottrain.wire.messages import CheckpointDamaged, JobSpec
from spottrain.wire.numerics import Numerics

MANIFEST_FILE = "manifest.json"
OWNER_FILE = "owner.json"
_NAME = re.compile(r"step-(\d{1,18})-g(\d{1,18})-[0-9a-f]{8}")
FROZEN_FOLDER = "frozen"
_FILE = re.compile(r"section-\d+(-[0-9a-f]{16})?\.safetensors")


class CheckpointError(SpottrainError):
    """A checkpoint is damaged or missing, or cannot be written."""


class DamagedError(CheckpointError):
    """A file is there, but its size, hash or format is not what was written.

    Args:
        message: One line.
        file: Its name in the store.
    """

    def __init__(self, message: str, file: str) -> None:
        super().__init__(message)
        self.file = file


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint, as it was written."""

    section: int
    file: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.file):
            raise WireError(f"file must be section-<k>.safetensors: got {self.file!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetLength:
    """How many examples a data set has; which ones a mini-batch is of follows from it."""

    name: str
    """``dataset``, or ``heldout set`` and its name."""
    length: int


def other_length(
    here: Collection[DatasetLength], there: Collection[DatasetLength]
) -> tuple[str, int, int] | None:
    """Return a data set that has another length there: its name, and both lengths."""
    lengths = {one.name: one.length for one in there}
    for one in here:
        if lengths.get(one.name, one.length) != one.length:
            return one.name, one.length, lengths[one.name]
    return None


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
    files: tuple[FileRecord, ...]
    """In the order of sections."""
    best_step: int = 0
    """Step of the best weights up to here, by evaluation; 0: unknown."""
    frozen: tuple[FileRecord, ...] = ()
    """Files in ``FROZEN_FOLDER`` with the parameters that are not trained."""
    base: str = ""
    """What transformers calls the weights that the model began with; empty: unknown."""
    uid: str = ""
    """Of the job that wrote it; empty: no job's."""
    datasets: tuple[DatasetLength, ...] = ()
    """As the workers that wrote it have them; none: unknown."""
    code: str = ""
    """As in ``RunGeneration``."""
    numerics: Numerics | None = None
    """In exact mode, once it has trained."""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        entry = parse_name(self.name)
        if entry is None or entry.step != self.step:
            raise WireError(f"checkpoint must be named step-{self.step}-g…: got {self.name!r}")
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


def config_fingerprint(spec: JobSpec) -> str:
    """Return a hash of the settings that a job's weights depend on."""
    parts = (
        spec.entrypoint,
        spec.seed,
        spec.minibatch_size,
        spec.reduction,
        spec.precision,
        spec.init_from,
        spec.semantics,
        spec.sequence_parallel and spec.reduction == "exact",
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def misfit(
    manifest: Manifest, spec: JobSpec, models: Collection[str], numerics: Numerics | None
) -> str:
    """Return what a job would have to be to go on from a checkpoint; empty: it is that.

    Args:
        manifest: Of the checkpoint.
        spec: Of the job.
        models: Fingerprints of the job's model.
        numerics: Of the job, as far as they are settled or asked for.
    """
    if manifest.model_fingerprint not in models:
        return "another model, optimizer or batch"
    if config_fingerprint(spec) == manifest.config_fingerprint:
        settled = manifest.numerics
        other = numerics.conflict_with(settled) if numerics and settled else ""
        return other and f"a job with {other}"
    for key in ("seed", "minibatch_size"):
        if getattr(spec, key) != (was := getattr(manifest, key)):
            return f"a job with {key}: {was}"
    return (
        "a job with another entrypoint, reduction, precision, semantics, init_from or "
        "sequence_parallel"
    )


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


def generation_of(name: str) -> int:
    """Return the generation that wrote a checkpoint, 0 for a job's first weights, or -1 if
    its name is not one."""
    match = _NAME.fullmatch(name)
    return int(match[2]) if match else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The job whose store it is."""

    uid: str
    name: str
    adopted: tuple[str, ...] = ()
    """Other jobs, by uid, whose checkpoints it has taken over as its own."""
    schema_version: int = SCHEMA_VERSION

    @property
    def uids(self) -> frozenset[str]:
        """The jobs whose checkpoints are its own."""
        return frozenset((self.uid, *self.adopted))


def read_owner(store: Store) -> Owner | None:
    """Return whose store it is; ``None``: no job has marked it.

    Raises:
        StorageError: The store cannot be asked, or its mark is damaged.
    """
    try:
        owner = decode(Owner, store.get(OWNER_FILE))
    except MissingError:
        return None
    except WireError as error:
        raise DeniedError(f"{store.place}/{OWNER_FILE} is damaged: {error}; restore it") from error
    assert isinstance(owner, Owner)
    return owner


def own_uids(store: Store, uid: str) -> frozenset[str] | None:
    """Return the jobs whose checkpoints are those of job ``uid``, whose store this must be.

    Args:
        store: Where the job's checkpoints are.
        uid: Empty: of a job that has marked nothing; ``None`` is returned: all are.

    Raises:
        UnreachableError: The mark is not there: neither is what the job has saved.
        DeniedError: It is another job's.
        StorageError: The store cannot be asked.
    """
    if not uid:
        return None
    owner = read_owner(store)
    if owner is None:
        raise UnreachableError(
            f"{store.place} is not the place where the job began: it has no {OWNER_FILE}; "
            "mount or restore it"
        )
    if owner.uid != uid:
        raise DeniedError(
            f"{store.place} belongs to job {owner.name} now; launch with another checkpoint.path"
        )
    return owner.uids


def write_owner(store: Store, owner: Owner) -> None:
    """Mark a store that no job has marked.

    Raises:
        ExistsError: One has.
        StorageError: The store refuses.
    """
    data = encode(owner).encode()
    try:
        store.put_new(OWNER_FILE, data)
    except ExistsError:
        # It is ours if the answer was lost and the request was repeated.
        if store.get(OWNER_FILE) != data:
            raise


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
        CheckpointError: There is none.
        DamagedError: It is not what its schema says.
        UnreachableError: The store cannot be asked.
    """
    file = f"{name}/{MANIFEST_FILE}"
    where = f"{store.place}/{file}"
    try:
        manifest = decode(Manifest, store.get(file))
    except UnreachableError:
        raise
    except MissingError as error:
        raise CheckpointError(str(error)) from error
    except StorageError as error:
        raise DamagedError(str(error), file) from error
    except WireError as error:
        raise DamagedError(f"{where} is damaged: {error}", file) from error
    assert isinstance(manifest, Manifest)
    if manifest.name != name:
        reason = f"{where} is of another checkpoint: got {manifest.name}"
        raise DamagedError(reason, file)
    return manifest


class Listing(NamedTuple):
    """What a store holds of a job's checkpoints."""

    whole: list[CheckpointEntry]
    """Newest first: all files are there, with their sizes."""
    damaged: list[CheckpointDamaged]
    """With a manifest, but not whole, or a manifest that cannot be read."""
    foreign: frozenset[str]
    """Names of those of other jobs."""


def list_checkpoints(store: Store, uids: Collection[str] | None = None) -> list[CheckpointEntry]:
    """Return the checkpoints that have a manifest, newest first; their files are not looked
    at.

    Args:
        store: Where to look.
        uids: Of the jobs whose checkpoints count; ``None``: all do.

    Raises:
        StorageError: The store cannot be asked.
    """
    found = []
    for entry in _folders(store):
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(store, entry.name)
            if uids is None or manifest.uid in uids:
                found.append(entry)
    return found


def scan(store: Store, uids: Collection[str] | None = None) -> Listing:
    """Return the checkpoints whose files are all there, and those that cannot be used.

    Sizes are compared with the manifest's; what is in the files is not read.

    Args:
        store: Where to look.
        uids: As in ``list_checkpoints``. A manifest that cannot be read is anybody's.

    Raises:
        StorageError: The store cannot be asked.
    """
    whole, damaged, foreign = (
        list[CheckpointEntry](),
        list[CheckpointDamaged](),
        set[str](),
    )
    frozen: dict[str, int] | None = None
    for entry in _folders(store):
        sizes = dict(store.list(entry.name))
        if f"{entry.name}/{MANIFEST_FILE}" not in sizes:
            continue
        try:
            manifest = read_manifest(store, entry.name)
            if uids is not None and manifest.uid not in uids:
                foreign.add(entry.name)
                continue
            if manifest.frozen:
                frozen = dict(store.list(FROZEN_FOLDER)) if frozen is None else frozen
                sizes |= frozen
            _check_sizes(store, manifest, sizes)
        except DamagedError as error:
            damaged.append(damage_of(entry.name, error))
        except CheckpointError:
            continue  # deleted meanwhile
        else:
            whole.append(entry)
    return Listing(whole, damaged, frozenset(foreign))


def _check_sizes(store: Store, manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Check that all files of a checkpoint are listed with their sizes."""
    for section in range(manifest.num_sections):
        for folder, record in manifest.files_of(section):
            file = f"{folder}/{record.file}"
            where, size = f"{store.place}/{file}", sizes.get(file)
            if size is None:
                raise DamagedError(f"{where} is missing", file)
            if size != record.num_bytes:
                reason = f"must be {record.num_bytes} bytes, got {size}"
                raise DamagedError(f"{where} is damaged: {reason}", file)


def damage_of(name: str, error: DamagedError) -> CheckpointDamaged:
    """Return the report of what is wrong with a checkpoint."""
    return CheckpointDamaged(name=name, file=error.file, reason=str(error))


def recheck(store: Store, damaged: CheckpointDamaged) -> CheckpointDamaged | None:
    """Read again what was reported to be damaged; return what is, if anything.

    Raises:
        UnreachableError: The store cannot be asked.
    """
    try:
        manifest = read_manifest(store, damaged.name)
        for section in range(manifest.num_sections):
            for folder, record in manifest.files_of(section):
                if damaged.file in ("", f"{folder}/{record.file}"):
                    with verified(store, folder, record):
                        pass
    except DamagedError as error:
        return damage_of(damaged.name, error)
    except CheckpointError:
        return None  # it is gone: no listing has it
    return None


@contextlib.contextmanager
def verified(store: Store, name: str, record: FileRecord) -> Iterator[Path]:
    """Give a local file of the folder ``name``, its size and hash compared.

    Raises:
        CheckpointError: The file is missing.
        DamagedError: It is not as it was written.
        UnreachableError: The store cannot be asked.
    """
    file = f"{name}/{record.file}"
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(store.reading(file))
            _compare(path, record, store.place, file)
        except UnreachableError:
            raise
        except StorageError as error:
            raise CheckpointError(str(error)) from error
        yield path


def _compare(path: Path, record: FileRecord, place: str, file: str) -> None:
    where = f"{place}/{file}"
    try:
        num_bytes = path.stat().st_size
        if num_bytes != record.num_bytes:
            reason = f"must be {record.num_bytes} bytes, got {num_bytes}"
            raise DamagedError(f"{where} is damaged: {reason}", file)
        found = hash_file(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnreachableError(f"cannot read {where}: {reason}") from error
    if found != record.sha256:
        reason = f"sha256 must be {record.sha256}, got {found}"
        raise DamagedError(f"{where} is damaged: {reason}", file)


def retain(
    store: Store,
    keep: int,
    protect: Collection[str] = (),
    best_step: int | None = None,
    uids: Collection[str] | None = None,
) -> tuple[str, ...]:
    """Delete checkpoints that are no longer needed and return their names.

    That is: complete checkpoints beyond the newest ``keep``, but for the best, and
    folders without a manifest that are of an earlier step than the newest complete one.

    Args:
        store: Where the job's checkpoints are.
        keep: Complete checkpoints to keep, at least 1.
        protect: Names never to delete: in use, or being written.
        best_step: Step of the best one; 0: none is; ``None``: as the newest one says.
        uids: Of the jobs whose checkpoints it is about; others stay. ``None``: all.

    Raises:
        StorageError: The store cannot be asked, or does not let it be deleted.
    """
    complete, _, foreign = scan(store, uids)
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
        and entry.name not in foreign
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
        if generation_of(entry.name) < generation and not _has_manifest(store, entry.name)
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
        key=lambda entry: (entry.step, generation_of(entry.name), entry.name),
        reverse=True,
    )


def _has_manifest(store: Store, name: str) -> bool:
    manifest = f"{name}/{MANIFEST_FILE}"
    return any(entry.name == manifest for entry in store.list(name))
