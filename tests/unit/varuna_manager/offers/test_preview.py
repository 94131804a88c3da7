"""What a plan is put together from: offers, their ranking, the fleet to begin with."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.builders import a_spec
from tests.unit.pricing.ranked import FACTS, PROFILE

from spottrain.errors import BudgetError, CapacityError, ConfigError
from spottrain.morphing.simulate.sharing import MAX_CROWDING
from spottrain.pricing.prices.history import History
from spottrain.pricing.prices.price import Price
from spottrain.varuna_manager.cli import plan
from spottrain.varuna_manager.cli.console import Output
from spottrain.varuna_manager.config.job import JobConfig, parse_config
from spottrain.varuna_manager.jobs import profiles
from spottrain.varuna_manager.offers import market
from spottrain.varuna_manager.offers.checks import Checked
from spottrain.varuna_manager.offers.estimates import estimate
from spottrain.varuna_manager.offers.preview import (
    SearchScope,
    check_capacity,
    preview_job,
    profile_on_known_device,
)
from spottrain.varuna_manager.reporting.tables import preview_parts
from spottrain.wire.model import GroupProfile

OFFLINE = SearchScope(offline=True)


def job(**changes: Any) -> JobConfig:
    zones = [
        {"name": "expensive", "spot_usd_per_hour": 2.0, "capacity": 4},
        {"name": "cheap", "spot_usd_per_hour": 1.0, "capacity": 2},
    ]
    data = {
        "name": "job",
        "entrypoint": "m:f",
        "minibatch_size": 16,
        "microbatch_size": 1,
        "steps": 1000,
        "resources": {"max_vms": 4},
        "local": {"zones": zones},
    }
    return parse_config({**data, **changes}, "job.yaml")


def spot(zone: str, usd_per_hour: float) -> Price:
    now_s = time.time()
    return Price(
        cloud="aws",
        region=zone[:-1],
        zone=zone,
        instance_type="p4d.24xlarge",
        spot=True,
        usd_per_hour=usd_per_hour,
        since_s=now_s - 60.0,
        seen_s=now_s - 60.0,
        source="test",
    )


def test_the_fleet_is_of_the_first_offers() -> None:
    document = preview_job(job(), FACTS, PROFILE, OFFLINE)
    json.dumps(document, allow_nan=False)
    assert [vm["zone"] for vm in document["fleet"]] == ["cheap"] * 2 + ["expensive"] * 2
    assert document["usd_per_hour"] == 6.0
    assert document["choice"] == "local cheap cpu spot"
    assert [row["zone"] for row in document["offers"]][:2] == ["cheap", "expensive"]
    reason = "on demand: resources.allow_on_demand is not set"
    assert [row["why_not"] for row in document["offers"]] == ["", "", reason, reason]
    assert document["plan"] is not None


def test_a_plan_says_what_the_loss_of_its_only_vm_takes_along() -> None:
    box = [{"name": "box", "capacity": 1, "slots": 2, "spot_usd_per_hour": 1.0}]
    document = preview_job(
        job(resources={"max_vms": 1}, local={"zones": box}), FACTS, PROFILE, OFFLINE
    )
    text = "\n".join(str(part) for part in preview_parts(document, explain=False))
    assert "lost VM  takes an only copy of a stage with it: " in text
    document["vm_loss"]["by_worker"] = True
    text = "\n".join(str(part) for part in preview_parts(document, explain=False))
    assert (
        "takes an only copy of a stage with it, as a killed worker does of state on its GPU: "
        in text
    )


def test_a_plan_of_slots_that_divide_matrices_says_where_its_times_are_from() -> None:
    box = [{"name": "box", "capacity": 1, "slots": 2, "spot_usd_per_hour": 1.0}]
    divided = job(resources={"max_vms": 1}, local={"zones": box}, runtime={"tensor_parallel": 2})
    facts = replace(FACTS, tensor_sizes=(2,))
    groups = (GroupProfile(size=2, microbatches=PROFILE.microbatches),)
    for profile, times in ((PROFILE, "derived"), (replace(PROFILE, groups=groups), "measured")):
        document = preview_job(divided, facts, profile, OFFLINE)
        assert document["candidates"][0]["tensor_times"] == times
        text = "\n".join(str(part) for part in preview_parts(document, explain=False))
        assert f"times of groups {times}" in text


def test_the_budget_s_hourly_cap_bounds_the_fleet() -> None:
    document = preview_job(job(budget={"max_usd_per_hour": 4.5}), FACTS, PROFILE, OFFLINE)
    assert [vm["zone"] for vm in document["fleet"]] == ["cheap", "cheap", "expensive"]
    capped = job(budget={"max_usd_per_hour": 0.9})
    with pytest.raises(BudgetError, match="max_usd_per_hour"):
        preview_job(capped, FACTS, PROFILE, OFFLINE)


def test_a_cap_that_pays_for_too_few_machines_is_named() -> None:
    zones = [{"name": "only", "spot_usd_per_hour": 3.0}]
    few = job(
        resources={"min_vms": 4, "max_vms": 4},
        budget={"max_usd_per_hour": 7},
        local={"zones": zones},
    )
    with pytest.raises(BudgetError, match=r"7.0 does not pay for 4 machines \(res"):
        preview_job(few, FACTS, PROFILE, OFFLINE)
    beside = job(resources={"min_vms": 4}, budget={"max_usd_per_hour": 5})
    with pytest.raises(BudgetError, match=r"2 can be .* budget.max_usd_per_hour 5"):
        preview_job(beside, FACTS, PROFILE, OFFLINE)


def test_where_nothing_fits_the_plan_says_what_is_missing() -> None:
    zones = [{"name": "small", "slot_memory_bytes": 10**7}]
    document = preview_job(job(local={"zones": zones}), FACTS, PROFILE, OFFLINE)
    assert document["plan"] is None
    assert document["why_not"]
    assert document["candidates"]
    assert document["choice"] is None
    assert document["why_not"] in document["why"]


def test_machines_of_two_kinds_may_fit_together() -> None:
    zones = [{"name": z, "capacity": 2, "slot_memory_bytes": m}
             for z, m in (("a", 2 * 10**8), ("b", 2 * 10**8))]  # fmt: skip
    document = preview_job(job(local={"zones": zones}), FACTS, PROFILE, OFFLINE)
    assert [vm["zone"] for vm in document["fleet"]] == ["a", "a", "b", "b"]
    assert document["plan"] is not None


def test_no_machine_at_all_is_an_error() -> None:
    zones = [{"name": "gone", "capacity": 0}]
    with pytest.raises(CapacityError, match=r"no offer can be used: .*no machine is available"):
        preview_job(job(local={"zones": zones}), FACTS, PROFILE, OFFLINE)


def test_too_few_machines_are_an_error_before_anything_is_measured() -> None:
    few = {"min_vms": 7, "max_vms": 8}
    with pytest.raises(CapacityError, match="7 VMs wanted, 6 can be rented"):
        check_capacity(job(resources=few))
    capped = {"max_usd_per_hour": 1.5}
    with pytest.raises(CapacityError):
        check_capacity(job(resources=few, budget=capped))
    with pytest.raises(BudgetError, match=r"1 can be .* budget.max_usd_per_hour 1.5"):
        check_capacity(job(resources={"min_vms": 2}, budget=capped))
    check_capacity(job(resources={"min_vms": 6, "max_vms": 8}))


def test_other_clouds_are_ranked_but_not_rented(home: Path) -> None:
    with History(home / "market.sqlite") as history:
        history.record_prices([spot("us-east-1a", 0.5)])
    document = preview_job(job(), FACTS, PROFILE, replace(OFFLINE, clouds=("aws",)))
    assert document["choice"] == "aws us-east-1a p4d.24xlarge spot"
    assert {vm["cloud"] for vm in document["fleet"]} == {"local"}


def cloud_job(tmp_path: Path, **aws: Any) -> JobConfig:
    return job(
        resources={"provider": "aws", "max_vms": 2},
        checkpoint={"path": str(tmp_path)},
        aws={"instance_types": ["p4d.24xlarge"], "regions": ["us-east-1"], **aws},
        runtime={"precision": "fp32"},  # a V100, on which it was measured, has no bf16
    )


def test_a_cloud_s_job_is_planned_at_the_last_known_prices(home: Path, tmp_path: Path) -> None:
    prices = [spot("us-east-1a", 9.0), spot("us-east-1b", 8.0), spot("us-west-2a", 1.0)]
    with History(home / "market.sqlite") as history:
        history.record_prices(prices)
    document = preview_job(cloud_job(tmp_path), FACTS, PROFILE, OFFLINE)
    assert [vm["zone"] for vm in document["fleet"]] == ["us-east-1b"] * 2
    assert document["slots"] == 16
    only = preview_job(cloud_job(tmp_path, zones=["us-east-1a"]), FACTS, PROFILE, OFFLINE)
    assert [vm["zone"] for vm in only["fleet"]] == ["us-east-1a"] * 2


def test_the_fleet_s_plan_is_the_one_it_was_ranked_by(home: Path, tmp_path: Path) -> None:
    """A profile of a slower network says nothing about the network that would be rented."""
    slow = replace(PROFILE.between_vms, bandwidth_bytes_per_s=1e6)
    with History(home / "market.sqlite") as history:
        history.record_prices([spot("us-east-1a", 9.0)])
    config = cloud_job(tmp_path)
    document = preview_job(config, FACTS, replace(PROFILE, between_vms=slow), OFFLINE)
    best = document["offers"][0]
    rate = config.minibatch_size * config.steps / document["train_s"]
    assert rate == pytest.approx(best["examples_per_s"])
    assert document["plan"] == best["plan"]


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [("auto", "bf16", 312e12), ("auto", "fp32", 19.5e12), ("cpu", "bf16", None)],
)
def test_utilisation_is_of_the_gpus_that_would_be_rented(
    home: Path, tmp_path: Path, device: str, precision: str, peak: float | None
) -> None:
    kind = "p4d.24xlarge" if peak else "c7i.4xlarge"
    with History(home / "market.sqlite") as history:
        price = replace(spot("us-east-1a", 9.0), instance_type=kind)
        history.record_prices([price])
    sections = (replace(s, flops_per_example=10**12) for s in FACTS.sections)
    facts = replace(FACTS, sections=tuple(sections))
    config = job(
        resources={"provider": "aws", "max_vms": 2, "device": device},
        runtime={"precision": precision},
        checkpoint={"path": str(tmp_path)},
        aws={"instance_types": [kind], "regions": ["us-east-1"]},
    )
    profile = replace(PROFILE, device="A100" if peak else "Xeon, 1 thread")
    document = preview_job(config, facts, profile, OFFLINE)
    on = "16 x A100 (GPU)" if peak else "CPUs: Xeon Platinum 8488C, 1 thread each"
    assert document["computes_on"] == f"{on}, {precision}"
    step_s = document["train_s"] / config.steps
    depth, width = map(int, document["plan"].split("x"))
    flops_per_s = 16 * 3 * len(FACTS.sections) * 1e12 / step_s / (depth * width)
    assert document["tflops_per_gpu"] == pytest.approx(flops_per_s / 1e12)
    expected = peak and pytest.approx(flops_per_s / peak)
    assert document["mfu"] == expected


def test_of_a_job_whose_slots_share_cores_time_and_money_are_ranges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(market, "cores", lambda: 2)
    document = preview_job(job(), FACTS, replace(PROFILE, origin="measured"), OFFLINE)
    most = document["train_max_s"] / document["train_s"]
    assert document["usd_max"] / document["usd"] == pytest.approx(most) == MAX_CROWDING
    text = "".join(map(str, preview_parts(document, explain=False)))
    assert text.count(" to ") == 2


def test_a_cloud_s_machines_are_predicted_from_a_profile_of_a_known_gpu() -> None:
    assert profile_on_known_device(FACTS, a_spec(), False) is None
    laptop = replace(PROFILE, device="Xeon, 1 thread")
    profiles.keep(laptop)
    assert profile_on_known_device(FACTS, a_spec(), False) is None
    profiles.keep(PROFILE)
    assert profile_on_known_device(FACTS, a_spec(), False) == PROFILE


@pytest.mark.parametrize(
    ("limit", "key"),
    [
        ({"budget": {"max_usd": 5}}, "budget.max_usd"),
        ({"budget": {"max_gpu_hours": 5}}, "budget.max_gpu_hours"),
        ({"slo": {"max_hours": 2}}, "slo.max_hours"),
        ({"slo": {"deadline": "2999-01-01T00:00:00Z"}}, "slo.deadline"),
        ({"slo": {"min_examples_per_s": 1e9}}, "slo.min_examples_per_s"),
    ],
)
def test_a_plan_that_exceeds_a_limit_says_so_first_and_exits_with_4(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    limit: dict[str, Any],
    key: str,
) -> None:
    profiles.keep(PROFILE)
    with History(home / "market.sqlite") as history:
        history.record_prices([spot("us-east-1a", 10.0)])
    config = cloud_job(tmp_path)
    checked = Checked(config=config, facts=FACTS, offers=None, data_bytes={})
    data = config.model_dump(mode="json", exclude_unset=True)
    data["steps"] = 10**12 if key == "slo.deadline" else 10**7
    small = parse_config({**data, **limit}, "job.yaml")
    with pytest.raises(BudgetError, match=key) as caught:
        plan.preview(small, checked, Output.TABLE, scope=OFFLINE)
    assert caught.value.exit_code == 4
    assert capsys.readouterr().out.startswith(f"exceeds  {key}: the")
    plan.preview(config, checked, Output.TABLE, scope=OFFLINE)
    assert "exceeds" not in capsys.readouterr().out


def test_a_laptop_s_profile_predicts_no_cloud(tmp_path: Path) -> None:
    laptop = replace(PROFILE, device="Xeon, 1 thread")
    with pytest.raises(ConfigError, match="measured on a CPU"):
        preview_job(cloud_job(tmp_path), FACTS, laptop, OFFLINE)


def test_an_estimate_knows_that_ranks_divide_the_sequence(tmp_path: Path) -> None:
    sections = tuple(replace(one, flops_per_example=10**9) for one in FACTS.sections)
    facts = replace(FACTS, sections=sections)
    whole = cloud_job(tmp_path)
    runtime = whole.runtime.model_copy(update={"sequence_parallel": True})
    parts = whole.model_copy(update={"runtime": runtime})

    assert [estimate(one, facts).sequence_parallel for one in (whole, parts)] == [False, True]
