"""GCP as a provider."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from spottrain.cloud.gcp import answers, requests
from spottrain.cloud.gcp.checks import GcpChecks
from spottrain.cloud.gcp.clients import GcpClients
from spottrain.cloud.gcp.ends import GcpEndTimes
from spottrain.cloud.gcp.launches import GcpLaunches
from spottrain.cloud.gcp.market import GcpMarket
from spottrain.cloud.gcp.network import GcpNetwork
from spottrain.cloud.gcp.requests import CLOUD
from spottrain.cloud.gcp.settings import GcpSettings, Prices
from spottrain.cloud.gcp.translate import translating_errors
from spottrain.cloud.http import time_at
from spottrain.cloud.lag.recent import RecentCalls
from spottrain.cloud.parallel import run_parallel
from spottrain.cloud.port import provider as port
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import CloudError, MisconfiguredError, VmNotFoundError
from spottrain.cloud.port.facts import CloudFacts, check_types, refuse_if_used

_URL = "https://compute.googleapis.com"


class GcpProvider(port.CloudProvider):
    """Rents Compute Engine VMs; thread-safe.

    Args:
        settings: Settings of the project and of VMs.
        clients: Clients to share; None: its own.
        clock: Monotonic clock (seconds).
    """

    name = CLOUD

    def __init__(
        self,
        settings: GcpSettings,
        facts: CloudFacts,
        prices: Prices,
        clients: GcpClients | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_types(facts, CLOUD, "GCP", settings.instance_types)
        self._settings = settings
        self._facts = facts
        self._clients = GcpClients(settings) if clients is None else clients
        self._network = GcpNetwork(self._clients, settings)
        self._market = GcpMarket(self._clients, settings, facts, prices)
        self._ends = GcpEndTimes(self._clients, settings, clock)
        self._launches = GcpLaunches(self._clients, settings, facts, self._ends)
        self._recent = RecentCalls(clock=clock)

    # --- The cloud port ---------------------------------------------------------------

    def offers(self) -> Sequence[port.Offer]:
        """Return offers of types in our zones with a price, spot and on demand.

        Raises:
            CloudError: Compute Engine does not answer.
        """
        return self._market.offers()

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """Launch VMs with one bulk insert, whose id derives from the request's token.

        Raises:
            NoCapacityError: the zone has no machine left; the token stays unused.
            QuotaExceededError, AuthError, ThrottledError: as named.
            MisconfiguredError: there is no such image, network or type.
            CloudError: the outcome is unknown; a retry is safe.
        """
        offer = request.offer
        count = f"{request.count} {offer.instance_type}"
        known = self._network.knows(request.job, offer.region)
        try:
            with translating_errors(f"launching {count} in {offer.zone}"):
                placement = self._network.placement(request.job, offer.region, request.image)
                result = self._launches.launch(request, placement, self.principal())
        except CloudError as error:
            if type(error) in (CloudError, MisconfiguredError):
                self._network.forget(request.job)  # it may have been removed
                if known and type(error) is MisconfiguredError:
                    raise CloudError(f"{error}; will be retried") from error
            raise
        self._recent.launched(result.vms)
        self._ends.vms.note(result.vms)
        return result

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """Return the VMs of a job in all zones; ended ones that this process saw alive,
        for an hour.

        Raises:
            CloudError: a zone does not answer.
        """
        mine = requests.labelled(tags.JOB, job)
        uid = self._settings.uid
        listed = [vm for vm in self._vms(mine) if (vm.job, vm.uid) == (job, uid)]
        return self._recent.reconcile(job, self._ends.vms.add(job, listed))

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Request termination; unknown and ended VMs are not an error.

        Raises:
            CloudError: a request failed; retry.
        """
        run_parallel(self._delete, tuple(vm_ids))

    def list_all(self) -> Sequence[port.Vm]:
        """Return the VMs of all jobs in every zone of the project.

        Raises:
            CloudError: a zone does not answer.
        """
        return tuple(self._vms(f"labels.{tags.JOB}:*"))

    # --- Optional abilities -----------------------------------------------------------

    def release(self, job: str) -> None:
        """Remove the job's firewall rules, subnets and network, and the disks of VMs
        that shut themselves down.

        Raises:
            CloudError: VMs of the job still run.
        """
        vms = self.list_vms(job)
        refuse_if_used("GCP", job, vms)
        with translating_errors(f"removing what job {job} used"):
            for vm in vms:
                if vm.state is port.VmState.STOPPING:
                    zone, name = requests.split_vm_id(vm.vm_id)
                    self._clients.delete("instances", _named(zone, name))
            self._network.release(job)

    def time_s(self) -> float | None:
        """Return the time by Compute Engine's clock; see ``CloudProvider``.

        Raises:
            CloudError: Compute Engine does not answer.
        """
        return time_at(self._settings.endpoint or _URL)

    def admit(self, job: str, networks: Sequence[str]) -> None:
        """Let SSH in from these networks only.

        Raises:
            CloudError: Compute Engine does not answer.
        """
        if not self._settings.network_tags:
            with translating_errors(f"letting SSH in from {', '.join(networks)}"):
                self._network.admit(job, networks)

    def check(self) -> Sequence[port.Finding]:
        """Check whether a job could rent, without renting."""
        checks = GcpChecks(self._clients, self._settings, self._network, self._market)
        return tuple(checks.run())

    def principal(self) -> str:
        """Return ``owner``, or the email of who these credentials are.

        Raises:
            CloudError: there are no credentials.
        """
        return self._settings.owner or self._clients.principal()

    def quotas(self) -> Sequence[port.Quota]:
        """Return the quotas of our GPUs; the project's have an empty region.

        Raises:
            CloudError: Compute Engine does not answer.
        """
        return self._market.quotas()

    def spot_pools(self, count: int) -> Sequence[port.SpotPool]:
        """Return Google's preemption rate and obtainability score of each offer.

        Raises:
            CloudError: Compute Engine does not answer.
        """
        return self._market.spot_pools(count)

    def ssh_target(self, vm_id: str) -> port.SshTarget | None:
        """Return how to log in to a VM, None until its guest agent reports host keys.

        Raises:
            VmNotFoundError: the VM has ended.
        """
        zone, instance = self._instance(vm_id)
        address = answers.public_address(instance)
        if self._settings.inside or not self._settings.public_addresses:
            address = answers.vm_of(instance, self._facts).private_address
        arguments = _named(zone, instance["name"]) | {"query_path": "hostkeys/"}
        with translating_errors(f"asking for the host keys of {vm_id}"):
            attributes = self._clients.find("instances", "get_guest_attributes", arguments)
        keys, settings = answers.host_keys(attributes or {}), self._settings
        if not address or not keys:
            return None
        return port.SshTarget(
            host=address, user=settings.user, host_keys=keys, port=settings.ssh_port
        )

    # --- Calls to Compute Engine ------------------------------------------------------

    def _vms(self, which: str) -> list[port.Vm]:
        with translating_errors("listing VMs"):
            return [
                answers.vm_of(instance, self._facts)
                for _, content in self._clients.scopes("instances", {"filter": which})
                for instance in content.get("instances", ())
            ]

    def _instance(self, vm_id: str) -> tuple[str, Mapping[str, Any]]:
        """Return (zone, instance) of a live VM."""
        zone, name = requests.split_vm_id(vm_id)
        if zone:
            with translating_errors(f"looking for {vm_id}"):
                arguments = _named(zone, name)
                instance = self._clients.call("instances", "get", arguments)
            if answers.vm_of(instance, self._facts).state.is_alive:
                return zone, instance
        raise VmNotFoundError(f"GCP: VM {vm_id} has ended or never existed")

    def _delete(self, vm_id: str) -> None:
        zone, name = requests.split_vm_id(vm_id)
        if not zone:
            return
        with translating_errors(f"terminating {vm_id}"):
            self._clients.find("instances", "delete_unary", _named(zone, name))
        self._recent.terminated([vm_id])


def _named(zone: str, name: str) -> dict[str, Any]:
    return {"zone": zone, "instance": name}
