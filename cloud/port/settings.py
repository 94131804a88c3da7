"""Settings of an account and of VMs that every cloud has, and of own machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spottrain.cloud.port.provider import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSettings:
    """What the user says of the workers of a machine of their own."""

    slots: int = 1
    gpu: str = ""
    """Name of its GPUs; empty: it is not said."""
    uses_gpus: bool = True
    """False: its slots are CPU slots, whatever GPUs it has."""
    slot_memory_bytes: int = 4_000_000_000
    slot_speed: float = 1.0
    usd_per_hour: float = 0.0
    """Price of the machine."""

    def offer(self, cloud: str, zone: str, instance_type: str, now_s: float) -> Offer:
        """Return the offer of such machines, in a cloud that is its only region."""
        return Offer(
            cloud=cloud,
            region=cloud,
            zone=zone,
            instance_type=instance_type,
            spot=True,  # its owner may take it at any time
            usd_per_hour=self.usd_per_hour,
            observed_at_s=now_s,
            gpus=self.slots,
            gpu_memory_bytes=self.slot_memory_bytes,
            gpu_speed=self.slot_speed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudSettings:
    """Settings of the account and of VMs; plain values, which become JSON."""

    instance_types: tuple[str, ...]
    """Types that may be rented, as the catalogue names them."""
    zones: tuple[str, ...] = ()
    """Zones to use, as offers name them; empty: all of the regions."""
    ssh_port: int = 22
    """Port of the SSH server on the image."""
    disk_gib: int = 200
    public_key: str = ""
    """The key that VMs let in, in OpenSSH's format; empty: none."""
    ssh_from: tuple[str, ...] = ()
    """Networks (CIDR) from which our own rules allow SSH, such as the manager's."""
    public_addresses: bool = True
    """VMs get public addresses; False: they are reached inside the network."""
    inside: bool = False
    """The manager is in the VMs' network and uses their private addresses."""
    attached_usd_per_hour: float = 0.0
    """Price of a VM's disk and public address, added to that of the machine."""
    uid: str = ""
    """Unique id of the job; empty: only resources without one are looked for."""
    owner: str = ""
    """Who rents, as VMs' tags say; empty: the principal of the credentials."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """The user's own tags (on GCP: labels), on all resources."""
    answer_s: float = 30.0
    """Timeout of an answer."""
