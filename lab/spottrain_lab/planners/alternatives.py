"""What Megatron and PipeDream would make of a plan: spottrain runs neither."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.choose import NOISE, choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.wire.model import SectionFacts
from spottrain.wire.plan import Plan
from spottrain_lab.planners.replication import Layer, ReplicatedPlan, replicate
from spottrain_lab.planners.tensor import SIZES, tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """The best plan with so many devices for every layer."""

    size: int
    shape: str
    """``PxD``, each stage of ``size`` devices; empty: there is none."""
    step_s: float | None
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """Other systems' plans for the same model and devices."""

    tensor: tuple[TensorRow, ...]
    """Megatron's; empty where no VM has several devices."""
    uneven: str
    """Replicas of each stage of PipeDream's best partition, such as ``15-1``; empty: none is
    faster than equal replication."""
    uneven_gain: float
    """By how much it is faster than the best with equal replication, both at full
    pipelines and with sums that overlap."""


def alternatives_to(inputs: PlanInputs, plan: Plan) -> Alternatives:
    """Return what other systems would make of the inputs that gave ``plan``."""
    uneven, gain = _uneven(inputs, plan)
    return Alternatives(tensor=tuple(_tensor_rows(inputs)), uneven=uneven, uneven_gain=gain)


def _tensor_rows(inputs: PlanInputs) -> Iterator[TensorRow]:
    if tensor_parallel(inputs, SIZES[1]) is None:
        return
    for size in SIZES:
        shared = tensor_parallel(inputs, size)
        if shared is None:
            continue
        if size > 1:  # of fewer, larger devices another depth is best
            shared = replace(shared, pipeline_depth=None)
        choice = choose_plan(shared)
        plan = choice.plan
        yield TensorRow(
            size=size,
            shape="" if plan is None else plan.shape,
            step_s=None if plan is None else plan.predicted_step_s,
            why_not=choice.why_not,
        )


def _uneven(inputs: PlanInputs, plan: Plan) -> tuple[str, float]:
    """Return the best partition with unequal replication, and its gain over an equal one.

    All devices are taken to be as fast as the profile's; of memory state alone counts,
    activations do not.

    Returns:
        Empty and 0 if it is no faster.
    """
    size = plan.microbatch_size
    layers = [
        Layer(
            name=str(section.index),
            time_s=section.forward_s
            + section.backward_s
            + (section.recompute_s if plan.recompute else 0.0),
            output_bytes=section.output_bytes,
            parameter_bytes=inputs.facts.sections[section.index].param_bytes,
            state_bytes=_state_bytes(
                inputs.facts.sections[section.index],
                optimizer=plan.state == "device" or not inputs.compute.on_gpu,
            ),
        )
        for section in inputs.profile.sections_at(size)
    ]
    memory_bytes = min(device.memory_bytes for device in inputs.slots)
    workers, count = len(inputs.slots), inputs.minibatch_size // size
    bandwidth = inputs.profile.between_vms.bandwidth_bytes_per_s

    def best(used: int, even: bool) -> ReplicatedPlan | None:
        try:
            return replicate(
                layers,
                used,
                bandwidth,
                inputs_per_update=count,
                memory_bytes=memory_bytes,
                even=even,
            )
        except PlanError:  # the layers' state alone does not fit
            return None

    uneven = best(workers, even=False)
    # A depth that does not divide the devices leaves some over.
    depths = range(1, min(workers, len(layers)) + 1)
    evens = [best(used, even=True) for used in {p * (workers // p) for p in depths}]
    even_s = min((even.microbatch_s for even in evens if even is not None), default=0.0)
    gain = 0.0 if uneven is None else even_s / uneven.microbatch_s - 1
    if uneven is None or gain <= NOISE:
        return "", 0.0
    return uneven.configuration, gain


def _state_bytes(section: SectionFacts, *, optimizer: bool) -> int:
    """Return what a device holds of a section: parameters, gradients, optimizer."""
    return 2 * section.param_bytes + optimizer * section.optimizer_bytes
