"""The user's workdir: which files are sent to VMs, their hash, and the archive."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from spottrain.errors import ConfigError
from spottrain.eventlog.folder import home
from spottrain.storage.store import local_folder
from spottrain.varuna_manager.config.ignore import (
    IGNORE_FILE,
    IgnoreRules,
    PatternFile,
    git,
    parse_patterns,
)
from spottrain.varuna_manager.format import size
from spottrain.varuna_manager.jobs.folder import COMMIT
from spottrain.wire.model import LAYOUT_FILE

MAX_BYTES = 512 * 1024**2
"""Largest accepted workdir; datasets belong elsewhere."""

_LEFT_OUT = parse_patterns(
    b"""
.git
.hg
.hypothesis/
.mypy_cache/
.pytest_cache/
.ruff_cache/
.tox/
.env/
.venv/
__pycache__/
node_modules/
venv/
"""
)
"""Not sent unless the ignore file lists them with ``!``."""
_SECRETS = PatternFile(
    PurePath(),
    parse_patterns(b"""
.env
.env.*
*.env
.envrc
!.env.example
!.env.sample
!.env.template
!.env.dist
id_rsa*
id_dsa*
id_ecdsa*
id_ed25519*
!*.pub
*.pem
*.key
*.ppk
*.p12
*.pfx
*.jks
*.keystore
*.kdbx
.ssh/
.aws/
.azure/
.gcloud/
.gnupg/
.kube/
kubeconfig
.docker/
.huggingface/
.kaggle/
kaggle.json
.netrc
_netrc
.pgpass
.my.cnf
.npmrc
.pypirc
.boto
.s3cfg
.htpasswd
.git-credentials
.vault-token
.databrickscfg
*credentials
*credentials.json
*credentials.csv
*credentials.txt
*credentials.ini
*credentials.toml
*credentials.y*ml
client_secret*.json
service[-_]account*.json
*secret
*secrets
*secret.json
*secrets.json
*secret.txt
*secrets.txt
*secrets.toml
*secrets.ini
*secret.y*ml
*secrets.y*ml
token
.token
*[-_.]token
token.json
token.txt
*[-_]token.json
*[-_]token.txt
*api[-_]key
*apikey
*api[-_]key.txt
*apikey.txt
*accesskeys.csv
rootkey.csv
key.json
*[-_]key.json
*.tfstate
*password
*password.txt
*passwords.txt
"""),
)
"""Names, in lower case, under which keys and tokens are kept: not sent unless the ignore
file lists them with ``!``."""
_NAMED = 10
"""Names that a line shows at most."""


@dataclass(frozen=True)
class Sent:
    """What of a workdir is sent to VMs."""

    workdir: Path
    sizes: Mapping[Path, int]
    """Bytes of each file, by its path in the workdir; sorted."""
    withheld: tuple[Path, ...]
    """Files and folders that are not sent because of their names."""
    unused: tuple[tuple[PurePath, str], ...]
    """Patterns of ignore files that match nothing, with the file's path in the workdir."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    def lines(self) -> Iterator[str]:
        """Yield what a person should know of it before it is sent."""
        largest = _largest(self.sizes)
        yield (
            f"workdir: {_files(len(self.sizes))}, {size(self.total_bytes)}, go to "
            "each VM" + (f"; the largest: {largest}" if largest else "")
        )
        if self.withheld:
            yield (
                f"workdir: not sent, as keys and tokens have such names: "
                f"{_listed([str(path) for path in self.withheld])}; to send one, write !NAME "
                f"into {IGNORE_FILE}"
            )
        if self.unused:
            patterns = _listed([f"{text} ({path})" for path, text in self.unused])
            yield f"workdir: patterns that match nothing that could be sent: {patterns}"


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _largest(sizes: Mapping[Path, int]) -> str:
    top = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:3]
    return ", ".join(f"{path} ({size(sizes[path])})" for path in top)


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def check_entrypoint(sent: Sent, entrypoint: str) -> None:
    """Check that the entrypoint's file, if it is one of the workdir, is sent.

    Raises:
        ConfigError: It stays here.
    """
    module = Path(*entrypoint.partition(":")[0].split("."))
    for file in (module.with_suffix(".py"), module / "__init__.py"):
        if (sent.workdir / file).is_file() and file not in sent.sizes:
            raise ConfigError(
                f"entrypoint: {file} is not sent to VMs: Git or {IGNORE_FILE} ignores it; "
                f"write !{file} into {IGNORE_FILE}, after the patterns that are there"
            )


def packed_files(workdir: Path, checkpoints: str | None = None) -> list[Path]:
    """Return the files that are sent: relative paths, sorted. See ``survey``."""
    return list(survey(workdir, checkpoints).sizes)


def survey(workdir: Path, checkpoints: str | None = None) -> Sent:
    """Return what of a workdir is sent: what neither Git nor its ignore files ignore.

    The state directory and the job's checkpoints may be folders of it: they are not sent.

    Args:
        workdir: The user's.
        checkpoints: Where the job keeps its checkpoints, a folder or a URL.

    Raises:
        ConfigError: It is too large, a folder cannot be read, or a link leads out of it.
    """
    found: dict[Path, int] = {}
    withheld: list[Path] = []
    ours = {home().resolve(), Path(local_folder(checkpoints or "") or "/").resolve()}
    root = workdir.absolute()
    rules = IgnoreRules(root, _LEFT_OUT)
    folders = [(Path(), False)]  # and whether Git ignores them
    while folders:
        folder, ignored = folders.pop()
        rules.enter(folder)
        for entry in _entries(root / folder):
            path = folder / entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if os.path.isdir(entry.path) and Path(entry.path).resolve() in ours:
                continue
            if path == Path(LAYOUT_FILE):  # ours, in one that was sent before
                continue
            match = rules.own_match(path, is_folder)
            if match is None and _is_secret(path, is_folder):
                withheld.append(path)
                continue
            is_ignored = (
                rules.git_ignores(path, is_folder, below_ignored=ignored)
                if match is None
                else match.ignores
            )
            if is_folder:
                if not is_ignored or (match is None and rules.has_tracked(path)):
                    folders.append((path, is_ignored))
            elif not is_ignored and _can_be_sent(entry, root):
                with contextlib.suppress(FileNotFoundError):  # it is gone since
                    found[path] = entry.stat(follow_symlinks=False).st_size
    sent = Sent(
        workdir=workdir,
        sizes=dict(sorted(found.items())),
        withheld=tuple(sorted(withheld)),
        unused=tuple(rules.unused()),
    )
    if sent.total_bytes > MAX_BYTES:
        raise ConfigError(
            f"workdir: {workdir} holds {size(sent.total_bytes)}, at most "
            f"{size(MAX_BYTES)} can be sent: the largest: {_largest(sent.sizes)}; move data "
            f"out of it, or name it in {IGNORE_FILE}"
        )
    return sent


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with _reading(folder), os.scandir(str(folder)) as entries:
        return list(entries)


def _is_secret(path: Path, is_folder: bool) -> bool:
    name = PurePath(path.name.lower())
    match = _SECRETS.last_match(name, is_folder)
    return match is not None and match.ignores and match.folders_only == is_folder


def _can_be_sent(entry: os.DirEntry[str], workdir: Path) -> bool:
    """Return whether a file is of use on another machine: no socket and no pipe.

    Raises:
        ConfigError: It is a link that leads out of the workdir.
    """
    if entry.is_symlink():
        _check_link(Path(entry.path), workdir)
        return True
    return entry.is_file()


def _check_link(path: Path, workdir: Path) -> None:
    target = os.readlink(path)
    inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(workdir))
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
            content = os.fsencode(os.readlink(path)) if is_link else path.read_bytes()
        digest.update(b"%b\0%d\0" % (os.fsencode(file), len(content)))
        digest.update(content)
    return digest.hexdigest()


def pack(workdir: Path, files: list[Path], target: Path, layout: Path | None = None) -> int:
    """Write ``files`` of ``workdir`` to ``target`` (tar.gz), reproducibly.

    Args:
        workdir: The user's.
        files: As ``packed_files`` returns.
        layout: What inspect has kept for supervisors (``LAYOUT_FILE``).

    Returns:
        The size of the package in bytes.

    Raises:
        ConfigError: A file cannot be read.
    """
    with (
        open(target, "wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", pax_headers=_commit(workdir)) as archive,
    ):
        for file in files:
            _add(archive, workdir / file, file.as_posix())
        if layout is not None and layout.exists():
            _add(archive, layout, LAYOUT_FILE)
    return target.stat().st_size


def _commit(workdir: Path) -> dict[str, str]:
    """Return the header with the commit of the code; empty: none is known. It ends with
    ``-dirty`` where files that Git tracks have changed since."""
    asked = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    commit = git(workdir, *asked).strip()
    return {COMMIT: commit} if commit else {}


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Add a file as it is when it is read: it may grow or shrink meanwhile."""
    with _reading(path):
        member = _anonymous(archive.gettarinfo(path, name))
        content = path.read_bytes() if member.isreg() else b""
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


@contextlib.contextmanager
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
