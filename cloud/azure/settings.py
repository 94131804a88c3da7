"""Settings of an Azure subscription."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

IMAGE = "microsoft-dsvm:ubuntu-hpc:2404:latest"
"""Microsoft's own image with NVIDIA's driver, CUDA and NCCL."""
MANAGEMENT_URL = "https://management.azure.com"
PRICES_URL = "https://prices.azure.com"
PRICES_VARIABLE = "SPOTTRAIN_AZURE_PRICES_URL"
"""Environment variable: another URL, such as a proxy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureSettings:
    """Settings of the subscription and of VMs."""

    instance_types: tuple[str, ...]
    """Sizes that may be rented, such as ``Standard_NC24ads_A100_v4``."""
    subscription: str = ""
    """Id of the subscription; by default AZURE_SUBSCRIPTION_ID."""
    regions: tuple[str, ...] = ("eastus",)
    """As ARM names them."""
    zones: tuple[str, ...] = ()
    """Zones to use, such as ``eastus-1``; empty: all of the regions."""
    resource_group: str = ""
    """An existing resource group; empty: one per job, removed with its content."""
    image: str = IMAGE
    """``publisher:offer:sku:version`` or an image's resource id."""
    user: str = "spottrain"
    """SSH user; the account is created at boot."""
    ssh_port: int = 22
    """Port of the SSH server on that image."""
    disk_gib: int = 200
    subnets: Mapping[str, str] = field(default_factory=dict)
    """Resource id of an existing subnet by region; by default our own."""
    public_key: str = ""
    """Public key in OpenSSH's format; required by Azure."""
    ssh_from: tuple[str, ...] = ()
    """Networks (CIDR) from which our own rules allow SSH, such as the manager's."""
    public_addresses: bool = True
    """VMs get public addresses; False requires ``subnets``."""
    inside: bool = False
    """The manager is in the VMs' network and uses their private addresses."""
    max_usd_per_hour: float | None = None
    """Maximum spot price; None: the on-demand price (no eviction for price)."""
    identity: str = ""
    """Resource id of a managed identity that may delete the VMs; empty: our own, in our
    own resource group."""
    self_delete: bool = True
    """A VM without a manager deletes itself, which requires an identity. A shutdown
    alone does not end billing."""
    attached_usd_per_hour: float = 0.0
    """Price of a VM's disk and public address, added to that of the machine."""
    uid: str = ""
    """Unique id of the job; empty: only resources without one are looked for."""
    owner: str = ""
    """Who rents, as VMs' tags say; empty: the principal of the credentials."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """The user's own tags, on all resources."""
    endpoint_url: str = MANAGEMENT_URL
    """URL of Azure Resource Manager."""
    authority_url: str = ""
    """URL of the token service; empty: the public cloud's."""
    prices_url: str = PRICES_URL
    """URL of the Retail Prices API."""
    ca_file: str = ""
    """CA certificates (PEM) instead of the default ones, for a proxy."""
    tries: int = 5
    """Attempts per call, including the first."""
    answer_s: float = 30.0
    """Timeout of an answer."""
    poll_s: float = 5.0
    """Poll interval of long operations, unless Azure gives one."""
    allocation_s: float = 60.0
    """Time limit of the allocation; a VM undecided then counts as created."""
    removal_s: float = 540.0
    """How long ``release`` waits for removals."""
