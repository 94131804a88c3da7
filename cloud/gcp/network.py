"""Shared resources of a job's VMs: a network, a subnet per region, firewall rules; and
the image.

They are found or created, by names derived from the job's, at the first launch, and
removed by ``release``. After a crash between any two calls they are found again.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from spottrain.cloud.gcp import answers, requests
from spottrain.cloud.gcp.clients import GcpClients
from spottrain.cloud.gcp.requests import GcpPlacement
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.port.errors import MisconfiguredError

_OWN_NETWORKS = ipaddress.ip_network("10.64.0.0/10")
_SUBNET_BITS = 20
_URL = "https://www.googleapis.com/compute/v1/"
_WITHDRAWN = ("OBSOLETE", "DELETED")
"""States of images that cannot be used; deprecated ones can (``DeprecationStatus``)."""


class GcpNetwork:
    """The shared resources of each job's VMs."""

    def __init__(self, clients: GcpClients, settings: GcpSettings) -> None:
        self._clients = clients
        self._settings = settings
        self._lock = threading.Lock()
        self._placements: dict[tuple[str, str], GcpPlacement] = {}
        self._images: dict[str, str] = {}

    def placement(self, job: str, region: str, image: str = "") -> GcpPlacement:
        """Return the placement of a job's VMs in a region; created if needed.

        Args:
            job: Name of the job.
            image: The image that is preferred to that of the settings.

        Raises:
            MisconfiguredError: there is no such image, network or subnet.
        """
        with self._lock:  # else parallel launches would create everything twice
            if image not in self._images:
                self._images[image] = self.check_image(image)
            key = job, region
            if key not in self._placements:
                self._placements[key] = self._make_placement(job, region)
            return replace(self._placements[key], image=self._images[image])

    def knows(self, job: str, region: str) -> bool:
        """Return True if the placement of a job in a region is known."""
        with self._lock:
            return (job, region) in self._placements

    def forget(self, job: str) -> None:
        """Check the resources again at the next launch: some may be missing."""
        with self._lock:
            self._placements = {k: v for k, v in self._placements.items() if k[0] != job}
            self._images = {}

    def admit(self, job: str, networks: Sequence[str]) -> None:
        """Let SSH in from these networks only, if there is a rule of our own."""
        self._settings = replace(self._settings, ssh_from=tuple(networks))
        rule = f"{requests.shared_name(job, self._settings.uid)}-ssh"
        for there in tuple(self._named("firewalls", rule)):
            self._set_sources(there, networks)

    def release(self, job: str) -> None:
        """Remove a job's shared resources; its VMs must have ended."""
        self.forget(job)
        name = requests.shared_name(job, self._settings.uid)
        with self._lock:
            for rule in tuple(self._named("firewalls", f"{name}-inside", f"{name}-ssh")):
                self._clients.delete("firewalls", {"firewall": rule["name"]})
            for region in self._subnets_in(name):
                arguments = {"region": region, "subnetwork": name}
                self._clients.delete("subnetworks", arguments)
            for network in tuple(self._named("networks", name)):
                self._clients.delete("networks", {"network": network["name"]})

    def check_image(self, preferred: str = "") -> str:
        """Check that the image exists and fits on the disk; return it, without family.

        Args:
            preferred: An image that is taken if it may still be used.

        Raises:
            MisconfiguredError: it does not.
        """
        wanted, found = preferred, self._image(preferred)
        if found is None or found.get("deprecated", {}).get("state") in _WITHDRAWN:
            wanted = self._settings.image.removeprefix(_URL)
            found = self._image(wanted)
        if found is None:
            raise MisconfiguredError(
                f"GCP: no such image: got {wanted!r}; give "
                "projects/P/global/images/NAME or .../images/family/FAMILY"
            )
        needed_gib = int(found.get("disk_size_gb", 0))
        if needed_gib > self._settings.disk_gib:
            raise MisconfiguredError(
                f"GCP: {wanted} needs a disk of {needed_gib} GiB: got "
                f"{self._settings.disk_gib}; raise disk_gib"
            )
        return f"projects/{wanted.split('/')[1]}/global/images/{found['name']}"

    def _image(self, wanted: str) -> dict[str, Any] | None:
        match wanted.split("/"):
            case ["projects", project, "global", "images", "family", family]:
                arguments = {"project": project, "family": family}
                return self._clients.find("images", "get_from_family", arguments)
            case ["projects", project, "global", "images", name]:
                arguments = {"project": project, "image": name}
                return self._clients.find("images", "get", arguments)
            case _:
                return None

    # --- the network ------------------------------------------------------------------

    def _make_placement(self, job: str, region: str) -> GcpPlacement:
        settings = self._settings
        name = requests.shared_name(job, settings.uid)
        if settings.network:
            self._check_there("networks", {"network": settings.network})
            subnet = settings.subnetworks.get(region, "")
            if subnet:
                self._check_there("subnetworks", {"region": region, "subnetwork": subnet})
        else:
            subnet = name
            arguments = requests.own_network(job, settings.uid)
            self._ensure("networks", {"network": name}, arguments)
            self._own_subnet(job, region)
        network = requests.network_url(settings.project, settings.network or name)
        if not settings.network_tags:
            for rule in requests.firewalls(settings, job, network):
                self._ensure_firewall(rule)
        subnet_url = requests.subnet_url(settings.project, region, subnet)
        return GcpPlacement(network, subnet_url if subnet else "", settings.network_tags or (name,))

    def _own_subnet(self, job: str, region: str) -> None:
        name = requests.shared_name(job, self._settings.uid)
        cidr = _free(self._subnets_in(name).values())
        arguments = requests.own_subnet(self._settings, job, region, cidr)
        where = {"region": region, "subnetwork": name}
        self._ensure("subnetworks", where, arguments)

    def _subnets_in(self, name: str) -> dict[str, str]:
        """Return the addresses of the subnets of one name, by region."""
        arguments = {"filter": requests.any_of("name", [name])}
        return {
            region: subnet["ip_cidr_range"]
            for region, content in self._clients.scopes("subnetworks", arguments)
            for subnet in content.get("subnetworks", ())
        }

    def _named(self, service: str, *names: str) -> Iterator[dict[str, Any]]:
        arguments = {"filter": requests.any_of("name", names)}
        return self._clients.all(service, "list", arguments)

    # --- Find, create, remove ---------------------------------------------------------

    def _check_there(self, service: str, arguments: dict[str, Any]) -> None:
        if self._clients.find(service, "get", arguments) is None:
            *where, (_, name) = arguments.items()
            placement = "".join(f" in {value}" for _, value in where)
            raise MisconfiguredError(
                f"GCP: {service}{placement}: got {name}, which does not exist in project "
                f"{self._settings.project}; correct the job file"
            )

    def _ensure(
        self, service: str, where: dict[str, Any], arguments: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Create a resource unless it exists; another manager may be creating it.

        Returns:
            The existing resource, None if there was none.
        """
        there = self._clients.find(service, "get", where)
        if there is not None or not self._clients.insert(service, arguments):
            self._await_making(**where)
        return there

    def _ensure_firewall(self, rule: dict[str, Any]) -> None:
        """Create or update a rule; the manager may have moved since it was created."""
        wanted = rule["firewall_resource"]
        named = {"firewall": wanted["name"]}
        there = self._ensure("firewalls", named, rule)
        if there is not None:
            self._set_sources(there, wanted.get("source_ranges", []))

    def _set_sources(self, rule: dict[str, Any], sources: Sequence[str]) -> None:
        if sorted(rule.get("source_ranges", ())) != sorted(sources):
            change = {"firewall_resource": {"source_ranges": list(sources)}}
            self._clients.patch("firewalls", {"firewall": rule["name"]} | change)

    def _await_making(self, region: str = "", **named: str) -> None:
        """Wait for a resource that another manager is creating."""
        (name,) = named.values()
        arguments = {"filter": requests.any_of("status", ("PENDING", "RUNNING"))}
        arguments |= {"region": region} if region else {}
        service = "region_operations" if region else "global_operations"
        for operation in list(self._clients.all(service, "list", arguments)):
            if answers.last_part(operation.get("target_link", "")) == name:
                self._clients.finish(operation, self._settings.launch_s)


def _free(taken: Iterable[str]) -> str:
    """Return an address range of our own that no subnet of the network uses."""
    used = set(taken)
    subnets = _OWN_NETWORKS.subnets(new_prefix=_SUBNET_BITS)
    return next(str(subnet) for subnet in subnets if str(subnet) not in used)
