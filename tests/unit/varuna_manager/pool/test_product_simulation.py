"""Simulated pools whose outcome is known in closed form: the product's form."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import first_always

from spottrain.pricing.sharing.policies import POLICIES
from spottrain.varuna_manager.pool.core.model import PoolSettings, Supply
from spottrain.varuna_manager.pool.simulation.outcome import (
    PoolOutcome,
    isolated_times_s,
    measures,
)
from spottrain.varuna_manager.pool.simulation.product import simulate
from spottrain.varuna_manager.pool.simulation.workload import SimulatedJob

FOUR = [Supply(name="gpu", vms=4, microusd_per_hour=3_600_000)]


def job(name: str, work: float, at_s: float = 0.0, **given: Any) -> SimulatedJob:
    most = given.pop("most", 4)
    table = {n: float(n) for n in range(1, most + 1)}
    return SimulatedJob(
        name=name,
        arrived_s=at_s,
        work=work,
        size=most,
        throughputs=(table,),
        **given,
    )


def run(policy: str, *jobs: SimulatedJob, elastic: bool = True) -> PoolOutcome:
    settings = PoolSettings(policy=policy)
    return simulate(settings, FOUR, jobs, elastic=elastic, morph_s=0.0)


def test_two_jobs_share_until_one_ends() -> None:
    found = run("fair", job("a", 400), job("b", 800))
    assert [one.completion_s for one in found.jobs] == pytest.approx([200, 300])
    assert found.utilisation == pytest.approx(1)
    assert found.usd == pytest.approx(1200 * 1e-3)
    # Each would have kept to half of the pool, b to all of it in the end.
    assert found.finish_time_fairness() == pytest.approx([1, 1])


def test_fairness_is_compared_with_the_same_times_whatever_the_policy() -> None:
    jobs = job("a", 400), job("b", 400)
    assert run("fifo", *jobs).finish_time_fairness() == pytest.approx([0.5, 1])
    assert run("fair", *jobs).finish_time_fairness() == pytest.approx([1, 1])


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(1, 1000)), min_size=1, max_size=6))
def test_jobs_that_keep_to_their_parts_share_a_pool_like_a_processor(
    drawn: list[tuple[float, float]],
) -> None:
    # One VM, split evenly: all of it is used while a job is there.
    jobs = [
        replace(job(f"j{m}", work), arrived_s=arrived_s, size=1, throughputs=({1: 1.0},))
        for m, (arrived_s, work) in enumerate(drawn)
    ]
    found = isolated_times_s(jobs, (1,))
    ends = [one.arrived_s + time_s for one, time_s in zip(jobs, found, strict=True)]
    now_s = 0.0
    for one in sorted(jobs, key=lambda one: one.arrived_s):
        now_s = max(now_s, one.arrived_s) + one.work
    assert max(ends) == pytest.approx(now_s)
    for one, time_s in zip(jobs, found, strict=True):
        assert time_s >= one.work * (1 - 1e-9)
        assert time_s <= sum(other.work for other in jobs) * (1 + 1e-9)


def test_first_come_first_served_queues() -> None:
    found = run("fifo", job("a", 400), job("b", 800))
    assert [one.completion_s for one in found.jobs] == pytest.approx([100, 300])
    assert [one.queueing_s for one in found.jobs] == pytest.approx([0, 100])


def test_sizes_that_are_fixed_are_held_whole_or_not_at_all() -> None:
    found = run("fair", job("a", 400), job("b", 800, most=2), elastic=False)
    for one in found.jobs:
        assert {sum(vms) for _, vms in one.sizes} <= {0, one.job.size}
    assert measures(found)["ended"] == 2


def test_an_urgent_job_does_not_wait_for_the_others() -> None:
    jobs = [
        job("first", 400),
        job("second", 200, 10.0, weight=5.0, most=2),
        job("urgent", 400, 20.0, weight=10.0),
    ]
    queued, shared = run("fifo", *jobs), run("priority", *jobs)
    assert [one.queueing_s for one in shared.jobs] == [0, 0, 0]
    assert shared.jobs[2].completion_s < queued.jobs[2].completion_s
    assert shared.makespan_s <= queued.makespan_s + 1e-6


def hurried(seed: int) -> list[SimulatedJob]:
    """Jobs of which most have a deadline, for four VMs."""
    draw = random.Random(seed)
    jobs, at_s = [], 0.0
    for m in range(draw.randint(3, 8)):
        largest = draw.randint(1, 6)
        power = draw.choice([0.6, 0.9, 1.0])
        table = {n: n**power for n in range(draw.choice([1, 1, 2]), largest + 1)}
        work = draw.uniform(500, 8000)
        table = table or {2: 2**power}
        slack = draw.choice([1.2, 1.5, 2, 4, 10, math.inf])
        jobs.append(
            SimulatedJob(
                name=f"j{m}",
                arrived_s=at_s,
                work=work,
                size=min(table),
                throughputs=(table,),
                weight=draw.choice([1.0, 5.0]),
                deadline_s=at_s + slack * work / max(table.values()),
            )
        )
        at_s += draw.choice([0, draw.uniform(0, 1500)])
    return jobs


@pytest.mark.rotated
@pytest.mark.parametrize("policy", first_always(POLICIES))
def test_a_deadline_that_was_promised_is_kept_on_whole_vms(policy: str) -> None:
    promised = 0
    for seed in range(3):
        found = simulate(PoolSettings(policy=policy), FOUR, hurried(seed))
        assert all("deadline" in reason for _, reason in found.refused)
        kept, due = found.deadlines()
        assert kept == due
        promised += due
    assert promised > 3
