"""Opens the store at a folder or URL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spottrain.storage.file import FileStore
from spottrain.storage.objects import open_objects
from spottrain.storage.store import PATIENCE_S, Store, local_folder, parse_url


def open_store(
    place: str | Path,
    options: Mapping[str, str] | None = None,
    patience_s: float = PATIENCE_S,
) -> Store:
    """Return the store at a folder or URL, without a request to it.

    Args:
        place: As in ``storage.store``.
        options: More ``OPTIONS``; they win over those in the URL.
        patience_s: Time for which a request without an answer is retried.

    Raises:
        StorageError: The URL has an unknown scheme, or obstore is not installed.
    """
    folder = place if isinstance(place, Path) else local_folder(place)
    if folder is not None:
        return FileStore(folder)
    return open_objects(parse_url(str(place), options), patience_s)
