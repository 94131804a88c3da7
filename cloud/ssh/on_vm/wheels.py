"""The wheel cache of a job: what ``setup`` of one VM downloaded, for all later ones.

    python -m spottrain.cloud.ssh.on_vm.wheels fetch PLACE FOLDER
    python -m spottrain.cloud.ssh.on_vm.wheels publish PLACE FOLDER (and remove FOLDER)

``FOLDER`` is the cache of pip during ``setup`` (``PIP_CACHE_DIR``): downloads by URL, and
wheels that pip built. pip itself decides what of it is of use, so that nothing depends on
how ``setup`` calls pip. ``PLACE`` is a folder or bucket (``storage.store``), of one setup,
one code and one kind of Python. It holds the files, ``index.json`` once all are there, and
claims: who publishes, since when.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from spottrain.storage.open import open_store
from spottrain.storage.store import ExistsError, MissingError, StorageError, Store

INDEX = "index.json"
_FILES, _CLAIM = "files", "claim-"
CLAIM_S = 1800.0
"""Who has not published within this time is taken for gone."""
_THREADS = 8
"""Files in transfer at the same time: a bucket gives each connection its rate."""
_PATIENCE_S = 20.0
_NICE = 19


def fetch(store: Store, folder: Path) -> int | None:
    """Fetch all that was published into a folder.

    Returns:
        The number of bytes; None: nobody has published anything.

    Raises:
        StorageError: The store does not answer, or a file is not what was published.
    """
    try:
        published: dict[str, str] = json.loads(store.get(INDEX))[_FILES]
    except MissingError:
        return None

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


def publish(store: Store, folder: Path, owner: str, now_s: float) -> bool:
    """Publish the files of a folder, unless somebody has, or is about to.

    Args:
        store: Where to.
        folder: With the files.
        owner: Who we are.
        now_s: Seconds since the epoch.

    Returns:
        True if they were published.

    Raises:
        StorageError: The store does not answer.
    """
    found = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
    names = [entry.name for entry in store.list()]
    if not found or INDEX in names or not _claim(store, names, owner, now_s):
        return False

    def put(name: str) -> tuple[str, str]:
        store.put(f"{_FILES}/{name}", found[name])
        return name, _digest(found[name])

    with ThreadPoolExecutor(_THREADS) as threads:
        index = {_FILES: dict(threads.map(put, found))}
    store.put(INDEX, json.dumps(index).encode())
    return True


def _claim(store: Store, names: Sequence[str], owner: str, now_s: float) -> bool:
    """Claim the work; return False if somebody else does it."""
    claims = sum(name.startswith(_CLAIM) for name in names)
    if claims:
        newest = json.loads(store.get(f"{_CLAIM}{claims - 1}"))
        if newest["at_s"] + CLAIM_S > now_s:
            return False
    name = f"{_CLAIM}{claims}"
    ours = json.dumps({"owner": owner, "at_s": now_s}).encode()
    try:
        store.put_new(name, ours)
    except ExistsError:
        return store.get(name) == ours  # our own, if the reply was lost
    return True


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: Sequence[str]) -> int:
    """Fetch or publish; print one line of JSON."""
    what, place, folder = argv
    answer: dict[str, object]
    try:
        store = open_store(place, patience_s=_PATIENCE_S)
        if what == "fetch":
            answer = {"bytes": fetch(store, Path(folder))}
        else:
            os.nice(_NICE)  # workers train meanwhile
            published = publish(store, Path(folder), folder, time.time())
            answer = {"published": published}
            shutil.rmtree(folder, ignore_errors=True)
    except StorageError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
