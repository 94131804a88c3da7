from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.steps import FACTS, PROFILE

from spottrain.morphing.simulate.compute import (
    BUS_BYTES_PER_S,
    HOST_OPTIMIZER_S_PER_BYTE,
    Compute,
    host_update_times_s,
    min_update_s,
    update_s,
)
from spottrain.morphing.simulate.reducing import sections_at
from spottrain.wire.model import Precision, Profile, SectionFacts

sections = st.lists(
    st.builds(
        SectionFacts,
        index=st.just(0),
        param_bytes=st.integers(0, 10**9),
        optimizer_bytes=st.just(0),
        activation_bytes_per_example=st.just(0),
        gradient_bytes=st.none() | st.integers(0, 10**9),
    ),
    min_size=1,
    max_size=6,
)
speeds = st.sampled_from([0.0, 1e8, 1e10])
profiles = st.builds(
    lambda down, up, update: replace(
        PROFILE,
        download_bytes_per_s=down,
        upload_bytes_per_s=up,
        host_optimizer_s_per_byte=update,
    ),
    speeds,
    speeds,
    st.sampled_from([0.0, 1e-10, 1e-8]),
)
precisions: st.SearchStrategy[Precision] = st.sampled_from(["fp32", "bf16", "fp16"])


@given(sections, profiles, precisions)
def test_an_update_on_the_host_follows_all_downloads_and_overlaps_with_uploads(
    own: list[SectionFacts], profile: Profile, precision: Precision
) -> None:
    gpu = Compute(on_gpu=True, precision=precision)
    times_s = host_update_times_s(profile, own, gpu)
    down_s, updates_s, up_s = map(sum, zip(*times_s, strict=True))

    found_s = update_s(profile, own, "host", gpu)

    # Nothing goes up before one section is updated, nor is all there before the last is up.
    least_s = down_s + max(updates_s, up_s)
    assert found_s >= (down_s + max(updates_s + times_s[-1][2], up_s)) * (1 - 1e-9)
    assert found_s <= (down_s + updates_s + up_s) * (1 + 1e-9)
    if len(set(times_s)) == 1:
        _, update, upload = times_s[0]
        assert found_s == pytest.approx(least_s + min(update, upload))


@given(sections, profiles, st.data())
def test_downloads_overlap_with_what_works_on_the_sections_before(
    own: list[SectionFacts], profile: Profile, data: st.DataObject
) -> None:
    gpu = Compute(on_gpu=True)
    works = st.sampled_from([0.0, 0.01, 1.0, 100.0])
    beside_s = [data.draw(works) for _ in own]
    downloads_s = [down_s for down_s, _, _ in host_update_times_s(profile, own, gpu)]
    whole_s = update_s(profile, own, "host", gpu)

    found_s = update_s(profile, own, "host", gpu, beside_s)

    # What comes before the last section's is hidden at most, and by no more than there is.
    hidden_s = min(sum(downloads_s[1:]), sum(beside_s[:-1]))
    assert whole_s - hidden_s <= found_s + 1e-9
    assert found_s <= whole_s + 1e-9
    assert found_s >= min_update_s(profile, own, "host", gpu) - 1e-9
    if min(beside_s) == 100.0:
        assert found_s == pytest.approx(whole_s - sum(downloads_s[1:]))


@given(sections, profiles)
def test_an_update_on_the_device_goes_with_its_parameters(
    own: list[SectionFacts], profile: Profile
) -> None:
    gpu = Compute(on_gpu=True)
    total = sum(section.param_bytes for section in own)
    expected_s = profile.optimizer_s_per_byte * total
    assert update_s(profile, own, "device", gpu) == expected_s
    assert update_s(profile, own, "host", Compute()) == expected_s


def test_what_was_not_measured_is_assumed() -> None:
    gpu = Compute(on_gpu=True, precision="fp16")
    ((down_s, update, up_s),) = host_update_times_s(PROFILE, FACTS.sections[:1], gpu)
    assert down_s == 800 / BUS_BYTES_PER_S
    assert update == 800 * HOST_OPTIMIZER_S_PER_BYTE
    assert up_s == 400 / BUS_BYTES_PER_S


def test_what_autocast_does_not_convert_first_keeps_its_type() -> None:
    some = [
        replace(section, lowered_bytes=None if section.index else 200)
        for section in FACTS.sections[:2]
    ]
    half, full = Compute(precision="bf16"), Compute()
    assert (half.cast_bytes(some), full.cast_bytes(some)) == (100 + 400, 0)
    assert (half.working_bytes(some), full.working_bytes(some)) == (1100, 1600)


def test_only_exact_backwards_quantise() -> None:
    profile = replace(PROFILE, quantise_s_per_byte=0.01)
    assert sections_at(profile, 1, FACTS, "fast") == profile.sections_at(1)
    assert sections_at(PROFILE, 1, FACTS, "exact") == PROFILE.sections_at(1)
    first, *_ = sections_at(profile, 1, FACTS, "exact")
    assert first.backward_s == pytest.approx(2.0 + 8.0)
    assert first.forward_s == 1.0
