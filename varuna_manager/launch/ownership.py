"""Whose the checkpoints at a place are: a job marks it at launch, and others keep out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from spottrain.codec import encode
from spottrain.errors import ConfigError
from spottrain.manifest import (
    OWNER_FILE,
    Owner,
    list_checkpoints,
    misfit,
    read_manifest,
    read_owner,
    write_owner,
)
from spottrain.storage.open import open_store
from spottrain.storage.store import ExistsError, Store
from spottrain.varuna_manager.jobs.follow import folder_of
from spottrain.wire.messages import JobSpec
from spottrain.wire.numerics import Numerics


def check(store: Store, *, adopt: bool) -> None:
    """Check that a place is no other job's.

    Args:
        store: The place, which exists.
        adopt: What other jobs have left there is to be taken over.

    Raises:
        ConfigError: It is another's, and is not to be taken over.
        StorageError: It cannot be read.
    """
    if adopt:
        return
    owner, found = read_owner(store), list_checkpoints(store)
    if owner is None and not found:
        return
    whose = "another job" if owner is None else f"job {owner.name}"
    why = f"is the place of {whose}"
    if found:
        why = f"holds checkpoints already, of {whose}, such as {found[0].name}"
    raise ConfigError(
        f"checkpoint.path: {store.place} {why}; give this job a place of its own (with "
        "init_from it begins with those weights), or launch it with --adopt to go on from "
        "them as its own"
    )


@contextlib.contextmanager
def marked(
    place: str, uid: str, spec: JobSpec, model: str, numerics: Numerics, *, adopt: bool
) -> Iterator[Numerics]:
    """Mark a place as a new job's; as before if the block fails.

    Gives the job's numerics, with what the checkpoints that it takes over have settled.

    Args:
        place: Folder or URL of its checkpoints.
        uid: Of the job.
        spec: Of the job.
        model: Fingerprint of its model.
        numerics: What it asks for.
        adopt: Take over what other jobs have left there.

    Raises:
        ConfigError: It is another's; or its newest checkpoint does not fit.
        StorageError: It cannot be read or written.
    """
    store = open_store(place)
    before = read_owner(store) if adopt else None
    uids: tuple[str, ...] = ()
    if adopt:
        uids, numerics = _adopted(store, before, spec, model, numerics)
    owner = Owner(uid=uid, name=spec.name, adopted=uids)
    if not adopt:
        check(store, adopt=False)
    if before is None:
        try:
            write_owner(store, owner)
        except ExistsError:
            check(store, adopt=False)
            raise
    else:
        store.put(OWNER_FILE, encode(owner).encode())
    try:
        yield numerics
    except BaseException:
        if before is None:
            store.delete([OWNER_FILE])
        else:
            store.put(OWNER_FILE, encode(before).encode())
        raise


def unmark(place: str, uid: str) -> None:
    """Take back the mark of a job that was never begun.

    Raises:
        StorageError: The place cannot be read or written.
    """
    store = open_store(place)
    if (owner := read_owner(store)) is not None and owner.uid == uid:
        store.delete([OWNER_FILE])


def _adopted(
    store: Store, before: Owner | None, spec: JobSpec, model: str, numerics: Numerics
) -> tuple[tuple[str, ...], Numerics]:
    """Return the jobs, by uid, whose checkpoints are taken over: those of the owner, or
    where nobody has marked the place, all; and the numerics of the job that goes on from them.

    Raises:
        ConfigError: The owner runs here, or its newest checkpoint does not fit.
    """
    if before is not None and folder_of(before.name, before.uid).is_managed():
        raise ConfigError(
            f"--adopt: job {before.name}, whose checkpoints these are, is running; end it "
            f"first with 'spottrain down {before.name}'"
        )
    found = list_checkpoints(store, None if before is None else before.uids)
    manifests = [read_manifest(store, entry.name) for entry in found]
    if manifests and (why := misfit(manifests[0], spec, {model}, numerics)):
        raise ConfigError(
            f"--adopt: {store.place}/{manifests[0].name} is of {why}: make the job the "
            "same, or give it a place of its own, and init_from"
        )
    if manifests and (settled := manifests[0].numerics):
        numerics = numerics.completed_by(settled)
    if before is not None:
        return tuple(before.uids), numerics
    return tuple(dict.fromkeys(manifest.uid for manifest in manifests)), numerics
