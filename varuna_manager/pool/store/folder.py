"""Pools on this machine: one folder per pool.

    <home>/pools/<name>/pool.json       the pool file, validated, paths absolute
                        journal.sqlite  all events
                        daemon.lock     held by the running daemon, with its pid
                        daemon.sock     where it is reached: by whoever may open it
                        daemon.log

The folder is its owner's alone (mode 0700), and with it the socket.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from spottrain.errors import ConfigError
from spottrain.files import write_whole
from spottrain.varuna_manager.config.pool import PoolConfig, parse_pool
from spottrain.varuna_manager.jobs.folder import home, is_folder_name, is_locked


@dataclass(frozen=True, slots=True)
class PoolDir:
    """The folder of one pool."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the pool."""
        return self.path.name

    @property
    def journal(self) -> Path:
        """The journal of the pool's events."""
        return self.path / "journal.sqlite"

    @property
    def log(self) -> Path:
        """The daemon's log."""
        return self.path / "daemon.log"

    @property
    def lock(self) -> Path:
        """Held by the daemon while it runs."""
        return self.path / "daemon.lock"

    @property
    def socket(self) -> Path:
        """Where the daemon is reached."""
        return self.path / "daemon.sock"

    @property
    def page(self) -> Path:
        """The report as an HTML page, unless another file is named."""
        return self.path / "report.html"

    def config(self) -> PoolConfig:
        """Return the pool's configuration.

        Raises:
            ConfigError: It is missing or damaged.
        """
        try:
            text = (self.path / "pool.json").read_text(encoding="utf-8")
            return parse_pool(json.loads(text), self.name)
        except (OSError, ValueError) as error:
            raise ConfigError(f"pool {self.name}: pool.json: {error}") from error

    def write(self, config: PoolConfig) -> None:
        """Store the pool's configuration."""
        write_whole(self.path / "pool.json", config.model_dump_json(indent=2))

    @property
    def is_down(self) -> bool:
        """True if ``spottrain pool down`` has ended the pool."""
        return (self.path / "down").exists()

    def mark_down(self) -> None:
        """Record that the pool has been ended for good."""
        (self.path / "down").touch()

    def is_served(self) -> bool:
        """Return whether a daemon of this pool runs: it holds the lock while it does."""
        return is_locked(self.lock)


def pool_dir(name: str) -> PoolDir:
    """Return the folder of a pool, which need not exist."""
    return PoolDir(home() / "pools" / name)


def find_pool(name: str) -> PoolDir:
    """Return the folder of an existing pool.

    Raises:
        ConfigError: There is none.
    """
    if is_folder_name(name) and (pool := pool_dir(name)).journal.exists():
        return pool
    known = ", ".join(pool.name for pool in all_pools()) or "none"
    raise ConfigError(
        f"no pool {name} on this machine; those in {home() / 'pools'}: {known}; create one "
        "with 'spottrain pool create FILE'"
    )


def all_pools() -> list[PoolDir]:
    """Return all pools of this machine, sorted by name."""
    folders = (home() / "pools").glob("[!.]*/journal.sqlite")
    return [PoolDir(journal.parent) for journal in sorted(folders)]


def create_pool(config: PoolConfig) -> PoolDir:
    """Put a pool on disk, whole or not at all; its journal is still empty.

    A pool of the same name that was taken down is kept as ``<name>.1``, ``<name>.2``, …

    Raises:
        ConfigError: The name is in use.
    """
    pool = pool_dir(config.name)
    pool.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(pool.path.parent / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if pool.path.exists() and not pool.is_down:
            raise ConfigError(
                f"name: there is a pool {pool.name}; see 'spottrain pool status "
                f"{pool.name}', end it with 'spottrain pool down {pool.name}', or choose "
                "another name"
            )
        if pool.path.exists():
            number = 1
            while (free := pool.path.with_name(f"{pool.name}.{number}")).exists():
                number += 1
            pool.path.rename(free)
        folder = Path(tempfile.mkdtemp(prefix=f".{pool.name}-", dir=pool.path.parent))
        try:
            os.chmod(folder, 0o700)
            draft = PoolDir(folder)
            draft.write(config)
            draft.journal.touch(mode=0o600)
            folder.rename(pool.path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return pool
