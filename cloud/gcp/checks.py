"""Checks of a GCP project, without renting.

Compute Engine has no dry run: missing permissions show only when a call is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from spottrain.cloud.gcp import requests
from spottrain.cloud.gcp.clients import GcpClients
from spottrain.cloud.gcp.market import GcpMarket
from spottrain.cloud.gcp.network import GcpNetwork
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.gcp.translate import translating_errors
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.facts import check_offered
from spottrain.cloud.port.provider import ANY_FAMILY, Finding, Quota, run_check

_QUOTAS_URL = "https://console.cloud.google.com/iam-admin/quotas"


class GcpChecks:
    """Checks what a job needs, one item after the other."""

    def __init__(
        self,
        clients: GcpClients,
        settings: GcpSettings,
        network: GcpNetwork,
        market: GcpMarket,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._network = network
        self._market = market

    def run(self) -> Iterator[Finding]:
        """Yield findings; stop if the project is refused."""
        project = run_check("credentials", self._project)
        yield project
        if not project.ok:
            return
        yield run_check("image", self._image)
        for region in self._settings.regions:
            found = run_check(f"region {region}", partial(self._region, region))
            yield found
            if found.ok:
                yield run_check(f"types {region}", partial(self._types, region), "types")
        yield run_check("prices", self._market.describe_prices)
        try:
            yield from _quotas(self._market.quotas())
        except CloudError as error:
            yield Finding(what="quota", ok=False, message=str(error))

    def _project(self) -> str:
        project = self._settings.project
        with translating_errors(f"asking for project {project}"):
            self._clients.call("projects", "get", {})
        return f"access to project {project} works"

    def _image(self) -> str:
        with translating_errors("looking for the image"):
            self._network.check_image()
        return self._settings.image

    def _region(self, region: str) -> str:
        with translating_errors(f"asking for region {region}"):
            self._clients.call("regions", "get", {"region": region})
        return "can be used"

    def _types(self, region: str) -> str:
        offered = {
            name for zone, name in self._market.places() if requests.region_of(zone) == region
        }
        return check_offered(region, self._settings.instance_types, offered)


def _quotas(quotas: Sequence[Quota]) -> Iterator[Finding]:
    """Yield findings on quotas; without a spot quota the on-demand one counts."""
    limits: dict[tuple[str, str], float] = {}
    units: dict[str, str] = {}
    for quota in quotas:
        if quota.family == ANY_FAMILY:
            continue  # told as a number of VMs
        where = quota.region, quota.family
        limits[where] = max(quota.limit, limits.get(where, 0.0))
        units[quota.family] = "GPUs" if quota.unit == "gpu" else "virtual CPUs"
    for (region, family), limit in limits.items():
        detail = f"{limit:g} {units[family]}"
        if not limit:
            detail += f": nothing can be rented; ask Google for more at {_QUOTAS_URL}"
        what = f"quota {region} {family}" if region else f"quota {family}"
        one_of = "quota" if region else ""  # the global quota is required
        yield Finding(what=what, ok=limit > 0, message=detail, one_of=one_of)
