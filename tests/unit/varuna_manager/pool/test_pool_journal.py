"""A pool's journal leads where the pool was, and its report is made from it."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from tests.simulation.test_simulation import settings
from tests.view import changed

from spottrain.eventlog.journal import JournalError
from spottrain.varuna_manager.config.pool import parse_pool
from spottrain.varuna_manager.core.model.commands import Outcome, OutcomeKind
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.pool.core.model import (
    HoldingsReported,
    JobRequest,
    JobRequested,
    Limits,
    PoolCreated,
    PoolEvent,
    PoolJobEnded,
    PoolJobPaused,
    PoolSettings,
    PoolSettingsChanged,
    PoolStarted,
    PoolState,
    PriorityChanged,
    Supply,
    Team,
)
from spottrain.varuna_manager.pool.core.step import step
from spottrain.varuna_manager.pool.report.document import document
from spottrain.varuna_manager.pool.report.forecast import plan_document, plan_lines
from spottrain.varuna_manager.pool.report.page import divisions, report_page
from spottrain.varuna_manager.pool.report.tables import parts
from spottrain.varuna_manager.pool.store.folder import PoolDir, create_pool
from spottrain.varuna_manager.pool.store.journal import PoolJournal, PoolStep

BEGIN_S = 1_000_000.0
CREATED = PoolCreated(
    at_s=BEGIN_S,
    settings=PoolSettings(
        policy="priority",
        limits=Limits(max_vms=4, max_microusd=9_000_000),
        teams={"vision": Team(weight=2.0)},
    ),
    supplies=(Supply(name="local/cpu", vms=4, microusd_per_hour=100_000),),
)
FIRST, _ = step(PoolState(), CREATED)


def request(name: str, weight: float = 1.0, deadline_s: float = math.inf) -> JobRequest:
    table = tuple((n, 10.0 * n) for n in range(1, 5))
    return JobRequest(
        name=name,
        throughputs=(table,),
        examples=90_000.0,
        weight=weight,
        deadline_s=deadline_s,
    )


def reported(state: PoolState, name: str, at_s: float, held: int) -> HoldingsReported:
    return HoldingsReported(
        at_s=at_s,
        job=name,
        serial=state.jobs[name].serial,
        held=(held,),
        spent=1000 * held,
        examples_done=10.0,
    )


@pytest.fixture
def pool() -> PoolDir:
    return create_pool(parse_pool({"name": "lab", "max_vms": 4}, "lab.yaml"), CREATED)


def play(pool: PoolDir) -> PoolState:
    """Journal a story: an urgent job comes and goes, another one is paused."""
    journal = PoolJournal(pool.journal)
    state, at_s = FIRST, BEGIN_S

    def tell(event: PoolEvent) -> None:
        nonlocal state
        before = state
        state, _ = step(before, event)
        journal.append(PoolStep(before, event, state))

    tell(JobRequested(at_s=at_s, request=request("long", deadline_s=BEGIN_S + 9000.0)))
    tell(reported(state, "long", at_s + 5, 4))
    tell(JobRequested(at_s=at_s + 9, request=request("urgent", 9.0)))
    for n in range(4, 0, -1):
        at_s += 10
        tell(reported(state, "long", at_s, n))
        tell(reported(state, "urgent", at_s, 4 - n))
    tell(PriorityChanged(at_s=at_s, job="urgent", weight=2.0))
    tell(PoolJobPaused(at_s=at_s + 1, job="long", is_paused=True))
    tell(reported(state, "urgent", at_s + 2, 0))
    tell(PoolJobEnded(at_s=at_s + 3, job="urgent"))
    tell(JobRequested(at_s=at_s + 4, request=request("urgent", 3.0)))
    journal.close()
    return state


def test_the_journal_leads_where_the_pool_was(pool: PoolDir) -> None:
    state = play(pool)
    with closing(PoolJournal(pool.journal)) as journal:
        assert journal.replay() == state
        (first, *_, last) = found = [step for _, step in journal.steps()]
        assert first == PoolStep(PoolState(), CREATED, FIRST)
        assert last.after == state
        journal.save_snapshot(3, found[2].after)
        assert journal.replay() == state
        assert [step for _, step in journal.steps()] == found
    assert set(state.jobs) == {"long", "urgent", "urgent.1"}, "its dollars still count"


def test_a_damaged_journal_is_one_line(
    pool: PoolDir,
) -> None:
    play(pool)
    db = sqlite3.connect(pool.journal)
    db.execute("UPDATE events SET decision = '{'")
    db.commit()
    with pytest.raises(JournalError, match=r"event 1.*damaged"):
        PoolJournal(pool.journal, read_only=True).replay()
    db.close()


def test_status_and_report_say_who_has_what_and_why(pool: PoolDir) -> None:
    state = play(pool)
    told = document("lab", state, {}, state.now_s, is_served=True)
    by_name = {job["name"]: job for job in told["jobs"]}
    assert by_name["long"]["state"] == "paused"
    assert by_name["long"]["deadline_kept"] is False
    assert by_name["long"]["vms"] == {"local/cpu": 1}
    assert "pool resume lab long" in by_name["long"]["why"]
    assert by_name["urgent"]["share_due"] > 0
    assert told["kinds"][0]["held"] == 1
    assert parts(told)
    for change in divisions(pool):
        assert sum(sum(vms) for vms in change.held.values()) <= 4
    page = report_page(pool)
    assert page.count("<svg ") == 2
    assert "urgent" in page


def test_a_month_s_dollars_are_told_apart_from_all(pool: PoolDir) -> None:
    state = play(pool)
    job = replace(state.jobs["urgent"], spent=9_000_000, spent_before=4_000_000)
    monthly = replace(state.settings, budget_per="month")
    state = replace(state.with_job(job), settings=monthly)
    others = sum(j.spent for j in state.jobs.values() if j.request.name != "urgent")
    told = document("lab", state, {}, state.now_s, is_served=True)
    assert told["usd_spent_this_month"] == 5.0 + others / 1e6
    assert f"${told['usd_spent_this_month']:.2f} of $9.00 spent this month, $9" in str(
        parts(told)[0]
    )
    later = document("lab", state, {}, state.now_s + 40 * 86_400, is_served=True)
    assert later["usd_spent_this_month"] == 0.0
    for_life = replace(monthly, budget_per="life")
    changed = PoolSettingsChanged(at_s=state.now_s, settings=for_life)
    state, _ = step(state, changed)
    assert {job.spent_before for job in state.jobs.values()} == {0}


def test_a_job_whose_name_is_used_again_keeps_its_own_history(pool: PoolDir) -> None:
    state, at_s = FIRST, BEGIN_S
    with closing(PoolJournal(pool.journal)) as journal:

        def feed(event: PoolEvent) -> None:
            nonlocal state
            before = state
            state, _ = step(before, event)
            journal.append(PoolStep(before, event, state))

        feed(PoolStarted(at_s=at_s))
        feed(JobRequested(at_s=at_s, request=request("job")))
        feed(reported(state, "job", at_s + 10, held=4))
        feed(PoolJobEnded(at_s=at_s + 20, job="job"))
        feed(reported(state, "job", at_s + 20, held=0))
        feed(JobRequested(at_s=at_s + 5000, request=request("job")))
        feed(reported(state, "job", at_s + 5030, held=2))
    moments = {
        name: [c.at_s - at_s for c in divisions(pool) if any(c.held.get(name, ()))]
        for name in ("job", "job.1")
    }
    assert moments["job"] == [5030.0]
    assert min(moments["job.1"]) == 10.0
    assert max(moments["job.1"]) <= 20.0


@pytest.mark.parametrize(
    ("kind", "shown", "why"),
    [("queued", "down", "it has ended"), ("failed", "failed", "boom")],
)
def test_a_job_that_has_ended_is_told_as_what_became_of_it(
    pool: PoolDir, kind: OutcomeKind, shown: str, why: str
) -> None:
    state = play(pool)
    state, _ = step(state, PoolJobEnded(at_s=state.now_s, job="urgent"))
    outcome = Outcome(kind=kind, exit_code=1, reason="boom")
    seen = State(phase=JobPhase.ENDED, settings=settings(), outcome=outcome)
    told = document("lab", state, {"urgent": seen}, state.now_s, is_served=True)
    (job,) = (job for job in told["jobs"] if job["name"] == "urgent")
    assert (job["state"], job["why"]) == (shown, why)
    assert job["deadline_kept"] is not True


@pytest.mark.parametrize(
    ("phase", "outcome", "shown"),
    [
        (JobPhase.ACTIVE, None, "ending"),
        (JobPhase.ENDING, "succeeded", "ending"),
        (JobPhase.ENDED, "succeeded", "succeeded"),
        (JobPhase.ENDED, "queued", "starting"),
    ],
)
def test_a_job_that_has_trained_all_does_not_start(
    pool: PoolDir, phase: JobPhase, outcome: OutcomeKind | None, shown: str
) -> None:
    state = play(pool)
    urgent = replace(state.jobs["urgent"], held=(1,))
    state = replace(state, jobs={**state.jobs, "urgent": urgent})
    end = outcome and Outcome(kind=outcome, exit_code=0, reason="200 steps done")
    seen = State(phase=phase, settings=settings(), outcome=end or None)
    if outcome != "queued":
        seen = changed(seen, step=seen.job.spec.steps)
    told = document("lab", state, {"urgent": seen}, state.now_s, is_served=True)
    (job,) = (job for job in told["jobs"] if job["name"] == "urgent")
    assert (job["state"], job["vms"]) == (shown, {"local/cpu": 1})
    assert job["why"] == ("200 steps done" if outcome == "succeeded" else job["why"])


def test_a_paused_job_is_due_nothing(pool: PoolDir) -> None:
    state = play(pool)
    before = replace(state.jobs["long"], target_rate=1.0)  # of when it took part
    state = replace(state, jobs={**state.jobs, "long": before})
    told = document("lab", state, {}, state.now_s, is_served=True)
    (long,) = (job for job in told["jobs"] if job["name"] == "long")
    assert (long["state"], long["share_due"]) == ("paused", 0.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "because"),
    [
        ("aws setup:a", "aws setup:a", None),
        ("aws setup:a", "aws setup:b", "its VMs are rented: other has another setup"),
        ("aws setup:a", "", "its VMs are rented: other has another provider"),
        ("", "aws", "VMs of its provider do not go from one job to another"),
    ],
)
def test_status_says_why_a_job_takes_no_vms_over(
    ours: str, theirs: str, because: str | None
) -> None:
    state = FIRST
    for name, machine in (("long", ours), ("other", theirs)):
        wanted = replace(request(name), machine=machine)
        state, _ = step(state, JobRequested(at_s=BEGIN_S, request=wanted))
    told = document("lab", state, {}, state.now_s, is_served=True)
    assert told["jobs"][0]["rents_because"] == because
    assert any("long: " in str(part) for part in parts(told)) == bool(because)


def test_a_plan_says_what_others_lose(pool: PoolDir) -> None:
    state = play(pool)
    status = document("lab", state, {}, state.now_s, is_served=True)
    planned = {
        "kinds": ["local/cpu"],
        "target": [1],
        "examples_per_s": 10.0,
        "others": {
            "urgent": {
                "before": [4],
                "after": [3],
                "examples_per_s_before": 40.0,
                "examples_per_s_after": 30.0,
            }
        },
    }
    told = plan_document(request("new"), planned, status, state.now_s)
    assert told["vms"] == {"local/cpu": 1}
    starts, loses = plan_lines(told)
    assert starts.startswith("new starts at once with 1 local/cpu: 10.0 examples/s")
    assert loses == ("urgent goes from 4 local/cpu to 3 local/cpu: 40.0 to 30.0 examples/s")
