"""What tensor parallelism within VMs would cost: priced, not run.

Megatron's scheme as chapter 4 of Narayanan's dissertation has it: each layer's matrices are
split over t devices of one VM, which sum activations twice in its forward and twice in its
backward (4.2.3); a recomputed forward does so again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.flops import MODEL_PASSES
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.morphing.simulate.compute import Compute
from spottrain.wire.model import LinkProfile, Profile, SectionProfile
from spottrain.wire.plan import Slot

SIZES = (1, 2, 4, 8)
"""Devices that may share a layer."""
FORWARD_SUMS = 2
"""All-reduces of a layer's forward; its backward has as many."""
STATE_BYTES = 16
"""Of a parameter: its copy and gradient in 16 bits, 32 bits of itself and of two moments."""
STATE_SHARE = 0.5
"""Of a device's memory for state where activations take the rest: fitted to the choices of
table 4.1, all of which any share from 0.49 to 0.63 reproduces."""


def layer_elements(activation_elements: int, size: int) -> float:
    """Return what each device sends for a layer and micro-batch: 8bsh (t - 1) / t.

    Args:
        activation_elements: b * s * h: micro-batch, sequence length, hidden size.
        size: t, the devices that share the layer.
    """
    return 4 * FORWARD_SUMS * activation_elements * (size - 1) / size


def boundary_bytes(activation_bytes: int, size: int) -> float:
    """Return what each of t devices sends to the next stage: with scatter/gather 1/t.

    Without it each sends the whole activation, which all of them hold (4.4.1).
    """
    return activation_bytes / size


def sum_s(num_bytes: float, size: int, link: LinkProfile) -> float:
    """Return the time of a ring all-reduce over ``size`` devices."""
    hops = 2 * (size - 1)
    return hops * (link.latency_s + num_bytes / size / link.bandwidth_bytes_per_s)


def tensor_parallel(inputs: PlanInputs, size: int) -> PlanInputs | None:
    """Return the inputs of planning where ``size`` devices of a VM act as one.

    Times of sections are divided and their all-reduces added, so a section must be a layer
    of a transformer; what is spared or lost in matrices of another shape is not known. All
    that layers keep is taken to be divided too. Between VMs scatter/gather is used: the
    bytes of an activation once over the network, then gathered within the VM.

    Returns:
        None if no VM has so many devices.
    """
    if size == 1:
        return inputs
    devices = tuple(_joined(inputs.slots, size))
    if not devices:
        return None
    profile = inputs.profile
    link = profile.within_vm
    gather = (size - 1) / size / link.bandwidth_bytes_per_s
    between = profile.between_vms
    changed: Profile = replace(
        profile,
        microbatches=tuple(
            replace(one, sections=tuple(_shared(one.sections, size, link, inputs.compute)))
            for one in profile.microbatches
        ),
        between_vms=replace(
            between,
            bandwidth_bytes_per_s=1 / (1 / between.bandwidth_bytes_per_s + gather),
        ),
        optimizer_s_per_byte=profile.optimizer_s_per_byte / size,
        host_optimizer_s_per_byte=profile.host_optimizer_s_per_byte / size,
        upload_bytes_per_s=profile.upload_bytes_per_s * size,
        download_bytes_per_s=profile.download_bytes_per_s * size,
        context_bytes=profile.context_bytes * size,
    )
    return replace(inputs, slots=devices, profile=changed, previous=None)


def _joined(slots: Sequence[Device], size: int) -> Iterator[Device]:
    """Yield the devices of each VM in groups of ``size``, as one each."""
    in_order = sorted(slots, key=lambda device: device.slot)
    for vm_id, own in itertools.groupby(in_order, key=lambda d: d.slot.vm_id):
        devices = list(own)
        for index in range(len(devices) // size):
            group = devices[index * size : (index + 1) * size]
            yield replace(
                group[0],
                slot=Slot(vm_id=vm_id, index=index),
                speed=min(device.speed for device in group),
                memory_bytes=size * min(device.memory_bytes for device in group),
                host_memory_bytes=size * min(d.host_memory_bytes for d in group),
                locked_memory_bytes=size * min(d.locked_memory_bytes for d in group),
                usd_per_hour=sum(device.usd_per_hour for device in group),
            )


def _shared(
    sections: Sequence[SectionProfile], size: int, link: LinkProfile, compute: Compute
) -> Iterator[SectionProfile]:
    """Yield sections of which ``size`` devices have a part each. What leaves a stage is of the
    type that is summed: Megatron-LM computes in one."""
    outputs = [compute.sent_bytes(section) for section in sections]
    for section, output_bytes, input_bytes in zip(sections, outputs, [0, *outputs], strict=False):
        num_bytes = max(output_bytes, input_bytes)
        sums_s = FORWARD_SUMS * sum_s(num_bytes, size, link)
        yield replace(
            section,
            forward_s=section.forward_s / size + sums_s,
            recompute_s=section.recompute_s / size + sums_s,
            backward_s=section.backward_s / size + sums_s,
        )


def megatron_sizes(
    shape: TransformerShape, device_bytes: float, devices_per_vm: int
) -> tuple[int, int]:
    """Return tensor and pipeline size by the dissertation's takeaways 1 and 2 (4.3).

    Tensor parallelism up to the devices of a VM, as little as the model needs; then as few
    stages as it needs, of equally many layers.

    Args:
        shape: The model.
        device_bytes: Memory of a device; state gets ``STATE_SHARE`` of it.
        devices_per_vm: A power of two.

    Raises:
        PlanError: The model does not fit even with a layer a stage.
    """
    state_bytes = STATE_BYTES * shape.num_parameters
    size = 1
    while size < devices_per_vm and state_bytes / size > STATE_SHARE * device_bytes:
        size *= 2
    for stages in range(1, shape.layers + 1):
        fits = state_bytes / size / stages <= STATE_SHARE * device_bytes
        if shape.layers % stages == 0 and fits:
            return size, stages
    raise PlanError(
        f"a layer of {state_bytes / shape.layers:.3g} bytes of state does not fit on "
        f"{size} devices of {device_bytes:.3g} bytes; use larger ones"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCluster:
    """Servers of GPUs, by nominal figures."""

    flops_per_s: float
    """Of a GPU in a layer's matrix multiplications."""
    gpus_per_server: int
    within_bytes_per_s: float
    """Of a GPU to the others of its server."""
    between_bytes_per_s: float
    """Of a GPU to other servers."""


def iteration_s(
    model: TransformerShape,
    cluster: GpuCluster,
    *,
    size: int,
    stages: int,
    replicas: int,
    minibatch_size: int,
    microbatch_size: int = 1,
    chunks: int = 1,
) -> float:
    """Return the time of a mini-batch by the dissertation's equations, with recompute.

    Equation 4.1 with the sums of tensor parallelism added to each micro-batch's time, the
    messages of one micro-batch between stages, and the sum of gradients after it. An
    interleaved schedule shortens the bubble and sends more often.

    Args:
        model: Its layers are spread evenly.
        cluster: The GPUs.
        size: Of tensor parallelism, t.
        stages: p.
        replicas: d.
        minibatch_size: Examples, B; a multiple of ``replicas * microbatch_size``.
        microbatch_size: Examples, b.
        chunks: Of an interleaved schedule, v.

    Raises:
        PlanError: The mini-batch does not divide evenly.
    """
    count, rest = divmod(minibatch_size, replicas * microbatch_size)
    if rest:
        raise PlanError(
            f"minibatch_size must be a multiple of {replicas} replicas times "
            f"{microbatch_size} examples: got {minibatch_size}; change it"
        )
    gpus = cluster.gpus_per_server
    activation = microbatch_size * model.context * model.hidden
    layers = model.layers / stages
    passes = MODEL_PASSES + 1
    compute_s = passes * layers * model.layer_flops * microbatch_size
    compute_s += MODEL_PASSES * model.head_flops * microbatch_size / stages
    compute_s /= cluster.flops_per_s * size
    within = size <= gpus
    link = cluster.within_bytes_per_s if within else cluster.between_bytes_per_s
    # The recomputed forward sums again.
    sent = layer_elements(activation, size) * 1.5 * 2
    sums_s = layers * sent / link
    link = cluster.within_bytes_per_s
    if size * stages > gpus:
        link = cluster.between_bytes_per_s
    hop_s = 0.0
    if stages > 1:
        hop_s = 2 * chunks * boundary_bytes(2 * activation, size) / link
    each_s = compute_s + sums_s + hop_s
    gradient_bytes = 2 * model.num_parameters / size / stages
    link = cluster.within_bytes_per_s
    if size * stages * replicas > gpus:
        link = cluster.between_bytes_per_s
    reduce_s = 2 * (replicas - 1) / replicas * gradient_bytes / link
    return (count + (stages - 1) / chunks) * each_s + reduce_s
