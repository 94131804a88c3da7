"""Profiles for planning: checked before use, or derived for another device."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Literal

from spottrain.morphing.errors import PlanError
from spottrain.units import counted
from spottrain.wire.model import (
    LinkProfile,
    MicrobatchProfile,
    ModelFacts,
    Profile,
    RingProfile,
    SectionProfile,
)

BETWEEN_AS_WITHIN = "between_vms: taken from within_vm, for there was one VM"
WITHIN_AS_BETWEEN = "within_vm: taken from between_vms, for VMs had one slot each"
LINKS_ASSUMED = "links: assumed, for a process alone has nobody to send to"
SIZES_ENDED = "microbatches: larger ones take too long, or too much memory"

MAX_SPREAD = 0.25
"""Median spread of sections' times beyond which a profile is that of a busy machine."""

MAX_S = 1e6
"""Maximum time in a profile; longer ones would overflow the simulator's clock."""
MAX_BYTES = 1e18
"""Maximum of other numbers of a profile or a model."""

_TIME = re.compile("(?<!_per)_s$")
_SECTION_TIMES = ("forward_s", "backward_s", "recompute_s")
_MAY_BE_ZERO = (
    "optimizer_s_per_byte",
    "task_overhead_s",
    "upload_bytes_per_s",
    "download_bytes_per_s",
    "host_optimizer_s_per_byte",
    "quantise_s_per_byte",
    "context_bytes",
)


def check_profile(
    profile: Profile, facts: ModelFacts | None = None, source: str = "the profile"
) -> None:
    """Check that a profile can be planned with.

    Args:
        profile: From whatever source.
        facts: The model that it must belong to, if known.
        source: Its name in errors, such as its file.

    Raises:
        PlanError: Names the source, the first field that is wrong, and what it holds.
    """
    for field, value, least, above in _numbers(profile):
        good = value > least if above else value >= least
        most = MAX_S if _TIME.search(field) else MAX_BYTES
        if not good or value > most:  # so NaN is refused too
            lower = f"{'above' if above else 'at least'} {least}"
            raise PlanError(
                f"{source}: {field} must be {f'at most {most:g}' if good else lower}: "
                f"got {value}; calibrate again or fix the file"
            )
    sizes = profile.microbatch_sizes
    if not sizes or not _ascend(sizes):
        raise PlanError(
            f"{source}: microbatches must be of ascending microbatch_size: got "
            f"{list(sizes)}; calibrate again or fix the file"
        )
    groups = [group.size for group in profile.groups]
    if not _ascend(groups):
        raise PlanError(
            f"{source}: groups must be of ascending size: got {groups}; calibrate again or fix "
            "the file"
        )
    if profile.origin != "measured" and not profile.sources:
        raise PlanError(
            f"{source}: sources must say where the numbers of a profile that is "
            f"{profile.origin} are from: got none; add them"
        )
    for place, one in _every_microbatch(profile):
        indices = [section.index for section in one.sections]
        sections = facts.sections if facts else profile.microbatches[0].sections
        wanted = range(len(sections))
        if indices != list(wanted):
            raise PlanError(
                f"{source}: {place}.sections must be those of a model "
                f"of {counted(len(wanted), 'section')}, in order: got {indices}; calibrate again"
            )
    if facts is not None:
        _check_facts(facts, source)
        if profile.fingerprint != facts.fingerprint:
            raise PlanError(
                f"{source}: fingerprint must be {facts.fingerprint}, this model's: got "
                f"{profile.fingerprint}; it belongs to another model: calibrate again"
            )


def _ascend(numbers: Sequence[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


def _every_microbatch(profile: Profile) -> Iterator[tuple[str, MicrobatchProfile]]:
    """Yield (field, what was measured at a micro-batch size), alone and in groups."""
    for i, one in enumerate(profile.microbatches):
        yield f"microbatches[{i}]", one
    for g, group in enumerate(profile.groups):
        for i, one in enumerate(group.microbatches):
            yield f"groups[{g}].microbatches[{i}]", one


def _numbers(profile: Profile) -> Iterator[tuple[str, float, float, bool]]:
    """Yield (field, value, bound, whether it must be above the bound)."""
    for place, one in _every_microbatch(profile):
        yield f"{place}.microbatch_size", one.microbatch_size, 0, True
        for k, section in enumerate(one.sections):
            for name in _SECTION_TIMES:
                value = getattr(section, name)
                yield f"{place}.sections[{k}].{name}", value, 0, True
            for field in fields(section):
                if field.name.endswith(("_bytes", "_spread")):
                    value = getattr(section, field.name)
                    yield f"{place}.sections[{k}].{field.name}", value, 0, False
        if one.overheads is not None:
            for field in fields(one.overheads):
                value = getattr(one.overheads, field.name)
                yield f"{place}.overheads.{field.name}", value, 0, False
    for g, group in enumerate(profile.groups):
        yield f"groups[{g}].size", group.size, 2, False
    for name in _MAY_BE_ZERO:
        yield name, getattr(profile, name), 0, False
    links: Mapping[str, LinkProfile | RingProfile] = {
        "within_vm": profile.within_vm,
        "between_vms": profile.between_vms,
        **{f"rings[{i}]": ring for i, ring in enumerate(profile.rings)},
    }
    for place, link in links.items():
        yield f"{place}.latency_s", link.latency_s, 0, False
        bandwidth = link.bandwidth_bytes_per_s
        yield f"{place}.bandwidth_bytes_per_s", bandwidth, 0, True
        if isinstance(link, LinkProfile):
            yield f"{place}.jitter", link.jitter, 0, False
        else:
            yield f"{place}.ranks", link.ranks, 2, False
            yield f"{place}.rings", link.rings, 1, False


def _check_facts(facts: ModelFacts, source: str) -> None:
    """Check a model's facts, possibly written by hand, as ``check_profile`` does."""
    for k, section in enumerate(facts.sections):
        if section.index != k:
            raise PlanError(
                f"{source}: facts.sections[{k}].index must be {k}: got "
                f"{section.index}; inspect again or fix the file"
            )
        for field in fields(section):
            value = getattr(section, field.name)
            if value is not None and not 0 <= value <= MAX_BYTES:
                raise PlanError(
                    f"{source}: facts.sections[{k}].{field.name} must be 0 to "
                    f"{MAX_BYTES:g}: got {value}; inspect again or fix the file"
                )
    for k, tied in enumerate(facts.tied):
        known = set(range(len(facts.sections)))
        if not tied.sections or not known.issuperset(tied.sections):
            raise PlanError(
                f"{source}: facts.tied[{k}].sections must be some of the model's "
                f"{len(known)}: got {list(tied.sections)}; inspect again or fix the "
                "file"
            )


def assumes_links(profile: Profile) -> bool:
    """Return whether links between VMs are no more than assumed."""
    return BETWEEN_AS_WITHIN in profile.sources or LINKS_ASSUMED in profile.sources


def assumes_links_within(profile: Profile) -> bool:
    """Return whether links within VMs are no more than assumed."""
    unmeasured = {WITHIN_AS_BETWEEN, LINKS_ASSUMED}
    return profile.origin == "estimated" or not unmeasured.isdisjoint(profile.sources)


def knows_sizes(profile: Profile, sizes: Iterable[int]) -> bool:
    """Return whether measuring ``sizes`` again would give nothing new.

    What a profile does not know must be larger than where its measuring had to end.
    """
    known, wanted = set(profile.microbatch_sizes), set(sizes)
    missing = wanted - known
    ended = SIZES_ENDED in profile.sources and bool(known & wanted)
    return not missing or (ended and min(missing) > max(known))


def knows_groups(profile: Profile, sizes: Iterable[int]) -> bool:
    """Return whether measuring in groups of these sizes again would give nothing new."""
    return {*sizes} <= {group.size for group in profile.groups}


def is_noisy(profile: Profile) -> bool:
    """Return whether times varied so much that the machine must have been busy."""
    return spread_of(profile) > MAX_SPREAD


def remark(profile: Profile) -> str:
    """Return what to say of a profile beside its times; empty of one of a calm machine."""
    if not is_noisy(profile):
        return ""
    return (
        f"; the machine was busy: times vary by {spread_of(profile):.0%}, and predictions with them"
    )


def spread_of(profile: Profile) -> float:
    """Return by which share the times of sections varied, the median of all."""
    spreads = [
        spread
        for one in profile.microbatches
        for section in one.sections
        for spread in (section.forward_spread, section.backward_spread)
    ]
    return statistics.median(spreads)


def _derived(profile: Profile) -> Literal["derived", "estimated"]:
    """Return the origin of what is derived from a profile: an estimate remains one."""
    return "estimated" if profile.origin == "estimated" else "derived"


def derive_profile(profile: Profile, device: str, ratio: float) -> Profile:
    """Return the profile of a device that is ``ratio`` times as fast.

    Sections, quantising and the optimizer, which the device computes, take ``1 / ratio``
    of the time. Links, the bus, all-reduces, the overhead of tasks and the host's own
    optimizer stay. What was measured in groups is left out: sums are in it.

    Args:
        profile: Measured, usually.
        device: Name of the other device.
        ratio: Its speed over that of ``profile.device``.

    Raises:
        PlanError: The ratio is not above 0, or makes times that no profile may have.
    """
    if not 0 < ratio < math.inf:
        raise PlanError(f"ratio must be above 0: got {ratio}; give the new speed over the old")

    def scaled(section: SectionProfile) -> SectionProfile:
        times_s = {name: getattr(section, name) / ratio for name in _SECTION_TIMES}
        return replace(section, **times_s)

    source = f"derived: times of {profile.device} ({profile.origin}) / {ratio:g}"
    derived = replace(
        profile,
        device=device,
        microbatches=tuple(
            replace(one, sections=tuple(map(scaled, one.sections))) for one in profile.microbatches
        ),
        optimizer_s_per_byte=profile.optimizer_s_per_byte / ratio,
        quantise_s_per_byte=profile.quantise_s_per_byte / ratio,
        groups=(),
        origin=_derived(profile),
        sources=(*profile.sources, source),
    )
    check_profile(derived, source=f"a ratio of {ratio:g}")
    return derived


def on_network(profile: Profile, bandwidth_bytes_per_s: float) -> Profile:
    """Return the profile of VMs that are linked at another bandwidth.

    Links and rings between VMs scale with it; latencies and jitter stay.

    Args:
        profile: Measured, usually.
        bandwidth_bytes_per_s: Between two VMs, as published for their kind.

    Raises:
        PlanError: The bandwidth is not above 0, or more than any profile may have.
    """
    link = profile.between_vms
    ratio = bandwidth_bytes_per_s / link.bandwidth_bytes_per_s
    derived = replace(
        profile,
        between_vms=replace(link, bandwidth_bytes_per_s=bandwidth_bytes_per_s),
        rings=tuple(
            replace(ring, bandwidth_bytes_per_s=ring.bandwidth_bytes_per_s * ratio)
            if ring.between_vms
            else ring
            for ring in profile.rings
        ),
        origin=_derived(profile),
        sources=(
            *profile.sources,
            f"derived: {bandwidth_bytes_per_s:g} bytes/s between VMs, as published",
        ),
    )
    check_profile(derived, source=f"a network of {bandwidth_bytes_per_s:g} bytes/s")
    return derived


def on_links(profile: Profile, link: LinkProfile) -> Profile:
    """Return the profile of VMs whose devices are joined by other links.

    Args:
        profile: One that ``assumes_links_within``, so without rings within VMs.
        link: Between two devices of a VM.

    Raises:
        PlanError: The bandwidth is not above 0, or more than any profile may have.
    """
    rate = f"{link.bandwidth_bytes_per_s:g} bytes/s within VMs"
    derived = replace(
        profile,
        within_vm=link,
        origin=_derived(profile),
        sources=(*profile.sources, f"derived: {rate}, estimated of what joins GPUs"),
    )
    check_profile(derived, source=f"links of {rate}")
    return derived
