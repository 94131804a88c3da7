"""One rented VM as the manager sees it: how it is entered, and what is under way there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from spottrain.cloud.port.errors import VmNotFoundError
from spottrain.cloud.port.provider import SshTarget, Vm
from spottrain.cloud.ssh.transport.bastion import Bastion
from spottrain.cloud.ssh.transport.connection import HostConnection
from spottrain.cloud.ssh.transport.hosts import Host
from spottrain.cloud.ssh.transport.session import Dial, dial

_MIN_PAUSE_S, _MAX_PAUSE_S = 2.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VmAccess:
    """How the VMs of a job are entered, whichever cloud they are from."""

    key_file: Path
    """Private key; the cloud puts its public half on the VMs."""
    python: str = "python3"
    """Python 3.11 or newer of the image."""
    folder: str = ".spottrain"
    """Ours on a VM, relative to the home of whoever logs in."""
    bastion: Host | None = None
    """What leads to VMs without a public address."""
    inside: bool = False
    """Whether whoever enters is on a VM of the job itself."""

    def dial(self) -> tuple[Dial, Bastion | None]:
        """Return the way to VMs, and what must be closed in the end."""
        if self.bastion is None:
            return dial, None
        bastion = Bastion(self.bastion)
        return bastion.dial, bastion

    def host(self, vm: Vm, target: SshTarget) -> Host:
        """Return a VM as a host."""
        return Host(
            name=vm.vm_id,
            address=target.host,
            port=target.port,
            user=target.user,
            host_keys=target.host_keys,
            key_file=self.key_file,
            python=self.python,
            folder=self.folder,
            instance_type=vm.offer.instance_type,
            slots=vm.offer.gpus,
            slot_memory_bytes=vm.offer.gpu_memory_bytes,
            slot_speed=vm.offer.gpu_speed,
            usd_per_hour=vm.offer.usd_per_hour,
        )


@dataclass(eq=False, slots=True)
class RentedVm:
    """A VM; ``connection`` is there once its cloud has said how it is entered."""

    vm: Vm
    connection: HostConnection | None = None
    start: Future[None] | None = None
    poll: Future[None] | None = None
    doing: str = "waiting for its turn"
    """What the start is at."""
    given_back: bool = False
    """It has been given back."""
    manager_address: str = ""
    """Where its agent was told that calls are taken; empty if it was not."""
    woken: threading.Event = field(default_factory=threading.Event)
    """Ends every pause."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _users: int = 0
    _ran: bool = False
    _pause_s: float = _MIN_PAUSE_S
    _next_poll_s: float = 0.0

    @property
    def place(self) -> str:
        """How errors name it."""
        return self.connection.host.place if self.connection else f"VM {self.vm.vm_id}"

    def enter(self, host: Host, dial: Dial) -> HostConnection:
        """Return the line; a new one if the VM is reached in another way than before."""
        if self.connection is None or self.connection.host != host:
            self.connection = HostConnection(host, dial)
        return self.connection

    def check_not_given_back(self) -> None:
        """Check that it was not given back meanwhile.

        Raises:
            VmNotFoundError: it was.
        """
        if self.given_back:
            raise VmNotFoundError(f"VM {self.vm.vm_id} was given back")

    def mark_given_back(self) -> None:
        """It is given back: whoever waits for it need not any more."""
        self.given_back = True
        self.woken.set()

    @contextlib.contextmanager
    def in_use(self, may_hang_up: Callable[[RentedVm], bool]) -> Iterator[None]:
        """Keep the connection that a caller needs; see afterwards if anybody else does.

        Args:
            may_hang_up: Whether the manager can do without a connection to it.
        """
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if (
                    not self._users
                    and self.connection is not None
                    and may_hang_up(self)
                ):
                    self.connection.hang_up()

    @property
    def poll_is_due(self) -> bool:
        """Whether somebody may look whether its agent runs, and tell it what is new."""
        if any(x is not None and not x.done() for x in (self.poll, self.start)):
            return False
        return self._ran or time.monotonic() >= self._next_poll_s

    def note_poll(self, *, runs: bool) -> None:
        """Note what somebody saw; while no agent runs, looks come ever more rarely."""
        self._ran = runs
        if runs:
            self._pause_s = _MIN_PAUSE_S
        else:
            self._next_poll_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
