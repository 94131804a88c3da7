"""What is said of other systems beside a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from spottrain.codec import from_data
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.workload import Workload
from spottrain.varuna_manager.offers.preview import workload_inputs
from spottrain_lab.planners.alternatives import Alternatives, alternatives_to

PROFILES = Path(__file__).resolve().parents[3] / "examples/profiles"


def alternatives(
    name: str,
    gpus: int,
    gpus_per_vm: int = 1,
    memory_bytes: int | None = None,
    **changes: object,
) -> Alternatives:
    text = (PROFILES / f"{name}.json").read_text()
    workload = from_data(Workload, json.loads(text))
    inputs = workload_inputs(workload, gpus, gpus_per_vm)
    inputs = replace(inputs, schedule="1f1b", recompute=False, **changes)  # type: ignore[arg-type]
    if memory_bytes is not None:
        slots = (replace(d, memory_bytes=memory_bytes) for d in inputs.slots)
        inputs = replace(inputs, slots=tuple(slots))
    choice = choose_plan(inputs)
    assert choice.plan is not None
    return alternatives_to(inputs, choice.plan)


def test_a_heavy_section_gets_replicas_of_its_own() -> None:
    """One section of 5 times the others' time; no device holds them all."""
    other = alternatives("uneven-sections", 7, memory_bytes=2_500_000_000)
    assert "-" in other.uneven
    assert other.uneven_gain > 0.02
    assert alternatives("compute-bound", 4, pipeline_depth=4).uneven == ""


def test_layers_are_shared_only_within_vms() -> None:
    other = alternatives("compute-bound", 8, 4, minibatch_size=64)
    assert [row.size for row in other.tensor] == [1, 2, 4]
    assert all(row.step_s for row in other.tensor)
