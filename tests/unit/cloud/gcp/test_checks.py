"""Checks of a project by the doctor, without renting."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.fakes.gcp import KIND, PROJECT, REGION, FakeGcp, FakePrices

from spottrain.cloud.port.provider import Finding


def found(gcp: FakeGcp, **settings: Any) -> dict[str, Finding]:
    findings = gcp.provider(**settings).check()
    assert all("\n" not in finding.message for finding in findings)
    return {finding.what: finding for finding in findings}


@pytest.mark.rotated
def test_checks_pass_for_a_project_that_can_rent(gcp: FakeGcp) -> None:
    gcp.ask("quota", metric="PREEMPTIBLE_NVIDIA_A100_GPUS", limit=8)
    gcp.ask("quota", metric="GPUS_ALL_REGIONS", limit=8)
    told = found(gcp)
    assert all(finding.ok for finding in told.values())
    assert list(told) == [
        "credentials",
        "image",
        f"region {REGION}",
        f"types {REGION}",
        "prices",
        f"quota {REGION} NVIDIA_A100_GPUS",
        "quota GPUS_ALL_REGIONS",
    ]


def test_a_zero_quota_is_reported_with_advice(gcp: FakeGcp) -> None:
    told = found(gcp)
    wrong = {what for what, finding in told.items() if not finding.ok}
    assert wrong == {
        f"quota {REGION} NVIDIA_A100_GPUS",
        "quota GPUS_ALL_REGIONS",
    }


def test_without_a_spot_quota_the_on_demand_quota_counts(gcp: FakeGcp) -> None:
    gcp.ask("quota", metric="NVIDIA_A100_GPUS", limit=4)
    told = found(gcp)[f"quota {REGION} NVIDIA_A100_GPUS"]
    assert (told.ok, told.message) == (True, "4 GPUs")


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"project": "another"}, "credentials"),
        ({"image": "whatever"}, "image"),
        ({"regions": ("mars-west1",)}, "region mars-west1"),
        ({"instance_types": ("a2-highgpu-8g",)}, f"types {REGION}"),
    ],
)
def test_every_problem_is_a_finding(gcp: FakeGcp, settings: dict[str, Any], wrong: str) -> None:
    gcp.ask("quota", metric="PREEMPTIBLE_NVIDIA_A100_GPUS", limit=8)
    gcp.ask("quota", metric="GPUS_ALL_REGIONS", limit=8)
    told = found(gcp, **settings)
    assert [what for what, finding in told.items() if not finding.ok][:1] == [wrong]


def test_a_type_missing_in_one_region_is_reported(
    gcp: FakeGcp,
) -> None:
    told = found(gcp, instance_types=(KIND, "a2-highgpu-8g"))[f"types {REGION}"]
    assert (told.ok, told.one_of) == (True, "types")
    assert told.message == "1 type can be rented, but not a2-highgpu-8g"


def test_the_global_quota_and_one_regional_quota_are_required(
    gcp: FakeGcp,
) -> None:
    told = found(gcp)
    assert told[f"quota {REGION} NVIDIA_A100_GPUS"].one_of == "quota"
    assert told["quota GPUS_ALL_REGIONS"].one_of == ""


def test_expired_credentials_are_found_first(gcp: FakeGcp) -> None:
    gcp.ask("expire", expired=True)
    assert list(found(gcp)) == ["credentials"]
    assert PROJECT in found(gcp)["credentials"].message


def test_without_prices_the_doctor_says_that_nothing_can_be_rented(
    gcp: FakeGcp,
) -> None:
    provider = gcp.provider(time.monotonic, FakePrices("gcp: no credentials"))
    (prices,) = (finding for finding in provider.check() if finding.what == "prices")
    assert not prices.ok
    assert "nothing can be rented; gcp: " in prices.message
    (prices,) = (f for f in gcp.provider().check() if f.what == "prices")
    assert prices.ok
    assert prices.message.endswith("types and zones have a price")
