"""The answer about a job's limits before anything is rented."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from tests.builders import an_offer
from tests.unit.varuna_manager.story import FACTS, PROFILE

from spottrain.errors import BudgetError, CapacityError
from spottrain.varuna_manager.config.job import JobConfig, parse_config
from spottrain.varuna_manager.jobs.profiles import keep
from spottrain.varuna_manager.offers.feasibility import (
    NOT_GUARANTEED,
    UNKNOWN,
    DeadlineCheck,
    check_deadline,
    check_memory,
    predict,
)

LONG = 100_000_000
"""Steps that take years."""


def config(steps: int = 10, *, on_demand: bool = False, **data: Any) -> JobConfig:
    zone = {"name": "a", "capacity": 4, "slot_memory_bytes": 1 << 30}
    prices = {"spot_usd_per_hour": 3.0, "on_demand_usd_per_hour": 10.0}
    return parse_config(
        {
            "name": "demo",
            "entrypoint": "train:job",
            "workdir": ".",
            "minibatch_size": 8,
            "steps": steps,
            "resources": {"max_vms": 4, "allow_on_demand": on_demand},
            "local": {"zones": [zone | prices]},
            **data,
        },
        "demo",
    )


def answer(steps: int = 10, **data: Any) -> DeadlineCheck | None:
    return predict(config(steps, **data), FACTS, profile=PROFILE)


def test_a_job_without_limits_gets_no_answer() -> None:
    assert answer(LONG) is None


def test_a_deadline_that_spot_vms_may_meet_is_not_guaranteed() -> None:
    assert answer(slo={"max_hours": 1}) is NOT_GUARANTEED


@pytest.mark.parametrize("hours", [1.0, 1e-12])
def test_a_deadline_that_spot_vms_cannot_meet_is_refused(hours: float) -> None:
    found = answer(LONG, slo={"max_hours": hours}, budget={"max_usd": 5})
    assert found is not None
    assert found.possible is False
    assert found.least_usd is not None
    assert found.least_usd > 1000
    assert found.earliest_finish_s is not None
    for part in ("move the deadline to", "raise the budget to"):
        assert part in found.reason
    assert "allow_on_demand" not in found.reason


def test_a_deadline_with_too_small_a_budget_is_refused() -> None:
    limits = {"slo": {"max_hours": 800_000}, "budget": {"max_usd": 5}}
    found = answer(LONG, **limits)
    assert found is not None
    assert found.possible is False
    assert "deadline and budget cannot both be met: without preemptions" in found.reason


@pytest.mark.parametrize("on_demand", [True, False])
def test_a_budget_too_small_for_the_job_is_reported_and_accepted(
    on_demand: bool,
) -> None:
    found = answer(LONG, on_demand=on_demand, budget={"max_usd": 5})
    assert found is not None
    assert found.possible is None
    assert "budget" in found.reason
    assert answer(on_demand=on_demand, budget={"max_usd": 5}) is None


@pytest.mark.parametrize("on_demand", [True, False])
def test_a_minimum_throughput_that_nothing_reaches_is_refused(on_demand: bool) -> None:
    found = answer(on_demand=on_demand, slo={"min_examples_per_s": 1e9})
    assert found is not None
    assert found.possible is False
    assert "slo.min_examples_per_s: 1e+09" in found.reason


def test_a_minimum_throughput_within_reach_is_guaranteed_by_on_demand_vms() -> None:
    found = answer(on_demand=True, slo={"min_examples_per_s": 0.1})
    assert found is not None
    assert found.possible
    assert answer(slo={"min_examples_per_s": 0.1}) is None


def test_nothing_is_known_of_a_model_that_was_never_measured() -> None:
    assert predict(config(LONG, slo={"max_hours": 1}), FACTS) is UNKNOWN
    assert predict(config(LONG, budget={"max_usd": 5}), FACTS) is None


def test_a_kept_profile_is_enough_to_refuse_a_job() -> None:
    keep(PROFILE)
    said: list[str] = []
    with pytest.raises(BudgetError, match="deadline"):
        check_deadline(config(LONG, slo={"max_hours": 1}), FACTS, None, said.append)
    answer = check_deadline(config(LONG, budget={"max_usd": 5}), FACTS, None, said.append)
    assert "budget" in answer
    assert said == []


def fits(slot_bytes: int, **data: Any) -> bool:
    """Return whether the job may be launched on slots of a size."""
    zone = {"name": "a", "slot_memory_bytes": slot_bytes}
    try:
        check_memory(config(local={"zones": [zone]}, **data), FACTS, None)
    except CapacityError:
        return False
    return True


def test_a_job_whose_state_fits_on_no_slots_is_refused() -> None:
    """Parameters, gradients and optimizer state of all, over four slots; and of one
    section, with its undo copy."""
    pages = 8192
    section = max(2 * s.param_bytes + s.optimizer_bytes for s in FACTS.sections)
    total = sum(2 * s.param_bytes + s.optimizer_bytes for s in FACTS.sections)
    least = max(2 * section + pages, -(-total // 4))
    assert fits(least)
    assert not fits(least - 1)
    assert not fits(least, reduction="exact")
    assert fits(2 * least, reduction="exact")


def test_what_is_not_known_refuses_nothing() -> None:
    offer = an_offer(cloud="aws", instance_type="unheard.of", gpu_memory_bytes=0)
    check_memory(config(), FACTS, ())
    check_memory(config(), FACTS, (offer,))


@pytest.mark.parametrize(
    ("billions", "advice"),
    [(2, ""), (20, "resources.max_vms: 8 with g5.xlarge is the least"), (60, "larger slots")],
)
def test_a_model_larger_than_all_gpus_is_refused_with_the_least_that_would_do(
    billions: int, advice: str
) -> None:
    """Four GPUs of 24 GB beside 17.2 GB of memory each; 16 bytes a parameter, 16 sections."""
    each = replace(
        FACTS.sections[0],
        param_bytes=billions * 250_000_000,
        optimizer_bytes=billions * 500_000_000,
        gradient_bytes=None,
    )
    facts = replace(FACTS, sections=(each,) * 16)
    offer = an_offer(cloud="aws", instance_type="g5.xlarge", gpu_memory_bytes=24_000_000_000)
    with pytest.raises(CapacityError, match=advice) if advice else nullcontext():
        check_memory(config(), facts, (offer,))
