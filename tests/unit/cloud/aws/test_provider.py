"""The adapter against the fake: faults, lagging lists, and what only AWS can do."""

from __future__ import annotations

import time

import pytest
from tests.fakes.aws import KIND, ON_DEMAND_USD, REGION, ZONE, FakeAws
from tests.unit.cloud.renting import alive, launch_request, offer_in, rent, sent

from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    NoCapacityError,
    QuotaExceededError,
    RegionQuotaError,
)
from spottrain.cloud.port.provider import (
    ANY_FAMILY,
    VmState,
)

# --- the market -----------------------------------------------------------------------


def test_offers_are_at_the_newest_price_of_each_zone(aws: FakeAws) -> None:
    now_s = time.time()
    aws.ask("price", zone=ZONE, instance_type=KIND, usd=0.7, at_s=now_s - 60)
    aws.ask("price", zone="us-east-1b", instance_type=KIND, usd=0.3, at_s=now_s - 60)
    offers = aws.provider().offers()
    assert [(offer.zone, offer.spot, offer.usd_per_hour) for offer in offers] == [
        (ZONE, True, 0.7),
        (ZONE, False, ON_DEMAND_USD),
        ("us-east-1b", True, 0.3),
        ("us-east-1b", False, ON_DEMAND_USD),
    ]
    only = aws.provider(zones=("us-east-1b",)).offers()
    assert {offer.zone for offer in only} == {"us-east-1b"}


def test_prices_are_cached_between_polls(aws: FakeAws) -> None:
    provider = aws.provider()
    assert [list(provider.offers()) for _ in range(3)].count(list(provider.offers())) == 3
    assert sent(aws) == ["DescribeSpotPriceHistory"]


def test_quotas_are_reported(aws: FakeAws) -> None:
    aws.ask("quota", code="L-3819A6DF", vcpus=64)
    aws.ask("quota", code="L-DB2E81BA", vcpus=0)
    provider = aws.provider()
    limits = {(q.family, q.spot): q.limit for q in provider.quotas()}
    assert limits.pop((ANY_FAMILY, False)) == 1000 * 1024 / 200  # of disks
    assert limits == {("G and VT", True): 64, ("G and VT", False): 0}


def test_a_quota_refuses_a_call_as_a_whole(aws: FakeAws) -> None:
    """Of virtual CPUs, and of disks: 200 GiB each."""
    aws.ask("quota", code="L-3819A6DF", vcpus=12)
    provider = aws.provider()
    with pytest.raises(QuotaExceededError, match="MaxSpotInstanceCountExceeded"):
        rent(provider, 4)
    assert len(rent(provider, 3, intent="intent-2")) == 3
    aws.ask("quota", code="L-3819A6DF", vcpus=1000)
    aws.ask("quota", code="L-7A658B76", vcpus=1)
    with pytest.raises(RegionQuotaError, match="gp3 storage limit of 1 TiB"):
        rent(provider, 3, intent="intent-3")
    assert alive(aws) == 3


def test_a_laptop_that_moves_is_let_in_and_its_old_address_is_not(aws: FakeAws) -> None:
    provider = aws.provider(ssh_from=("192.0.2.1/32",))
    rent(provider)
    for networks in (["198.51.100.7/32"], ["198.51.100.7/32", "203.0.113.0/24"]):
        provider.admit("job", networks)
        rent(provider, intent=f"intent-{len(networks)}0")  # a launch changes nothing
        assert sorted(aws.ask("let_in", region=REGION)) == networks


def test_a_policy_that_demands_tags_says_what_to_do(aws: FakeAws) -> None:
    aws.ask("demand_tag", name="cost-center")
    with pytest.raises(AuthError, match=r"policy of your organisation.*aws\.tags"):
        rent(aws.provider())
    assert len(rent(aws.provider(tags={"cost-center": "42"}), intent="i-2")) == 1


def test_placement_scores_are_those_of_three_types_or_more(aws: FakeAws) -> None:
    """With fewer EC2 calls every place bad: the scores would say nothing."""
    aws.ask("score", zone_id="use1-az6", score=9)
    kinds = (KIND, "g5.2xlarge", "g5.4xlarge")
    assert aws.provider(instance_types=kinds[:2]).spot_pools(2) == []
    pools = aws.provider(instance_types=kinds).spot_pools(2)
    assert {(pool.instance_type, pool.obtainability) for pool in pools} == {
        (kind, 0.9) for kind in kinds
    }
    (zone,) = {pool.zone for pool in pools}
    assert zone.startswith(REGION)


# --- when things go wrong -------------------------------------------------------------


def test_no_capacity_is_not_retried_by_the_sdk(
    aws: FakeAws,
) -> None:
    provider = aws.provider(tries=5)
    offer = offer_in(provider)
    aws.ask("stock", zone=ZONE, instance_type=KIND, count=0)
    with pytest.raises(NoCapacityError):
        provider.launch(launch_request(offer))
    assert sent(aws).count("RunInstances") == 1


def test_a_token_used_with_other_parameters_finds_its_vms(aws: FakeAws) -> None:
    """Another image may be the newest by the time that a launch is repeated."""
    (vm,) = rent(aws.provider())
    again = aws.provider(image="ami-00000901")
    assert [each.vm_id for each in rent(again)] == [vm.vm_id]
    assert alive(aws) == 1


# --- lists that lag behind ------------------------------------------------------------


def test_a_new_vm_is_listed_although_the_cloud_list_lags(aws: FakeAws) -> None:
    aws.ask("lag", hide_s=600, linger_s=1200)
    provider = aws.provider()
    (vm,) = rent(provider)
    assert provider.list_vms("job") == (vm,)
    assert aws.provider().list_vms("job") == ()
    with pytest.raises(CloudError):  # it is not known everywhere: not "gone"
        provider.terminate([vm.vm_id])
    aws.ask("pass_time", seconds=601)
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.RUNNING
    provider.terminate([vm.vm_id])
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.STOPPING
    aws.ask("pass_time", seconds=1201)
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.TERMINATED
    assert listed.ended_at_s is not None


# --- what VMs share -------------------------------------------------------------------


def test_an_account_without_a_network_gets_one_for_the_job(aws: FakeAws) -> None:
    aws.ask("remove_default_subnets", region=REGION)
    provider = aws.provider()
    vms = rent(provider, 2)
    assert rent(aws.provider(), 1, "intent-2")
    kinds = {name.partition("-")[0] for name in aws.ask("left")}
    assert {"vpc", "igw", "subnet", "sg"} <= kinds
    with pytest.raises(CloudError, match=vms[0].vm_id):
        provider.release("job")
    provider.terminate([vm.vm_id for vm in provider.list_vms("job")])
    provider.release("job")
    assert aws.ask("left") == []


def test_named_networks_are_used_and_left_alone(aws: FakeAws) -> None:
    subnet_id, group_id = aws.ask("users_own_network", region=REGION, zone=ZONE)
    provider = aws.provider(subnets={ZONE: subnet_id}, security_groups=(group_id,))
    (vm,) = rent(provider)
    assert "CreateSecurityGroup" not in sent(aws)
    provider.terminate([vm.vm_id])
    provider.release("job")
    assert aws.ask("left") == []


# --- SSH ----------------------------------------------------------------------------
