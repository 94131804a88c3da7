"""Shared resources of a job, SSH targets, interruptions and checks."""

from __future__ import annotations

import pytest
from tests.fakes.azure import (
    KIND,
    REGION,
    FakeAzure,
)
from tests.unit.cloud.renting import rent, sent

from spottrain.cloud.port.errors import CloudError, MisconfiguredError, VmNotFoundError


def test_a_foreign_group_of_that_name_is_left_alone(
    azure: FakeAzure,
) -> None:
    azure.ask("users_own", group="spottrain-job", region=REGION)
    provider = azure.provider()
    with pytest.raises(MisconfiguredError, match="not belong to job job"):
        rent(provider)
    provider.release("job")
    assert "DELETE resourceGroups" not in sent(azure)


def test_a_slow_removal_is_checked_again(azure: FakeAzure) -> None:
    azure.ask("delays", delete_s=60)
    provider = azure.provider(removal_s=0.1)
    (vm,) = rent(provider)
    provider.terminate([vm.vm_id])
    with pytest.raises(CloudError, match="retry"):
        provider.release("job")
    with pytest.raises(CloudError, match="still removing"):
        rent(provider, intent="intent-2")
    azure.ask("pass_time", seconds=61)
    provider.release("job")
    assert azure.ask("left") == []


def test_an_eviction_that_leaves_card_and_disk_is_cleaned_up(azure: FakeAzure) -> None:
    azure.ask("moods", strays=True)
    provider = azure.provider()
    (vm,) = rent(provider)
    azure.ask("evict", name=vm.vm_id.split(".")[1])
    assert any(name.startswith("disks/") for name in azure.ask("left"))
    provider.release("job")
    assert azure.ask("left") == []


@pytest.mark.parametrize("strays", [False, True])
def test_named_groups_and_subnets_are_used_and_left_alone(azure: FakeAzure, strays: bool) -> None:
    azure.ask("moods", strays=strays)
    subnet = azure.ask("users_own", group="Theirs", region=REGION)
    provider = azure.provider(
        resource_group="Theirs",
        subnets={REGION: subnet},
        self_delete=False,
        public_addresses=False,
    )
    (vm, other) = rent(provider, 2)
    assert vm.vm_id.endswith(".theirs")
    assert {v.vm_id for v in provider.list_all()} == {vm.vm_id, other.vm_id}
    target = provider.ssh_target(vm.vm_id)
    assert target is not None
    assert target.host.startswith("10.79.")
    azure.ask("evict", name=vm.vm_id.split(".")[1])
    provider.terminate([other.vm_id])
    provider.release("job")
    assert azure.ask("left") == []
    assert not {"DELETE resourceGroups", "PUT virtualNetworks"} & set(sent(azure))


def test_a_network_of_our_own_in_a_named_group_is_removed(azure: FakeAzure) -> None:
    azure.ask("users_own", group="theirs", region=REGION)
    provider = azure.provider(resource_group="theirs", self_delete=False)
    (vm,) = rent(provider)
    provider.terminate([vm.vm_id])
    provider.release("job")
    assert azure.ask("left") == []


def test_in_a_shared_group_self_deletion_needs_the_users_identity(
    azure: FakeAzure,
) -> None:
    azure.ask("users_own", group="theirs", region=REGION)
    with pytest.raises(MisconfiguredError, match=r"azure\.identity"):
        rent(azure.provider(resource_group="theirs"))


# --- SSH ----------------------------------------------------------------------------


def test_ssh_accepts_the_host_key_of_the_launch(azure: FakeAzure) -> None:
    provider = azure.provider()
    (vm,) = rent(provider)
    target = azure.provider().ssh_target(vm.vm_id)
    assert target is not None
    assert target.host.startswith("203.0.113.")
    assert (target.user, target.port) == ("spottrain", 22)
    inside = azure.provider(inside=True).ssh_target(vm.vm_id)
    assert inside is not None
    assert inside.host == next(iter(provider.list_vms("job"))).private_address
    (key,) = target.host_keys
    assert key.startswith("ssh-ed25519 ")
    asked = [r for r in azure.ask("requests") if r["operation"].endswith("PUT virtualMachines")]
    assert asked[0]["body"]["tags"]["spottrain-host-key"] == key
    provider.terminate([vm.vm_id])
    with pytest.raises(VmNotFoundError):
        provider.ssh_target(vm.vm_id)


def test_what_a_job_needs_is_checked_without_renting(azure: FakeAzure) -> None:
    assert all(finding.ok for finding in azure.provider().check())
    azure.ask("moods", denied_grants=True)
    azure.ask("quota", region=REGION, family="lowPriorityCores", vcpus=0)
    lacking = "Standard_ND96isr_H100_v5"
    both = azure.provider(instance_types=(KIND, lacking)).check()
    (types,) = (finding for finding in both if finding.what == "types eastus")
    assert (types.ok, types.message) == (True, f"1 type can be rented, but not {lacking}")
    provider = azure.provider(image="a:b:c:latest", instance_types=(lacking,))
    wrong = {finding.what for finding in provider.check() if not finding.ok}
    assert wrong == {
        "permissions",
        "types eastus",
        "image eastus",
        "quota eastus spot",
    }
    azure.ask("expire", expired=True)
    (only,) = provider.check()
    assert (only.what, only.ok) == ("credentials", False)
    assert not any("PUT" in operation for operation in sent(azure))
