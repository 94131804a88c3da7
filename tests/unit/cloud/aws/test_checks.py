"""What is found out about an account without renting."""

from __future__ import annotations

from tests.fakes.aws import REGION, FakeAws

from spottrain.cloud.port.provider import ChecksAccount

QUOTA = "L-3819A6DF"


def found(aws: FakeAws, **settings: object) -> dict[str, tuple[bool, str]]:
    provider = aws.provider(**settings)
    assert isinstance(provider, ChecksAccount)
    return {each.what: (each.ok, each.told) for each in provider.check()}


def wrong(aws: FakeAws, **settings: object) -> dict[str, str]:
    return {w: told for w, (ok, told) in found(aws, **settings).items() if not ok}


def test_an_account_that_may_rent_has_nothing_wrong_and_nothing_rented(
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


def test_a_quota_of_zero_says_where_to_ask_for_more(aws: FakeAws) -> None:
    aws.ask("quota", code=QUOTA, vcpus=0)
    (told,) = wrong(aws).values()
    assert told.startswith("0 virtual CPUs: nothing can be rented; ask AWS for more at")


def test_each_permission_that_lacks_is_named(aws: FakeAws) -> None:
    aws.ask("quota", code=QUOTA, vcpus=8)
    aws.ask("deny", operation="RunInstances")
    told = wrong(aws)
    assert list(told) == [f"permission {REGION} run_instances"]
    assert "UnauthorizedOperation" in told[f"permission {REGION} run_instances"]


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


def test_permissions_are_tried_in_the_network_and_role_that_the_job_names(
    aws: FakeAws,
) -> None:
    aws.ask("quota", code=QUOTA, vcpus=8)
    zone = f"{REGION}a"
    subnet, group = aws.ask("users_own_network", region=REGION, zone=zone)
    aws.ask("instance_profile", name="theirs")
    told = wrong(
        aws,
        subnets={zone: subnet},
        security_groups=(group,),
        instance_profile="theirs",
    )
    assert told == {}
    asked = {each["operation"]: each["body"] for each in aws.ask("requests")}
    for word in (f"SubnetId={subnet}", f"={group}", "IamInstanceProfile.Name=theirs"):
        assert word in asked["RunInstances"]
    assert "VpcId=vpc-" in asked["CreateSecurityGroup"]


def test_an_unknown_region_image_or_type_is_told_before_anything_is_rented(
    aws: FakeAws,
) -> None:
    told = wrong(aws, regions=("eu-centarl-1",))
    assert told["region eu-centarl-1"].endswith(
        "got eu-centarl-1; did you mean eu-central-1?"
    ), told
    assert (
        "no image in us-east-1: got 'Nothing'"
        in wrong(aws, image="Nothing")[f"image {REGION}"]
    )
    told = wrong(aws, regions=("us-west-1",))
    assert "us-west-1 does not rent g5.xlarge" in told["types us-west-1"]


def test_refused_credentials_end_the_checks(aws: FakeAws) -> None:
    aws.ask("expire", expired=True)
    told = found(aws)
    assert list(told) == ["credentials"]
    assert not told["credentials"][0]
    assert "check the credentials" in told["credentials"][1]
