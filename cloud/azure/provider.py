"""Azure as a provider."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from spottrain.cloud.azure import requests
from spottrain.cloud.azure.checks import AzureChecks
from spottrain.cloud.azure.clients import AzureClients
from spottrain.cloud.azure.ends import AzureEndTimes
from spottrain.cloud.azure.launches import AzureLaunches, Resource
from spottrain.cloud.azure.market import AzureMarket
from spottrain.cloud.azure.network import AzureNetwork
from spottrain.cloud.azure.requests import CLOUD
from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.azure.translate import is_missing, translating_errors
from spottrain.cloud.http import time_at
from spottrain.cloud.lag.ended import terminated_from_launch
from spottrain.cloud.lag.recent import RecentCalls
from spottrain.cloud.parallel import flat_map_parallel, run_parallel
from spottrain.cloud.port import provider as port
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    MisconfiguredError,
    NoCapacityError,
    PriceTooHighError,
    QuotaExceededError,
    VmNotFoundError,
)
from spottrain.cloud.port.facts import CloudFacts, check_types, refuse_if_used
from spottrain.cloud.ssh_keys import new_host_key

_REFUSALS = (NoCapacityError, QuotaExceededError, PriceTooHighError)
"""After these errors no VM exists."""


class AzureProvider(port.CloudProvider):
    """Rents Azure VMs; thread-safe.

    Args:
        settings: Settings of the subscription and of VMs.
        clients: Clients to share; None: its own.
        clock: Monotonic clock (seconds).
        now: Wall clock (seconds since the epoch).
    """

    name = CLOUD

    def __init__(
        self,
        settings: AzureSettings,
        facts: CloudFacts,
        clients: AzureClients | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        _check(settings, facts)
        self._settings = settings
        self._facts = facts
        self._clients = AzureClients(settings) if clients is None else clients
        self._network = AzureNetwork(self._clients, settings)
        self._market = AzureMarket(self._clients, settings, facts)
        self._launches = AzureLaunches(self._clients, settings)
        self._ends = AzureEndTimes(self._clients, settings, clock, now)
        self._recent = RecentCalls(clock=clock)
        self._addresses: dict[str, str] = {}

    # --- The cloud port ---------------------------------------------------------------

    def offers(self) -> Sequence[port.Offer]:
        """Return offers of sizes that have a price and are open to us, by zone.

        Raises:
            CloudError: Azure or its price list does not answer.
        """
        return flat_map_parallel(self._market.offers, self._settings.regions)

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """Launch VMs whose names derive from the request's token.

        Raises:
            NoCapacityError: the zone has no machine left; the token stays unused.
            QuotaExceededError, PriceTooHighError, AuthError, ThrottledError: as named.
            MisconfiguredError: there is no such image, network or type.
            CloudError: the outcome is unknown; a retry is safe.
        """
        if not self._settings.public_key:
            raise MisconfiguredError("Azure: launching a VM requires a public key")
        offer = request.offer
        doing = f"launching {request.count} {offer.instance_type} in {offer.zone}"
        owned = replace(self._settings, owner=self.principal())
        try:
            with translating_errors(doing):
                size = self._market.size(offer.region, offer.instance_type)
                accelerated = size is not None and size.accelerated
                placement = self._network.placement(
                    request.job, offer.region, accelerated=accelerated
                )
        except CloudError:
            self._network.forget(request.job)
            raise
        request = replace(request, image=self._usable_image(request))
        group = requests.group_of(request.job, self._settings)
        names = requests.vm_names(request, self._settings)
        past = self._ends.history_of_launch(request.job, request.token, names)

        def make(name: str) -> port.Vm | CloudError:
            # A name is never used twice: a line of the bill is that of one VM.
            if name in past.failed:
                return NoCapacityError(f"Azure, {doing}: {name} could not be made")
            if lifetime := past.ended.get(name):
                vm_id = requests.vm_id_of(group, name)
                from_s = lifetime.until_s if lifetime.from_s is None else lifetime.from_s
                return terminated_from_launch(request, vm_id, from_s, lifetime.until_s)
            body = requests.virtual_machine(request, name, placement, new_host_key(), owned)
            try:
                resource = self._launches.make(group, name, body, doing)
            except CloudError as error:
                return error
            return requests.vm_of(resource, self._facts)

        return self._result(request, run_parallel(make, names))

    def _usable_image(self, request: port.LaunchRequest) -> str:
        """Return the launch's image if its region has it (still); else nothing."""
        *_, version = request.image.split(":")
        if not version:
            return ""
        there = self._market.image_versions(request.offer.region, request.image)
        return request.image if version in there else ""

    def _result(
        self, request: port.LaunchRequest, outcomes: Iterable[port.Vm | CloudError]
    ) -> port.LaunchResult:
        vms, errors = [], []
        for outcome in outcomes:
            if isinstance(outcome, CloudError):
                errors.append(outcome)
            else:
                vms.append(outcome)
        self._recent.launched(vm for vm in vms if vm.ended_at_s is None)
        self._ends.vms.note(vm for vm in vms if vm.ended_at_s is None)
        others = [error for error in errors if not isinstance(error, _REFUSALS)]
        if others:
            self._network.forget(request.job)
        for error in others:
            if not (vms and isinstance(error, AuthError | MisconfiguredError)):
                # A retry with the same token finds the other VMs.
                raise error
        if not vms:
            raise errors[0]
        return port.LaunchResult(vms=tuple(vms))

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """Return the VMs of a job; ended ones for an hour, if the Activity Log reports
        them.

        VMs whose creation failed are deleted on the way.

        Raises:
            CloudError: Azure does not answer.
        """
        group = requests.group_of(job, self._settings)
        listed = [
            each
            for each in self._listed(group)
            if tags.is_ours(_tags_of(each), job, self._settings)
        ]
        for resource in listed:
            if requests.has_failed(resource):
                self._launches.end(group, resource["name"])
        vms = self._vms(group, listed)
        known = self._recent.reconcile(job, vms, self._still_there)
        return self._ends.vms.add(job, known)

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Request termination; unknown and ended VMs are not an error.

        Raises:
            CloudError: a request failed.
        """
        ours = [vm_id for vm_id in vm_ids if requests.split_vm_id(vm_id)[0]]
        ended = run_parallel(self._end, ours)
        self._recent.terminated([vm_id for vm_id, error in ended if error is None])
        for error in filter(None, (error for _, error in ended)):
            raise error

    def list_all(self) -> Sequence[port.Vm]:
        """Return the VMs of all jobs in every region and group of the subscription.

        Raises:
            CloudError: Azure does not answer.
        """
        with translating_errors("listing VMs"):
            listed = self._clients.compute.virtual_machines.list_all()
            resource = [vm.as_dict() for vm in listed]
        return tuple(
            requests.vm_of(each, self._facts) for each in resource if tags.JOB in _tags_of(each)
        )

    # --- Optional abilities -----------------------------------------------------------

    def release(self, job: str) -> None:
        """Remove the job's resource group, or its resources in the named one.

        Raises:
            CloudError: VMs of the job still run, or the removal takes too long.
        """
        refuse_if_used("Azure", job, self.list_vms(job))
        with translating_errors(f"removing what job {job} used"):
            self._network.release(job)

    def quotas(self) -> Sequence[port.Quota]:
        """Return the quotas of our families, in virtual CPUs.

        Raises:
            CloudError: Azure does not answer.
        """
        return flat_map_parallel(self._market.quotas, self._settings.regions)

    def time_s(self) -> float | None:
        """Return the time by Azure Resource Manager's clock; see ``CloudProvider``.

        Raises:
            CloudError: Azure does not answer.
        """
        return time_at(self._settings.endpoint_url, self._settings.ca_file)

    def admit(self, job: str, networks: Sequence[str]) -> None:
        """Let SSH in from these networks only.

        Raises:
            CloudError: Azure does not answer.
        """
        with translating_errors(f"letting SSH in from {', '.join(networks)}"):
            self._network.admit(job, networks)

    def spot_pools(self, count: int) -> Sequence[port.SpotPool]:
        """Return Azure's eviction rates, of regions as a whole.

        Args:
            count: Not asked for.

        Raises:
            CloudError: Resource Graph does not answer, or may not be asked.
        """
        return self._market.spot_pools()

    def check(self) -> Sequence[port.Finding]:
        """Check whether a job could rent, without renting."""
        return tuple(AzureChecks(self._clients, self._settings, self._market).run())

    def ssh_target(self, vm_id: str) -> port.SshTarget | None:
        """Return how to log in to a VM, None until it has an address.

        We generated its host key; a tag has the public key.

        Raises:
            VmNotFoundError: the VM has ended.
        """
        resource = self._live_resource(vm_id)
        address = self._address_of(resource)
        key = _tags_of(resource).get(requests.HOST_KEY, "")
        if not address or not key:
            return None
        return port.SshTarget(
            host=address,
            user=self._settings.user,
            host_keys=(key,),
            port=self._settings.ssh_port,
        )

    def principal(self) -> str:
        """Return ``owner``, or object and tenant id of who these credentials are.

        Raises:
            CloudError: the token service does not answer.
        """
        return self._settings.owner or self._clients.principal()

    # --- Calls to Azure ---------------------------------------------------------------

    def _listed(self, group: str) -> list[Resource]:
        """Return the VMs of a group in Azure's JSON; none if there is no group."""
        from azure.core.exceptions import HttpResponseError

        with translating_errors(f"listing VMs of {group}"):
            try:
                listed = self._clients.compute.virtual_machines.list(group)
                return [vm.as_dict() for vm in listed]
            except HttpResponseError as error:
                if not is_missing(error):
                    raise
                return []

    def _vms(self, group: str, listed: Sequence[Resource]) -> list[port.Vm]:
        """Return listed VMs with their (separately listed) private addresses."""
        vms = [requests.vm_of(resource, self._facts) for resource in listed]
        running = [vm.vm_id for vm in vms if vm.state is port.VmState.RUNNING]
        if any(vm_id not in self._addresses for vm_id in running):
            with translating_errors(f"listing network cards of {group}"):
                cards = self._clients.network.network_interfaces.list(group)
                self._addresses |= dict(_addressed(card.as_dict()) for card in cards)
        return [
            requests.vm_of(resource, self._facts, self._addresses.get(vm.vm_id, vm.private_address))
            for resource, vm in zip(listed, vms, strict=True)
        ]

    def _address_of(self, resource: Resource) -> str:
        """Return the address of a VM, empty while it has none."""
        cards = resource["properties"].get("networkProfile", {}).get("networkInterfaces")
        if not cards:
            return ""
        group, name = requests.split_resource_id(cards[0]["id"])
        with translating_errors(f"looking for the address of {resource['name']}"):
            card = self._clients.network.network_interfaces.get(
                group, name, expand="IPConfigurations/PublicIPAddress"
            ).as_dict()
        address = card["properties"]["ipConfigurations"][0]["properties"]
        if self._settings.inside or not self._settings.public_addresses:
            return str(address.get("privateIPAddress", ""))
        public = address.get("publicIPAddress", {}).get("properties", {})
        return str(public.get("ipAddress", ""))

    def _still_there(self, vm: port.Vm) -> port.Vm | None:
        """Return an unlisted VM, None if it has really ended."""
        resource = self._launches.get(*requests.split_vm_id(vm.vm_id))
        return None if resource is None else requests.vm_of(resource, self._facts)

    def _live_resource(self, vm_id: str) -> Resource:
        group, name = requests.split_vm_id(vm_id)
        resource = self._launches.get(group, name) if group else None
        if resource is None or requests.is_leaving(resource):
            raise VmNotFoundError(f"Azure: VM {vm_id} has ended or never existed")
        return resource

    def _end(self, vm_id: str) -> tuple[str, CloudError | None]:
        try:
            self._launches.end(*requests.split_vm_id(vm_id))
        except CloudError as error:
            return vm_id, error
        return vm_id, None


def _check(settings: AzureSettings, facts: CloudFacts) -> None:
    """Validate the settings without calling Azure.

    Raises:
        MisconfiguredError: they cannot work.
    """
    check_types(facts, CLOUD, "Azure", settings.instance_types)
    if not settings.image.startswith("/") and settings.image.count(":") != 3:
        raise MisconfiguredError(
            "Azure: image must be publisher:offer:sku:version or a resource id: "
            f"got {settings.image}"
        )
    bare = [region for region in settings.regions if region not in settings.subnets]
    if bare and not settings.public_addresses:
        raise MisconfiguredError(
            f"Azure: without public addresses VMs in {', '.join(bare)} cannot be "
            "reached; give azure.subnets"
        )


def _tags_of(resource: Resource) -> dict[str, str]:
    return resource.get("tags") or {}


def _addressed(card: Resource) -> tuple[str, str]:
    """Return (VM's id, its private address) of a network card."""
    properties = card["properties"]
    vm = properties.get("virtualMachine") or {"id": ""}
    first = properties["ipConfigurations"][0]["properties"]
    vm_id = requests.vm_id_of(*requests.split_resource_id(vm["id"]))
    return vm_id, str(first.get("privateIPAddress", ""))
