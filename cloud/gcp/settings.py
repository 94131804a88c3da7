"""Settings of a GCP project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from spottrain.cloud.port.settings import CloudSettings
from spottrain.units import DAY_S

IMAGE = (
    "projects/deeplearning-platform-release/global/images/family/"
    "pytorch-2-9-cu129-ubuntu-2404-nvidia-580"
)
"""Google's own image with NVIDIA's driver, CUDA and torch 2.9 for Python 3.12; the newest
of its family. Source: Deep Learning VM release notes; public logs of August 2026 show it
with torch 2.9.1+cu129."""


class Prices(Protocol):
    """Prices of machines, which Compute Engine itself does not report."""

    def usd_per_hour(self, region: str, instance_type: str, spot: bool) -> float | None:
        """Return a price; None if it is unknown."""

    def warning(self) -> str:
        """Return a line if older prices are used, or none; else nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcpSettings(CloudSettings):
    """Settings of the project and of VMs."""

    project: str
    """Id of the project."""
    regions: tuple[str, ...] = ("us-central1",)
    image: str = IMAGE
    """``projects/P/global/images/NAME``, or ``.../images/family/FAMILY`` for the newest
    of a family."""
    user: str = "spottrain"
    """SSH user; the image's guest agent creates the account."""
    network: str = ""
    """Name of an existing network of the project; empty: the job's own."""
    subnetworks: Mapping[str, str] = field(default_factory=dict)
    """Name of an existing subnet by region, for regions where ``network`` has no
    automatic subnet."""
    network_tags: tuple[str, ...] = ()
    """Network tags that existing firewall rules allow; empty: the job's own rules."""
    service_account: str = ""
    """Email of the VMs' service account. If it may delete instances, a VM without a
    manager deletes itself; otherwise it shuts itself down."""
    max_run_s: float = 7 * DAY_S
    """Hard limit after which Google deletes a VM; 30 s to 120 days."""
    endpoint: str = ""
    """Another endpoint than Compute Engine's own."""
    patience_s: float = 60.0
    """How long the SDK retries a throttled or failed call; 0: no retries."""
    launch_s: float = 100.0
    """How long one call of a launch waits for its VMs."""
