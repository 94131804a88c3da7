"""A folder as a store: files survive a loss of power."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spottrain.storage import store

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_KINDS = {
    errno.ENOENT: store.MissingError,
    errno.EEXIST: store.ExistsError,
    errno.EISDIR: store.StorageError,  # a folder has the name of a file
    errno.EACCES: store.DeniedError,
    errno.EPERM: store.DeniedError,
    errno.EROFS: store.DeniedError,
}
"""What the errors of the file system say of a store; all others: nothing, now."""


class FileStore:
    """A folder that all who need it can reach; survives a loss of power.

    Args:
        root: Made at the first write.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def place(self) -> str:
        """The folder."""
        return str(self.root)

    def put(self, name: str, source: Path | bytes) -> None:
        """See ``Store``."""
        with self._new_file(name, os.replace) as path:
            _copy(source, path)

    def put_new(self, name: str, data: bytes) -> None:
        """See ``Store``."""
        with self._new_file(name, _link_new) as path:
            _copy(data, path)

    def get(self, name: str) -> bytes:
        """See ``Store``."""
        path = self.root / name
        with _translating_errors("read", path):
            return path.read_bytes()

    def fetch(self, name: str, target: Path) -> None:
        """See ``Store``."""
        with self.reading(name) as path, store.unfinished(target) as part:
            with _translating_errors("read", path):
                shutil.copyfile(path, part)
            os.replace(part, target)

    def list(self, prefix: str = "") -> store.Entries:
        """See ``Store``."""
        top = self.root / prefix
        found: list[store.StoreEntry] = []
        with _translating_errors("list", top):
            for folder, _, files in os.walk(top, onerror=_unless_gone):
                for file in files:
                    path = Path(folder, file)
                    # Files that vanish meanwhile are deleted by another process.
                    with contextlib.suppress(FileNotFoundError):
                        if file.endswith(store.UNFINISHED) or path.is_symlink():
                            continue
                        name = path.relative_to(self.root).as_posix()
                        found.append(store.StoreEntry(name, path.stat().st_size))
        return sorted(found)

    def folders(self) -> store.Names:
        """See ``Store``; an empty folder is one too."""
        with _translating_errors("list", self.root):
            if not self.root.is_dir():
                return []
            with os.scandir(self.root) as found:
                return sorted(x.name for x in found if x.is_dir(follow_symlinks=False))

    def delete(self, names: Iterable[str]) -> None:
        """See ``Store``."""
        for name in names:
            path = self.root / name
            with _translating_errors("delete", path):
                path.unlink(missing_ok=True)
                if path.parent.is_dir():
                    _sync_folder(path.parent)

    def delete_folder(self, prefix: str) -> None:
        """See ``Store``."""
        path = self.root / prefix
        with (
            contextlib.suppress(store.MissingError),
            _translating_errors("delete", path),
        ):
            shutil.rmtree(path)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """See ``Store``."""
        final = self.root / name
        with _translating_errors("write", final):
            taken = final.exists()
        if taken:
            raise store.ExistsError(f"{final} exists: use a new name")
        with self._new_file(name, _link_new) as path:
            yield path

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """See ``Store``."""
        path = self.root / name
        with _translating_errors("read", path):
            path.stat()
        yield path

    @contextlib.contextmanager
    def _new_file(self, name: str, publish: Callable[[Path, Path], None]) -> Iterator[Path]:
        """Yield a path to write; then sync it to disk and give it its name."""
        final = self.root / name
        with _translating_errors("write", final):
            _make_folder(final.parent)
            with store.unfinished(final) as part:
                yield part
                with open(part, "rb") as stream:
                    os.fsync(stream.fileno())
                publish(part, final)
            for folder in (final.parent, *final.parent.parents):
                _sync_folder(folder)
                if folder == self.root:
                    break


def _unless_gone(error: OSError) -> None:
    """Raise what keeps a folder from being listed; one that has vanished is empty."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error


def _copy(source: Path | bytes, target: Path) -> None:
    if isinstance(source, bytes):
        target.write_bytes(source)
    else:
        shutil.copyfile(source, target)


def _link_new(part: Path, final: Path) -> None:
    """Give a file its name, unless the name is taken."""
    try:
        os.link(part, final)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Mounted buckets have no links; two simultaneous writers are not detected.
        if final.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        os.replace(part, final)


def _sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a loss of power."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _translating_errors(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = _KINDS.get(error.errno or 0, store.UnreachableError)
        raise kind(f"cannot {verb} {path}: {error.strerror or error}") from error
