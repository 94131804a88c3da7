"""The store of measurements against a job that is simulated with its whole history."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.varuna_manager.measured_jobs import (
    adopted,
    evaluated,
    key,
    simulated,
    store,
    trained,
)

from spottrain.varuna_manager.jobs.measurements import (
    Cursor,
    GenerationBegan,
    Measurements,
    Minibatch,
    Row,
    Sample,
)


@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_every_surviving_step_is_there_once_whatever_arrives_when(
    random: Random, generations: int
) -> None:
    job, measurements, follower = simulated(random, generations), store(), Follower()
    for sample in job.samples():
        measurements.write([sample])
        if random.random() < 0.3:
            follower.read(measurements, random.randint(1, 4))
    while follower.read(measurements, 3):
        pass
    rows = measurements.minibatches()
    assert {row.step: row.loss for row in rows} == job.line
    assert [row.step for row in rows] == sorted(job.line)
    assert all(job.line.get(one.step) == one.loss + one.step for one in measurements.evaluations())
    everything: list[Row] = [*rows, *measurements.evaluations()]
    everything.sort(key=key)
    assert sorted(follower.rows, key=key) == everything
    assert [r.position for r in follower.rows] == [r.position for r in everything]


@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_step_times_are_the_medians_of_what_survives(random: Random, generations: int) -> None:
    measurements = store()
    for sample in simulated(random, generations).samples():
        if isinstance(sample, Minibatch) and sample.step_s is not None:
            sample = replace(sample, step_s=random.choice((0.1, 0.2, 0.4, 5.0)))
        measurements.write([sample])

    times = defaultdict[int, list[float]](list)
    for row in measurements.minibatches():
        if row.step_s is not None:
            times[row.generation].append(row.step_s)
    found = measurements.median_step_s()
    assert found == pytest.approx({n: statistics.median(t) for n, t in times.items()})


class Follower:
    """Keeps a copy as a file of lines is kept: cut off, then added to."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.cursor = Cursor()

    def read(self, measurements: Measurements, most: int) -> bool:
        page = measurements.changes(self.cursor, most)
        if page.rewound_to is not None:
            self.rows = [r for r in self.rows if r.position < page.rewound_to]
        self.rows += page.rows
        moved, self.cursor = page.cursor != self.cursor, page.cursor
        return moved


def test_what_other_ranks_say_again_changes_nothing() -> None:
    measurements = store()
    said: list[Sample] = [GenerationBegan(generation=1, step=0)]
    said += [trained(1, 1), evaluated(1, 1), trained(1, 2)]
    said += [GenerationBegan(generation=2, step=2), adopted(1, 2, 2), trained(2, 3)]
    measurements.write(said)
    page = measurements.changes(Cursor())
    measurements.write(said)
    again = measurements.changes(page.cursor)
    assert (again.rows, again.rewound_to) == ([], None)
    assert [row.position for row in page.rows] == [2, 3, 4, 6]


def test_a_learning_rate_that_the_first_report_lacks_is_filled_in() -> None:
    measurements = store()
    measurements.write([GenerationBegan(generation=1, step=0), trained(1, 1)])
    before = measurements.changes(Cursor())
    measurements.write([trained(1, 1, learning_rate=0.1, loss=7.0)])
    (row,) = measurements.minibatches()
    assert (row.loss, row.learning_rate) == (1001.0, 0.1)
    assert measurements.changes(before.cursor).rewound_to == 2


def test_numbers_that_are_not_finite_stay_what_they_are() -> None:
    measurements = store()
    odd = {"nan": math.nan, 'a"b': 2.0}
    row = trained(1, 1, loss=math.nan, grad_norm=math.inf, metrics=odd)
    measurements.write([row])
    (found,) = measurements.minibatches()
    assert math.isnan(found.loss)
    assert found.grad_norm == math.inf
    assert math.isnan(found.metrics.pop("nan"))  # type: ignore[attr-defined]
    assert found.metrics == {'a"b': 2.0}


def test_speeds() -> None:
    row = trained(1, 1)
    assert (row.examples_per_s, row.tokens_per_s) == (16.0, None)
    assert replace(row, weight=8.0).tokens_per_s is None
    assert replace(row, weight=1024.0).tokens_per_s == 2048.0
    assert replace(row, step_s=None, weight=9.0).tokens_per_s is None


def test_rows_are_thinned_out_and_limited() -> None:
    measurements = store()
    measurements.write(trained(1, step) for step in range(1, 24))
    assert [r.step for r in measurements.minibatches(every=10)] == [10, 20]
    assert [r.step for r in measurements.minibatches(last=2)] == [22, 23]
    assert [r.step for r in measurements.minibatches(last=2, every=5)] == [15, 20]


def test_curves_of_long_jobs_stay_small() -> None:
    measurements = store()
    measurements.write(trained(1, step, loss=float(step)) for step in range(1, 10_001))
    curve = measurements.curves(("loss",), 100)["loss"]
    assert len(curve) == 100
    assert curve[0] == (50.5, 50.5, 1.0, 100.0)
    assert measurements.losses(3) == [1.0, 5001.0, 10_000.0]
    assert (store().losses(3), store().curves(("loss",), 3)["loss"]) == ([], [])


@pytest.mark.parametrize("count", [1, 2, 7])
def test_few_losses_are_all_of_them(count: int) -> None:
    measurements = store()
    measurements.write(trained(1, step) for step in range(1, count + 1))
    assert measurements.losses(40) == [1000.0 + s for s in range(1, count + 1)]


def test_the_median_of_many_is_that_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spottrain.varuna_manager.jobs.measurements.MEDIAN_OF", 101)
    measurements = store()
    # Checkpoints slow down every tenth: what is drawn must not be every tenth.
    measurements.write(
        trained(1, step, step_s=0.1 if step % 10 else 5.0) for step in range(1, 2001)
    )
    assert measurements.median_step_s() == {1: 0.1}
