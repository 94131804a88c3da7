"""Facts of a transformer from its shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import LLAMA_2_7B, MPT_7B

from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.flops import model_flops_per_example
from spottrain.morphing.plan.transformer import TransformerShape

MIXTRAL_8X7B = replace(
    LLAMA_2_7B,
    key_value_heads=8,
    feed_forward=14336,
    experts=8,
    active_experts=2,
)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (LLAMA_2_7B, 6_738_415_616),
        (MPT_7B, 6_658_859_008),  # as llm-foundry's benchmarks have it
        (MIXTRAL_8X7B, 46_702_792_704),
    ],
)
def test_models_have_the_parameters_that_they_are_known_to_have(
    shape: TransformerShape, parameters: int
) -> None:
    assert shape.num_parameters == parameters
    facts = shape.facts("model")
    assert facts.num_parameters == parameters
    counted = sum(section.param_bytes for section in facts.sections)
    assert counted == 4 * parameters + sum(tied.param_bytes for tied in facts.tied)


def test_a_layer_s_flops_are_the_formula_s() -> None:
    s, h = MPT_7B.context, MPT_7B.hidden
    assert MPT_7B.layer_flops == 24 * s * h**2 + 4 * s**2 * h
    flops = model_flops_per_example(MPT_7B.facts("model"))
    assert flops == 3 * (32 * MPT_7B.layer_flops + MPT_7B.head_flops)


def test_only_the_experts_that_a_token_uses_compute_and_save() -> None:
    dense = replace(MIXTRAL_8X7B, experts=1, active_experts=1)
    two = MIXTRAL_8X7B.layer_flops - 2 * 4096 * 4096 * 8  # without the router
    assert two - dense.layer_flops == 2 * 4096 * dense.feed_forward_parameters
    assert MIXTRAL_8X7B.layer_saved_bytes < 2 * dense.layer_saved_bytes


@given(st.floats(5e7, 1e12), st.integers(1, 10**5))
def test_a_size_is_met_as_nearly_as_layers_allow(size: float, context: int) -> None:
    shape = TransformerShape.of_size(size, context)
    assert 0.6 < shape.num_parameters / size < 1.6
    assert shape.context == context
    assert len(shape.facts("model").sections) in (shape.layers, shape.layers + 2)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(PlanError, match="1e6 to 1e13 parameters: got 7"):
        TransformerShape.of_size(7.0, 1024)
    with pytest.raises(PlanError, match="layers of a transformer must be above 0: got 0"):
        replace(LLAMA_2_7B, layers=0)


def test_a_model_of_one_section_holds_a_tied_embedding_once() -> None:
    (section,) = replace(MPT_7B, layers=1).facts("model").sections
    assert section.param_bytes == 4 * replace(MPT_7B, layers=1).num_parameters
