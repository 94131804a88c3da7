"""A profile of a model that was never measured: its facts on the roofline of a GPU.

Forward and backward of each section take what ``gpu_speed.seconds`` says, whose figures are
in the catalogue with their sources. Whatever no facts tell is assumed below. How far such
a profile is from published runs: docs/estimates.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from spottrain.errors import ConfigError
from spottrain.morphing.simulate.compute import BUS_BYTES_PER_S
from spottrain.pricing.prices.catalogue import FactSource, GpuType
from spottrain.pricing.ranking.gpu_speed import (
    MEMORY_SHARE,
    SAVED_PASSES,
    TYPICAL_INTENSITY,
    Work,
    precisions,
    seconds,
)
from spottrain.wire.model import (
    AUTO_LOADER,
    LinkProfile,
    LoaderSpec,
    MicrobatchProfile,
    ModelFacts,
    Precision,
    Profile,
    SectionFacts,
    SectionProfile,
)

LAUNCH_S = 2e-4
"""Assumed least time of a section's forward: some 20 kernels that Python launches in 10 µs
each. A backward has twice as many."""
FORWARD_PASSES = 2.0
"""Of ``SAVED_PASSES`` those of a forward: each saved byte is written and read."""
AUTOCAST_SHARE = 0.5
"""Bytes of what a forward saves in two-byte types, over those in float32."""
_NO_GAIN = 0.01
ADAM_PASSES = 15.0
"""Bytes that an update moves, over those of the parameters: 28 for each of 4 bytes, and 32
of the undo copy."""
BETWEEN_VMS = LinkProfile(latency_s=5e-4, bandwidth_bytes_per_s=1.25e9)
"""Assumed where a machine's network is not published: 10 Gbit/s, 0.5 ms."""
WITHIN_VM = LinkProfile(latency_s=5e-5, bandwidth_bytes_per_s=20e9)
"""Assumed through a VM's memory; what goes from GPU to GPU takes ``gpu_speed.link_of``."""


def estimated_profile(
    facts: ModelFacts,
    gpu: GpuType,
    precision: Precision,
    microbatch_sizes: Sequence[int],
    loader: LoaderSpec = AUTO_LOADER,
) -> Profile:
    """Return the profile that a model is expected to have on a GPU.

    Args:
        facts: The model's.
        gpu: Of the catalogue.
        precision: Of the job's matrix multiplications.
        microbatch_sizes: Those to plan with, ascending.
        loader: Loader processes that the job asks for.

    Raises:
        ConfigError: The model's FLOPs, or the GPU's peak, are not known.
    """
    known = precisions(facts, precision)
    if any(section.flops_per_example is None for section in facts.sections):
        raise ConfigError(
            "the model's FLOPs are not known: its facts were written before they were counted; "
            "inspect it again"
        )
    if not gpu.compute_capability or seconds(gpu, Work(1.0, 0.0, known)) is None:
        raise ConfigError(
            f"{gpu.name} has no published peak at {' or '.join(known)}, so nothing can be "
            "estimated on it; take another GPU or precision"
        )
    narrow = precision != "fp32"
    microbatches = [
        MicrobatchProfile(
            microbatch_size=size,
            sections=tuple(_section(s, size, gpu, known, narrow) for s in facts.sections),
        )
        for size in microbatch_sizes
    ]
    return Profile(
        fingerprint=facts.fingerprint,
        device=gpu.name,
        software="not measured",
        microbatches=tuple(_worthwhile(microbatches)),
        optimizer_s_per_byte=ADAM_PASSES / (MEMORY_SHARE * gpu.memory_bytes_per_s),
        within_vm=WITHIN_VM,
        between_vms=BETWEEN_VMS,
        upload_bytes_per_s=BUS_BYTES_PER_S,
        download_bytes_per_s=BUS_BYTES_PER_S,
        loader=loader,
        origin="estimated",
        sources=rests_on(gpu, WITHIN_VM),
    )


def _worthwhile(microbatches: Sequence[MicrobatchProfile]) -> Iterator[MicrobatchProfile]:
    """Yield sizes up to the first than which no larger one takes less time an example."""
    each_s = [
        math.fsum(s.forward_s + s.backward_s for s in one.sections) / one.microbatch_size
        for one in microbatches
    ]
    for one, own_s in zip(microbatches, each_s, strict=True):
        yield one
        if own_s <= each_s[-1] * (1 + _NO_GAIN):
            return


def _section(
    section: SectionFacts, size: int, gpu: GpuType, known: tuple[str, ...], narrow: bool
) -> SectionProfile:
    flops = size * (section.flops_per_example or 0)
    saved_bytes = size * _saved_bytes(section, narrow)
    forward = Work(flops, FORWARD_PASSES * saved_bytes, known)
    backward = Work(2 * flops, (SAVED_PASSES - FORWARD_PASSES) * saved_bytes, known)
    forward_s = max(LAUNCH_S, seconds(gpu, forward) or 0.0)
    return SectionProfile(
        index=section.index,
        forward_s=forward_s,
        backward_s=max(2 * LAUNCH_S, seconds(gpu, backward) or 0.0),
        recompute_s=forward_s,
        saved_bytes=saved_bytes,
        output_bytes=size * section.activation_bytes_per_example,
        output_element_bytes=4,
        # As if a task needed as much for itself as it saves: more than any layer does.
        forward_bytes=saved_bytes,
        recompute_bytes=saved_bytes,
        backward_bytes=saved_bytes,
        update_bytes=section.optimizer_bytes,
    )


def _saved_bytes(section: SectionFacts, narrow: bool) -> int:
    saved = section.saved_bytes_per_example
    if saved is None:
        return round(3 * (section.flops_per_example or 0) / TYPICAL_INTENSITY / SAVED_PASSES)
    return round(AUTOCAST_SHARE * saved) if narrow else saved


def rests_on(gpu: GpuType, within_vm: LinkProfile | None) -> tuple[str, ...]:
    """Return what estimates on a GPU rest on, a line each.

    Args:
        gpu: Of the catalogue.
        within_vm: The estimated link within VMs; None: they have one GPU each.
    """
    share, training = gpu.share_source, gpu.training_source
    assert share is not None
    assert training is not None
    return (
        f"nothing was measured: the model's FLOPs and bytes on the roofline of {gpu.name}",
        f"{gpu.matmul_share:.0%} of its peak in matrix multiplications ({_short(share)})",
        f"{SAVED_PASSES:g} times what forwards save at {MEMORY_SHARE:.0%} of its bandwidth (assumed)",
        f"{gpu.training_share:.0%} of that roofline in whole steps ({_short(training)})",
        f"{_links(gpu, within_vm)}published networks",
    )


def _links(gpu: GpuType, within_vm: LinkProfile | None) -> str:
    if within_vm is None:
        return ""
    rate = f"{within_vm.bandwidth_bytes_per_s / 1e9:g} GB/s within VMs"
    if not within_vm.on_devices or gpu.link is None:
        return f"{rate} (assumed), "
    link = gpu.link
    return f"{rate}, {link.share:.0%} of {link.name} ({_short(link.share_source)}), "


def _short(source: FactSource) -> str:
    """Return a source's name without what it says in full."""
    return f"{re.split('[,:(]', source.title)[0].strip()}, {source.date}"
