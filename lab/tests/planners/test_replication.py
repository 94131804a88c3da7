"""Plans are those of PipeDream's section 2.5 for its authors' own profiles."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.errors import PlanError
from spottrain_lab.planners.replication import Layer, SyncCost, replicate

PROFILES = Path(__file__).resolve().parents[3] / "examples/pipedream"
TEN_GIGABIT = 1.25e9
"""Bytes per second of Cluster-A's Ethernet."""


def published(name: str) -> list[Layer]:
    document = json.loads((PROFILES / f"{name}.json").read_text())
    return [Layer(**layer) for layer in document["layers"]]


def chain(times: list[float], outputs: list[int], weights: list[int]) -> list[Layer]:
    return [
        Layer(name=str(k), time_s=t, output_bytes=a, parameter_bytes=w)
        for k, (t, a, w) in enumerate(zip(times, outputs, weights, strict=True))
    ]


def cost(
    layers: Sequence[Layer],
    stops: Sequence[int],
    counts: Sequence[int],
    bandwidth: float,
    inputs: int | None,
) -> float:
    """The slowest stage or link, written out."""
    slowest, start = 0.0, 0
    for stop, m in zip(stops, counts, strict=True):
        own = layers[start:stop]
        compute = sum(layer.time_s for layer in own) / m
        sent = 2 * (m - 1) / m * sum(layer.parameter_bytes for layer in own)
        slowest = max(slowest, compute, sent / bandwidth / (inputs or m))
        if start:
            slowest = max(slowest, 2 * layers[start - 1].output_bytes / bandwidth)
        start = stop
    return slowest


@pytest.mark.parametrize(
    ("name", "workers", "configuration"),
    [
        ("vgg16", 16, "15-1"),
        ("resnet50", 4, "4"),
        ("resnet50", 16, "16"),
        ("alexnet", 16, "15-1"),
        ("gnmt8", 4, "1-1-1-1"),
        ("gnmt16", 4, "1-1-1-1"),
    ],
)
def test_the_published_profiles_give_the_published_plans(
    name: str, workers: int, configuration: str
) -> None:
    plan = replicate(published(name), workers, TEN_GIGABIT)
    assert plan.configuration == configuration


def test_vgg_s_convolutions_are_replicated_and_its_classifier_is_not() -> None:
    layers = published("vgg16")
    plan = replicate(layers, 16, TEN_GIGABIT)
    assert all(layer.name.startswith("Conv2d") for layer in layers[1 : plan.bounds[1]])
    assert all(layer.name.startswith("Linear") for layer in layers[plan.bounds[1] :])


def test_the_recurrence_as_it_is_printed() -> None:
    """Figure 2.7's pipeline, and one in which a single layer has the weights."""
    plan = replicate(chain([6, 3], [1, 0], [0, 30]), 3, 10, sync=SyncCost.PRINTED)
    assert (plan.configuration, plan.microbatch_s) == ("2-1", 3.0)
    layers = chain([8, 8, 1], [4, 2, 0], [1, 1, 200])
    plan = replicate(layers, 4, 20, sync=SyncCost.PRINTED)
    assert (plan.configuration, plan.bounds) == ("3-1", (0, 2, 3))
    assert plan.microbatch_s == pytest.approx(16 / 3)
    layers = chain([3] * 4, [1] * 4, [100] * 4)
    plan = replicate(layers, 4, 20, sync=SyncCost.PRINTED)
    assert (plan.configuration, plan.microbatch_s) == ("1-1-1-1", 3.0)


LAYERS = st.lists(
    st.builds(
        Layer,
        name=st.just(""),
        time_s=st.integers(1, 9).map(float),
        output_bytes=st.integers(0, 9),
        parameter_bytes=st.integers(0, 99),
    ),
    min_size=1,
    max_size=5,
)


@given(LAYERS, st.integers(1, 4), st.sampled_from([None, 1, 8]), st.booleans())
def test_no_other_partition_is_faster(
    layers: list[Layer], workers: int, inputs: int | None, even: bool
) -> None:
    bandwidth = 5.0
    found = []
    for stages in range(1, min(len(layers), workers) + 1):
        cuts = itertools.combinations(range(1, len(layers)), stages - 1)
        shares = [
            counts
            for counts in itertools.product(range(1, workers + 1), repeat=stages)
            if sum(counts) == workers and (not even or len(set(counts)) == 1)
        ]
        for cut, counts in itertools.product(cuts, shares):
            stops = (*cut, len(layers))
            found.append(cost(layers, stops, counts, bandwidth, inputs))
    plan = replicate(layers, workers, bandwidth, inputs_per_update=inputs, even=even)
    assert plan.microbatch_s == pytest.approx(min(found))
    own = cost(layers, plan.bounds[1:], plan.replicas, bandwidth, inputs)
    assert plan.microbatch_s == pytest.approx(own)
    assert sum(plan.replicas) == workers


def test_no_layers_or_workers_are_refused() -> None:
    layers = chain([1], [0], [0])
    for own, workers, bandwidth in (([], 1, 1.0), (layers, 0, 1.0), (layers, 1, 0.0)):
        with pytest.raises(PlanError, match="partitioning needs layers"):
            replicate(own, workers, bandwidth)
