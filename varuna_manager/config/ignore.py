"""Which files of a folder are ignored, as ``.gitignore`` has it.

One implementation for Git's files and for ``.spottrainignore``. Patterns are translated by
pathspec; which pattern applies to which file follows gitignore(5): the last that matches in
the deepest file that has one, and nothing below an ignored folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from spottrain.errors import ConfigError

IGNORE_FILE = ".spottrainignore"
"""In any folder of the workdir: what else is not sent, in the syntax of ``.gitignore``. It
goes before Git's files: ``!NAME`` in it sends what they ignore."""
_GIT_FILE = ".gitignore"
_STARS = re.compile(rb"(?<![^/])\*{3,}(?![^/])")
"""For Git the same as two."""
_BOM = b"\xef\xbb\xbf"
_CLASSES = {
    b"[:alnum:]": b"0-9A-Za-z",
    b"[:alpha:]": b"A-Za-z",
    b"[:blank:]": b" \t",
    b"[:digit:]": b"0-9",
    b"[:lower:]": b"a-z",
    b"[:space:]": b" \t\n\r\f\v",
    b"[:upper:]": b"A-Z",
    b"[:xdigit:]": b"0-9A-Fa-f",
}
"""Of POSIX, which pathspec does not know."""


@dataclass(frozen=True)
class Pattern:
    """One line of an ignore file."""

    text: str
    """As it is written."""
    ignores: bool
    """False: it begins with ``!``."""
    folders_only: bool
    """It ends in ``/``."""
    is_name: bool
    """It is a name in any folder, not a path."""
    depth: int
    """Number of names in the paths that it matches; 0: any."""
    regex: re.Pattern[bytes] | None
    """None: it matches nothing."""

    def matches(self, path: bytes, is_folder: bool) -> bool:
        """Return whether this matches an entry itself, not only a folder above it.

        Args:
            path: Relative to the folder of the ignore file.
            is_folder: It is one, and no link.
        """
        if self.regex is None or (self.folders_only and not is_folder):
            return False
        if self.is_name:
            path = path.rpartition(b"/")[2]
        elif self.depth and path.count(b"/") + 1 != self.depth:
            return False
        found = self.regex.search(path)
        return found is not None and not found.groupdict().get("ps_d")


@dataclass(frozen=True)
class PatternFile:
    """The patterns of one ignore file."""

    folder: PurePath
    """Where they apply."""
    patterns: tuple[Pattern, ...]

    def last_match(self, path: PurePath, is_folder: bool) -> Pattern | None:
        """Return the pattern that decides about an entry of the folder, if one does."""
        below = os.fsencode(path.relative_to(self.folder))
        return next((x for x in reversed(self.patterns) if x.matches(below, is_folder)), None)


def parse_patterns(data: bytes) -> tuple[Pattern, ...]:
    """Return the patterns of an ignore file, in its order."""
    lines = data.removeprefix(_BOM).split(b"\n")
    return tuple(
        _pattern(line)
        for text in lines
        if (line := _stripped(text.removesuffix(b"\r"))) and line[:1] != b"#"
    )


def _stripped(line: bytes) -> bytes:
    """Return a line without the spaces at its end that no backslash keeps."""
    bare = line.rstrip(b" ")
    backslashes = len(bare) - len(bare.rstrip(b"\\"))
    return bare + b" " if backslashes % 2 and bare != line else bare


def _pattern(line: bytes) -> Pattern:
    ignores = not line.startswith(b"!")
    text = line if ignores else line[1:]
    folders_only = text.endswith(b"/")
    text = text.removesuffix(b"/")
    text = _STARS.sub(b"**", text)
    names = text.removeprefix(b"/").split(b"/")
    is_name = b"/" not in text
    return Pattern(
        text=os.fsdecode(line),
        ignores=ignores,
        folders_only=folders_only,
        is_name=is_name,
        depth=0 if b"**" in names else len(names),
        regex=_regex(text, is_name) if all(names) else None,
    )


def _regex(text: bytes, is_name: bool) -> re.Pattern[bytes] | None:
    for name, characters in _CLASSES.items():
        text = text.replace(name, characters)
    if is_name:
        text = b"/" + text
    elif text.startswith((b"!", b"#")):
        text = b"\\" + text
    if text[-1:].isspace() and not text.endswith(b"\\ "):
        text = text[:-1] + b"[" + text[-1:] + b"]"  # pathspec would strip it
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            regex = GitIgnoreSpecPattern(text).regex
    except (ValueError, re.error):  # for Git, too, it matches nothing
        return None
    return regex if regex is None else re.compile(regex.pattern, re.DOTALL)


def read_patterns(path: Path) -> tuple[Pattern, ...]:
    """Return the patterns of an ignore file; none if there is no such file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return parse_patterns(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; fix it") from error


class IgnoreRules:
    """The rules for the entries of a folder, read as a walk goes down."""

    def __init__(self, root: Path, defaults: tuple[Pattern, ...] = ()) -> None:
        """Read what Git knows of a folder.

        Args:
            root: The folder; absolute.
            defaults: Patterns that its ``.spottrainignore`` may reverse.
        """
        self._root = root
        self._defaults = defaults
        self._own: dict[Path, PatternFile] = {}
        self._used: set[Pattern] = set(defaults)
        self._git: dict[Path, PatternFile] = {}
        self._outside: list[PatternFile] = []
        self._tracked: frozenset[Path] = frozenset()
        if (repository := _repository_of(root)) is not None:
            self._outside = list(_outer_patterns(repository, root))
            self._tracked = frozenset(_tracked(root))
        self._with_tracked = frozenset(x for y in self._tracked for x in y.parents)

    def enter(self, folder: Path) -> None:
        """Read the ignore files of a folder, given relative to the root."""
        own = read_patterns(self._root / folder / IGNORE_FILE)
        if folder == Path():
            own = self._defaults + own
        git = read_patterns(self._root / folder / _GIT_FILE)
        self._own[folder] = PatternFile(folder, own)
        self._git[folder] = PatternFile(folder, git)

    def own_match(self, path: Path, is_folder: bool) -> Pattern | None:
        """Return the pattern of ``.spottrainignore`` that decides about an entry, if any.

        Args:
            path: Relative to the root; the folders above it were entered.
            is_folder: It is one, and no link.
        """
        found = _deepest_match(self._own, path, is_folder)
        if found is not None:
            self._used.add(found)
        return found

    def git_ignores(self, path: Path, is_folder: bool, *, below_ignored: bool = False) -> bool:
        """Return whether Git ignores an entry; it never ignores what it tracks."""
        if path in self._tracked:
            return False
        if below_ignored:
            return True
        match = _deepest_match(self._git, path, is_folder)
        for file in () if match else self._outside:
            match = match or file.last_match(self._root / path, is_folder)
        return match is not None and match.ignores

    def has_tracked(self, folder: Path) -> bool:
        """Return whether Git tracks a file below a folder."""
        return folder in self._with_tracked

    def unused(self) -> Iterator[tuple[PurePath, str]]:
        """Yield the patterns of ``.spottrainignore`` that matched nothing, with its path."""
        for folder, file in self._own.items():
            for pattern in file.patterns:
                if pattern not in self._used:
                    yield folder / IGNORE_FILE, pattern.text


def _deepest_match(files: dict[Path, PatternFile], path: Path, is_folder: bool) -> Pattern | None:
    found = (files[one].last_match(path, is_folder) for one in path.parents)
    return next((match for match in found if match is not None), None)


def _repository_of(folder: Path) -> Path | None:
    """Return the top folder of the Git repository that a folder belongs to, if any."""
    tops = (one for one in (folder, *folder.parents) if (one / ".git").exists())
    return next(tops, None)


def _outer_patterns(top: Path, folder: Path) -> Iterator[PatternFile]:
    """Yield the files of patterns outside of a folder that Git applies, nearest first."""
    for one in folder.parents:
        if one == top or top in one.parents:
            yield PatternFile(one, read_patterns(one / _GIT_FILE))
    yield PatternFile(top, read_patterns(_git_folder(top) / "info" / "exclude"))
    configured = git(folder, "config", "--type=path", "--get", "core.excludesFile")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    excludes = Path(configured.removesuffix("\n")) if configured else config / "git" / "ignore"
    yield PatternFile(top, read_patterns(top / excludes))


def _git_folder(top: Path) -> Path:
    """Return where a repository keeps what all its worktrees share."""
    folder = top / ".git"
    if folder.is_file():  # of a worktree or a submodule
        content = os.fsdecode(folder.read_bytes())
        folder = top / content.removeprefix("gitdir:").strip()
    common = folder / "commondir"
    if common.is_file():
        return folder / os.fsdecode(common.read_bytes()).strip()
    return folder


def _tracked(folder: Path) -> Iterator[Path]:
    """Yield the paths below a folder that Git tracks, where there is the command git."""
    return (Path(x) for x in git(folder, "ls-files", "-z").split("\0") if x)


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints; nothing if it fails or there is none."""
    git = shutil.which("git")
    if git is None:
        return ""
    hooked = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # set where a hook runs
    environment = {k: v for k, v in os.environ.items() if k not in hooked}
    done = subprocess.run(
        [git, "-C", folder, *arguments],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
    )
    return os.fsdecode(done.stdout) if done.returncode == 0 else ""
