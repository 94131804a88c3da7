"""Configuration of hosts, and their errors.

CloudError
├── UnreachableHostError   it does not answer: retry later
├── UnfitHostError         it is unsuitable for the job: its owner must act
│   └── MissingSoftwareError   its Python lacks packages
└── AuthError
    └── HostKeyError       its host key is unknown or wrong
UserCodeError
└── SetupError             the user's setup failed on it
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from spottrain.cloud.port.errors import AuthError, CloudError
from spottrain.cloud.port.settings import SlotSettings
from spottrain.errors import UserCodeError


class UnreachableHostError(CloudError):
    """A host does not answer, or not in time."""


class UnfitHostError(CloudError):
    """A host lacks software that the job needs, or differs from the others."""


class MissingSoftwareError(UnfitHostError):
    """Its Python lacks packages that every host needs: the image, and setup, are such."""


class HostKeyError(AuthError):
    """A host's key is unknown, or differs from the known one."""


class SetupError(UserCodeError):
    """The user's setup failed on a host."""


def address_of(manager_url: str) -> tuple[str, int]:
    """Return where a manager listens: its address and port."""
    parts = urlsplit(manager_url)
    return parts.hostname or "", parts.port or 443


FIND_PYTHON = "auto"
"""Instead of a Python: the first of an image's usual ones that has torch, else python3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(SlotSettings):
    """One host, the user's own or rented."""

    name: str
    """Unique in the fleet; made of letters, digits, ``.``, ``_`` and ``-``."""
    address: str
    port: int = 22
    """Of its SSH server; 0: it is not reached by SSH."""
    user: str
    host_key: str | None = None
    """``type base64``, as in known_hosts files; None: from ``known_hosts``."""
    host_keys: tuple[str, ...] = ()
    """All its keys, as its cloud reports them."""
    known_hosts: Path = Path(os.devnull)
    key_file: Path | None = None
    """Private key; if None, keys of an SSH agent and of ``~/.ssh``."""
    python: str = "python3"
    folder: str = ".spottrain"
    """Our folder, relative to the user's home; removed when the host is freed."""
    proxy_jump: str = ""
    """Host through which it is reached, ``[user@]host[:port]``, or several by commas; empty:
    directly."""
    private_address: str | None = None
    """Address for other hosts; if None, the address that SSH used."""
    instance_type: str = "host"
    """Hosts of one type have the same slots, GPUs and price."""
    gpus: int = 0
    """GPUs that a cloud rents it with; 0: an own host, of which nothing is known."""

    @property
    def place(self) -> str:
        """Its name in errors."""
        at = f"{self.address}:{self.port}" if self.port else self.address
        return f"host {self.name} ({at})"


class Calls(Protocol):
    """A connection to a host agent (``on_vm.host_agent``), whatever carries it."""

    @property
    def host(self) -> Host:
        """The host."""

    @property
    def private_address(self) -> str:
        """Address of the host for the others."""

    def call(self, operation: str, timeout_s: float = ..., **arguments: Any) -> Any:
        """Return the result of an operation, as ``session.Session.call``."""

    def unpack(
        self, vm_id: str, name: str, archive: bytes, timeout_s: float, keep: str = ""
    ) -> None:
        """Have an archive unpacked on the host, as ``session.Session.unpack``."""


CLAIM_S = 1800.0
"""A VM that has published nothing within this time is taken for gone."""


class Published:
    """What VMs of a job have left in its store for later ones, as the manager knows it
    from them: whoever else may write there cannot change what later VMs run.

    Args:
        folder: Where it is noted; None: nothing is published.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def digest(self, place: str) -> str:
        """Return the digest of the index at a place; empty: nothing is known of one."""
        if self._folder is None:
            return ""
        try:
            return self._file(self._folder, place).read_text()
        except FileNotFoundError:
            return ""

    def claim(self, place: str) -> bool:
        """Return whether a VM is to publish there, as none does or has lately."""
        if self._folder is None:
            return False
        self._folder.mkdir(exist_ok=True)
        file = self._file(self._folder, place)
        try:
            file.touch(exist_ok=False)
        except FileExistsError:
            if file.stat().st_mtime + CLAIM_S > time.time():
                return False
            os.utime(file)
        return True

    def note(self, place: str, digest: str) -> None:
        """Remember what the VM that had the claim publishes."""
        assert self._folder is not None, "it was claimed"
        self._file(self._folder, place).write_text(digest)

    @staticmethod
    def _file(folder: Path, place: str) -> Path:
        return folder / hashlib.sha256(place.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A job's files and settings, sent to a host before its agent starts."""

    workdir: Path
    """The user's code, packed (tar.gz)."""
    setup: str = ""
    """Shell commands, run once per VM in the unpacked workdir."""
    setup_limit_s: float = 600.0
    data: str = ""
    """Requested data, see ``cloud.data.request.to_json``; none if empty."""
    data_limit_s: float = 3600.0
    buckets: bool = False
    """True if checkpoints or data are in a bucket, which requires obstore."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For setup and workers; may contain secrets."""
    wheels: str = ""
    """Folder or bucket for what ``setup`` downloads, which later VMs take from there;
    empty: none."""
    published: Published = field(default_factory=lambda: Published(None))
    """What VMs have left there."""
    notices: Mapping[str, Any] = field(default_factory=lambda: {"kind": "none"})
    """Source of preemption notices; see ``cloud.notices.hear.open_source``."""

    @property
    def limit_s(self) -> float:
        """Time limit of data and setup together."""
        return self.setup_limit_s + (self.data_limit_s if self.data else 0.0)

    def on_rented(self) -> Payload:
        """Return the payload for rented VMs: pip may install into the system's Python,
        which Ubuntu 23.04 and newer refuse otherwise (PEP 668)."""
        theirs = {"PIP_BREAK_SYSTEM_PACKAGES": "1", **self.environment}
        return replace(self, environment=theirs)
