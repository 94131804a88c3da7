"""Step times of published runs beside what is estimated of them: docs/estimates.md.

Nothing in the estimates is fitted to these rows. ``expected`` is what was written down
before any of them was computed. Each is planned as it ran: pipelines at their published
depth, data parallel runs, FSDP too, as one stage, whatever memory that would take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from scripts import published_profiles
from tests.builders import LLAMA_2_7B

from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.profiles import on_network
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.estimate import estimated_profile
from spottrain.pricing.ranking.gpu_speed import link_of, machine_of, speed_ratio, work_of
from spottrain.pricing.ranking.machine import MachineShape
from spottrain.pricing.ranking.throughput import ThroughputCache, like_devices
from spottrain.varuna_manager.offers.models import ModelRequest, workload_of
from spottrain.varuna_manager.offers.preview import workload_inputs
from spottrain.wire.model import Precision
from spottrain_lab.planners.gpt import gpt_shape

GIB, ENDLESS_BYTES = 1 << 30, 1 << 50
SIZES = (None, 2, 4, 8)
TEN_GBIT_S = 1.25e9


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run."""

    name: str
    shape: TransformerShape
    gpu: str
    gpus: int
    minibatch_size: int
    step_s: float
    expected: tuple[float, float]
    """Of the estimated step time over the published one."""
    precision: Precision = "bf16"
    network_bytes_per_s: float = 0.0
    """Between any two GPUs: each counts as a VM. 0: what joins GPUs of a VM."""
    host_bytes: int = 0
    """Of one VM; 0: no limit."""
    microbatch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    depth: int = 1


def gpt(layers: int, hidden: int, heads: int) -> TransformerShape:
    """Return a GPT-2 of 1,024 tokens, its vocabulary padded."""
    return gpt_shape(layers=layers, hidden=hidden, heads=heads, vocabulary=50304, context=1024)


LLAMA_3_8B = replace(
    LLAMA_2_7B, key_value_heads=8, feed_forward=14336, vocabulary=128256, context=8192
)
VARUNA = {
    model.name.upper(): (model.shape, model.microbatch_size) for model in published_profiles.MODELS
}
TABLE_7 = {
    ("2.5B", 27, 2): 116.8,
    ("2.5B", 18, 3): 96.6,
    ("2.5B", 9, 7): 70.1,
    ("2.5B", 6, 10): 75.2,
    ("8.3B", 36, 3): 140.3,
    ("8.3B", 36, 2): 201.3,
    ("8.3B", 36, 1): 390.0,
    ("8.3B", 24, 4): 149.9,
    ("8.3B", 24, 2): 280.4,
    ("8.3B", 18, 6): 139.1,
    ("8.3B", 18, 4): 203.1,
    ("8.3B", 18, 3): 263.8,
    ("20B", 49, 6): 139.3,
}
"""Varuna (EuroSys 2022), table 7, seconds by model, depth and width; of 20B: table 4."""


def varuna(name: str, depth: int, width: int, step_s: float) -> Run:
    """Return a run of Varuna: VMs with one V100 (PCIe) each, recompute, mini-batches of 8192."""
    shape, microbatch_size = VARUNA[name]
    return Run(
        name=f"Varuna {name}, {depth}x{width}",
        shape=shape,
        gpu="V100-PCIE",
        gpus=depth * width,
        minibatch_size=8192,
        step_s=step_s,
        expected=(0.6, 1.0),
        precision="fp16",
        network_bytes_per_s=TEN_GBIT_S,
        host_bytes=112 * GIB,
        microbatch_sizes=(microbatch_size,),
        depth=depth,
    )


def llm_c(name: str, shape: TransformerShape, gpu: str, examples: int, step_s: float) -> Run:
    """Return a run of karpathy/llm.c: one machine of 8 GPUs; step times of its scripts."""
    return Run(
        name=f"llm.c GPT-2 {name}",
        shape=shape,
        gpu=gpu,
        gpus=8,
        minibatch_size=examples,
        step_s=step_s,
        expected=(0.8, 1.2),
    )


def torchtitan(
    name: str, gpu: str, gpus: int, batch: int, tokens: float, expected: tuple[float, float]
) -> Run:
    """Return a run of torchtitan: FSDP, tokens per second and GPU."""
    return Run(
        name=f"torchtitan Llama 3 8B, {name}",
        shape=LLAMA_3_8B,
        gpu=gpu,
        gpus=gpus,
        minibatch_size=batch * gpus,
        step_s=batch * LLAMA_3_8B.context / tokens,
        expected=expected,
    )


RUNS = (
    *(varuna(*key, step_s) for key, step_s in TABLE_7.items()),
    llm_c("124M, 8 A100", gpt(12, 768, 12), "A100-80GB", 512, 0.300),
    llm_c("350M, 8 A100", gpt(24, 1024, 16), "A100-80GB", 512, 0.820),
    llm_c("774M, 8 A100", gpt(36, 1280, 20), "A100-80GB", 512, 1.7),
    llm_c("1558M, 8 H100", gpt(48, 1600, 25), "H100", 1024, 2.80),
    torchtitan("64 A100", "A100-80GB", 64, 1, 2973, (0.8, 1.3)),
    # Its H100s have slower memory and 500 W instead of 700.
    torchtitan("8 H100 at 500 W", "H100", 8, 2, 5762, (0.6, 1.0)),
    torchtitan("8 H100 at 500 W, compiled", "H100", 8, 2, 6667, (0.7, 1.1)),
)


def estimate(run: Run) -> tuple[str, float]:
    """Return the plan for a run, and its estimated step time."""
    gpu = catalogue().gpus[run.gpu]
    facts = run.shape.facts(run.name)
    profile = estimated_profile(facts, gpu, run.precision, run.microbatch_sizes)
    has_pipeline = run.depth > 1
    machine = MachineShape(
        gpus=1,
        gpu_memory_bytes=gpu.memory_bytes if has_pipeline else ENDLESS_BYTES,
        is_gpu=True,
        memory_bytes=run.host_bytes,
    )
    link = link_of(gpu)
    assert link is not None
    if run.network_bytes_per_s:
        profile = on_network(profile, run.network_bytes_per_s)
    else:
        profile = replace(profile, between_vms=link)
    inputs = PlanInputs(
        facts=facts,
        profile=profile,
        slots=like_devices(machine, run.gpus, 1.0),
        minibatch_size=run.minibatch_size,
        microbatch_size=None,
        reduction="fast",
        precision=run.precision,
        wire="own" if run.precision == "fp32" else "bf16",
    )
    inputs = replace(inputs, pipeline_depth=run.depth, recompute=has_pipeline)
    if has_pipeline:
        inputs = replace(inputs, schedule="varuna")
    choice = choose_plan(inputs)
    assert choice.plan is not None, choice.why_not
    return choice.plan.shape, choice.plan.predicted_step_s


FLEETS = (
    ("aws", "p4d.24xlarge", 1),
    ("aws", "p4d.24xlarge", 8),
    ("aws", "p5.48xlarge", 1),
    ("aws", "p5.48xlarge", 8),
    ("gcp", "a3-highgpu-8g", 8),
    ("gcp", "a3-highgpu-8g", 16),
)


def on_fleet(cloud: str, instance_type: str, vms: int) -> Iterator[str]:
    """Yield plans of a Llama of 7 billion parameters, and the seconds of a mini-batch: through
    VMs' memory, by the catalogue's links, and there by 2, 4 and 8 GPUs that divide matrices."""
    workload = workload_of(ModelRequest.of("7B", TransformerShape.of_size(7e9, 4096)))
    kind = catalogue().types[cloud, instance_type]
    base = catalogue().gpu_of(workload.profile.device)
    assert base is not None
    speed = speed_ratio(kind.gpu, base, work_of(workload.facts, "bf16", workload.profile))
    assert speed is not None
    machine = machine_of(kind, speed)
    asked = replace(workload_inputs(workload, 1), wire="bf16", schedule="varuna")
    for one, size in ((replace(machine, gpu_link=None), None), *((machine, t) for t in SIZES)):
        throughputs = ThroughputCache(replace(asked, tensor_parallel=size))
        choice = choose_plan(throughputs.inputs_of(one, vms, 1.0))
        assert choice.plan is not None, choice.why_not
        yield f"{choice.plan.shape}: {choice.plan.predicted_step_s:.3g} s"


def main() -> None:
    """Print a row for each run, then for each fleet."""
    print("| run | plan | published | estimated | ratio | expected |")
    print("|---|---|---|---|---|---|")
    for run in RUNS:
        shape, step_s = estimate(run)
        low, high = run.expected
        print(
            f"| {run.name} | {shape} | {run.step_s:.3g} s | {step_s:.3g} s | "
            f"{step_s / run.step_s:.2f} | {low:g} to {high:g} |"
        )
    print("\n| VMs | 20 GB/s | links | t = 2 | t = 4 | t = 8 |\n|---|---|---|---|---|---|")
    for cloud, instance_type, vms in FLEETS:
        cells = " | ".join(on_fleet(cloud, instance_type, vms))
        print(f"| {vms} {instance_type} | {cells} |")


if __name__ == "__main__":
    main()
