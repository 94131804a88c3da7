"""How fast GPUs are for a model: by measurements, else by their rooflines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import an_offer
from tests.unit.pricing.ranked import FACTS, PROFILE

from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.gpu_speed import (
    NARROW,
    SAVED_PASSES,
    TYPICAL_INTENSITY,
    WIDE,
    Work,
    example_s,
    gpu_speed,
    link_of,
    machine_as_offered,
    machine_of,
    measured_ratio,
    peak_flops,
    precisions,
    seconds,
    speed_ratio,
    work_of,
)
from spottrain.wire.model import Precision, Profile

KNOWN = catalogue()
V100, A100 = KNOWN.gpus["V100"], KNOWN.gpus["A100"]
SIGNED = (
    "B200",
    "H200",
    "H100",
    "H100-NVL",
    "H100-PCIE",
    "A100-80GB",
    "A100",
    "L40S",
    "V100",
    "A10G",
    "L4",
    "T4",
    "P100",
)
"""The order in which an expert would expect GPUs to train a GPT of 2.5 billion parameters."""


def gpt(layers: int, hidden: int, sequence: int, *, flash: bool = True, heads: int = 16) -> Work:
    """Return the work of a GPT in two bytes, as docs/pricing.md counts it."""
    layer = 24 * sequence * hidden**2 + 4 * sequence**2 * hidden
    head = 2 * sequence * hidden * 50304
    each = 34 + (0 if flash else 5 * heads * sequence / hidden)
    saved_bytes = layers * sequence * hidden * each + 6 * sequence * 50304
    return Work(3 * (layers * layer + head), SAVED_PASSES * saved_bytes, NARROW)


PUBLIC = {
    "GPT-2 124M": ("A100", "H100", gpt(12, 768, 1024), 463 / 218),
    "Llama 1.1B": ("A100", "H100", gpt(22, 2048, 2048), 42 / 24),
    "GPT-2 1.5B": ("H100", "H200", gpt(48, 1600, 1024), 49.9 / 46.8),
    "Llama 7B": ("A100-80GB", "H100", gpt(32, 4096, 4096), 9600 / 3700),
    "Llama 7B, H200": ("A100-80GB", "H200", gpt(32, 4096, 4096), 10471 / 3700),
    "BERT layer": ("V100", "A100-80GB", gpt(24, 1024, 128, flash=False), 136 / 64),
    "GPT-2 layer": ("V100", "A100-80GB", gpt(24, 1024, 512, flash=False), 53 / 36),
    "T5 encoder": ("V100", "A100-80GB", gpt(24, 1024, 512, flash=False), 56 / 38),
    "T5 decoder": ("V100", "A100-80GB", gpt(24, 1024, 512, flash=False), 47 / 32),
    "Megatron 1.7B": ("V100", "A100-80GB", gpt(24, 2304, 2048, flash=False), 137 / 39),
    "g4dn to g5": ("T4", "A10G", gpt(12, 768, 512, flash=False), 3.3),
    "g5 to g6e": ("A10G", "L40S", gpt(12, 768, 1024), 2.5),
}
"""Public throughputs, the second GPU's over the first's; sources in docs/pricing.md."""


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIE"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("V100-16GB", "V100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("a100-80gb", "A100-80GB"),
        ("Intel(R) Xeon(R) Processor, 1 thread", None),
    ],
)
def test_a_driver_s_name_means_a_gpu(device: str, gpu: str | None) -> None:
    found = KNOWN.gpu_of(device)
    assert (found and found.name) == gpu


def test_the_size_of_parameters_tells_the_precision() -> None:
    assert precisions(FACTS) == WIDE
    assert precisions(replace(FACTS, num_parameters=32 * 10**6)) == NARROW


def test_a_job_s_precision_comes_before_its_parameters() -> None:
    assert precisions(FACTS, "bf16") == ("bf16",)
    peaks = {
        name: peak_flops(KNOWN.gpus[name], FACTS, "fp16")
        for name in ("V100", "T4", "A10", "L4", "A100", "L40S", "H100-PCIE", "H100")
    }
    assert peaks == {
        "V100": 125e12,
        "T4": 65e12,
        "A10": 125e12,
        "L4": 121e12,
        "A100": 312e12,
        "L40S": 362.05e12,
        "H100-PCIE": 756.5e12,
        "H100": 989.5e12,
    }
    assert peak_flops(V100, FACTS) == 15.7e12
    assert peak_flops(V100, FACTS, "bf16") is None


def test_gpus_come_in_the_order_that_an_expert_would_sign() -> None:
    for work in (gpt(54, 1920, 1024, flash=False, heads=20), work_of(FACTS, "fp16")):
        each_s = [seconds(KNOWN.gpus[name], work) for name in SIGNED]
        assert None not in each_s
        assert each_s == sorted(each_s, key=lambda one: one or 0.0)


def test_in_fp32_an_l40s_is_no_faster_than_an_h100() -> None:
    work = work_of(FACTS)
    assert work.precisions == WIDE
    ratio = speed_ratio(KNOWN.gpus["L40S"], KNOWN.gpus["H100"], work)
    assert ratio is not None
    assert ratio < 1.0
    assert KNOWN.gpus["L40S"].peak_flops["fp32"] > KNOWN.gpus["H100"].peak_flops["fp32"]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_throughputs_differ_by_no_more_than_a_factor_of_two(name: str) -> None:
    slow, fast, work, public = PUBLIC[name]
    ratio = speed_ratio(KNOWN.gpus[fast], KNOWN.gpus[slow], work)
    assert ratio is not None
    assert 0.5 <= ratio / public <= 2.0


@given(st.sampled_from(SIGNED), st.sampled_from(SIGNED), st.floats(1e6, 1e12))
def test_a_ratio_lies_between_those_of_compute_and_of_memory(
    one: str, other: str, moved_bytes: float
) -> None:
    gpu, base = KNOWN.gpus[one], KNOWN.gpus[other]
    ratio = speed_ratio(gpu, base, Work(1e12, moved_bytes, NARROW))
    compute = speed_ratio(gpu, base, Work(1e12, 0.0, NARROW))
    assert ratio is not None
    assert compute is not None
    memory = gpu.memory_bytes_per_s / base.memory_bytes_per_s
    bounds = compute, memory * gpu.training_share / base.training_share
    assert min(bounds) * (1 - 1e-9) <= ratio <= max(bounds) * (1 + 1e-9)


def test_without_a_peak_or_against_a_cpu_there_is_no_ratio() -> None:
    work = work_of(FACTS)
    core = next(iter(KNOWN.cpus.values()))
    assert speed_ratio(V100, V100, work) == 1.0
    assert speed_ratio(KNOWN.gpus["RTX-PRO-4500"], V100, work) is None
    assert speed_ratio(V100, A100, work_of(FACTS, "bf16")) is None
    assert speed_ratio(core, V100, work) is None


def test_a_gpu_beyond_its_peak_shows_which_precision_it_computes_in() -> None:
    on_a100 = replace(PROFILE, device="NVIDIA A100-SXM4-40GB")
    assert flopping(0.12 * 19e12, on_a100).precisions == WIDE
    assert flopping(0.12 * 60e12, on_a100).precisions == ("tf32", "fp32")
    assert flopping(0.12 * 200e12, on_a100).precisions == NARROW
    assert flopping(0.12 * 60e12, PROFILE).precisions == NARROW  # a V100 has no TF32
    assert flopping(0.12 * 900e12, on_a100).precisions == WIDE  # cannot be


def flopping(flops: float, profile: Profile) -> Work:
    """Return the work of a model of so many FLOPs an example; it takes 0.12 s."""
    assert example_s(profile) == pytest.approx(0.12)
    each = int(flops / 3 / len(FACTS.sections))
    sections = tuple(replace(s, flops_per_example=each) for s in FACTS.sections)
    return work_of(replace(FACTS, sections=sections), "fp32", profile)


def test_what_a_forward_saves_is_what_crosses_the_memory_s_bus() -> None:
    work = flopping(1e12, PROFILE)
    assert work.moved_bytes == SAVED_PASSES * 4 * 10**7
    assert work.flops == pytest.approx(1e12)
    assert work_of(FACTS, "fp32", PROFILE).flops == TYPICAL_INTENSITY


def test_a_gpu_that_was_measured_is_as_fast_as_measured() -> None:
    slower = replace(
        PROFILE.microbatches[0],
        sections=tuple(
            replace(s, forward_s=0.1, backward_s=0.2) for s in PROFILE.microbatches[0].sections
        ),
    )
    on_t4 = replace(PROFILE, device="Tesla T4", microbatches=(slower,))
    t4 = KNOWN.gpus["T4"]
    assert measured_ratio(t4, PROFILE, (PROFILE, on_t4)) == pytest.approx(0.1)
    assert measured_ratio(A100, PROFILE, (PROFILE, on_t4)) is None


OWN = an_offer(
    cloud="ssh",
    region="ssh",
    zone="ssh",
    instance_type="host",
    gpus=2,
    gpu_memory_bytes=1,
)


@pytest.mark.parametrize(
    ("cloud", "kind", "device", "precision", "speed"),
    [
        ("aws", "p4d.24xlarge", "NVIDIA A100-SXM4-40GB", "fp32", 1.0),
        ("aws", "p3.2xlarge", "NVIDIA A100-SXM4-40GB", "fp32", 0.65),
        ("aws", "p3.2xlarge", "NVIDIA A100-SXM4-40GB", "fp16", 0.38),
        ("gcp", "a2-highgpu-1g", "Tesla V100-SXM2-16GB", "fp32", 1.55),
        ("gcp", "a2-highgpu-1g", "Intel(R) Xeon(R) Processor, 1 thread", "fp32", 1.0),
        ("local", "cpu", "NVIDIA A100-SXM4-40GB", "fp16", 1.0),
    ],
)
def test_gpus_of_clouds_have_the_ratio_of_rooflines_to_what_was_measured(
    cloud: str, kind: str, device: str, precision: Precision, speed: float
) -> None:
    offer = an_offer(cloud=cloud, instance_type=kind, gpu_memory_bytes=1)
    profile = replace(PROFILE, device=device)
    found = gpu_speed(offer, profile, FACTS, precision)
    assert found == pytest.approx(speed, rel=0.01)
    declared = replace(offer, gpu_speed=0.5)
    assert gpu_speed(declared, profile, FACTS) == 0.5


@pytest.mark.parametrize(
    ("gpu", "is_gpu", "memory_bytes", "speed"),
    [
        ("NVIDIA A100-SXM4-40GB", True, KNOWN.gpus["A100"].memory_bytes, 2.64),
        ("NVIDIA GeForce RTX 4090", True, 1, 1.0),
        ("", False, 1, 1.0),
    ],
)
def test_a_machine_of_the_users_is_what_its_gpus_are(
    gpu: str, is_gpu: bool, memory_bytes: int, speed: float
) -> None:
    offer = replace(OWN, gpu=gpu)
    profile = replace(PROFILE, device="Tesla V100-SXM2-16GB")
    machine = machine_as_offered(offer, 2, gpu_speed(offer, profile, FACTS, "fp16"))
    assert (machine.gpus, machine.is_gpu) == (2, is_gpu)
    assert machine.gpu_memory_bytes == memory_bytes
    assert machine.speed == pytest.approx(speed, rel=0.01)
    assert gpu_speed(replace(offer, gpu_speed=0.5), profile, FACTS) == 0.5


def test_a_machine_of_the_catalogue_is_as_the_planner_wants_it() -> None:
    kind = KNOWN.types["aws", "p4d.24xlarge"]
    machine = machine_of(kind, 2.5)
    assert (machine.gpus, machine.speed) == (8, 2.5)
    assert machine.gpu_memory_bytes == kind.gpu.memory_bytes
    assert machine.network_bytes_per_s == 400e9 / 8
    assert machine.gpu_link == link_of(kind.gpu)
    assert machine_of(KNOWN.types["gcp", "a2-highgpu-1g"], 1.0).gpu_link is None


@pytest.mark.parametrize(
    ("gpu", "measured_bytes_per_s"),
    [("A100", 235e9), ("H100", 370e9), ("B200", 721.8e9), ("A100-80GB-PCIE", 20e9)],
)
def test_links_carry_what_nccl_does(gpu: str, measured_bytes_per_s: float) -> None:
    """NCCL's ``src/graph/tuning.cc``, nccl-tests issues 212 and 178, nccl issue 1807."""
    link = link_of(KNOWN.gpus[gpu])
    assert link is not None
    assert link.on_devices
    assert link.bandwidth_bytes_per_s == pytest.approx(measured_bytes_per_s, rel=0.03)


def test_cores_have_no_link() -> None:
    assert all(link_of(core) is None for core in KNOWN.cpus.values())


def test_a_network_that_bursts_is_planned_at_its_baseline() -> None:
    kind = KNOWN.types["aws", "g5.xlarge"]
    assert kind.network_bytes_per_s == 10e9 / 8
    assert machine_of(kind, 1.0).network_bytes_per_s == 2.5e9 / 8
