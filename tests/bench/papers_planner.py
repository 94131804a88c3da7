"""Choices of tensor and pipeline size in the dissertation's chapter 4, by the planner's simulation.

Models by their shape on estimated A100s (``estimated_profile``), links by the nominal figures of a DGX:
300 GB/s within a server, and to other servers an adapter of 25 GB/s for each GPU. Messages of a stage take
the adapters of the GPUs that divide its matrices (4.4.1), sums over servers all of them, of 2 bytes an element.
Plans are those that Megatron-LM could run: each layer keeps its input alone and is computed again in its
backward, attention writes its scores, stages have equally many layers, and replicas share no state. Nothing is
fitted. What the text leaves open is in the authors' scripts (Megatron-LM, examples/sc21).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tests.bench.papers_others import TABLE_4_1, gpt
from tests.bench.papers_varuna import Row
from tests.builders import a_link

from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.estimate import estimated_profile
from spottrain.pricing.ranking.machine import MachineShape
from spottrain.pricing.ranking.throughput import like_devices
from spottrain.wire.model import MicrobatchProfile, Profile, RingProfile, SectionProfile
from spottrain_lab.planners.gpt import minibatch_flops
from spottrain_lab.planners.tensor import SIZES, tensor_parallel

GPUS_PER_SERVER = 8
ADAPTER_BYTES_PER_S = 25e9
"""Of the adapter that each GPU has to other servers."""
SERVERS = RingProfile(
    ranks=2,
    rings=1,
    between_vms=True,
    latency_s=2e-5,
    bandwidth_bytes_per_s=2 * GPUS_PER_SERVER * ADAPTER_BYTES_PER_S,
    on_device=True,
)
"""Sums over servers take all adapters. Gradients are counted as 4 bytes an element, and had 2 (--fp16)."""
HEADS = {1.7: 24, 3.6: 32, 7.5: 32, 18.4: 48, 39.1: 64, 76.1: 80, 145.6: 96, 310.1: 128, 529.6: 128}
MICROBATCHES = {1.7: 16, 3.6: 16, 7.5: 16, 18.4: 8, 39.1: 4, 76.1: 2, 145.6: 2, 310.1: 1, 529.6: 1}
"""Attention heads, and examples of a micro-batch, by billions of parameters (run_table_1.sh)."""
NO_LIMIT = 10**13
"""Bytes of a GPU's memory where a figure is of time alone."""
A100_BYTES = 80 * 10**9


def case(
    model: TransformerShape,
    gpus: int,
    minibatch_size: int,
    *,
    memory_bytes: int = NO_LIMIT,
    microbatch_size: int = 1,
) -> PlanInputs:
    """Return what a plan is made from: 1F1B, and state on the GPUs, as Megatron has."""
    facts = model.facts("gpt")
    gpu = catalogue().gpu_of("A100-80GB")
    assert gpu is not None
    profile = replace(
        estimated_profile(facts, gpu, "bf16", [microbatch_size]),
        within_vm=a_link(latency_s=5e-6, bytes_per_s=300e9),
        rings=(SERVERS,),
    )
    server = MachineShape(
        gpus=GPUS_PER_SERVER, gpu_memory_bytes=memory_bytes, is_gpu=True, memory_bytes=0
    )
    return PlanInputs(
        facts=facts,
        profile=profile,
        slots=like_devices(server, gpus // GPUS_PER_SERVER, 0.0),
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
        reduction="fast",
        precision="bf16",
        wire="bf16",
        state="device",
        schedule="1f1b",
        recompute=False,  # see checkpointed
    )


def checkpointed(profile: Profile) -> Profile:
    """Return the profile of a model that computes each layer again within its backward, and keeps what
    comes into it; the head is not computed again (4.5.1)."""

    def layer(one: SectionProfile) -> SectionProfile:
        return replace(
            one,
            backward_s=one.backward_s + one.recompute_s,
            saved_bytes=one.output_bytes // 2,  # 2 bytes an element
            backward_bytes=one.saved_bytes + one.backward_bytes,
        )

    def model(one: MicrobatchProfile) -> MicrobatchProfile:
        *layers, head = one.sections
        return replace(one, sections=(*map(layer, layers), head))

    return replace(profile, microbatches=tuple(map(model, profile.microbatches)))


def step_s(inputs: PlanInputs, size: int, depth: int) -> tuple[float, int]:
    """Return the time of a mini-batch with the best plan of a tensor and pipeline size, and
    its pipeline size; endless if there is none whose replicas have all of their state."""
    link = a_link(latency_s=1e-5, bytes_per_s=size * ADAPTER_BYTES_PER_S)
    inputs = replace(inputs, profile=replace(inputs.profile, between_vms=link))
    groups = tensor_parallel(inputs, size)
    assert groups is not None
    profile = checkpointed(groups.profile)
    plan = choose_plan(replace(groups, profile=profile, pipeline_depth=depth)).plan
    if plan is None or plan.shared_state:
        return float("inf"), 0
    return plan.predicted_step_s, plan.pipeline_depth


def order(times_s: Mapping[int, float]) -> str:
    """Return sizes by their time, each with how much longer it takes than the best."""
    best_s = min(times_s.values())
    return ", ".join(f"{n}: +{s / best_s - 1:.1%}" for n, s in times_s.items())


def figures() -> Iterator[Row]:
    """Yield Figures 4.13 to 4.15: the best of sizes that are given."""
    large = gpt(20480, 32, heads=128, keeps_scores=True)
    small = gpt(3840, 32, heads=32, keeps_scores=True)
    alone = {
        batch: {t: step_s(case(large, 64, batch), t, 64 // t)[0] for t in (2, 4, 8)}
        for batch in (32, 128)
    }
    rows = [
        (f"Fig. 4.13: 162B on 64 GPUs, batch {batch}: the best tensor size", "8", times_s)
        for batch, times_s in alone.items()
    ]
    batch = case(small, 64, 512)
    depths = {p: step_s(batch, 1, p)[0] for p in (2, 4, 8, 16, 32)}
    rows.append(("Fig. 4.14: 5.9B on 64 GPUs, batch 512: the best pipeline size", "2", depths))
    sizes = {t: step_s(batch, t, 1)[0] for t in (2, 4, 8)}
    rows.append(("Fig. 4.15: 5.9B on 64 GPUs, batch 512: the best tensor size", "2", sizes))
    for what, paper, times_s in rows:
        best = str(min(times_s, key=times_s.__getitem__))
        source, _, what = what.partition(": ")
        yield Row(
            source=f"PTD-P, {source}",
            what=what,
            kind="predicted",
            paper=paper,
            ours=best,
            why=order(times_s),
        )


def table_4_1() -> Iterator[Row]:
    """Yield what the planner chooses where Table 4.1 has the authors' choices."""
    for billions, hidden, layers, t, p, gpus, batch, measured in TABLE_4_1[
        :-1
    ]:  # the last takes minutes
        model = gpt(hidden, layers, heads=HEADS[billions], keeps_scores=True)
        together = MICROBATCHES[billions]
        inputs = case(model, gpus, batch, memory_bytes=A100_BYTES, microbatch_size=together)
        depths = [depth for depth in range(1, layers + 1) if layers % depth == 0]
        found = {size: min(step_s(inputs, size, depth) for depth in depths) for size in SIZES}
        size = min(found, key=lambda n: found[n][0])
        theirs_s, _ = step_s(inputs, t, p)
        rate = minibatch_flops(model, batch, recompute=True) / gpus / theirs_s
        yield Row(
            source="PTD-P, Table 4.1",
            what=f"{billions}B on {gpus} GPUs: tensor and pipeline size",
            kind="predicted",
            paper=f"{t}, {p}",
            ours=f"{size}, {found[size][1]}",
            why=f"theirs takes {theirs_s / found[size][0] - 1:+.1%}, at {rate / 1e12:.0f} TFLOP/s a "
            f"GPU, {measured} measured",
        )


def rows() -> Iterator[Row]:
    """Yield all."""
    yield from figures()
    yield from table_4_1()
