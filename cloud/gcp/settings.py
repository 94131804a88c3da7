"""What a user may say about their GCP project."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spottrain.units import DAY_S

IMAGE = (
    "projects/deeplearning-platform-release/global/images/family/"
    "common-cu129-ubuntu-2404-nvidia-580"
)
"""Google's own image with NVIDIA's driver and CUDA; Python 3.12, no torch."""

PriceOf = Callable[[str, str, bool], float | None]
"""(region, instance type, spot) -> USD per hour, None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcpSettings:
    """Where and how machines are rented."""

    project: str
    """The project's id."""
    instance_types: tuple[str, ...]
    """What may be rented, as the catalogue names it: ``a2-highgpu-1g``, or
    ``n1-standard-8+1xT4`` where GPUs are attached."""
    regions: tuple[str, ...] = ("us-central1",)
    zones: tuple[str, ...] = ()
    """Only these zones; all of the regions if empty."""
    image: str = IMAGE
    """``projects/P/global/images/NAME``, or ``.../images/family/FAMILY`` for the newest
    of a family."""
    user: str = "spottrain"
    """Whom SSH logs in as; the guest agent of the image makes the account."""
    ssh_port: int = 22
    """Where the image's SSH server listens."""
    disk_gib: int = 200
    network: str = ""
    """Name of an existing network of the project; else one of the job's own."""
    subnetworks: Mapping[str, str] = field(default_factory=dict)
    """Name of an existing subnet by region, for every region where ``network`` has no
    automatic ones."""
    network_tags: tuple[str, ...] = ()
    """Tags that existing firewall rules let through; else rules of the job's own."""
    public_key: str = ""
    """In OpenSSH's format; becomes the VMs' only key. No key if empty."""
    ssh_from: tuple[str, ...] = ()
    """Networks (CIDR) from which our own rule lets SSH in: where the manager is."""
    public_addresses: bool = True
    """Whether VMs get a public address; False: they are reached inside the network."""
    inside: bool = False
    """Whether whoever asks is in the VMs' network: they are entered at their private
    addresses, whatever others they have."""
    service_account: str = ""
    """Email of the VMs' service account. One that may delete instances lets a VM
    that hears no manager delete itself; else it switches itself off."""
    max_run_s: float = 7 * DAY_S
    """Google deletes a VM so long after its start, whatever happens; 30 s to 120
    days."""
    endpoint: str = ""
    """Another address than Compute Engine's own."""
    patience_s: float = 60.0
    """How long the SDK goes on about a throttled, lost or broken call; 0: it does
    not."""
    answer_s: float = 30.0
    """How long Google may take to answer a call."""
    launch_s: float = 100.0
    """How long a launch waits for its machines before it is asked about again."""
