"""Replays of pools whose outcome is known in closed form."""

from __future__ import annotations

import pytest

from spottrain.varuna_manager.pool.core.model import JobRequest, PoolSettings, Supply
from spottrain.varuna_manager.pool.replay import replay

FOUR = [Supply(name="gpu", vms=4, microusd_per_hour=3_600_000)]


def job(name: str, examples: float, weight: float = 1.0, most: int = 4) -> JobRequest:
    table = tuple((n, float(n)) for n in range(1, most + 1))
    return JobRequest(
        name=name, throughputs=(table,), examples=examples, weight=weight, morph_s=0.0
    )


def test_two_jobs_share_until_one_ends() -> None:
    arrivals = [(0.0, job("a", 400)), (0.0, job("b", 800))]
    found = replay(PoolSettings(), FOUR, arrivals)
    assert found.completion_s == pytest.approx([200, 300])
    assert found.utilisation == pytest.approx(1)
    # Every VM second trains an example here, and costs a thousand micro-dollars.
    assert sum(one.spent for one in found.jobs) == pytest.approx(1200 * 1000)


def test_first_come_first_served_queues() -> None:
    arrivals = [(0.0, job("a", 400)), (0.0, job("b", 800))]
    found = replay(PoolSettings(policy="fifo"), FOUR, arrivals)
    assert found.completion_s == pytest.approx([100, 300])
    assert found.queueing_s == pytest.approx([0, 100])


def test_an_urgent_job_does_not_wait_for_the_others() -> None:
    arrivals = [
        (0.0, job("first", 400)),
        (10.0, job("second", 200, 5.0, most=2)),
        (20.0, job("urgent", 400, 10.0)),
    ]
    queued = replay(PoolSettings(policy="fifo"), FOUR, arrivals)
    shared = replay(PoolSettings(policy="priority"), FOUR, arrivals)
    assert shared.queueing_s == [0, 0, 0]
    assert shared.completion_s[2] < queued.completion_s[2]
    assert shared.makespan_s <= queued.makespan_s + 1e-6
