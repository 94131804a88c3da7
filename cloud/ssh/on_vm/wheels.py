"""The wheel cache of a job: what ``setup`` of one VM downloaded, for all later ones.

    python -m spottrain.cloud.ssh.on_vm.wheels digest FOLDER
    python -m spottrain.cloud.ssh.on_vm.wheels publish PLACE FOLDER (and remove FOLDER)
    python -m spottrain.cloud.ssh.on_vm.wheels fetch PLACE FOLDER DIGEST

``FOLDER`` is the cache of pip during ``setup`` (``PIP_CACHE_DIR``): downloads by URL, and
wheels that pip built. pip itself decides what of it is of use, so that nothing depends on
how ``setup`` calls pip. ``PLACE`` is a folder or bucket (``storage.store``), of one setup,
one code and one kind of Python. It holds the files, and ``index.json`` once all are there.

All VMs may write there, and what is there runs on all later ones. So the manager asks the
VM that publishes for the digest of the index, and others for files of that index only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from spottrain.storage.open import open_store
from spottrain.storage.store import MissingError, StorageError, Store

INDEX = "index.json"
_FILES = "files"
_THREADS = 8
"""Files in transfer at the same time: a bucket gives each connection its rate."""
_PATIENCE_S = 20.0
_NICE = 19


def fetch(store: Store, folder: Path, digest: str) -> int | None:
    """Fetch all that was published into a folder.

    Args:
        store: Where from.
        folder: Where to.
        digest: Of the index of what was published.

    Returns:
        The number of bytes; None: it is not there yet.

    Raises:
        StorageError: The store does not answer, or has something else.
    """
    try:
        index = store.get(INDEX)
    except MissingError:
        return None
    if hashlib.sha256(index).hexdigest() != digest:
        raise StorageError(f"{store.place}/{INDEX} is not what a VM of this job published")
    published: dict[str, str] = json.loads(index)[_FILES]

    def fetch_one(name: str) -> int:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise StorageError(f"{store.place}/{INDEX} names {name}, which is no file")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        store.fetch(f"{_FILES}/{name}", target)
        if _digest(target) != published[name]:
            target.unlink()
            raise StorageError(f"{store.place}: {name} is not what was published")
        return target.stat().st_size

    with ThreadPoolExecutor(_THREADS) as threads:
        return sum(threads.map(fetch_one, published))


def publish(store: Store, folder: Path) -> None:
    """Publish the files of a folder.

    Raises:
        StorageError: The store does not answer.
    """
    index = index_of(folder)
    names = json.loads(index)[_FILES]

    def put(name: str) -> None:
        store.put(f"{_FILES}/{name}", folder / name)

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(put, names))
    store.put(INDEX, index)


def index_of(folder: Path) -> bytes:
    """Return the index of the files of a folder: their names and digests."""
    found = {
        path.relative_to(folder).as_posix(): _digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
    return json.dumps({_FILES: found}).encode()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: Sequence[str]) -> int:
    """Do what is asked; print one line of JSON."""
    what, *arguments = argv
    answer: dict[str, object] = {}
    try:
        if what == "digest":
            (folder,) = arguments
            answer["digest"] = hashlib.sha256(index_of(Path(folder))).hexdigest()
        elif what == "fetch":
            place, folder, digest = arguments
            store = open_store(place, patience_s=_PATIENCE_S)
            answer["bytes"] = fetch(store, Path(folder), digest)
        else:
            place, folder = arguments
            os.nice(_NICE)  # workers train meanwhile
            publish(open_store(place, patience_s=_PATIENCE_S), Path(folder))
            shutil.rmtree(folder, ignore_errors=True)
    except StorageError as error:
        answer["error"] = str(error)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
