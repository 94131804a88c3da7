"""What a plan sends from one zone to another in a mini-batch."""

from __future__ import annotations

from collections.abc import Mapping

from spottrain.wire import ModelFacts, Plan


def zone_bytes(plan: Plan, facts: ModelFacts, zones: Mapping[str, str]) -> int:
    """Return bytes per mini-batch that go from zone to zone, as the plan has it.

    Activations and their gradients between stages, and the ring all-reduce of each
    stage's gradients: ``2 (D - 1) / D`` times their size over every link of the ring.
    Hand-overs, tied parameters and messages of a few bytes are left out.

    Args:
        plan: Who computes what.
        facts: Of the model.
        zones: The zone of each VM.
    """
    if len({zones.get(slot.vm_id) for slot in plan.slots}) < 2:
        return 0
    return _activations(plan, facts, zones) + _gradients(plan, facts, zones)


def _crosses(plan: Plan, zones: Mapping[str, str], one: int, other: int) -> bool:
    ends = (plan.slots[one].vm_id, plan.slots[other].vm_id)
    return zones.get(ends[0]) != zones.get(ends[1])


def _activations(plan: Plan, facts: ModelFacts, zones: Mapping[str, str]) -> int:
    depth, runs = plan.pipeline_depth, plan.pipeline_depth * plan.chunks
    num_bytes = 0
    for replica in range(plan.data_parallel_width):
        nodes = plan.replica_bounds[replica + 1] - plan.replica_bounds[replica]
        examples = nodes * plan.microbatch_size
        for run in range(runs - 1):
            here, there = run % depth, (run + 1) % depth
            if _crosses(plan, zones, replica * depth + here, replica * depth + there):
                last = facts.sections[plan.stage_bounds[run + 1] - 1]
                num_bytes += 2 * examples * last.activation_bytes_per_example
    return num_bytes


def _gradients(plan: Plan, facts: ModelFacts, zones: Mapping[str, str]) -> int:
    depth, width = plan.pipeline_depth, plan.data_parallel_width
    num_bytes = 0
    for stage in range(depth if width > 1 else 0):
        size = sum(
            section.param_bytes
            if section.gradient_bytes is None
            else section.gradient_bytes
            for run in range(stage, depth * plan.chunks, depth)
            for section in facts.sections[
                plan.stage_bounds[run] : plan.stage_bounds[run + 1]
            ]
        )
        links = sum(
            _crosses(plan, zones, r * depth + stage, (r + 1) % width * depth + stage)
            for r in range(width)
        )
        num_bytes += links * (2 * (width - 1) * size // width)
    return num_bytes
