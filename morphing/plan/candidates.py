"""The plans that a choice has considered; readers of them need not be able to choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spottrain.wire.model import Network, StateHome
from spottrain.wire.plan import ScheduleKind, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that was considered."""

    pipeline_depth: int
    data_parallel_width: int
    microbatch_size: int
    schedule: ScheduleKind
    recompute: bool
    chunks: int
    in_flight_bound: int | None
    unused_slots: int
    stage_bytes: int | None
    """Memory of its largest worker; ``None``: not computed."""
    device_bytes: int | None
    """Memory of its smallest device."""
    step_s: float | None
    """Predicted, or where ``why_not`` says "at least" a bound that was enough to rule
    it out; ``None`` if the candidate cannot run."""
    max_step_s: float | None
    """As ``Plan.predicted_max_s``."""
    examples_per_s: float | None
    usd_per_million_examples: float | None
    """``None`` where prices are not known."""
    why_not: str
    """Empty for the one that was chosen."""
    state: StateHome = "host"
    """Home of committed state of workers on GPUs."""
    host_stage_bytes: int | None = None
    """Of its largest worker in its VM's memory beside the device's; ``None``: not
    computed."""
    host_bytes: int | None = None
    """Of its smallest slot in its VM's memory; ``None``: not computed, 0: unknown."""
    update_s: float | None = None
    """Of the slowest worker, in ``step_s``; ``None``: not simulated."""
    network: Network = "auto"
    """What sums gradients over replicas of workers on GPUs, where that was chosen."""
    nccl_s: float | None = None
    """Time of the slowest stage's sum by NCCL; ``None``: it is no choice, or not
    simulated. So is the next one."""
    gloo_s: float | None = None
    segments: int = 1
    """As in ``Plan``."""
    shares_state: bool = False
    """Whether ranks in one VM divide their stage's committed state among them."""
    tensor_parallel: int = 1
    """Slots that divide the matrices of each stage."""
    tensor_times: Literal["measured", "derived"] | None = None
    """Whether sections were measured in groups of so many slots; ``None``: of one slot alone."""

    @property
    def shape(self) -> str:
        """For people, as ``Plan.shape``."""
        return shape_of(self.pipeline_depth, self.data_parallel_width, self.tensor_parallel)
