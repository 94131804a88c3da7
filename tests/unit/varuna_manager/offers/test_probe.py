"""Jobs that measure a model on one VM of a type, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.pricing.ranked import FACTS, PROFILE
from tests.unit.varuna_manager.story import OFFER

from spottrain.errors import CapacityError, ConfigError
from spottrain.pricing.billing.budget import reserve_s
from spottrain.units import HOUR_S
from spottrain.varuna_manager.config.job import JobConfig, parse_config
from spottrain.varuna_manager.jobs import profiles
from spottrain.varuna_manager.launch.submit import check_budget
from spottrain.varuna_manager.offers.probe import (
    capped,
    cost_of,
    measured_before,
    probe_job,
)

CLOUDS = {
    "resources": {"provider": ["aws", "gcp"], "max_vms": 8, "min_vms": 4},
    "aws": {"regions": ["us-east-1"], "gpus": ["A100"]},
    "gcp": {"regions": ["us-central1"], "gpus": ["A100"], "project": "project"},
    "checkpoint": {"path": "s3://bucket/jobs/mine?region=us-east-1"},
}


def job(**changes: Any) -> JobConfig:
    data = {
        "name": "mine",
        "entrypoint": "m:f",
        "minibatch_size": 16,
        "microbatch_size": 1,
        "steps": 1000,
        "profile": "given.json",
        "budget": {"max_usd": 100.0},
        "slo": {"max_hours": 2.0},
    }
    return parse_config({**data, **changes}, "job.yaml")


def test_a_probe_rents_one_of_the_smallest_machines_of_the_clouds_that_have_it() -> None:
    probe = probe_job(job(**CLOUDS), "H100")
    assert probe.name == "mine-on-h100"
    assert (probe.resources.min_vms, probe.resources.max_vms) == (1, 1)
    assert probe.resources.providers == ("aws", "gcp")
    assert {one.gpus for cloud in probe.clouds for one in cloud.machines()} == {1}
    assert {one.gpu.name for cloud in probe.clouds for one in cloud.machines()} == {"H100"}
    place = "s3://bucket/jobs/mine/mine-on-h100?region=us-east-1"
    assert probe.checkpoint.path == place
    assert (probe.profile, probe.slo.max_hours) == (None, None)


def test_a_type_that_one_cloud_has_is_rented_there() -> None:
    assert probe_job(job(**CLOUDS), "p5.4xlarge").resources.provider == "aws"
    for wrong, told in (("H900", "no such GPU"), ("GT200", "no such GPU")):
        with pytest.raises(ConfigError, match=told):
            probe_job(job(**CLOUDS), wrong)
    with pytest.raises(ConfigError, match="no machine with Standard_NC40ads_H100_v5"):
        probe_job(job(**CLOUDS), "Standard_NC40ads_H100_v5")


def test_machines_of_the_job_file_are_named_by_their_type() -> None:
    zones = [
        {"name": "a", "instance_type": "fast", "spot_usd_per_hour": 0.5, "boot_s": 60},
        {"name": "b", "instance_type": "slow", "spot_usd_per_hour": 0.1},
    ]
    events = [{"at_s": 1.0, "kind": "kill", "zone": "b"}]
    local = job(local={"zones": zones, "events": events})
    probe = probe_job(local, "fast")
    assert [zone.name for zone in probe.zones] == ["a"]
    assert probe.local.events == ()
    with pytest.raises(ConfigError, match="take one of fast, slow"):
        probe_job(local, "H100")
    hosts = [{"address": "h1", "type": "box", "gpu": "T4"}, {"address": "h2"}]
    ssh = job(
        resources={"provider": "ssh"},
        ssh={"hosts": hosts},
        checkpoint={"path": "/shared"},
    )
    assert [host.address for host in probe_job(ssh, "T4").ssh.hosts] == ["h1"]
    with pytest.raises(ConfigError, match="box, host"):
        probe_job(ssh, "A100")


def test_its_cost_is_that_of_the_cheapest_and_its_cap_lets_it_begin() -> None:
    probe = probe_job(job(**CLOUDS), "H100")
    offers = [
        replace(OFFER, zone="dear", usd_per_hour=4.0),
        replace(OFFER, zone="cheap", usd_per_hour=3.0),
        replace(OFFER, zone="no spot", usd_per_hour=1.0, spot=False),
    ]
    cost = cost_of(probe, offers, None)
    assert cost.what.endswith("in cheap")
    assert cost.usd == pytest.approx(3.0 * cost.seconds / HOUR_S)
    kept_s = reserve_s(probe.manager.lease_s)
    assert cost.max_usd == pytest.approx(3.0 * (HOUR_S + kept_s) / HOUR_S)
    check_budget(capped(probe, cost.max_usd), offers)
    assert cost_of(probe, offers, 0.25).max_usd == 0.25
    with pytest.raises(CapacityError, match="nothing of that type"):
        cost_of(probe, offers[2:], None)


def test_machines_without_a_price_need_no_cap() -> None:
    zones = [{"name": "a", "spot_usd_per_hour": 0.0}]
    probe = probe_job(job(local={"zones": zones}), "cpu")
    assert capped(probe, cost_of(probe, None, None).max_usd).budget.max_usd is None


def test_what_was_measured_before_is_not_rented_again() -> None:
    config = job(**CLOUDS)
    profiles.keep(replace(PROFILE, device="NVIDIA H100 80GB HBM3", precision=config.precision))

    def found(kind: str, **changes: Any) -> bool:
        asked = job(**{**CLOUDS, **changes})
        return measured_before(asked, probe_job(config, kind), FACTS) is not None

    assert found("H100")
    assert not found("A100")
    assert not found("H100", microbatch_size=2)
    assert not found("H100", runtime={"precision": "fp32"})
