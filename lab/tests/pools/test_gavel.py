"""Gavel's form and the queue, on pools whose outcome is known."""

from __future__ import annotations

import math

import pytest
from tests.unit.varuna_manager.pool.test_workload import CSV, KINDS

from spottrain.varuna_manager.pool.core.model import Supply
from spottrain.varuna_manager.pool.simulation import queue
from spottrain.varuna_manager.pool.simulation.outcome import measures
from spottrain.varuna_manager.pool.simulation.workload import (
    SimulatedJob,
    read_throughputs,
)
from spottrain_lab.pools import gavel
from spottrain_lab.pools.generate import gavel_jobs

SUPPLIES = [
    Supply(name=kind, vms=1, microusd_per_hour=3_600_000 // (k + 1)) for k, kind in enumerate(KINDS)
]


def job(name: str, fast: float, slow: float, rounds: float, at_s: float = 0.0) -> SimulatedJob:
    """A job of one VM with work for so many rounds on the fast kind."""
    return SimulatedJob(
        name=name,
        arrived_s=at_s,
        work=rounds * 360 * fast,
        size=1,
        throughputs=({1: fast}, {1: slow}),
    )


def test_awareness_gives_each_kind_to_whom_it_helps() -> None:
    jobs = [job("helped", 10, 1, 10), job("alike", 1, 1, 10)]
    plain = gavel.Gavel(morph_s=0.0)
    aware = gavel.simulate(plain, SUPPLIES, jobs)
    unaware = gavel.simulate(gavel.Gavel(is_aware=False, morph_s=0.0), SUPPLIES, jobs)
    # Level by level both train as much more than on half of each: 10/5.5, 1/1.
    assert [one.completion_s for one in aware.jobs] == pytest.approx([3600, 3600])
    assert unaware.jobs[0].completion_s > 1.5 * 3600
    assert aware.usd == pytest.approx(3.6 + 1.8)


def test_a_job_that_arrives_within_a_round_waits_for_the_next() -> None:
    found = gavel.simulate(gavel.Gavel(), SUPPLIES, [job("late", 2, 1, 0.5, at_s=10)])
    assert found.jobs[0].queueing_s == pytest.approx(350)
    assert found.jobs[0].ended_s == pytest.approx(360 + 180)


@pytest.mark.parametrize("policy", ["max_throughput", "min_cost", "makespan", "fifo", "isolated"])
def test_every_policy_ends_every_job(policy: str) -> None:
    jobs = [job(f"j{m}", 4 - m, 1, 2 + m, at_s=100.0 * m) for m in range(4)]
    found = gavel.simulate(gavel.Gavel(policy=policy), SUPPLIES, jobs)
    assert measures(found)["ended"] == 4


def test_a_queue_does_not_overtake() -> None:
    four = [Supply(name="gpu", vms=4, microusd_per_hour=0)]
    jobs = [
        SimulatedJob(
            name=name,
            arrived_s=at_s,
            work=100.0 * size,
            size=size,
            throughputs=({size: float(size)},),
            weight=weight,
        )
        for name, at_s, size, weight in (
            ("first", 0.0, 2, 1.0),
            ("large", 1.0, 4, 10.0),
            ("small", 2.0, 1, 5.0),
            ("never", 0.5, 5, 9.0),
        )
    ]
    found = queue.simulate(four, jobs)
    assert [one.started_s for one in found.jobs] == [0, 100, 200]
    assert found.refused == (("never", "never: larger than the pool"),)


def test_numbers_of_a_workload_of_which_nothing_ran_are_infinite() -> None:
    large = SimulatedJob(name="large", arrived_s=0.0, work=1.0, size=9, throughputs=({9: 1.0}, {}))
    found = gavel.simulate(gavel.Gavel(), SUPPLIES, [large])
    assert [name for name, _ in found.refused] == ["large"]
    numbers = measures(found)
    assert (numbers["jobs"], numbers["makespan_s"]) == (0, math.inf)
    assert math.isnan(numbers["utilisation"])


def test_drawn_workloads_are_those_of_the_paper() -> None:
    jobs = gavel_jobs(1, 200, measured=read_throughputs(CSV), kinds=KINDS, has_several=False)
    minutes = [j.work / j.throughputs[0][1] / 60 for j in jobs]
    assert min(minutes) >= 10**1.5 - 1e-6
    assert max(minutes) <= 10**4 + 1e-6
    assert 0.7 < sum(m <= 1000 for m in minutes) / 200 < 0.9
