"""Brings archives to VMs: once per region from here, from VM to VM within it.

A laptop's uplink would else carry our software and the workdir to every VM.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.ssh.hosts.bootstrap import send
from spottrain.cloud.ssh.rented.vm import RentedVm
from spottrain.cloud.ssh.transport.conversation import CALL_S
from spottrain.cloud.ssh.transport.hosts import Calls

logger = logging.getLogger(__name__)

_TRIES = 2
"""VMs that are asked before an archive is sent from here."""


@dataclass
class _Copies:
    """The VMs of one region that have one archive."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the first of them is sent it: the others wait for that."""
    vms: list[RentedVm] = field(default_factory=list)


class ArchiveSharing:
    """Knows which VMs have which archive.

    Args:
        may_hang_up: See ``RentedVm.in_use``.
    """

    def __init__(self, may_hang_up: Callable[[RentedVm], bool]) -> None:
        self._may_hang_up = may_hang_up
        self._lock = threading.Lock()
        self._copies: defaultdict[tuple[str, str], _Copies] = defaultdict(_Copies)

    def deliver(self, rented_vm: RentedVm, session: Calls, name: str, archive: bytes) -> str:
        """Bring an archive to a VM and have it unpacked there.

        Args:
            session: The connection to it.
            name: Folder there.

        Returns:
            Where it has it from: the id of a VM, or ``manager``.

        Raises:
            CloudError: it cannot be sent.
        """
        digest = hashlib.sha256(archive).hexdigest()
        with self._lock:
            copies = self._copies[rented_vm.vm.offer.region, digest]
        vm_id = rented_vm.vm.vm_id
        with copies.lock:
            copies.vms = [vm for vm in copies.vms if not vm.is_terminated]
            holders = [vm for vm in copies.vms if vm is not rented_vm]
            if not holders:
                send(session, vm_id, name, archive, digest)
                copies.vms.append(rented_vm)
                return "manager"
        for holder in holders[:_TRIES]:
            reason = self._fetch(holder, session, vm_id, name, digest)
            if not reason:
                with copies.lock:
                    copies.vms.append(rented_vm)
                return holder.vm.vm_id
            logger.info("%s: %s not from %s: %s", vm_id, name, holder.vm.vm_id, reason)
            with copies.lock:
                copies.vms = [vm for vm in copies.vms if vm is not holder]
        send(session, vm_id, name, archive, digest)
        with copies.lock:
            copies.vms.append(rented_vm)
        return "manager"

    def _fetch(self, holder: RentedVm, session: Calls, vm_id: str, name: str, digest: str) -> str:
        """Have a VM fetch an archive from another one; return why it could not."""
        connection = holder.connection
        if connection is None:
            return "it was never reached"
        try:
            with holder.in_use(self._may_hang_up):
                there = connection.session()
                url = there.call(
                    "share",
                    vm_id=holder.vm.vm_id,
                    digest=digest,
                    address=there.private_address,
                )
                reason: str = session.call(
                    "receive", CALL_S, vm_id=vm_id, name=name, url=url, digest=digest
                )
        except CloudError as error:
            return str(error)
        return reason
