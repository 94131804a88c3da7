"""What is known of hosts beforehand, and what can be wrong with them.

CloudError
├── UnreachableHostError   it does not answer: it may later
├── UnfitHostError         it cannot run a job as it is: its owner must act
└── AuthError
    └── HostKeyError       it does not prove to be the host that the user meant
UserCodeError
└── SetupError             the user's own setup failed on it
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spottrain.cloud.port.errors import AuthError, CloudError
from spottrain.errors import UserCodeError


class UnreachableHostError(CloudError):
    """A host does not answer, or not in time."""


class UnfitHostError(CloudError):
    """A host lacks what a job needs, or differs from the others."""


class HostKeyError(AuthError):
    """A host's key is unknown, or not the one that is known."""


class SetupError(UserCodeError):
    """The user's setup failed on a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host, the user's own or rented, and how it is reached."""

    name: str
    """Unique in the fleet; made of letters, digits, ``.``, ``_`` and ``-``."""
    address: str
    port: int = 22
    user: str
    host_key: str | None = None
    """``type base64``, as in a known_hosts file; else ``known_hosts`` must have it."""
    host_keys: tuple[str, ...] = ()
    """All its keys, as the cloud that it is rented from shows them."""
    known_hosts: Path = Path(os.devnull)
    key_file: Path | None = None
    """Private key; else those of an SSH agent and of ``~/.ssh`` are tried."""
    python: str = "python3"
    folder: str = ".spottrain"
    """Ours on the host, relative to the user's home; gone when the host is free."""
    private_address: str | None = None
    """Where other hosts reach it; else the address at which SSH reached it."""
    instance_type: str = "host"
    """Hosts of one type are alike in all that follows."""
    slots: int = 1
    slot_memory_bytes: int = 4_000_000_000
    slot_speed: float = 1.0
    usd_per_hour: float = 0.0

    @property
    def place(self) -> str:
        """How errors name it."""
        return f"host {self.name} ({self.address}:{self.port})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What a host is given before its agent starts."""

    workdir: Path
    """The user's code, packed (tar.gz)."""
    setup: str = ""
    """Shell commands, run once a VM in the unpacked workdir."""
    setup_limit_s: float = 600.0
    data: str = ""
    """What data to bring, see ``cloud.data.request.to_json``; nothing if empty."""
    data_limit_s: float = 3600.0
    buckets: bool = False
    """Whether checkpoints or data are in a bucket, which takes obstore."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For setup and workers; may hold secrets."""
    notices: Mapping[str, Any] = field(default_factory=lambda: {"kind": "none"})
    """Where the agent hears that its VM will be taken; see ``cloud.notices.watch``."""

    @property
    def limit_s(self) -> float:
        """How long a host may be busy with what the user wants done there."""
        return self.setup_limit_s + (self.data_limit_s if self.data else 0.0)

    def on_rented(self) -> Payload:
        """Return it for VMs that are ours alone: pip may add to the system's Python,
        which Ubuntu since 23.04 refuses otherwise (PEP 668)."""
        theirs = {"PIP_BREAK_SYSTEM_PACKAGES": "1", **self.environment}
        return replace(self, environment=theirs)
