"""A model and the machines to train it on, as published: what plans are made for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spottrain.codec import SCHEMA_VERSION
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.wire.model import ModelFacts, Precision, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its profile and the machines it runs on: equal VMs of one GPU."""

    sources: tuple[str, ...]
    """Sources of the numbers."""
    facts: ModelFacts
    profile: Profile
    minibatch_size: int
    gpu_memory_bytes: int
    usd_per_hour: float
    """Of one VM."""
    precision: Precision | None = "fp32"
    """Of the matrix multiplications, as in ``JobSpec``; ``None``: unknown."""
    is_gpu: bool = False
    """Whether workers know the two homes of committed state of a GPU."""
    host_memory_bytes: int = 0
    """Of one VM, beside its GPU's; 0: unknown, then it is no limit."""
    schema_version: int = SCHEMA_VERSION

    def plan_inputs(self, slots: Iterable[Device] = ()) -> PlanInputs:
        """Return what the plans of this workload are made from.

        It is no job: schedule, recompute, micro-batch size and how many slots divide matrices
        are left to the planner.
        """
        return PlanInputs(
            facts=self.facts,
            profile=self.profile,
            slots=tuple(slots),
            minibatch_size=self.minibatch_size,
            microbatch_size=None,
            reduction="fast",
            precision=self.precision or "fp32",
            tensor_parallel=None,
        )
