"""A small job, machines and offers to rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from tests.builders import (
    a_link,
    a_profile,
    an_offer,
    microbatch_profile,
    model_facts,
    section_facts,
    section_profile,
)

from spottrain.cloud.port.provider import Offer
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.pricing.ranking.machine import MachineShape
from spottrain.pricing.ranking.rank import Priced, RankingTerms
from spottrain.pricing.ranking.throughput import ThroughputCache

SECTIONS = 4
FACTS = model_facts(
    (
        section_facts(
            k,
            param_bytes=16 * 10**6,
            optimizer_bytes=32 * 10**6,
            activation_bytes=10**6,
        )
        for k in range(SECTIONS)
    ),
    num_parameters=4 * SECTIONS * 10**6,
    heldout_len=1,
)
PROFILE = a_profile(
    microbatch_profile(
        section_profile(k, forward_s=0.01, saved_bytes=10**7, output_bytes=10**6)
        for k in range(SECTIONS)
    ),
    device="V100-16GB",
    optimizer_s_per_byte=1e-11,
    within_vm=a_link(latency_s=1e-5, bytes_per_s=1e10),
    between_vms=a_link(),
)
JOB = PlanInputs(
    facts=FACTS,
    profile=PROFILE,
    slots=(),
    minibatch_size=16,
    microbatch_size=1,
    reduction="fast",
)
TERMS = RankingTerms(examples=1e6, max_vms=4)
THROUGHPUTS = ThroughputCache(JOB)
"""Of all tests: what was planned once is not planned again."""
MACHINE = MachineShape(gpus=1, gpu_memory_bytes=10**9)
TOO_SMALL = MachineShape(gpus=1, gpu_memory_bytes=10**7)


def offer(**changes: Any) -> Offer:
    some = an_offer(cloud="aws", zone="a", usd_per_hour=2.0, gpu_memory_bytes=10**9)
    return replace(some, **changes)


def priced(machine: MachineShape | None = MACHINE, **changes: Any) -> Priced:
    beside = {"losses_per_hour", "boot_s", "max_vms", "is_estimate", "is_stale"}
    own = {key: changes.pop(key) for key in beside & changes.keys()}
    return Priced(offer=offer(**changes), machine=machine, **own)


machines = st.builds(
    MachineShape,
    gpus=st.sampled_from([1, 2, 4]),
    gpu_memory_bytes=st.sampled_from([10**7, 10**8, 10**9]),
    speed=st.sampled_from([0.5, 1.0, 2.0]),
    network_bytes_per_s=st.sampled_from([None, 1e8, 1e10]),
)


@st.composite
def markets(draw: st.DrawFn) -> list[Priced]:
    """Offers in zones of their own, on a few kinds of machines."""
    kinds = draw(st.lists(machines, min_size=1, max_size=3))
    number = draw(st.integers(1, 8))
    return [
        priced(
            machine := draw(st.sampled_from(kinds)),
            zone=f"z{i}",
            gpus=machine.gpus,
            usd_per_hour=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
            spot=draw(st.booleans()),
            losses_per_hour=draw(st.sampled_from([0.0, 0.1, 3.0])),
            boot_s=draw(st.sampled_from([0.0, 300.0])),
        )
        for i in range(number)
    ]


terms = st.builds(
    RankingTerms,
    examples=st.sampled_from([1e3, 1e6]),
    max_vms=st.sampled_from([1, 3, 5]),
    max_usd_per_hour=st.sampled_from([None, 4.0]),
    morph_s=st.sampled_from([0.0, 30.0]),
    lag_steps=st.sampled_from([0.0, 50.0]),
    stored_bytes=st.just(1e10),
    storage_usd_per_gb_month=st.sampled_from([0.0, 0.1]),
    data_bytes=st.sampled_from([{}, {"gcp": 1e9}]),
)
