"""Values of our own classes, with defaults for what a test does not care about.

A field that is added or renamed changes this file, and the tests whose subject it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from spottrain.cloud.port.provider import LaunchRequest, Offer, Vm, VmState
from spottrain.manifest import FileRecord, Manifest
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.wire.messages import (
    CheckpointSaved,
    GenerationStarted,
    JobSpec,
    MinibatchCommitted,
    RunGeneration,
)
from spottrain.wire.model import (
    LinkProfile,
    MicrobatchProfile,
    ModelFacts,
    Profile,
    RingProfile,
    SectionFacts,
    SectionProfile,
    StateHome,
    TaskOverheads,
)
from spottrain.wire.plan import Plan, ScheduleKind, Slot

LLAMA_2_7B = TransformerShape(
    layers=32,
    hidden=4096,
    heads=32,
    key_value_heads=32,
    head_size=128,
    feed_forward=11008,
    is_gated=True,
    vocabulary=32000,
    context=4096,
)
MPT_7B = replace(
    LLAMA_2_7B,
    feed_forward=16384,
    is_gated=False,
    vocabulary=50368,
    context=2048,
    is_tied=True,
    has_positions=True,
    has_biases=True,
)


def slots_of(vm_ids: Iterable[str]) -> tuple[Slot, ...]:
    """Return a slot for each name: a VM's first where it stands first, then its next."""
    names = list(vm_ids)
    return tuple(
        Slot(vm_id=vm_id, index=names[:rank].count(vm_id)) for rank, vm_id in enumerate(names)
    )


def even_bounds(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total * part // parts for part in range(parts + 1))


def a_plan(
    depth: int = 1,
    width: int = 1,
    *,
    num_sections: int | None = None,
    stage_bounds: Sequence[int] | None = None,
    virtual_nodes: int | None = None,
    replica_bounds: Sequence[int] | None = None,
    microbatch_size: int = 1,
    slots: tuple[Slot, ...] | None = None,
    schedule: ScheduleKind | None = None,
    recompute: bool = True,
    chunks: int = 1,
    step_s: float = 1.0,
    in_flight_bound: int | None = None,
    state: StateHome = "host",
    segments: int = 1,
    peer_copies: int = 0,
    nodes_per_microbatch: tuple[int, ...] = (),
    tensor_parallel: int = 1,
    shared_state: Sequence[int] = (),
) -> Plan:
    """Return a plan with a VM for each rank, cut evenly where no bounds are given.

    Args:
        depth: Pipeline depth.
        width: Data-parallel width.
        num_sections: One for each run unless given.
        stage_bounds: Bounds of runs of sections.
        virtual_nodes: Of the mini-batch; as few as replicas may have unless given.
        replica_bounds: Bounds of replicas' virtual nodes.
        microbatch_size: Examples of a virtual node.
        slots: Of all ranks.
        schedule: ``varuna``, or ``interleaved`` with chunks, unless given.
        recompute: Whether forwards are computed again.
        chunks: Runs of sections that each stage has.
        step_s: Predicted time of a mini-batch.
        in_flight_bound: Micro-batches in flight at most.
        state: Where committed state lives.
        segments: In which each run is recomputed.
        peer_copies: Copies that other VMs keep.
        nodes_per_microbatch: Virtual nodes that replicas compute at once.
        tensor_parallel: Ranks that divide the matrices of a stage, whose slots are given.
        shared_state: Bytes of sections, by which ranks of a stage in one VM divide its state;
            where ranks divide matrices, equal ones by default.
    """
    runs, group = depth * chunks, depth if chunks > 1 else 1
    if stage_bounds is None:
        stage_bounds = even_bounds(runs if num_sections is None else num_sections, runs)
    if replica_bounds is None:
        nodes = width * group if virtual_nodes is None else virtual_nodes
        replica_bounds = [group * at for at in even_bounds(nodes // group, width)]
    if slots is None:
        slots = slots_of(f"vm{rank}" for rank in range(depth * width))
    if tensor_parallel > 1 and not shared_state:
        shared_state = (1,) * stage_bounds[-1]
    return Plan(
        pipeline_depth=depth,
        data_parallel_width=width,
        microbatch_size=microbatch_size,
        minibatch_size=microbatch_size * replica_bounds[-1],
        schedule=schedule or ("interleaved" if chunks > 1 else "varuna"),
        recompute=recompute,
        stage_bounds=tuple(stage_bounds),
        replica_bounds=tuple(replica_bounds),
        slots=slots,
        predicted_step_s=step_s,
        in_flight_bound=in_flight_bound,
        chunks=chunks,
        state=state,
        segments=segments,
        devices_per_stage_replica=tensor_parallel,
        peer_copies=peer_copies,
        nodes_per_microbatch=nodes_per_microbatch,
        shared_state=tuple(shared_state),
    )


def section_facts(
    index: int = 0,
    *,
    param_bytes: int = 4,
    optimizer_bytes: int = 8,
    activation_bytes: int = 0,
    gradient_bytes: int | None = None,
) -> SectionFacts:
    """Return facts about a section; ``activation_bytes`` of each example leave it."""
    return SectionFacts(
        index=index,
        param_bytes=param_bytes,
        optimizer_bytes=optimizer_bytes,
        activation_bytes_per_example=activation_bytes,
        gradient_bytes=gradient_bytes,
    )


def model_facts(sections: Iterable[SectionFacts] | None = None, **changes: Any) -> ModelFacts:
    """Return facts about a model, of one section unless they are given."""
    facts = ModelFacts(
        fingerprint="model",
        num_parameters=1,
        blocks="blocks",
        sections=(section_facts(),) if sections is None else tuple(sections),
        tied=(),
        dataset_len=1,
        heldout_len=0,
    )
    return replace(facts, **changes)


def section_profile(
    index: int = 0,
    *,
    forward_s: float = 1.0,
    backward_s: float | None = None,
    recompute_s: float | None = None,
    saved_bytes: int = 0,
    output_bytes: int = 0,
) -> SectionProfile:
    """Return a section's times: a backward takes two forwards unless it is given."""
    return SectionProfile(
        index=index,
        forward_s=forward_s,
        backward_s=2 * forward_s if backward_s is None else backward_s,
        recompute_s=forward_s if recompute_s is None else recompute_s,
        saved_bytes=saved_bytes,
        output_bytes=output_bytes,
    )


def microbatch_profile(
    sections: Iterable[SectionProfile],
    microbatch_size: int = 1,
    overheads: TaskOverheads | None = None,
) -> MicrobatchProfile:
    return MicrobatchProfile(
        microbatch_size=microbatch_size, sections=tuple(sections), overheads=overheads
    )


def a_link(
    *, latency_s: float = 1e-4, bytes_per_s: float = 1e9, jitter: float = 0.0
) -> LinkProfile:
    return LinkProfile(latency_s=latency_s, bandwidth_bytes_per_s=bytes_per_s, jitter=jitter)


def a_profile(
    *microbatches: MicrobatchProfile,
    fingerprint: str = "model",
    device: str = "device",
    optimizer_s_per_byte: float = 0.0,
    within_vm: LinkProfile | None = None,
    between_vms: LinkProfile | None = None,
    rings: tuple[RingProfile, ...] = (),
    task_overhead_s: float = 0.0,
    written: bool = False,
) -> Profile:
    """Return a profile with links as in ``a_link``; both are one where one is given.

    Args:
        microbatches: By ascending size; one section unless given.
        fingerprint: Of the model.
        device: That was measured.
        optimizer_s_per_byte: Of parameters.
        within_vm: Link between slots of a VM.
        between_vms: Link between VMs.
        rings: All-reduces.
        task_overhead_s: Of each task.
        written: Whether the user wrote it, which nothing measured.
    """
    profile = Profile(
        fingerprint=fingerprint,
        device=device,
        software="software",
        microbatches=microbatches or (microbatch_profile([section_profile()]),),
        optimizer_s_per_byte=optimizer_s_per_byte,
        within_vm=within_vm or between_vms or a_link(),
        between_vms=between_vms or within_vm or a_link(),
        rings=rings,
        task_overhead_s=task_overhead_s,
    )
    if written:
        return replace(profile, origin="written", sources=("a test",))
    return profile


def a_spec(**changes: Any) -> JobSpec:
    return replace(_SPEC, **changes)


_SPEC = JobSpec(
    name="job",
    entrypoint="train:job",
    seed=1,
    steps=10,
    minibatch_size=8,
    microbatch_size=2,
    reduction="fast",
    checkpoint_path="/checkpoints",
    checkpoint_every_steps=10,
    checkpoint_keep=2,
    lease_s=600.0,
    heartbeat_s=1.0,
)


def a_manifest(name: str, step: int, files: Sequence[FileRecord], **changes: Any) -> Manifest:
    """Return a checkpoint's manifest, of the sections that ``files`` hold."""
    manifest = Manifest(
        name=name,
        step=step,
        num_sections=1 + max(file.section for file in files),
        model_fingerprint="model",
        config_fingerprint="config",
        seed=1,
        minibatch_size=8,
        files=tuple(files),
    )
    return replace(manifest, **changes)


def an_offer(**changes: Any) -> Offer:
    return replace(_OFFER, **changes)


_OFFER = Offer(
    cloud="local",
    region="r",
    zone="z",
    instance_type="t",
    spot=True,
    usd_per_hour=1.0,
    observed_at_s=0.0,
    gpus=1,
    gpu_memory_bytes=1 << 30,
    gpu_speed=1.0,
)


def a_vm(vm_id: str, offer: Offer, **changes: Any) -> Vm:
    vm = Vm(
        vm_id=vm_id,
        job="job",
        intent="intent",
        state=VmState.RUNNING,
        offer=offer,
        private_address="10.0.0.1",
        launched_at_s=0.0,
    )
    return replace(vm, **changes)


def a_launch(offer: Offer, count: int = 1, **changes: Any) -> LaunchRequest:
    asked = LaunchRequest(
        token="token", job="job", intent="intent", offer=offer, count=count, lease_s=600.0
    )
    return replace(asked, **changes)


def a_run(
    plan: Plan, *, store: tuple[str, int] = ("127.0.0.1", 1), **changes: Any
) -> RunGeneration:
    """Return the command to train by ``plan``, without donors unless they are given."""
    host, port = store
    command = RunGeneration(
        generation=1,
        plan=plan,
        participants=plan.slots,
        store_host=host,
        store_port=port,
        checkpoint="",
        evaluate_first=False,
    )
    return replace(command, **changes)


def checkpoint_name(step: int, generation: int | None = None) -> str:
    """Return the name of a checkpoint: the first weights, or the first generation's."""
    number = min(step, 1) if generation is None else generation
    return f"step-{step}-g{number}-00000000"


def checkpoint_saved(step: int, generation: int | None = None) -> CheckpointSaved:
    return CheckpointSaved(name=checkpoint_name(step, generation), step=step)


def generation_started(
    step: int = 0, *, generation: int = 1, slot: int = 0, restored: bool = False
) -> GenerationStarted:
    return GenerationStarted(
        generation=generation,
        slot=slot,
        pid=1,
        step=step,
        outcome="restored" if restored else "same",
        sections_moved=0,
        sections_loaded=0,
    )


def minibatch_committed(
    step: int, *, sections: Iterable[int] = (0,), busy_s: float = 0.0, **changes: Any
) -> MinibatchCommitted:
    """Return a slot's report of a mini-batch, busy from its first task to its last."""
    report = MinibatchCommitted(
        generation=1,
        slot=0,
        step=step,
        sections=tuple(sections),
        loss=1.0,
        grad_norm=1.0,
        step_s=1.0,
        peak_bytes=1,
        busy_s=busy_s,
        tasks_s=busy_s,
    )
    return replace(report, **changes)
