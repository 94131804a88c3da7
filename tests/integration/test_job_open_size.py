"""A job that leaves its micro-batch size open: measured, chosen, and kept ever after."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.jobs import STEPS, Job
from tests.view import View

from spottrain.varuna_manager.core.model.events import PlanComputed

pytestmark = pytest.mark.rotated(parts=[8])


def test_the_first_plan_settles_a_size_that_was_left_open(tmp_path: Path) -> None:
    open_size = {"microbatch_size": None, "profile": None, "resources": {"max_vms": 2}}
    with Job(tmp_path, "open", **open_size) as job:
        job.pace(0.05)
        measured = job.run("calibrate", str(job.file), "-o", "json")
        assert measured.code == 0, measured.err
        known = [one["microbatch_size"] for one in measured.report["microbatches"]]
        assert known == [1, 2, 4, 8]

        planned = job.run("plan", str(job.file), "--explain", "-o", "json").report
        assert planned["microbatch_size"] in known
        assert {one["microbatch_size"] for one in planned["candidates"]} == {
            planned["microbatch_size"]
        }

        assert job.launch("--detach").code == 0
        profile = View(job.until_trains(2)).profile
        job.pace(0.5)
        assert profile is not None
        assert list(profile.microbatch_sizes) == known
        assert job.run("stop", job.name).code == 0
        job.pace(0.0)
        report = job.resume("-o", "json").report

        assert (report["state"], report["steps_done"]) == ("succeeded", STEPS)
        plans = [e.plan for e in job.events() if isinstance(e, PlanComputed)]
        sizes = {plan.microbatch_size for plan in plans if plan is not None}
        assert len(plans) >= 2
        assert len(sizes) == 1
        assert sizes <= set(known)
