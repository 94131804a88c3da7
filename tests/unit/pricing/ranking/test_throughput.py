"""What fleets do: plans made once, and bounds on them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.builders import LLAMA_2_7B
from tests.unit.pricing.ranked import JOB, MACHINE, PROFILE, THROUGHPUTS, TOO_SMALL, machines

from spottrain.morphing.plan.choose import NOISE
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.estimate import WITHIN_VM, estimated_profile
from spottrain.pricing.ranking.gpu_speed import link_of, machine_of
from spottrain.pricing.ranking.machine import MachineShape
from spottrain.pricing.ranking.throughput import ThroughputCache
from spottrain.wire.model import Network

FOR_MONEY = ThroughputCache(replace(JOB, objective="examples_per_dollar"))


@given(machines, st.integers(1, 5), st.sampled_from([THROUGHPUTS, FOR_MONEY]))
def test_no_plan_beats_the_bounds(
    machine: MachineShape, vms: int, throughputs: ThroughputCache
) -> None:
    exact = throughputs.of(machine, vms)
    if exact.why_not:
        return
    tighter = throughputs.tighter_bound(machine, vms)
    best = throughputs.upper_bound(machine, vms)
    each = [p.examples_per_s / p.vms for p in (exact, tighter, best)]
    assert each[0] <= each[1] * (1 + 1e-9)
    assert each[1] <= each[2] * (1 + 1e-9)
    assert best.vms <= exact.vms <= vms


def test_a_fleet_is_planned_once() -> None:
    throughputs = ThroughputCache(JOB)
    first = throughputs.of(MACHINE, 2)
    assert throughputs.of(MACHINE, 2) is first


def test_faster_gpus_and_networks_train_more() -> None:
    slow, fast = (THROUGHPUTS.of(replace(MACHINE, speed=v), 2) for v in (1.0, 2.0))
    assert fast.examples_per_s > 1.5 * slow.examples_per_s
    narrow, wide = (THROUGHPUTS.of(replace(MACHINE, network_bytes_per_s=v), 4) for v in (1e7, 1e10))
    assert wide.examples_per_s > narrow.examples_per_s


def test_where_the_model_does_not_fit_it_says_why() -> None:
    throughput = THROUGHPUTS.of(TOO_SMALL, 4)
    assert throughput.why_not
    assert THROUGHPUTS.tighter_bound(TOO_SMALL, 4).why_not in ("", throughput.why_not)


def test_machines_that_a_plan_for_money_leaves_out_are_not_paid_for() -> None:
    slow_links = replace(MACHINE, network_bytes_per_s=1e6)
    assert FOR_MONEY.of(slow_links, 4).vms < 4
    assert THROUGHPUTS.of(slow_links, 4).vms == 4
    held = ThroughputCache(replace(JOB, objective="examples_per_dollar"), min_vms=3)
    assert held.of(slow_links, 4).vms >= 3


def test_all_that_vms_send_each_other_counts() -> None:
    throughputs = ThroughputCache(replace(JOB, schedule="varuna"))
    throughput = throughputs.of(MACHINE, 2)
    assert throughput.shape in ("1x2", "2x1")
    gradients, activations = 2 * 4 * 16 * 10**6, 2 * 16 * 10**6
    assert throughput.sent_bytes == (gradients if throughput.shape == "1x2" else activations)
    assert throughputs.of(replace(MACHINE, gpus=2), 1).sent_bytes == 0


def estimated(shape: TransformerShape, gpu: str, network: Network = "auto") -> PlanInputs:
    facts = shape.facts("estimated")
    return replace(
        JOB,
        facts=facts,
        profile=estimated_profile(facts, catalogue().gpus[gpu], "bf16", [1, 2]),
        minibatch_size=64,
        microbatch_size=None,
        precision="bf16",
        wire="bf16",
        schedule="varuna",
        network=network,
    )


SMALL = TransformerShape.of_size(1e8, 1024)


@given(
    st.sampled_from(["L4", "A100", "H100"]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 2),
    st.sampled_from([1, 2, 4]),
    st.lists(st.floats(1e9, 1e12), min_size=2, max_size=2).map(sorted),
)
def test_more_bandwidth_within_vms_makes_no_plan_slower(
    gpu: str, gpus: int, vms: int, size: int, rates: list[float]
) -> None:
    """For each number of GPUs that divide matrices: between these numbers a margin decides."""
    kind = catalogue().gpus[gpu]
    link = link_of(kind)
    assert link is not None
    throughputs = ThroughputCache(replace(estimated(SMALL, gpu), tensor_parallel=min(size, gpus)))
    steps_s = [
        throughputs.of(
            MachineShape(
                gpus=gpus,
                gpu_memory_bytes=kind.memory_bytes,
                is_gpu=True,
                network_bytes_per_s=1e9,
                gpu_link=replace(link, bandwidth_bytes_per_s=rate),
            ),
            vms,
        ).step_s
        for rate in rates
    ]
    assert steps_s[1] <= steps_s[0] * (1 + NOISE)


def test_matrices_are_divided_faster_over_nvlink_than_over_pcie() -> None:
    kind = catalogue().types["aws", "p5.48xlarge"]
    machine = machine_of(kind, 1.0)
    throughputs = ThroughputCache(replace(estimated(LLAMA_2_7B, "H100"), tensor_parallel=8))
    assert machine.gpu_link is not None
    nvlink, pcie = (
        throughputs.of(replace(machine, gpu_link=link), 1)
        for link in (machine.gpu_link, link_of(catalogue().gpus["H100-NVL"]))
    )
    assert nvlink.examples_per_s > 1.5 * pcie.examples_per_s


def test_only_links_that_were_not_measured_are_estimated() -> None:
    machine = machine_of(catalogue().types["aws", "p4d.24xlarge"], 1.0)
    assert THROUGHPUTS.profile_on([machine]).within_vm == PROFILE.within_vm
    found = ThroughputCache(estimated(SMALL, "A100")).profile_on([MACHINE, machine])
    assert found.within_vm == machine.gpu_link
    assert found.between_vms.bandwidth_bytes_per_s == machine.network_bytes_per_s
    through_memory = ThroughputCache(estimated(SMALL, "A100", "gloo")).profile_on([machine])
    assert through_memory.within_vm == WITHIN_VM
