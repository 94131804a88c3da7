"""One rented VM as the manager sees it: its connection and the state of its start."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from spottrain.cloud import ssh_keys
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import VmNotFoundError
from spottrain.cloud.port.provider import SshTarget, StartStep, Vm
from spottrain.cloud.ssh.hosts.start_log import StartLog
from spottrain.cloud.ssh.transport.bastion import Bastion
from spottrain.cloud.ssh.transport.connection import HostConnection
from spottrain.cloud.ssh.transport.hosts import Host
from spottrain.cloud.ssh.transport.proxy import ProxyCommand, dial_through
from spottrain.cloud.ssh.transport.session import Dial, dial

_MIN_PAUSE_S, _MAX_PAUSE_S = 2.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VmAccess:
    """How to log in to the VMs of a job, on any cloud."""

    key_file: Path
    """The job's private key (``ssh_keys.ensure_key``); the cloud puts the public key on
    the VMs."""
    python: str = "python3"
    """Python 3.11 or newer on the image."""
    folder: str = ".spottrain"
    """Our folder on a VM, relative to the home of the user."""
    bastion: Host | None = None
    """Jump host to VMs without a public address."""
    proxy: ProxyCommand | None = None
    """Tool of the cloud through which VMs are reached."""
    inside: bool = False
    """True if we run on a VM of the job ourselves."""

    def dial(self) -> tuple[Dial, Bastion | None]:
        """Return how to connect to VMs, and the bastion to be closed at the end."""
        if self.proxy is not None:
            return dial_through(self.proxy), None
        if self.bastion is None:
            return dial, None
        bastion = Bastion(self.bastion)
        return bastion.dial, bastion

    def host(self, vm: Vm, target: SshTarget) -> Host:
        """Return a VM as a host."""
        key = self.key_file
        if tags.order_of(vm.intent):
            key = ssh_keys.key_file(key.parent, vm.intent)
        return Host(
            name=vm.vm_id,
            address=target.host,
            port=target.port,
            user=target.user,
            host_keys=target.host_keys,
            key_file=key,
            python=self.python,
            folder=self.folder,
            instance_type=vm.offer.instance_type,
            slots=vm.offer.gpus,
            gpus=0 if vm.offer.device == "cpu" else vm.offer.gpus,
            slot_memory_bytes=vm.offer.gpu_memory_bytes,
            slot_speed=vm.offer.gpu_speed,
            usd_per_hour=vm.offer.usd_per_hour,
        )


@dataclass(eq=False, slots=True)
class RentedVm:
    """A VM; ``connection`` is set once its cloud has reported the address."""

    vm: Vm
    connection: HostConnection | None = None
    target: SshTarget | None = None
    """As its cloud reported it last."""
    start: Future[tuple[StartStep, ...]] | None = None
    poll: Future[None] | None = None
    log: StartLog = field(default_factory=StartLog)
    """Of its start."""
    is_reserved: bool = False
    """True once it is cleared, for other jobs."""
    is_terminated: bool = False
    """True once it has been terminated."""
    manager_address: str = ""
    """Address that its agent was given for calls; empty if none."""
    woken: threading.Event = field(default_factory=threading.Event)
    """Ends every wait."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _users: int = 0
    _ran: bool = False
    _pause_s: float = _MIN_PAUSE_S
    _next_poll_s: float = 0.0

    @property
    def place(self) -> str:
        """Its name in errors."""
        return self.connection.host.place if self.connection else f"VM {self.vm.vm_id}"

    def enter(self, host: Host, dial: Dial) -> HostConnection:
        """Return the connection; a new one if the address has changed."""
        if self.connection is None or self.connection.host != host:
            self.connection = HostConnection(host, dial)
        return self.connection

    def check_not_terminated(self) -> None:
        """Check that it was not terminated meanwhile.

        Raises:
            VmNotFoundError: it was.
        """
        if self.is_terminated:
            raise VmNotFoundError(f"VM {self.vm.vm_id} was terminated")

    def mark_terminated(self) -> None:
        """Mark it as terminated, and end all waits for it."""
        self.is_terminated = True
        self.woken.set()

    @contextlib.contextmanager
    def in_use(self, may_hang_up: Callable[[RentedVm], bool]) -> Iterator[None]:
        """Keep the connection open for a caller; close it afterwards if it is not
        needed.

        Args:
            may_hang_up: Returns True if the manager does not need the connection.
        """
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and self.connection is not None and may_hang_up(self):
                    self.connection.hang_up()

    @property
    def poll_is_due(self) -> bool:
        """True if a poll of its agent is due."""
        if any(x is not None and not x.done() for x in (self.poll, self.start)):
            return False
        return self._ran or time.monotonic() >= self._next_poll_s

    def note_poll(self, *, runs: bool) -> None:
        """Record a poll's result; while no agent runs, polls back off."""
        self._ran = runs
        if runs:
            self._pause_s = _MIN_PAUSE_S
        else:
            self._next_poll_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
