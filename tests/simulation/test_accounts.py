"""Every second and every micro-dollar that a volatile market bills is accounted for."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests.simulation.test_simulation import SPEC, torment, world
from tests.simulation.world import World
from tests.view import View

from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.reporting import documents
from spottrain.varuna_manager.reporting.history import JobHistory
from spottrain.varuna_manager.reporting.html.curves import Curves
from spottrain.varuna_manager.reporting.html.page import page

WORLDS = range(3)


@functools.cache
def past_of(job: World) -> JobHistory:
    state, past = State(), JobHistory()
    for event in job.journal:
        before, (state, _) = state, step.step(state, event)
        past.note(before, event, state)
    return past


@functools.cache
def tormented(seed: int) -> World:
    """A job in a volatile market with every kind of fault."""
    job = world(seed)
    torment(job, mean_s=20.0 + 10 * (seed % 4))
    job.run()
    return job


def check(state: State, past: JobHistory) -> dict[str, Any]:
    """Return a job's costs after checking that all of it adds up."""
    told_s = state.now_s
    report = documents.report(state, past, False, told_s)
    cost: dict[str, Any] = report["cost"]
    seconds = dict(cost["vm_seconds"])
    billed_s = seconds.pop("billed")
    assert sum(seconds.values()) == pytest.approx(billed_s, abs=1e-3)
    assert all(part >= 0 for part in seconds.values())
    ledger = View(state).ledger.spending(told_s)
    assert billed_s == pytest.approx(ledger.billed_us / 1e6, abs=1e-3)
    assert cost["usd_spent"] == ledger.total.usd == report["usd_spent"]
    for parts in (cost["usd_by_time"], cost["usd_by_kind"]):
        assert sum(parts.values()) == pytest.approx(cost["usd_spent"], abs=1e-5)
    for by in ("by_zone", "by_type", "by_vm"):
        rows = cost[by]
        assert sum(row["billed"] for row in rows) == pytest.approx(billed_s, abs=1e-3)
    did = past.intervals(told_s)
    assert all(one.to_s == after.from_s for one, after in pairwise(did))
    return cost


@pytest.mark.rotated
@pytest.mark.parametrize("seed", WORLDS)
def test_the_parts_add_up_to_the_clouds_bill(seed: int) -> None:
    job = tormented(seed)
    cost = check(job.state, past_of(job))
    vms = job.cloud.vms.values()
    lived_s = sum((vm.ended_at_s or job.now_s) - vm.launched_at_s for vm in vms)
    assert cost["vm_seconds"]["billed"] == pytest.approx(lived_s, rel=0.01)
    assert cost["usd_spent"] == pytest.approx(job.cloud.bill_usd(job.now_s), rel=0.01)
    assert cost["vm_seconds"]["productive"] > 0


@pytest.mark.rotated
def test_about_half_of_what_is_billed_trains_where_faults_come_every_half_minute() -> None:
    """Single worlds differ a lot, by whether and when state is lost with its last copy."""
    jobs = [tormented(seed) for seed in WORLDS]
    shares = [check(job.state, past_of(job))["useful_share"] for job in jobs]
    assert sum(shares) / len(shares) > 0.4, shares


@pytest.mark.rotated
def test_they_add_up_at_every_moment_of_a_job_that_runs() -> None:
    job, past, state = tormented(0), JobHistory(), State()
    for number, event in enumerate(job.journal):
        before, (state, _) = state, step.step(state, event)
        past.note(before, event, state)
        if number % 100 == 0 and state.settings is not None:
            check(state, past)


def test_productive_time_is_that_of_the_mini_batches_that_count() -> None:
    """An undisturbed job: all of its plan's time until the last commit."""
    job = world(0, spec=replace(SPEC, steps=60))
    job.run()
    cost = check(job.state, past_of(job))
    (plan,) = documents.plans(job.state)
    progress = job.progress
    assert progress.last_commit_at_s is not None
    trained_s = progress.last_commit_at_s - plan.started_at_s
    assert cost["vm_seconds"]["productive"] == pytest.approx(plan.num_slots * trained_s, abs=1e-3)
    assert cost["vm_seconds"]["lost"] == 0.0


@pytest.mark.rotated
def test_what_is_computed_twice_is_lost_once() -> None:
    """Worlds in which a restore undid mini-batches lose at least their time."""
    undone = 0
    for seed in WORLDS:
        job = tormented(seed)
        again = job.minibatches_recomputed
        cost = documents.cost(job.state, past_of(job), False, job.state.now_s)
        if again:
            undone += 1
            fastest_s = min(plan.predicted_step_s for plan in job.generations)
            assert cost["vm_seconds"]["lost"] > 0.5 * again * fastest_s
    assert undone, "no seed restores anything: choose others"


@pytest.mark.rotated
def test_a_job_with_many_faults_has_a_page() -> None:
    job = tormented(1)
    past = past_of(job)
    report = documents.report(job.state, past, False, job.state.now_s)
    assert len(page(report, job.state, past, Curves(heldout={}))) < 1_000_000
