"""The folder of one that decides: its journal, and the process that alone writes it.

The state directory is the XDG one (``SPOTTRAIN_HOME`` overrides it):

    <home>/<kind>s/<name>/journal.sqlite
                          <process>.lock   held while the process runs, with its pid
                          <process>.log
                          report.html      once it is over, or when it is asked for
                          down             once it was ended for good
    <home>/locks/<name>                    held while one of that name is put on disk

One that was ended for good, whose name another takes, is kept as ``<name>.1``, ``<name>.2``, …
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from platformdirs import user_state_path

from spottrain.errors import ConfigError, SpottrainError
from spottrain.files import locked

LOCK_S = 2.0
"""How long to wait for a lock that a command may hold for a moment."""
POLL_S = 0.02


def home() -> Path:
    """Return the state directory; ``SPOTTRAIN_HOME`` overrides the XDG one."""
    if override := os.environ.get("SPOTTRAIN_HOME"):
        return Path(override).expanduser().absolute()
    return user_state_path("spottrain")


def is_folder_name(name: str) -> bool:
    """Return whether a folder may have this name."""
    return 0 < len(name) < 100 and not name.startswith(".") and "/" not in name


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder, which need not exist; a class of them says what is in it."""

    path: Path

    KIND: ClassVar[str]
    """Of what decides, such as ``job``."""
    PROCESS: ClassVar[str]
    """What its process is called."""
    ARGV: ClassVar[tuple[str, ...]]
    """What Python runs as its process; the folder is appended."""
    IF_NONE: ClassVar[str] = ""
    """What to do where there is none of a name."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.path.name

    @property
    def journal(self) -> Path:
        """The journal of its events."""
        return self.path / "journal.sqlite"

    @property
    def lock(self) -> Path:
        """Held by its process."""
        return self.path / f"{self.PROCESS}.lock"

    @property
    def log(self) -> Path:
        """The log of its process."""
        return self.path / f"{self.PROCESS}.log"

    @property
    def page(self) -> Path:
        """The report as an HTML page."""
        return self.path / "report.html"

    @property
    def is_down(self) -> bool:
        """True if it was ended for good."""
        return (self.path / "down").exists()

    def mark_down(self) -> None:
        """Record that it has been ended for good."""
        (self.path / "down").touch()

    # --- Its process ----------------------------------------------------------------------

    def is_managed(self) -> bool:
        """Return whether its process runs: it holds the lock while it does."""
        try:
            with open(self.lock, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @contextlib.contextmanager
    def locked(
        self, refusal: SpottrainError, wait_s: float = LOCK_S, *, as_process: bool = True
    ) -> Iterator[None]:
        """Hold the lock.

        Args:
            refusal: What to raise where another process holds it.
            wait_s: For how long it is waited for.
            as_process: Whether this is its process, whose pid the lock's file then has.

        Raises:
            SpottrainError: ``refusal``.
        """
        with open(self.lock, "ab") as lock:
            give_up_at_s = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    # A process that checks for a holder holds the lock for a moment.
                    if time.monotonic() > give_up_at_s:
                        raise refusal from error
                time.sleep(POLL_S)
            lock.truncate(0)
            if as_process:
                lock.write(b"%d" % os.getpid())
                lock.flush()
            yield

    def command(self, *options: str) -> list[str]:
        """Return the command that runs its process; ``-P`` keeps the folder out of
        ``sys.path``."""
        return [sys.executable, "-P", "-m", *self.ARGV, str(self.path), *options]

    def start(self, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start its process, detached from this terminal.

        Args:
            environment: Of the process; by default of this one.
        """
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.path,
                env=environment,
                start_new_session=True,
            )

    def last_words(self) -> str:
        """Return the last line that its process has logged, without the causes of it."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return ([line for line in lines if " caused by: " not in line] or ["no message"])[-1]

    # --- Names ----------------------------------------------------------------------------

    @classmethod
    def all(cls) -> list[Self]:
        """Return all of this kind on this machine, sorted by name."""
        journals = (home() / f"{cls.KIND}s").glob("[!.]*/journal.sqlite")
        return [cls(journal.parent) for journal in sorted(journals)]

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the one of a name; it need not exist."""
        return cls(home() / f"{cls.KIND}s" / name)

    @classmethod
    def find(cls, name: str) -> Self:
        """Return the one of a name.

        Raises:
            ConfigError: There is none.
        """
        if is_folder_name(name) and (found := cls.named(name)).journal.exists():
            return found
        known = ", ".join(one.name for one in cls.all()) or "none"
        raise ConfigError(
            f"no {cls.KIND} {name} on this machine; those in {home() / f'{cls.KIND}s'}: "
            f"{known}{cls.IF_NONE}"
        )

    @contextlib.contextmanager
    def name_lock(self) -> Iterator[None]:
        """Hold the lock on the name: nobody else can put one of that name on disk."""
        locks = self.path.parent.with_name("locks")
        locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(locks / self.name):
            yield

    @contextlib.contextmanager
    def draft(self) -> Iterator[Self]:
        """Yield a folder of the owner's alone, to be put in place; removed if it is not."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f".{self.name}-", dir=self.path.parent)
        try:
            yield type(self)(Path(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def place(self, draft: Folder) -> str:
        """Put a draft here; return the new name of what was here, which has ended for good."""
        former = ""
        if self.path.exists():
            self.mark_down()
            number = 1
            while (free := self.path.with_name(f"{self.name}.{number}")).exists():
                number += 1
            self.path.rename(free)
            former = free.name
        draft.path.rename(self.path)
        return former
