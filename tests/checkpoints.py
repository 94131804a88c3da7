"""Whole checkpoints, read and compared with what their manifests say."""

from __future__ import annotations

from spottrain.manifest import (
    CheckpointEntry,
    CheckpointError,
    list_checkpoints,
    read_manifest,
    verified,
)
from spottrain.storage.store import Store


def verify(store: Store, name: str) -> None:
    """Read every file of checkpoint ``name`` and compare sizes and hashes."""
    manifest = read_manifest(store, name)
    for section in range(manifest.num_sections):
        for folder, record in manifest.files_of(section):
            with verified(store, folder, record):
                pass


def newest_valid(store: Store) -> CheckpointEntry | None:
    """Return the newest checkpoint whose every file is as it was written."""
    for entry in list_checkpoints(store):
        try:
            verify(store, entry.name)
        except CheckpointError:
            continue
        return entry
    return None
