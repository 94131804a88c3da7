"""The user's workdir: which files are sent to VMs, their hash, and the archive."""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spottrain.errors import ConfigError
from spottrain.storage.store import local_folder
from spottrain.varuna_manager.jobs.folder import home
from spottrain.wire.model import LAYOUT_FILE

MAX_BYTES = 512 * 1024**2
"""Largest accepted workdir; datasets belong elsewhere."""

LEFT_OUT = frozenset(
    {
        ".git",
        ".hg",
        ".hypothesis",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".tox",
        ".venv",
        "__pycache__",
        "node_modules",
        "venv",
    }
)
"""Folders that are never sent."""

IGNORE_FILE = ".spottrainignore"
"""In the workdir: what else is not sent, one pattern per line, with ``*`` and ``?``. One
with a ``/`` inside is a path from the workdir, any other a name in any folder."""


def packed_files(workdir: Path, checkpoints: str | None = None) -> list[Path]:
    """Return the files of a workdir that are sent: relative paths, sorted.

    The state directory and the job's checkpoints may be folders of it: they are not sent.

    Args:
        workdir: The user's.
        checkpoints: Where the job keeps its checkpoints, a folder or a URL.

    Raises:
        ConfigError: It is too large, or a link leads out of it.
    """
    found = []
    size = 0
    patterns = _ignored(workdir)
    ours = {home().resolve(), Path(local_folder(checkpoints or "") or "/").resolve()}
    for folder, folders, files in os.walk(workdir):
        below = Path(folder).relative_to(workdir)
        folders[:] = [
            name
            for name in folders
            if not _is_left_out(below / name, patterns)
            and Path(folder, name).resolve() not in ours
        ]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        files = [x for x in files if not _is_ignored(below / x, patterns)]
        if folder == os.fspath(workdir):  # ours, in one that was sent before
            files = [name for name in files if name != LAYOUT_FILE]
        for name in [*files, *links]:
            path = Path(folder, name)
            if path.is_symlink():
                _check_link(path, workdir)
            elif not path.is_file():
                continue  # sockets and pipes are useless on another machine
            size += path.lstat().st_size
            found.append(path.relative_to(workdir))
    if size > MAX_BYTES:
        raise ConfigError(
            f"workdir: {workdir} holds {size / 1024**2:.0f} MiB, at most "
            f"{MAX_BYTES // 1024**2} MiB can be sent; move data out of it"
        )
    return sorted(found)


def _ignored(workdir: Path) -> list[str]:
    """Return the patterns of the workdir's ignore file.

    Raises:
        ConfigError: It cannot be read.
    """
    path = workdir / IGNORE_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; fix it") from error
    patterns = [line.strip().rstrip("/") for line in lines]
    return [pattern for pattern in patterns if pattern and pattern[0] != "#"]


def _is_left_out(folder: Path, patterns: list[str]) -> bool:
    return folder.name in LEFT_OUT or _is_ignored(folder, patterns)


def _is_ignored(path: Path, patterns: list[str]) -> bool:
    return any(
        fnmatch.fnmatchcase(path.as_posix(), pattern.lstrip("/"))
        if "/" in pattern
        else fnmatch.fnmatchcase(path.name, pattern)
        for pattern in patterns
    )


def _check_link(path: Path, workdir: Path) -> None:
    target = os.readlink(path)
    inside = path.resolve().is_relative_to(workdir.resolve())
    if os.path.isabs(target) or not inside:
        raise ConfigError(
            f"workdir: link {path} points to {target}, which VMs do not have; replace the "
            "link by its target, or move it out of the workdir"
        )


def fingerprint(workdir: Path, files: list[Path]) -> str:
    """Return a hash of the names and contents of ``files``.

    Raises:
        ConfigError: One cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        path = workdir / file
        with _reading(path):
            is_link = path.is_symlink()
            content = os.readlink(path).encode() if is_link else path.read_bytes()
        digest.update(f"{file.as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def pack(
    workdir: Path, files: list[Path], target: Path, layout: Path | None = None
) -> int:
    """Write ``files`` of ``workdir`` to ``target`` (tar.gz), reproducibly.

    Args:
        workdir: The user's.
        files: As ``packed_files`` returns.
        target: The archive.
        layout: What inspect has kept for supervisors (``LAYOUT_FILE``).

    Returns:
        The size of the package in bytes.

    Raises:
        ConfigError: A file cannot be read.
    """
    with (
        open(target, "wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for file in files:
            with _reading(workdir / file):
                archive.add(workdir / file, file.as_posix(), filter=_anonymous)
        if layout is not None and layout.exists():
            archive.add(layout, LAYOUT_FILE, filter=_anonymous)
    return target.stat().st_size


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename != str(path):
            raise  # the package cannot be written
        raise ConfigError(
            f"workdir: {path} cannot be read: {error.strerror}; move it out of the "
            f"workdir, or name it in {IGNORE_FILE}"
        ) from error


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return ``member`` without owner and time, for reproducible archives."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def differing(old: Path, new: Path) -> list[str]:
    """Return the files that differ between two packages: what happened to each."""
    before, after = _hashes(old), _hashes(new)
    return [
        f"{name} {'changed' if name in before and name in after else verb}"
        for name in sorted({*before, *after})
        for verb in ["added" if name in after else "removed"]
        if before.get(name) != after.get(name)
    ]


def unpack(package: Path, folder: Path) -> None:
    """Unpack a workdir that this program has packed."""
    with tarfile.open(package) as packed:
        packed.extractall(folder, filter="data")


def _hashes(package: Path) -> dict[str, str]:
    """Return what a package holds: names, and a hash of contents and mode."""
    found = {}
    with tarfile.open(package) as packed:
        for member in packed:
            if member.name == LAYOUT_FILE:
                continue
            file = packed.extractfile(member) if member.isreg() else None
            data = member.linkname.encode() if file is None else file.read()
            found[member.name] = f"{hashlib.sha256(data).hexdigest()} {member.mode}"
    return found
