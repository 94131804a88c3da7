"""``spottrain set`` at the command line, on jobs without a running manager."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.unit.varuna_manager.story import FACTS, OFFER

from spottrain.varuna_manager.config.job import load_config
from spottrain.varuna_manager.core.model.events import (
    LimitsChanged,
    ManagerStarted,
    OffersSeen,
    StopRequested,
)
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.launch import submit as submission
from tests.commands import Run


def submit(folder: Path, **changes: Any) -> JobDir:
    data = {
        "name": "demo",
        "entrypoint": "train:job",
        "workdir": "code",
        "minibatch_size": 8,
        "steps": 5,
        "budget": {"max_usd": 3, "alerts": [0.5]},
        "slo": {"max_hours": 2, "min_examples_per_s": 1.5},
    }
    (folder / "code").mkdir()
    path = folder / "job.yaml"
    path.write_text(json.dumps(data | changes))
    job, _ = submission.submit(load_config(path), FACTS)
    return job


def tell(job: JobDir, *events: ManagerStarted | OffersSeen | StopRequested) -> None:
    with contextlib.closing(Journal(job.journal)) as journal:
        journal.record(*events)


def test_what_is_now_true_is_answered(run: Run, tmp_path: Path) -> None:
    job = submit(tmp_path)
    assert read_state(job).job.budget.alerts == (0.5,)
    deadline = "2035-12-01T18:00:00Z"
    answer = run(*("set", "demo", "budget.max_usd=60", f"slo.deadline={deadline}", "-o", "json"))
    assert answer.code == 0, answer.err
    assert json.loads(answer.out) == {
        "schema_version": 1,
        "name": "demo",
        "max_usd": 60.0,
        "max_usd_per_hour": None,
        "deadline": deadline,
        "deadline_s": datetime.fromisoformat(deadline).timestamp(),
        "min_examples_per_s": 1.5,
        "usd_spent": 0.0,
        "usd_reserved": 0.0,
        "usd_per_hour": 0.0,
        "gpu_hours": 0.0,
        "gpu_hours_reserved": None,
        "gpu_hours_budget": None,
        "forecast": None,
        "notes": [],
    }
    text = run("set", "demo", "budget.max_usd_per_hour=2").out
    for part in ("$60.00: $0.00 spent", "$2.00: $0.00 now", deadline, "1.5 examples/s"):
        assert part in text


def test_the_journal_records_who_changed_what(run: Run, tmp_path: Path) -> None:
    submit(tmp_path)
    assert run("set", "demo", "slo.max_hours=none").code == 0
    assert "command line: slo.deadline is now none" in run("events", "demo").out


def test_a_stopped_job_has_its_new_limits_when_it_is_resumed(run: Run, tmp_path: Path) -> None:
    job = submit(tmp_path)
    tell(job, StopRequested(at_s=time.time(), by="a test", now=True))
    assert read_state(job).phase is JobPhase.ENDED
    assert run("set", "demo", "budget.max_usd=60").code == 0
    tell(job, ManagerStarted(at_s=time.time(), software_version="1", pid=1))
    state = read_state(job)
    assert (state.phase, state.job.budget.max_usd) == (JobPhase.ACTIVE, 60.0)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("budget.max_usd=60 EUR", 2, "must be a number of US dollars"),
        ("budgt.max_usd=60", 2, "budgt: unknown key; did you mean budget?"),
        ("steps=60", 2, "resume demo --steps N"),
        ("slo.deadline=2001-01-01T00:00:00Z", 2, "slo.deadline: is in the past"),
    ],
)
def test_a_wrong_change_changes_nothing(
    run: Run, tmp_path: Path, change: str, code: int, message: str
) -> None:
    job = submit(tmp_path)
    answer = run("set", "demo", change)
    assert (answer.code, answer.out) == (code, "")
    assert message in answer.err
    with contextlib.closing(Journal(job.journal, read_only=True)) as journal:
        assert not any(isinstance(e, LimitsChanged) for _, e in journal.read())


def test_a_cap_below_all_prices_is_accepted_with_a_warning(run: Run, tmp_path: Path) -> None:
    tell(submit(tmp_path), OffersSeen(at_s=time.time(), offers=(OFFER,)))
    enough, less = OFFER.usd_per_hour, OFFER.usd_per_hour / 2
    assert "no machine" not in run("set", "demo", f"budget.max_usd_per_hour={enough}").out
    answer = run("set", "demo", f"budget.max_usd_per_hour={less}")
    assert answer.code == 0
    assert "pays for no machine at present: the cheapest costs" in answer.out


def test_a_cap_that_pays_for_too_few_machines_gives_a_warning(run: Run, tmp_path: Path) -> None:
    job = submit(tmp_path, resources={"min_vms": 4, "max_vms": 4})
    tell(job, OffersSeen(at_s=time.time(), offers=(OFFER,)))
    change = f"budget.max_usd_per_hour={2 * OFFER.usd_per_hour}"
    assert "pays for fewer than 4 machines at present" in run("set", "demo", change).out


def test_a_job_that_has_ended_for_good_has_no_limits(run: Run, tmp_path: Path) -> None:
    submit(tmp_path)
    assert run("down", "demo").code == 0
    answer = run("set", "demo", "budget.max_usd=60")
    assert answer.code == 2
    assert "has ended, its limits cannot be changed" in answer.err


def test_an_unknown_job_exits_with_2(run: Run) -> None:
    assert run("set", "nobody", "budget.max_usd=60").code == 2
