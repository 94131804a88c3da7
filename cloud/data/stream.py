"""Files of a dataset that are fetched when they are needed, at most so many bytes at a time.

    <folder>/manifest.json   the request, and all files of the dataset
    <folder>/files/<name>    those that are here, whole
    <folder>/claims/<hash>   locked by the process that fetches a file, and as large as it
    <folder>/coming/<hash>/  what has come of that file
    <folder>/lock            held while room is made
    <folder>/usage.json      what was fetched, and the most that was here

All processes of a machine share a folder, and each file is fetched by one of them. What was
used least recently goes first; who has it open reads on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from spottrain.cloud.data.request import (
    DataError,
    DataRequest,
    DataUnavailableError,
    from_json,
    short_hash,
    to_json,
)
from spottrain.cloud.data.sources import DataSource, SourceFile, open_source
from spottrain.files import locked
from spottrain.units import size

LENGTHS = "lengths.json"
"""The file of a dataset that says how many examples the others have, by their names."""
_MANIFEST = "manifest.json"
_PATIENCE_S = 600.0
_RETRY_S = 5.0
"""How long, and how often, a source that does not answer is asked again."""
_ROOM_S = 0.2
"""How often room is looked for while others, for which it is kept, are on their way."""


def prepare_stream(folder: Path, request: DataRequest, source: DataSource) -> None:
    """Make the folder of a streamed dataset unless it is there.

    Raises:
        DataError: a file alone is larger than all that may be here.
    """
    largest = max(source.files, key=lambda file: file.num_bytes)
    if largest.num_bytes > request.cache_bytes:
        raise DataError(
            f"{request.what}: {largest.name} alone has {largest.num_bytes / 2**30:.3g} GiB: got "
            f"cache_gib {request.cache_bytes / 2**30:g}; raise it, or make smaller files"
        )
    if (folder / _MANIFEST).exists():
        return
    for name in ("files", "claims", "coming"):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    for file in source.files:
        if file.name == LENGTHS:  # now: a process that forks others must not fetch
            source.fetch(file, folder / LENGTHS)
    files = [asdict(file) for file in source.files if file.name != LENGTHS]
    draft = folder / f"{_MANIFEST}.{os.getpid()}"
    draft.write_text(json.dumps({"request": to_json([request]), "files": files}))
    draft.replace(folder / _MANIFEST)


class Stream:
    """The files of a streamed dataset on this machine.

    Args:
        folder: Made by ``prepare_stream``.

    Raises:
        DataError: it is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder}: is no streamed data: give it a cache_gib under data: in the job file"
            ) from error
        self.folder = folder
        (self.request,) = from_json(manifest["request"])
        self.files = {one["name"]: SourceFile(**one) for one in manifest["files"]}
        self._source: DataSource | None = None
        self._wanted: tuple[str, ...] = ()
        self._thread: threading.Thread | None = None
        self._mutex = threading.Lock()

    def path(self, name: str, keep: Collection[str] = ()) -> Path:
        """Return where a file lies, fetched if it is not here.

        Args:
            name: As in the dataset.
            keep: Files that must stay while it comes.

        Raises:
            DataError: it cannot be had, or there is no room for it beside ``keep``.
            DataUnavailableError: its source did not answer for ten minutes.
        """
        target = self.folder / "files" / name
        end_s = time.monotonic() + _PATIENCE_S
        while True:
            with contextlib.suppress(FileNotFoundError):
                os.utime(target)  # the last use
                return target
            try:
                self._fetch(self.files[name], {name, *keep}, must=True)
            except DataUnavailableError:  # VMs have no library for this
                if time.monotonic() > end_s:
                    raise
                time.sleep(_RETRY_S)
            else:
                time.sleep(0 if target.exists() else _ROOM_S)

    def expect(self, names: Sequence[str], keep: Collection[str]) -> None:
        """Begin to fetch files that will be needed next, where there is room.

        Args:
            names: In the order in which they will be needed.
            keep: Files that are in use.
        """
        with self._mutex:
            if self._wanted == tuple(names):
                return
            self._wanted = tuple(names)
            if self._thread is None or not self._thread.is_alive():
                kept = {*names, *keep}
                self._thread = threading.Thread(
                    target=self._read_ahead, args=(kept,), name="read-ahead", daemon=True
                )
                self._thread.start()

    def _read_ahead(self, keep: set[str]) -> None:
        # Who needs a file fetches it and says what is wrong: here nobody waits for it.
        with contextlib.suppress(DataError, DataUnavailableError, OSError):
            for name in self._wanted:
                self._fetch(self.files[name], keep, must=False)

    def _fetch(self, file: SourceFile, keep: set[str], *, must: bool) -> None:
        """Fetch a file unless it is here; if it need not be, only where there is room."""
        target = self.folder / "files" / file.name
        claim = self.folder / "claims" / short_hash(file.name)
        with locked(claim, wait=must) as held:
            if not held or target.exists():
                return
            with locked(self.folder / "lock"):
                if not self._make_room(file, claim, keep, must=must):
                    return
            whole = self.folder / "coming" / claim.name / target.name
            if self._source is None:
                self._source = open_source(self.request)
            self._source.fetch(file, whole)
            target.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / "lock"):
                whole.replace(target)
                os.truncate(claim, 0)
                now = self._account(file.num_bytes)
        sys.stdout.write(
            f"{self.request.name}: {file.name} has come: {now['files']} files, "
            f"{size(now['fetched'])} so far, at most {size(now['most'])} at a time\n"
        )

    def _make_room(self, file: SourceFile, claim: Path, keep: set[str], *, must: bool) -> bool:
        """Claim room for a file, for which others go; False: there is none now.

        Raises:
            DataError: there is none beside ``keep``, and it must be had.
        """
        limit = self.request.cache_bytes
        here = self._here()
        used = sum(about[0] for about in here.values()) + self._claimed()
        for name in sorted(here, key=lambda name: here[name][1]):
            if used + file.num_bytes <= limit:
                break
            if name not in keep:
                (self.folder / "files" / name).unlink()
                used -= here[name][0]
        if used + file.num_bytes > limit:
            kept = sum(here[name][0] for name in here if name in keep)
            if not must or kept + file.num_bytes <= limit:
                return False
            raise DataError(
                f"{self.request.what}: {len(keep)} files that are read together do not fit into "
                f"cache_gib {limit / 2**30:g}; raise it, or lower the window of Shards"
            )
        os.truncate(claim, file.num_bytes)
        self._account(0)
        return True

    def _here(self) -> dict[str, tuple[int, float]]:
        """Return size and last use of the files that are here, by their names."""
        root, found = self.folder / "files", {}
        for path in root.rglob("*"):
            if path.is_file():
                about = path.stat()
                found[path.relative_to(root).as_posix()] = about.st_size, about.st_mtime
        return found

    def _claimed(self) -> int:
        """Return the bytes of files that are being fetched.

        What there is of one whose process was killed or failed goes.
        """
        total = 0
        for claim in (self.folder / "claims").iterdir():
            if not (claimed := claim.stat().st_size):
                continue
            with locked(claim, wait=False) as held:
                if held:
                    shutil.rmtree(self.folder / "coming" / claim.name, ignore_errors=True)
                    os.truncate(claim, 0)
                else:
                    total += claimed
        return total

    @property
    def usage(self) -> Mapping[str, int]:
        """What happened here: bytes and ``files`` fetched, the ``most`` bytes at a time."""
        try:
            found: dict[str, int] = json.loads((self.folder / "usage.json").read_text())
        except FileNotFoundError:
            return {"fetched": 0, "files": 0, "most": 0}
        return found

    def _account(self, fetched_bytes: int) -> Mapping[str, int]:
        here = sum(about[0] for about in self._here().values()) + self._claimed()
        usage = self.usage
        draft = self.folder / "usage.json.new"
        new = {
            "fetched": usage["fetched"] + fetched_bytes,
            "files": usage["files"] + bool(fetched_bytes),
            "most": max(usage["most"], here),
        }
        draft.write_text(json.dumps(new))
        draft.replace(self.folder / "usage.json")
        return new
