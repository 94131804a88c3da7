"""Pools on this machine: one folder per pool.

    <home>/pools/<name>/pool.json       the pool file, validated, paths absolute
                        daemon.sock     where the daemon is reached: by whoever may open it

and what ``eventlog.folder`` names. The folder is its owner's alone (mode 0700), and with it
the socket.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from spottrain.errors import ConfigError
from spottrain.eventlog.folder import Folder
from spottrain.files import write_whole
from spottrain.varuna_manager.config.pool import PoolConfig, parse_pool
from spottrain.varuna_manager.pool.core.model import PoolCreated
from spottrain.varuna_manager.pool.store.journal import PoolJournal


@dataclass(frozen=True, slots=True)
class PoolDir(Folder):
    """The folder of one pool."""

    KIND, PROCESS = "pool", "daemon"
    ARGV = ("spottrain.varuna_manager.pool.daemon.main",)
    IF_NONE = "; create one with 'spottrain pool create FILE'"

    @property
    def socket(self) -> Path:
        """Where the daemon is reached."""
        return self.path / "daemon.sock"

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


def create_pool(config: PoolConfig, created: PoolCreated) -> PoolDir:
    """Put a pool on disk, whole or not at all.

    Args:
        config: The pool file.
        created: The first event of its journal.

    Raises:
        ConfigError: The name is in use.
    """
    pool = PoolDir.named(config.name)
    with pool.name_lock(), pool.draft() as draft:
        if pool.path.exists() and not pool.is_down:
            raise ConfigError(
                f"name: there is a pool {pool.name}; see 'spottrain pool status "
                f"{pool.name}', end it with 'spottrain pool down {pool.name}', or choose "
                "another name"
            )
        draft.write(config)
        with closing(PoolJournal(draft.journal)) as journal:
            journal.record(created)
        pool.place(draft)
    return pool
