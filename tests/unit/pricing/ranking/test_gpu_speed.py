"""Declared ratios between GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.pricing.ranked import FACTS, PROFILE

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.gpu_speed import (
    NARROW,
    WIDE,
    gpu_speed,
    machine_as_offered,
    machine_of,
    peak_flops,
    precisions,
    speed_ratio,
)
from spottrain.wire.model import Precision

KNOWN = catalogue()
V100, A100 = KNOWN.gpus["V100"], KNOWN.gpus["A100"]


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
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


def test_a_ratio_is_of_published_peaks_that_both_have() -> None:
    assert speed_ratio(A100, V100, WIDE) == pytest.approx(19.5 / 15.7)
    assert speed_ratio(A100, V100, NARROW) == pytest.approx(312 / 125)
    assert speed_ratio(KNOWN.gpus["H100"], A100, NARROW) == pytest.approx(989.5 / 312)
    assert speed_ratio(V100, V100, ()) == 1.0
    assert speed_ratio(KNOWN.gpus["RTX-PRO-4500"], V100, WIDE) is None


OWN = Offer(
    cloud="ssh",
    region="ssh",
    zone="ssh",
    instance_type="host",
    spot=True,
    usd_per_hour=1.0,
    observed_at_s=0.0,
    gpus=2,
    gpu_memory_bytes=1,
)


@pytest.mark.parametrize(
    ("cloud", "kind", "device", "precision", "speed"),
    [
        ("aws", "p4d.24xlarge", "NVIDIA A100-SXM4-40GB", "fp32", 1.0),
        ("aws", "p3.2xlarge", "NVIDIA A100-SXM4-40GB", "fp32", 15.7 / 19.5),
        ("aws", "p3.2xlarge", "NVIDIA A100-SXM4-40GB", "fp16", 125 / 312),
        ("gcp", "a2-highgpu-1g", "Tesla V100-SXM2-16GB", "fp32", 19.5 / 15.7),
        ("gcp", "a2-highgpu-1g", "Intel(R) Xeon(R) Processor, 1 thread", "fp32", 1.0),
        ("local", "cpu", "NVIDIA A100-SXM4-40GB", "fp16", 1.0),
    ],
)
def test_gpus_of_clouds_have_the_ratio_of_peaks_to_what_was_measured(
    cloud: str, kind: str, device: str, precision: Precision, speed: float
) -> None:
    offer = Offer(
        cloud=cloud,
        region="r",
        zone="z",
        instance_type=kind,
        spot=True,
        usd_per_hour=1.0,
        observed_at_s=0.0,
        gpus=1,
        gpu_memory_bytes=1,
    )
    profile = replace(PROFILE, device=device)
    assert gpu_speed(offer, profile, FACTS, precision) == pytest.approx(speed)
    declared = replace(offer, gpu_speed=0.5)
    assert gpu_speed(declared, profile, FACTS) == 0.5


@pytest.mark.parametrize(
    ("gpu", "is_gpu", "memory_bytes", "speed"),
    [
        ("NVIDIA A100-SXM4-40GB", True, KNOWN.gpus["A100"].memory_bytes, 312 / 125),
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
    assert machine.speed == pytest.approx(speed)
    assert gpu_speed(replace(offer, gpu_speed=0.5), profile, FACTS) == 0.5


def test_a_machine_of_the_catalogue_is_as_the_planner_wants_it() -> None:
    kind = KNOWN.types["aws", "p4d.24xlarge"]
    machine = machine_of(kind, V100, FACTS)
    assert machine is not None
    assert machine.gpus == 8
    assert machine.gpu_memory_bytes == kind.gpu.memory_bytes
    assert machine.network_bytes_per_s == 400e9 / 8
    narrow = machine_of(kind, V100, FACTS, "fp16")
    assert narrow is not None
    assert narrow.speed == pytest.approx(312 / 125)
    nameless = replace(kind, gpu=KNOWN.gpus["RTX-PRO-4500"])
    assert machine_of(nameless, V100, FACTS) is None
