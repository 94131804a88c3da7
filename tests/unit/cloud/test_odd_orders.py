"""What goes wrong in the middle of a launch, a removal or a sweep, in odd orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tests.fakes import azure, gcp
from tests.tiers import first_always
from tests.unit.cloud.renting import alive, launch_request, offer_in, rent, settle

from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    NoCapacityError,
    ThrottledError,
)
from spottrain.cloud.port.provider import LaunchRequest, VmState
from spottrain.pricing.prices.catalogue import catalogue

EXPIRED = {
    "azure": {"code": "ExpiredAuthenticationToken", "status": 401},
    "gcp": {"code": "authError", "status": 401},
}
POLL = {"azure": "GET operations", "gcp": "zone_operations.wait"}
MAKE = {"azure": "PUT virtualMachines", "gcp": "instances.bulk_insert"}
END = {"azure": "DELETE virtualMachines", "gcp": "instances.delete"}
THROTTLED = {
    "azure": {"code": "TooManyRequests", "status": 429},
    "gcp": {"code": "rateLimitExceeded", "status": 403},
}


@dataclass(frozen=True)
class Cloud:
    """A fake cloud."""

    fake: Any
    name: str

    def fail(self, operation: dict[str, str], error: Any, times: int = 1) -> None:
        """Let the next calls of an operation fail."""
        named = operation[self.name]
        self.fake.ask("fail", operation=named, kind="error", times=times, **error[self.name])


@pytest.fixture(params=first_always(["azure", "gcp"]))
def cloud(request: pytest.FixtureRequest) -> Cloud:
    return Cloud(request.getfixturevalue(request.param), request.param)


def wish(provider: Any) -> LaunchRequest:
    return launch_request(offer_in(provider), 3)


@pytest.mark.rotated
def test_a_login_that_expires_while_vms_are_made_leaves_it_open_whether_they_are(
    cloud: Cloud,
) -> None:
    """Were it called refused, nobody would ask for them again."""
    provider = cloud.fake.provider()
    asked = wish(provider)
    cloud.fail(POLL, EXPIRED, times=3)
    with pytest.raises(CloudError) as told:
        provider.launch(asked)
    assert type(told.value) is CloudError
    found = {vm.vm_id for vm in provider.launch(asked).vms}
    assert len(found) == alive(cloud.fake) == 3


def test_vms_that_were_made_before_the_login_expired_are_kept(cloud: Cloud) -> None:
    provider = cloud.fake.provider()
    asked = wish(provider)
    cloud.fail(MAKE, EXPIRED, times=1 if cloud.name == "azure" else 3)
    if cloud.name == "gcp":  # one call makes all; the SDK tries it with a new token
        with pytest.raises(AuthError):
            provider.launch(asked)
        assert alive(cloud.fake) == 0
        return
    result = provider.launch(asked)
    assert len(result.vms) == alive(cloud.fake) == 2


def test_throttling_in_the_middle_of_a_removal_stops_none_of_it(cloud: Cloud) -> None:
    provider = cloud.fake.provider()
    vms = rent(provider, 3)
    cloud.fail(END, THROTTLED)
    with pytest.raises(ThrottledError):
        provider.terminate([vm.vm_id for vm in vms])
    assert alive(cloud.fake) == 1
    provider.terminate([vm.vm_id for vm in vms])
    assert alive(cloud.fake) == 0


def test_capacity_may_go_between_the_list_and_the_launch(cloud: Cloud) -> None:
    provider = cloud.fake.provider()
    asked = wish(provider)
    kind = {"kind": gcp.KIND} if cloud.name == "gcp" else {"instance_type": azure.KIND}
    cloud.fake.ask("stock", zone=asked.offer.zone, count=0, **kind)
    with pytest.raises(NoCapacityError):
        provider.launch(asked)
    cloud.fake.ask("stock", zone=asked.offer.zone, count=2, **kind)
    result = provider.launch(asked)  # the token is as good as before
    assert len(result.vms) == alive(cloud.fake) == 2


def test_vms_of_a_bulk_insert_that_ended_with_an_error_are_kept(cloud: Cloud) -> None:
    """Azure: a quota or zone that is exhausted after some of the VMs."""
    provider = cloud.fake.provider()
    asked = wish(provider)
    if cloud.name == "gcp":
        cloud.fake.ask("tell_missing")
        cloud.fake.ask("stock", zone=asked.offer.zone, kind=gcp.KIND, count=2)
    else:
        vcpus = 2 * catalogue().types["azure", azure.KIND].vcpus
        named = {"region": azure.REGION, "family": "lowPriorityCores"}
        cloud.fake.ask("quota", **named, vcpus=vcpus)
    for each in (provider, cloud.fake.provider()):  # also of a manager that restarted
        result = each.launch(asked)
        assert len(result.vms) == alive(cloud.fake) == 2


def test_a_vm_whose_end_takes_long_is_leaving_and_nothing_is_removed_under_it(
    cloud: Cloud,
) -> None:
    provider = cloud.fake.provider()
    (vm,) = rent(provider, 1)
    if cloud.name == "azure":
        cloud.fake.ask("delays", delete_s=600.0)
    provider.terminate([vm.vm_id])
    provider.terminate([vm.vm_id])  # a person is impatient
    for each in (provider, cloud.fake.provider()):  # the other has just been started
        listed = {one.vm_id: one.state for one in each.list_vms("job")}
        assert listed.get(vm.vm_id, VmState.TERMINATED) is not VmState.RUNNING
    cloud.fake.ask("pass_time", seconds=700.0)
    assert alive(cloud.fake) == 0
    if cloud.name == "azure":
        cloud.fake.ask("delays", delete_s=0.1)  # of its group
    provider.release("job")
    assert cloud.fake.ask("left") == []


def test_a_vm_that_is_listed_after_its_end_does_not_come_back(cloud: Cloud) -> None:
    provider = cloud.fake.provider()
    vms = rent(provider, 2)
    cloud.fake.ask("lag", hide_s=0.0, linger_s=1200.0)
    provider.terminate([vms[0].vm_id])
    settle(cloud.fake)
    states = {vm.vm_id: vm.state for vm in provider.list_vms("job")}
    assert states[vms[1].vm_id] is VmState.RUNNING
    assert not states[vms[0].vm_id].is_alive
