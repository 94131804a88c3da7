"""Request builders and readers of answers; no network."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_launch
from tests.fakes.aws import FACTS

from spottrain.cloud.aws import requests
from spottrain.cloud.aws.requests import AwsPlacement
from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.port import lease, tags
from spottrain.cloud.port.facts import make_offer
from spottrain.cloud.port.provider import LaunchRequest, VmState, cloud_of

SETTINGS = AwsSettings(instance_types=("g5.xlarge",))
PLACE = AwsPlacement("subnet-1", ("sg-1",), "key", "ami-1", "/dev/sda1")


def launch_request(spot: bool = True, token: str = "t", usd: float = 0.4) -> LaunchRequest:
    offer = make_offer(
        FACTS,
        cloud="aws",
        family="G and VT",
        region="us-east-1",
        zone="us-east-1a",
        instance_type="g5.xlarge",
        spot=spot,
        usd_per_hour=usd,
        observed_at_s=1.0,
    )
    return a_launch(offer, 3, token=token, job="j", intent="intent-1", lease_s=600.5)


def test_a_repeated_launch_request_is_identical() -> None:
    first = requests.run_instances(launch_request(), PLACE, SETTINGS)
    assert requests.run_instances(launch_request(), PLACE, SETTINGS) == first
    assert first["ClientToken"] == requests.client_token(launch_request())


@given(st.text(min_size=1, max_size=200))
def test_every_token_fits_what_ec2_takes(token: str) -> None:
    made = requests.client_token(launch_request(token=token))
    assert made.isascii()
    assert len(made) <= 64


@given(st.floats(min_value=1e-4, max_value=1000))
def test_the_price_comes_back_from_the_tags_as_it_was(usd: float) -> None:
    asked = requests.run_instances(launch_request(usd=usd), PLACE, SETTINGS)
    instance = {
        "InstanceId": "i-1",
        "LaunchTime": datetime(2026, 1, 1, tzinfo=UTC),
        "Placement": {"AvailabilityZone": "us-east-1a"},
        "InstanceType": "g5.xlarge",
        "InstanceLifecycle": "spot",
        "State": {"Name": "running"},
        "Tags": asked["TagSpecifications"][0]["Tags"],
    }
    vm = requests.vm_of("us-east-1", instance, FACTS)
    assert vm.offer.usd_per_hour == usd
    assert (vm.job, vm.intent, vm.state) == ("j", "intent-1", VmState.RUNNING)


def test_a_launch_ends_billing_with_a_shutdown_and_leaves_no_disk() -> None:
    asked = requests.run_instances(launch_request(), PLACE, SETTINGS)
    assert asked["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert asked["BlockDeviceMappings"][0]["Ebs"]["DeleteOnTermination"] is True
    assert asked["MetadataOptions"]["HttpTokens"] == "required"
    assert asked["UserData"] == lease.boot_script(600.5)


def test_everything_rented_is_tagged_and_on_demand_is_no_spot_request() -> None:
    spot = requests.run_instances(launch_request(), PLACE, SETTINGS)
    plain = requests.run_instances(launch_request(spot=False), PLACE, SETTINGS)
    for asked, kinds in ((spot, 4), (plain, 3)):
        assert len(asked["TagSpecifications"]) == kinds
        for spec in asked["TagSpecifications"]:
            marks = {tag["Key"]: tag["Value"] for tag in spec["Tags"]}
            assert marks[tags.JOB] == "j"
            assert marks[tags.INTENT] == "intent-1"
            assert marks[tags.EXPIRES] == "601"
    assert "InstanceMarketOptions" not in plain
    assert spot["InstanceMarketOptions"]["SpotOptions"]["SpotInstanceType"] == "one-time"


def test_role_and_key_pair_are_optional() -> None:
    settings = AwsSettings(instance_types=(), instance_profile="role")
    placement = AwsPlacement("subnet-1", ("sg-1",), "", "ami-1", "/dev/sda1")
    asked = requests.run_instances(launch_request(), placement, settings)
    assert asked["IamInstanceProfile"] == {"Name": "role"}
    assert "KeyName" not in asked


@pytest.mark.parametrize(
    ("text", "ended_at_s"),
    [
        ("User initiated (2026-11-20 07:49:24 GMT)", 1795160964.0),
        ("Service initiated (2026-11-20 07:49:24 UTC)", 1795160964.0),
        ("Server.SpotInstanceTermination", None),
        ("", None),
    ],
)
def test_the_end_time_is_parsed_from_the_transition_reason(
    text: str, ended_at_s: float | None
) -> None:
    assert requests.ended_at_s({"StateTransitionReason": text}) == ended_at_s


@given(st.from_regex(r"i-[0-9a-f]{17}", fullmatch=True), st.integers(0, 99))
def test_a_vm_id_contains_its_cloud_and_region(instance_id: str, hops: int) -> None:
    vm_id = requests.vm_id_of("eu-west-1", instance_id, hops)
    assert requests.split_vm_id(vm_id) == ("eu-west-1", instance_id)
    assert requests.hops_of(vm_id) == hops
    assert cloud_of(vm_id) == "aws"
    for other in ("vm-of-nobody", vm_id.replace("aws", "gcp")):
        assert requests.split_vm_id(other)[0] == ""


def test_host_keys_are_read_from_the_console_once_they_are_all_there() -> None:
    begun = "boot\r\n-----BEGIN SSH HOST KEY KEYS-----\r\nssh-ed25519 AAAA root@x\r\n"
    assert requests.host_keys("") == ()
    assert requests.host_keys(begun) == ()
    whole = f"{begun}ecdsa BBBB\r\n-----END SSH HOST KEY KEYS-----\r\nlogin:"
    assert requests.host_keys(whole) == ("ssh-ed25519 AAAA", "ecdsa BBBB")


def test_ssh_is_allowed_from_the_given_networks_only() -> None:
    assert [rule["IpProtocol"] for rule in requests.ssh_rules("sg", ())] == ["-1"]
    _, ssh = requests.ssh_rules("sg", ("192.0.2.0/24",))
    assert (ssh["FromPort"], ssh["ToPort"]) == (22, 22)
    assert ssh["IpRanges"] == [{"CidrIp": "192.0.2.0/24"}]


def test_quotas_are_those_of_the_families_that_are_rented() -> None:
    assert requests.quota_codes(["g5.xlarge", "g6e.48xlarge"]) == {
        ("G and VT", True): "L-3819A6DF",
        ("G and VT", False): "L-DB2E81BA",
    }
    assert ("P", True) in requests.quota_codes(["p4d.24xlarge"])
    # "Amazon EC2 endpoints and quotas": P5 spot instances have a quota of their own.
    assert requests.quota_codes(["p5.48xlarge", "p5en.48xlarge"]) == {
        ("P5", True): "L-C4BD4855",
        ("P5", False): "L-417A185B",
    }
    assert requests.quota_codes(["c7i.large"]) == {
        ("Standard", True): "L-34B43A08",
        ("Standard", False): "L-1216C47A",
    }
    assert requests.quota_codes(["x9.huge"]) == {}


def test_a_vm_of_an_unknown_type_is_still_listed() -> None:
    instance: dict[str, Any] = {
        "InstanceId": "i-1",
        "LaunchTime": datetime(2026, 1, 1, tzinfo=UTC),
        "Placement": {"AvailabilityZone": "us-east-1a"},
        "InstanceType": "x9.huge",
        "State": {"Name": "stopped"},
    }
    vm = requests.vm_of("us-east-1", instance, FACTS)
    assert (vm.offer.gpus, vm.state) == (0, VmState.STOPPING)
