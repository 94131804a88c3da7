"""Jobs that run into their budget or their deadline."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Answer, Job, until
from tests.local_cloud import bill
from tests.view import View

from spottrain.pricing.billing.budget import WORTH_S, reserve_s

DEAR_USD_PER_HOUR = 36.0
"""A cent a second."""
LEASE_S = 8.0
MAX_USD = 0.015 * (reserve_s(LEASE_S) + WORTH_S)
"""Bears one VM at the price above, not two."""
SPARE_USD = 0.3
"""Lets it train for half a minute."""


def finish(job: Job) -> Answer:
    """Wait for the end of a detached job; return its report."""
    until("the end", lambda: not job.dir.is_managed())
    return job.run("report", job.name, "-o", "json")


def check_end(job: Job, report: dict[str, Any], state: str) -> None:
    assert report["state"] == state
    assert report["exit_code"] == 4
    assert report["checkpoints"] == [entry.name for entry in job.checkpoints()]
    assert job.checkpoints()[0].step == report["steps_done"]
    assert job.left_over() == []


def agree(job: Job) -> None:
    """The ledger and the cloud's bill agree to the micro-dollar."""
    state = job.state()
    spent = View(state).ledger.spent(state.now_s)
    assert abs(spent.microusd - 1e6 * bill(job.cloud, job.name)) <= 1.0
    assert View(state).ledger.unconfirmed == frozenset()


@pytest.mark.rotated(parts=[4])
def test_a_used_up_budget_ends_the_job_and_a_raised_one_lets_it_go_on(
    tmp_path: Path,
) -> None:
    zone = {"name": "a", "capacity": 2, "spot_usd_per_hour": DEAR_USD_PER_HOUR}
    settings: dict[str, Any] = {
        "resources": {"max_vms": 2},
        "budget": {"max_usd": MAX_USD},
        "manager": {"lease_s": LEASE_S},
        "local": {"zones": [zone]},
    }
    with Job(tmp_path, "poor", **settings) as job:
        job.pace(0.1)
        assert job.launch("--detach").code == 0
        job.until_trains(2)
        assert len(job.vms()) == 1, "the budget bears one VM alone"
        refused = job.run("set", job.name, "budget.max_usd=0.01")
        assert refused.code == 4
        assert "--yes" in refused.error
        status = job.run("status", job.name, "-o", "json").report
        max_usd = status["usd_spent"] + status["usd_reserved"] + SPARE_USD
        answer = job.run("set", job.name, f"budget.max_usd={max_usd}", "-o", "json")
        assert answer.code == 0, answer.err
        assert answer.report["max_usd"] == max_usd
        report = finish(job).report
        check_end(job, report, "budget")
        assert 0 < report["steps_done"] < report["steps"]
        assert report["usd_spent"] < max_usd
        assert f"budget of {max_usd:g} USD used up" in report["reason"]
        agree(job)
        assert job.run("set", job.name, f"budget.max_usd={9 * MAX_USD}").code == 0
        assert job.resume("--detach").code == 0
        job.until_trains(report["steps_done"] + 2)
        job.market("kill", zone="a")
        job.pace(0.0)
        assert finish(job).report["state"] == "succeeded"
        agree(job)


@pytest.mark.rotated(parts=[4])
def test_a_deadline_that_passes_ends_the_job_with_a_checkpoint(tmp_path: Path) -> None:
    with Job(tmp_path, "late", resources={"max_vms": 1}) as job:
        job.pace(0.2)
        assert job.launch("--detach").code == 0
        job.until_trains(2)
        began_s = time.monotonic()
        assert job.run("status", job.name).code == 0
        command_s = time.monotonic() - began_s
        deadline = datetime.now(UTC) + timedelta(seconds=5.0 + 3 * command_s)
        answer = job.run("set", job.name, f"slo.deadline={deadline.isoformat()}")
        assert answer.code == 0, answer.err
        report = finish(job).report
        check_end(job, report, "deadline")
        assert report["reason"] == "the deadline passed"


def test_a_market_without_machines_ends_the_job_with_5(tmp_path: Path) -> None:
    settings = {
        "resources": {"capacity_wait_s": 1.0},
        "local": {"zones": [{"name": "a", "capacity": 0}]},
    }
    with Job(tmp_path, "alone", **settings) as job:
        answer = job.launch("-o", "json")
        assert answer.code == 5, answer.err
        assert answer.error == "error: for 1 s no VM could be rented"
        assert answer.report["state"] == "capacity"
        assert job.left_over() == []
