"""AWS as a provider."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from spottrain.cloud.aws import prices, requests
from spottrain.cloud.aws.checks import AwsChecks
from spottrain.cloud.aws.clients import AwsClients
from spottrain.cloud.aws.market import AwsMarket
from spottrain.cloud.aws.network import AwsNetwork
from spottrain.cloud.aws.requests import CLOUD
from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.aws.translate import GONE, TOKEN_USED, code_of, translating_errors
from spottrain.cloud.http import time_at
from spottrain.cloud.lag.recent import RecentCalls
from spottrain.cloud.parallel import flat_map_parallel, run_parallel
from spottrain.cloud.port import provider as port
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    LoginExpiredError,
    MisconfiguredError,
    VmNotFoundError,
)
from spottrain.cloud.port.facts import (
    CloudFacts,
    OnDemandPrice,
    check_types,
    refuse_if_used,
)
from spottrain.units import counted

_GONE_DELAY_S, _GONE_TRIES = 5, 60
"""Interval and number of polls for a VM to terminate and free its security group."""
_BATCH = 500

T = TypeVar("T")


class AwsProvider(port.CloudProvider):
    """Rents EC2 instances; thread-safe.

    Args:
        settings: Settings of the account and of VMs.
        clients: Clients to share; None: its own.
        clock: Monotonic clock (seconds).
    """

    name = CLOUD

    def __init__(
        self,
        settings: AwsSettings,
        facts: CloudFacts,
        on_demand: OnDemandPrice,
        clients: AwsClients | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_types(facts, CLOUD, "AWS", settings.instance_types)
        self._settings = settings
        self._facts = facts
        self._clients = AwsClients(settings) if clients is None else clients
        self._network = AwsNetwork(self._clients, settings)
        self._market = AwsMarket(self._clients, settings, facts, on_demand)
        self._recent = RecentCalls(clock=clock)
        self._principal_lock = threading.Lock()
        self._principal = settings.owner

    # --- The cloud port ---------------------------------------------------------------

    def offers(self) -> Sequence[port.Offer]:
        """Return spot offers, and on-demand offers where their price is known.

        Raises:
            CloudError: a region does not answer.
        """
        return self._in_regions(self._market.offers)

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """Launch VMs with one RunInstances, whose client token derives from the
        request's.

        Raises:
            NoCapacityError: the zone has no machine left; the token stays unused.
            QuotaExceededError, PriceTooHighError, AuthError, ThrottledError: as named.
            MisconfiguredError: there is no such image, network or type.
            CloudError: the outcome is unknown; a retry is safe.
        """
        offer = request.offer
        count = f"{request.count} {offer.instance_type}"
        known = self._network.knows(request.job, offer.region)
        try:
            with translating_errors(f"launching {count} in {offer.zone}"):
                placement = self._network.placement(
                    request.job, offer.region, offer.zone, request.image
                )
                owned = replace(self._settings, owner=self.principal())
                arguments = requests.run_instances(request, placement, owned)
                vms = self._run(request, arguments, placement)
        except CloudError as error:
            if type(error) in (CloudError, MisconfiguredError):
                # A group, key or image may have been removed.
                self._network.forget(request.job)
                if known:
                    raise CloudError(f"{error}; will be retried") from error
            raise
        self._recent.launched(vms)
        return port.LaunchResult(vms=vms)

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """Return the VMs of a job in all regions; terminated ones for about an hour.

        Raises:
            CloudError: a region does not answer.
        """
        mine = [requests.by_tag(tags.JOB, job)]
        listed = self._in_regions(lambda region: self._vms(region, mine))
        ours = [vm for vm in listed if vm.uid == self._settings.uid]
        return self._recent.reconcile(job, ours, self._unless_moved)

    def _unless_moved(self, vm: port.Vm) -> port.Vm | None:
        """Return a VM that is not listed as ours yet, None if it has become another job's.

        Raises:
            CloudError: its region does not answer.
        """
        region, instance_id = requests.split_vm_id(vm.vm_id)
        by_id = [{"Name": "instance-id", "Values": [instance_id]}]
        hops = requests.hops_of(vm.vm_id)
        later = any(requests.hops_of(one.vm_id) > hops for one in self._vms(region, by_id))
        return None if later else vm

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Request termination; unknown and ended VMs are not an error.

        Raises:
            CloudError: a request failed, or EC2 does not know a new VM yet; retry.
        """
        by_region: dict[str, list[str]] = {}
        for vm_id in vm_ids:
            region, _ = requests.split_vm_id(vm_id)
            if region:
                by_region.setdefault(region, []).append(vm_id)
        batches = [
            (region, ids[start : start + _BATCH])
            for region, ids in by_region.items()
            for start in range(0, len(ids), _BATCH)
        ]
        run_parallel(lambda batch: self._terminate(*batch), batches)

    def list_all(self) -> Sequence[port.Vm]:
        """Return the VMs of all jobs in every enabled region.

        Raises:
            CloudError: a region does not answer.
        """
        ours = [{"Name": "tag-key", "Values": [tags.JOB]}]
        everywhere = prices.regions(self._clients)
        return self._in_regions(lambda region: self._vms(region, ours), everywhere)

    # --- Optional abilities -----------------------------------------------------------

    def release(self, job: str) -> None:
        """Remove the job's security groups, key pairs and networks in all regions.

        Raises:
            CloudError: VMs of the job still run, or take too long to terminate.
        """
        vms = self.list_vms(job)
        refuse_if_used("AWS", job, vms)
        for region in self._regions():
            leaving = [
                requests.split_vm_id(vm.vm_id)[1]
                for vm in vms
                if vm.state is port.VmState.STOPPING and vm.offer.region == region
            ]
            with translating_errors(f"removing what job {job} used in {region}"):
                if leaving:
                    self._await_end(region, leaving)
                self._network.release(job, region)

    def principal(self) -> str:
        """Return ``owner``, or the ARN of who these credentials are.

        Raises:
            CloudError: STS does not answer.
        """
        with self._principal_lock:
            if not self._principal:
                sts = self._clients.get("sts", self._regions()[0])
                with translating_errors("asking who rents here (or give aws.owner)"):
                    self._principal = str(sts.get_caller_identity()["Arn"])
            return self._principal

    def time_s(self) -> float | None:
        """Return the time by EC2's clock; see ``CloudProvider``.

        Raises:
            CloudError: EC2 does not answer.
        """
        region, *_ = self._settings.regions or (prices.HOME_REGION,)
        return time_at(self._clients.get("ec2", region).meta.endpoint_url)

    def admit(self, job: str, networks: Sequence[str]) -> None:
        """Let SSH in from these networks only, in all regions of the job.

        Raises:
            CloudError: a region does not answer.
        """
        if self._settings.security_groups:
            return
        for region in self._regions():
            with translating_errors(f"letting SSH in from {', '.join(networks)}"):
                self._network.admit(job, region, networks)

    def check(self) -> Sequence[port.Finding]:
        """Check whether a job could rent, without renting."""
        checks = AwsChecks(self._clients, self._settings, self._network, self._market)
        return tuple(checks.run())

    def quotas(self) -> Sequence[port.Quota]:
        """Return the quotas of our families, in virtual CPUs.

        Raises:
            CloudError: Service Quotas does not answer.
        """
        return self._in_regions(self._market.quotas)

    def spot_pools(self, count: int) -> Sequence[port.SpotPool]:
        """Return EC2's spot placement scores, for jobs of three types or more.

        Raises:
            CloudError: EC2 does not answer.
        """
        return self._market.spot_pools(self._regions(), count)

    def ssh_target(self, vm_id: str) -> port.SshTarget | None:
        """Return how to log in to a VM, None until its console shows its host keys.

        Raises:
            VmNotFoundError: the VM has ended.
            CloudError: AWS does not know it yet, or does not answer; retry.
        """
        region, instance_id = requests.split_vm_id(vm_id)
        with translating_errors(f"looking for the address of {vm_id}"):
            _, instance = self._instance(region, instance_id)
            address = instance.get("PublicIpAddress", "")
            if self._settings.inside or not self._settings.public_addresses:
                address = instance.get("PrivateIpAddress", "")
            keys = requests.host_keys(self._console(region, instance_id))
        if not address or not keys:
            return None
        settings = self._settings
        return port.SshTarget(
            host=address, user=settings.user, host_keys=keys, port=settings.ssh_port
        )

    def move(
        self,
        vm_id: str,
        giver: str,
        job: str,
        intent: str,
        since_s: float,
        image: str = "",
    ) -> port.Vm:
        """Write this job's name on another one's instance; see ``CloudProvider``.

        The tags of the instance say whose it is: they are written last, by one CreateTags
        for the instance alone.
        """
        region, instance_id = requests.split_vm_id(vm_id)
        with translating_errors(f"taking {vm_id} over"):
            _, instance = self._instance(region, instance_id)
            pairs = requests.pairs_of(instance)
            zone = instance["Placement"]["AvailabilityZone"]
            placement = self._network.placement(job, region, zone, image)
            uid, hops = pairs.get(tags.UID, ""), tags.taken_of(pairs)[0]
            if uid != self._settings.uid or pairs.get(tags.INTENT) != intent:
                if uid != giver or hops != requests.hops_of(vm_id):
                    raise VmNotFoundError(f"AWS: VM {vm_id} is another job's by now")
                _check_same(job, instance, placement)
                new = requests.moved_tags(hops + 1, job, intent, since_s, self._settings)
                self._rename(region, job, instance, placement, new)
                pairs |= new
        wanted = {**instance, "Tags": requests.tag_list(pairs)}
        vm = requests.vm_of(region, wanted, self._facts)
        vm = replace(vm, image=placement.image)
        self._recent.launched([vm])
        return vm

    def _rename(
        self,
        region: str,
        job: str,
        instance: Mapping[str, Any],
        placement: requests.AwsPlacement,
        new: Mapping[str, str],
    ) -> None:
        """Bring an instance into the job's security group, then change whose it is.

        Raises:
            VmNotFoundError: that is forbidden.
        """
        ec2, instance_id = self._clients.get("ec2", region), instance["InstanceId"]
        written = requests.tag_list(new)
        groups = {group["GroupId"] for group in instance["SecurityGroups"]}
        try:
            with translating_errors(f"taking {instance_id} over"):
                if groups != set(placement.group_ids):
                    ec2.modify_instance_attribute(
                        InstanceId=instance_id, Groups=list(placement.group_ids)
                    )
                ec2.create_tags(Resources=requests.attached_to(instance), Tags=written)
                ec2.create_tags(Resources=[instance_id], Tags=written)
        except MisconfiguredError:
            self._network.forget(job)  # its group may have been removed
            raise
        except LoginExpiredError:
            raise
        except AuthError as error:
            raise VmNotFoundError(f"{error}; see docs/permissions.md") from error

    # --- Calls to regions -------------------------------------------------------------

    def _in_regions(
        self, ask: Callable[[str], Sequence[T]], regions: Sequence[str] = ()
    ) -> tuple[T, ...]:
        """Return the results of all regions, called in parallel; by default of ours."""
        return flat_map_parallel(ask, regions or self._regions())

    def _regions(self) -> Sequence[str]:
        return self._settings.regions or prices.regions(self._clients)

    def _run(
        self,
        request: port.LaunchRequest,
        arguments: dict[str, Any],
        placement: requests.AwsPlacement,
    ) -> tuple[port.Vm, ...]:
        """Call RunInstances; if the token was used before, return its VMs."""
        from botocore.exceptions import ClientError

        region = request.offer.region
        try:
            answer = self._clients.without_retries("ec2", region).run_instances(**arguments)
        except ClientError as error:
            if code_of(error) not in TOKEN_USED:
                raise
            mine = [requests.by_tag(tags.INTENT, request.intent)]
            vms = self._vms(region, mine)
            found = tuple(
                vm for vm in vms if vm.job == request.job and vm.uid == self._settings.uid
            )
            if not found:
                raise
            return found
        return tuple(
            replace(requests.vm_of(region, instance, self._facts), image=placement.image)
            for instance in answer["Instances"]
        )

    def _vms(self, region: str, filters: list[dict[str, Any]]) -> list[port.Vm]:
        with translating_errors(f"listing VMs in {region}"):
            return [
                requests.vm_of(region, instance, self._facts)
                for _, instance in self._instances(region, filters)
            ]

    def _instances(
        self, region: str, filters: list[dict[str, Any]]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield (account, instance)."""
        pages = self._clients.get("ec2", region).get_paginator("describe_instances")
        for page in pages.paginate(Filters=filters):
            for reservation in page["Reservations"]:
                for instance in reservation["Instances"]:
                    yield reservation["OwnerId"], instance

    def _instance(self, region: str, instance_id: str) -> tuple[str, Mapping[str, Any]]:
        if region:
            by_id = [{"Name": "instance-id", "Values": [instance_id]}]
            for owner, instance in self._instances(region, by_id):
                if instance["State"]["Name"] in ("pending", "running"):
                    return owner, instance
                break
            else:
                self._check_unknown(region, instance_id)
        raise VmNotFoundError(f"AWS: VM {instance_id} has ended or never existed")

    def _console(self, region: str, instance_id: str) -> str:
        """Return a VM's console output; on Xen types only that of the boot."""
        from botocore.exceptions import ClientError

        ec2 = self._clients.get("ec2", region)
        try:
            try:
                shown = ec2.get_console_output(InstanceId=instance_id, Latest=True)
            except ClientError as error:
                if code_of(error) != "UnsupportedOperation":
                    raise
                shown = ec2.get_console_output(InstanceId=instance_id, Latest=False)
        except ClientError as error:
            if code_of(error) in GONE:
                self._check_unknown(region, instance_id)
            raise
        return str(shown.get("Output", ""))

    def _terminate(self, region: str, vm_ids: Sequence[str]) -> None:
        """Terminate VMs; one by one if EC2 rejects the batch."""
        from botocore.exceptions import ClientError

        ec2 = self._clients.get("ec2", region)
        instance_ids = [requests.split_vm_id(vm_id)[1] for vm_id in vm_ids]
        with translating_errors(f"terminating {counted(len(vm_ids), 'VM')} in {region}"):
            try:
                ec2.terminate_instances(InstanceIds=instance_ids)
            except ClientError as error:
                if code_of(error) not in GONE:
                    raise
                if len(instance_ids) == 1:
                    self._check_unknown(region, instance_ids[0])
                    return
            else:
                self._recent.terminated(vm_ids)
                return
        for each in vm_ids:
            self._terminate(region, [each])

    def _check_unknown(self, region: str, instance_id: str) -> None:
        vm_id = requests.vm_id_of(region, instance_id)
        if self._recent.expects(vm_id):
            raise CloudError(f"AWS does not know {vm_id} yet; will be retried")

    def _await_end(self, region: str, instance_ids: list[str]) -> None:
        waiter = self._clients.get("ec2", region).get_waiter("instance_terminated")
        waiter.wait(
            Filters=[{"Name": "instance-id", "Values": instance_ids}],
            WaiterConfig={"Delay": _GONE_DELAY_S, "MaxAttempts": _GONE_TRIES},
        )


def _check_same(job: str, instance: Mapping[str, Any], placement: requests.AwsPlacement) -> None:
    """Check that an instance is as those that a job rents in its zone.

    Raises:
        VmNotFoundError: it is not.
    """
    for what, has, wanted in (
        ("image", instance["ImageId"], placement.image_id),
        ("network", instance["VpcId"], placement.vpc_id),
    ):
        if has != wanted:
            raise VmNotFoundError(
                f"AWS: {instance['InstanceId']} has {what} {has}, VMs of job {job} have {wanted}"
            )
