from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import (
    a_link,
    a_profile,
    microbatch_profile,
    model_facts,
    section_facts,
    section_profile,
)

from spottrain.codec import decode, from_data
from spottrain.errors import WireError
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.profiles import (
    BETWEEN_AS_WITHIN,
    SIZES_ENDED,
    WITHIN_AS_BETWEEN,
    assumes_links,
    assumes_links_within,
    check_profile,
    derive_profile,
    is_noisy,
    knows_groups,
    knows_sizes,
    on_links,
    on_network,
)
from spottrain.wire.model import (
    GroupProfile,
    LinkProfile,
    MicrobatchProfile,
    Profile,
    RingProfile,
    TaskOverheads,
    TiedParameter,
)

LINK = a_link(jitter=0.1)
OVERHEADS = TaskOverheads(forward_s=3e-4, recompute_s=1e-4, backward_s=2e-4, posting_s=5e-5)
PROFILE = a_profile(
    *(
        microbatch_profile(
            (
                replace(
                    section_profile(
                        index,
                        forward_s=0.1 * m,
                        backward_s=0.2 * m,
                        recompute_s=0.11 * m,
                        saved_bytes=100,
                        output_bytes=10,
                    ),
                    forward_spread=0.01,
                    backward_spread=0.02,
                )
                for index in range(2)
            ),
            m,
            overheads=OVERHEADS,
        )
        for m in (1, 2)
    ),
    device="cpu",
    optimizer_s_per_byte=1e-9,
    between_vms=LINK,
    rings=(
        RingProfile(
            ranks=2,
            rings=1,
            between_vms=True,
            latency_s=1e-3,
            bandwidth_bytes_per_s=1e9,
        ),
    ),
    task_overhead_s=1e-5,
)
PROFILE = replace(PROFILE, groups=(GroupProfile(size=2, microbatches=PROFILE.microbatches[1:]),))
FACTS = model_facts(
    (section_facts(i, param_bytes=1, optimizer_bytes=1, activation_bytes=1) for i in range(2)),
    heldout_len=1,
)


def changed(path: list[str | int], value: Any) -> Profile:
    """Return the profile with another value somewhere inside."""
    data = json.loads(json.dumps(asdict(PROFILE)))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    profile: Profile = from_data(Profile, data)
    return profile


def test_a_good_profile_passes() -> None:
    check_profile(PROFILE)
    check_profile(PROFILE, FACTS)


TIMES: list[tuple[list[str | int], str]] = [
    (["microbatches", 1, "sections", 0, key], f"microbatches[1].sections[0].{key}")
    for key in ("forward_s", "backward_s", "recompute_s")
]
TIMES.append(
    (
        ["groups", 0, "microbatches", 0, "sections", 1, "forward_s"],
        "groups[0].microbatches[0].sections[1].forward_s",
    )
)
BANDWIDTHS: list[tuple[list[str | int], str]] = [
    (["within_vm", "bandwidth_bytes_per_s"], "within_vm.bandwidth_bytes_per_s"),
    (["rings", 0, "bandwidth_bytes_per_s"], "rings[0].bandwidth_bytes_per_s"),
]
NUMBERS: list[tuple[list[str | int], str]] = [
    (["between_vms", "latency_s"], "between_vms.latency_s"),
    (["between_vms", "jitter"], "between_vms.jitter"),
    (["optimizer_s_per_byte"], "optimizer_s_per_byte"),
    (["task_overhead_s"], "task_overhead_s"),
    (["upload_bytes_per_s"], "upload_bytes_per_s"),
    (["host_optimizer_s_per_byte"], "host_optimizer_s_per_byte"),
    (["quantise_s_per_byte"], "quantise_s_per_byte"),
    (
        ["microbatches", 0, "overheads", "forward_s"],
        "microbatches[0].overheads.forward_s",
    ),
    (
        ["microbatches", 1, "overheads", "posting_s"],
        "microbatches[1].overheads.posting_s",
    ),
    (
        ["microbatches", 0, "sections", 1, "forward_spread"],
        "microbatches[0].sections[1].forward_spread",
    ),
]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(("path", "name"), TIMES + BANDWIDTHS)
def test_times_and_bandwidths_must_be_above_0(
    path: list[str | int], name: str, value: float
) -> None:
    with pytest.raises(PlanError) as refusal:
        check_profile(changed(path, value), source="a.json")

    bound = "at most 1e+" if value == math.inf else "above 0: got "
    assert str(refusal.value).startswith(f"a.json: {name} must be {bound}")
    assert f"got {value}" in str(refusal.value)


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
@pytest.mark.parametrize(("path", "name"), NUMBERS)
def test_other_numbers_must_not_be_negative(path: list[str | int], name: str, value: float) -> None:
    with pytest.raises(PlanError) as refusal:
        check_profile(changed(path, value))

    bound = "at most 1e+" if value == math.inf else "at least 0: got "
    assert f"the profile: {name} must be {bound}" in str(refusal.value)


@pytest.mark.parametrize("value", [1e7, 1e300, 10**400])
def test_a_time_that_no_clock_can_hold_is_refused(value: float) -> None:
    path: list[str | int] = ["microbatches", 0, "sections", 0, "forward_s"]
    with pytest.raises(PlanError, match=r"forward_s must be at most 1e\+06: got"):
        check_profile(changed(path, value))


SECTION = FACTS.sections[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sections": (replace(SECTION, param_bytes=-1), FACTS.sections[1])},
            "facts.sections[0].param_bytes must be 0 to 1e+18: got -1",
        ),
        ({"sections": (SECTION, SECTION)}, "facts.sections[1].index must be 1: got 0"),
        (
            {"tied": (TiedParameter(name="w", sections=(0, 9)),)},
            "facts.tied[0].sections must be some of the model's 2: got [0, 9]",
        ),
        (
            {"tied": (TiedParameter(name="w", sections=()),)},
            "facts.tied[0].sections must be some of the model's 2: got []",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as refusal:
        check_profile(PROFILE, replace(FACTS, **changes))
    assert message in str(refusal.value)


def test_a_time_that_is_missing_is_named() -> None:
    data = asdict(PROFILE)
    del data["microbatches"][0]["sections"][1]["backward_s"]

    with pytest.raises(WireError, match=r"microbatches\[0\].sections\[1\].backward_s"):
        decode(Profile, json.dumps(data))


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="fingerprint must be other"):
        check_profile(PROFILE, replace(FACTS, fingerprint="other"))
    with pytest.raises(PlanError, match="a model of 1 section, "):
        check_profile(PROFILE, replace(FACTS, sections=FACTS.sections[:1]))


@pytest.mark.parametrize(
    "microbatches",
    [(), PROFILE.microbatches[::-1], PROFILE.microbatches[:1] * 2],
)
def test_micro_batch_sizes_must_ascend(
    microbatches: tuple[MicrobatchProfile, ...],
) -> None:
    with pytest.raises(PlanError, match="ascending microbatch_size"):
        check_profile(replace(PROFILE, microbatches=microbatches))


def test_a_profile_that_was_not_measured_must_name_its_sources() -> None:
    with pytest.raises(PlanError, match="sources must say"):
        check_profile(replace(PROFILE, origin="written"))
    check_profile(replace(PROFILE, origin="written", sources=("a book",)))


@given(st.floats(0.01, 100.0))
def test_a_profile_can_be_derived_there_and_back(ratio: float) -> None:
    there = derive_profile(PROFILE, "other", ratio)
    back = derive_profile(there, "cpu", 1 / ratio)

    check_profile(there, FACTS)
    assert (there.origin, there.device) == ("derived", "other")
    assert there.sources == (f"derived: times of cpu (measured) / {ratio:g}",)
    assert (there.rings, there.between_vms) == (PROFILE.rings, PROFILE.between_vms)
    for one, two in zip(there.sections_at(2), PROFILE.sections_at(2), strict=True):
        assert one.forward_s * ratio == pytest.approx(two.forward_s)
        assert one.saved_bytes == two.saved_bytes
    for one, two in zip(back.sections_at(1), PROFILE.sections_at(1), strict=True):
        assert one.backward_s == pytest.approx(two.backward_s)


@pytest.mark.parametrize("ratio", [1e-300, 1e-9])
def test_a_ratio_that_makes_impossible_times_is_refused(ratio: float) -> None:
    with pytest.raises(PlanError, match=r"a ratio of .*forward_s must be at most"):
        derive_profile(PROFILE, "v100", ratio)


@pytest.mark.parametrize("ratio", [0.0, -1.0, math.nan, math.inf])
def test_a_ratio_must_be_above_0(ratio: float) -> None:
    with pytest.raises(PlanError, match=r"ratio must be above 0: got .*; give the new"):
        derive_profile(PROFILE, "other", ratio)


def test_another_network_carries_more_between_vms_and_as_much_within() -> None:
    there = on_network(PROFILE, 10 * PROFILE.between_vms.bandwidth_bytes_per_s)
    check_profile(there, FACTS)
    assert (there.origin, there.within_vm) == ("derived", PROFILE.within_vm)
    assert there.between_vms.latency_s == PROFILE.between_vms.latency_s
    for one, two in zip(there.rings, PROFILE.rings, strict=True):
        factor = 10 if two.between_vms else 1
        was = two.bandwidth_bytes_per_s
        assert one.bandwidth_bytes_per_s == pytest.approx(factor * was)
    assert "bytes/s between VMs, as published" in there.sources[-1]


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.nan, math.inf])
def test_a_network_that_cannot_be_is_refused(bandwidth: float) -> None:
    with pytest.raises(PlanError, match="a network of"):
        on_network(PROFILE, bandwidth)


def test_other_links_within_vms_leave_those_between_them() -> None:
    link = LinkProfile(latency_s=1e-6, bandwidth_bytes_per_s=3e11, on_devices=True)
    there = on_links(PROFILE, link)
    check_profile(there, FACTS)
    assert (there.origin, there.within_vm) == ("derived", link)
    assert there.between_vms == PROFILE.between_vms
    assert "3e+11 bytes/s within VMs" in there.sources[-1]
    with pytest.raises(PlanError, match="links of 0 bytes/s within VMs"):
        on_links(PROFILE, replace(link, bandwidth_bytes_per_s=0.0))


def test_links_that_were_not_measured_are_known_by_their_source() -> None:
    assert not assumes_links(PROFILE)
    assert assumes_links(replace(PROFILE, sources=(BETWEEN_AS_WITHIN,)))
    assert not assumes_links_within(PROFILE)
    assert assumes_links_within(replace(PROFILE, sources=(WITHIN_AS_BETWEEN,)))
    assert assumes_links_within(replace(PROFILE, origin="estimated"))


def test_a_profile_of_a_busy_machine_is_noisy() -> None:
    noisy = tuple(
        replace(section, forward_spread=0.5, backward_spread=0.4)
        for section in PROFILE.sections_at(1)
    )
    busy = (microbatch_profile(noisy),)

    assert not is_noisy(PROFILE)
    assert is_noisy(replace(PROFILE, microbatches=busy))


def test_sizes_larger_than_where_measuring_had_to_end_are_not_asked_for_again() -> None:
    ended = replace(PROFILE, sources=(SIZES_ENDED,))
    assert knows_sizes(PROFILE, (1, 2))
    assert not knows_sizes(PROFILE, (1, 2, 4))
    assert knows_sizes(ended, (1, 2, 4, 8))
    assert not knows_sizes(ended, (4,))  # a job that has settled on it needs it


def test_groups_are_measured_once_whatever_came_of_it() -> None:
    assert knows_groups(PROFILE, ())
    assert knows_groups(PROFILE, (2,))
    assert not knows_groups(PROFILE, (2, 4))
    assert knows_groups(replace(PROFILE, groups=(GroupProfile(size=4, microbatches=()),)), (4,))


def test_groups_must_be_of_ascending_sizes() -> None:
    two = GroupProfile(size=2, microbatches=())
    with pytest.raises(PlanError, match="groups must be of ascending size"):
        check_profile(replace(PROFILE, groups=(two, two)))
    with pytest.raises(PlanError, match=r"groups\[0\]\.size must be at least 2"):
        check_profile(replace(PROFILE, groups=(replace(two, size=1),)))


def test_what_was_measured_in_groups_says_nothing_of_a_faster_device() -> None:
    assert derive_profile(PROFILE, "gpu", 10.0).groups == ()
    assert on_network(PROFILE, 1e6).groups == PROFILE.groups


def test_overheads_of_tasks_stay_where_a_device_is_faster() -> None:
    derived = derive_profile(PROFILE, "gpu", 10.0)
    assert derived.overheads_at(1) == OVERHEADS


def test_one_overhead_holds_for_every_task_where_kinds_are_not_known() -> None:
    one = replace(PROFILE.microbatches[0], overheads=None)
    beside = replace(PROFILE, microbatches=(one,)).overheads_at(1)
    assert (beside.forward_s, beside.recompute_s, beside.backward_s) == (1e-5,) * 3
    assert beside.posting_s == 0.0
