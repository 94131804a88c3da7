"""``calibrate --on``: one VM of a type is rented, measures, and is returned."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.jobs import Job


@pytest.mark.rotated
def test_a_local_vm_is_rented_only_when_asked_for_and_measures(tmp_path: Path) -> None:
    zones = [{"name": "a", "instance_type": "box", "spot_usd_per_hour": 3.0}]
    events = [{"at_s": 0.0, "kind": "capacity", "zone": "a", "count": 0}]
    with Job(tmp_path, "job", local={"zones": zones, "events": events}) as job:
        asked = ("calibrate", str(job.file), "--on", "box", "-o", "json")
        refused = job.run(*asked, "--yes", "--max-usd", "0")
        assert (refused.code, "more than 0" in refused.err) == (2, True)
        told = job.run(*asked)
        assert told.code == 2
        assert "box (a), at $3.00 per hour" in told.err
        assert not (tmp_path / "home" / "jobs").exists()

        measured = job.run(*asked, "--yes", "--again", "--max-usd", "2")

        assert measured.code == 0, measured.err
        assert measured.report["origin"] == "measured"
        report = job.run("report", "job-on-box", "-o", "json").report
        assert (report["state"], report["steps_done"]) == ("succeeded", 0)
        assert 0 < report["usd_spent"] < 2
