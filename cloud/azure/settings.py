"""Settings of an Azure subscription."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spottrain.cloud.port.settings import CloudSettings

IMAGE = "microsoft-dsvm:ubuntu-hpc:2404:latest"
"""Microsoft's own image with NVIDIA's driver, CUDA and NCCL."""
MANAGEMENT_URL = "https://management.azure.com"
PRICES_URL = "https://prices.azure.com"
PRICES_VARIABLE = "SPOTTRAIN_AZURE_PRICES_URL"
"""Environment variable: another URL, such as a proxy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureSettings(CloudSettings):
    """Settings of the subscription and of VMs."""

    subscription: str = ""
    """Id of the subscription; by default AZURE_SUBSCRIPTION_ID."""
    regions: tuple[str, ...] = ("eastus",)
    """As ARM names them."""
    resource_group: str = ""
    """An existing resource group; empty: one per job, removed with its content."""
    image: str = IMAGE
    """``publisher:offer:sku:version`` or an image's resource id."""
    user: str = "spottrain"
    """SSH user; the account is created at boot."""
    subnets: Mapping[str, str] = field(default_factory=dict)
    """Resource id of an existing subnet by region; by default our own."""
    max_usd_per_hour: float | None = None
    """Maximum spot price; None: the on-demand price (no eviction for price)."""
    identity: str = ""
    """Resource id of a managed identity that may delete the VMs; empty: our own, in our
    own resource group."""
    self_delete: bool = True
    """A VM without a manager deletes itself, which requires an identity. A shutdown
    alone does not end billing."""
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
    poll_s: float = 5.0
    """Poll interval of long operations, unless Azure gives one."""
    allocation_s: float = 60.0
    """Time limit of the allocation; a VM undecided then counts as created."""
    removal_s: float = 540.0
    """How long ``release`` waits for removals."""
