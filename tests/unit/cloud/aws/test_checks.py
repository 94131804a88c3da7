"""Checks of an account, without renting."""

from __future__ import annotations

import pytest
from tests.fakes.aws import REGION, FakeAws

QUOTA = "L-3819A6DF"


def found(aws: FakeAws, **settings: object) -> dict[str, tuple[bool, str]]:
    provider = aws.provider(**settings)
    return {each.what: (each.ok, each.message) for each in provider.check()}


def wrong(aws: FakeAws, **settings: object) -> dict[str, str]:
    return {w: detail for w, (ok, detail) in found(aws, **settings).items() if not ok}


@pytest.mark.rotated
def test_checks_pass_without_renting_anything(
    aws: FakeAws,
) -> None:
    aws.ask("quota", code=QUOTA, vcpus=8)
    all_of_it = found(aws)
    assert list(all_of_it) == [
        "credentials",
        f"image {REGION}",
        f"types {REGION}",
        f"permission {REGION} run_instances",
        f"permission {REGION} create_security_group",
        f"permission {REGION} import_key_pair",
        f"quota {REGION} G and VT spot",
    ]
    assert all(ok for ok, _ in all_of_it.values()), all_of_it
    assert all_of_it[f"image {REGION}"][1] == "ami-00001101"
    assert aws.ask("left") == []


def test_a_zero_quota_says_where_to_request_more(aws: FakeAws) -> None:
    aws.ask("quota", code=QUOTA, vcpus=0)
    (findings,) = wrong(aws).values()
    assert findings.startswith("0 virtual CPUs: nothing can be rented; ask AWS for more at")


def test_each_missing_permission_is_named(aws: FakeAws) -> None:
    aws.ask("quota", code=QUOTA, vcpus=8)
    aws.ask("deny", operation="RunInstances")
    findings = wrong(aws)
    assert list(findings) == [f"permission {REGION} run_instances"]
    assert "UnauthorizedOperation" in findings[f"permission {REGION} run_instances"]


def test_an_account_without_a_default_network_may_rent(aws: FakeAws) -> None:
    aws.ask("quota", code=QUOTA, vcpus=8)
    aws.ask(
        "fail",
        operation="CreateSecurityGroup",
        kind="error",
        code="VPCIdNotSpecified",
        status=400,
    )
    assert wrong(aws) == {}


def test_permissions_are_checked_in_the_given_network_and_role(
    aws: FakeAws,
) -> None:
    aws.ask("quota", code=QUOTA, vcpus=8)
    zone = f"{REGION}a"
    subnet, group = aws.ask("users_own_network", region=REGION, zone=zone)
    aws.ask("instance_profile", name="theirs")
    findings = wrong(
        aws,
        subnets={zone: subnet},
        security_groups=(group,),
        instance_profile="theirs",
    )
    assert findings == {}
    asked = {each["operation"]: each["body"] for each in aws.ask("requests")}
    for word in (f"SubnetId={subnet}", f"={group}", "IamInstanceProfile.Name=theirs"):
        assert word in asked["RunInstances"]
    assert "VpcId=vpc-" in asked["CreateSecurityGroup"]


def test_an_unknown_region_image_type_or_group_is_reported_by_the_checks(
    aws: FakeAws,
) -> None:
    findings = wrong(aws, regions=("eu-centarl-1",))
    assert findings["region eu-centarl-1"].endswith(
        "got eu-centarl-1; did you mean eu-central-1?"
    ), findings
    assert "no image in us-east-1: got 'Nothing'" in wrong(aws, image="Nothing")[f"image {REGION}"]
    findings = wrong(aws, security_groups=("sg-1",))
    assert "got sg-1, of which 0 exist" in findings[f"permission {REGION} run_instances"]
    small = wrong(aws, disk_gib=14)[f"image {REGION}"]
    assert "needs a disk of 15 GiB: got 14; raise aws.disk_gib" in small
    findings = wrong(aws, regions=("us-west-1",))
    assert "us-west-1 does not rent g5.xlarge" in findings["types us-west-1"]


def test_refused_credentials_end_the_checks(aws: FakeAws) -> None:
    aws.ask("expire", expired=True)
    findings = found(aws)
    assert list(findings) == ["credentials"]
    assert not findings["credentials"][0]
    assert "credentials" in findings["credentials"][1]
