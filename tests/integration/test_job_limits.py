"""Jobs that run into their budget or their deadline."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Answer, Job, until
from tests.integration.undisturbed import undisturbed

pytestmark = pytest.mark.timeout(400)

TOO_DEAR_USD_PER_HOUR = 3600.0
LEASE_S = 8.0
MAX_USD = 18.0
"""Bears one VM at the price above for little more than two leases."""


def finish(job: Job) -> Answer:
    """Wait for the end of a detached job; return its report."""
    until("the end", lambda: not job.dir.is_managed())
    return job.run("report", job.name, "-o", "json")


def check_end(job: Job, report: dict[str, Any], state: str) -> None:
    assert report["state"] == state
    assert report["exit_code"] == 4
    assert report["checkpoints"] == [entry.name for entry in job.checkpoints()]
    assert job.checkpoints()[0].step == report["steps_done"]
    assert job.processes() == []


def test_a_used_up_budget_ends_the_job_with_a_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "resources": {"max_vms": 2},
        "budget": {"max_usd": MAX_USD},
        "manager": {"lease_s": LEASE_S},
        "local": {"zones": [{"name": "a", "capacity": 1}]},
    }
    with Job(tmp_path, "poor", **settings) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        job.until_trains(2)
        job.market("price", zone="a", usd_per_hour=TOO_DEAR_USD_PER_HOUR)
        job.until("the price", lambda state: state.tally.price_changes)
        job.market("capacity", zone="a", count=2)
        report = finish(job).report
        check_end(job, report, "budget")
        assert 0 < report["steps_done"] < report["steps"]
        assert report["usd_spent"] < MAX_USD
        assert "budget of 18 USD used up" in report["reason"]


def test_a_deadline_that_passes_ends_the_job_with_a_checkpoint(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    usual_s = undisturbed(tmp_path_factory).answer.report["wall_s"]
    deadline = datetime.now(UTC) + timedelta(seconds=5 + 1.5 * usual_s)
    settings = {"slo": {"deadline": deadline.isoformat()}, "resources": {"max_vms": 1}}
    with Job(tmp_path, "late", **settings) as job:
        job.pace(0.2)
        answer = job.launch("-o", "json")
        assert answer.code == 4, answer.err
        assert answer.error == "error: the deadline passed"
        check_end(job, answer.report, "deadline")


def test_a_market_without_machines_ends_the_job_with_5(tmp_path: Path) -> None:
    settings = {
        "resources": {"capacity_wait_s": 1.0},
        "local": {"zones": [{"name": "a", "capacity": 0}]},
    }
    with Job(tmp_path, "alone", **settings) as job:
        answer = job.launch("-o", "json")
        assert answer.code == 5, answer.err
        assert answer.error == "error: no VM could be rented for 1 s"
        assert answer.report["state"] == "capacity"
        assert job.processes() == []
