from __future__ import annotations

from dataclasses import replace

import pytest
from tests.builders import a_plan, section_facts, slots_of
from tests.unit.varuna_manager.story import FACTS

from spottrain.morphing.adapt.traffic import sent_bytes
from spottrain.wire.model import ModelFacts

MODEL = replace(
    FACTS,
    sections=tuple(
        section_facts(
            index,
            param_bytes=1000,
            optimizer_bytes=1,
            activation_bytes=10,
            gradient_bytes=gradient_bytes,
        )
        for index, gradient_bytes in enumerate((None, 400))
    ),
)
SQUARE = a_plan(2, 2, virtual_nodes=8, slots=slots_of("1234"))
"""Two stages of two replicas."""


@pytest.mark.parametrize(
    ("zones", "num_bytes"),
    [
        ("aaaa", 0),
        ("aabb", 2 * 1000 + 2 * 400),  # each stage's two replicas apart
        ("abab", 2 * 8 * 10),  # the two stages of both replicas apart
        ("aaab", 8 * 10 + 2 * 400),  # half the examples leave the first replica's zone
    ],
)
def test_traffic_between_places_is_counted_in_both_directions(zones: str, num_bytes: int) -> None:
    where = dict(zip("1234", zones, strict=True))
    assert sent_bytes(SQUARE, MODEL, where, "fast").total() == num_bytes


def test_exact_sums_are_twice_as_large() -> None:
    where = dict(zip("1234", "aabb", strict=True))
    assert sent_bytes(SQUARE, MODEL, where, "exact").total() == 2 * (2 * 1000 + 2 * 400)


def test_activations_are_counted_as_they_travel() -> None:
    where = dict(zip("1234", "abab", strict=True))
    assert sent_bytes(SQUARE, MODEL, where, "fast", "bf16").total() == 2 * 8 * 5


def test_traffic_is_counted_between_the_places_of_the_vms() -> None:
    where = dict(zip("1234", ("a", "a", "b", "c"), strict=True))
    assert sent_bytes(SQUARE, MODEL, where, "fast") == {
        ("b", "c"): 8 * 10,  # half of the examples, between the stages of a replica
        ("a", "b"): 1000,  # the first stage's ring of two, each way
        ("b", "a"): 1000,
        ("a", "c"): 400,
        ("c", "a"): 400,
    }


def test_one_pipeline_reduces_nothing() -> None:
    plan = a_plan(2, virtual_nodes=8, slots=slots_of("12"))
    assert sent_bytes(plan, MODEL, {"1": "a", "2": "b"}, "fast") == {("a", "b"): 2 * 8 * 10}


def test_an_interleaved_ring_hands_over_between_all_its_runs() -> None:
    model: ModelFacts = replace(
        MODEL, sections=tuple(replace(MODEL.sections[0], index=i) for i in range(4))
    )
    plan = a_plan(2, chunks=2, virtual_nodes=8, slots=slots_of("12"))
    assert sent_bytes(plan, model, {"1": "a", "2": "b"}, "fast").total() == 3 * 2 * 8 * 10
