"""Profiles that are estimated from a model's facts and a GPU's roofline."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import LLAMA_2_7B, MPT_7B

from spottrain.errors import ConfigError
from spottrain.morphing.plan.profiles import check_profile, derive_profile, on_network
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.estimate import LAUNCH_S, estimated_profile
from spottrain.pricing.ranking.gpu_speed import example_s, seconds, work_of
from spottrain.wire.model import Precision

GPUS = catalogue().gpus
H100, A100 = GPUS["H100"], GPUS["A100-80GB"]
FACTS = LLAMA_2_7B.facts("7b")


@pytest.mark.parametrize(("gpu", "tokens_per_s"), [("A100-80GB", 4641), ("H100", 10643)])
def test_shares_of_the_roofline_are_those_of_the_run_that_they_are_from(
    gpu: str, tokens_per_s: float
) -> None:
    """MPT-7B in llm-foundry's benchmarks."""
    profile = estimated_profile(MPT_7B.facts("mpt"), GPUS[gpu], "bf16", [1])
    assert MPT_7B.context / example_s(profile) == pytest.approx(tokens_per_s, rel=0.01)


def test_classes_without_a_run_take_the_mean_of_those_that_have_one() -> None:
    mean = (A100.training_share + H100.training_share) / 2
    (others,) = {g.training_share for g in GPUS.values() if g.compute_capability not in (80, 90)}
    assert others == pytest.approx(mean, abs=0.01)


@given(st.sampled_from(sorted(GPUS)), st.sampled_from([1, 2, 8]))
def test_a_large_model_takes_what_its_work_does_on_any_gpu(name: str, size: int) -> None:
    gpu = GPUS[name]
    precision: Precision = "fp16" if gpu.peak_flops.get("fp16") else "fp32"
    if seconds(gpu, work_of(FACTS, precision)) is None:
        return
    profile = estimated_profile(FACTS, gpu, precision, [size])
    check_profile(profile, FACTS)
    whole = seconds(gpu, work_of(FACTS, precision, profile))
    assert whole is not None
    assert example_s(profile) == pytest.approx(whole, rel=1e-6)


def test_kernels_of_a_small_model_are_launched_one_by_one() -> None:
    small = TransformerShape.of_size(1e6, 64).facts("small")
    profile = estimated_profile(small, H100, "bf16", [1, 2, 4, 8, 16])
    assert profile.microbatch_sizes == (1, 2, 4, 8, 16)
    assert math.isclose(profile.microbatches[0].sections[0].forward_s, LAUNCH_S)
    assert estimated_profile(FACTS, H100, "bf16", [1, 2, 4]).microbatch_sizes == (1,)


def test_two_byte_types_halve_what_a_forward_saves() -> None:
    wide, narrow = (estimated_profile(FACTS, H100, p, [1]) for p in ("fp32", "bf16"))
    pairs = zip(wide.microbatches[0].sections, narrow.microbatches[0].sections, strict=True)
    assert all(one.saved_bytes == 2 * other.saved_bytes for one, other in pairs)


def test_what_is_derived_from_an_estimate_is_an_estimate() -> None:
    profile = estimated_profile(FACTS, H100, "bf16", [1])
    assert profile.origin == "estimated"
    assert on_network(profile, 1e10).origin == "estimated"
    assert derive_profile(profile, "H200", 1.1).origin == "estimated"


def test_what_cannot_be_estimated_is_said() -> None:
    with pytest.raises(ConfigError, match="V100 has no published peak at bf16"):
        estimated_profile(FACTS, GPUS["V100"], "bf16", [1])
    sections = tuple(replace(s, flops_per_example=None) for s in FACTS.sections)
    with pytest.raises(ConfigError, match="FLOPs are not known"):
        estimated_profile(replace(FACTS, sections=sections), H100, "bf16", [1])
