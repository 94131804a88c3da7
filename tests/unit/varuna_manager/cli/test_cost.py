"""``spottrain cost`` and ``spottrain report --html``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.varuna_manager.reporting.test_costs import told

from spottrain.varuna_manager.jobs.folder import job_dir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Measurements
from tests.commands import Run


@pytest.fixture
def run(run: Run) -> Run:
    """Commands on a machine with one job, which is over."""
    job = job_dir("job")
    job.path.mkdir(parents=True)
    journal = Journal(job.journal)
    journal.append(*told().steps)
    journal.close()
    Measurements(job.measurements).close()
    return run


def test_cost_is_one_document(run: Run) -> None:
    code, out, err = run("cost", "job", "-o", "json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["name"] == "job"
    assert document["vm_seconds"]["billed"] == pytest.approx(7200.0)
    _, out, _ = run("report", "job", "-o", "json")
    report = json.loads(out)
    assert report["cost"].items() <= document.items()
    assert [entry["kind"] for entry in report["timeline"]] == [
        "manager",
        "plan",
        "stop",
        "end",
    ]


@pytest.mark.parametrize("by", ["zone", "type", "vm"])
def test_the_bill_can_be_broken_down_by_zone_type_and_vm(run: Run, by: str) -> None:
    code, out, _ = run("cost", "job", "--by", by)
    assert code == 0
    assert by.upper() in out
    assert "$2.00" in out


def test_the_page_is_written_where_asked_and_its_path_is_said(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    code, out, err = run("report", "job", "--html", file)
    assert (code, out) == (0, "")
    assert err.split() == ["report:", str(file)]
    assert "Where the rented time went" in file.read_text()
    code, out, _ = run("report", "job", "--html", file, "-o", "json")
    assert json.loads(out)["name"] == "job"


def test_a_page_that_cannot_be_written_is_an_error_of_one_line(run: Run, tmp_path: Path) -> None:
    code, _, err = run("report", "job", "--html", tmp_path / "no" / "page.html")
    assert code == 1
    assert "page.html: " in err


def test_the_page_that_the_manager_left_is_named(run: Run) -> None:
    page = job_dir("job").page
    page.touch()
    assert str(page) in " ".join(run("report", "job")[2].split())
