"""A job with a deadline, from the command line; what is decided is tested in simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import Job
from tests.view import View

pytestmark = pytest.mark.rotated(parts=[9])

SETTINGS: dict[str, Any] = {
    "profile": None,  # measured first, on this machine
    "resources": {"max_vms": 2, "allow_on_demand": True},
    "budget": {"max_usd": 20},
    "slo": {"max_hours": 2},
    "local": {
        "zones": [
            {
                "name": "a",
                "capacity": 2,
                "spot_usd_per_hour": 1.0,
                "on_demand_usd_per_hour": 3.0,
            }
        ]
    },
}


def test_a_deadline_that_cannot_be_kept_is_refused_before_anything_is_rented(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, "hasty", **SETTINGS | {"slo": {"max_hours": 1e-5}}) as job:
        for command in ("plan", "launch"):
            answer = job.run(command, str(job.file))
            assert answer.code == 4
            assert "deadline" in answer.error
        assert not job.dir.path.exists()


def test_a_job_with_time_to_spare_is_told_when_it_will_be_done_and_for_how_much(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, "calm", **SETTINGS) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        job.until("a forecast", lambda state: View(state).decision)
        status = job.run("status", job.name, "-o", "json").report
        forecast = status["forecast"]
        assert forecast["mode"] == "spot", forecast
        assert 0 < forecast["slack_s"] < 7200
        finish = forecast["finish_s"]
        assert finish["low"] <= finish["expected"] <= finish["high"]
        assert finish["high"] <= status["deadline_s"]
        assert 0 < forecast["usd"]["low"] <= forecast["usd"]["high"] <= 20
        assert all(vm.offer.spot for vm in job.vms())
        job.pace(0.0)
        job.until("the end", lambda state: state.outcome)
