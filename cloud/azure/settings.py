"""What a user may say about their Azure subscription."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

IMAGE = "microsoft-dsvm:ubuntu-hpc:2404:latest"
"""Microsoft's own image with NVIDIA's driver, CUDA and NCCL."""
MANAGEMENT_URL = "https://management.azure.com"
PRICES_URL = "https://prices.azure.com"
PRICES_VARIABLE = "SPOTTRAIN_AZURE_PRICES_URL"
"""In the environment: another address, such as a proxy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureSettings:
    """Where and how machines are rented."""

    instance_types: tuple[str, ...]
    """What may be rented, such as ``Standard_NC24ads_A100_v4``."""
    subscription: str = ""
    """Id of the subscription that pays; else AZURE_SUBSCRIPTION_ID."""
    regions: tuple[str, ...] = ("eastus",)
    """As ARM names them."""
    zones: tuple[str, ...] = ()
    """Only these, such as ``eastus-1``; all of the regions if empty."""
    resource_group: str = ""
    """An existing one; else one for each job, removed with all that is in it."""
    image: str = IMAGE
    """``publisher:offer:sku:version`` or an image's resource id."""
    user: str = "spottrain"
    """Whom SSH logs in as; the account is made at boot."""
    ssh_port: int = 22
    """Where that image's SSH server listens."""
    disk_gib: int = 200
    subnets: Mapping[str, str] = field(default_factory=dict)
    """Resource id of a subnet by region, its rules yours; else one of our own."""
    public_key: str = ""
    """In OpenSSH's format; Azure makes no VM without one."""
    ssh_from: tuple[str, ...] = ()
    """Networks (CIDR) from which our own rules let SSH in: where the manager is."""
    public_addresses: bool = True
    """Whether VMs get a public address; False: takes ``subnets``."""
    inside: bool = False
    """Whether whoever asks is in the VMs' network: they are entered at their private
    addresses, whatever others they have."""
    max_usd_per_hour: float | None = None
    """Above this price a spot VM is neither made nor kept; None: the on-demand price,
    and none is taken for its price."""
    identity: str = ""
    """Resource id of a managed identity that may delete the VMs; else one of our own
    where the resource group is one of our own."""
    self_delete: bool = True
    """Whether a VM that hears no manager deletes itself, which takes an identity. A
    mere shutdown does not end billing."""
    endpoint_url: str = MANAGEMENT_URL
    """Where Azure Resource Manager answers."""
    authority_url: str = ""
    """Where tokens are had, such as another cloud's; else Azure's own."""
    prices_url: str = PRICES_URL
    """Where the Retail Prices API answers."""
    ca_file: str = ""
    """Certificates (PEM) to trust instead of the usual ones, for a proxy."""
    tries: int = 5
    """Calls, the first included, before the SDK gives up on a throttled or lost one."""
    answer_s: float = 30.0
    """How long Azure may take to answer a call."""
    poll_s: float = 5.0
    """From one look at a long operation to the next, where Azure does not say."""
    allocation_s: float = 60.0
    """How long a launch waits to learn whether there are machines; one that is still
    undecided counts as there."""
    removal_s: float = 540.0
    """How long ``release`` waits for what it removes."""
